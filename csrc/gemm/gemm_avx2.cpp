// AVX2 without a dot product instruction, exact over all 8-bit codes. Two forms of weights (kernel.h):
//
//   quads   vpmaddubsw of two successive groups of k, added in 16 bits, then widened once by vpmaddwd with ones:
//           five instructions for 64 products. The packed weights are such that no 16-bit lane overflows.
//   words   vpmaddwd of weights widened to 16 bits as they are loaded and activations widened before:
//           four instructions for 32 products, for any weights.
#include "gemm/kernels.h"

#if defined(__x86_64__)
#include "gemm/store_avx2.h"

namespace zeropoint::gemm {
namespace {

constexpr int64_t kStep = kGroup * kPanel;  // bytes of a panel for one group of k
constexpr int64_t kQuadRows = 4;
constexpr int64_t kWordRows = 6;

inline __m256i broadcast(const void* four_bytes) {
  int32_t bits;
  std::memcpy(&bits, four_bytes, sizeof bits);
  return _mm256_set1_epi32(bits);
}

inline __m256i load(const int8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

inline __m256i load_widened(const int8_t* from) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// sum += products. The empty statement keeps the compiler from adding the products of two steps to each other first:
// that would save nothing and cost more registers than there are.
inline void accumulate(__m256i& sum, __m256i products) {
  sum = _mm256_add_epi32(sum, products);
  __asm__("" : "+x"(sum));
}

// Where the sums of a tile go: as they are to `tile`, or, with `codes`, to rows of a whole panel of `out`.
struct Sink {
  int32_t* tile;
  const Codes* codes;
  uint8_t* out;
  int64_t out_stride;
};

template <int Rows, bool kToCodes>
inline __attribute__((always_inline)) void finish(__m256i (&sums)[Rows][2], const Sink& sink) {
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
    // One row after the other: prepared side by side they would push the sums out of their registers.
    __asm__ volatile("" : "+x"(sums[r][0]), "+x"(sums[r][1]) : : "memory");
    if constexpr (kToCodes) {
      store_codes(sums[r], *sink.codes, sink.out + r * sink.out_stride);
    } else {
      _mm256_store_si256(reinterpret_cast<__m256i*>(sink.tile + r * kPanel), sums[r][0]);
      _mm256_store_si256(reinterpret_cast<__m256i*>(sink.tile + r * kPanel + 8), sums[r][1]);
    }
  }
}

template <class Code, int kRows>
struct Tile {
  const Code* a;  // rows a_stride apart, or, walked, each where `rows` says
  int64_t a_stride;
  const Code* rows[kRows];
  const int64_t* segments;  // where the codes of a row stand, from its beginning
  int64_t segment_count, segment_codes;
  const int8_t* b;

  Tile(const Job& job, const Code* from, int64_t stride)
      : a(from), a_stride(stride), segments(nullptr), segment_count(1), b(nullptr) {
    segment_codes = (job.group_end - job.group_begin) * kGroup;
    if (job.walk) segments = job.walk->segments, segment_count = job.walk->count, segment_codes = job.walk->run;
  }
  // Moves to rows [row, row + count) of the job.
  void move(const Job& job, const Code* from, int64_t row, int64_t count) {
    a = from + row * a_stride;
    for (int64_t r = 0; job.walk && r < count; ++r) rows[r] = from + job.walk->rows[row + r];
  }
};
using QuadTile = Tile<uint8_t, kQuadRows>;
using WordTile = Tile<int16_t, kWordRows>;

template <int Rows, bool kToCodes, bool kWalked>
void multiply_quads(const QuadTile& t, const Sink& sink) {
  const uint8_t* rows[Rows];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) rows[r] = kWalked ? t.rows[r] : t.a + r * t.a_stride;
  const int8_t* b = t.b;
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i sums[Rows][2];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h)
      sums[r][h] = _mm256_load_si256(reinterpret_cast<const __m256i*>(sink.tile + r * kPanel + 8 * h));

