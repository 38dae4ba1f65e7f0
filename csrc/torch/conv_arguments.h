// How the registrations of convolutions read, check and allocate tensors.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "conv/conv.h"
#include "conv/layout.h"
#include "elementwise/qparams.h"
#include "gemm/kernel.h"
#include "layer.h"
#include "layout.h"

namespace zeropoint::binding {

// Of any size, stride or padding: products fit 64 bits.
inline constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();

inline std::vector<int64_t> shape_of(const Tensor& x) { return {x.sizes().begin(), x.sizes().end()}; }

inline bool all_between(Ints values, int64_t low, int64_t high) {
  return std::all_of(values.begin(), values.end(), [&](int64_t v) { return low <= v && v <= high; });
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

// To codes.
inline conv::Requantize requantize_to(const Grids& grids, const gemm::Columns& columns) {
  return {columns.multiplier, columns.offset, grids.out_zero_point, grids.out_min, grids.out_max, grids.out_signed != 0};
}

// To real values.
inline conv::Requantize requantize_to_reals(const gemm::Columns& columns, bool relu) {
  conv::Requantize to;
  to.multiplier = columns.multiplier;
  to.offset = columns.offset;
  to.floats = true;
  to.relu = relu;
  return to;
}

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

// The codes of (N, C, spatial) in channels-last order: where they lie, or copied to this thread's scratch.
inline const uint8_t* channels_last_codes(const Tensor& x, const Parallel& parallel) {
  const conv::Strided strided = strided_of(x);
  if (strided.is_channels_last()) return strided.data;
  auto* to = static_cast<uint8_t*>(gemm::thread_scratch(gemm::Scratch::layout, static_cast<size_t>(x.numel())));
  conv::to_channels_last(strided, to, parallel);
  return to;
}

}  // namespace zeropoint::binding
