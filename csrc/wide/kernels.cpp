#include "wide/kernels.h"

#include "isa.h"

namespace zeropoint::wide {

const Kernels& kernels() { return kernels_of_level<kernels_portable, kernels_avx2, kernels_avx512>(); }

}  // namespace zeropoint::wide
