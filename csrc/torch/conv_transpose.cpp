// zeropoint::conv_transpose_pack and zeropoint::conv_transpose on the CPU. Every size is checked here.
#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "conv/transpose.h"
#include "conv_arguments.h"
#include "gemm/kernel.h"

namespace zeropoint::binding {
namespace {

conv::TransposedWeight transposed_weight(const Tensor& weight, const std::vector<int64_t>& stride,
                                         const std::vector<int64_t>& dilation, int64_t groups) {
  STD_TORCH_CHECK(weight.dim() >= 3 && weight.dim() <= 5,
                  "conv_transpose takes weights of 3, 4 or 5 dimensions, got shape ", text_of(weight));
  STD_TORCH_CHECK(weight.scalar_type() == ScalarType::Char && weight.is_cpu(),
                  "conv_transpose on the CPU takes int8 weights on the CPU");
  const std::vector<int64_t> shape = shape_of(weight);
  const size_t rank = shape.size() - 2;
  STD_TORCH_CHECK(all_between(shape, 1, kLargest),
                  "conv_transpose takes weights with at least one element and sizes below 2**31, got shape ",
                  text_of(shape));
  STD_TORCH_CHECK(groups >= 1 && shape[0] % groups == 0 && groups <= kLargest, "conv_transpose cannot split ", shape[0],
                  " input channels into ", groups, " groups");
  STD_TORCH_CHECK(stride.size() == rank && dilation.size() == rank && all_between(stride, 1, kLargest) &&
                      all_between(dilation, 1, kLargest),
                  "conv_transpose in ", rank, " dimensions takes ", rank,
                  " strides and dilations of at least 1, all below 2**31, got ", text_of(stride), " and ",
                  text_of(dilation));
  STD_TORCH_CHECK(weight.numel() / shape[1] / groups <= gemm::kMaxDepth, "conv_transpose takes at most ",
                  gemm::kMaxDepth, " weights an output channel, got shape ", text_of(shape));
  conv::TransposedWeight size;
  size.in_channels = shape[0];
  size.out_channels = shape[1] * groups;
  size.groups = groups;
  for (size_t d = 0; d < rank; ++d) {
    size.kernel[3 - rank + d] = shape[2 + d];
    size.stride[3 - rank + d] = stride[d];
    size.dilation[3 - rank + d] = dilation[d];
  }
  return size;
}

Tensor conv_transpose_pack(const Tensor& weight, std::vector<int64_t> stride, std::vector<int64_t> dilation,
                           int64_t groups) {
  const conv::TransposedWeight size = transposed_weight(weight, stride, dilation, groups);
  const Tensor dense = torch::stable::contiguous(weight);
  const AlignedBytes bytes =
      conv::pack_transposed(active_isa(), static_cast<const int8_t*>(dense.const_data_ptr()), size, torch_parallel());
  Tensor packed = empty_bytes(static_cast<int64_t>(bytes.size()));
  std::memcpy(packed.mutable_data_ptr(), bytes.data(), bytes.size());
  return packed;
}

conv::TransposedGeometry transposed_geometry(const Tensor& x, const Tensor& weight, const std::vector<int64_t>& stride,
                                             const std::vector<int64_t>& padding,
                                             const std::vector<int64_t>& output_padding,
                                             const std::vector<int64_t>& dilation, int64_t groups,
                                             std::vector<int64_t>* out_shape) {
  conv::TransposedGeometry g;
  g.weight = transposed_weight(weight, stride, dilation, groups);
  const std::vector<int64_t> shape = shape_of(x);
  const size_t rank = static_cast<size_t>(weight.dim()) - 2;
  STD_TORCH_CHECK(shape.size() == rank + 2 && shape[1] == g.weight.in_channels, "conv_transpose with weights of shape ",
                  text_of(weight), " takes an input of ", rank + 2, " dimensions and ", g.weight.in_channels,
                  " channels, got shape ", text_of(shape));
  STD_TORCH_CHECK(padding.size() == rank && output_padding.size() == rank && all_between(padding, 0, kLargest),
                  "conv_transpose in ", rank, " dimensions takes ", rank,
                  " paddings and output paddings of at least 0, all below 2**31, got ", text_of(padding), " and ",
                  text_of(output_padding));
  STD_TORCH_CHECK(shape[0] >= 0 && shape[0] <= kLargest &&
                      all_between({shape.begin() + 2, shape.end()}, 1, kLargest),
                  "conv_transpose takes spatial sizes above 0, all sizes below 2**31, got shape ", text_of(shape));
  g.batch = shape[0];
  out_shape->assign({shape[0], g.weight.out_channels});
  int64_t count = shape[0];
  STD_TORCH_CHECK(!__builtin_mul_overflow(count, g.weight.out_channels, &count), "conv_transpose: too large an output");
  for (size_t d = 0; d < rank; ++d) {
    const size_t to = 3 - rank + d;
    STD_TORCH_CHECK(0 <= output_padding[d] && output_padding[d] < std::max(stride[d], dilation[d]),
                    "conv_transpose takes output paddings below the stride or the dilation, got ",
                    text_of(output_padding), " with stride ", text_of(stride), " and dilation ", text_of(dilation));
    const int64_t size = (shape[2 + d] - 1) * stride[d] - 2 * padding[d] + dilation[d] * (g.weight.kernel[to] - 1) +
                         output_padding[d] + 1;
    STD_TORCH_CHECK(size >= 1 && size <= kLargest, "conv_transpose: the output would have size ", size,
                    " in spatial dimension ", d, ", not 1 to 2**31 - 1 (input ", text_of(shape), ", padding ",
                    text_of(padding), "): give it another input or padding");
    STD_TORCH_CHECK(!__builtin_mul_overflow(count, size, &count), "conv_transpose: too large an output");
    g.in[to] = shape[2 + d];
    g.out[to] = size;
    g.padding[to] = padding[d];
    out_shape->push_back(size);
  }
  return g;
}

// Codes or floats of dense codes.
void run(const conv::TransposedGeometry& geometry, const Tensor& codes, bool x_signed, int64_t x_zero_point,
         const Tensor& weight, const gemm::Columns& columns, const std::optional<Tensor>& packed,
         const conv::Requantize& to, const Tensor& out) {
  if (out.numel() == 0) return;
  const Parallel parallel = torch_parallel();
  const Bytes bytes = packed_bytes(packed);
  const Tensor dense_weight = contiguous_of(weight);
  conv::run_transposed(active_isa(), geometry, channels_last_codes(codes, parallel), x_signed,
                       static_cast<int32_t>(x_zero_point), static_cast<const int8_t*>(dense_weight.const_data_ptr()),
                       columns.zero_point, bytes.data, bytes.length, to, static_cast<uint8_t*>(out.mutable_data_ptr()),
                       parallel);
}

Tensor conv_transpose(const Tensor& x, double x_scale, int64_t x_zero_point, const Tensor& weight,
                      const Tensor& weight_scale, const Tensor& weight_zero_point, const std::optional<Tensor>& bias,
                      std::vector<int64_t> stride, std::vector<int64_t> padding, std::vector<int64_t> output_padding,
                      std::vector<int64_t> dilation, int64_t groups, double out_scale, int64_t out_zero_point,
                      int64_t out_min, int64_t out_max, ScalarType out_dtype, const std::optional<Tensor>& packed) {
  const Grids grids = grids_of("conv_transpose", x.scalar_type(), x_scale, x_zero_point, out_scale, out_zero_point,
                               out_min, out_max, out_dtype);
  STD_TORCH_CHECK(x.is_cpu(), "conv_transpose on the CPU takes codes on the CPU");
  std::vector<int64_t> out_shape;
  const conv::TransposedGeometry geometry =
      transposed_geometry(x, weight, stride, padding, output_padding, dilation, groups, &out_shape);
  const ColumnTensors tensors("conv_transpose", weight_scale, weight_zero_point, bias, geometry.weight.out_channels);
  const gemm::Columns columns = tensors.for_call(x_scale, out_scale);
  const Tensor out = empty_channels_last(out_shape, out_dtype);
  run(geometry, x, grids.x_signed, grids.x_zero_point, weight, columns, packed, requantize_to(grids, columns), out);
  return out;
}

Tensor conv_transpose_dynamic(const Tensor& x, const Tensor& weight, const Tensor& weight_scale,
                              const Tensor& weight_zero_point, const std::optional<Tensor>& bias,
                              std::vector<int64_t> stride, std::vector<int64_t> padding,
                              std::vector<int64_t> output_padding, std::vector<int64_t> dilation, int64_t groups,
                              bool reduce_range, bool relu, const std::optional<Tensor>& packed) {
  std::vector<int64_t> out_shape;
  const conv::TransposedGeometry geometry =
      transposed_geometry(x, weight, stride, padding, output_padding, dilation, groups, &out_shape);
  const DynamicCodes input = quantize_dynamically(x, reduce_range, torch_parallel());
  const ColumnTensors tensors("conv_transpose_dynamic", weight_scale, weight_zero_point, bias,
                              geometry.weight.out_channels);
  const gemm::Columns columns = tensors.for_call(input.grid.scale, 1.0);
  const Tensor out = empty_channels_last(out_shape, ScalarType::Float);
  run(geometry, input.codes, false, input.grid.zero_point, weight, columns, packed, requantize_to_reals(columns, relu),
      out);
  return x.scalar_type() == ScalarType::Float ? out : torch::stable::to(out, x.scalar_type());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zeropoint, CPU, m) {
  m.impl("conv_transpose_pack", TORCH_BOX(&conv_transpose_pack));
  m.impl("conv_transpose", TORCH_BOX(&conv_transpose));
  m.impl("conv_transpose_dynamic", TORCH_BOX(&conv_transpose_dynamic));
}

}  // namespace zeropoint::binding
