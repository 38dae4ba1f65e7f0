// Normalization of codes. Statistics are exact integers; everything that follows is float64, rounded to float32 once
// for each multiplier and offset. docs/design.md, "Numeric contract", 8 and 10.
#pragma once
#include <cstdint>
#include <vector>

#include "elementwise/elementwise.h"
#include "parallel.h"

namespace zeropoint::norm {

using elementwise::Grid;
using elementwise::Type;

// (real - mean) / sqrt(var + eps) * weight + bias, in steps: `factor` for a step of the input, `offset` of the output.
struct Line {
  float factor;
  float offset;
};
Line line(double weight, double bias, double mean, double var, double eps, double x_scale, double out_scale);

struct Input {
  const void* codes;
  Type type;
  double scale;
  int64_t zero_point;
};

// `rows` rows of `size` contiguous codes; gain and shift, one an element of a row, are in steps of the output grid.
void layer_norm(Input x, int64_t rows, int64_t size, double eps, const std::vector<float>& gain,
                const std::vector<float>& shift, Grid grid, void* out, Type out_type, const Parallel& parallel);

// (batch, channels, spatial), or (batch, spatial, channels) in memory when `channels_last`.
struct Shape {
  int64_t batch;
  int64_t channels;
  int64_t spatial;
  bool channels_last;
};
void group_norm(Input x, Shape shape, int64_t groups, double eps, const std::vector<double>& weight,
                const std::vector<double>& bias, double out_scale, Grid grid, void* out, Type out_type,
                const Parallel& parallel);

}  // namespace zeropoint::norm
