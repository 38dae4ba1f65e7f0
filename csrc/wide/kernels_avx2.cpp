#include "wide/kernels.h"

#if defined(ZEROPOINT_HAS_AVX2)
namespace zeropoint::wide {
namespace {
#include "wide/loops.h"
}  // namespace

const Kernels& kernels_avx2() { return kTable; }

}  // namespace zeropoint::wide
#endif
