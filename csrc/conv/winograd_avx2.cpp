// The transforms and products of winograd.h in AVX2.
#if defined(__AVX2__)
#include "conv/winograd.h"
#include "gemm/store_avx2.h"
#include "gemm/words_avx2.h"

namespace zeropoint::conv::winograd {
namespace {

using gemm::kPanel;

inline __m256i load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline void save(void* to, __m256i a) { _mm256_storeu_si256(static_cast<__m256i*>(to), a); }

struct Words {
  static __m256i add(__m256i a, __m256i b) { return _mm256_add_epi16(a, b); }
  static __m256i sub(__m256i a, __m256i b) { return _mm256_sub_epi16(a, b); }
};

struct Longs {
  static __m256i add(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
  static __m256i sub(__m256i a, __m256i b) { return _mm256_sub_epi32(a, b); }
};

template <class T>
inline __m256i twice(__m256i a) {
  return T::add(a, a);
}

// One column of B d, of G g and of A m.
inline __attribute__((always_inline)) void transform_input(const __m256i (&d)[kIn], __m256i (&v)[kIn]) {
  const __m256i d31 = Words::sub(d[3], d[1]), d32 = Words::sub(d[3], d[2]);
  v[0] = Words::add(twice<Words>(Words::sub(d[0], d[2])), d31);
  v[1] = Words::sub(d32, twice<Words>(d[1]));
  v[2] = Words::add(d32, twice<Words>(Words::sub(d[1], d[2])));
  v[3] = d31;
  v[4] = Words::sub(Words::sub(d[4], d[2]), twice<Words>(d31));
}

inline __attribute__((always_inline)) void transform_weights(const __m256i (&g)[3], __m256i (&u)[kIn]) {
  const auto thrice = [](__m256i a) { return Words::add(a, twice<Words>(a)); };
  const __m256i ends = Words::add(g[0], g[2]);
  u[0] = thrice(g[0]);
  u[1] = Words::sub(_mm256_setzero_si256(), thrice(Words::add(ends, g[1])));
  u[2] = Words::sub(g[1], ends);
  u[3] = Words::add(g[0], twice<Words>(Words::add(g[1], twice<Words>(g[2]))));
  u[4] = twice<Words>(thrice(g[2]));
}

inline __attribute__((always_inline)) void transform_output(const __m256i (&m)[kIn], __m256i (&y)[kOut]) {
  const __m256i sum = Longs::add(m[1], m[2]), m3 = twice<Longs>(m[3]);
  y[0] = Longs::add(Longs::add(m[0], sum), m[3]);
  y[1] = Longs::add(Longs::sub(m[1], m[2]), m3);
  y[2] = Longs::add(Longs::add(sum, twice<Longs>(m3)), m[4]);
}

// One transform down the columns of a square and then along its rows: from load(row, column) to store(row, column, value).
template <int kFrom, int kTo, class Load, class Transform, class Store>
inline __attribute__((always_inline)) void transform_square(Load&& load_at, Transform&& transform, Store&& store_at) {
  __m256i half[kTo][kFrom];
#pragma GCC unroll 5
  for (int j = 0; j < kFrom; ++j) {
    __m256i column[kFrom], done[kTo];
#pragma GCC unroll 5
    for (int i = 0; i < kFrom; ++i) column[i] = load_at(i, j);
    transform(column, done);
#pragma GCC unroll 5
    for (int i = 0; i < kTo; ++i) half[i][j] = done[i];
  }
#pragma GCC unroll 5
  for (int i = 0; i < kTo; ++i) {
    __m256i done[kTo];
    transform(half[i], done);
#pragma GCC unroll 5
    for (int j = 0; j < kTo; ++j) store_at(i, j, done[j]);
  }
}

void input(const uint8_t* const (&from)[kPoints], int64_t channels, uint8_t flip, int16_t zero_point, int16_t* v) {
  const int64_t plane = input_plane(channels);
  const __m128i flips = _mm_set1_epi8(static_cast<char>(flip));
  const __m256i zero = _mm256_set1_epi16(zero_point);
  for (int64_t c = 0; c < channels; c += kChannelUnit, v += kChannelUnit) {
    transform_square<kIn, kIn>(
        [&](int i, int j) __attribute__((always_inline)) {
          const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from[i * kIn + j] + c));
          return Words::sub(_mm256_cvtepu8_epi16(_mm_xor_si128(codes, flips)), zero);
        },
        transform_input,
        [&](int i, int j, __m256i value) __attribute__((always_inline)) { save(v + (i * kIn + j) * plane, value); });
  }
}

void weights(const int8_t* panel, int64_t channels, int64_t line, int16_t* u) {
  const int64_t count = channels * kPanel, plane = weight_plane(channels);
  for (int64_t at = 0; at < count; at += 16) {
    transform_square<3, kIn>(
        [&](int i, int j) __attribute__((always_inline)) {
          const int8_t* codes = panel + (i * line + j * channels) * kPanel + at;
          return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
        },
        transform_weights,
        [&](int i, int j, __m256i value) __attribute__((always_inline)) { save(u + (i * kIn + j) * plane + at, value); });
  }
}

template <int kRows>
void multiply_rows(const int16_t* v, int64_t channels, const int16_t* u, int32_t* m) {
  __m256i sums[kRows][2];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
  for (int64_t c = 0; c < channels; c += 2, u += 2 * kPanel) {
    const __m256i w0 = load(u), w1 = load(u + kPanel);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) gemm::accumulate_words<2>(sums[r], v + r * channels + c, w0, w1);
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) save(m + r * kPanel, sums[r][0]), save(m + r * kPanel + 8, sums[r][1]);
}

