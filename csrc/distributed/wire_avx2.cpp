#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>
#include <limits>

#include "distributed/wire.h"

namespace zeropoint::wire {
namespace {

using Floats = __m256;
using Ints = __m256i;
constexpr int kLanes = 8;

inline Floats splat(float v) { return _mm256_set1_ps(v); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats zero_if_nan(Floats v) { return _mm256_and_ps(v, _mm256_cmp_ps(v, v, _CMP_ORD_Q)); }
inline Ints is_nan(Floats v) { return _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)); }
inline Floats floor_of(Floats v) { return _mm256_floor_ps(v); }

inline Ints whole(int32_t v) { return _mm256_set1_epi32(v); }
inline void istore(int32_t* p, Ints v) { _mm256_storeu_si256(reinterpret_cast<Ints*>(p), v); }
inline Ints both(Ints a, Ints b) { return _mm256_and_si256(a, b); }
inline Ints either(Ints a, Ints b) { return _mm256_or_si256(a, b); }
inline Ints exclusive(Ints a, Ints b) { return _mm256_xor_si256(a, b); }
inline Ints plus(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints times(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
template <int k>
inline Ints right(Ints a) { return _mm256_srli_epi32(a, k); }
template <int k>
inline Ints left(Ints a) { return _mm256_slli_epi32(a, k); }
inline Ints bits_of(Floats v) { return _mm256_castps_si256(v); }
inline Ints magnitude(Ints v) { return _mm256_and_si256(v, whole(0x7fffffff)); }
inline Ints above(Ints a, Ints b) { return _mm256_max_epi32(a, b); }
inline Ints count_up() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline Floats to_floats(Ints v) { return _mm256_cvtepi32_ps(v); }
inline Ints rounded(Floats v) { return _mm256_cvtps_epi32(v); }

inline __m128i eight(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
inline Ints signed_bytes(const uint8_t* p) { return _mm256_cvtepi8_epi32(eight(p)); }
inline Ints unsigned_bytes(const uint8_t* p) { return _mm256_cvtepu8_epi32(eight(p)); }
inline __m128i shorts(Ints v) { return _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)); }
inline void put_signed(Ints v, uint8_t* out) {
  const __m128i s = shorts(v);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packs_epi16(s, s));
}
inline void put_unsigned(Ints v, uint8_t* out) {
  const __m128i s = shorts(v);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(s, s));
}

#include "distributed/loops.h"

}  // namespace

const Kernels& kernels_avx2() { return kTable; }

}  // namespace zeropoint::wire
#endif
