// AVX2 without a dot product instruction, exact over all 8-bit codes. Two forms of weights (kernel.h):
//
//   quads   vpmaddubsw of two successive groups of k, added in 16 bits, then widened once by vpmaddwd with ones:
//           five instructions for 64 products. The packed weights are such that no 16-bit lane overflows.
//   words   vpmaddwd of weights widened to 16 bits as they are loaded and activations widened before:
//           four instructions for 32 products, for any weights.
#include "gemm/kernels.h"

#if defined(__x86_64__)
#include "gemm/store_avx2.h"
#include "gemm/words_avx2.h"

namespace zeropoint::gemm {
namespace {

constexpr int64_t kStep = kGroup * kPanel;  // bytes of a panel for one group of k
constexpr int64_t kQuadRows = 4;
constexpr int64_t kFewRows = 8;     // for fewer of them outliers do not pay
constexpr int64_t kQuadBlock = 56;  // rows whose outliers are added together
constexpr int64_t kWordRows = 6;
constexpr int64_t kCrossedRows = 4;
constexpr int64_t kWeightsAhead = 2048;  // bytes that are prefetched where few rows make little of the weights
constexpr int64_t kCrossedLeast = 64;  // codes of a row, and columns: from there on its sum of products is worth it

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

// Where the sums of a tile go: as they are to `tile`, or, with `codes`, to rows of 16 codes of `out`.
struct Sink {
  const Columns* start;  // what sums start from
  int32_t* tile;
  const Codes* codes;
  uint8_t* out;
  int64_t out_stride;
};

template <int Rows, bool kToCodes>
inline __attribute__((always_inline)) void finish(__m256i (&sums)[Rows][2], const Sink& sink) {
  if constexpr (kToCodes) {
#pragma GCC unroll 3
    for (int r = 0; r < Rows; r += 2) {
      const int second = r + 1 < Rows ? r + 1 : r;  // an odd row at the end is stored twice
      // Two rows after the others: prepared side by side they would push the sums out of their registers.
      __asm__ volatile("" : "+x"(sums[r][0]), "+x"(sums[r][1]) : : "memory");
      store_codes(sums[r], sums[second], *sink.codes, sink.out + r * sink.out_stride, (second - r) * sink.out_stride);
    }
  } else {
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(sink.tile + r * kPanel), sums[r][0]);
      _mm256_store_si256(reinterpret_cast<__m256i*>(sink.tile + r * kPanel + 8), sums[r][1]);
    }
  }
}

// The rows of a job from some row on, and a panel of weights.
template <class Code>
struct Operands {
  const Code* a;           // rows a_stride apart, or, walked, `offsets` from here
  int64_t a_stride;
  const int64_t* offsets;
  const int64_t* segments;  // where the codes of a walked row stand, from its beginning
  int64_t segment_count, segment_codes;
  const int8_t* b = nullptr;
  const int32_t* row_products = nullptr;

  Operands(const Job& job, const Code* from, int64_t stride) : a(from), a_stride(stride) {
    offsets = job.walk ? job.walk->rows : nullptr;
    segments = job.walk ? job.walk->segments : nullptr;
    segment_count = job.walk ? job.walk->count : 1;
    segment_codes = job.walk ? job.walk->run : (job.group_end - job.group_begin) * kGroup;
  }

  Operands from_row(int64_t row) const {
    Operands rest = *this;
    if (offsets) rest.offsets += row;
    else rest.a += row * a_stride;
    if (row_products) rest.row_products += row;
    return rest;
  }

  template <bool kWalked>
  const Code* row(int64_t r) const {
    return kWalked ? a + offsets[r] : a + r * a_stride;
  }
};
using Quads = Operands<uint8_t>;
using Words = Operands<int16_t>;

template <int Rows, bool kToCodes, bool kWalked>
void multiply_quads(const Quads& t, const Sink& sink) {
  const uint8_t* rows[Rows];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) rows[r] = t.row<kWalked>(r);
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

