// Linear layers on the exact product of kernel.h: from codes to codes, and from floats to floats.
#pragma once
#include <cstdint>

#include "gemm/columns.h"
#include "gemm/kernel.h"

namespace zeropoint::gemm {

struct Layer {
  Packed weight;
  ColumnNumbers columns;
};

// out[m][n] = clamp(rint(float(sum) * multiplier[n] + offset[n]) + out_zero_point), each step rounded by itself.
struct CodesCall {
  const uint8_t* x = nullptr;  // m dense rows of K codes
  bool x_signed = false;
  int64_t m = 0;
  int32_t x_zero_point = 0, out_zero_point = 0, out_min = 0, out_max = 255;
  uint8_t* out = nullptr;  // m dense rows of N codes
};
void linear(const Packed& weight, const Columns& columns, const CodesCall& call, const Parallel& parallel);

// The same for one call, whose arrays are made first.
void linear(const Layer& layer, double x_scale, double out_scale, const CodesCall& call, const Parallel& parallel);

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
