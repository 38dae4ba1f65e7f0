#if defined(__x86_64__)
#if !defined(__clang__)
// GCC 12 says so of its own intrinsics, where it inlines them here.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include <cstring>
#include <limits>

#include "distributed/wire.h"

namespace zeropoint::wire {
namespace {

using Floats = __m512;
using Ints = __m512i;
constexpr int kLanes = 16;

inline Floats splat(float v) { return _mm512_set1_ps(v); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats zero_if_nan(Floats v) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(v, v, _CMP_ORD_Q), v); }
inline Ints is_nan(Floats v) { return _mm512_maskz_set1_epi32(_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), -1); }
inline Floats floor_of(Floats v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }

inline Ints whole(int32_t v) { return _mm512_set1_epi32(v); }
inline void istore(int32_t* p, Ints v) { _mm512_storeu_si512(p, v); }
inline Ints both(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline Ints either(Ints a, Ints b) { return _mm512_or_si512(a, b); }
inline Ints exclusive(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
inline Ints plus(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints times(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
template <int k>
inline Ints right(Ints a) { return _mm512_srli_epi32(a, k); }
template <int k>
inline Ints left(Ints a) { return _mm512_slli_epi32(a, k); }
inline Ints bits_of(Floats v) { return _mm512_castps_si512(v); }
inline Ints magnitude(Ints v) { return _mm512_and_si512(v, whole(0x7fffffff)); }
inline Ints above(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
inline Ints count_up() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
inline Ints rounded(Floats v) { return _mm512_cvtps_epi32(v); }

inline __m128i sixteen(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline Ints signed_bytes(const uint8_t* p) { return _mm512_cvtepi8_epi32(sixteen(p)); }
inline Ints unsigned_bytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(sixteen(p)); }
inline void put_signed(Ints v, uint8_t* out) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(v));
}
inline void put_unsigned(Ints v, uint8_t* out) { put_signed(v, out); }

#include "distributed/loops.h"

}  // namespace

const Kernels& kernels_avx512() { return kTable; }

}  // namespace zeropoint::wire
#endif
