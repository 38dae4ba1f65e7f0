// The row kernel of depthwise convolution, once for every vector width. Included by one file an instruction set, which
// gives it a `Vector`: how T codes of a channel are interleaved, multiplied, and how sums become codes.
//
// Everything is in an unnamed namespace, and nothing of the standard library is used: code of this file compiled for
// one instruction set must never be linked in place of another's.
#pragma once
#include <cstdint>
#include <cstring>

#include "conv/depthwise.h"

namespace zeropoint::conv::depthwise {
namespace {

// Adds one kernel column at input position `at` (bytes) to the sums of `OT` output positions, of which position o uses
// the kernel column j - o * S where there is one.
template <class V, int R, int KW, int S, int OT>
struct Tile {
  using Sums = typename V::Int[OT][4];
  static constexpr int kGroups = (R + V::kTaps - 1) / V::kTaps;

  static inline __attribute__((always_inline)) void add(const Row& row, int64_t first, Sums& sums) {
    const uint8_t* weights = static_cast<const uint8_t*>(row.weights);
#pragma GCC unroll 16
    for (int j = 0; j < (OT - 1) * S + KW; ++j) {
#pragma GCC unroll 8
      for (int g = 0; g < kGroups; ++g) {
        typename V::Int x[4];
        const uint8_t* taps[V::kTaps];
#pragma GCC unroll 4
        for (int t = 0; t < V::kTaps; ++t) {
          const int r = g * V::kTaps + t;
          taps[t] = row.rows[r < R ? r : R - 1] + (first * S + j) * V::kWidth;  // beyond R the weights are zero
        }
        V::interleave(taps, x);
#pragma GCC unroll 8
        for (int o = 0; o < OT; ++o) {
          const int k = j - o * S;
          if (k < 0 || k >= KW) continue;
#pragma GCC unroll 4
          for (int v = 0; v < 4; ++v)
            sums[o][v] = V::dot(sums[o][v], x[v], weights + ((k * kGroups + g) * 4 + v) * V::kBytes);
        }
      }
    }
  }
};

template <class V>
inline __attribute__((always_inline)) void store(const Row& row, typename V::Int (&sums)[4], int64_t position) {
  uint8_t* out = row.out + position * row.out_stride;
  if (row.channels == V::kWidth) {
    V::store(row, sums, out);
  } else {
    alignas(64) uint8_t whole[V::kWidth];
    V::store(row, sums, whole);
    std::memcpy(out, whole, static_cast<size_t>(row.channels));
  }
}

template <class V, int R, int KW, int S, int OT>
void run_fixed(const Row& row) {
  for (int64_t first = 0; first < row.columns; first += OT) {
    typename V::Int sums[OT][4];
#pragma GCC unroll 8
    for (int o = 0; o < OT; ++o)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) sums[o][v] = V::start(row.start, v);
    Tile<V, R, KW, S, OT>::add(row, first, sums);
#pragma GCC unroll 8
    for (int o = 0; o < OT; ++o)
      if (first + o < row.columns) store<V>(row, sums[o], first + o);
  }
}

template <class V>
void run_any(const Row& row) {
  const int64_t groups = (row.kernel_rows + V::kTaps - 1) / V::kTaps;
  for (int64_t o = 0; o < row.columns; ++o) {
    typename V::Int sums[4];
    for (int v = 0; v < 4; ++v) sums[v] = V::start(row.start, v);
    const uint8_t* weights = static_cast<const uint8_t*>(row.weights);
    for (int64_t k = 0; k < row.kernel_columns; ++k) {
      const int64_t at = (o * row.stride + k * row.dilation) * V::kWidth;
      for (int64_t g = 0; g < groups; ++g, weights += 4 * V::kBytes) {
        const uint8_t* taps[V::kTaps];
        for (int t = 0; t < V::kTaps; ++t) {
          const int64_t r = g * V::kTaps + t;
          taps[t] = row.rows[r < row.kernel_rows ? r : row.kernel_rows - 1] + at;
        }
        typename V::Int x[4];
        V::interleave(taps, x);
        for (int v = 0; v < 4; ++v) sums[v] = V::dot(sums[v], x[v], weights + v * V::kBytes);
      }
    }
    store<V>(row, sums, o);
  }
}

template <class V>
void copy_positions(const uint8_t* from, int64_t from_stride, int64_t count, uint8_t flip, uint8_t* to) {
  for (int64_t i = 0; i < count; ++i) V::copy(from + i * from_stride, flip, to + i * V::kWidth);
}

template <class V, int OT>
Choice choose(const Kernel& kernel, int64_t stride, int64_t dilation) {
  if (dilation == 1 && kernel.rows == kernel.columns) {
    const auto is = [&](int64_t rows, int64_t step) { return kernel.rows == rows && stride == step; };
    if (is(3, 1)) return {run_fixed<V, 3, 3, 1, OT>, copy_positions<V>, OT};
    if (is(3, 2)) return {run_fixed<V, 3, 3, 2, OT>, copy_positions<V>, OT};
    if (is(5, 1)) return {run_fixed<V, 5, 5, 1, OT>, copy_positions<V>, OT};
    if (is(5, 2)) return {run_fixed<V, 5, 5, 2, OT>, copy_positions<V>, OT};
    if (is(7, 1)) return {run_fixed<V, 7, 7, 1, OT>, copy_positions<V>, OT};
  }
  return {run_any<V>, copy_positions<V>, 1};
}

}  // namespace
}  // namespace zeropoint::conv::depthwise
