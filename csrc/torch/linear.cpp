// linear_pack, linear and linear_dynamic for the CPU: checks, shapes, memory.
#include "gemm/linear.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "isa.h"
#include "layer.h"

namespace zeropoint::binding {
namespace {

// The packed weight of a call, and what has to stay alive meanwhile.
struct Weight {
  Tensor dense;
  AlignedBytes packed_now;
  gemm::Packed packed;
};

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

void read_weight(Weight* to, const Tensor& weight, const std::optional<Tensor>& packed, const Parallel& parallel) {
  const int64_t n = weight.size(0), k = weight.size(1);
  const Isa isa = active_isa();
  const Bytes bytes = packed_bytes(packed);
  const bool fits = bytes.data != nullptr && gemm::view(bytes.data, bytes.length, isa, n, k, &to->packed);
  if (fits && to->packed.outlier_begin == nullptr) return;
  to->dense = contiguous_of(weight);
  const auto* codes = static_cast<const int8_t*>(to->dense.const_data_ptr());
  if (fits) {
    to->packed.unpacked = codes;
    return;
  }
  to->packed_now = gemm::pack(isa, codes, k, n, k, parallel);
  STD_TORCH_CHECK(gemm::view(to->packed_now.data(), static_cast<int64_t>(to->packed_now.size()), isa, n, k, &to->packed),
                  "the weight of shape ", text_of(weight), " could not be packed");
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

Tensor run(const Tensor& x, const Tensor& weight, const Grids& grids, const gemm::Columns& columns,
           const std::optional<Tensor>& packed) {
  const Parallel parallel = torch_parallel();
  Weight operand;
  read_weight(&operand, weight, packed, parallel);
  const Tensor rows = contiguous_of(x);
  const Tensor out = new_output(x, weight.size(0), grids.out_dtype());
  gemm::CodesCall call;
  call.x = static_cast<const uint8_t*>(rows.const_data_ptr());
  call.x_signed = grids.x_signed;
  call.m = rows_of(x);
  call.x_zero_point = grids.x_zero_point;
  call.out_zero_point = grids.out_zero_point;
  call.out_min = grids.out_min;
  call.out_max = grids.out_max;
  call.out = static_cast<uint8_t*>(out.mutable_data_ptr());
  gemm::linear(operand.packed, columns, call, parallel);
  return out;
}

Tensor linear(const Tensor& x, double x_scale, int64_t x_zero_point, const Tensor& weight, const Tensor& weight_scale,
              const Tensor& weight_zero_point, const std::optional<Tensor>& bias, double out_scale,
              int64_t out_zero_point, int64_t out_min, int64_t out_max, ScalarType out_dtype,
              const std::optional<Tensor>& packed) {
  const Grids grids = grids_of("linear", x.scalar_type(), x_scale, x_zero_point, out_scale, out_zero_point, out_min,
                               out_max, out_dtype);
  check_weight(weight);
  check_rows(x, weight);
  const ColumnTensors columns("linear", weight_scale, weight_zero_point, bias, weight.size(0));
  return run(x, weight, grids, columns.for_call(x_scale, out_scale), packed);
}

Tensor linear_bind(ScalarType x_dtype, double x_scale, int64_t x_zero_point, const Tensor& weight,
                   const Tensor& weight_scale, const Tensor& weight_zero_point, const std::optional<Tensor>& bias,
                   double out_scale, int64_t out_zero_point, int64_t out_min, int64_t out_max, ScalarType out_dtype) {
  const Grids grids =
      grids_of("linear", x_dtype, x_scale, x_zero_point, out_scale, out_zero_point, out_min, out_max, out_dtype);
  check_weight(weight);
  const ColumnTensors columns("linear", weight_scale, weight_zero_point, bias, weight.size(0));
  return bind(grids, columns, x_scale, out_scale, weight.size(0), {});
}

Tensor linear_bound(const Tensor& x, const Tensor& weight, const Tensor& packed, const Tensor& bytes) {
  check_weight(weight);
  gemm::Columns columns;
  const Bound& bound = bound_of("linear", bytes, weight.size(0), 0, &columns);
  STD_TORCH_CHECK(x.scalar_type() == bound.grids.x_dtype(), "linear was bound for codes of another dtype");
  check_rows(x, weight);
  return run(x, weight, bound.grids, columns, packed);
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
  const ColumnTensors columns("linear_dynamic", weight_scale, weight_zero_point, bias, weight.size(0));
  Weight operand;
  read_weight(&operand, weight, packed, parallel);
  const Tensor rows = contiguous_of(dtype == ScalarType::Float ? x : torch::stable::to(x, ScalarType::Float));
  const Tensor out = new_output(x, weight.size(0), ScalarType::Float);
  gemm::FloatCall call;
  call.x = static_cast<const float*>(rows.const_data_ptr());
  call.m = rows_of(x);
  call.reduce_range = reduce_range;
  call.relu = relu;
  call.out = static_cast<float*>(out.mutable_data_ptr());
  gemm::linear_dynamic({operand.packed, columns.numbers()}, call, parallel);
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

STABLE_TORCH_LIBRARY_FRAGMENT(zeropoint, m) {
  m.def("_isa_selfcheck() -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(zeropoint, CompositeExplicitAutograd, m) { m.impl("_isa_selfcheck", TORCH_BOX(&self_check)); }

STABLE_TORCH_LIBRARY_IMPL(zeropoint, CPU, m) {
  m.impl("linear_pack", TORCH_BOX(&linear_pack));
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("linear_bind", TORCH_BOX(&linear_bind));
  m.impl("linear_bound", TORCH_BOX(&linear_bound));
  m.impl("linear_dynamic", TORCH_BOX(&linear_dynamic));
}

}  // namespace zeropoint::binding
