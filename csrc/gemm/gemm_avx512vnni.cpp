// AVX-512 VNNI: vpdpbusd multiplies four uint8 by four int8 codes a lane and adds them in 32 bits, with no saturation.
//
// A tile is `Rows` rows by `Panels` panels of 16 columns, one zmm register each (at most 24 of the 32). For every group
// of four k: load one register a panel, broadcast four codes a row, multiply all pairs.
//
//             panel 0   panel 1   panel 2   panel 3        each 16 columns x 4 k
//   row 0 a4   acc       acc       acc       acc
//   ...
//   row 5 a4   acc       acc       acc       acc
#include "gemm/kernels.h"

#if defined(__x86_64__)
// Some versions of GCC warn of their own header's deliberately undefined registers.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <cstring>

namespace zeropoint::gemm {
namespace {

constexpr int64_t kMaxPanels = 4;
constexpr int64_t kStep = kGroup * kPanel;
constexpr int kTileRows[kMaxPanels + 1] = {0, 12, 12, 8, 6};

inline int32_t load_group(const uint8_t* a) {
  int32_t four;
  std::memcpy(&four, a, sizeof four);
  return four;
}

template <int Rows, int Panels>
void multiply(const uint8_t* a, int64_t a_stride, const int8_t* b, int64_t panel_bytes, int64_t groups, int32_t* tile) {
  // One or two rows alone would wait for each addition: odd and even groups add up apart.
  constexpr int kChains = Rows * Panels <= 4 ? 2 : 1;
  __m512i sums[kChains][Rows][Panels];
#pragma GCC unroll 2
  for (int s = 0; s < kChains; ++s)
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
      for (int p = 0; p < Panels; ++p) sums[s][r][p] = _mm512_setzero_si512();

  int64_t g = 0;
  for (; g + kChains <= groups; g += kChains) {
#pragma GCC unroll 2
    for (int s = 0; s < kChains; ++s) {
      __m512i w[Panels];
#pragma GCC unroll 4
      for (int p = 0; p < Panels; ++p) w[p] = _mm512_loadu_si512(b + p * panel_bytes + (g + s) * kStep);
#pragma GCC unroll 12
      for (int r = 0; r < Rows; ++r) {
        const __m512i x = _mm512_set1_epi32(load_group(a + r * a_stride + (g + s) * kGroup));
#pragma GCC unroll 4
        for (int p = 0; p < Panels; ++p) sums[s][r][p] = _mm512_dpbusd_epi32(sums[s][r][p], x, w[p]);
      }
    }
  }
  if (kChains == 2 && g < groups) {
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
      const __m512i x = _mm512_set1_epi32(load_group(a + r * a_stride + g * kGroup));
#pragma GCC unroll 4
      for (int p = 0; p < Panels; ++p)
        sums[0][r][p] =
            _mm512_dpbusd_epi32(sums[0][r][p], x, _mm512_loadu_si512(b + p * panel_bytes + g * kStep));
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < Panels; ++p) {
      __m512i sum = sums[0][r][p];
      if constexpr (kChains == 2) sum = _mm512_add_epi32(sum, sums[1][r][p]);
      _mm512_store_si512(tile + (r * Panels + p) * kPanel, sum);
    }
}

using Multiply = void (*)(const uint8_t*, int64_t, const int8_t*, int64_t, int64_t, int32_t*);

constexpr Multiply kMultiply[kMaxPanels + 1][13] = {
    {},
    {nullptr, multiply<1, 1>, multiply<2, 1>, multiply<3, 1>, multiply<4, 1>, multiply<5, 1>, multiply<6, 1>,
     multiply<7, 1>, multiply<8, 1>, multiply<9, 1>, multiply<10, 1>, multiply<11, 1>, multiply<12, 1>},
    {nullptr, multiply<1, 2>, multiply<2, 2>, multiply<3, 2>, multiply<4, 2>, multiply<5, 2>, multiply<6, 2>,
     multiply<7, 2>, multiply<8, 2>, multiply<9, 2>, multiply<10, 2>, multiply<11, 2>, multiply<12, 2>},
    {nullptr, multiply<1, 3>, multiply<2, 3>, multiply<3, 3>, multiply<4, 3>, multiply<5, 3>, multiply<6, 3>,
     multiply<7, 3>, multiply<8, 3>},
    {nullptr, multiply<1, 4>, multiply<2, 4>, multiply<3, 4>, multiply<4, 4>, multiply<5, 4>, multiply<6, 4>},
};

// Whether one of 16 floats is NaN or an infinity: only then can a step be NaN.
inline bool any_nonfinite(__m512 v) {
  return _mm512_cmp_ps_mask(_mm512_sub_ps(v, v), _mm512_setzero_ps(), _CMP_NEQ_UQ) != 0;
}

// The epilogue of kernel.h for `rows` rows of one panel; `columns` <= 16 of it are stored.
template <Epilogue::Output kOutput>
void store_panel_as(const int32_t* tile, int64_t tile_stride, int64_t row, int64_t rows, int64_t n, int64_t columns,
                    const Packed& packed, const Epilogue& ep) {
  constexpr bool kScaled = kOutput != Epilogue::Output::sums;
  const __mmask16 mask = static_cast<__mmask16>((1u << columns) - 1);
  const bool weight_shifted = ep.weight_zero_point != nullptr;
  __m512i zw = _mm512_setzero_si512(), shifted = _mm512_setzero_si512();
  if (weight_shifted) {
    zw = _mm512_loadu_si512(ep.weight_zero_point + n);
    shifted = _mm512_mullo_epi32(_mm512_set1_epi32(static_cast<int32_t>(packed.k)), zw);
  }
  const __m512i constant =
      _mm512_mullo_epi32(_mm512_set1_epi32(ep.activation_zero_point),
                         _mm512_sub_epi32(shifted, _mm512_loadu_si512(packed.column_sums + n)));
  __m512 multiplier = _mm512_setzero_ps(), offset = _mm512_setzero_ps();
  if (kScaled) multiplier = _mm512_loadu_ps(ep.multiplier + n);
  if (kScaled && ep.offset) offset = _mm512_loadu_ps(ep.offset + n);
  const bool may_be_nan = kScaled && (any_nonfinite(multiplier) || any_nonfinite(offset));
  const __m512 low = _mm512_set1_ps(ep.low), high = _mm512_set1_ps(ep.high);
  const __m512i out_zero = _mm512_set1_epi32(ep.out_zero_point);

  for (int64_t r = 0; r < rows; ++r) {
    __m512i sum = _mm512_add_epi32(_mm512_load_si512(tile + r * tile_stride), constant);
    if (weight_shifted)
      sum = _mm512_sub_epi32(sum, _mm512_mullo_epi32(zw, _mm512_set1_epi32(ep.row_sums[row + r])));
    const int64_t at = (row + r) * ep.out_stride + n - ep.out_column;
    if constexpr (kOutput == Epilogue::Output::sums) {
      _mm512_mask_storeu_epi32(static_cast<int32_t*>(ep.out) + at, mask, sum);
      continue;
    }
    __m512 y = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), multiplier);
    if (ep.offset) y = _mm512_add_ps(y, offset);
    if constexpr (kOutput == Epilogue::Output::floats) {
      if (ep.relu) y = _mm512_max_ps(_mm512_setzero_ps(), y);  // NaN in the second operand is kept
      _mm512_mask_storeu_ps(static_cast<float*>(ep.out) + at, mask, y);
      continue;
    }
    if (may_be_nan) y = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(y, y, _CMP_ORD_Q), y);
    y = _mm512_min_ps(_mm512_max_ps(y, low), high);
    const __m512i code = _mm512_add_epi32(_mm512_cvtps_epi32(y), out_zero);
    _mm_mask_storeu_epi8(static_cast<uint8_t*>(ep.out) + at, mask, _mm512_cvtepi32_epi8(code));
  }
}

