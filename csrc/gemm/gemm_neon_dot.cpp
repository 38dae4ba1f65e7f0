// The dot product instruction of ARMv8.2: sdot multiplies four int8 by four int8 codes a lane and adds them in 32 bits.
//
// Activations are uint8, so their top bit is flipped as they are loaded: x - 128 is an int8 code, and
//   sum a*w = sum (a - 128)*w + 128 * sum w.
// The second term is the same for every row: sums start from it. A tile is four rows by one panel, four registers a row:
//
//             columns 0-3  4-7   8-11  12-15        each 4 columns x 4 k
//   row 0 a4     acc       acc   acc   acc
//   ...
//   row 3 a4     acc       acc   acc   acc
#include "gemm/kernels.h"

#include "gemm/store_neon.h"

namespace zeropoint::gemm {
namespace {

constexpr int64_t kStep = kGroup * kPanel;  // bytes of a panel for one group of k
constexpr int64_t kRows = 4;

// 128 * sum w over `groups` groups, for the columns of a panel.
void start_of(const int8_t* b, int64_t groups, int32_t (&start)[kPanel]) {
  int32x4_t sums[kQuarters] = {vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)};
  for (int64_t g = 0; g < groups; ++g, b += kStep)
    for (int q = 0; q < kQuarters; ++q) sums[q] = vdotq_s32(sums[q], vld1q_s8(b + 16 * q), vdupq_n_s8(1));
  for (int q = 0; q < kQuarters; ++q) vst1q_s32(start + 4 * q, vshlq_n_s32(sums[q], 7));
}

// sums += one of the two groups in `x`, int8 codes of a row, times a panel's.
template <int kLane>
inline __attribute__((always_inline)) void add_group(int32x4_t (&sums)[kQuarters], int8x8_t x,
                                                     const int8x16_t (&w)[kQuarters]) {
  for (int q = 0; q < kQuarters; ++q) sums[q] = vdotq_lane_s32(sums[q], w[q], x, kLane);
}

inline __attribute__((always_inline)) void load_group(const int8_t* b, int8x16_t (&w)[kQuarters]) {
  for (int q = 0; q < kQuarters; ++q) w[q] = vld1q_s8(b + 16 * q);
}

template <int Rows>
void multiply(const uint8_t* a, int64_t a_stride, const int8_t* b, int64_t groups, const int32_t (&start)[kPanel],
              int32_t* tile) {
  int32x4_t sums[Rows][kQuarters];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int q = 0; q < kQuarters; ++q) sums[r][q] = vld1q_s32(start + 4 * q);

  const uint8x8_t flip = vdup_n_u8(0x80);
  int8x16_t w[kQuarters];
  int64_t g = 0;
  for (; g + 2 <= groups; g += 2, a += 2 * kGroup, b += 2 * kStep) {
    int8x8_t x[Rows];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) x[r] = vreinterpret_s8_u8(veor_u8(vld1_u8(a + r * a_stride), flip));
    load_group(b, w);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) add_group<0>(sums[r], x[r], w);
    load_group(b + kStep, w);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) add_group<1>(sums[r], x[r], w);
  }
  if (g < groups) {
    load_group(b, w);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      uint32_t four;  // a row is readable up to here and no further
      std::memcpy(&four, a + r * a_stride, sizeof four);
      add_group<0>(sums[r], vreinterpret_s8_u8(veor_u8(vreinterpret_u8_u32(vdup_n_u32(four)), flip)), w);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int q = 0; q < kQuarters; ++q) vst1q_s32(tile + r * kPanel + 4 * q, sums[r][q]);
}

using Multiply = void (*)(const uint8_t*, int64_t, const int8_t*, int64_t, const int32_t (&)[kPanel], int32_t*);
constexpr Multiply kMultiply[kRows + 1] = {nullptr, multiply<1>, multiply<2>, multiply<3>, multiply<4>};

}  // namespace

void run_neon_dot(const Job& job) {
  const Packed& packed = *job.packed;
  const int64_t groups = job.group_end - job.group_begin;
  int32_t start[kPanel], tile[kRows * kPanel];
  for (int64_t n = job.n_begin; n < job.n_end; n += kPanel) {
    const int8_t* b = packed.panel(n / kPanel) + job.group_begin * kStep;
    const int64_t columns = job.n_end - n < kPanel ? job.n_end - n : kPanel;
    start_of(b, groups, start);
    for (int64_t row = 0; row < job.m; row += kRows) {
      const int64_t rows = job.m - row < kRows ? job.m - row : kRows;
      kMultiply[rows](job.a + row * job.a_stride + job.group_begin * kGroup, job.a_stride, b, groups, start, tile);
      store_panel(tile, row, rows, n, columns, packed, *job.epilogue);
    }
  }
}

}  // namespace zeropoint::gemm
