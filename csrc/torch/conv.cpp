// zeropoint::conv_pack and zeropoint::conv on the CPU. Every size is checked here; the kernels trust what they get.
#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common.h"
#include "conv/conv.h"
#include "conv/layout.h"
#include "gemm/kernel.h"

namespace zeropoint::binding {
namespace {

constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();  // of any size, stride, padding: products fit 64 bits

std::string text_of(const std::vector<int64_t>& values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

std::vector<int64_t> shape_of(const Tensor& x) { return {x.sizes().begin(), x.sizes().end()}; }

bool is_codes(ScalarType dtype) { return dtype == ScalarType::Char || dtype == ScalarType::Byte; }

bool all_between(const std::vector<int64_t>& values, int64_t low, int64_t high) {
  return std::all_of(values.begin(), values.end(), [&](int64_t v) { return low <= v && v <= high; });
}

conv::WeightSize weight_size(const Tensor& weight, int64_t groups) {
  STD_TORCH_CHECK(weight.dim() >= 3 && weight.dim() <= 5,
                  "conv takes weights of 3, 4 or 5 dimensions, got shape ", text_of(shape_of(weight)));
  STD_TORCH_CHECK(weight.scalar_type() == ScalarType::Char, "conv takes int8 weights");
  STD_TORCH_CHECK(weight.is_cpu(), "conv on the CPU takes weights on the CPU");
  const std::vector<int64_t> shape = shape_of(weight);
  STD_TORCH_CHECK(all_between(shape, 1, kLargest), "conv takes weights with at least one element, got shape ",
                  text_of(shape));
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

Tensor empty_bytes(int64_t size) {
  const int64_t stride = 1;
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &size, &stride, static_cast<int32_t>(ScalarType::Byte),
                                                         aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

Tensor conv_pack(const Tensor& weight, int64_t groups) {
  const conv::WeightSize size = weight_size(weight, groups);
  const Tensor dense = torch::stable::contiguous(weight);
  const std::vector<uint8_t> bytes =
      conv::pack(active_isa(), static_cast<const int8_t*>(dense.const_data_ptr()), size, torch_parallel());
  Tensor packed = empty_bytes(static_cast<int64_t>(bytes.size()));
  std::memcpy(packed.mutable_data_ptr(), bytes.data(), bytes.size());
  return packed;
}

// Sizes of the input and the output, checked against the weight's.
conv::Geometry geometry_of(const Tensor& x, const Tensor& weight, const std::vector<int64_t>& stride,
                           const std::vector<int64_t>& padding, const std::vector<int64_t>& dilation, int64_t groups,
                           std::vector<int64_t>* out_shape) {
  conv::Geometry g;
  g.weight = weight_size(weight, groups);
  const std::vector<int64_t> shape = shape_of(x);
  const size_t rank = static_cast<size_t>(weight.dim()) - 2;
  STD_TORCH_CHECK(shape.size() == rank + 2, "conv with weights of shape ", text_of(shape_of(weight)),
                  " takes an input of ", rank + 2, " dimensions (N, C, spatial), got shape ", text_of(shape));
  STD_TORCH_CHECK(stride.size() == rank && dilation.size() == rank && padding.size() == 2 * rank, "conv in ", rank,
                  " dimensions takes ", rank, " strides, ", rank, " dilations and ", 2 * rank, " paddings, got ",
                  text_of(stride), ", ", text_of(dilation), " and ", text_of(padding));
  STD_TORCH_CHECK(all_between(stride, 1, kLargest) && all_between(dilation, 1, kLargest) &&
                      all_between(padding, 0, kLargest),
                  "conv takes strides and dilations of at least 1 and paddings of at least 0, all below 2**31, got ",
                  text_of(stride), ", ", text_of(dilation), " and ", text_of(padding));
  STD_TORCH_CHECK(all_between(shape, 0, kLargest), "conv takes sizes below 2**31, got shape ", text_of(shape));
  STD_TORCH_CHECK(shape[1] == g.weight.in_channels(), "conv with weights of shape ", text_of(shape_of(weight)), " and ",
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
                    text_of(padding), ")");
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

// An empty tensor that is channels-last in memory: (N, spatial, C) for every rank.
Tensor empty_channels_last(const std::vector<int64_t>& shape, ScalarType dtype) {
  const size_t dims = shape.size();
  std::vector<int64_t> strides(dims);
  int64_t step = 1;
  const auto place = [&](size_t d) {
    strides[d] = step;
    step *= std::max<int64_t>(shape[d], 1);
  };
  place(1);
  for (size_t d = dims - 1; d >= 2; --d) place(d);
  place(0);
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(dims), shape.data(), strides.data(),
                                                         static_cast<int32_t>(dtype), aoti_torch_device_type_cpu(), 0,
                                                         &handle));
  return Tensor(handle);
}

conv::Strided strided_of(const Tensor& x) {
  conv::Strided s;
  const auto sizes = x.sizes(), strides = x.strides();
  s.data = static_cast<const uint8_t*>(x.const_data_ptr());
  s.batch = sizes[0], s.batch_stride = strides[0];
  s.channels = sizes[1], s.channel_stride = strides[1];
  const size_t rank = sizes.size() - 2;
  for (size_t d = 0; d < rank; ++d) {
    s.size[3 - rank + d] = sizes[2 + d];
    s.stride[3 - rank + d] = strides[2 + d];
  }
  return s;
}

// float(factor * value / divisor) of each entry of a 1-D parameter, the product and the quotient in float64.
std::vector<float> ratios_of(const Tensor& values, int64_t count, bool may_be_one, double factor, double divisor,
                             const char* name) {
  const bool one = may_be_one && values.numel() == 1;
  STD_TORCH_CHECK(values.is_cpu(), "conv on the CPU takes ", name, " on the CPU");
  STD_TORCH_CHECK(one || values.numel() == count, "conv with ", count, " output channels takes ",
                  may_be_one ? "1 entry or " : "", count, " entries of ", name, ", got ", values.numel());
  Tensor dense = torch::stable::contiguous(values);
  if (dense.scalar_type() != ScalarType::Float && dense.scalar_type() != ScalarType::Double)
    dense = torch::stable::to(dense, ScalarType::Double);
  std::vector<float> result(static_cast<size_t>(count));
  const int64_t read = one ? 1 : count;
  if (dense.scalar_type() == ScalarType::Float)
    conv::ratios(static_cast<const float*>(dense.const_data_ptr()), read, factor, divisor, result.data());
  else
    conv::ratios(static_cast<const double*>(dense.const_data_ptr()), read, factor, divisor, result.data());
  if (one) std::fill(result.begin() + 1, result.end(), result[0]);
  return result;
}

// Weight zero points, one a channel; empty if all are 0.
std::vector<int32_t> zero_points_of(const Tensor& values, int64_t count) {
  STD_TORCH_CHECK(values.is_cpu(), "conv on the CPU takes weight_zero_point on the CPU");
  STD_TORCH_CHECK(values.numel() == 1 || values.numel() == count, "conv with ", count, " output channels takes 1 or ",
                  count, " entries of weight_zero_point, got ", values.numel());
  Tensor dense = torch::stable::contiguous(values);
  if (dense.scalar_type() != ScalarType::Int && dense.scalar_type() != ScalarType::Long)
    dense = torch::stable::to(dense, ScalarType::Long);
  std::vector<int32_t> result(static_cast<size_t>(count));
  bool zero = true, inside = true;
  const auto read = [&](const auto* from) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t value = from[values.numel() == 1 ? 0 : i];
      zero = zero && value == 0;
      inside = inside && -128 <= value && value <= 127;
      result[static_cast<size_t>(i)] = static_cast<int32_t>(value);
    }
  };
  if (dense.scalar_type() == ScalarType::Int)
    read(static_cast<const int32_t*>(dense.const_data_ptr()));
  else
    read(static_cast<const int64_t*>(dense.const_data_ptr()));
  STD_TORCH_CHECK(inside, "conv takes weight zero points in [-128, 127]");
  if (zero) result.clear();
  return result;
}

void check_code(int64_t code, ScalarType dtype, const char* name) {
  const int64_t low = dtype == ScalarType::Char ? -128 : 0;
  STD_TORCH_CHECK(low <= code && code <= low + 255, "conv takes a ", name, " in [", low, ", ", low + 255, "], got ",
                  code);
}

Tensor conv(const Tensor& x, double x_scale, int64_t x_zero_point, const Tensor& weight, const Tensor& weight_scale,
            const Tensor& weight_zero_point, const std::optional<Tensor>& bias, std::vector<int64_t> stride,
            std::vector<int64_t> padding, std::vector<int64_t> dilation, int64_t groups, double out_scale,
            int64_t out_zero_point, int64_t out_min, int64_t out_max, ScalarType out_dtype,
            const std::optional<Tensor>& packed) {
  STD_TORCH_CHECK(x.is_cpu() && is_codes(x.scalar_type()) && is_codes(out_dtype),
                  "conv takes and gives int8 or uint8 codes");
  std::vector<int64_t> out_shape;
  const conv::Geometry geometry = geometry_of(x, weight, stride, padding, dilation, groups, &out_shape);
  check_code(x_zero_point, x.scalar_type(), "x_zero_point");
  check_code(out_zero_point, out_dtype, "out_zero_point");
  check_code(out_min, out_dtype, "out_min");
  check_code(out_max, out_dtype, "out_max");
  STD_TORCH_CHECK(out_min <= out_max, "conv takes out_min <= out_max, got ", out_min, " and ", out_max);

  const int64_t channels = geometry.weight.out_channels;
  const std::vector<int32_t> zero_points = zero_points_of(weight_zero_point, channels);
  const std::vector<float> multiplier = ratios_of(weight_scale, channels, true, x_scale, out_scale, "weight_scale");
  std::vector<float> offset;
  if (bias) offset = ratios_of(*bias, channels, false, 1.0, out_scale, "bias");

  Tensor out = empty_channels_last(out_shape, out_dtype);
  if (out.numel() == 0) return out;

  const Parallel parallel = torch_parallel();
  const conv::Strided strided = strided_of(x);
  const uint8_t* codes = strided.data;
  if (!strided.is_channels_last()) {
    auto* to = static_cast<uint8_t*>(gemm::thread_scratch(gemm::Scratch::layout, static_cast<size_t>(x.numel())));
    conv::to_channels_last(strided, to, parallel);
    codes = to;
  }

  const uint8_t* bytes = nullptr;
  int64_t length = 0;
  if (packed && packed->is_cpu() && packed->scalar_type() == ScalarType::Byte && packed->is_contiguous()) {
    bytes = static_cast<const uint8_t*>(packed->const_data_ptr());
    length = packed->numel();
  }

  const Tensor dense_weight = torch::stable::contiguous(weight);
  conv::Requantize requantize;
  requantize.multiplier = multiplier.data();
  requantize.offset = bias ? offset.data() : nullptr;
  requantize.out_zero_point = static_cast<int32_t>(out_zero_point);
  requantize.out_min = static_cast<int32_t>(out_min);
  requantize.out_max = static_cast<int32_t>(out_max);
  requantize.out_signed = out_dtype == ScalarType::Char;
  conv::run(active_isa(), geometry, codes, x.scalar_type() == ScalarType::Char, static_cast<int32_t>(x_zero_point),
            static_cast<const int8_t*>(dense_weight.const_data_ptr()),
            zero_points.empty() ? nullptr : zero_points.data(), bytes, length, requantize,
            static_cast<uint8_t*>(out.mutable_data_ptr()), parallel);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zeropoint, CPU, m) {
  m.impl("conv_pack", TORCH_BOX(&conv_pack));
  m.impl("conv", TORCH_BOX(&conv));
}

}  // namespace zeropoint::binding
