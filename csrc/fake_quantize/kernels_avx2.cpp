#if defined(__x86_64__)
#include <immintrin.h>

#include <limits>

#include "fake_quantize/kernels.h"
#include "fake_quantize/tail.h"

namespace zeropoint::fake_quantize {
namespace {

constexpr int64_t kBlock = 32;

// One vector of results; returns the mask as all-ones or zero lanes.
inline __m256i round_vector(const float* x, float* y, __m256 inverse, __m256 scale, __m256 low, __m256 high) {
  const __m256 place = _mm256_round_ps(_mm256_mul_ps(_mm256_loadu_ps(x), inverse),
                                       _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // max and min answer their second operand where one is NaN
  const __m256 inside = _mm256_min_ps(high, _mm256_max_ps(low, place));
  _mm256_storeu_ps(y, _mm256_mul_ps(_mm256_add_ps(inside, _mm256_setzero_ps()), scale));
  return _mm256_castps_si256(
      _mm256_and_ps(_mm256_cmp_ps(place, low, _CMP_GE_OQ), _mm256_cmp_ps(place, high, _CMP_LE_OQ)));
}

void round_blocks(const float* x, float* y, uint8_t* mask, int64_t n, Steps steps) {
  const __m256 inverse = _mm256_set1_ps(steps.inverse), scale = _mm256_set1_ps(steps.scale);
  const __m256 low = _mm256_set1_ps(steps.low), high = _mm256_set1_ps(steps.high);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7), one = _mm256_set1_epi8(1);
  for (int64_t i = 0; i < n; i += kBlock) {
    const __m256i a = round_vector(x + i, y + i, inverse, scale, low, high);
    const __m256i b = round_vector(x + i + 8, y + i + 8, inverse, scale, low, high);
    const __m256i c = round_vector(x + i + 16, y + i + 16, inverse, scale, low, high);
    const __m256i d = round_vector(x + i + 24, y + i + 24, inverse, scale, low, high);
    // packing works within 128-bit halves: the eight groups of four bytes come out as 0 2 4 6 1 3 5 7
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(mask + i),
                        _mm256_and_si256(_mm256_permutevar8x32_epi32(bytes, order), one));
  }
}

void pass_blocks(const float* grad, const uint8_t* mask, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += 8) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(mask + i));
    const __m256 factor = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
    _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_loadu_ps(grad + i), factor));
  }
}

void round(const float* x, float* y, uint8_t* mask, int64_t n, Steps steps) {
  round_with_tail<kBlock>(round_blocks, x, y, mask, n, steps);
}

void pass(const float* grad, const uint8_t* mask, float* out, int64_t n) {
  pass_with_tail<kBlock>(pass_blocks, grad, mask, out, n);
}

bool range(const float* x, int64_t n, float* low, float* high) {
  const __m256 infinity = _mm256_set1_ps(std::numeric_limits<float>::infinity());
  const __m256 sign = _mm256_set1_ps(-0.0f), none = _mm256_sub_ps(_mm256_setzero_ps(), infinity);
  __m256 least[2] = {infinity, infinity}, most[2] = {none, none}, all = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int j = 0; j < 2; ++j) {
      const __m256 v = _mm256_loadu_ps(x + i + 8 * j);
      const __m256 finite = _mm256_cmp_ps(_mm256_andnot_ps(sign, v), infinity, _CMP_LT_OQ);
      least[j] = _mm256_min_ps(least[j], _mm256_blendv_ps(infinity, v, finite));
      most[j] = _mm256_max_ps(most[j], _mm256_blendv_ps(none, v, finite));
      all = _mm256_and_ps(all, finite);
    }
  }
  alignas(32) float ends[16];
  _mm256_store_ps(ends, _mm256_min_ps(least[0], least[1]));
  _mm256_store_ps(ends + 8, _mm256_max_ps(most[0], most[1]));
  return merge_range(ends, ends + 8, 8, x + i, n - i, low, high) && _mm256_movemask_ps(all) == 0xff;
}

}  // namespace

const Kernels& kernels_avx2() {
  static const Kernels table{round, pass, range};
  return table;
}

}  // namespace zeropoint::fake_quantize
#endif
