// The epilogue of kernel.h in AVX2, for the kernels whose tile is one panel wide. Included only by files that are
// compiled for AVX2; everything has internal linkage, so that no copy reaches the rest of the program.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "gemm/kernels.h"

namespace zeropoint::gemm {
namespace {

// The 16 columns of a panel, in two registers.
struct Columns {
  __m256i half[2];
};

inline Columns load_columns(const int32_t* values) {
  return {{_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values)),
           _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + 8))}};
}

inline Columns load_columns(const float* values) { return load_columns(reinterpret_cast<const int32_t*>(values)); }

// Whether one of 16 floats is NaN or an infinity: only then can a step be NaN.
inline bool any_nonfinite(const Columns& reals) {
  int bits = 0;
  for (int h = 0; h < 2; ++h) {
    const __m256 v = _mm256_castsi256_ps(reals.half[h]);
    bits |= _mm256_movemask_ps(_mm256_cmp_ps(_mm256_sub_ps(v, v), _mm256_setzero_ps(), _CMP_NEQ_UQ));
  }
  return bits != 0;
}

// Codes fit 8 bits already: taking the low byte of every lane keeps their value, signed or not.
inline __m128i low_bytes(const Columns& codes) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(codes.half[0], codes.half[1]), 0xD8);
  const __m256i bytes = _mm256_and_si256(words, _mm256_set1_epi16(0xFF));
  return _mm_packus_epi16(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
}

template <Epilogue::Output kOutput>
inline void store_panel_as(const int32_t* tile, int64_t row, int64_t rows, int64_t n, int64_t columns,
                           const Packed& packed, const Epilogue& ep) {
  constexpr bool kScaled = kOutput != Epilogue::Output::sums;
  const bool weight_shifted = ep.weight_zero_point != nullptr;
  Columns zw = {}, constant = load_columns(packed.column_sums + n), multiplier = {}, offset = {};
  if (weight_shifted) zw = load_columns(ep.weight_zero_point + n);
  const __m256i za = _mm256_set1_epi32(ep.activation_zero_point);
  const __m256i depth = _mm256_set1_epi32(static_cast<int32_t>(packed.k));
  for (int h = 0; h < 2; ++h)
    constant.half[h] = _mm256_mullo_epi32(
        za, _mm256_sub_epi32(_mm256_mullo_epi32(depth, zw.half[h]), constant.half[h]));
  if (kScaled) multiplier = load_columns(ep.multiplier + n);
  if (kScaled && ep.offset) offset = load_columns(ep.offset + n);
  const bool may_be_nan = kScaled && (any_nonfinite(multiplier) || any_nonfinite(offset));
  const __m256 low = _mm256_set1_ps(ep.low), high = _mm256_set1_ps(ep.high);
  const __m256i out_zero = _mm256_set1_epi32(ep.out_zero_point);

  for (int64_t r = 0; r < rows; ++r) {
    Columns sums = load_columns(tile + r * kPanel);
    for (int h = 0; h < 2; ++h) {
      __m256i sum = _mm256_add_epi32(sums.half[h], constant.half[h]);
      if (weight_shifted)
        sum = _mm256_sub_epi32(sum, _mm256_mullo_epi32(zw.half[h], _mm256_set1_epi32(ep.row_sums[row + r])));
      if constexpr (kScaled) {
        __m256 y = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_castsi256_ps(multiplier.half[h]));
        if (ep.offset) y = _mm256_add_ps(y, _mm256_castsi256_ps(offset.half[h]));
        if constexpr (kOutput == Epilogue::Output::floats) {
          if (ep.relu) y = _mm256_max_ps(_mm256_setzero_ps(), y);  // NaN in the second operand is kept
          sum = _mm256_castps_si256(y);
        } else {
          if (may_be_nan) y = _mm256_and_ps(y, _mm256_cmp_ps(y, y, _CMP_ORD_Q));
          y = _mm256_min_ps(_mm256_max_ps(y, low), high);
          sum = _mm256_add_epi32(_mm256_cvtps_epi32(y), out_zero);
        }
      }
      sums.half[h] = sum;
    }
    const int64_t at = (row + r) * ep.out_stride + n - ep.out_column;
    if constexpr (kOutput == Epilogue::Output::codes) {
      alignas(16) uint8_t spare[kPanel];
      uint8_t* const out = static_cast<uint8_t*>(ep.out) + at;
      _mm_storeu_si128(reinterpret_cast<__m128i*>(columns == kPanel ? out : spare), low_bytes(sums));
      if (columns < kPanel) std::memcpy(out, spare, static_cast<size_t>(columns));
    } else {
      alignas(32) int32_t spare[kPanel];
      int32_t* const out = static_cast<int32_t*>(ep.out) + at;  // floats travel as their bits
      int32_t* const to = columns == kPanel ? out : spare;
      for (int h = 0; h < 2; ++h) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8 * h), sums.half[h]);
      if (columns < kPanel) std::memcpy(out, spare, static_cast<size_t>(columns) * sizeof *out);
    }
  }
}

