#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>
#include <limits>
#include <type_traits>

#include "elementwise/kernels.h"

namespace zeropoint::elementwise {
namespace {

using Floats = __m256;
constexpr int kLanes = 8;

inline Floats splat(float v) { return _mm256_set1_ps(v); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats nearest(Floats v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats zero_if_nan(Floats v) { return _mm256_and_ps(v, _mm256_cmp_ps(v, v, _CMP_ORD_Q)); }
inline Floats or_if_nan(Floats v, Floats other) {
  return _mm256_blendv_ps(other, v, _mm256_cmp_ps(v, v, _CMP_ORD_Q));
}
inline Floats finite_or(Floats v, Floats other) {
  const __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v);
  const __m256 infinity = _mm256_set1_ps(std::numeric_limits<float>::infinity());
  return _mm256_blendv_ps(other, v, _mm256_cmp_ps(magnitude, infinity, _CMP_LT_OQ));
}

inline bool any_nan(Floats a, Floats b, Floats c, Floats d) {
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q), _mm256_cmp_ps(c, d, _CMP_UNORD_Q))) != 0;
}
// Large values must not reach the conversion to integers, which answers 2^31 for them as for -2^31. Small ones may.
inline Floats saturated(Floats v) { return _mm256_min_ps(v, _mm256_set1_ps(32767.0f)); }

template <class Signed>
inline Floats from_bytes(const uint8_t* p, Signed) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_cvtepi32_ps(Signed::value ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
}

// Rounds, adds the zero point and saturates, at 16 bits and at 8. Packing works within 128-bit halves, so the eight
// groups of four bytes come out as 0 2 4 6 1 3 5 7.
inline void write_bytes(Floats a, Floats b, Floats c, Floats d, Target target, uint8_t* out) {
  const __m256i shift = _mm256_set1_epi16(target.zero);
  const __m256i ab = _mm256_adds_epi16(_mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b)), shift);
  const __m256i cd = _mm256_adds_epi16(_mm256_packs_epi32(_mm256_cvtps_epi32(c), _mm256_cvtps_epi32(d)), shift);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(ab, cd), order);
  bytes = _mm256_max_epi8(bytes, _mm256_set1_epi8(static_cast<char>(target.zero + static_cast<int>(target.low))));
  bytes = _mm256_min_epi8(bytes, _mm256_set1_epi8(static_cast<char>(target.zero + static_cast<int>(target.high))));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                      _mm256_xor_si256(bytes, _mm256_set1_epi8(static_cast<char>(target.flip))));
}

// Sixteen shuffles look up the low four bits in each row of the table; the high four choose between them, bit by bit.
void lookup(const uint8_t* codes, const uint8_t* table, uint8_t* out, int64_t n) {
  __m256i rows[16];
  for (int k = 0; k < 16; ++k)
    rows[k] = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table + 16 * k)));
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i));
    const __m256i low = _mm256_and_si256(x, _mm256_set1_epi8(15));
    // A byte is chosen by its own top bit: shifts within 16 bits bring bits 4, 5 and 6 of each byte there.
    const __m256i bit4 = _mm256_slli_epi16(x, 3), bit5 = _mm256_slli_epi16(x, 2), bit6 = _mm256_slli_epi16(x, 1);
    __m256i level[8];
    for (int k = 0; k < 8; ++k)
      level[k] = _mm256_blendv_epi8(_mm256_shuffle_epi8(rows[2 * k], low), _mm256_shuffle_epi8(rows[2 * k + 1], low),
                                    bit4);
    for (int k = 0; k < 4; ++k) level[k] = _mm256_blendv_epi8(level[2 * k], level[2 * k + 1], bit5);
    for (int k = 0; k < 2; ++k) level[k] = _mm256_blendv_epi8(level[2 * k], level[2 * k + 1], bit6);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_blendv_epi8(level[0], level[1], x));
  }
  for (; i < n; ++i) out[i] = table[codes[i]];
}

inline int64_t total(__m256i v) {
  alignas(32) int32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), v);
  int64_t sum = 0;
  for (int32_t lane : lanes) sum += lane;
  return sum;
}

template <class Code>
void sums_of(const uint8_t* codes, int64_t n, int64_t* sum, int64_t* squares) {
  constexpr int64_t kStep = 16, kSafe = 16384 * kStep;  // two squares of 255 a step: 16384 steps stay below 2^31
  const __m256i ones = _mm256_set1_epi16(1);
  int64_t i = 0;
  while (i + kStep <= n) {
    const int64_t end = n - i < kSafe ? n : i + kSafe;
    __m256i first = _mm256_setzero_si256(), second = first;
    for (; i + kStep <= end; i += kStep) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
      const __m256i wide = std::is_signed_v<Code> ? _mm256_cvtepi8_epi16(bytes) : _mm256_cvtepu8_epi16(bytes);
      first = _mm256_add_epi32(first, _mm256_madd_epi16(wide, ones));
      second = _mm256_add_epi32(second, _mm256_madd_epi16(wide, wide));
    }
    *sum += total(first);
    *squares += total(second);
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
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
  for (; i < n; ++i) out[i] = _cvtsh_ss(x[i]);
}

void to_half(const float* x, uint16_t* out, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  for (; i < n; ++i) out[i] = _cvtss_sh(x[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

#include "elementwise/bfloat16.h"
#include "elementwise/loops.h"

}  // namespace

const Kernels& kernels_avx2() { return kTable; }

}  // namespace zeropoint::elementwise
#endif
