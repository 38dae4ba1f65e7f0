// How the registrations of convolutions read, check and allocate tensors.
#pragma once
#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "common.h"
#include "conv/conv.h"
#include "conv/layout.h"
#include "elementwise/qparams.h"
#include "gemm/kernel.h"
#include "layout.h"

namespace zeropoint::binding {

// Of any size, stride or padding: products fit 64 bits.
inline constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();

inline std::string text_of(const std::vector<int64_t>& values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

inline std::vector<int64_t> shape_of(const Tensor& x) { return {x.sizes().begin(), x.sizes().end()}; }

inline bool is_codes(ScalarType dtype) { return dtype == ScalarType::Char || dtype == ScalarType::Byte; }

inline bool all_between(const std::vector<int64_t>& values, int64_t low, int64_t high) {
  return std::all_of(values.begin(), values.end(), [&](int64_t v) { return low <= v && v <= high; });
}

inline Tensor empty_bytes(int64_t size) {
  const int64_t stride = 1;
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &size, &stride, static_cast<int32_t>(ScalarType::Byte),
                                                         aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

// An empty tensor that is channels-last in memory: (N, spatial, C) for every rank.
inline Tensor empty_channels_last(const std::vector<int64_t>& shape, ScalarType dtype) {
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

inline conv::Strided strided_of(const Tensor& x) {
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
inline std::vector<float> ratios_of(const Tensor& values, int64_t count, bool may_be_one, double factor, double divisor,
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
inline std::vector<int32_t> zero_points_of(const Tensor& values, int64_t count) {
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

inline void check_code(int64_t code, ScalarType dtype, const char* name) {
  const int64_t low = dtype == ScalarType::Char ? -128 : 0;
  STD_TORCH_CHECK(low <= code && code <= low + 255, "conv takes a ", name, " in [", low, ", ", low + 255, "], got ",
                  code);
}

// The arrays of requantization, read from a call's tensors and numbers.
struct Requantization {
  conv::Requantize arrays;

  Requantization(const Tensor& weight_scale, const Tensor& weight_zero_point, const std::optional<Tensor>& bias,
                 int64_t channels, double x_scale, double out_scale, int64_t out_zero_point, int64_t out_min,
                 int64_t out_max, ScalarType out_dtype)
      : zero_points_(zero_points_of(weight_zero_point, channels)),
        multiplier_(ratios_of(weight_scale, channels, true, x_scale, out_scale, "weight_scale")) {
    check_code(out_zero_point, out_dtype, "out_zero_point");
    check_code(out_min, out_dtype, "out_min");
    check_code(out_max, out_dtype, "out_max");
    STD_TORCH_CHECK(out_min <= out_max, "conv takes out_min <= out_max, got ", out_min, " and ", out_max);
    if (bias) offset_ = ratios_of(*bias, channels, false, 1.0, out_scale, "bias");
    arrays.multiplier = multiplier_.data();
    arrays.offset = bias ? offset_.data() : nullptr;
    arrays.out_zero_point = static_cast<int32_t>(out_zero_point);
    arrays.out_min = static_cast<int32_t>(out_min);
    arrays.out_max = static_cast<int32_t>(out_max);
    arrays.out_signed = out_dtype == ScalarType::Char;
  }
  // To real values.
  Requantization(const Tensor& weight_scale, const Tensor& weight_zero_point, const std::optional<Tensor>& bias,
                 int64_t channels, double x_scale, bool relu)
      : Requantization(weight_scale, weight_zero_point, bias, channels, x_scale, 1.0, 0, 0, 255, ScalarType::Byte) {
    arrays.floats = true;
    arrays.relu = relu;
  }
  Requantization(const Requantization&) = delete;
  Requantization& operator=(const Requantization&) = delete;

  // One an output channel, or null if all are 0.
  const int32_t* zero_points() const { return zero_points_.empty() ? nullptr : zero_points_.data(); }

 private:
  std::vector<int32_t> zero_points_;
  std::vector<float> multiplier_, offset_;
};

// A float input on the quint8 grid of its own finite range, in its own layout.
struct DynamicCodes {
  Tensor codes;
  elementwise::Qparams grid;
};

inline DynamicCodes quantize_dynamically(const Tensor& x, bool reduce_range, const Parallel& parallel) {
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(x.is_cpu() && (dtype == ScalarType::Float || dtype == ScalarType::Double ||
                                 dtype == ScalarType::Half || dtype == ScalarType::BFloat16),
                  "dynamic convolution takes a float16, bfloat16, float32 or float64 tensor on the CPU");
  const Tensor values = dense(dtype == ScalarType::Float ? x : torch::stable::to(x, ScalarType::Float));
  Tensor codes = dense_like(values, ScalarType::Byte);
  double low = 0, high = 0;
  elementwise::finite_range(values.const_data_ptr(), elementwise::Type::f32, values.numel(), &low, &high, parallel);
  const auto grid = elementwise::choose_qparams(low, high, 0, reduce_range ? 127 : 255);
  elementwise::quantize(values.const_data_ptr(), elementwise::Type::f32, values.numel(), grid.scale,
                        {grid.zero_point, 0, 255}, codes.mutable_data_ptr(), elementwise::Type::u8, parallel);
  return {codes, grid};
}

struct Bytes {
  const uint8_t* data = nullptr;
  int64_t length = 0;
};

// The packed weights of a call; none if the tensor cannot be read as bytes.
inline Bytes packed_bytes(const std::optional<Tensor>& packed) {
  if (!packed || !packed->is_cpu() || packed->scalar_type() != ScalarType::Byte || !packed->is_contiguous()) return {};
  return {static_cast<const uint8_t*>(packed->const_data_ptr()), packed->numel()};
}

// The codes of (N, C, spatial) in channels-last order: where they lie, or copied to this thread's scratch.
inline const uint8_t* channels_last_codes(const Tensor& x, const Parallel& parallel) {
  const conv::Strided strided = strided_of(x);
  if (strided.is_channels_last()) return strided.data;
  auto* to = static_cast<uint8_t*>(gemm::thread_scratch(gemm::Scratch::layout, static_cast<size_t>(x.numel())));
  conv::to_channels_last(strided, to, parallel);
  return to;
}

}  // namespace zeropoint::binding
