// The epilogue of kernel.h in AVX2, for the kernels whose tile is one panel wide. Included only by files that are
// compiled for AVX2; everything has internal linkage, so that no copy reaches the rest of the program.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "gemm/kernels.h"

namespace zeropoint::gemm {
namespace {

// Eight columns of an array, or fewer with zeros behind them.
struct Columns {
  __m256i half[2];
};

inline Columns load_columns(const int32_t* values) {
  return {{_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values)),
           _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + 8))}};
}

inline Columns load_columns(const float* values) { return load_columns(reinterpret_cast<const int32_t*>(values)); }

// Stores `rows` rows of one panel from `tile` (16 sums a row); `columns` <= 16 of them are wanted.
inline void store_panel(const int32_t* tile, int64_t row, int64_t rows, int64_t n, int64_t columns,
                        const Packed& packed, const Epilogue& ep) {
  const __m256i za = _mm256_set1_epi32(ep.activation_zero_point);
  const Columns column_sum = load_columns(packed.column_sums + n);
  const bool weight_shifted = ep.weight_zero_point != nullptr;
  const bool scaled = ep.output != Epilogue::Output::sums;
  Columns zw = {}, constant, multiplier = {}, offset = {};
  if (weight_shifted) zw = load_columns(ep.weight_zero_point + n);
  if (scaled) multiplier = load_columns(ep.multiplier + n);
  if (scaled && ep.offset) offset = load_columns(ep.offset + n);
  const __m256i depth = _mm256_set1_epi32(static_cast<int32_t>(packed.k));
  for (int h = 0; h < 2; ++h)
    constant.half[h] =
        _mm256_mullo_epi32(za, _mm256_sub_epi32(_mm256_mullo_epi32(depth, zw.half[h]), column_sum.half[h]));
  const __m256 low = _mm256_set1_ps(ep.low), high = _mm256_set1_ps(ep.high);
  const __m256i out_zero = _mm256_set1_epi32(ep.out_zero_point);

  for (int64_t r = 0; r < rows; ++r) {
    alignas(32) int32_t words[kPanel];
    for (int h = 0; h < 2; ++h) {
      __m256i sum = _mm256_load_si256(reinterpret_cast<const __m256i*>(tile + r * kPanel + 8 * h));
      sum = _mm256_add_epi32(sum, constant.half[h]);
      if (weight_shifted)
        sum = _mm256_sub_epi32(sum, _mm256_mullo_epi32(zw.half[h], _mm256_set1_epi32(ep.row_sums[row + r])));
      if (scaled) {
        __m256 y = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_castsi256_ps(multiplier.half[h]));
        if (ep.offset) y = _mm256_add_ps(y, _mm256_castsi256_ps(offset.half[h]));
        if (ep.output == Epilogue::Output::floats) {
          if (ep.relu) y = _mm256_max_ps(_mm256_setzero_ps(), y);  // NaN in the second operand is kept
          sum = _mm256_castps_si256(y);
        } else {
          y = _mm256_and_ps(y, _mm256_cmp_ps(y, y, _CMP_ORD_Q));
          y = _mm256_min_ps(_mm256_max_ps(y, low), high);
          sum = _mm256_add_epi32(_mm256_cvtps_epi32(y), out_zero);
        }
      }
      _mm256_store_si256(reinterpret_cast<__m256i*>(words + 8 * h), sum);
    }
    const int64_t at = (row + r) * ep.out_stride + n - ep.out_column;
    if (ep.output != Epilogue::Output::codes) {
      std::memcpy(static_cast<int32_t*>(ep.out) + at, words, static_cast<size_t>(columns) * sizeof(int32_t));
      continue;
    }
    // Codes fit 8 bits already, so taking the low byte of every lane keeps their value, signed or not.
    const __m256i low_byte = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                              0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 3, 6, 7);
    alignas(16) uint8_t codes[kPanel];
    for (int h = 0; h < 2; ++h) {
      const __m256i lanes = _mm256_load_si256(reinterpret_cast<const __m256i*>(words + 8 * h));
      const __m256i packed_codes = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(lanes, low_byte), order);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(codes + 8 * h), _mm256_castsi256_si128(packed_codes));
    }
    std::memcpy(static_cast<uint8_t*>(ep.out) + at, codes, static_cast<size_t>(columns));
  }
}

}  // namespace
}  // namespace zeropoint::gemm
