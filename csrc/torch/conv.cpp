// zeropoint::conv_pack and zeropoint::conv on the CPU. Every size is checked here; the kernels trust what they get.
#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "conv_arguments.h"
#include "conv/conv.h"
#include "gemm/kernel.h"

namespace zeropoint::binding {
namespace {

conv::WeightSize weight_size(const Tensor& weight, int64_t groups) {
  STD_TORCH_CHECK(weight.dim() >= 3 && weight.dim() <= 5,
                  "conv takes weights of 3, 4 or 5 dimensions, got shape ", text_of(weight));
  STD_TORCH_CHECK(weight.scalar_type() == ScalarType::Char, "conv takes int8 weights");
  STD_TORCH_CHECK(weight.is_cpu(), "conv on the CPU takes weights on the CPU");
  const std::vector<int64_t> shape = shape_of(weight);
  STD_TORCH_CHECK(all_between(shape, 1, kLargest),
                  "conv takes weights with at least one element and sizes below 2**31, got shape ", text_of(shape));
  STD_TORCH_CHECK(groups >= 1 && shape[0] % groups == 0, "conv cannot split ", shape[0], " output channels into ",
                  groups, " groups");
  conv::WeightSize size;
  size.out_channels = shape[0];
  size.group_channels = shape[1];
  size.groups = groups;
  const size_t rank = shape.size() - 2;
  for (size_t d = 0; d < rank; ++d) size.kernel[3 - rank + d] = shape[2 + d];
  STD_TORCH_CHECK(weight.numel() / shape[0] <= gemm::kMaxDepth, "conv takes at most ", gemm::kMaxDepth,
                  " weights an output channel, got shape ", text_of(shape));
  return size;
}

Tensor conv_pack(const Tensor& weight, int64_t groups) {
  const conv::WeightSize size = weight_size(weight, groups);
  const Tensor dense = torch::stable::contiguous(weight);
  const AlignedBytes bytes =
      conv::pack(active_isa(), static_cast<const int8_t*>(dense.const_data_ptr()), size, torch_parallel());
  Tensor packed = empty_bytes(static_cast<int64_t>(bytes.size()));
  std::memcpy(packed.mutable_data_ptr(), bytes.data(), bytes.size());
  return packed;
}

// Sizes of the input and the output, checked against the weight's.
conv::Geometry geometry_of(const Tensor& x, const Tensor& weight, Ints stride, Ints padding, Ints dilation,
                           int64_t groups, std::vector<int64_t>* out_shape) {
  conv::Geometry g;
  g.weight = weight_size(weight, groups);
  const std::vector<int64_t> shape = shape_of(x);
  const size_t rank = static_cast<size_t>(weight.dim()) - 2;
  STD_TORCH_CHECK(shape.size() == rank + 2, "conv with weights of shape ", text_of(weight),
                  " takes an input of ", rank + 2, " dimensions (N, C, spatial), got shape ", text_of(shape));
  STD_TORCH_CHECK(stride.size() == rank && dilation.size() == rank && padding.size() == 2 * rank, "conv in ", rank,
                  " dimensions takes ", rank, " strides, ", rank, " dilations and ", 2 * rank, " paddings, got ",
                  text_of(stride), ", ", text_of(dilation), " and ", text_of(padding));
  STD_TORCH_CHECK(all_between(stride, 1, kLargest) && all_between(dilation, 1, kLargest) &&
                      all_between(padding, 0, kLargest),
                  "conv takes strides and dilations of at least 1 and paddings of at least 0, all below 2**31, got ",
                  text_of(stride), ", ", text_of(dilation), " and ", text_of(padding));
  STD_TORCH_CHECK(all_between(shape, 0, kLargest), "conv takes sizes below 2**31, got shape ", text_of(shape));
  STD_TORCH_CHECK(shape[1] == g.weight.in_channels(), "conv with weights of shape ", text_of(weight), " and ",
                  groups, " groups takes an input of ", g.weight.in_channels(), " channels, got shape ",
                  text_of(shape));
  g.batch = shape[0];
  out_shape->assign({shape[0], g.weight.out_channels});
  for (size_t d = 0; d < rank; ++d) {
    const size_t to = 3 - rank + d;
    const int64_t padded = shape[2 + d] + padding[2 * d] + padding[2 * d + 1];
    const int64_t extent = dilation[d] * (g.weight.kernel[to] - 1) + 1;
    STD_TORCH_CHECK(padded >= extent, "conv: the kernel covers ", extent, " positions of spatial dimension ", d,
                    ", more than the ", padded, " of the padded input (input ", text_of(shape), ", padding ",
                    text_of(padding), "): give it a larger input or more padding");
    g.in[to] = shape[2 + d];
    g.out[to] = (padded - extent) / stride[d] + 1;
    g.stride[to] = stride[d];
    g.dilation[to] = dilation[d];
    g.padding[to] = padding[2 * d];
    out_shape->push_back(g.out[to]);
  }
  int64_t count = 1;
  for (int64_t size : *out_shape)
    STD_TORCH_CHECK(!__builtin_mul_overflow(count, size, &count), "conv: an output of shape ", text_of(*out_shape),
                    " is too large");
  return g;
}

// Codes or floats of dense codes.
void run(const conv::Geometry& geometry, const Tensor& codes, bool x_signed, int64_t x_zero_point, const Tensor& weight,
         const gemm::Columns& columns, const std::optional<Tensor>& packed, const conv::Requantize& to,
         const Tensor& out) {
  if (out.numel() == 0) return;
  const Parallel parallel = torch_parallel();
  const Bytes bytes = packed_bytes(packed);
  const Tensor dense_weight = contiguous_of(weight);
  conv::run(active_isa(), geometry, channels_last_codes(codes, parallel), x_signed, static_cast<int32_t>(x_zero_point),
            static_cast<const int8_t*>(dense_weight.const_data_ptr()), columns.zero_point, bytes.data, bytes.length, to,
            static_cast<uint8_t*>(out.mutable_data_ptr()), parallel);
}

Tensor conv(const Tensor& x, double x_scale, int64_t x_zero_point, const Tensor& weight, const Tensor& weight_scale,
            const Tensor& weight_zero_point, const std::optional<Tensor>& bias, std::vector<int64_t> stride,
            std::vector<int64_t> padding, std::vector<int64_t> dilation, int64_t groups, double out_scale,
            int64_t out_zero_point, int64_t out_min, int64_t out_max, ScalarType out_dtype,
            const std::optional<Tensor>& packed) {
  const Grids grids = grids_of("conv", x.scalar_type(), x_scale, x_zero_point, out_scale, out_zero_point, out_min,
                               out_max, out_dtype);
  STD_TORCH_CHECK(x.is_cpu(), "conv on the CPU takes codes on the CPU");
  std::vector<int64_t> out_shape;
  const conv::Geometry geometry = geometry_of(x, weight, stride, padding, dilation, groups, &out_shape);
  const ColumnTensors tensors("conv", weight_scale, weight_zero_point, bias, geometry.weight.out_channels);
  const gemm::Columns columns = tensors.for_call(x_scale, out_scale);
  const Tensor out = empty_channels_last(out_shape, out_dtype);
  run(geometry, x, grids.x_signed, grids.x_zero_point, weight, columns, packed, requantize_to(grids, columns), out);
  return out;
}

Tensor conv_bind(ScalarType x_dtype, double x_scale, int64_t x_zero_point, const Tensor& weight,
                 const Tensor& weight_scale, const Tensor& weight_zero_point, const std::optional<Tensor>& bias,
                 std::vector<int64_t> stride, std::vector<int64_t> padding, std::vector<int64_t> dilation,
                 int64_t groups, double out_scale, int64_t out_zero_point, int64_t out_min, int64_t out_max,
                 ScalarType out_dtype) {
  const Grids grids =
      grids_of("conv", x_dtype, x_scale, x_zero_point, out_scale, out_zero_point, out_min, out_max, out_dtype);
  const conv::WeightSize size = weight_size(weight, groups);
  const ColumnTensors tensors("conv", weight_scale, weight_zero_point, bias, size.out_channels);
  Window window;
  window.rank = weight.dim() - 2;
  window.groups = groups;
  const auto rank = static_cast<size_t>(window.rank);
  STD_TORCH_CHECK(stride.size() == rank && dilation.size() == rank && padding.size() == 2 * rank, "conv in ", rank,
                  " dimensions takes ", rank, " strides, ", rank, " dilations and ", 2 * rank, " paddings, got ",
                  text_of(stride), ", ", text_of(dilation), " and ", text_of(padding));
  std::copy(stride.begin(), stride.end(), window.stride);
  std::copy(padding.begin(), padding.end(), window.padding);
  std::copy(dilation.begin(), dilation.end(), window.dilation);
  return bind(grids, tensors, x_scale, out_scale, size.out_channels, window);
}

Tensor conv_bound(const Tensor& x, const Tensor& weight, const Tensor& packed, const Tensor& bytes) {
  const auto rank = static_cast<size_t>(std::clamp<int64_t>(weight.dim() - 2, 0, 3));
  gemm::Columns columns;
  const Bound& bound = bound_of("conv", bytes, rank > 0 ? weight.size(0) : -1, static_cast<int64_t>(rank), &columns);
  const Window& window = bound.window;
  STD_TORCH_CHECK(x.is_cpu() && x.scalar_type() == bound.grids.x_dtype(), "conv was bound for other codes");
  std::vector<int64_t> out_shape;
  const conv::Geometry geometry = geometry_of(x, weight, {window.stride, rank}, {window.padding, 2 * rank},
                                              {window.dilation, rank}, window.groups, &out_shape);
  const Tensor out = empty_channels_last(out_shape, bound.grids.out_dtype());
  run(geometry, x, bound.grids.x_signed, bound.grids.x_zero_point, weight, columns, packed,
      requantize_to(bound.grids, columns), out);
  return out;
}

Tensor conv_dynamic(const Tensor& x, const Tensor& weight, const Tensor& weight_scale, const Tensor& weight_zero_point,
                    const std::optional<Tensor>& bias, std::vector<int64_t> stride, std::vector<int64_t> padding,
                    std::vector<int64_t> dilation, int64_t groups, bool reduce_range, bool relu,
                    const std::optional<Tensor>& packed) {
  std::vector<int64_t> out_shape;
  const conv::Geometry geometry = geometry_of(x, weight, stride, padding, dilation, groups, &out_shape);
  const DynamicCodes input = quantize_dynamically(x, reduce_range, torch_parallel());
  const ColumnTensors tensors("conv_dynamic", weight_scale, weight_zero_point, bias, geometry.weight.out_channels);
  const gemm::Columns columns = tensors.for_call(input.grid.scale, 1.0);
  const Tensor out = empty_channels_last(out_shape, ScalarType::Float);
  run(geometry, input.codes, false, input.grid.zero_point, weight, columns, packed, requantize_to_reals(columns, relu),
      out);
  return x.scalar_type() == ScalarType::Float ? out : torch::stable::to(out, x.scalar_type());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zeropoint, CPU, m) {
  m.impl("conv_pack", TORCH_BOX(&conv_pack));
  m.impl("conv", TORCH_BOX(&conv));
  m.impl("conv_bind", TORCH_BOX(&conv_bind));
  m.impl("conv_bound", TORCH_BOX(&conv_bound));
  m.impl("conv_dynamic", TORCH_BOX(&conv_dynamic));
}

}  // namespace zeropoint::binding
