// The inner loops of fake quantize: serial, over contiguous float32, one table an instruction set.
//
//   p = rint(x * inverse)      y = (clamp(p, low, high) + 0) * scale      mask = low <= p <= high
//
// `low` and `high` are counted from the zero point. NaN stays NaN with a mask of 0; "+ 0" makes of -0 the +0 that an
// integer code would give.
#pragma once
#include <cstdint>

namespace zeropoint::fake_quantize {

struct Steps {
  float inverse;
  float scale;
  float low;
  float high;
};

struct Kernels {
  void (*round)(const float* x, float* y, uint8_t* mask, int64_t n, Steps steps);
  // out = grad * mask, where the mask is 0 or 1
  void (*pass)(const float* grad, const uint8_t* mask, float* out, int64_t n);
  // Merges the finite values into *low and *high; returns whether all were finite.
  bool (*range)(const float* x, int64_t n, float* low, float* high);
};

const Kernels& kernels();
const Kernels& kernels_portable();
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();

}  // namespace zeropoint::fake_quantize
