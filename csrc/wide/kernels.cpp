#include "wide/kernels.h"

#include "isa.h"

namespace zeropoint::wide {

const Kernels& kernels() {
  switch (active_isa()) {
#if defined(ZEROPOINT_HAS_AVX512VNNI)
    case Isa::avx512_vnni:
      return kernels_avx512();
#endif
#if defined(ZEROPOINT_HAS_AVX2)
    case Isa::avx_vnni:
    case Isa::avx2:
      return kernels_avx2();
#endif
    default:
      return kernels_portable();
  }
}

}  // namespace zeropoint::wide
