// Exact int8 convolution in one to three dimensions. No torch: pointers, sizes, threads through Parallel.
//
// Every convolution is lifted to three spatial dimensions (depth, height, width; missing ones are 1). Activations and
// outputs are channels-last: (batch, depth, height, width, channels), dense.
//
// Two ways to compute, chosen from the weight's sizes alone (`kind_of`), so that weights can be packed before an input
// is seen:
//   dense      The matrix product of gemm/kernel.h, once a group. A row of the left matrix is one output position: the
//              channels of all its taps. There is no im2col buffer: a tile of rows is gathered, used for all columns,
//              and overwritten by the next. A 1x1 convolution over unsigned codes reads its rows in place.
//   depthwise  One input channel an output channel: kernels of its own, vectorized over channels (depthwise.h).
#pragma once
#include <cstdint>

#include "aligned_bytes.h"
#include "isa.h"
#include "parallel.h"

namespace zeropoint::conv {

// Sizes of a weight, (out_channels, group_channels, kernel), and the number of groups.
struct WeightSize {
  int64_t out_channels = 1, group_channels = 1, groups = 1;
  int64_t kernel[3] = {1, 1, 1};

  int64_t taps() const { return kernel[0] * kernel[1] * kernel[2]; }
  int64_t depth() const { return taps() * group_channels; }
  int64_t group_columns() const { return out_channels / groups; }
  int64_t in_channels() const { return group_channels * groups; }
};

struct Geometry {
  WeightSize weight;
  int64_t batch = 1;
  int64_t in[3] = {1, 1, 1}, out[3] = {1, 1, 1};
  int64_t stride[3] = {1, 1, 1}, dilation[3] = {1, 1, 1};
  int64_t padding[3] = {0, 0, 0};  // before the first position; what comes after follows from `out`

  int64_t in_positions() const { return in[0] * in[1] * in[2]; }
  int64_t out_positions() const { return out[0] * out[1] * out[2]; }
};

// From sums to codes, or to floats: `multiplier` and `offset` then give real values, and `relu` their lower bound 0.
// Arrays have out_channels entries; `offset` and `weight_zero_point` may be null.
struct Requantize {
  const float* multiplier = nullptr;
  const float* offset = nullptr;
  int32_t out_zero_point = 0, out_min = 0, out_max = 255;
  bool out_signed = false;
  bool floats = false, relu = false;

  int64_t out_bytes() const { return floats ? int64_t{sizeof(float)} : 1; }
};

enum class Kind : uint32_t { dense = 0, depthwise = 1 };

Kind kind_of(const WeightSize& size);

// Packs canonical weights (out_channels, group_channels, kernel), dense, for `isa`.
AlignedBytes pack(Isa isa, const int8_t* weight, const WeightSize& size, const Parallel& parallel);

// Convolves. `x`: int8 (x_signed) or uint8 codes, channels-last. `weight`: the canonical weights. `weight_zero_point`:
// one a channel, or null if all are 0. `packed`: what `pack` gave; bytes that do not fit the sizes and `isa` are
// ignored, and the weights are packed anew. `out`: int8 or uint8 codes, or floats, channels-last.
void run(Isa isa, const Geometry& geometry, const uint8_t* x, bool x_signed, int32_t x_zero_point, const int8_t* weight,
         const int32_t* weight_zero_point, const uint8_t* packed, int64_t packed_length, const Requantize& requantize,
         uint8_t* out, const Parallel& parallel);

// Whether `run` reads nothing but these packed bytes, and not the canonical weights, whatever the input is.
bool reads_packed_alone(Isa isa, const WeightSize& size, const uint8_t* packed, int64_t packed_length);

}  // namespace zeropoint::conv
