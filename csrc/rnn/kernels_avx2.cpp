#include "rnn/kernels.h"

#if defined(ZEROPOINT_HAS_AVX2)
namespace zeropoint::rnn {
namespace {
#include "rnn/loops.h"
}  // namespace

const Kernels& kernels_avx2() { return kTable; }

}  // namespace zeropoint::rnn
#endif
