#include "rnn/kernels.h"

namespace zeropoint::rnn {
namespace {
#include "rnn/loops.h"
}  // namespace

const Kernels& kernels_portable() { return kTable; }

}  // namespace zeropoint::rnn