  const int64_t segments = kWalked ? t.segment_count : 1;
  for (int64_t segment = 0; segment < segments; ++segment) {
    int64_t at = kWalked ? t.segments[segment] : 0;
    const int64_t end = at + t.segment_codes;
    for (; at + 2 * kGroup <= end; at += 2 * kGroup, b += 2 * kStep) {
      const __m256i w00 = load(b), w01 = load(b + 32), w10 = load(b + 64), w11 = load(b + 96);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const __m256i x0 = broadcast(rows[r] + at), x1 = broadcast(rows[r] + at + kGroup);
        const __m256i lane0 = _mm256_add_epi16(_mm256_maddubs_epi16(x0, w00), _mm256_maddubs_epi16(x1, w10));
        const __m256i lane1 = _mm256_add_epi16(_mm256_maddubs_epi16(x0, w01), _mm256_maddubs_epi16(x1, w11));
        accumulate(sums[r][0], _mm256_madd_epi16(lane0, ones));
        accumulate(sums[r][1], _mm256_madd_epi16(lane1, ones));
      }
    }
    if (!kWalked && at < end) {
      const __m256i w0 = load(b), w1 = load(b + 32);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const __m256i x = broadcast(rows[r] + at);
        accumulate(sums[r][0], _mm256_madd_epi16(_mm256_maddubs_epi16(x, w0), ones));
        accumulate(sums[r][1], _mm256_madd_epi16(_mm256_maddubs_epi16(x, w1), ones));
      }
    }
  }
  finish<Rows, kToCodes>(sums, sink);
}

template <int Rows, bool kToCodes, bool kWalked>
void multiply_words(const WordTile& t, const Sink& sink) {
  const int16_t* rows[Rows];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) rows[r] = kWalked ? t.rows[r] : t.a + r * t.a_stride;
  const int8_t* b = t.b;
  __m256i sums[Rows][2];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
  const int64_t segments = kWalked ? t.segment_count : 1;
  for (int64_t segment = 0; segment < segments; ++segment) {
    int64_t at = kWalked ? t.segments[segment] : 0;
    const int64_t end = at + t.segment_codes;
    for (; at < end; at += kGroup, b += kStep) {
#pragma GCC unroll 2
      for (int pair = 0; pair < 2; ++pair) {
        const __m256i w0 = load_widened(b + pair * 32), w1 = load_widened(b + pair * 32 + 16);
#pragma GCC unroll 6
        for (int r = 0; r < Rows; ++r) {
          const __m256i x = broadcast(rows[r] + at + pair * 2);
          accumulate(sums[r][0], _mm256_madd_epi16(x, w0));
          accumulate(sums[r][1], _mm256_madd_epi16(x, w1));
        }
      }
    }
  }
  finish<Rows, kToCodes>(sums, sink);
}

// By the rows of a tile.
using MultiplyQuads = void (*)(const QuadTile&, const Sink&);
using MultiplyWords = void (*)(const WordTile&, const Sink&);
template <bool kToCodes, bool kWalked>
struct Kernels {
  static constexpr MultiplyQuads kQuads[kQuadRows + 1] = {
      nullptr, multiply_quads<1, kToCodes, kWalked>, multiply_quads<2, kToCodes, kWalked>,
      multiply_quads<3, kToCodes, kWalked>, multiply_quads<4, kToCodes, kWalked>};
  static constexpr MultiplyWords kWords[kWordRows + 1] = {nullptr,
                                                          multiply_words<1, kToCodes, kWalked>,
                                                          multiply_words<2, kToCodes, kWalked>,
                                                          multiply_words<3, kToCodes, kWalked>,
                                                          multiply_words<4, kToCodes, kWalked>,
                                                          multiply_words<5, kToCodes, kWalked>,
                                                          multiply_words<6, kToCodes, kWalked>};
};

const MultiplyQuads* quads(bool to_codes, bool walked) {
  if (walked) return to_codes ? Kernels<true, true>::kQuads : Kernels<false, true>::kQuads;
  return to_codes ? Kernels<true, false>::kQuads : Kernels<false, false>::kQuads;
}

const MultiplyWords* words(bool to_codes, bool walked) {
  if (walked) return to_codes ? Kernels<true, true>::kWords : Kernels<false, true>::kWords;
  return to_codes ? Kernels<true, false>::kWords : Kernels<false, false>::kWords;
}

// The sink of one panel: codes if its epilogue and its width allow.
Sink sink_of(const Packed& packed, const Epilogue& ep, int64_t n, int64_t columns, int32_t* tile, Codes* codes) {
  const bool to_codes = columns == kPanel && prepare_codes(packed, ep, n, codes);
  return {tile, to_codes ? codes : nullptr, static_cast<uint8_t*>(ep.out) + n - ep.out_column, ep.out_stride};
}

