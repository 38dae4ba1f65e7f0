// The matrix instructions of ARMv8.6: usmmla multiplies two rows of eight uint8 codes by two columns of eight int8
// codes, and adds the 2 x 2 products in 32 bits: twice the work of a dot product instruction.
//
// Two groups of a panel, [16][4] each, are zipped lane by lane as they are loaded: that gives columns of eight k, two a
// register. A tile is six rows by one panel: three pairs of rows, eight pairs of columns.
//
//                  columns 0-1   2-3  ...  14-15        each 2 columns x 8 k
//   rows 0-1 2a8      acc        acc        acc
//   rows 2-3 2a8      acc        acc        acc
//   rows 4-5 2a8      acc        acc        acc
#include "gemm/kernels.h"

#include "gemm/store_neon.h"

namespace zeropoint::gemm {
namespace {

constexpr int64_t kStep = kGroup * kPanel;  // bytes of a panel for one group of k
constexpr int64_t kRows = 6;
constexpr int kColumnPairs = 8;

inline int8x16_t zip_low(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s32(vzip1q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
}

inline int8x16_t zip_high(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s32(vzip2q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
}

inline uint8x8_t load_four(const uint8_t* from) {
  uint32_t four;
  std::memcpy(&four, from, sizeof four);
  return vreinterpret_u8_u32(vset_lane_u32(four, vdup_n_u32(0), 0));
}

// Rows that a pair lacks are computed from its first one, and not stored.
template <int Rows>
void multiply(const uint8_t* a, int64_t a_stride, const int8_t* b, int64_t groups, int32_t* tile) {
  constexpr int kPairs = (Rows + 1) / 2;
  constexpr int kLast = Rows - 1;
  int32x4_t sums[kPairs][kColumnPairs];
#pragma GCC unroll 3
  for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 8
    for (int c = 0; c < kColumnPairs; ++c) sums[p][c] = vdupq_n_s32(0);

  uint8x16_t x[kPairs];
  int64_t g = 0;
  for (; g + 2 <= groups; g += 2, a += 2 * kGroup, b += 2 * kStep) {
#pragma GCC unroll 3
    for (int p = 0; p < kPairs; ++p) {
      const int second = 2 * p + 1 < Rows ? 2 * p + 1 : kLast;
      x[p] = vcombine_u8(vld1_u8(a + 2 * p * a_stride), vld1_u8(a + second * a_stride));
    }
#pragma GCC unroll 4
    for (int q = 0; q < kQuarters; ++q) {
      const int8x16_t w0 = vld1q_s8(b + 16 * q), w1 = vld1q_s8(b + kStep + 16 * q);
      const int8x16_t low = zip_low(w0, w1), high = zip_high(w0, w1);
#pragma GCC unroll 3
      for (int p = 0; p < kPairs; ++p) {
        sums[p][2 * q] = vusmmlaq_s32(sums[p][2 * q], x[p], low);
        sums[p][2 * q + 1] = vusmmlaq_s32(sums[p][2 * q + 1], x[p], high);
      }
      // Weights are loaded when their turn comes: all of them at once would leave no registers for the sums.
      __asm__ volatile("" ::: "memory");
    }
  }
  if (g < groups) {  // one group alone: the other four k are zeros
#pragma GCC unroll 3
    for (int p = 0; p < kPairs; ++p) {
      const int second = 2 * p + 1 < Rows ? 2 * p + 1 : kLast;
      x[p] = vcombine_u8(load_four(a + 2 * p * a_stride), load_four(a + second * a_stride));
    }
    const int8x16_t zero = vdupq_n_s8(0);
#pragma GCC unroll 4
    for (int q = 0; q < kQuarters; ++q) {
      const int8x16_t w = vld1q_s8(b + 16 * q), low = zip_low(w, zero), high = zip_high(w, zero);
#pragma GCC unroll 3
      for (int p = 0; p < kPairs; ++p) {
        sums[p][2 * q] = vusmmlaq_s32(sums[p][2 * q], x[p], low);
        sums[p][2 * q + 1] = vusmmlaq_s32(sums[p][2 * q + 1], x[p], high);
      }
    }
  }
  // A register holds two columns of the first row, then of the second.
#pragma GCC unroll 3
  for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 8
    for (int c = 0; c < kColumnPairs; ++c) {
      vst1_s32(tile + 2 * p * kPanel + 2 * c, vget_low_s32(sums[p][c]));
      if (2 * p + 1 < Rows) vst1_s32(tile + (2 * p + 1) * kPanel + 2 * c, vget_high_s32(sums[p][c]));
    }
}

using Multiply = void (*)(const uint8_t*, int64_t, const int8_t*, int64_t, int32_t*);
constexpr Multiply kMultiply[kRows + 1] = {nullptr,     multiply<1>, multiply<2>, multiply<3>,
                                           multiply<4>, multiply<5>, multiply<6>};

}  // namespace

void run_neon_i8mm(const Job& job) {
  const Packed& packed = *job.packed;
  int32_t tile[kRows * kPanel];
  for (int64_t n = job.n_begin; n < job.n_end; n += kPanel) {
    const int8_t* b = packed.panel(n / kPanel) + job.group_begin * kStep;
    const int64_t columns = job.n_end - n < kPanel ? job.n_end - n : kPanel;
    for (int64_t row = 0; row < job.m; row += kRows) {
      const int64_t rows = job.m - row < kRows ? job.m - row : kRows;
      kMultiply[rows](job.a + row * job.a_stride + job.group_begin * kGroup, job.a_stride, b,
                      job.group_end - job.group_begin, tile);
      store_panel(tile, row, rows, n, columns, packed, *job.epilogue);
    }
  }
}

}  // namespace zeropoint::gemm