using StorePanel = void (*)(const int32_t*, int64_t, int64_t, int64_t, int64_t, int64_t, const Packed&,
                            const Epilogue&);

StorePanel store_for(Epilogue::Output output) {
  switch (output) {
    case Epilogue::Output::codes: return store_panel_as<Epilogue::Output::codes>;
    case Epilogue::Output::floats: return store_panel_as<Epilogue::Output::floats>;
    case Epilogue::Output::sums: break;
  }
  return store_panel_as<Epilogue::Output::sums>;
}

}  // namespace

void run_avx512_vnni(const Job& job) {
  const Packed& packed = *job.packed;
  const int64_t groups = job.group_end - job.group_begin;
  const int64_t panel_bytes = packed.panel_bytes();
  const StorePanel store_panel = store_for(job.epilogue->output);
  alignas(64) int32_t tile[24 * kPanel];
  for (int64_t n = job.n_begin; n < job.n_end;) {
    const int64_t left = (job.n_end - n + kPanel - 1) / kPanel;
    const int64_t panels = left < kMaxPanels ? left : kMaxPanels;
    const int8_t* b = packed.panel(n / kPanel) + job.group_begin * kStep;
    for (int64_t row = 0; row < job.m;) {
      const int64_t rows = job.m - row < kTileRows[panels] ? job.m - row : kTileRows[panels];
      const uint8_t* a = job.a + row * job.a_stride + job.group_begin * kGroup;
      kMultiply[panels][rows](a, job.a_stride, b, panel_bytes, groups, tile);
      for (int64_t p = 0; p < panels; ++p) {
        const int64_t first = n + p * kPanel;
        const int64_t columns = job.n_end - first < kPanel ? job.n_end - first : kPanel;
        store_panel(tile + p * kPanel, panels * kPanel, row, rows, first, columns, packed, *job.epilogue);
      }
      row += rows;
    }
    n += panels * kPanel;
  }
}

}  // namespace zeropoint::gemm
#endif