template <int Rows, bool kToCodes, bool kWalked, int kHalves>
inline __attribute__((always_inline)) void multiply_words_tile(const Words& t, const Sink& sink) {
  const int16_t* rows[Rows];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) rows[r] = t.row<kWalked>(r);
  const int8_t* b = t.b;
  __m256i sums[Rows][2];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) sums[r][h] = sink.start->half[h];
  const int64_t segments = kWalked ? t.segment_count : 1;
  for (int64_t segment = 0; segment < segments; ++segment) {
    int64_t at = kWalked ? t.segments[segment] : 0;
    const int64_t end = at + t.segment_codes;
    const auto add_pair = [&](int64_t k) __attribute__((always_inline)) {
      const __m256i w0 = load_widened(b);
      const __m256i w1 = kHalves == 2 ? load_widened(b + 16) : w0;
#pragma GCC unroll 6
      for (int r = 0; r < Rows; ++r) accumulate_words<kHalves>(sums[r], rows[r] + k, w0, w1);
      b += kStep / 2;
    };
    for (; at + kGroup <= end; at += kGroup) {
      if (!kWalked && Rows > 2) _mm_prefetch(t.a + Rows * (t.a_stride + at), _MM_HINT_T0);  // of the next rows
      if (Rows <= 2) _mm_prefetch(b + kWeightsAhead, _MM_HINT_T0);
      add_pair(at);
      add_pair(at + 2);
    }
    if (kWalked && at < end) add_pair(at);
  }
  finish<Rows, kToCodes>(sums, sink);
}

// The same with half the multiplications (kernel.h), for rows that are not walked.
template <int Rows, bool kToCodes>
inline __attribute__((always_inline)) void multiply_crossed_tile(const Words& t, const Sink& sink) {
  const int8_t* b = t.b;
  __m256i sums[Rows][2];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h)
      sums[r][h] = _mm256_sub_epi32(sink.start->half[h], _mm256_set1_epi32(t.row_products[r]));
  for (int64_t at = 0; at < t.segment_codes; at += kGroup, b += kStep) {
    const __m256i w01[2] = {load_widened(b), load_widened(b + 16)};
    const __m256i w23[2] = {load_widened(b + 32), load_widened(b + 48)};
    _mm_prefetch(t.a + Rows * (t.a_stride + at), _MM_HINT_T0);  // of the next rows
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) accumulate_crossed(sums[r], t.a + r * t.a_stride + at, w01, w23);
  }
  finish<Rows, kToCodes>(sums, sink);
}

template <int Rows, bool kToCodes>
void multiply_crossed(const Words& all, const Sink& sink, int64_t tiles) {
  Words t = all;
  Sink to = sink;
  for (; tiles > 0; --tiles, t = t.from_row(Rows), to.out += Rows * to.out_stride)
    multiply_crossed_tile<Rows, kToCodes>(t, to);
}

// `tiles` times so many rows; more than one of them only as codes.
template <int Rows, bool kToCodes, bool kWalked, int kHalves>
void multiply_words(const Words& all, const Sink& sink, int64_t tiles) {
  Words t = all;
  Sink to = sink;
  for (; tiles > 0; --tiles, t = t.from_row(Rows), to.out += Rows * to.out_stride)
    multiply_words_tile<Rows, kToCodes, kWalked, kHalves>(t, to);
}

// By the rows of a tile.
using MultiplyQuads = void (*)(const Quads&, const Sink&);
using MultiplyWords = void (*)(const Words&, const Sink&, int64_t tiles);
template <bool kToCodes, bool kWalked, int kHalves = 2>
struct Kernels {
  static constexpr MultiplyQuads kQuads[kQuadRows + 1] = {
      nullptr, multiply_quads<1, kToCodes, kWalked>, multiply_quads<2, kToCodes, kWalked>,
      multiply_quads<3, kToCodes, kWalked>, multiply_quads<4, kToCodes, kWalked>};
  static constexpr MultiplyWords kWords[kWordRows + 1] = {nullptr,
                                                          multiply_words<1, kToCodes, kWalked, kHalves>,
                                                          multiply_words<2, kToCodes, kWalked, kHalves>,
                                                          multiply_words<3, kToCodes, kWalked, kHalves>,
                                                          multiply_words<4, kToCodes, kWalked, kHalves>,
                                                          multiply_words<5, kToCodes, kWalked, kHalves>,
                                                          multiply_words<6, kToCodes, kWalked, kHalves>};
};

