// A whole network in one call: a program of integer kernels over one arena of reused buffers.
//
// The program is a list of 64-bit words that src/zeropoint/plan.py writes: instruction after instruction, each an
// opcode and its fields in the order in which `run` reads them. A buffer is named by two words, (memory, byte offset).
// Memory 0 is the arena; inputs, outputs and constants follow. Doubles are stored as their bits.
//
// The program is not trusted: every buffer is checked to lie inside its memory before a kernel sees it, and every size
// to make sense, so that a broken program is an exception and never a crash.
#pragma once
#include <cstdint>
#include <vector>

#include "parallel.h"

namespace zeropoint::plan {

struct Memory {
  uint8_t* data = nullptr;
  int64_t size = 0;
  bool writable = false;
};

enum class Opcode : int64_t {
  quantize = 1,
  dequantize = 2,
  convolve = 3,
  linear = 4,
  add = 5,
  mul = 6,
  lookup = 7,
  copy = 8,
  max_pool = 9,
  average_pool = 10,
  channels_last = 11,
  resize = 12,
  convolve_transposed = 13,
};

// Runs `words`. Throws std::invalid_argument, saying which instruction is wrong; outputs may then be half written.
void run(const int64_t* words, int64_t count, const std::vector<Memory>& memories, const Parallel& parallel);

}  // namespace zeropoint::plan
