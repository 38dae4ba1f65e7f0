#include "fake_quantize/kernels.h"
#include "fake_quantize/plain.h"

namespace zeropoint::fake_quantize {
namespace {

void round(const float* x, float* y, uint8_t* mask, int64_t n, Steps steps) {
  for (int64_t i = 0; i < n; ++i)
    mask[i] = round_one(x[i], &y[i], steps.inverse, steps.scale, 0.0f, steps.low, steps.high);
}

void pass(const float* grad, const uint8_t* mask, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = grad[i] * static_cast<float>(mask[i]);
}

}  // namespace

const Kernels& kernels_portable() {
  static const Kernels table{round, pass, range_of<float>};
  return table;
}

}  // namespace zeropoint::fake_quantize