const MultiplyQuads* quads(bool to_codes, bool walked) {
  if (walked) return to_codes ? Kernels<true, true>::kQuads : Kernels<false, true>::kQuads;
  return to_codes ? Kernels<true, false>::kQuads : Kernels<false, false>::kQuads;
}

template <int kHalves>
const MultiplyWords* words_of(bool to_codes, bool walked) {
  if (walked) return to_codes ? Kernels<true, true, kHalves>::kWords : Kernels<false, true, kHalves>::kWords;
  return to_codes ? Kernels<true, false, kHalves>::kWords : Kernels<false, false, kHalves>::kWords;
}

template <bool kToCodes>
constexpr MultiplyWords kCrossed[kCrossedRows + 1] = {nullptr, multiply_crossed<1, kToCodes>, multiply_crossed<2, kToCodes>,
                                                      multiply_crossed<3, kToCodes>, multiply_crossed<4, kToCodes>};

// A panel of which only the first half is there takes half the products.
const MultiplyWords* words(bool to_codes, bool walked, int64_t columns) {
  return columns > kPanel / 2 ? words_of<2>(to_codes, walked) : words_of<1>(to_codes, walked);
}

// Where the sums of one panel go: codes straight to the output, by way of `spare` where the output has not the whole
// panel; anything else by way of `tile`.
template <int kRows>
class Output {
 public:
  Output(const Job& job, int64_t n)
      : job_(job), n_(n), columns_(job.n_end - n < kPanel ? job.n_end - n : kPanel) {
    const Epilogue& ep = *job.epilogue;
    out_ = static_cast<uint8_t*>(ep.out) + n - ep.out_column;
    to_codes_ = prepare_codes(*job.packed, ep, n, &codes_);
    start_ = to_codes_ ? codes_.start : Columns{};
  }

  void subtract_from_start(const int32_t* columns) {
    const Columns less = load_columns(columns);
    for (int h = 0; h < 2; ++h) start_.half[h] = _mm256_sub_epi32(start_.half[h], less.half[h]);
  }

  int64_t columns() const { return columns_; }
  bool to_codes() const { return to_codes_; }
  bool in_place() const { return to_codes_ && columns_ == kPanel; }  // nothing is left to `store`
  const Columns& start() const { return start_; }
  int32_t* tile() { return tile_; }

  // For the rows from `row` on, which stand at `in_tile` of those that `store` will hear of.
  Sink sink(int64_t row, int64_t in_tile = 0) {
    int32_t* tile = tile_ + in_tile * kPanel;
    if (columns_ < kPanel) return {&start_, tile, &codes_, spare_ + in_tile * kPanel, kPanel};
    return {&start_, tile, &codes_, out_ + row * job_.epilogue->out_stride, job_.epilogue->out_stride};
  }

  // What is left to do when the kernel has gone through `rows` rows.
  void store(int64_t row, int64_t rows) {
    if (!to_codes_) return store_panel(tile_, row, rows, n_, columns_, *job_.packed, *job_.epilogue);
    for (int64_t r = 0; columns_ < kPanel && r < rows; ++r)
      std::memcpy(out_ + (row + r) * job_.epilogue->out_stride, spare_ + r * kPanel, static_cast<size_t>(columns_));
  }

 private:
  const Job& job_;
  int64_t n_, columns_;
  uint8_t* out_;  // of the first row
  bool to_codes_;
  Codes codes_;
  Columns start_;
  alignas(32) int32_t tile_[kRows * kPanel];
  uint8_t spare_[kRows * kPanel];
};

