// AVX-VNNI: vpdpbusd in 256-bit registers. A tile is six rows by one panel, two registers a row.
#include "gemm/kernels.h"

#if defined(__x86_64__)
#include "gemm/store_avx2.h"

namespace zeropoint::gemm {
namespace {

constexpr int64_t kStep = kGroup * kPanel;
constexpr int64_t kRows = 6;

template <int Rows>
void multiply(const uint8_t* a, int64_t a_stride, const int8_t* b, int64_t groups, int32_t* tile) {
  // Few rows alone would wait for each addition: successive groups add up apart.
  constexpr int kChains = Rows == 1 ? 4 : Rows <= 3 ? 2 : 1;
  __m256i sums[kChains][Rows][2];
#pragma GCC unroll 4
  for (int s = 0; s < kChains; ++s)
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) sums[s][r][0] = sums[s][r][1] = _mm256_setzero_si256();

  const auto step = [&](int chain, int64_t g) __attribute__((always_inline)) {
    const __m256i w0 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + g * kStep));
    const __m256i w1 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + g * kStep + 32));
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      int32_t four;
      std::memcpy(&four, a + r * a_stride + g * kGroup, sizeof four);
      const __m256i x = _mm256_set1_epi32(four);
      sums[chain][r][0] = _mm256_dpbusd_avx_epi32(sums[chain][r][0], x, w0);
      sums[chain][r][1] = _mm256_dpbusd_avx_epi32(sums[chain][r][1], x, w1);
    }
  };
  int64_t g = 0;
  for (; g + kChains <= groups; g += kChains) {
#pragma GCC unroll 4
    for (int s = 0; s < kChains; ++s) step(s, g + s);
  }
  for (; g < groups; ++g) step(0, g);
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      __m256i sum = sums[0][r][h];
#pragma GCC unroll 4
      for (int s = 1; s < kChains; ++s) sum = _mm256_add_epi32(sum, sums[s][r][h]);
      _mm256_store_si256(reinterpret_cast<__m256i*>(tile + r * kPanel + 8 * h), sum);
    }
}

using Multiply = void (*)(const uint8_t*, int64_t, const int8_t*, int64_t, int32_t*);
constexpr Multiply kMultiply[kRows + 1] = {nullptr,     multiply<1>, multiply<2>, multiply<3>,
                                           multiply<4>, multiply<5>, multiply<6>};

}  // namespace

void run_avx_vnni(const Job& job) {
  const Packed& packed = *job.packed;
  alignas(32) int32_t tile[kRows * kPanel];
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
#endif
