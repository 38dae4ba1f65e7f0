// linear_pack, linear and linear_dynamic for the CPU: checks, shapes, memory.
#include "gemm/linear.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "common.h"
#include "isa.h"

namespace zeropoint::binding {
namespace {

using gemm::Numbers;
using torch::headeronly::ScalarType;

std::string text_of(const Tensor& x) {
  std::string text = "(";
  for (int64_t size : x.sizes()) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + ")";
}

// One number, or one a row of the weight.
Numbers numbers_of(const Tensor& x, int64_t rows, const char* name, bool may_be_one) {
  Numbers numbers;
  switch (x.scalar_type()) {
    case ScalarType::Float: numbers.type = Numbers::Type::f32; break;
    case ScalarType::Double: numbers.type = Numbers::Type::f64; break;
    case ScalarType::Int: numbers.type = Numbers::Type::i32; break;
    case ScalarType::Long: numbers.type = Numbers::Type::i64; break;
    default: STD_TORCH_CHECK(false, name, " must hold float32, float64, int32 or int64");
  }
  numbers.count = x.numel();
  STD_TORCH_CHECK(x.is_cpu(), name, " must be on the CPU");
  STD_TORCH_CHECK(numbers.count == rows || (may_be_one && numbers.count == 1), name, " must hold ", rows,
                  " numbers, one a row of the weight", may_be_one ? ", or one for all" : "", "; it has shape ",
                  text_of(x));
  STD_TORCH_CHECK(x.is_contiguous(), name, " must be contiguous");
  numbers.data = x.const_data_ptr();
  return numbers;
}

template <class T>
void check_zero_points(const Numbers& numbers) {
  const auto* data = static_cast<const T*>(numbers.data);
  bool fits = true;
  for (int64_t i = 0; i < numbers.count; ++i) fits &= data[i] >= -128 && data[i] <= 127;
  STD_TORCH_CHECK(fits, "every weight_zero_point must lie in [-128, 127]");
}

// What a call reads of its weight, and what has to stay alive meanwhile.
struct Operands {
  Tensor weight;
  std::vector<Tensor> kept;
  AlignedBytes packed_now;
  gemm::Layer layer;
};

const Tensor& keep(Operands& operands, Tensor x) {
  operands.kept.push_back(std::move(x));
  return operands.kept.back();
}

Tensor contiguous_of(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

void check_weight(const Tensor& weight) {
  STD_TORCH_CHECK(weight.is_cpu() && weight.scalar_type() == ScalarType::Char && weight.dim() == 2,
                  "weight must be an int8 CPU tensor of shape (N, K), got shape ", text_of(weight));
  STD_TORCH_CHECK(weight.size(1) <= gemm::kMaxDepth, "a weight may have at most ", gemm::kMaxDepth,
                  " columns, got shape ", text_of(weight));
}

void check_rows(const Tensor& x, const Tensor& weight) {
  STD_TORCH_CHECK(x.is_cpu() && x.dim() >= 1 && x.size(x.dim() - 1) == weight.size(1), "x must be (..., ",
                  weight.size(1), ") on the CPU for a weight of shape ", text_of(weight), ", got shape ", text_of(x));
}

void prepare(Operands& operands, const Tensor& weight, const Tensor& weight_scale, const Tensor& weight_zero_point,
             const std::optional<Tensor>& bias, const std::optional<Tensor>& packed, const Parallel& parallel) {
  const int64_t n = weight.size(0), k = weight.size(1);
  operands.kept.reserve(4);
  gemm::Layer& layer = operands.layer;
  layer.scale = numbers_of(keep(operands, contiguous_of(weight_scale)), n, "weight_scale", true);
  layer.zero_point = numbers_of(keep(operands, contiguous_of(weight_zero_point)), n, "weight_zero_point", true);
  if (layer.zero_point.type == Numbers::Type::i32)
    check_zero_points<int32_t>(layer.zero_point);
  else if (layer.zero_point.type == Numbers::Type::i64)
    check_zero_points<int64_t>(layer.zero_point);
  else
    STD_TORCH_CHECK(false, "weight_zero_point must hold integers");
  if (bias.has_value()) {
    Tensor reals = *bias;
    if (reals.scalar_type() == ScalarType::Half || reals.scalar_type() == ScalarType::BFloat16)
      reals = torch::stable::to(reals, ScalarType::Float);
    layer.bias = numbers_of(keep(operands, contiguous_of(reals)), n, "bias", false);
  }

  const Isa isa = active_isa();
  if (packed.has_value() && packed->is_cpu() && packed->scalar_type() == ScalarType::Byte && packed->is_contiguous() &&
      gemm::view(static_cast<const uint8_t*>(packed->const_data_ptr()), packed->numel(), isa, n, k, &layer.weight)) {
    if (layer.weight.outlier_begin == nullptr) return;
    operands.weight = contiguous_of(weight);
    layer.weight.unpacked = static_cast<const int8_t*>(operands.weight.const_data_ptr());
    return;
  }
  operands.weight = contiguous_of(weight);
  operands.packed_now = gemm::pack(isa, static_cast<const int8_t*>(operands.weight.const_data_ptr()), k, n, k, parallel);
  const bool fits = gemm::view(operands.packed_now.data(), static_cast<int64_t>(operands.packed_now.size()), isa, n, k,
                               &layer.weight);
  STD_TORCH_CHECK(fits, "the weight of shape ", text_of(weight), " could not be packed");
}

Tensor new_output(const Tensor& x, int64_t columns, ScalarType dtype) {
  // Straight to the allocator: the dispatcher would cost as much as a small product.
  const auto sizes = x.sizes();
  std::vector<int64_t> shape(sizes.begin(), sizes.end()), strides(sizes.size(), 1);
  shape.back() = columns;
  for (size_t d = strides.size() - 1; d-- > 0;) strides[d] = strides[d + 1] * std::max<int64_t>(shape[d + 1], 1);
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(shape.size()), shape.data(), strides.data(),
      dtype == ScalarType::Float ? aoti_torch_dtype_float32()
                                 : dtype == ScalarType::Char ? aoti_torch_dtype_int8() : aoti_torch_dtype_uint8(),
      aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

int64_t rows_of(const Tensor& x) {
  int64_t rows = 1;
  const auto sizes = x.sizes();
  for (size_t i = 0; i + 1 < sizes.size(); ++i) rows *= sizes[i];
  return rows;
}

Tensor linear_pack(const Tensor& weight) {
  check_weight(weight);
  const Tensor dense = contiguous_of(weight);
  const int64_t n = weight.size(0), k = weight.size(1);
  const AlignedBytes bytes = gemm::pack(active_isa(), static_cast<const int8_t*>(dense.const_data_ptr()), k, n, k,
                                        torch_parallel(), gemm::Purpose::many_rows);
  const Tensor packed = torch::stable::new_empty(weight, {static_cast<int64_t>(bytes.size())}, ScalarType::Byte);
  std::memcpy(packed.mutable_data_ptr(), bytes.data(), bytes.size());
  return packed;
}

Tensor linear(const Tensor& x, double x_scale, int64_t x_zero_point, const Tensor& weight, const Tensor& weight_scale,
              const Tensor& weight_zero_point, const std::optional<Tensor>& bias, double out_scale,
              int64_t out_zero_point, int64_t out_min, int64_t out_max, ScalarType out_dtype,
              const std::optional<Tensor>& packed) {
  const ScalarType x_dtype = x.scalar_type();
  const bool x_signed = x_dtype == ScalarType::Char, out_signed = out_dtype == ScalarType::Char;
  STD_TORCH_CHECK(x_signed || x_dtype == ScalarType::Byte, "linear takes int8 or uint8 codes");
  STD_TORCH_CHECK(out_signed || out_dtype == ScalarType::Byte, "linear gives int8 or uint8 codes");
  check_weight(weight);
  check_rows(x, weight);
  check_scales("linear", x_scale, out_scale);
  const int64_t x_low = x_signed ? -128 : 0, out_low = out_signed ? -128 : 0;
  STD_TORCH_CHECK(x_zero_point >= x_low && x_zero_point <= x_low + 255, "x_zero_point must be a code of x, got ",
                  x_zero_point);
  STD_TORCH_CHECK(out_zero_point >= out_low && out_zero_point <= out_low + 255,
                  "out_zero_point must be a code of the output, got ", out_zero_point);
  STD_TORCH_CHECK(out_low <= out_min && out_min <= out_max && out_max <= out_low + 255,
                  "out_min and out_max must be codes of the output in order, got ", out_min, " and ", out_max);

  const Parallel parallel = torch_parallel();
  Operands operands;
  prepare(operands, weight, weight_scale, weight_zero_point, bias, packed, parallel);
  const Tensor rows = contiguous_of(x);
  const Tensor out = new_output(x, weight.size(0), out_dtype);
  gemm::CodesCall call;
  call.x = static_cast<const uint8_t*>(rows.const_data_ptr());
  call.x_signed = x_signed;
  call.m = rows_of(x);
  call.x_scale = x_scale;
  call.out_scale = out_scale;
  call.x_zero_point = static_cast<int32_t>(x_zero_point);
  call.out_zero_point = static_cast<int32_t>(out_zero_point);
  call.out_min = static_cast<int32_t>(out_min);
  call.out_max = static_cast<int32_t>(out_max);
  call.out = static_cast<uint8_t*>(out.mutable_data_ptr());
  gemm::linear(operands.layer, call, parallel);
  return out;
}

Tensor linear_dynamic(const Tensor& x, const Tensor& weight, const Tensor& weight_scale,
                      const Tensor& weight_zero_point, const std::optional<Tensor>& bias, bool reduce_range, bool relu,
                      const std::optional<Tensor>& packed) {
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::Half ||
                      dtype == ScalarType::BFloat16,
                  "linear_dynamic takes float16, bfloat16, float32 or float64");
  check_weight(weight);
  check_rows(x, weight);
  const Parallel parallel = torch_parallel();
  Operands operands;
  prepare(operands, weight, weight_scale, weight_zero_point, bias, packed, parallel);
  const Tensor rows = contiguous_of(dtype == ScalarType::Float ? x : torch::stable::to(x, ScalarType::Float));
  const Tensor out = new_output(x, weight.size(0), ScalarType::Float);
  gemm::FloatCall call;
  call.x = static_cast<const float*>(rows.const_data_ptr());
  call.m = rows_of(x);
  call.reduce_range = reduce_range;
  call.relu = relu;
  call.out = static_cast<float*>(out.mutable_data_ptr());
  gemm::linear_dynamic(operands.layer, call, parallel);
  return dtype == ScalarType::Float ? out : torch::stable::to(out, dtype);
}

// Whether the active instruction set passes its check. If not, the best one below it that does becomes active.
bool self_check() {
  const int chosen = static_cast<int>(active_isa());
  for (int level = chosen; level > static_cast<int>(Isa::portable); --level)
    if (set_active_isa(static_cast<Isa>(level)) && gemm::self_check(static_cast<Isa>(level))) return level == chosen;
  set_active_isa(Isa::portable);
  return chosen == static_cast<int>(Isa::portable);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(zeropoint, m) { m.def("_isa_selfcheck() -> bool"); }

STABLE_TORCH_LIBRARY_IMPL(zeropoint, CompositeExplicitAutograd, m) { m.impl("_isa_selfcheck", TORCH_BOX(&self_check)); }

STABLE_TORCH_LIBRARY_IMPL(zeropoint, CPU, m) {
  m.impl("linear_pack", TORCH_BOX(&linear_pack));
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("linear_dynamic", TORCH_BOX(&linear_dynamic));
}

}  // namespace zeropoint::binding
