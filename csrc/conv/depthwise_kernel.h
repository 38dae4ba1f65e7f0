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

#define ZEROPOINT_INLINE inline __attribute__((always_inline))

// Calls f(Index<0>), f(Index<1>), ... in place. Loops would do, but compilers unroll them after they have decided that
// an array indexed by a loop variable lives in memory; here every index is a constant from the start.
template <int I>
struct Index {
  static constexpr int value = I;
};
template <int N, class F>
ZEROPOINT_INLINE void each(F&& f) {
  if constexpr (N > 0) {
    each<N - 1>(f);
    f(Index<N - 1>{});
  }
}

// Says that `value` is needed here, in a register. Otherwise the compiler moves all products down to the store, which
// is conditional, and keeps every interleaved code in memory until then.
template <class T>
ZEROPOINT_INLINE void keep(T& value) {
  asm volatile("" : "+v"(value));
}

// Which of the OT output positions meet input position j in an even kernel column, and in one that has a next.
struct Met {
  bool any, with_next;
};
template <int KW, int S, int OT>
constexpr Met met_in_even_column(int j) {
  Met met = {false, false};
  for (int o = 0; o < OT; ++o) {
    const int k = j - o * S;
    const bool even = k >= 0 && k < KW && k % 2 == 0;
    met.any = met.any || even;
    met.with_next = met.with_next || (even && k + 1 < KW);
  }
  return met;
}

// Adds all taps to the sums of `OT` output positions from `first` on. Input position j serves output position o as
// kernel column j - o * S, where there is one.
template <class V, int R, int KW, int S, int OT>
ZEROPOINT_INLINE void add_taps(const Row& row, int64_t first, typename V::Int (&sums)[OT][4]) {
  constexpr int kGroups = (R + V::kTaps - 1) / V::kTaps;
  const uint8_t* weights = static_cast<const uint8_t*>(row.weights);
  const int64_t at = first * S * V::kWidth;
  each<(OT - 1) * S + KW>([&](auto j) __attribute__((always_inline)) {
    each<kGroups>([&](auto g) __attribute__((always_inline)) {
      constexpr bool along = pairs_along(V::kTaps, R, g.value);
      constexpr Met met = met_in_even_column<KW, S, OT>(j.value);
      if constexpr (!along || met.any) {
        typename V::Int x[4];
        const uint8_t* taps[V::kTaps];
        each<V::kTaps>([&](auto t) __attribute__((always_inline)) {
          // What is not there, a row beyond R or a column beyond KW, has weights of zero.
          constexpr int r = along ? R - 1 : g.value * V::kTaps + t.value;
          constexpr int column = j.value + (along && met.with_next ? t.value : 0);
          taps[t.value] = row.rows[r < R ? r : R - 1] + at + column * V::kWidth;
        });
        V::interleave(taps, x);
        each<OT>([&](auto o) __attribute__((always_inline)) {
          constexpr int k = j.value - o.value * S;
          if constexpr (k >= 0 && k < KW && (!along || k % 2 == 0)) {
            const uint8_t* w = weights + (k * kGroups + g.value) * 4 * V::kBytes;
            each<4>([&](auto v) __attribute__((always_inline)) {
              sums[o.value][v.value] = V::dot(sums[o.value][v.value], x[v.value], w + v.value * V::kBytes);
              keep(sums[o.value][v.value]);
            });
          }
        });
      }
    });
  });
}

template <class V>
ZEROPOINT_INLINE void store(const Row& row, typename V::Int (&sums)[4], int64_t position) {
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
    each<OT>([&](auto o) __attribute__((always_inline)) {
      each<4>([&](auto v) __attribute__((always_inline)) {
        sums[o.value][v.value] = V::start(row.start, v.value);
      });
    });
    add_taps<V, R, KW, S, OT>(row, first, sums);
    each<OT>([&](auto o) __attribute__((always_inline)) {
      if (first + o.value < row.columns) store<V>(row, sums[o.value], first + o.value);
    });
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
        const bool along = pairs_along(V::kTaps, row.kernel_rows, g);
        if (along && k % 2 == 1) continue;
        const int64_t next = along && k + 1 < row.kernel_columns ? row.dilation * V::kWidth : 0;
        const uint8_t* taps[V::kTaps];
        for (int t = 0; t < V::kTaps; ++t) {
          const int64_t r = g * V::kTaps + t;
          taps[t] = row.rows[r < row.kernel_rows ? r : row.kernel_rows - 1] + at + t * next;
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
