// Depthwise convolution with vpmaddwd: pairs of 16-bit words, blocks of 32 or 16 channels.
#if defined(__AVX2__)
#include "conv/depthwise_x86.h"

namespace zeropoint::conv::depthwise {

Choice choose_avx2(int64_t width, const Kernel& kernel, int64_t stride, int64_t dilation) {
  if (width == 32) return choose<Pairs<Register256>, 2>(kernel, stride, dilation);
  return choose<Pairs<Register128>, 2>(kernel, stride, dilation);
}

}  // namespace zeropoint::conv::depthwise
#endif
