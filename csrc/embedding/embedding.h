// Rows of 8- or 4-bit codes back to reals, one by one or a bag at a time. Defined by zeropoint.ops.embedding.
#pragma once
#include <cstdint>

#include "parallel.h"

namespace zeropoint::embedding {

struct Table {
  const uint8_t* codes = nullptr;  // [rows][row_bytes]; with 4 bits the first code of a byte is its low half
  const float* scale = nullptr;    // [rows]
  const float* zero_point = nullptr;
  int64_t rows = 0, columns = 0, row_bytes = 0;
  int bits = 8;
};

enum class Mode { sum, mean, max };

struct Bags {
  const int64_t* indices = nullptr;  // every one in [0, rows)
  const int64_t* bounds = nullptr;   // [count + 1], rising, within the indices
  int64_t count = 0;
  Mode mode = Mode::sum;
  const float* weights = nullptr;  // of the indices, or null
  int64_t padding = -1;            // an index that does not count; -1: none
};

// out: dense rows of `columns`.
void rows(const Table& table, const int64_t* indices, int64_t count, float* out, const Parallel& parallel);
void bags(const Table& table, const Bags& bags, float* out, const Parallel& parallel);

}  // namespace zeropoint::embedding
