#include "wide/kernels.h"

#if defined(ZEROPOINT_HAS_AVX512VNNI)
namespace zeropoint::wide {
namespace {
#include "wide/loops.h"
}  // namespace

const Kernels& kernels_avx512() { return kTable; }

}  // namespace zeropoint::wide
#endif
