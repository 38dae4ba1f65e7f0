// One direction of one recurrent layer with int8 weights, over all steps. Defined by zeropoint.ops.rnn.
#pragma once
#include <cstdint>

#include "gemm/kernel.h"
#include "parallel.h"

namespace zeropoint::rnn {

enum class Mode { lstm, gru, tanh, relu };

constexpr int64_t gates_of(Mode mode) { return mode == Mode::lstm ? 4 : mode == Mode::gru ? 3 : 1; }

// Reals from rows of reals, every row on its own quint8 grid. At most gemm::kMaxNarrowDepth columns.
struct Projection {
  gemm::Packed weight;
  const float* scale = nullptr;         // [n]
  const int32_t* zero_point = nullptr;  // [n], or null: all 0
  const float* bias = nullptr;          // [n], or null
};

struct Call {
  Mode mode = Mode::lstm;
  bool reverse = false;
  int64_t steps = 0, hidden = 0;
  const int64_t* batch_sizes = nullptr;  // [steps], not rising
  const float* x = nullptr;              // the rows of all steps, one step after the other
  Projection input, recurrent;           // n = gates * hidden
  // What the int8 weights of the input leave of the real ones: with it, inputs and weights have 16 bits. Null: none.
  const Projection* input_rest = nullptr;
  const Projection* output = nullptr;    // from the hidden units to the state; null: they are the state
  float* h = nullptr;                    // [batch_sizes[0] or more][state]: before, and then after
  float* c = nullptr;                    // the same of the cells, [...][hidden]; lstm only
  float* out = nullptr;                  // the states of all steps
};

void recurrent(const Call& call, const Parallel& parallel);

}  // namespace zeropoint::rnn