// Rows that stand side by side, codes of two successive k by two: words[K / 2][groups][8 rows][2].
struct Transposed {
  int16_t* words;
  int64_t groups, pairs;

  int16_t* pair(int64_t index) const { return words + index * groups * 16; }
};

// Up to four pairs of eight rows, each in the low half of a register.
inline void save_pairs(const __m128i (&rows)[8], const Transposed& to, int64_t pair, int64_t group, int pairs) {
  __m128i twos[4];
  for (int i = 0; i < 4; ++i) twos[i] = _mm_unpacklo_epi16(rows[2 * i], rows[2 * i + 1]);
  const __m128i low[2] = {_mm_unpacklo_epi32(twos[0], twos[1]), _mm_unpacklo_epi32(twos[2], twos[3])};
  const __m128i high[2] = {_mm_unpackhi_epi32(twos[0], twos[1]), _mm_unpackhi_epi32(twos[2], twos[3])};
  const __m128i by_pair[4] = {_mm_unpacklo_epi64(low[0], low[1]), _mm_unpackhi_epi64(low[0], low[1]),
                              _mm_unpacklo_epi64(high[0], high[1]), _mm_unpackhi_epi64(high[0], high[1])};
  for (int i = 0; i < pairs; ++i)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to.pair(pair + i) + group * 16), _mm256_cvtepu8_epi16(by_pair[i]));
}

// Rows [row, row + count) of the job, `count` <= kQuadBlock.
Transposed transpose_rows(const Job& job, int64_t row, int64_t count) {
  const int64_t depth = padded_depth(job.packed->k), groups = (count + 7) / 8;
  const Transposed to{static_cast<int16_t*>(thread_scratch(
                          Scratch::words, static_cast<size_t>(groups * 8 * depth) * sizeof(int16_t))),
                      groups, depth / 2};
  const int64_t run = job.walk ? job.walk->run : depth;
  for (int64_t group = 0; group < groups; ++group) {
    const uint8_t* rows[8];
    for (int64_t r = 0; r < 8; ++r) {
      const int64_t index = group * 8 + r < count ? group * 8 + r : count - 1, at = row + index;
      rows[r] = job.a + (job.walk ? job.walk->rows[at] : at * job.a_stride);
    }
    for (int64_t first = 0; first < depth; first += run) {
      const int64_t from = job.walk ? job.walk->segments[first / run] : 0;
      __m128i codes[8];
      int64_t i = 0;
      for (; i + 8 <= run; i += 8) {
        for (int r = 0; r < 8; ++r) codes[r] = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(rows[r] + from + i));
        save_pairs(codes, to, (first + i) / 2, group, 4);
      }
      if (i == run) continue;
      for (int r = 0; r < 8; ++r) {
        int32_t four;
        std::memcpy(&four, rows[r] + from + i, sizeof four);
        codes[r] = _mm_cvtsi32_si128(four);
      }
      save_pairs(codes, to, (first + i) / 2, group, 2);
    }
  }
  return to;
}

// The outliers of one column. The lists are read from packed bytes, so every index is checked, here and where a pair is used.
struct Outliers {
  const Outlier *begin, *end;

  Outliers(const Packed& packed, int64_t column) {
    const auto at = [&](uint32_t index) {
      return packed.outliers + (index < packed.outlier_count ? index : packed.outlier_count);
    };
    begin = at(packed.outlier_begin[column]), end = at(packed.outlier_begin[column + 1]);
  }
};

// Their products, for all rows.
template <int kGroups>
void add_outliers(const Outliers& outliers, const Transposed& rows, int32_t* sums) {
  __m256i sum[kGroups];
#pragma GCC unroll 8
  for (int g = 0; g < kGroups; ++g) sum[g] = _mm256_setzero_si256();
  const auto pairs = static_cast<uint32_t>(rows.pairs);
  for (const Outlier* outlier = outliers.begin; outlier < outliers.end; ++outlier) {
    if (outlier->pair >= pairs) continue;
    const __m256i values = broadcast(outlier->values);
    const int16_t* codes = rows.pair(outlier->pair);
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g)
      accumulate(sum[g], _mm256_madd_epi16(values, load(reinterpret_cast<const int8_t*>(codes + 16 * g))));
  }
