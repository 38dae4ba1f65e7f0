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

template <int Rows, bool kToCodes>
void multiply_quads(const uint8_t* a, int64_t a_stride, const int8_t* b, int64_t groups, const Sink& sink) {
  const int32_t* tile = sink.tile;
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i sums[Rows][2];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h)
      sums[r][h] = _mm256_load_si256(reinterpret_cast<const __m256i*>(tile + r * kPanel + 8 * h));

  int64_t g = 0;
  for (; g + 2 <= groups; g += 2, a += 2 * kGroup, b += 2 * kStep) {
    const __m256i w00 = load(b), w01 = load(b + 32), w10 = load(b + 64), w11 = load(b + 96);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const __m256i x0 = broadcast(a + r * a_stride), x1 = broadcast(a + r * a_stride + kGroup);
      const __m256i lane0 = _mm256_add_epi16(_mm256_maddubs_epi16(x0, w00), _mm256_maddubs_epi16(x1, w10));
      const __m256i lane1 = _mm256_add_epi16(_mm256_maddubs_epi16(x0, w01), _mm256_maddubs_epi16(x1, w11));
      accumulate(sums[r][0], _mm256_madd_epi16(lane0, ones));
      accumulate(sums[r][1], _mm256_madd_epi16(lane1, ones));
    }
  }
  if (g < groups) {
    const __m256i w0 = load(b), w1 = load(b + 32);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const __m256i x = broadcast(a + r * a_stride);
      accumulate(sums[r][0], _mm256_madd_epi16(_mm256_maddubs_epi16(x, w0), ones));
      accumulate(sums[r][1], _mm256_madd_epi16(_mm256_maddubs_epi16(x, w1), ones));
    }
  }
  finish<Rows, kToCodes>(sums, sink);
}

template <int Rows, bool kToCodes>
void multiply_words(const int16_t* a, int64_t a_stride, const int8_t* b, int64_t groups, const Sink& sink) {
  __m256i sums[Rows][2];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
  for (int64_t g = 0; g < groups; ++g, a += kGroup, b += kStep) {
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
      const __m256i w0 = load_widened(b + pair * 32), w1 = load_widened(b + pair * 32 + 16);
#pragma GCC unroll 6
      for (int r = 0; r < Rows; ++r) {
        const __m256i x = broadcast(a + r * a_stride + pair * 2);
        accumulate(sums[r][0], _mm256_madd_epi16(x, w0));
        accumulate(sums[r][1], _mm256_madd_epi16(x, w1));
      }
    }
  }
  finish<Rows, kToCodes>(sums, sink);
}

using MultiplyQuads = void (*)(const uint8_t*, int64_t, const int8_t*, int64_t, const Sink&);
using MultiplyWords = void (*)(const int16_t*, int64_t, const int8_t*, int64_t, const Sink&);
template <bool kToCodes>
constexpr MultiplyQuads kQuads[kQuadRows + 1] = {nullptr, multiply_quads<1, kToCodes>, multiply_quads<2, kToCodes>,
                                                 multiply_quads<3, kToCodes>, multiply_quads<4, kToCodes>};
template <bool kToCodes>
constexpr MultiplyWords kWords[kWordRows + 1] = {nullptr,
                                                 multiply_words<1, kToCodes>,
                                                 multiply_words<2, kToCodes>,
                                                 multiply_words<3, kToCodes>,
                                                 multiply_words<4, kToCodes>,
                                                 multiply_words<5, kToCodes>,
                                                 multiply_words<6, kToCodes>};

// The sink of one panel: codes if its epilogue and its width allow.
Sink sink_of(const Packed& packed, const Epilogue& ep, int64_t n, int64_t columns, int32_t* tile, Codes* codes) {
  const bool to_codes = columns == kPanel && prepare_codes(packed, ep, n, codes);
  return {tile, to_codes ? codes : nullptr, static_cast<uint8_t*>(ep.out) + n - ep.out_column, ep.out_stride};
}

// Starts a tile: zeros, and the products of what was cut off the weights of this panel. The list is read from packed
// bytes, so every index is checked.
void start_tile(const Packed& packed, int64_t panel, const uint8_t* a, int64_t a_stride, int64_t rows, int32_t* tile) {
  for (int64_t i = 0; i < kQuadRows * kPanel; i += 8)
    _mm256_store_si256(reinterpret_cast<__m256i*>(tile + i), _mm256_setzero_si256());
  if (packed.outlier_begin == nullptr) return;
  const int64_t end = packed.outlier_begin[panel + 1] < packed.outlier_count ? packed.outlier_begin[panel + 1]
                                                                             : packed.outlier_count;
  for (int64_t i = packed.outlier_begin[panel]; i < end; ++i) {
    const Outlier cut = packed.outliers[i];
    if (cut.k >= packed.k || cut.column >= kPanel) continue;
    for (int64_t r = 0; r < rows; ++r) {
      int32_t& sum = tile[r * kPanel + cut.column];
      sum = static_cast<int32_t>(static_cast<uint32_t>(sum) + static_cast<uint32_t>(cut.value * a[r * a_stride + cut.k]));
    }
  }
}

void run_quads(const Job& job) {
  const Packed& packed = *job.packed;
  alignas(32) int32_t tile[kQuadRows * kPanel];
  Codes codes;
  for (int64_t n = job.n_begin; n < job.n_end; n += kPanel) {
    const int8_t* b = packed.panel(n / kPanel) + job.group_begin * kStep;
    const int64_t columns = job.n_end - n < kPanel ? job.n_end - n : kPanel;
    Sink sink = sink_of(packed, *job.epilogue, n, columns, tile, &codes);
    const MultiplyQuads* kernels = sink.codes ? kQuads<true> : kQuads<false>;
    for (int64_t row = 0; row < job.m; row += kQuadRows) {
      const int64_t rows = job.m - row < kQuadRows ? job.m - row : kQuadRows;
      const uint8_t* a = job.a + row * job.a_stride;
      start_tile(packed, n / kPanel, a, job.a_stride, rows, tile);
      kernels[rows](a + job.group_begin * kGroup, job.a_stride, b, job.group_end - job.group_begin, sink);
      if (sink.codes == nullptr) store_panel(tile, row, rows, n, columns, packed, *job.epilogue);
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

void run_words(const Job& job) {
  const Packed& packed = *job.packed;
  const int64_t groups = job.group_end - job.group_begin;
  const int64_t depth = groups * kGroup;
  const int64_t stride = depth + 36;
  auto* wide = static_cast<int16_t*>(
      thread_scratch(Scratch::words, static_cast<size_t>(job.m * stride) * sizeof(int16_t)));
  for (int64_t row = 0; row < job.m; ++row)
    widen(job.a + row * job.a_stride + job.group_begin * kGroup, wide + row * stride, depth);
  alignas(32) int32_t tile[kWordRows * kPanel];
  Codes codes;
  for (int64_t n = job.n_begin; n < job.n_end; n += kPanel) {
    const int8_t* b = packed.panel(n / kPanel) + job.group_begin * kStep;
    const int64_t columns = job.n_end - n < kPanel ? job.n_end - n : kPanel;
    Sink sink = sink_of(packed, *job.epilogue, n, columns, tile, &codes);
    const MultiplyWords* kernels = sink.codes ? kWords<true> : kWords<false>;
    for (int64_t row = 0; row < job.m; row += kWordRows) {
      const int64_t rows = job.m - row < kWordRows ? job.m - row : kWordRows;
      kernels[rows](wide + row * stride, stride, b, groups, sink);
      if (sink.codes == nullptr) store_panel(tile, row, rows, n, columns, packed, *job.epilogue);
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
