// zeropoint::recurrent_dynamic on the CPU: checks, shapes, memory.
#include "rnn/recurrent.h"

#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "common.h"
#include "isa.h"

namespace zeropoint::binding {
namespace {

using rnn::Mode;

void check_reals(const Tensor& x, const char* name) {
  STD_TORCH_CHECK(x.is_cpu() && x.scalar_type() == ScalarType::Float, "recurrent_dynamic: ", name,
                  " must be a float32 CPU tensor");
}

Tensor copy_of(const Tensor& x) {
  const Tensor from = contiguous_of(x);
  Tensor to = torch::stable::new_empty(from, from.sizes());
  if (from.numel()) std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), static_cast<size_t>(from.numel()) * sizeof(float));
  return to;
}

Mode mode_of(const std::string& name) {
  if (name == "LSTM") return Mode::lstm;
  if (name == "GRU") return Mode::gru;
  if (name == "RNN_TANH") return Mode::tanh;
  STD_TORCH_CHECK(name == "RNN_RELU", "recurrent_dynamic: mode must be LSTM, GRU, RNN_TANH or RNN_RELU, got ", name);
  return Mode::relu;
}

// A projection, and the memory that it reads.
struct Operands {
  Tensor packed_given, weight, bias_given;
  AlignedBytes packed_now;
  std::vector<float> scale;
  std::vector<int32_t> zero_point;
  rnn::Projection projection;
};

void prepare(Operands& operands, const char* name, int64_t rows, int64_t columns, const Tensor& weight,
             const Tensor& scale, const Tensor& zero_point, const std::optional<Tensor>& bias,
             const std::optional<Tensor>& packed, const Parallel& parallel) {
  STD_TORCH_CHECK(weight.is_cpu() && weight.scalar_type() == ScalarType::Char && weight.dim() == 2 &&
                      weight.size(0) == rows && weight.size(1) == columns,
                  "recurrent_dynamic: ", name, " must be an int8 CPU tensor of shape (", rows, ", ", columns,
                  "), got shape ", text_of(weight));
  STD_TORCH_CHECK(columns <= gemm::kMaxNarrowDepth, "recurrent_dynamic: ", name, " may have at most ",
                  gemm::kMaxNarrowDepth, " columns, got ", columns);
  check_reals(scale, "a scale");
  STD_TORCH_CHECK(zero_point.is_cpu() && zero_point.scalar_type() == ScalarType::Int,
                  "recurrent_dynamic: zero points must be an int32 CPU tensor");
  STD_TORCH_CHECK((scale.numel() == 1 || scale.numel() == rows) && zero_point.numel() == scale.numel(),
                  "recurrent_dynamic: ", name, " needs one scale and zero point, or one a row, got ", scale.numel(),
                  " and ", zero_point.numel());
  const Tensor scales = contiguous_of(scale), zeros = contiguous_of(zero_point);
  const auto* scale_data = static_cast<const float*>(scales.const_data_ptr());
  const auto* zero_data = static_cast<const int32_t*>(zeros.const_data_ptr());
  bool shifted = false;
  for (int64_t i = 0; i < zeros.numel(); ++i) {
    STD_TORCH_CHECK(zero_data[i] >= -128 && zero_data[i] <= 127, "every weight zero point must lie in [-128, 127]");
    shifted |= zero_data[i] != 0;
  }
  const auto spread = [rows](auto* from, int64_t count, auto& to) {
    to.resize(static_cast<size_t>(rows));
    for (int64_t i = 0; i < rows; ++i) to[static_cast<size_t>(i)] = from[count == 1 ? 0 : i];
  };
  spread(scale_data, scales.numel(), operands.scale);
  operands.projection.scale = operands.scale.data();
  if (shifted) {
    spread(zero_data, zeros.numel(), operands.zero_point);
    operands.projection.zero_point = operands.zero_point.data();
  }
  if (bias.has_value()) {
    check_reals(*bias, "a bias");
    STD_TORCH_CHECK(bias->numel() == rows, "recurrent_dynamic: a bias must hold ", rows, " numbers, got ",
                    bias->numel());
    operands.bias_given = contiguous_of(*bias);
    operands.projection.bias = static_cast<const float*>(operands.bias_given.const_data_ptr());
  }
  const Isa isa = active_isa();
  if (packed.has_value() && packed->is_cpu() && packed->scalar_type() == ScalarType::Byte && packed->is_contiguous() &&
      gemm::view(static_cast<const uint8_t*>(packed->const_data_ptr()), packed->numel(), isa, rows, columns,
                 &operands.projection.weight)) {
    operands.packed_given = *packed;
    return;
  }
  operands.weight = contiguous_of(weight);
  operands.packed_now = gemm::pack(isa, static_cast<const int8_t*>(operands.weight.const_data_ptr()), columns, rows,
                                   columns, parallel);
  const bool fits = gemm::view(operands.packed_now.data(), static_cast<int64_t>(operands.packed_now.size()), isa, rows,
                               columns, &operands.projection.weight);
  STD_TORCH_CHECK(fits, "recurrent_dynamic: ", name, " could not be packed");
}

