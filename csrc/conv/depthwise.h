// Depthwise convolution: output channel o reads input channel o / multiplier only.
//
// The kernels work on blocks of 64, 32 or 16 channels. For one block and one output row, the input rows that meet the
// kernel are first copied to a ring of rows in L1: padded left and right with the zero point, signed codes flipped to
// unsigned ones (gemm/kernel.h), channels of the block side by side. A row that the next output row needs again stays
// in the ring. So the kernels see no borders, no signs, and constant distances.
//
// A kernel of R rows (depth x height) and KW columns is cut into KW columns of ceil(R / T) groups of T taps: T codes of
// one channel, one below the other, form the 32-bit lane of a dot product instruction. They are interleaved once and
// used by every output position whose kernel covers the column.
//   Form::quads  T = 4 bytes:          vpdpbusd, weights int8 (all weight zero points 0)
//   Form::pairs  T = 2 16-bit words:   vpmaddwd, weights int16, weight - zero point
//   Form::single T = 1:                portable, weights int16, weight - zero point
// A kernel of one row has its columns take the place of rows (R = KW, KW = 1), or most lanes would be empty. Where T = 2 and
// R is odd, the taps of the last row are paired along it: those of columns k and k + 1, for even k; of odd k none is left.
//
// Packed weights of a block of W channels: [KW][groups][W lanes][T]. Lanes are in the order in which unpacking bytes
// leaves them (`lane_of`), which packing back to bytes undoes.
#pragma once
#include <cstdint>
#include <vector>

#include "conv/conv.h"

namespace zeropoint::conv::depthwise {

enum class Form : uint32_t { single = 0, pairs = 1, quads = 2 };

constexpr int64_t kMaxTaps = 1024;  // longer kernels are computed as dense groups

// The rows and columns of the kernel as the row kernels see them.
struct Kernel {
  int64_t rows, columns;
  bool swapped;  // columns stand for rows
};
Kernel kernel_of(const WeightSize& size);

// What one call of a row kernel computes: `columns` output positions of one row, for one block of channels.
struct Row {
  const uint8_t* const* rows;  // one pointer a kernel row, at the first tap of the first output position
  const void* weights;         // of this block
  int64_t kernel_rows, kernel_columns;
  int64_t stride;    // input positions from one output position to the next
  int64_t dilation;  // input positions from one kernel column to the next
  int64_t columns;
  const int32_t* start;  // by lane: what the sum starts from
  const float* multiplier;
  const float* offset;
  float high;   // out_max - out_zero_point
  int32_t low;  // out_min - out_zero_point
  int32_t out_zero_point;
  bool out_signed;
  uint8_t* out;
  int64_t out_stride;
  int64_t channels;  // of the block that exist: bytes to store
};
using RowKernel = void (*)(const Row&);

// Copies `count` input positions of a block of channels next to each other, each byte exclusive-or `flip`.
using CopyPositions = void (*)(const uint8_t* from, int64_t from_stride, int64_t count, uint8_t flip, uint8_t* to);

// A row kernel for blocks of a given width, and how many output positions it computes at once: it may read as many
// input positions as if `columns` were rounded up to that.
struct Choice {
  RowKernel run = nullptr;
  CopyPositions copy = nullptr;
  int64_t tile = 1;
};
Choice choose_portable();
Choice choose_avx2(int64_t width, const Kernel& kernel, int64_t stride, int64_t dilation);
Choice choose_avx512vnni(int64_t width, const Kernel& kernel, int64_t stride, int64_t dilation);

// Place of channel `c` of a block in the order of lanes: vector v of four holds channels 4v to 4v + 3 of every 16.
constexpr int64_t lane_of(int64_t width, int64_t c) {
  return (c % 16) / 4 * (width / 4) + c / 16 * 4 + c % 4;
}

// Whether a group of taps is the last row's, paired along it. Static, as files of several instruction sets include this.
static constexpr bool pairs_along(int64_t taps, int64_t kernel_rows, int64_t group) {
  return taps == 2 && kernel_rows % 2 == 1 && group == kernel_rows / 2;
}

Form form_of(Isa isa, bool weight_zero_points);

// Packs weights for a form: sums by lane (int32), then the blocks. `weight_zero_point` may be null.
int64_t packed_bytes(Form form, const WeightSize& size);
void pack(Form form, const int8_t* weight, const int32_t* weight_zero_point, const WeightSize& size, uint8_t* to);

void run(Form form, const Geometry& geometry, const uint8_t* x, bool x_signed, int32_t x_zero_point,
         const uint8_t* packed, const Requantize& requantize, uint8_t* out, const Parallel& parallel);

}  // namespace zeropoint::conv::depthwise
