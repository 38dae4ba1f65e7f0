// AVX-512 VNNI: vpdpbusd multiplies four uint8 by four int8 codes a lane and adds them in 32 bits, with no saturation.
//
// A tile is `Rows` rows by `Panels` panels of 16 columns, one zmm register each (at most 24 of the 32). For every group
// of four k: load one register a panel, broadcast four codes a row, multiply all pairs.
//
//             panel 0   panel 1   panel 2   panel 3        each 16 columns x 4 k
//   row 0 a4   acc       acc       acc       acc
//   ...
//   row 5 a4   acc       acc       acc       acc
#if defined(__x86_64__)
#include "gemm/store_avx512.h"

#include <algorithm>
#include <cstring>

namespace zeropoint::gemm {
namespace {

constexpr int64_t kStep = kGroup * kPanel;
constexpr int kTileRows[kMaxPanels + 1] = {0, 12, 12, 8, 6};

inline int32_t load_group(const uint8_t* a) {
  int32_t four;
  std::memcpy(&four, a, sizeof four);
  return four;
}

struct Tile {
  const uint8_t* a;       // rows a_stride apart, or, walked, each where `rows` says
  int64_t a_stride;
  const uint8_t* rows[12];
  const int64_t* segments;  // where the codes of a row stand, from its beginning
  int64_t segment_count, segment_groups;
  const int8_t* b;
  int64_t panel_bytes;
};

// Sums, and what becomes of them: codes in `out`, straight from the registers, or else as they are in `sums_out`.
template <int Rows, int Panels, bool kToCodes, bool kWalked>
void multiply(const Tile& tile, int32_t* sums_out, const Codes* codes, uint8_t* out) {
  const uint8_t* rows[Rows];
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) rows[r] = kWalked ? tile.rows[r] : tile.a + r * tile.a_stride;
  const int8_t* b = tile.b;
  const int64_t panel_bytes = tile.panel_bytes;
  // One or two rows alone would wait for each addition: odd and even groups add up apart.
  constexpr int kChains = Rows * Panels <= 4 ? 2 : 1;
  __m512i sums[kChains][Rows][Panels];
#pragma GCC unroll 2
  for (int s = 0; s < kChains; ++s)
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
      for (int p = 0; p < Panels; ++p)
        sums[s][r][p] = kToCodes && s == 0 ? _mm512_load_si512(codes->constant + p * kPanel) : _mm512_setzero_si512();

  const int64_t segments = kWalked ? tile.segment_count : 1;
  for (int64_t segment = 0; segment < segments; ++segment) {
    int64_t at = kWalked ? tile.segments[segment] : 0;
    const int64_t end = at + tile.segment_groups * kGroup;
    for (; at + (kChains - 1) * kGroup < end; at += kChains * kGroup, b += kChains * kStep) {
#pragma GCC unroll 2
      for (int s = 0; s < kChains; ++s) {
        __m512i w[Panels];
#pragma GCC unroll 4
        for (int p = 0; p < Panels; ++p) w[p] = _mm512_loadu_si512(b + p * panel_bytes + s * kStep);
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) {
          const __m512i x = _mm512_set1_epi32(load_group(rows[r] + at + s * kGroup));
#pragma GCC unroll 4
          for (int p = 0; p < Panels; ++p) sums[s][r][p] = _mm512_dpbusd_epi32(sums[s][r][p], x, w[p]);
        }
      }
    }
    if (kChains == 2 && at < end) {
#pragma GCC unroll 12
      for (int r = 0; r < Rows; ++r) {
        const __m512i x = _mm512_set1_epi32(load_group(rows[r] + at));
#pragma GCC unroll 4
        for (int p = 0; p < Panels; ++p)
          sums[0][r][p] = _mm512_dpbusd_epi32(sums[0][r][p], x, _mm512_loadu_si512(b + p * panel_bytes));
      }
      b += kStep;
    }
  }
  if constexpr (kToCodes) {
    const Narrow narrow(*codes);
    const bool whole = codes->columns == kMaxPanels * kPanel;
    const __mmask64 mask = first_bytes(codes->columns);
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
      __m512i steps[kMaxPanels];
#pragma GCC unroll 4
      for (int p = 0; p < kMaxPanels; ++p) {
        if (p >= Panels) {
          steps[p] = _mm512_setzero_si512();
          continue;
        }
        __m512i sum = sums[0][r][p];
        if constexpr (kChains == 2) sum = _mm512_add_epi32(sum, sums[1][r][p]);
        // One step after the other: prepared side by side they would push the sums out of their registers.
        __asm__ volatile("" : "+v"(sum) : : "memory");
        const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_load_ps(codes->multiplier + p * kPanel));
        steps[p] = _mm512_cvtps_epi32(_mm512_add_ps(scaled, _mm512_load_ps(codes->offset + p * kPanel)));
      }
      const __m512i bytes = narrow(steps);
      if (Panels == kMaxPanels && whole)
        _mm512_storeu_si512(out + r * codes->out_stride, bytes);
      else
        _mm512_mask_storeu_epi8(out + r * codes->out_stride, mask, bytes);
    }
  } else {
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
      for (int p = 0; p < Panels; ++p) {
        __m512i sum = sums[0][r][p];
        if constexpr (kChains == 2) sum = _mm512_add_epi32(sum, sums[1][r][p]);
        _mm512_store_si512(sums_out + (r * Panels + p) * kPanel, sum);
      }
  }
}