using MultiplyRows = void (*)(const int16_t*, int64_t, const int16_t*, int32_t*);
constexpr int64_t kRows = 6;
constexpr MultiplyRows kMultiply[kRows + 1] = {nullptr,          multiply_rows<1>, multiply_rows<2>, multiply_rows<3>,
                                               multiply_rows<4>, multiply_rows<5>, multiply_rows<6>};

void multiply(const int16_t* v, int64_t tiles, int64_t channels, const int16_t* u, int32_t* m) {
  for (int point = 0; point < kPoints; ++point, v += input_plane(channels), u += weight_plane(channels))
    for (int64_t t = 0; t < tiles; t += kRows) {
      const int64_t rows = tiles - t < kRows ? tiles - t : kRows;
      kMultiply[rows](v + t * channels, channels, u, m + (point * tiles + t) * kPanel);
    }
}

// The nine sums of 16 columns of one tile, whose points stand `plane` apart.
void transform_sums(const int32_t* m, int64_t plane, int32_t (&sums)[kOut * kOut][kPanel]) {
  const __m256i inverse_of_9 = _mm256_set1_epi32(954437177);
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    transform_square<kIn, kOut>(
        [&](int i, int j) __attribute__((always_inline)) { return load(m + (i * kIn + j) * plane + 8 * h); },
        transform_output,
        [&](int i, int j, __m256i value) __attribute__((always_inline)) {
          save(sums[i * kOut + j] + 8 * h, _mm256_srai_epi32(_mm256_mullo_epi32(value, inverse_of_9), 2));
        });
  }
}

void output(const int32_t* m, int64_t tiles, const Place* places, int64_t out_width, int64_t n, int64_t columns,
            const gemm::Packed& packed, const gemm::Epilogue& epilogue) {
  gemm::Codes codes = {};
  const bool in_registers = columns == kPanel && gemm::prepare_codes(packed, epilogue, n, &codes);
  const int64_t item = epilogue.output == gemm::Epilogue::Output::codes ? 1 : 4;
  auto* out = static_cast<uint8_t*>(epilogue.out);
  for (int64_t t = 0; t < tiles; ++t, m += kPanel) {
    alignas(32) int32_t sums[kOut * kOut][kPanel];
    transform_sums(m, tiles * kPanel, sums);
    const int32_t* rows[kOut * kOut];
    int64_t positions[kOut * kOut];
    int count = 0;
    for (int i = 0; i < places[t].height; ++i)
      for (int j = 0; j < places[t].width; ++j, ++count) {
        rows[count] = sums[i * kOut + j];
        positions[count] = (places[t].position + i * out_width + j) * epilogue.out_stride;
      }
    for (int i = 0; in_registers && i < count; i += 2) {
      const int second = i + 1 < count ? i + 1 : i;
      const __m256i a[2] = {load(rows[i]), load(rows[i] + 8)}, b[2] = {load(rows[second]), load(rows[second] + 8)};
      gemm::store_codes(a, b, codes, out + positions[i] + n - epilogue.out_column, positions[second] - positions[i]);
    }
    for (int i = 0; !in_registers && i < count; ++i) {
      gemm::Epilogue here = epilogue;
      here.out = out + positions[i] * item;
      gemm::store_panel(rows[i], 0, 1, n, columns, packed, here);
    }
  }
}

}  // namespace

Kernels kernels_avx2() { return {input, gemm::restore_words_avx2, weights, multiply, output}; }

}  // namespace zeropoint::conv::winograd
#endif
