// Linear layers on the exact product of kernel.h: from codes to codes, and from floats to floats.
#pragma once
#include <cstdint>

#include "gemm/kernel.h"

namespace zeropoint::gemm {

// Numbers of any of four types; one number alone stands for all columns.
struct Numbers {
  enum class Type { f32, f64, i32, i64 };
  const void* data = nullptr;  // null: there are none
  Type type = Type::f32;
  int64_t count = 0;
};

struct Layer {
  Packed weight;
  Numbers scale, zero_point, bias;  // of the columns; bias in real values
};

// out[m][n] = clamp(rint(float(sum) * multiplier[n] + offset[n]) + out_zero_point), each step rounded by itself, with
//   multiplier[n] = float(x_scale * scale[n] / out_scale)     offset[n] = float(bias[n] / out_scale).
struct CodesCall {
  const uint8_t* x = nullptr;  // m dense rows of K codes
  bool x_signed = false;
  int64_t m = 0;
  double x_scale = 1, out_scale = 1;
  int32_t x_zero_point = 0, out_zero_point = 0, out_min = 0, out_max = 255;
  uint8_t* out = nullptr;  // m dense rows of N codes
};
void linear(const Layer& layer, const CodesCall& call, const Parallel& parallel);

// The activation grid is chosen from the finite range of all of `x`; codes are uint8. Then
//   out[m][n] = float(sum) * float(x_scale * scale[n]) + float(bias[n]), and ReLU.
struct FloatCall {
  const float* x = nullptr;  // m dense rows of K
  int64_t m = 0;
  bool reduce_range = false, relu = false;
  float* out = nullptr;  // m dense rows of N
};
void linear_dynamic(const Layer& layer, const FloatCall& call, const Parallel& parallel);

}  // namespace zeropoint::gemm
