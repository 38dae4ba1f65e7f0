// zeropoint::embedding and embedding_bag on the CPU: checks, shapes, memory.
#include "embedding/embedding.h"

#include <optional>
#include <string>
#include <vector>

#include "common.h"

namespace zeropoint::binding {
namespace {

using embedding::Mode;
using embedding::Table;

Tensor integers(const Tensor& x, const char* name) {
  STD_TORCH_CHECK(x.is_cpu() && (x.scalar_type() == ScalarType::Long || x.scalar_type() == ScalarType::Int),
                  "embedding: ", name, " must be int32 or int64 on the CPU");
  return contiguous_of(x.scalar_type() == ScalarType::Long ? x : torch::stable::to(x, ScalarType::Long));
}

Tensor reals(const Tensor& x, int64_t count, const char* name) {
  STD_TORCH_CHECK(x.is_cpu() && x.scalar_type() == ScalarType::Float && x.numel() == count, "embedding: ", name,
                  " must hold ", count, " float32 numbers on the CPU, got ", x.numel());
  return contiguous_of(x);
}

// The table, and the memory that it reads.
struct Operands {
  Tensor weight, scale, zero_point, indices;
  Table table;

  const int64_t* at() const { return static_cast<const int64_t*>(indices.const_data_ptr()); }
};

Operands prepare(const Tensor& indices, const Tensor& weight, const Tensor& scale, const Tensor& zero_point,
                 int64_t bits, int64_t columns) {
  STD_TORCH_CHECK(bits == 8 || bits == 4, "embedding: bits must be 8 or 4, got ", bits);
  STD_TORCH_CHECK(weight.is_cpu() && weight.scalar_type() == ScalarType::Byte && weight.dim() == 2 && columns >= 0 &&
                      weight.size(1) == (bits == 8 ? columns : (columns + 1) / 2),
                  "embedding: weight must be a uint8 CPU tensor with rows of ", columns, " codes of ", bits, " bits");
  Operands o{contiguous_of(weight), reals(scale, weight.size(0), "scale"), reals(zero_point, weight.size(0), "zero_point"),
             integers(indices, "indices"), {}};
  o.table.codes = static_cast<const uint8_t*>(o.weight.const_data_ptr());
  o.table.scale = static_cast<const float*>(o.scale.const_data_ptr());
  o.table.zero_point = static_cast<const float*>(o.zero_point.const_data_ptr());
  o.table.rows = weight.size(0);
  o.table.columns = columns;
  o.table.row_bytes = weight.size(1);
  o.table.bits = static_cast<int>(bits);
  const int64_t* at = o.at();
  for (int64_t i = 0; i < o.indices.numel(); ++i)
    STD_TORCH_CHECK(at[i] >= 0 && at[i] < o.table.rows, "embedding indices must lie in [0, ", o.table.rows,
                          "), got ", at[i]);
  return o;
}

Tensor embedding_rows(const Tensor& indices, const Tensor& weight, const Tensor& scale, const Tensor& zero_point,
                      int64_t bits, int64_t columns) {
  const Operands o = prepare(indices, weight, scale, zero_point, bits, columns);
  std::vector<int64_t> shape(indices.sizes().begin(), indices.sizes().end());
  shape.push_back(columns);
  Tensor out = torch::stable::new_empty(o.scale, shape);
  embedding::rows(o.table, o.at(), o.indices.numel(), static_cast<float*>(out.mutable_data_ptr()), torch_parallel());
  return out;
}

Tensor embedding_bag(const Tensor& indices, const Tensor& bounds, const Tensor& weight, const Tensor& scale,
                     const Tensor& zero_point, int64_t bits, int64_t columns, const std::string& mode,
                     const std::optional<Tensor>& per_sample_weights, std::optional<int64_t> padding_idx) {
  const Operands o = prepare(indices, weight, scale, zero_point, bits, columns);
  STD_TORCH_CHECK(mode == "sum" || mode == "mean" || mode == "max", "embedding_bag: mode must be sum, mean or max, got ",
                  mode);
  const Tensor limits = integers(bounds, "bounds");
  STD_TORCH_CHECK(limits.dim() == 1 && limits.numel() >= 1, "embedding_bag: bounds must be 1-D, and not empty");
  embedding::Bags bags;
  bags.indices = o.at();
  bags.bounds = static_cast<const int64_t*>(limits.const_data_ptr());
  bags.count = limits.numel() - 1;
  bags.mode = mode == "sum" ? Mode::sum : mode == "mean" ? Mode::mean : Mode::max;
  int64_t last = 0;
  for (int64_t i = 0; i <= bags.count; ++i) {
    STD_TORCH_CHECK(bags.bounds[i] >= last && bags.bounds[i] <= o.indices.numel(),
                    "embedding_bag: bounds must rise from 0 to at most ", o.indices.numel(), ", got ", bags.bounds[i]);
    last = bags.bounds[i];
  }
  Tensor weights = o.scale;
  if (per_sample_weights.has_value()) {
    weights = reals(*per_sample_weights, o.indices.numel(), "per_sample_weights");
    bags.weights = static_cast<const float*>(weights.const_data_ptr());
  }
  bags.padding = padding_idx.value_or(-1);
  Tensor out = torch::stable::new_empty(o.scale, {bags.count, columns});
  embedding::bags(o.table, bags, static_cast<float*>(out.mutable_data_ptr()), torch_parallel());
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zeropoint, CPU, m) {
  m.impl("embedding", TORCH_BOX(&embedding_rows));
  m.impl("embedding_bag", TORCH_BOX(&embedding_bag));
}

}  // namespace zeropoint::binding
