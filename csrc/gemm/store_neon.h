// The epilogue of kernel.h in NEON, for the kernels whose tile is one panel wide. Included only by files that are
// compiled for more than the baseline of AArch64; everything has internal linkage, as in store_avx2.h.
#pragma once
#include <arm_neon.h>

#include <cstring>

#include "gemm/kernels.h"

namespace zeropoint::gemm {
namespace {

constexpr int kQuarters = 4;  // registers of a panel's 16 columns

template <Epilogue::Output kOutput>
inline void store_panel_as(const int32_t* tile, int64_t row, int64_t rows, int64_t n, int64_t columns,
                           const Packed& packed, const Epilogue& ep) {
  constexpr bool kScaled = kOutput != Epilogue::Output::sums;
  const bool weight_shifted = ep.weight_zero_point != nullptr;
  int32x4_t zw[kQuarters], constant[kQuarters];
  float32x4_t multiplier[kQuarters], offset[kQuarters];
  for (int q = 0; q < kQuarters; ++q) {
    const int64_t at = n + 4 * q;
    zw[q] = weight_shifted ? vld1q_s32(ep.weight_zero_point + at) : vdupq_n_s32(0);
    const int32x4_t shifted = vmulq_n_s32(zw[q], static_cast<int32_t>(packed.k));
    constant[q] = vmulq_n_s32(vsubq_s32(shifted, vld1q_s32(packed.column_sums + at)), ep.activation_zero_point);
    multiplier[q] = kScaled ? vld1q_f32(ep.multiplier + at) : vdupq_n_f32(0.0f);
    offset[q] = kScaled && ep.offset ? vld1q_f32(ep.offset + at) : vdupq_n_f32(0.0f);
  }
  // Bounds are integers, so cutting after the rounding gives the same codes; the conversion itself saturates, and
  // takes NaN to 0.
  const int32x4_t low = vdupq_n_s32(static_cast<int32_t>(ep.low)), high = vdupq_n_s32(static_cast<int32_t>(ep.high));
  const int32x4_t out_zero = vdupq_n_s32(ep.out_zero_point);

  for (int64_t r = 0; r < rows; ++r) {
    int32x4_t sums[kQuarters];
    for (int q = 0; q < kQuarters; ++q) {
      int32x4_t sum = vaddq_s32(vld1q_s32(tile + r * kPanel + 4 * q), constant[q]);
      if (weight_shifted) sum = vmlsq_n_s32(sum, zw[q], ep.row_sums[row + r]);
      if constexpr (kScaled) {
        float32x4_t y = vmulq_f32(vcvtq_f32_s32(sum), multiplier[q]);
        if (ep.offset) y = vaddq_f32(y, offset[q]);
        if constexpr (kOutput == Epilogue::Output::floats) {
          if (ep.relu) y = vbslq_f32(vcltzq_f32(y), vdupq_n_f32(0.0f), y);  // NaN is kept
          sum = vreinterpretq_s32_f32(y);
        } else {
          sum = vaddq_s32(vminq_s32(vmaxq_s32(vcvtnq_s32_f32(y), low), high), out_zero);
        }
      }
      sums[q] = sum;
    }
    const int64_t at = (row + r) * ep.out_stride + n - ep.out_column;
    if constexpr (kOutput == Epilogue::Output::codes) {
      // Codes fit 8 bits already: taking the low byte of every lane keeps their value, signed or not.
      const int16x8_t left = vcombine_s16(vmovn_s32(sums[0]), vmovn_s32(sums[1]));
      const int16x8_t right = vcombine_s16(vmovn_s32(sums[2]), vmovn_s32(sums[3]));
      int8_t codes[kPanel];
      vst1q_s8(codes, vcombine_s8(vmovn_s16(left), vmovn_s16(right)));
      std::memcpy(static_cast<int8_t*>(ep.out) + at, codes, static_cast<size_t>(columns));
    } else {
      int32_t words[kPanel];
      for (int q = 0; q < kQuarters; ++q) vst1q_s32(words + 4 * q, sums[q]);
      std::memcpy(static_cast<int32_t*>(ep.out) + at, words, static_cast<size_t>(columns) * sizeof(int32_t));
    }
  }
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