#pragma GCC unroll 8
  for (int g = 0; g < kGroups; ++g) _mm256_store_si256(reinterpret_cast<__m256i*>(sums + 8 * g), sum[g]);
}

using AddOutliers = void (*)(const Outliers&, const Transposed&, int32_t*);
constexpr AddOutliers kAddOutliers[kQuadBlock / 8 + 1] = {
    nullptr,         add_outliers<1>, add_outliers<2>, add_outliers<3>,
    add_outliers<4>, add_outliers<5>, add_outliers<6>, add_outliers<7>};

// Eight registers of eight lanes: lane j of register i becomes lane i of register j.
inline void transpose(__m256i (&x)[8]) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = _mm256_castsi256_ps(x[i]);
  for (int i = 0; i < 8; i += 2) b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]), b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], _MM_SHUFFLE(1, 0, 1, 0));
      a[i + 2 * j + 1] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], _MM_SHUFFLE(3, 2, 3, 2));
    }
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm256_castps_si256(_mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    x[i + 4] = _mm256_castps_si256(_mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
}

// What the sums of `rows` rows of a panel start from.
void start_tile(const Packed& packed, int64_t n, int64_t rows, const Transposed* transposed, const Columns& start,
                int32_t* tile) {
  if (transposed == nullptr) {
    for (int64_t r = 0; r < rows; ++r)
      for (int h = 0; h < 2; ++h)
        _mm256_store_si256(reinterpret_cast<__m256i*>(tile + r * kPanel + 8 * h), start.half[h]);
    return;
  }
  alignas(32) int32_t sums[8][kQuadBlock];
  for (int h = 0; h < 2; ++h) {
    for (int64_t c = 0; c < 8; ++c)
      kAddOutliers[transposed->groups](Outliers(packed, n + 8 * h + c), *transposed, sums[c]);
    for (int64_t group = 0; group < transposed->groups; ++group) {
      __m256i block[8];
      for (int c = 0; c < 8; ++c) block[c] = _mm256_load_si256(reinterpret_cast<const __m256i*>(sums[c] + 8 * group));
      transpose(block);
      for (int r = 0; r < 8; ++r)
        _mm256_store_si256(reinterpret_cast<__m256i*>(tile + (8 * group + r) * kPanel + 8 * h),
                           _mm256_add_epi32(block[r], start.half[h]));
    }
  }
}

void run_quads(const Job& job) {
  const Packed& packed = *job.packed;
  Quads operands(job, job.a + job.group_begin * kGroup, job.a_stride);
  const int64_t blocks = (job.m + kQuadBlock - 1) / kQuadBlock;
  const int64_t block = round_up((job.m + blocks - 1) / blocks, kQuadRows);
  for (int64_t row = 0; row < job.m; row += block) {
    const int64_t rows = job.m - row < block ? job.m - row : block;
    Transposed transposed = {};
    if (packed.outlier_begin) transposed = transpose_rows(job, row, rows);
    for (int64_t n = job.n_begin; n < job.n_end; n += kPanel) {
      operands.b = packed.panel(n / kPanel) + job.group_begin * kStep;
      Output<kQuadBlock> output(job, n);
      start_tile(packed, n, rows, packed.outlier_begin ? &transposed : nullptr, output.start(), output.tile());
      const MultiplyQuads* kernels = quads(output.to_codes(), job.walk != nullptr);
      for (int64_t r = 0; r < rows; r += kQuadRows)
        kernels[rows - r < kQuadRows ? rows - r : kQuadRows](operands.from_row(row + r), output.sink(row + r, r));
      if (!output.in_place()) output.store(row, rows);
    }
  }
}

// The same sum in every even lane and its neighbour: a0 a2 + a1 a3.
inline __m256i products_in_fours(__m256i words) {
  return _mm256_madd_epi16(words, _mm256_shuffle_epi32(words, _MM_SHUFFLE(2, 3, 0, 1)));
}

// Widens a row; says the sum over its groups of four of a0 a2 + a1 a3, modulo 2**32. `count` is a multiple of four.
int32_t widen(const uint8_t* from, int16_t* to, int64_t count) {
  __m256i sums = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), words);
    sums = _mm256_add_epi32(sums, products_in_fours(words));
  }
  alignas(32) uint32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sums);
  uint32_t sum = lanes[0] + lanes[2] + lanes[4] + lanes[6];
  for (; i < count; i += kGroup) {
    for (int64_t j = i; j < i + kGroup; ++j) to[j] = from[j];
    sum += static_cast<uint32_t>(to[i] * to[i + 2] + to[i + 1] * to[i + 3]);
  }
  return static_cast<int32_t>(sum);
}

