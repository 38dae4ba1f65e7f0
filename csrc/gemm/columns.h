// What the sums of each column of a product are scaled and shifted with: arrays made from the grids of the input, the
// weights and the output, for one call or for all calls that meet these grids.
#pragma once
#include <cstdint>

namespace zeropoint::gemm {

// Numbers of any of four types; one number alone stands for all columns.
struct Numbers {
  enum class Type { f32, f64, i32, i64 };
  const void* data = nullptr;  // null: there are none
  Type type = Type::f32;
  int64_t count = 0;
};

// Arrays of padded_columns(N) entries.
struct Columns {
  const float* multiplier = nullptr;    // float(x_scale * scale[n] / out_scale)
  const float* offset = nullptr;        // float(bias[n] / out_scale); null: there is no bias
  const int32_t* zero_point = nullptr;  // of the weights; null: all are 0
};

// Of the columns: scales and zero points of the weights, and a bias in real values.
struct ColumnNumbers {
  Numbers scale, zero_point, bias;
};

// Bytes of the arrays of n columns.
int64_t column_bytes(int64_t n);

// Memory for them of the calling thread, until its next call.
void* column_memory(int64_t n);

// Writes entries [begin, end) of the arrays of n columns, and zeros behind them up to a whole panel.
Columns write_columns(const ColumnNumbers& numbers, double x_scale, double out_scale, int64_t begin, int64_t end,
                      int64_t n, void* memory);

// The arrays in memory that `write_columns` has written.
Columns read_columns(const void* memory, int64_t n, bool has_offset, bool has_zero_point);

// to[i] = float(factor * from[i] / divisor), the product and the quotient in float64. T: float, double, int32, int64.
template <class T>
void ratios(const T* from, int64_t count, double factor, double divisor, float* to);

}  // namespace zeropoint::gemm
