// Dense and grouped convolution on the matrix kernel. The left matrix is walked in place (strip.h) where the instruction
// set knows how, and else gathered tile by tile (gather.h); it never exists as a whole.
#pragma once
#include <cstdint>
#include <vector>

#include "conv/conv.h"
#include "gemm/kernel.h"

namespace zeropoint::conv::dense {

// Codes from one kernel line to the next in the rows of the packed matrix. Kernels that walk take whole groups of codes
// from every line.
int64_t line_codes(Isa isa, const WeightSize& size);

// Depth of the packed matrix.
inline int64_t depth(Isa isa, const WeightSize& size) {
  return size.kernel[0] * size.kernel[1] * line_codes(isa, size);
}

// Packs each group for gemm: canonical weights have a channel's taps together, rows of the matrix a tap's channels.
std::vector<AlignedBytes> pack(Isa isa, const int8_t* weight, const WeightSize& size, const Parallel& parallel);

void run(const std::vector<gemm::Packed>& groups, const Geometry& geometry, const uint8_t* x, bool x_signed,
         int32_t x_zero_point, const int32_t* weight_zero_point, const Requantize& requantize, uint8_t* out,
         const Parallel& parallel);

}  // namespace zeropoint::conv::dense