// The rows of a job that are not walked, widened, and their sums of products.
struct Widened {
  const int16_t* rows;
  const int32_t* products;
};

Widened widened(const Job& job, int64_t stride) {
  const int64_t depth = (job.group_end - job.group_begin) * kGroup;
  const int64_t product_bytes = round_up(job.m * int64_t{sizeof(int32_t)}, 64);
  auto* bytes = static_cast<uint8_t*>(thread_scratch(
      Scratch::words, static_cast<size_t>(product_bytes + job.m * stride * int64_t{sizeof(int16_t)})));
  auto* products = reinterpret_cast<int32_t*>(bytes);
  auto* wide = reinterpret_cast<int16_t*>(bytes + product_bytes);
  for (int64_t row = 0; row < job.m; ++row)
    products[row] = widen(job.a + row * job.a_stride + job.group_begin * kGroup, wide + row * stride, depth);
  return {wide, products};
}

void run_words(const Job& job) {
  const int64_t depth = (job.group_end - job.group_begin) * kGroup, stride = depth + 36;
  const Widened wide = job.walk ? Widened{reinterpret_cast<const int16_t*>(job.a), nullptr} : widened(job, stride);
  Words operands(job, wide.rows, stride);
  operands.row_products = wide.products;
  const bool crossed = !job.walk && job.m >= kCrossedRows && depth >= kCrossedLeast &&
                       job.n_end - job.n_begin >= kCrossedLeast && depth == padded_depth(job.packed->k);
  for (int64_t n = job.n_begin; n < job.n_end; n += kPanel) {
    operands.b = job.packed->panel(n / kPanel) + job.group_begin * kStep;
    Output<kWordRows> output(job, n);
    const MultiplyWords* kernels = words(output.to_codes(), job.walk != nullptr, output.columns());
    int64_t unit = kWordRows;
    if (crossed && output.columns() > kPanel / 2) {
      kernels = output.to_codes() ? kCrossed<true> : kCrossed<false>;
      unit = kCrossedRows;
      output.subtract_from_start(job.packed->column_products + n);
    }
    for (int64_t row = 0; row < job.m;) {
      const int64_t rows = job.m - row < unit ? job.m - row : unit;
      const int64_t tiles = output.in_place() ? (job.m - row) / rows : 1;
      kernels[rows](operands.from_row(row), output.sink(row), tiles);
      if (!output.in_place()) output.store(row, rows);
      row += rows * tiles;
    }
  }
}

// Sums of four columns, one a lane, from the eight lanes of each.
inline __m128i sum_lanes(const __m256i (&columns)[4]) {
  const __m256i pairs = _mm256_hadd_epi32(columns[0], columns[1]), others = _mm256_hadd_epi32(columns[2], columns[3]);
  const __m256i halves = _mm256_hadd_epi32(pairs, others);
  return _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}

