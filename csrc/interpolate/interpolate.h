// Resizing of codes on their own grid. Defined by zeropoint.ops.interpolate.
#pragma once
#include <cstdint>
#include <vector>

#include "elementwise/elementwise.h"
#include "parallel.h"

namespace zeropoint::interpolate {

using elementwise::Type;

// Memory is [outer][size 0][size 1][size 2][inner]: channels lie outside or inside. A missing dimension has size 1.
struct Shape {
  int64_t outer, inner;
  int64_t from[3], to[3];
};

// Which input position, or which two, an output position of one dimension reads: value[low] * (1 - share) +
// value[high] * share.
struct Places {
  std::vector<int64_t> low, high;
  std::vector<double> share;
};

void nearest(const Shape& shape, const Places (&places)[3], const void* x, Type type, void* out,
             const Parallel& parallel);
void linear(const Shape& shape, const Places (&places)[3], const void* x, Type type, int64_t zero_point, void* out,
            const Parallel& parallel);

enum class Mode : int64_t { nearest, nearest_exact, linear };

// How an output position is placed among the input's. `ratio`: input positions that one output position is.
struct Way {
  Mode mode = Mode::nearest;
  bool align_corners = false;  // of Mode::linear
  double ratio[3] = {1, 1, 1};
};

// Either of them, by the places that follow. No size may be 0.
void resize(const Shape& shape, const Way& way, const void* x, Type type, int64_t zero_point, void* out,
            const Parallel& parallel);

}  // namespace zeropoint::interpolate
