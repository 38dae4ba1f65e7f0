// The inner loops of recurrent layers: serial, over contiguous memory, one table an instruction set.
//
// Every product, sum and quotient rounds by itself in float32: zeropoint.ops.rnn defines the order of them.
#pragma once
#include <cstdint>

namespace zeropoint::rnn {

// What turns the raw sums of codes of one row into the exact sums, and those into reals (gemm/kernel.h, "Algebra").
struct Row {
  float scale;
  uint32_t zero_point, sum, depth;
};
struct Columns {
  const int32_t* sums;
  const int32_t* zero_point;  // null: all 0
  const float* scale;
  const float* bias;  // null: none
};

// The two projections of one step. Gates are `given_stride` and `recurrent_stride` apart.
struct Gates {
  const float* given;
  const float* recurrent;
  int64_t given_stride, recurrent_stride;
};

struct Kernels {
  // out = float(exact sum) * (row.scale * scale[i]) + bias[i]
  void (*finish)(const int32_t* raw, Row row, Columns columns, float* out, int64_t n);
  void (*lstm)(Gates gates, float* c, float* h, int64_t n);
  void (*gru)(Gates gates, const float* before, float* h, int64_t n);
  void (*tanh)(Gates gates, float* h, int64_t n);
  void (*relu)(Gates gates, float* h, int64_t n);
};

// The table of the active instruction set.
const Kernels& kernels();

const Kernels& kernels_portable();
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();

}  // namespace zeropoint::rnn
