#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
// Its own header's "undefined" vectors, which every masked intrinsic begins from, set this off.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <cstring>
#include <limits>
#include <type_traits>

#include "elementwise/kernels.h"

namespace zeropoint::elementwise {
namespace {

using Floats = __m512;
constexpr int kLanes = 16;

inline Floats splat(float v) { return _mm512_set1_ps(v); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats nearest(Floats v) {
  return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Floats zero_if_nan(Floats v) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(v, v, _CMP_ORD_Q), v); }
inline Floats or_if_nan(Floats v, Floats other) {
  return _mm512_mask_mov_ps(other, _mm512_cmp_ps_mask(v, v, _CMP_ORD_Q), v);
}
inline Floats finite_or(Floats v, Floats other) {
  const __m512 infinity = _mm512_set1_ps(std::numeric_limits<float>::infinity());
  return _mm512_mask_mov_ps(other, _mm512_cmp_ps_mask(_mm512_abs_ps(v), infinity, _CMP_LT_OQ), v);
}

inline bool any_nan(Floats a, Floats b, Floats c, Floats d) {
  return (_mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) | _mm512_cmp_ps_mask(c, d, _CMP_UNORD_Q)) != 0;
}
// Large values must not reach the conversion to integers, which answers 2^31 for them as for -2^31. Small ones may.
inline Floats saturated(Floats v) { return _mm512_min_ps(v, _mm512_set1_ps(32767.0f)); }

template <class Signed>
inline Floats from_bytes(const uint8_t* p, Signed) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(Signed::value ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
}

// Rounds, adds the zero point and saturates, at 16 bits and at 8. Packing works within 128-bit quarters: `order` puts
// the sixteen groups of four bytes in line.
inline void write_bytes(Floats a, Floats b, Floats c, Floats d, Target target, uint8_t* out) {
  const __m512i shift = _mm512_set1_epi16(target.zero);
  const __m512i ab = _mm512_adds_epi16(_mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b)), shift);
  const __m512i cd = _mm512_adds_epi16(_mm512_packs_epi32(_mm512_cvtps_epi32(c), _mm512_cvtps_epi32(d)), shift);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(ab, cd));
  bytes = _mm512_max_epi8(bytes, _mm512_set1_epi8(static_cast<char>(target.zero + static_cast<int>(target.low))));
  bytes = _mm512_min_epi8(bytes, _mm512_set1_epi8(static_cast<char>(target.zero + static_cast<int>(target.high))));
  _mm512_storeu_si512(out, _mm512_xor_si512(bytes, _mm512_set1_epi8(static_cast<char>(target.flip))));
}

// As the AVX2 twin, with masks in place of top bits.
void lookup_by_shuffles(const uint8_t* codes, const uint8_t* table, uint8_t* out, int64_t n) {
  __m512i rows[16];
  for (int k = 0; k < 16; ++k)
    rows[k] = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table + 16 * k)));
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    const __m512i x = _mm512_loadu_si512(codes + i);
    const __m512i low = _mm512_and_si512(x, _mm512_set1_epi8(15));
    const __mmask64 bit4 = _mm512_test_epi8_mask(x, _mm512_set1_epi8(16));
    const __mmask64 bit5 = _mm512_test_epi8_mask(x, _mm512_set1_epi8(32));
    const __mmask64 bit6 = _mm512_test_epi8_mask(x, _mm512_set1_epi8(64));
    __m512i level[8];
    for (int k = 0; k < 8; ++k)
      level[k] = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(rows[2 * k], low), bit4, rows[2 * k + 1], low);
    for (int k = 0; k < 4; ++k) level[k] = _mm512_mask_blend_epi8(bit5, level[2 * k], level[2 * k + 1]);
    for (int k = 0; k < 2; ++k) level[k] = _mm512_mask_blend_epi8(bit6, level[2 * k], level[2 * k + 1]);
    _mm512_storeu_si512(out + i, _mm512_mask_blend_epi8(_mm512_movepi8_mask(x), level[0], level[1]));
  }
  for (; i < n; ++i) out[i] = table[codes[i]];
}

// Processors with VBMI look up 128 entries at a time. Not all that have VNNI do.
__attribute__((target("avx512f,avx512bw,avx512vbmi"))) void lookup_by_permutes(const uint8_t* codes,
                                                                              const uint8_t* table, uint8_t* out,
                                                                              int64_t n) {
  const __m512i t0 = _mm512_loadu_si512(table), t1 = _mm512_loadu_si512(table + 64);
  const __m512i t2 = _mm512_loadu_si512(table + 128), t3 = _mm512_loadu_si512(table + 192);
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    const __m512i x = _mm512_loadu_si512(codes + i);
    const __m512i below = _mm512_permutex2var_epi8(t0, x, t1), above = _mm512_permutex2var_epi8(t2, x, t3);
    _mm512_storeu_si512(out + i, _mm512_mask_blend_epi8(_mm512_movepi8_mask(x), below, above));
  }
  for (; i < n; ++i) out[i] = table[codes[i]];
}

void lookup(const uint8_t* codes, const uint8_t* table, uint8_t* out, int64_t n) {
  static const bool permutes = __builtin_cpu_supports("avx512vbmi");
  (permutes ? lookup_by_permutes : lookup_by_shuffles)(codes, table, out, n);
}

template <class Code>
void sums_of(const uint8_t* codes, int64_t n, int64_t* sum, int64_t* squares) {
  constexpr int64_t kStep = 32, kSafe = 16384 * kStep;  // two squares of 255 a step: 16384 steps stay below 2^31
  const __m512i ones = _mm512_set1_epi16(1);
  int64_t i = 0;
  while (i + kStep <= n) {
    const int64_t end = n - i < kSafe ? n : i + kSafe;
    __m512i first = _mm512_setzero_si512(), second = first;
    for (; i + kStep <= end; i += kStep) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i));
      const __m512i wide = std::is_signed_v<Code> ? _mm512_cvtepi8_epi16(bytes) : _mm512_cvtepu8_epi16(bytes);
      first = _mm512_add_epi32(first, _mm512_madd_epi16(wide, ones));
      second = _mm512_add_epi32(second, _mm512_madd_epi16(wide, wide));
    }
    alignas(64) int32_t lanes[32];
    _mm512_store_si512(lanes, first);
    _mm512_store_si512(lanes + 16, second);
    for (int k = 0; k < 16; ++k) *sum += lanes[k], *squares += lanes[16 + k];
  }
  for (; i < n; ++i) {
    const int64_t code = static_cast<Code>(codes[i]);
    *sum += code;
    *squares += code * code;
  }
}

void sums(const uint8_t* codes, bool is_signed, int64_t n, int64_t* sum, int64_t* squares) {
  (is_signed ? sums_of<int8_t> : sums_of<uint8_t>)(codes, n, sum, squares);
}

void from_half(const uint16_t* x, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i))));
  for (; i < n; ++i) out[i] = _cvtsh_ss(x[i]);
}

void to_half(const float* x, uint16_t* out, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i),
                        _mm512_maskz_cvtps_ph(0xffff, _mm512_loadu_ps(x + i),
                                              _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  for (; i < n; ++i) out[i] = _cvtss_sh(x[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

#include "elementwise/bfloat16.h"
#include "elementwise/loops.h"

}  // namespace

const Kernels& kernels_avx512() { return kTable; }

}  // namespace zeropoint::elementwise
#endif
