#include "pool/pool_kernel.h"

namespace zeropoint::pool {

Kernels<uint8_t> kernels_avx2(uint8_t) { return kernels<uint8_t>(); }
Kernels<int8_t> kernels_avx2(int8_t) { return kernels<int8_t>(); }

}  // namespace zeropoint::pool