// Starts a tile: zeros, and the products of what was cut off the weights of this panel. The list is read from packed
// bytes, so every index is checked.
void start_tile(const Job& job, int64_t panel, int64_t row, int64_t rows, int32_t* tile) {
  const Packed& packed = *job.packed;
  for (int64_t i = 0; i < kQuadRows * kPanel; i += 8)
    _mm256_store_si256(reinterpret_cast<__m256i*>(tile + i), _mm256_setzero_si256());
  if (packed.outlier_begin == nullptr) return;
  const int64_t end = packed.outlier_begin[panel + 1] < packed.outlier_count ? packed.outlier_begin[panel + 1]
                                                                             : packed.outlier_count;
  for (int64_t i = packed.outlier_begin[panel]; i < end; ++i) {
    const Outlier cut = packed.outliers[i];
    if (cut.k >= packed.k || cut.column >= kPanel) continue;
    const int64_t k = job.walk ? job.walk->segments[cut.k / job.walk->run] + cut.k % job.walk->run : cut.k;
    for (int64_t r = 0; r < rows; ++r) {
      const int32_t code = job.a[(job.walk ? job.walk->rows[row + r] : (row + r) * job.a_stride) + k];
      int32_t& sum = tile[r * kPanel + cut.column];
      sum = static_cast<int32_t>(static_cast<uint32_t>(sum) + static_cast<uint32_t>(cut.value * code));
    }
  }
}

void run_quads(const Job& job) {
  const Packed& packed = *job.packed;
  alignas(32) int32_t sums[kQuadRows * kPanel];
  Codes codes;
  const uint8_t* a = job.a + job.group_begin * kGroup;
  QuadTile tile(job, a, job.a_stride);
  for (int64_t n = job.n_begin; n < job.n_end; n += kPanel) {
    tile.b = packed.panel(n / kPanel) + job.group_begin * kStep;
    const int64_t columns = job.n_end - n < kPanel ? job.n_end - n : kPanel;
    Sink sink = sink_of(packed, *job.epilogue, n, columns, sums, &codes);
    const MultiplyQuads* kernels = quads(sink.codes != nullptr, job.walk != nullptr);
    for (int64_t row = 0; row < job.m; row += kQuadRows) {
      const int64_t rows = job.m - row < kQuadRows ? job.m - row : kQuadRows;
      tile.move(job, a, row, rows);
      start_tile(job, n / kPanel, row, rows, sums);
      kernels[rows](tile, sink);
      if (sink.codes == nullptr) store_panel(sums, row, rows, n, columns, packed, *job.epilogue);
      sink.out += rows * sink.out_stride;
    }
  }
}

void widen(const uint8_t* from, int16_t* to, int64_t count) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  for (; i < count; ++i) to[i] = from[i];
}

// The rows of a job that are not walked, widened.
const int16_t* widened(const Job& job, int64_t stride) {
  const int64_t depth = (job.group_end - job.group_begin) * kGroup;
  auto* wide = static_cast<int16_t*>(
      thread_scratch(Scratch::words, static_cast<size_t>(job.m * stride) * sizeof(int16_t)));
  for (int64_t row = 0; row < job.m; ++row)
    widen(job.a + row * job.a_stride + job.group_begin * kGroup, wide + row * stride, depth);
  return wide;
}

void run_words(const Job& job) {
  const Packed& packed = *job.packed;
  const int64_t stride = (job.group_end - job.group_begin) * kGroup + 36;
  const int16_t* a = job.walk ? reinterpret_cast<const int16_t*>(job.a) : widened(job, stride);
  alignas(32) int32_t sums[kWordRows * kPanel];
  Codes codes;
  WordTile tile(job, a, stride);
  for (int64_t n = job.n_begin; n < job.n_end; n += kPanel) {
    tile.b = packed.panel(n / kPanel) + job.group_begin * kStep;
    const int64_t columns = job.n_end - n < kPanel ? job.n_end - n : kPanel;
    Sink sink = sink_of(packed, *job.epilogue, n, columns, sums, &codes);
    const MultiplyWords* kernels = words(sink.codes != nullptr, job.walk != nullptr);
    for (int64_t row = 0; row < job.m; row += kWordRows) {
      const int64_t rows = job.m - row < kWordRows ? job.m - row : kWordRows;
      tile.move(job, a, row, rows);
      kernels[rows](tile, sink);
      if (sink.codes == nullptr) store_panel(sums, row, rows, n, columns, packed, *job.epilogue);
      sink.out += rows * sink.out_stride;
    }
  }
}

}  // namespace

void run_avx2(const Job& job) {
  if (job.packed->form == Form::quads)
    run_quads(job);
  else
    run_words(job);
}

}  // namespace zeropoint::gemm
#endif
