// 3x3 convolution of stride 1 with fewer multiplications: Winograd's F(3x3, 3x3), in integers and exact.
//
// Nine outputs that lie in a square depend on a square of 25 inputs. Transformed, d to v = B d B' and the weights g to
// u = G g G', they need one product for each of 25 points, 25 where the sums need 81: m = u v, summed over the channels,
// and y = A m A'. Interpolation at 0, 1, -1, 2 and infinity gives (rows of B and A scaled into whole numbers by G)
//        2 -1 -2  1  0            3  0  0
//        0 -2 -1  1  0           -3 -3 -3          1  1  1  1  0
//   B =  0  2 -3  1  0      G =  -1  1 -1     A =  0  1 -1  2  0     and 36 times the convolution.
//        0 -1  0  1  0            1  2  4          0  1  1  4  1
//        0  2 -1 -2  1            0  0  6
// With codes of 8 bits, |v| <= 36 * 255 and |u| <= 81 * 128 are words of 16 bits, which vpmaddwd multiplies exactly. All
// sums are taken modulo 2**32. There, 9 has an inverse, and 4 * sum fits for kMaxChannels channels; so the exact sum is
// what is left after a multiplication and a shift by 2.
//
// Worth it where there is no instruction for dot products of bytes: plain AVX2. The weights are transformed anew in every
// call, a panel at a time: kept, they would take 50 bytes where they take 9.
#pragma once
#include <cstdint>

#include "conv/conv.h"
#include "gemm/kernel.h"

namespace zeropoint::conv::winograd {

constexpr int kOut = 3, kIn = 5, kPoints = kIn * kIn;
constexpr int64_t kChannelUnit = 16;    // channels that are transformed at once
constexpr int64_t kMaxChannels = 1792;  // 4 * 9 * 255 * 128 * 1792 < 2**31

// Tiles whose sums are held at once. Their transformed inputs lie together.
constexpr int64_t kBlock = 24;

// Words from one point to the next: no multiple of 4 KiB, or all 25 would share a set of the cache.
constexpr int64_t plane_words(int64_t count) { return gemm::round_up(count, 2048) + 32; }
constexpr int64_t input_plane(int64_t channels) { return plane_words(kBlock * channels); }
constexpr int64_t weight_plane(int64_t channels) { return plane_words(gemm::kPanel * channels); }

// Where the square of outputs of a tile stands: the first of them, in output positions, and how many lie inside.
struct Place {
  int64_t position;
  int32_t height, width;
};

struct Kernels {
  // v = B d B' for one tile: `from` has the 25 input positions, each with all channels. Points are those of a block.
  // Codes are taken exclusive-or `flip`, less `zero_point`.
  void (*input)(const uint8_t* const (&from)[kPoints], int64_t channels, uint8_t flip, int16_t zero_point, int16_t* v);
  // A panel of Form::quads as Form::words has it.
  void (*restore_words)(const gemm::Packed& packed, int64_t panel, int8_t* words);
  // u = G g G' for a panel of Form::words, whose kernel lines are `line` codes long: u[point][channels / 2][16][2].
  void (*weights)(const int8_t* panel, int64_t channels, int64_t line, int16_t* u);
  // m[point][tiles][16] of a block: v[point][kBlock][channels].
  void (*multiply)(const int16_t* v, int64_t tiles, int64_t channels, const int16_t* u, int32_t* m);
  // y = A m A', and the epilogue: `columns` <= 16 columns from `n` on of every place, whose positions are counted from
  // `epilogue.out`. The activations' zero point is 0 by now.
  void (*output)(const int32_t* m, int64_t tiles, const Place* places, int64_t out_width, int64_t n, int64_t columns,
                 const gemm::Packed& packed, const gemm::Epilogue& epilogue);
};
Kernels kernels_avx2();

// Whether weights of this size can be used here.
bool fits(const WeightSize& size);

// Whether a convolution with these packed weights is computed here: it can be, and it is less work.
bool chosen(const Geometry& geometry, const gemm::Packed& packed, const int32_t* weight_zero_point);

// `x` as in conv::run, `flip` and `fill` what makes its codes unsigned and their zero point; `line`: codes of a kernel
// line in the packed weights; `epilogue`: of the first output position.
void run(const Geometry& geometry, const gemm::Packed& packed, const uint8_t* x, uint8_t flip, uint8_t fill, int64_t line,
         const gemm::Epilogue& epilogue, const Parallel& parallel);

}  // namespace zeropoint::conv::winograd
