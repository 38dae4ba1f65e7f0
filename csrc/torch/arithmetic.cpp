// add, mul and div on the CPU, with broadcasting.
#include "layout.h"

namespace zeropoint::binding {
namespace {

using elementwise::Operand;

std::vector<int64_t> broadcast_sizes(const Tensor& a, const Tensor& b, const char* name) {
  const int64_t rank = std::max(a.dim(), b.dim());
  std::vector<int64_t> sizes(static_cast<size_t>(rank));
  for (int64_t d = 1; d <= rank; ++d) {
    const int64_t from_a = d <= a.dim() ? a.size(a.dim() - d) : 1, from_b = d <= b.dim() ? b.size(b.dim() - d) : 1;
    STD_TORCH_CHECK(from_a == from_b || from_a == 1 || from_b == 1, name, ": sizes ", from_a, " and ", from_b,
                    " of dimension -", d, " do not broadcast");
    sizes[rank - d] = from_a == 1 ? from_b : from_a;
  }
  return sizes;
}

bool has_sizes(const Tensor& x, const std::vector<int64_t>& sizes) {
  const auto own = x.sizes();
  return own.size() == sizes.size() && std::equal(sizes.begin(), sizes.end(), own.begin());
}

// Laid out as the first operand that already has the result's shape, else contiguous.
Tensor broadcast_like(const Tensor& a, const Tensor& b, const std::vector<int64_t>& sizes, ScalarType dtype) {
  for (const Tensor* operand : {&a, &b})
    if (has_sizes(*operand, sizes))
      return dense_like(is_dense(*operand) ? *operand : torch::stable::empty_like(*operand), dtype);
  return torch::stable::new_empty(a, {sizes.data(), sizes.size()}, dtype);
}

// The strides of an operand in the dimensions of the output, in the output's memory order.
Operand operand(const Tensor& x, int64_t zero_point, const std::vector<int64_t>& order, const char* name) {
  Operand out{x.const_data_ptr(), code_type(x.scalar_type(), name), zero_point, {}};
  const int64_t missing = static_cast<int64_t>(order.size()) - x.dim();
  for (int64_t d : order) out.strides.push_back(d < missing || x.size(d - missing) == 1 ? 0 : x.stride(d - missing));
  return out;
}

template <class Run>
Tensor binary(const char* name, const Tensor& a, int64_t a_zero_point, const Tensor& b, int64_t b_zero_point,
              int64_t out_zero_point, int64_t out_min, int64_t out_max, ScalarType out_dtype, Run&& run) {
  STD_TORCH_CHECK(a.is_cpu() && b.is_cpu(), name, ": both operands must be on the CPU");
  const auto to = code_type(out_dtype, name);
  const auto grid = out_grid(to, out_zero_point, out_min, out_max, name);
  const auto sizes = broadcast_sizes(a, b, name);
  Tensor out = broadcast_like(a, b, sizes, out_dtype);
  const auto order = memory_order(out);
  std::vector<int64_t> in_order;
  for (int64_t d : order) in_order.push_back(sizes[d]);
  const Operand left = operand(a, a_zero_point, order, name), right = operand(b, b_zero_point, order, name);
  if (out.numel() > 0) run(in_order, left, right, grid, out.mutable_data_ptr(), to);
  return out;
}

Tensor add(const Tensor& a, double a_scale, int64_t a_zero_point, const Tensor& b, double b_scale,
           int64_t b_zero_point, double out_scale, int64_t out_zero_point, int64_t out_min, int64_t out_max,
           ScalarType out_dtype) {
  return binary("add", a, a_zero_point, b, b_zero_point, out_zero_point, out_min, out_max, out_dtype,
                [&](const auto& sizes, const auto& left, const auto& right, auto grid, void* out, auto type) {
                  elementwise::add(sizes, left, static_cast<float>(a_scale / out_scale), right,
                                   static_cast<float>(b_scale / out_scale), grid, out, type, torch_parallel());
                });
}

Tensor mul(const Tensor& a, double a_scale, int64_t a_zero_point, const Tensor& b, double b_scale,
           int64_t b_zero_point, double out_scale, int64_t out_zero_point, int64_t out_min, int64_t out_max,
           ScalarType out_dtype) {
  return binary("mul", a, a_zero_point, b, b_zero_point, out_zero_point, out_min, out_max, out_dtype,
                [&](const auto& sizes, const auto& left, const auto& right, auto grid, void* out, auto type) {
                  elementwise::mul(sizes, left, right, static_cast<float>(a_scale * b_scale / out_scale), grid, out,
                                   type, torch_parallel());
                });
}

Tensor div(const Tensor& a, double a_scale, int64_t a_zero_point, const Tensor& b, double b_scale,
           int64_t b_zero_point, double out_scale, int64_t out_zero_point, int64_t out_min, int64_t out_max,
           ScalarType out_dtype) {
  return binary("div", a, a_zero_point, b, b_zero_point, out_zero_point, out_min, out_max, out_dtype,
                [&](const auto& sizes, const auto& left, const auto& right, auto grid, void* out, auto type) {
                  elementwise::div(sizes, left, right, a_scale / b_scale / out_scale, grid, out, type,
                                   torch_parallel());
                });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zeropoint, CPU, m) {
  m.impl("add", TORCH_BOX(&add));
  m.impl("mul", TORCH_BOX(&mul));
  m.impl("div", TORCH_BOX(&div));
}

}  // namespace zeropoint::binding
