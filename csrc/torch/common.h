// What the registration files share: checks, shapes and torch's thread pool.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cmath>
#include <string>

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

inline Tensor contiguous_of(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

// Numbers in error messages: a list, and the shape of a tensor.
template <class Numbers>
std::string text_of(const Numbers& numbers, const char* brackets = "[]") {
  std::string text;
  for (int64_t number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
  return brackets[0] + text + brackets[1];
}

inline std::string text_of(const Tensor& x) { return text_of(x.sizes(), "()"); }

// The grids of an operator that requantizes sums: of its input and of its output.
inline void check_scales(const char* name, double x_scale, double out_scale) {
  STD_TORCH_CHECK(std::isfinite(x_scale) && x_scale > 0 && std::isfinite(out_scale) && out_scale > 0, name,
                  " takes an x_scale and an out_scale that are finite and above 0, got ", x_scale, " and ", out_scale);
}

}  // namespace zeropoint::binding
