// fake_quantize_per_tensor, fake_quantize_per_channel and their gradient on the CPU.
#include "fake_quantize/fake_quantize.h"

#include <tuple>

#include "layout.h"

namespace zeropoint::binding {
namespace {

bool is_floating(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::Half ||
         dtype == ScalarType::BFloat16;
}

std::tuple<Tensor, Tensor> on_grid(const Tensor& x, elementwise::Channels view, const Tensor& scales,
                                   const Tensor& zero_points, int64_t quant_min, int64_t quant_max, const char* name) {
  const auto type = float_type(x.scalar_type(), name);
  const elementwise::ChannelGrid grid{values(scales, name), values(zero_points, name),
                                      is_floating(zero_points.scalar_type())};
  Tensor y = dense_like(x, x.scalar_type());
  Tensor mask = dense_like(x, ScalarType::Bool);
  if (x.numel() > 0)
    fake_quantize::round(x.const_data_ptr(), type, view, grid, quant_min, quant_max, y.mutable_data_ptr(),
                         static_cast<uint8_t*>(mask.mutable_data_ptr()), torch_parallel());
  return {y, mask};
}

std::tuple<Tensor, Tensor> fake_quantize_per_tensor(const Tensor& input, const Tensor& scale, const Tensor& zero_point,
                                                    int64_t quant_min, int64_t quant_max) {
  const char* name = "fake_quantize_per_tensor";
  STD_TORCH_CHECK(scale.numel() == 1 && zero_point.numel() == 1, name,
                  " takes one scale and one zero point, got ", scale.numel(), " and ", zero_point.numel());
  const Tensor x = dense(input);
  return on_grid(x, {1, 1, x.numel()}, scale, zero_point, quant_min, quant_max, name);
}

std::tuple<Tensor, Tensor> fake_quantize_per_channel(const Tensor& input, const Tensor& scales,
                                                     const Tensor& zero_points, int64_t axis, int64_t quant_min,
                                                     int64_t quant_max) {
  const char* name = "fake_quantize_per_channel";
  STD_TORCH_CHECK(-input.dim() <= axis && axis < input.dim(), name, ": axis ", axis, " is not one of ", input.dim(),
                  " dimensions");
  axis = axis < 0 ? axis + input.dim() : axis;
  const int64_t channels = input.size(axis);
  STD_TORCH_CHECK(scales.numel() == channels && zero_points.numel() == channels, name, ": ", channels,
                  " channels need as many scales and zero points, got ", scales.numel(), " and ", zero_points.numel());
  const Tensor x = dense(input);
  const elementwise::Channels view = x.numel() > 0 ? channel_view(x, axis) : elementwise::Channels{0, 1, 1};
  return on_grid(x, view, scales, zero_points, quant_min, quant_max, name);
}

Tensor fake_quantize_backward(const Tensor& grad, const Tensor& mask) {
  const char* name = "fake_quantize_backward";
  const auto type = float_type(grad.scalar_type(), name);
  STD_TORCH_CHECK(mask.is_cpu() && mask.scalar_type() == ScalarType::Bool && mask.sizes().equals(grad.sizes()), name,
                  ": the mask must be bool, of the gradient's shape, on the CPU");
  const bool alike = is_dense(grad) && is_dense(mask) && grad.strides().equals(mask.strides());
  const Tensor from = alike ? grad : torch::stable::contiguous(grad);
  const Tensor inside = alike ? mask : torch::stable::contiguous(mask);
  Tensor out = dense_like(from, grad.scalar_type());
  if (from.numel() > 0)
    fake_quantize::pass(from.const_data_ptr(), type, static_cast<const uint8_t*>(inside.const_data_ptr()),
                        from.numel(), out.mutable_data_ptr(), torch_parallel());
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zeropoint, CPU, m) {
  m.impl("fake_quantize_per_tensor", TORCH_BOX(&fake_quantize_per_tensor));
  m.impl("fake_quantize_per_channel", TORCH_BOX(&fake_quantize_per_channel));
  m.impl("fake_quantize_backward", TORCH_BOX(&fake_quantize_backward));
}

}  // namespace zeropoint::binding