using Multiply = void (*)(const Tile&, int32_t*, const Codes*, uint8_t*);

// By panels and rows of a tile.
template <bool kToCodes, bool kWalked>
struct Kernels {
  template <int Rows, int Panels>
  static constexpr Multiply kOf = multiply<Rows, Panels, kToCodes, kWalked>;
  static constexpr Multiply kTable[kMaxPanels + 1][13] = {
      {},
      {nullptr, kOf<1, 1>, kOf<2, 1>, kOf<3, 1>, kOf<4, 1>, kOf<5, 1>, kOf<6, 1>, kOf<7, 1>, kOf<8, 1>, kOf<9, 1>,
       kOf<10, 1>, kOf<11, 1>, kOf<12, 1>},
      {nullptr, kOf<1, 2>, kOf<2, 2>, kOf<3, 2>, kOf<4, 2>, kOf<5, 2>, kOf<6, 2>, kOf<7, 2>, kOf<8, 2>, kOf<9, 2>,
       kOf<10, 2>, kOf<11, 2>, kOf<12, 2>},
      {nullptr, kOf<1, 3>, kOf<2, 3>, kOf<3, 3>, kOf<4, 3>, kOf<5, 3>, kOf<6, 3>, kOf<7, 3>, kOf<8, 3>},
      {nullptr, kOf<1, 4>, kOf<2, 4>, kOf<3, 4>, kOf<4, 4>, kOf<5, 4>, kOf<6, 4>},
  };
};

const Multiply* kernels_of(bool to_codes, bool walked, int64_t panels) {
  if (walked) return to_codes ? Kernels<true, true>::kTable[panels] : Kernels<false, true>::kTable[panels];
  return to_codes ? Kernels<true, false>::kTable[panels] : Kernels<false, false>::kTable[panels];
}

}  // namespace

void run_avx512_vnni(const Job& job) {
  const Packed& packed = *job.packed;
  const Epilogue& ep = *job.epilogue;
  const bool to_codes = ep.output == Epilogue::Output::codes && ep.weight_zero_point == nullptr;
  const StorePanel store_panel = store_for(ep.output);
  alignas(64) int32_t sums[24 * kPanel];
  Codes codes(ep);
  Tile tile;
  tile.a_stride = job.a_stride;
  tile.panel_bytes = packed.panel_bytes();
  tile.segment_groups = job.group_end - job.group_begin;
  if (job.walk) {
    tile.segments = job.walk->segments;
    tile.segment_count = job.walk->count;
    tile.segment_groups = job.walk->run / kGroup;
  }
  for (int64_t n = job.n_begin; n < job.n_end;) {
    const int64_t left = (job.n_end - n + kPanel - 1) / kPanel;
    const int64_t panels = left < kMaxPanels ? left : kMaxPanels;
    const int64_t columns = job.n_end - n < panels * kPanel ? job.n_end - n : panels * kPanel;
    const bool in_registers = to_codes && prepare_codes(packed, ep, n, columns, &codes);
    const Multiply* kernels = kernels_of(in_registers, job.walk != nullptr, panels);
    uint8_t* out = static_cast<uint8_t*>(ep.out) + n - ep.out_column;
    tile.b = packed.panel(n / kPanel) + job.group_begin * kStep;
    for (int64_t row = 0; row < job.m;) {
      const int64_t rows = job.m - row < kTileRows[panels] ? job.m - row : kTileRows[panels];
      tile.a = job.a + row * job.a_stride + job.group_begin * kGroup;
      for (int64_t r = 0; job.walk && r < rows; ++r) tile.rows[r] = job.a + job.walk->rows[row + r];
      kernels[rows](tile, sums, &codes, out + row * ep.out_stride);
      for (int64_t p = 0; p < panels && !in_registers; ++p)
        store_panel(sums + p * kPanel, panels * kPanel, row, rows, n + p * kPanel,
                    std::min(kPanel, columns - p * kPanel), packed, ep);
      row += rows;
    }
    n += panels * kPanel;
  }
}

}  // namespace zeropoint::gemm
#endif
