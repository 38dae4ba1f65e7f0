// Depthwise convolution with vpdpbusd: groups of four bytes, blocks of 64, 32 or 16 channels.
#if defined(__AVX512VNNI__)
#include "conv/depthwise_x86.h"

namespace zeropoint::conv::depthwise {
namespace {

struct Quads64 : Quads<Register512> {
  static Int dot(Int sum, Int x, const uint8_t* weights) { return _mm512_dpbusd_epi32(sum, x, load(weights)); }
};
struct Quads32 : Quads<Register256> {
  static Int dot(Int sum, Int x, const uint8_t* weights) { return _mm256_dpbusd_epi32(sum, x, load(weights)); }
};
struct Quads16 : Quads<Register128> {
  static Int dot(Int sum, Int x, const uint8_t* weights) { return _mm_dpbusd_epi32(sum, x, load(weights)); }
};

}  // namespace

Choice choose_avx512vnni(int64_t width, const Kernel& kernel, int64_t stride, int64_t dilation) {
  if (width == 64) return choose<Quads64, 4>(kernel, stride, dilation);
  if (width == 32) return choose<Quads32, 4>(kernel, stride, dilation);
  return choose<Quads16, 4>(kernel, stride, dilation);
}

}  // namespace zeropoint::conv::depthwise
#endif