// What turns sums of one panel into codes straight from registers, where no step can be NaN or beyond 32 bits and weight
// zero points are 0. There the clamp of kernel.h may follow the rounding, as its bounds are integers.
struct Codes {
  Columns start;  // what sums start from: the activation zero point's part
  Columns multiplier, offset;
  __m256i zero_point, low, high;  // as unsigned codes,
  __m256i flip;                   // and what makes signed ones of them
  bool plain;                     // nothing of these four is left to do: 0, 0, 255, 0
};

inline float largest(const Columns& reals) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  alignas(32) float sizes[8];
  _mm256_store_ps(sizes, _mm256_max_ps(_mm256_andnot_ps(sign, _mm256_castsi256_ps(reals.half[0])),
                                       _mm256_andnot_ps(sign, _mm256_castsi256_ps(reals.half[1]))));
  float most = 0;
  for (float size : sizes) most = size > most ? size : most;
  return most;
}

// False if the epilogue is another, or a step can be NaN or too large.
inline bool prepare_codes(const Packed& packed, const Epilogue& ep, int64_t n, Codes* codes) {
  if (ep.output != Epilogue::Output::codes || ep.weight_zero_point != nullptr) return false;
  const __m256i minus_za = _mm256_set1_epi32(static_cast<int32_t>(0u - static_cast<uint32_t>(ep.activation_zero_point)));
  codes->start = load_columns(packed.column_sums + n);
  for (__m256i& half : codes->start.half) half = _mm256_mullo_epi32(half, minus_za);
  codes->multiplier = load_columns(ep.multiplier + n);
  codes->offset = ep.offset ? load_columns(ep.offset + n) : Columns{};
  const auto low = static_cast<int32_t>(ep.low), high = static_cast<int32_t>(ep.high);
  const int32_t unsign = low + ep.out_zero_point < 0 ? 128 : 0;
  codes->zero_point = _mm256_set1_epi16(static_cast<int16_t>(ep.out_zero_point + unsign));
  codes->low = _mm256_set1_epi8(static_cast<char>(low + ep.out_zero_point + unsign));
  codes->high = _mm256_set1_epi8(static_cast<char>(high + ep.out_zero_point + unsign));
  codes->flip = _mm256_set1_epi8(static_cast<char>(unsign));
  codes->plain = unsign == 0 && ep.out_zero_point == 0 && low == 0 && high == 255;
  if (any_nonfinite(codes->multiplier) || any_nonfinite(codes->offset)) return false;
  const float most = static_cast<float>(packed.k) * (255 * 128) * largest(codes->multiplier) + largest(codes->offset);
  return most < 1e9f;
}

// One row of a whole panel as words, in lanes of columns 0-3, 8-11 | 4-7, 12-15.
inline __attribute__((always_inline)) __m256i row_words(const __m256i (&sums)[2], const Codes& to) {
  __m256i rounded[2];
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[h]), _mm256_castsi256_ps(to.multiplier.half[h]));
    rounded[h] = _mm256_cvtps_epi32(_mm256_add_ps(scaled, _mm256_castsi256_ps(to.offset.half[h])));
  }
  return _mm256_packs_epi32(rounded[0], rounded[1]);
}

// Two rows of a whole panel, whose sums began with `start`: the second 16 codes go to `out` + `second`.
inline __attribute__((always_inline)) void store_codes(const __m256i (&first_sums)[2], const __m256i (&second_sums)[2],
                                                       const Codes& to, uint8_t* out, int64_t second) {
  const __m256i first = row_words(first_sums, to), next = row_words(second_sums, to);
  __m256i codes = _mm256_packus_epi16(first, next);
  if (!to.plain) {
    codes = _mm256_packus_epi16(_mm256_adds_epi16(first, to.zero_point), _mm256_adds_epi16(next, to.zero_point));
    codes = _mm256_xor_si256(_mm256_min_epu8(_mm256_max_epu8(codes, to.low), to.high), to.flip);
  }
  const __m128i even = _mm256_castsi256_si128(codes), odd = _mm256_extracti128_si256(codes, 1);  // fours of columns
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_unpacklo_epi32(even, odd));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out + second), _mm_unpackhi_epi32(even, odd));
}

// Stores `rows` rows of one panel from `tile` (16 sums a row); `columns` <= 16 of them are wanted.
inline void store_panel(const int32_t* tile, int64_t row, int64_t rows, int64_t n, int64_t columns,
                        const Packed& packed, const Epilogue& ep) {
  switch (ep.output) {
    case Epilogue::Output::codes:
      return store_panel_as<Epilogue::Output::codes>(tile, row, rows, n, columns, packed, ep);
    case Epilogue::Output::floats:
      return store_panel_as<Epilogue::Output::floats>(tile, row, rows, n, columns, packed, ep);
    case Epilogue::Output::sums:
      return store_panel_as<Epilogue::Output::sums>(tile, row, rows, n, columns, packed, ep);
  }
}

}  // namespace
}  // namespace zeropoint::gemm
