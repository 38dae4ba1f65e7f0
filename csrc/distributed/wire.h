// Gradients as bytes: quantize, and add up what was received. The forms are told in ops/distributed.py.
//
// Two layers. `Kernels` are serial loops over contiguous memory, one table an instruction set. The functions below them
// cut tensors into rows and blocks, and share the work out.
#pragma once
#include <cstdint>

#include "parallel.h"

namespace zeropoint::wire {

struct Kernels {
  // Smallest and largest value, not above and not below 0; both NaN if there is a NaN.
  void (*range)(const float* x, int64_t n, float* low, float* high);
  // code = clamp(rint(x * inverse), -zero, 255 - zero) + zero, NaN counts as 0
  void (*row_codes)(const float* x, uint8_t* out, int64_t n, float inverse, float zero);
  // out = out + (code - zero) * scale, two roundings
  void (*add_row)(const uint8_t* codes, float* out, int64_t n, float zero, float scale);

  // The loops over blocks: n is a multiple of 32.
  // Largest magnitude; NaN if there is a NaN.
  float (*largest)(const float* x, int64_t n);
  // code = clamp(rint(x * inverse), -limit, limit), with limit 127 or 7
  void (*block_codes8)(const float* x, uint8_t* out, int64_t n, float inverse);
  void (*block_codes4)(const float* x, uint8_t* out, int64_t n, float inverse);
  // code = clamp(floor(x * inverse + noise(first + i)), -limit, limit)
  void (*random_codes8)(const float* x, uint8_t* out, int64_t n, float inverse, uint32_t seed, uint32_t first);
  void (*random_codes4)(const float* x, uint8_t* out, int64_t n, float inverse, uint32_t seed, uint32_t first);
  // out = code * scale, and out = out + code * scale
  void (*block_values8)(const uint8_t* codes, float* out, int64_t n, float scale);
  void (*block_values4)(const uint8_t* codes, float* out, int64_t n, float scale);
  void (*add_block8)(const uint8_t* codes, float* out, int64_t n, float scale);
  void (*add_block4)(const uint8_t* codes, float* out, int64_t n, float scale);
};

// The table of the active instruction set.
const Kernels& kernels();

const Kernels& kernels_portable();
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();

// --- rows: `rows` times `row` elements hold `n`, the last row perhaps not all of its own --------------------------

void row_range(const float* x, int64_t n, int64_t row, float* low, float* high, const Parallel& parallel);

// Codes of missing elements are the zero point.
void row_quantize(const float* x, int64_t n, int64_t row, const float* scale, const float* zero, uint8_t* codes,
                  const Parallel& parallel);

// codes (ranks, rows, row), qparams (ranks, 2, rows): out[i] = the sum over ranks, in their order, from 0.
void row_sum(const uint8_t* codes, const float* qparams, int64_t ranks, int64_t rows, int64_t row, float* out, int64_t n,
             const Parallel& parallel);

// --- blocks -------------------------------------------------------------------------------------------------------

struct Form {
  int bits;       // 8 or 4
  int64_t block;  // elements, a multiple of 32

  int64_t code_bytes() const { return block * bits / 8; }
  int64_t block_bytes() const { return 4 + code_bytes(); }
};

// Packed rows: the scales of `count` blocks, then their codes.
struct Packed {
  const uint8_t* data;
  int64_t rows;
  int64_t stride;  // bytes from row to row
  int64_t count;   // blocks a row
};

// x (n) into `chunks` rows of `count` blocks, one after the other without gaps; missing elements are 0.
// `seed` null rounds to nearest.
void block_pack(const float* x, int64_t n, Form form, int64_t chunks, int64_t count, const uint32_t* seed, uint8_t* out,
                const Parallel& parallel);

// out (count * block): the sum over rows, in their order.
void block_sum(Packed packed, Form form, float* out, const Parallel& parallel);

// out (n): the first n values, row after row.
void block_unpack(Packed packed, Form form, float* out, int64_t n, const Parallel& parallel);

}  // namespace zeropoint::wire
