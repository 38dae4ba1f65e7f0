// Fake quantize over pointers and sizes: threads, dtypes, channels. docs/design.md, "Numeric contract" 1 and 2.
#pragma once
#include <cstdint>

#include "elementwise/elementwise.h"
#include "parallel.h"

namespace zeropoint::fake_quantize {

using elementwise::ChannelGrid;
using elementwise::Channels;
using elementwise::Type;

// Values on the grid, in x's type, and whether each rounded code lay in [low, high] before it was saturated. One grid
// for the whole memory is the view {1, 1, n}.
void round(const void* x, Type type, Channels view, const ChannelGrid& grid, int64_t low, int64_t high, void* y,
           uint8_t* mask, const Parallel& parallel);

// out = grad * mask
void pass(const void* grad, Type type, const uint8_t* mask, int64_t n, void* out, const Parallel& parallel);

// The finite range of each channel as float32, merged into low[c] and high[c]; returns whether all values were finite.
bool ranges(const void* x, Type type, Channels view, float* low, float* high, const Parallel& parallel);

// v + c * (batch - v) in float32; an infinite v is "nothing yet", an infinite batch "nothing now".
float moving_average(float old, float batch, double constant);

struct Codes {
  int64_t low;
  int64_t high;
  bool symmetric;
  int64_t middle;  // the zero point of a symmetric grid
};

// The grid of a range, as zeropoint.ops.fake_quantize.moving_average_qparams makes it; (1, 0) for low > high.
void grid_of(float low, float high, Codes codes, float eps, float* scale, int32_t* zero_point);

}  // namespace zeropoint::fake_quantize
