// quantize_per_tensor, quantize_per_channel, their inverses, requantize, what a range says, and lookup on the CPU.
#include <tuple>

#include "elementwise/qparams.h"
#include "layout.h"

namespace zeropoint::binding {
namespace {

using elementwise::ChannelGrid;
using elementwise::Type;

int64_t checked_axis(const Tensor& x, int64_t axis, const char* name) {
  STD_TORCH_CHECK(-x.dim() <= axis && axis < x.dim(), name, ": axis ", axis, " is out of range for ", x.dim(),
                  " dimensions");
  return axis < 0 ? axis + x.dim() : axis;
}

ChannelGrid channel_grid(const Tensor& x, const Tensor& scales, const Tensor& zero_points, int64_t axis,
                         const char* name) {
  const int64_t channels = x.size(axis);
  STD_TORCH_CHECK(scales.numel() == channels && zero_points.numel() == channels, name, ": ", channels,
                  " channels need as many scales and zero points, got ", scales.numel(), " and ", zero_points.numel());
  const auto dtype = zero_points.scalar_type();
  const bool floating = dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::Half ||
                        dtype == ScalarType::BFloat16;
  return {values(scales, name), values(zero_points, name), floating};
}

Tensor quantize_per_tensor(const Tensor& input, double scale, int64_t zero_point, int64_t quant_min, int64_t quant_max,
                           ScalarType dtype) {
  const char* name = "quantize_per_tensor";
  const Type from = float_type(input.scalar_type(), name), to = code_type(dtype, name);
  const auto grid = out_grid(to, zero_point, quant_min, quant_max, name);
  const Tensor x = dense(input);
  Tensor out = dense_like(x, dtype);
  elementwise::quantize(x.const_data_ptr(), from, x.numel(), scale, grid, out.mutable_data_ptr(), to,
                        torch_parallel());
  return out;
}

Tensor quantize_per_channel(const Tensor& input, const Tensor& scales, const Tensor& zero_points, int64_t axis,
                            int64_t quant_min, int64_t quant_max, ScalarType dtype) {
  const char* name = "quantize_per_channel";
  const Type from = float_type(input.scalar_type(), name), to = code_type(dtype, name);
  axis = checked_axis(input, axis, name);
  const ChannelGrid channels = channel_grid(input, scales, zero_points, axis, name);
  const auto grid = out_grid(to, quant_min, quant_min, quant_max, name);
  if (!channels.floating)
    for (double zero : channels.zero_point) out_grid(to, static_cast<int64_t>(zero), quant_min, quant_max, name);
  const Tensor x = dense(input);
  Tensor out = dense_like(x, dtype);
  if (x.numel() > 0)
    elementwise::quantize_channels(x.const_data_ptr(), from, channel_view(x, axis), channels, grid.low, grid.high,
                                   out.mutable_data_ptr(), to, torch_parallel());
  return out;
}

Tensor dequantize_per_tensor(const Tensor& input, double scale, int64_t zero_point, ScalarType dtype) {
  const char* name = "dequantize_per_tensor";
  const Type from = code_type(input.scalar_type(), name), to = float_type(dtype, name);
  const Tensor codes = dense(input);
  Tensor out = dense_like(codes, dtype);
  elementwise::dequantize(codes.const_data_ptr(), from, codes.numel(), scale, zero_point, out.mutable_data_ptr(), to,
                          torch_parallel());
  return out;
}

Tensor dequantize_per_channel(const Tensor& input, const Tensor& scales, const Tensor& zero_points, int64_t axis,
                              ScalarType dtype) {
  const char* name = "dequantize_per_channel";
  const Type from = code_type(input.scalar_type(), name), to = float_type(dtype, name);
  axis = checked_axis(input, axis, name);
  const ChannelGrid channels = channel_grid(input, scales, zero_points, axis, name);
  const Tensor codes = dense(input);
  Tensor out = dense_like(codes, dtype);
  if (codes.numel() > 0)
    elementwise::dequantize_channels(codes.const_data_ptr(), from, channel_view(codes, axis), channels,
                                     out.mutable_data_ptr(), to, torch_parallel());
  return out;
}

Tensor requantize(const Tensor& input, double scale, int64_t zero_point, double out_scale, int64_t out_zero_point,
                  int64_t out_min, int64_t out_max, ScalarType out_dtype) {
  const char* name = "requantize";
  const Type from = code_type(input.scalar_type(), name), to = code_type(out_dtype, name);
  const auto grid = out_grid(to, out_zero_point, out_min, out_max, name);
  const Tensor codes = dense(input);
  Tensor out = dense_like(codes, out_dtype);
  elementwise::affine(codes.const_data_ptr(), from, codes.numel(), zero_point, static_cast<float>(scale / out_scale),
                      0.0f, grid, out.mutable_data_ptr(), to, torch_parallel());
  return out;
}

struct Range {
  double low, high;
};

Range range_of(const Tensor& input, const char* name) {
  const Type type = float_type(input.scalar_type(), name);
  const Tensor x = dense(input);
  Range range;
  elementwise::finite_range(x.const_data_ptr(), type, x.numel(), &range.low, &range.high, torch_parallel());
  return range;
}

template <class T>
Tensor scalar(const Tensor& like, ScalarType dtype, T value) {
  Tensor out = torch::stable::new_empty(like, {}, dtype);
  *static_cast<T*>(out.mutable_data_ptr()) = value;
  return out;
}

std::tuple<Tensor, Tensor> dynamic_range(const Tensor& x) {
  const Range range = range_of(x, "dynamic_range");
  if (x.scalar_type() == ScalarType::Double)
    return {scalar(x, ScalarType::Double, range.low), scalar(x, ScalarType::Double, range.high)};
  return {scalar(x, ScalarType::Float, static_cast<float>(range.low)),
          scalar(x, ScalarType::Float, static_cast<float>(range.high))};
}

std::tuple<Tensor, Tensor> dynamic_qparams(const Tensor& x, int64_t quant_min, int64_t quant_max) {
  STD_TORCH_CHECK(quant_min < quant_max, "dynamic_qparams: no codes from ", quant_min, " to ", quant_max);
  const Range range = range_of(x, "dynamic_qparams");
  const auto grid = elementwise::choose_qparams(range.low, range.high, quant_min, quant_max);
  return {scalar(x, ScalarType::Double, grid.scale), scalar(x, ScalarType::Long, grid.zero_point)};
}

Tensor lookup(const Tensor& input, const Tensor& table) {
  const char* name = "lookup";
  const Type from = code_type(input.scalar_type(), name), to = code_type(table.scalar_type(), name);
  STD_TORCH_CHECK(elementwise::is_byte(from), name, ": expected int8 or uint8 codes");
  STD_TORCH_CHECK(table.is_cpu() && table.dim() == 1 && table.numel() == 256, name,
                  ": the table must be 256 entries on the CPU, as the codes are");
  const Tensor entries = torch::stable::contiguous(table), codes = dense(input);
  Tensor out = dense_like(codes, table.scalar_type());
  elementwise::lookup(codes.const_data_ptr(), from, codes.numel(), entries.const_data_ptr(), out.mutable_data_ptr(),
                      to, torch_parallel());
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zeropoint, CPU, m) {
  m.impl("quantize_per_tensor", TORCH_BOX(&quantize_per_tensor));
  m.impl("quantize_per_channel", TORCH_BOX(&quantize_per_channel));
  m.impl("dequantize_per_tensor", TORCH_BOX(&dequantize_per_tensor));
  m.impl("dequantize_per_channel", TORCH_BOX(&dequantize_per_channel));
  m.impl("requantize", TORCH_BOX(&requantize));
  m.impl("dynamic_range", TORCH_BOX(&dynamic_range));
  m.impl("dynamic_qparams", TORCH_BOX(&dynamic_qparams));
  m.impl("lookup", TORCH_BOX(&lookup));
}

}  // namespace zeropoint::binding