std::vector<int64_t> sizes_of(const Tensor& x, const std::optional<Tensor>& batch_sizes, int64_t batch) {
  if (!batch_sizes.has_value()) {
    STD_TORCH_CHECK(x.dim() == 3 && x.size(1) == batch, "recurrent_dynamic: x must be (steps, ", batch,
                    ", columns) for states of that batch, got shape ", text_of(x));
    return std::vector<int64_t>(static_cast<size_t>(x.size(0)), batch);
  }
  STD_TORCH_CHECK(batch_sizes->is_cpu() && batch_sizes->scalar_type() == ScalarType::Long && batch_sizes->dim() == 1,
                  "recurrent_dynamic: batch_sizes must be a 1-D int64 CPU tensor");
  const Tensor sizes = contiguous_of(*batch_sizes);
  const auto* data = static_cast<const int64_t*>(sizes.const_data_ptr());
  std::vector<int64_t> values(data, data + sizes.numel());
  int64_t total = 0, last = batch;
  for (int64_t size : values) {
    STD_TORCH_CHECK(size >= 0 && size <= last, "recurrent_dynamic: batch_sizes must not rise, nor exceed the batch of ",
                    batch);
    total += size;
    last = size;
  }
  STD_TORCH_CHECK(x.dim() == 2 && x.size(0) == total, "recurrent_dynamic: x must be (", total,
                  ", columns) for these batch_sizes, got shape ", text_of(x));
  return values;
}

std::tuple<Tensor, Tensor, Tensor> recurrent_dynamic(
    const Tensor& x, const Tensor& h, const std::optional<Tensor>& c, const std::optional<Tensor>& batch_sizes,
    const std::string& mode, bool reverse, const Tensor& weight_ih, const Tensor& scale_ih, const Tensor& zero_point_ih,
    const std::optional<Tensor>& bias_ih, const std::optional<Tensor>& packed_ih, const Tensor& weight_hh,
    const Tensor& scale_hh, const Tensor& zero_point_hh, const std::optional<Tensor>& bias_hh,
    const std::optional<Tensor>& packed_hh, const std::optional<Tensor>& weight_hr,
    const std::optional<Tensor>& scale_hr, const std::optional<Tensor>& zero_point_hr,
    const std::optional<Tensor>& packed_hr, const std::optional<Tensor>& rest_ih,
    const std::optional<Tensor>& scale_rest, const std::optional<Tensor>& zero_point_rest,
    const std::optional<Tensor>& packed_rest) {
  check_reals(x, "x");
  check_reals(h, "h");
  STD_TORCH_CHECK(h.dim() == 2, "recurrent_dynamic: h must be (batch, size), got shape ", text_of(h));
  rnn::Call call;
  call.mode = mode_of(mode);
  call.reverse = reverse;
  const int64_t batch = h.size(0), state = h.size(1), gates = rnn::gates_of(call.mode);
  const std::vector<int64_t> sizes = sizes_of(x, batch_sizes, batch);
  STD_TORCH_CHECK(weight_hh.dim() == 2 && weight_hh.size(0) % gates == 0, "recurrent_dynamic: weight_hh must have ",
                  gates, " rows for every hidden unit, got shape ", text_of(weight_hh));
  call.hidden = weight_hh.size(0) / gates;
  STD_TORCH_CHECK(weight_hr.has_value() ? call.mode == Mode::lstm : call.hidden == state,
                  "recurrent_dynamic: ", call.hidden, " hidden units do not fit states of shape ", text_of(h));

  const Parallel parallel = torch_parallel();
  Operands input, hidden, output, rest;
  prepare(input, "weight_ih", gates * call.hidden, x.size(x.dim() - 1), weight_ih, scale_ih, zero_point_ih, bias_ih,
          packed_ih, parallel);
  prepare(hidden, "weight_hh", gates * call.hidden, state, weight_hh, scale_hh, zero_point_hh, bias_hh, packed_hh,
          parallel);
  call.input = input.projection;
  call.recurrent = hidden.projection;
  if (rest_ih.has_value()) {
    STD_TORCH_CHECK(scale_rest.has_value() && zero_point_rest.has_value(), "recurrent_dynamic: rest_ih needs its grids");
    prepare(rest, "rest_ih", gates * call.hidden, x.size(x.dim() - 1), *rest_ih, *scale_rest, *zero_point_rest,
            std::nullopt, packed_rest, parallel);
    call.input_rest = &rest.projection;
  }
  if (weight_hr.has_value()) {
    STD_TORCH_CHECK(scale_hr.has_value() && zero_point_hr.has_value(), "recurrent_dynamic: weight_hr needs its grids");
    prepare(output, "weight_hr", state, call.hidden, *weight_hr, *scale_hr, *zero_point_hr, std::nullopt, packed_hr,
            parallel);
    call.output = &output.projection;
  }

  const Tensor rows = contiguous_of(x);
  Tensor h_after = copy_of(h), c_after = torch::stable::new_empty(h, {0});
  if (call.mode == Mode::lstm) {
    STD_TORCH_CHECK(c.has_value(), "recurrent_dynamic: LSTM needs cell states c");
    check_reals(*c, "c");
    STD_TORCH_CHECK(c->dim() == 2 && c->size(0) == batch && c->size(1) == call.hidden,
                    "recurrent_dynamic: c must be (", batch, ", ", call.hidden, "), got shape ", text_of(*c));
    c_after = copy_of(*c);
    call.c = static_cast<float*>(c_after.mutable_data_ptr());
  }
  std::vector<int64_t> shape(rows.sizes().begin(), rows.sizes().end());
  shape.back() = state;
  Tensor out = torch::stable::new_empty(rows, shape);
  call.steps = static_cast<int64_t>(sizes.size());
  call.batch_sizes = sizes.data();
  call.x = static_cast<const float*>(rows.const_data_ptr());
  call.h = static_cast<float*>(h_after.mutable_data_ptr());
  call.out = static_cast<float*>(out.mutable_data_ptr());
  rnn::recurrent(call, parallel);
  return {out, h_after, c_after};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zeropoint, CPU, m) { m.impl("recurrent_dynamic", TORCH_BOX(&recurrent_dynamic)); }

}  // namespace zeropoint::binding
