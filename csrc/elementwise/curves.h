// Functions whose result depends on more than the code itself: on its channel (PReLU), on its row (softmax).
#pragma once
#include <vector>

#include "elementwise/elementwise.h"

namespace zeropoint::elementwise {

// (code - zero_point) * above, or * below[channel] under the zero point, on another grid.
void prelu(const void* codes, Type type, Channels view, int64_t zero_point, float above,
           const std::vector<float>& below, Grid grid, void* out, Type out_type, const Parallel& parallel);

// Softmax over `view`'s channels of reals `code * scale`, quantized by `1 / out_scale`.
void softmax(const void* codes, Type type, Channels view, double scale, double out_scale, Grid grid, void* out,
             Type out_type, const Parallel& parallel);

}  // namespace zeropoint::elementwise
