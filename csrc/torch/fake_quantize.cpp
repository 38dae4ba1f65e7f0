// fake_quantize_per_tensor, fake_quantize_per_channel their gradient, and the fused statistics on the CPU.
#include "fake_quantize/fake_quantize.h"

#include <limits>
#include <optional>
#include <tuple>
#include <vector>

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

// Statistics are read and written in place: float32 or int32, contiguous, one entry a channel.
template <class T>
T* entries(const Tensor& x, ScalarType dtype, int64_t count, const char* what) {
  STD_TORCH_CHECK(x.is_cpu() && x.scalar_type() == dtype && x.numel() == count && x.is_contiguous(),
                  "moving_average_observe: ", what, " must be a contiguous CPU tensor of ", count,
                  dtype == ScalarType::Float ? " float32" : " int32", " numbers, one a channel");
  return static_cast<T*>(x.mutable_data_ptr());
}

Tensor moving_average_observe(const Tensor& input, const Tensor& min_val, const Tensor& max_val, const Tensor& scale,
                              const Tensor& zero_point, const Tensor& eps, double averaging_constant,
                              int64_t quant_min, int64_t quant_max, std::optional<int64_t> axis, bool symmetric,
                              int64_t middle, bool update_grid) {
  const char* name = "moving_average_observe";
  const auto type = float_type(input.scalar_type(), name);
  STD_TORCH_CHECK(quant_min < quant_max, name, ": quant_min must be below quant_max");
  int64_t channels = 1, along = 0;
  if (axis.has_value()) {
    STD_TORCH_CHECK(-input.dim() <= *axis && *axis < input.dim(), name, ": axis ", *axis, " is not one of ",
                    input.dim(), " dimensions");
    along = *axis < 0 ? *axis + input.dim() : *axis;
    channels = input.size(along);
  }
  float* low = entries<float>(min_val, ScalarType::Float, channels, "min_val");
  float* high = entries<float>(max_val, ScalarType::Float, channels, "max_val");
  float* scales = entries<float>(scale, ScalarType::Float, channels, "scale");
  auto* zeros = entries<int32_t>(zero_point, ScalarType::Int, channels, "zero_point");
  const float smallest = *entries<float>(eps, ScalarType::Float, 1, "eps");

  bool finite = true;
  if (input.numel() > 0) {
    const Tensor x = dense(input);
    const auto view = axis.has_value() ? channel_view(x, along) : elementwise::Channels{1, 1, x.numel()};
    std::vector<float> least(static_cast<size_t>(channels), std::numeric_limits<float>::infinity());
    std::vector<float> most(static_cast<size_t>(channels), -std::numeric_limits<float>::infinity());
    finite = fake_quantize::ranges(x.const_data_ptr(), type, view, least.data(), most.data(), torch_parallel());
    for (int64_t c = 0; c < channels; ++c) {
      low[c] = fake_quantize::moving_average(low[c], least[c], averaging_constant);
      high[c] = fake_quantize::moving_average(high[c], most[c], averaging_constant);
    }
  }
  if (update_grid)
    for (int64_t c = 0; c < channels; ++c)
      fake_quantize::grid_of(low[c], high[c], {quant_min, quant_max, symmetric, middle}, smallest, &scales[c],
                             &zeros[c]);
  Tensor ignored = torch::stable::new_empty(input, {}, ScalarType::Bool);
  *static_cast<bool*>(ignored.mutable_data_ptr()) = !finite;
  return ignored;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zeropoint, CPU, m) {
  m.impl("fake_quantize_per_tensor", TORCH_BOX(&fake_quantize_per_tensor));
  m.impl("fake_quantize_per_channel", TORCH_BOX(&fake_quantize_per_channel));
  m.impl("fake_quantize_backward", TORCH_BOX(&fake_quantize_backward));
  m.impl("moving_average_observe", TORCH_BOX(&moving_average_observe));
}

}  // namespace zeropoint::binding