// Rows of widened codes times four columns of weights as they were before packing: sums at `tile`, a panel a row.
template <int Rows>
void multiply_columns(const int16_t* a, int64_t a_stride, const int8_t* const (&columns)[4], int64_t depth, int32_t* tile) {
  __m256i sums[Rows][4];
#pragma GCC unroll 3
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) sums[r][c] = _mm256_setzero_si256();
  int64_t k = 0;
  for (; k + 16 <= depth; k += 16)
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      const __m256i w = load_widened(columns[c] + k);
#pragma GCC unroll 3
      for (int r = 0; r < Rows; ++r)
        accumulate(sums[r][c], _mm256_madd_epi16(w, load(reinterpret_cast<const int8_t*>(a + r * a_stride + k))));
    }
#pragma GCC unroll 3
  for (int r = 0; r < Rows; ++r) {
    alignas(16) int32_t out[4];
    _mm_store_si128(reinterpret_cast<__m128i*>(out), sum_lanes(sums[r]));
    for (int64_t i = k; i < depth; ++i)
      for (int c = 0; c < 4; ++c) out[c] += a[r * a_stride + i] * columns[c][i];
    std::memcpy(tile + r * kPanel, out, sizeof out);
  }
}

using MultiplyColumns = void (*)(const int16_t*, int64_t, const int8_t* const (&)[4], int64_t, int32_t*);
constexpr int64_t kColumnRows = 3;
constexpr MultiplyColumns kMultiplyColumns[kColumnRows + 1] = {nullptr, multiply_columns<1>, multiply_columns<2>,
                                                               multiply_columns<3>};

void run_few(const Job& job) {
  const Packed& packed = *job.packed;
  const int64_t stride = padded_depth(packed.k) + 36;
  const int16_t* a = widened(job, stride).rows;
  alignas(32) int32_t tile[kFewRows * kPanel] = {};
  for (int64_t n = job.n_begin; n < job.n_end; n += kPanel) {
    const int64_t present = job.n_end - n < kPanel ? job.n_end - n : kPanel;
    for (int64_t c = 0; c < present; c += 4) {
      const int8_t* columns[4];  // one that is not there is the last that is
      for (int64_t i = 0; i < 4; ++i) columns[i] = packed.unpacked + (n + (c + i < present ? c + i : present - 1)) * packed.k;
      for (int64_t row = 0; row < job.m; row += kColumnRows)
        kMultiplyColumns[job.m - row < kColumnRows ? job.m - row : kColumnRows](a + row * stride, stride, columns, packed.k,
                                                                               tile + row * kPanel + c);
    }
    store_panel(tile, 0, job.m, n, present, packed, *job.epilogue);
  }
}

}  // namespace

void restore_words_avx2(const Packed& packed, int64_t panel, int8_t* words) {
  constexpr int64_t kPair = 2 * kPanel;  // bytes
  const int8_t* from = packed.panel(panel);
  const __m256i pairs_apart = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,  //
                                               0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  const int64_t pairs = padded_depth(packed.k) / 2;
  for (int64_t pair = 0; pair < pairs; pair += 2, from += kStep)
    for (int h = 0; h < 2; ++h) {
      const __m256i codes = _mm256_shuffle_epi8(load(from + 32 * h), pairs_apart);
      const __m256i in_order = _mm256_permute4x64_epi64(codes, _MM_SHUFFLE(3, 1, 2, 0));
      int8_t* to = words + pair * kPair + 16 * h;
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(in_order));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + kPair), _mm256_extracti128_si256(in_order, 1));
    }
  for (int64_t c = 0; packed.outlier_begin && c < kPanel; ++c) {
    const Outliers cuts(packed, panel * kPanel + c);
    for (const Outlier* cut = cuts.begin; cut < cuts.end; ++cut) {
      if (cut->pair >= pairs) continue;
      int8_t* pair = words + cut->pair * kPair + 2 * c;
      for (int j = 0; j < 2; ++j) pair[j] = static_cast<int8_t>(pair[j] + cut->values[j]);
    }
  }
}

void run_avx2(const Job& job) {
  if (job.packed->outlier_begin && job.packed->unpacked && job.m < kFewRows && !job.walk)
    run_few(job);
  else if (job.packed->form == Form::quads)
    run_quads(job);
  else
    run_words(job);
}

}  // namespace zeropoint::gemm
#endif
