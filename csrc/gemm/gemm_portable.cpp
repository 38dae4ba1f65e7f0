// The reference kernel in plain C++: small loops that any compiler turns into the vectors it has.
#include "gemm/kernels.h"

namespace zeropoint::gemm {
namespace {

constexpr int64_t kRows = 4;

template <int Rows>
void multiply(const uint8_t* a, int64_t a_stride, const int8_t* panel, int64_t groups, int32_t* tile) {
  int32_t sums[Rows][kPanel] = {};
  for (int64_t g = 0; g < groups; ++g, a += kGroup, panel += kGroup * kPanel)
    for (int r = 0; r < Rows; ++r) {
      const uint8_t* x = a + r * a_stride;
      for (int64_t c = 0; c < kPanel; ++c)
        sums[r][c] += x[0] * panel[4 * c] + x[1] * panel[4 * c + 1] + x[2] * panel[4 * c + 2] + x[3] * panel[4 * c + 3];
    }
  for (int r = 0; r < Rows; ++r)
    for (int64_t c = 0; c < kPanel; ++c) tile[r * kPanel + c] = sums[r][c];
}

// To the nearest integer, ties to even, for |y| < 2**22: the sum has no bits left for a fraction.
inline float round_even(float y) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2**23
  return (y + kShift) - kShift;
}

inline float clamp(float y, float low, float high) {
  y = y == y ? y : 0.0f;
  y = y < low ? low : y;
  return y > high ? high : y;
}

}  // namespace

void store_tile_portable(const int32_t* tile, int64_t tile_stride, int64_t row, int64_t rows, int64_t column,
                         int64_t columns, const Packed& packed, const Epilogue& ep) {
  const uint32_t za = static_cast<uint32_t>(ep.activation_zero_point);
  const uint32_t depth = static_cast<uint32_t>(packed.k);
  for (int64_t r = 0; r < rows; ++r) {
    const uint32_t row_sum = ep.weight_zero_point ? static_cast<uint32_t>(ep.row_sums[row + r]) : 0;
    const int64_t at = (row + r) * ep.out_stride - ep.out_column;
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t n = column + c;
      const uint32_t zw = ep.weight_zero_point ? static_cast<uint32_t>(ep.weight_zero_point[n]) : 0;
      const uint32_t wrapped = static_cast<uint32_t>(tile[r * tile_stride + c]) +
                               za * (depth * zw - static_cast<uint32_t>(packed.column_sums[n])) - zw * row_sum;
      const int32_t sum = static_cast<int32_t>(wrapped);
      if (ep.output == Epilogue::Output::sums) {
        static_cast<int32_t*>(ep.out)[at + n] = sum;
        continue;
      }
      float y = static_cast<float>(sum) * ep.multiplier[n];
      if (ep.offset) y = y + ep.offset[n];
      if (ep.output == Epilogue::Output::floats) {
        static_cast<float*>(ep.out)[at + n] = ep.relu && y < 0.0f ? 0.0f : y;
      } else {
        const int32_t code = static_cast<int32_t>(round_even(clamp(y, ep.low, ep.high))) + ep.out_zero_point;
        static_cast<uint8_t*>(ep.out)[at + n] = static_cast<uint8_t>(code);
      }
    }
  }
}

void run_portable(const Job& job) {
  const Packed& packed = *job.packed;
  const int64_t groups = job.group_end - job.group_begin;
  for (int64_t n = job.n_begin; n < job.n_end; n += kPanel) {
    const int8_t* panel = packed.panel(n / kPanel) + job.group_begin * kGroup * kPanel;
    const int64_t columns = job.n_end - n < kPanel ? job.n_end - n : kPanel;
    for (int64_t row = 0; row < job.m; row += kRows) {
      const int64_t rows = job.m - row < kRows ? job.m - row : kRows;
      const uint8_t* a = job.a + row * job.a_stride + job.group_begin * kGroup;
      int32_t tile[kRows * kPanel];
      if (rows == kRows)
        multiply<kRows>(a, job.a_stride, panel, groups, tile);
      else
        for (int64_t r = 0; r < rows; ++r) multiply<1>(a + r * job.a_stride, 0, panel, groups, tile + r * kPanel);
      store_tile_portable(tile, kPanel, row, rows, n, columns, packed, *job.epilogue);
    }
  }
}

}  // namespace zeropoint::gemm
