// Scale and zero point from a range.
#pragma once
#include <cstdint>

namespace zeropoint::elementwise {

struct Qparams {
  double scale;
  int64_t zero_point;
};

// zeropoint.grid.choose_qparams, not symmetric: the same float64 operations in the same order.
Qparams choose_qparams(double low, double high, int64_t quant_min, int64_t quant_max);

}  // namespace zeropoint::elementwise
