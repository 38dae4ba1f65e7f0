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

}  // namespace zeropoint::fake_quantize
