#include "wide/kernels.h"

namespace zeropoint::wide {
namespace {
#include "wide/loops.h"
}  // namespace

const Kernels& kernels_portable() { return kTable; }

}  // namespace zeropoint::wide
