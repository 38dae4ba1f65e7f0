// Exact int8 transposed convolution, by way of convolutions. No torch.
//
// Output position o of one dimension sums over the taps k with  o + padding - k * dilation = stride * i, i an input
// position. The outputs with one remainder  r = (o + padding) mod stride  share their taps: k = first, first + step, ...
// and for them the sum is a convolution of stride 1 over the input, its taps in reverse order. So there is one ordinary
// convolution (conv.h) for every combination of remainders that has taps, at most as many as the kernel has taps, and
// no input is widened with zeros. Each writes its outputs, which then go to their places; outputs without taps are constant.
#pragma once
#include <cstdint>
#include <vector>

#include "conv/conv.h"

namespace zeropoint::conv {

// A weight (in_channels, out_channels / groups, kernel), and what decides which taps meet.
struct TransposedWeight {
  int64_t in_channels = 1, out_channels = 1, groups = 1;
  int64_t kernel[3] = {1, 1, 1}, stride[3] = {1, 1, 1}, dilation[3] = {1, 1, 1};
};

struct TransposedGeometry {
  TransposedWeight weight;
  int64_t batch = 1;
  int64_t in[3] = {1, 1, 1}, out[3] = {1, 1, 1};
  int64_t padding[3] = {0, 0, 0};
};

// Packs canonical weights, dense, for `isa`: what `pack` makes of every convolution.
AlignedBytes pack_transposed(Isa isa, const int8_t* weight, const TransposedWeight& size, const Parallel& parallel);

// As `run` of conv.h. Arrays have one entry an output channel.
void run_transposed(Isa isa, const TransposedGeometry& geometry, const uint8_t* x, bool x_signed,
                    int32_t x_zero_point, const int8_t* weight, const int32_t* weight_zero_point,
                    const uint8_t* packed, int64_t packed_length, const Requantize& requantize, uint8_t* out,
                    const Parallel& parallel);

}  // namespace zeropoint::conv
