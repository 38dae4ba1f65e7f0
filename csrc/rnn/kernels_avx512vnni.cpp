#include "rnn/kernels.h"

#if defined(ZEROPOINT_HAS_AVX512VNNI)
namespace zeropoint::rnn {
namespace {
#include "rnn/loops.h"
}  // namespace

const Kernels& kernels_avx512() { return kTable; }

}  // namespace zeropoint::rnn
#endif
