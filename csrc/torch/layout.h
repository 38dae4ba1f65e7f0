// Dense layouts: what lets an element-wise kernel walk memory in one go, whatever order the dimensions have.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "elementwise/elementwise.h"
#include "common.h"

namespace zeropoint::binding {

inline elementwise::Type type_of(ScalarType dtype, const char* name) {
  using elementwise::Type;
  switch (dtype) {
    case ScalarType::Float: return Type::f32;
    case ScalarType::Half: return Type::f16;
    case ScalarType::BFloat16: return Type::bf16;
    case ScalarType::Double: return Type::f64;
    case ScalarType::Char: return Type::i8;
    case ScalarType::Byte: return Type::u8;
    case ScalarType::Int: return Type::i32;
    default: STD_TORCH_CHECK(false, name, ": dtype is neither a float nor the storage of codes");
  }
}

inline elementwise::Type float_type(ScalarType dtype, const char* name) {
  const auto type = type_of(dtype, name);
  STD_TORCH_CHECK(type <= elementwise::Type::f64, name, ": expected float16, bfloat16, float32 or float64");
  return type;
}

inline elementwise::Type code_type(ScalarType dtype, const char* name) {
  const auto type = type_of(dtype, name);
  STD_TORCH_CHECK(type > elementwise::Type::f64, name, ": expected codes (int8, uint8 or int32)");
  return type;
}

// The dimensions from the outermost in memory to the innermost.
inline std::vector<int64_t> memory_order(const Tensor& x) {
  std::vector<int64_t> order(static_cast<size_t>(x.dim()));
  std::iota(order.begin(), order.end(), 0);
  if (!x.is_contiguous()) {
    const auto strides = x.strides();
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
  }
  return order;
}

// Whether the elements fill their memory without gaps or repeats, in some order of the dimensions.
inline bool is_dense(const Tensor& x) {
  if (x.is_contiguous()) return true;
  const auto sizes = x.sizes();
  const auto strides = x.strides();
  auto order = memory_order(x);
  int64_t expected = 1;
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    if (sizes[*d] == 1) continue;
    if (strides[*d] != expected) return false;
    expected *= sizes[*d];
  }
  return true;
}

// x itself, or a dense copy of it in the same order of dimensions.
inline Tensor dense(const Tensor& x) { return is_dense(x) ? x : torch::stable::clone(x); }

// torch.empty_like(x, dtype=dtype) of a dense tensor on the CPU.
inline Tensor dense_like(const Tensor& x, ScalarType dtype) {
  const auto sizes = x.sizes();
  const auto strides = x.strides();
  AtenTensorHandle out = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      x.dim(), sizes.data(), strides.data(), torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
      aoti_torch_device_type_cpu(), 0, &out));
  return Tensor(out);
}

// Which channel of dimension `axis` an element of a dense tensor's memory belongs to.
inline elementwise::Channels channel_view(const Tensor& x, int64_t axis) {
  const int64_t channels = x.size(axis), inner = channels == 1 ? x.numel() : x.stride(axis);
  return {x.numel() / (channels * inner), channels, inner};
}

// The values of a small parameter tensor.
inline std::vector<double> values(const Tensor& x, const char* name) {
  STD_TORCH_CHECK(x.is_cpu(), name, ": parameters must be on the CPU, as the codes are");
  const Tensor flat = torch::stable::contiguous(x);
  const int64_t n = flat.numel();
  std::vector<double> out(static_cast<size_t>(n));
  const auto copy = [&](auto zero) {
    const auto* from = static_cast<const decltype(zero)*>(flat.const_data_ptr());
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<double>(from[i]);
  };
  const auto widen = [&](auto convert) {
    std::vector<float> floats(out.size());
    convert(static_cast<const uint16_t*>(flat.const_data_ptr()), floats.data(), n);
    std::copy(floats.begin(), floats.end(), out.begin());
  };
  switch (flat.scalar_type()) {
    case ScalarType::Float: copy(float{}); break;
    case ScalarType::Double: copy(double{}); break;
    case ScalarType::Long: copy(int64_t{}); break;
    case ScalarType::Int: copy(int32_t{}); break;
    case ScalarType::Short: copy(int16_t{}); break;
    case ScalarType::Char: copy(int8_t{}); break;
    case ScalarType::Byte: copy(uint8_t{}); break;
    case ScalarType::Half: widen(elementwise::kernels().from_half); break;
    case ScalarType::BFloat16: widen(elementwise::kernels().from_bfloat16); break;
    default: STD_TORCH_CHECK(false, name, ": parameters must be floats or integers");
  }
  return out;
}

// The grid of an output of type `type`, whose codes must all fit it.
inline elementwise::Grid out_grid(elementwise::Type type, int64_t zero_point, int64_t low, int64_t high,
                                  const char* name) {
  const int64_t least = type == elementwise::Type::i8 ? -128 : type == elementwise::Type::u8 ? 0 : INT32_MIN;
  const int64_t most = type == elementwise::Type::i8 ? 127 : type == elementwise::Type::u8 ? 255 : INT32_MAX;
  STD_TORCH_CHECK(least <= low && low <= high && high <= most, name, ": codes from ", low, " to ", high,
                  " do not fit the output's dtype");
  STD_TORCH_CHECK(least <= zero_point && zero_point <= most, name, ": zero point ", zero_point,
                  " does not fit the output's dtype");
  return {zero_point, low, high};
}

}  // namespace zeropoint::binding
