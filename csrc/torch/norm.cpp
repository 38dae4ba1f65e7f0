// batch_norm, layer_norm and group_norm on the CPU.
#include "norm/norm.h"

#include "layout.h"

namespace zeropoint::binding {
namespace {

using elementwise::Type;

std::vector<double> parameter(const std::optional<Tensor>& x, int64_t count, double otherwise, const char* name) {
  if (!x.has_value()) return std::vector<double>(static_cast<size_t>(count), otherwise);
  STD_TORCH_CHECK(x->numel() == count, name, ": expected ", count, " parameters, got ", x->numel());
  return values(*x, name);
}

Tensor batch_norm(const Tensor& input, double x_scale, int64_t x_zero_point, const std::optional<Tensor>& weight,
                  const std::optional<Tensor>& bias, const Tensor& mean, const Tensor& var, double eps,
                  double out_scale, int64_t out_zero_point, int64_t out_min, int64_t out_max, ScalarType out_dtype) {
  const char* name = "batch_norm";
  STD_TORCH_CHECK(input.dim() >= 2, name, ": expected two or more dimensions, got ", input.dim());
  const Type from = code_type(input.scalar_type(), name), to = code_type(out_dtype, name);
  const auto grid = out_grid(to, out_zero_point, out_min, out_max, name);
  const int64_t channels = input.size(1);
  const auto w = parameter(weight, channels, 1.0, name), b = parameter(bias, channels, 0.0, name);
  const auto means = parameter(mean, channels, 0.0, name), vars = parameter(var, channels, 1.0, name);
  std::vector<float> factor, offset;
  for (int64_t c = 0; c < channels; ++c) {
    const auto line = norm::line(w[c], b[c], means[c], vars[c], eps, x_scale, out_scale);
    factor.push_back(line.factor);
    offset.push_back(line.offset);
  }
  const Tensor x = dense(input);
  Tensor out = dense_like(x, out_dtype);
  if (x.numel() > 0)
    elementwise::affine_channels(x.const_data_ptr(), from, channel_view(x, 1),
                                 std::vector<int64_t>(static_cast<size_t>(channels), x_zero_point), factor, offset,
                                 grid, out.mutable_data_ptr(), to, torch_parallel());
  return out;
}

// The kernel's output in the order of dimensions that torch.empty_like(x) has.
Tensor in_layout_of(const Tensor& x, const Tensor& result) {
  if (x.is_contiguous()) return result;
  Tensor out = dense_like(is_dense(x) ? x : torch::stable::empty_like(x), result.scalar_type());
  torch::stable::copy_(out, result);
  return out;
}

Tensor layer_norm(const Tensor& input, double x_scale, int64_t x_zero_point, std::vector<int64_t> normalized_shape,
                  const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, double eps, double out_scale,
                  int64_t out_zero_point, int64_t out_min, int64_t out_max, ScalarType out_dtype) {
  const char* name = "layer_norm";
  const Type from = code_type(input.scalar_type(), name), to = code_type(out_dtype, name);
  const auto grid = out_grid(to, out_zero_point, out_min, out_max, name);
  const auto rank = static_cast<int64_t>(normalized_shape.size());
  STD_TORCH_CHECK(rank <= input.dim(), name, ": normalized_shape has more dimensions than the input");
  int64_t size = 1;
  for (int64_t d = 0; d < rank; ++d) {
    STD_TORCH_CHECK(input.size(input.dim() - rank + d) == normalized_shape[d], name,
                    ": the input's shape does not end in normalized_shape");
    size *= normalized_shape[d];
  }
  std::vector<float> gain, shift;
  for (double w : parameter(weight, size, 1.0, name)) gain.push_back(static_cast<float>(w / out_scale));
  for (double b : parameter(bias, size, 0.0, name)) shift.push_back(static_cast<float>(b / out_scale));
  const Tensor x = torch::stable::contiguous(input);
  Tensor out = dense_like(x, out_dtype);
  if (x.numel() > 0)
    norm::layer_norm({x.const_data_ptr(), from, x_scale, x_zero_point}, x.numel() / size, size, eps, gain, shift, grid,
                     out.mutable_data_ptr(), to, torch_parallel());
  return in_layout_of(input, out);
}

// Whether channels are the innermost dimension of a dense tensor, and the samples the outermost.
bool is_channels_last(const Tensor& x) {
  if (x.dim() < 3 || x.size(1) == 1 || x.stride(1) != 1 || !is_dense(x)) return false;
  int64_t expected = x.size(1);
  for (int64_t d = x.dim() - 1; d != 1; d = d == 2 ? 0 : d - 1) {
    if (x.size(d) != 1 && x.stride(d) != expected) return false;
    expected *= x.size(d);
    if (d == 0) break;
  }
  return true;
}

Tensor group_norm(const Tensor& input, double x_scale, int64_t x_zero_point, int64_t num_groups,
                  const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, double eps, double out_scale,
                  int64_t out_zero_point, int64_t out_min, int64_t out_max, ScalarType out_dtype) {
  const char* name = "group_norm";
  STD_TORCH_CHECK(input.dim() >= 2, name, ": expected two or more dimensions, got ", input.dim());
  const Type from = code_type(input.scalar_type(), name), to = code_type(out_dtype, name);
  const auto grid = out_grid(to, out_zero_point, out_min, out_max, name);
  const int64_t batch = input.size(0), channels = input.size(1);
  STD_TORCH_CHECK(num_groups > 0 && channels % num_groups == 0, name, ": ", channels, " channels do not split into ",
                  num_groups, " groups");
  const auto w = parameter(weight, channels, 1.0, name), b = parameter(bias, channels, 0.0, name);
  const bool channels_last = !input.is_contiguous() && is_channels_last(input);
  const Tensor x = channels_last ? input : torch::stable::contiguous(input);
  Tensor out = dense_like(x, out_dtype);
  if (x.numel() > 0)
    norm::group_norm({x.const_data_ptr(), from, x_scale, x_zero_point},
                     {batch, channels, x.numel() / (batch * channels), channels_last}, num_groups, eps, w, b, out_scale,
                     grid, out.mutable_data_ptr(), to, torch_parallel());
  return channels_last ? out : in_layout_of(input, out);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zeropoint, CPU, m) {
  m.impl("batch_norm", TORCH_BOX(&batch_norm));
  m.impl("layer_norm", TORCH_BOX(&layer_norm));
  m.impl("group_norm", TORCH_BOX(&group_norm));
}

}  // namespace zeropoint::binding
