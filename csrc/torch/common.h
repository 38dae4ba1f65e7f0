// What the registration files share: checks, shapes and torch's thread pool.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "parallel.h"

namespace zeropoint::binding {

using torch::stable::Tensor;
using torch::headeronly::ScalarType;

// Work on torch's own pool, so that torch.set_num_threads holds and no second pool spins.
inline Parallel torch_parallel() {
  return {static_cast<int>(torch::stable::get_num_threads()),
          [](int64_t begin, int64_t end, int64_t grain, Parallel::Body body, void* context) {
            torch::stable::parallel_for(begin, end, grain,
                                        [&](int64_t b, int64_t e) { body(b, e, context); });
          }};
}

}  // namespace zeropoint::binding
