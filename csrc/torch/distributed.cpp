// Registers what gradients are packed with, and checks what comes in: received bytes are sizes, not trust.
#include <optional>
#include <tuple>

#include "common.h"
#include "distributed/wire.h"

namespace zeropoint::binding {
namespace {

using wire::Form;
using wire::Packed;

void check_flat_float(const Tensor& x, const char* name) {
  STD_TORCH_CHECK(x.dim() == 1 && x.scalar_type() == ScalarType::Float, name, ": x must be a 1-D float32 tensor");
}

void check_row(int64_t row, const char* name) {
  STD_TORCH_CHECK(row >= 1, name, ": row must be at least 1, got ", row);
}

int64_t rows_of(int64_t length, int64_t row) { return length / row + (length % row != 0); }

Form check_form(int64_t bits, int64_t block, const char* name) {
  STD_TORCH_CHECK(bits == 8 || bits == 4, name, ": bits must be 8 or 4, got ", bits);
  STD_TORCH_CHECK(block >= 32 && block <= (1 << 24) && block % 32 == 0, name,
                  ": block must be a multiple of 32, got ", block);
  return {static_cast<int>(bits), block};
}

Packed check_packed(const Tensor& data, Form form, const char* name) {
  STD_TORCH_CHECK(data.dim() == 2 && data.scalar_type() == ScalarType::Byte, name,
                  ": data must be a 2-D uint8 tensor");
  STD_TORCH_CHECK(data.size(0) >= 1 && data.size(1) % form.block_bytes() == 0, name, ": rows of ", data.size(1),
                  " bytes do not hold whole blocks of ", form.block_bytes());
  return {static_cast<const uint8_t*>(data.const_data_ptr()), data.size(0), data.stride(0),
          data.size(1) / form.block_bytes()};
}

// Rows may lie apart from one another, but each must be in one piece.
Tensor with_whole_rows(const Tensor& data) {
  return data.dim() == 2 && data.stride(1) == 1 ? data : torch::stable::contiguous(data);
}

std::tuple<Tensor, Tensor> row_range(const Tensor& x, int64_t row) {
  check_flat_float(x, "row_range");
  check_row(row, "row_range");
  const Tensor values = torch::stable::contiguous(x);
  const int64_t rows = rows_of(x.numel(), row);
  Tensor low = torch::stable::new_empty(x, {rows}), high = torch::stable::new_empty(x, {rows});
  wire::row_range(values.const_data_ptr<float>(), x.numel(), row, low.mutable_data_ptr<float>(),
                  high.mutable_data_ptr<float>(), torch_parallel());
  return {low, high};
}

Tensor row_quantize(const Tensor& x, const Tensor& qparams, int64_t row) {
  check_flat_float(x, "row_quantize");
  check_row(row, "row_quantize");
  const int64_t rows = rows_of(x.numel(), row);
  STD_TORCH_CHECK(qparams.dim() == 2 && qparams.size(0) == 2 && qparams.size(1) == rows &&
                      qparams.scalar_type() == ScalarType::Float,
                  "row_quantize: qparams must be float32 (2, ", rows, ")");
  const Tensor values = torch::stable::contiguous(x), grid = torch::stable::contiguous(qparams);
  const float* scale = grid.const_data_ptr<float>();
  for (int64_t r = 0; r < rows; ++r)
    STD_TORCH_CHECK(scale[rows + r] >= 0.0f && scale[rows + r] <= 255.0f,
                    "row_quantize: a zero point must lie in [0, 255], got ", scale[rows + r]);
  Tensor codes = torch::stable::new_empty(x, {rows, row}, ScalarType::Byte);
  wire::row_quantize(values.const_data_ptr<float>(), x.numel(), row, scale, scale + rows,
                     codes.mutable_data_ptr<uint8_t>(), torch_parallel());
  return codes;
}

Tensor row_sum(const Tensor& codes, const Tensor& qparams, int64_t length) {
  STD_TORCH_CHECK(codes.dim() == 3 && codes.scalar_type() == ScalarType::Byte,
                  "row_sum: codes must be uint8 (ranks, rows, row)");
  const int64_t ranks = codes.size(0), rows = codes.size(1), row = codes.size(2);
  STD_TORCH_CHECK(qparams.dim() == 3 && qparams.size(0) == ranks && qparams.size(1) == 2 && qparams.size(2) == rows &&
                      qparams.scalar_type() == ScalarType::Float,
                  "row_sum: qparams must be float32 (", ranks, ", 2, ", rows, ")");
  STD_TORCH_CHECK(length >= 0 && length <= rows * row, "row_sum: ", rows, " rows of ", row, " codes do not hold ",
                  length);
  const Tensor bytes = torch::stable::contiguous(codes), grids = torch::stable::contiguous(qparams);
  Tensor out = torch::stable::new_empty(codes, {length}, ScalarType::Float);
  if (length > 0)
    wire::row_sum(bytes.const_data_ptr<uint8_t>(), grids.const_data_ptr<float>(), ranks, rows, row,
                  out.mutable_data_ptr<float>(), length, torch_parallel());
  return out;
}

Tensor block_pack(const Tensor& x, int64_t chunks, int64_t bits, int64_t block, std::optional<int64_t> seed) {
  check_flat_float(x, "block_pack");
  const Form form = check_form(bits, block, "block_pack");
  STD_TORCH_CHECK(chunks >= 1, "block_pack: chunks must be at least 1, got ", chunks);
  const Tensor values = torch::stable::contiguous(x);
  const int64_t count = rows_of(x.numel(), chunks * block);
  Tensor out = torch::stable::new_empty(x, {chunks, count * form.block_bytes()}, ScalarType::Byte);
  const auto word = static_cast<uint32_t>(seed.value_or(0));
  wire::block_pack(values.const_data_ptr<float>(), x.numel(), form, chunks, count, seed ? &word : nullptr,
                   out.mutable_data_ptr<uint8_t>(), torch_parallel());
  return out;
}

Tensor block_sum(const Tensor& data, int64_t bits, int64_t block) {
  const Form form = check_form(bits, block, "block_sum");
  const Tensor rows = with_whole_rows(data);
  const Packed packed = check_packed(rows, form, "block_sum");
  Tensor out = torch::stable::new_empty(data, {packed.count * block}, ScalarType::Float);
  wire::block_sum(packed, form, out.mutable_data_ptr<float>(), torch_parallel());
  return out;
}

Tensor block_unpack(const Tensor& data, int64_t bits, int64_t block, int64_t length) {
  const Form form = check_form(bits, block, "block_unpack");
  const Tensor rows = with_whole_rows(data);
  const Packed packed = check_packed(rows, form, "block_unpack");
  STD_TORCH_CHECK(length >= 0 && length <= packed.rows * packed.count * block, "block_unpack: ", packed.rows,
                  " rows of ", packed.count, " blocks do not hold ", length, " elements");
  Tensor out = torch::stable::new_empty(data, {length}, ScalarType::Float);
  wire::block_unpack(packed, form, out.mutable_data_ptr<float>(), length, torch_parallel());
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zeropoint, CPU, m) {
  m.impl("row_range", TORCH_BOX(&row_range));
  m.impl("row_quantize", TORCH_BOX(&row_quantize));
  m.impl("row_sum", TORCH_BOX(&row_sum));
  m.impl("block_pack", TORCH_BOX(&block_pack));
  m.impl("block_sum", TORCH_BOX(&block_sum));
  m.impl("block_unpack", TORCH_BOX(&block_unpack));
}

}  // namespace zeropoint::binding
