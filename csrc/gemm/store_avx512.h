// The epilogue of kernel.h in AVX-512, for kernels of up to four panels at once. Included only by files that are compiled
// for AVX-512; everything has internal linkage, as in store_avx2.h.
#pragma once
#if !defined(__clang__)
// Some versions of GCC warn of their own header's deliberately undefined registers.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "gemm/kernels.h"

namespace zeropoint::gemm {
namespace {

constexpr int64_t kMaxPanels = 4;

// Of the columns of a tile, what turns sums into codes where weight zero points are 0 and every step fits 32 bits. Codes
// are computed as uint8: signed ones 128 higher, until `flip` takes that back.
struct Codes {
  alignas(64) int32_t constant[kMaxPanels * kPanel];
  alignas(64) float multiplier[kMaxPanels * kPanel], offset[kMaxPanels * kPanel];
  int16_t zero_point;
  uint8_t low, high, flip;
  int64_t out_stride;
  int64_t columns;  // to be stored

  explicit Codes(const Epilogue& ep) : out_stride(ep.out_stride), columns(0) {
    const int32_t least = static_cast<int32_t>(ep.low) + ep.out_zero_point;
    const int32_t shift = least < 0 ? 128 : 0;
    zero_point = static_cast<int16_t>(ep.out_zero_point + shift);
    low = static_cast<uint8_t>(least + shift);
    high = static_cast<uint8_t>(static_cast<int32_t>(ep.high) + ep.out_zero_point + shift);
    flip = static_cast<uint8_t>(shift);
  }
};

// The last of the steps to codes, for four times 16 columns at once: from whole steps to bytes, side by side.
class Narrow {
 public:
  explicit Narrow(const Codes& codes)
      : zero_point_(_mm512_set1_epi16(codes.zero_point)),
        low_(_mm512_set1_epi8(static_cast<char>(codes.low))),
        high_(_mm512_set1_epi8(static_cast<char>(codes.high))),
        flip_(_mm512_set1_epi8(static_cast<char>(codes.flip))),
        order_(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)) {}

  // Every narrowing saturates, and so does no more than the bounds of the codes do in the end.
  __m512i operator()(const __m512i (&steps)[4]) const {
    const __m512i first = _mm512_adds_epi16(_mm512_packs_epi32(steps[0], steps[1]), zero_point_);
    const __m512i second = _mm512_adds_epi16(_mm512_packs_epi32(steps[2], steps[3]), zero_point_);
    __m512i bytes = _mm512_packus_epi16(first, second);
    bytes = _mm512_xor_si512(_mm512_min_epu8(_mm512_max_epu8(bytes, low_), high_), flip_);
    return _mm512_permutexvar_epi32(order_, bytes);
  }

 private:
  __m512i zero_point_, low_, high_, flip_;
  __m512i order_;  // packing works within 128 bits: four columns of each 16 side by side
};

// Of 64 bytes, the first `count`, at least one.
inline __mmask64 first_bytes(int64_t count) { return ~__mmask64{0} >> (64 - count); }

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

// Fills in what depends on the columns [n, n + columns). False if a step of theirs can be NaN, or leave 32 bits.
inline bool prepare_codes(const Packed& packed, const Epilogue& ep, int64_t n, int64_t columns, Codes* codes) {
  const __m512i za = _mm512_set1_epi32(ep.activation_zero_point);
  const __m512 largest_sum = _mm512_set1_ps(static_cast<float>(packed.k) * (255 * 128));
  const __m512 limit = _mm512_set1_ps(1 << 30);
  codes->columns = columns;
  bool narrow = true;
  for (int64_t i = 0; i < columns; i += kPanel) {
    const __m512i sums = _mm512_loadu_si512(packed.column_sums + n + i);
    const __m512 multiplier = _mm512_loadu_ps(ep.multiplier + n + i);
    const __m512 offset = ep.offset ? _mm512_loadu_ps(ep.offset + n + i) : _mm512_setzero_ps();
    _mm512_store_si512(codes->constant + i, _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_mullo_epi32(za, sums)));
    _mm512_store_ps(codes->multiplier + i, multiplier);
    _mm512_store_ps(codes->offset + i, offset);
    const __m512 largest = _mm512_add_ps(_mm512_mul_ps(_mm512_abs_ps(multiplier), largest_sum), _mm512_abs_ps(offset));
    narrow = narrow && _mm512_cmp_ps_mask(largest, limit, _CMP_NLT_UQ) == 0;
  }
  return narrow;
}

inline StorePanel store_for(Epilogue::Output output) {
  switch (output) {
    case Epilogue::Output::codes: return store_panel_as<Epilogue::Output::codes>;
    case Epilogue::Output::floats: return store_panel_as<Epilogue::Output::floats>;
    case Epilogue::Output::sums: break;
  }
  return store_panel_as<Epilogue::Output::sums>;
}

}  // namespace
}  // namespace zeropoint::gemm
