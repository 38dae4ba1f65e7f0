#include "fake_quantize/kernels.h"

#include "isa.h"

namespace zeropoint::fake_quantize {

const Kernels& kernels() { return kernels_of_level<kernels_portable, kernels_avx2, kernels_avx512>(); }

}  // namespace zeropoint::fake_quantize
