#if defined(__x86_64__)
#include <immintrin.h>

#include <limits>

#include "fake_quantize/kernels.h"
#include "fake_quantize/tail.h"

namespace zeropoint::fake_quantize {
namespace {

constexpr int64_t kBlock = 16;

void round_blocks(const float* x, float* y, uint8_t* mask, int64_t n, Steps steps) {
  const __m512 inverse = _mm512_set1_ps(steps.inverse), scale = _mm512_set1_ps(steps.scale);
  const __m512 low = _mm512_set1_ps(steps.low), high = _mm512_set1_ps(steps.high);
  for (int64_t i = 0; i < n; i += kBlock) {
    const __m512 place = _mm512_roundscale_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), inverse),
                                              _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    // max and min answer their second operand where one is NaN
    const __m512 inside = _mm512_min_ps(high, _mm512_max_ps(low, place));
    _mm512_storeu_ps(y + i, _mm512_mul_ps(_mm512_add_ps(inside, _mm512_setzero_ps()), scale));
    const __mmask16 above = _mm512_cmp_ps_mask(place, low, _CMP_GE_OQ);
    const __mmask16 both = _mm512_mask_cmp_ps_mask(above, place, high, _CMP_LE_OQ);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(mask + i), _mm_maskz_set1_epi8(both, 1));
  }
}

void pass_blocks(const float* grad, const uint8_t* mask, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += kBlock) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(mask + i));
    const __m512 factor = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
    _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_loadu_ps(grad + i), factor));
  }
}

void round(const float* x, float* y, uint8_t* mask, int64_t n, Steps steps) {
  round_with_tail<kBlock>(round_blocks, x, y, mask, n, steps);
}

void pass(const float* grad, const uint8_t* mask, float* out, int64_t n) {
  pass_with_tail<kBlock>(pass_blocks, grad, mask, out, n);
}

bool range(const float* x, int64_t n, float* low, float* high) {
  const __m512 infinity = _mm512_set1_ps(std::numeric_limits<float>::infinity());
  const __m512 none = _mm512_sub_ps(_mm512_setzero_ps(), infinity);
  __m512 least[2] = {infinity, infinity}, most[2] = {none, none};
  __mmask16 all = 0xffff;
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    for (int j = 0; j < 2; ++j) {
      const __m512 v = _mm512_loadu_ps(x + i + 16 * j);
      const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(v), infinity, _CMP_LT_OQ);
      least[j] = _mm512_mask_min_ps(least[j], finite, least[j], v);
      most[j] = _mm512_mask_max_ps(most[j], finite, most[j], v);
      all = static_cast<__mmask16>(all & finite);
    }
  }
  alignas(64) float ends[32];
  _mm512_store_ps(ends, _mm512_min_ps(least[0], least[1]));
  _mm512_store_ps(ends + 16, _mm512_max_ps(most[0], most[1]));
  return merge_range(ends, ends + 16, 16, x + i, n - i, low, high) && all == 0xffff;
}

}  // namespace

const Kernels& kernels_avx512() {
  static const Kernels table{round, pass, range};
  return table;
}

}  // namespace zeropoint::fake_quantize
#endif
