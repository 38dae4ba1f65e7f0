// Loops in float64, serial, over contiguous memory, one table an instruction set. Every product, sum and quotient
// rounds by itself.
#pragma once
#include <cstdint>

#include "elementwise/elementwise.h"

namespace zeropoint::wide {

using elementwise::Type;

struct Kernels {
  // out = code - zero
  void (*widen)(const void* codes, Type type, int64_t n, double zero, double* out);
  // out = low * (1 - share) + high * share
  void (*mix)(const double* low, const double* high, double share, int64_t n, double* out);
  // The same of x[low[i]] and x[high[i]], with a share each
  void (*mix_each)(const double* x, const int64_t* low, const int64_t* high, const double* share, int64_t n, double* out);
  // out = clamp(rint(x * factor) + zero, low, high), codes; x * factor is a number within 2^51 of zero
  void (*store)(const double* x, double factor, int64_t n, double zero, double low, double high, void* out, Type type);
  // The largest code, and out = table[largest - code]; 8-bit codes, a table of 256
  void (*below_largest)(const void* codes, Type type, int64_t n, const double* table, double* out);
  // The sum in eight lanes, element i in lane i % 8; then lanes 4 apart are added, 2 apart, and the last two.
  double (*sum)(const double* x, int64_t n);
};

// The table of the active instruction set.
const Kernels& kernels();

const Kernels& kernels_portable();
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();

}  // namespace zeropoint::wide
