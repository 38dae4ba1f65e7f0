// matmul of two activations on the CPU: the second operand of every matrix of the batch is packed like a weight.
#include <algorithm>
#include <vector>

#include "common.h"
#include "gemm/linear.h"
#include "isa.h"

namespace zeropoint::binding {
namespace {

using Sizes = std::vector<int64_t>;

constexpr const char* kName = "matmul";

Sizes sizes_of(const Tensor& x) { return {x.sizes().begin(), x.sizes().end()}; }

// One operand as matrices: what surrounds them, and how far apart rows, columns and matrices lie.
struct Matrices {
  Sizes batch, batch_strides;
  int64_t rows, columns, row_stride, column_stride;
};

Matrices matrices_of(const Tensor& x, bool is_left) {
  const Sizes sizes = sizes_of(x), strides(x.strides().begin(), x.strides().end());
  const size_t rank = sizes.size();
  if (rank == 1) return is_left ? Matrices{{}, {}, 1, sizes[0], 0, strides[0]} : Matrices{{}, {}, sizes[0], 1, strides[0], 0};
  return {{sizes.begin(), sizes.end() - 2}, {strides.begin(), strides.end() - 2}, sizes[rank - 2], sizes[rank - 1],
          strides[rank - 2], strides[rank - 1]};
}

Sizes broadcast(const Sizes& a, const Sizes& b) {
  Sizes sizes(std::max(a.size(), b.size()));
  for (size_t d = 1; d <= sizes.size(); ++d) {
    const int64_t x = d <= a.size() ? a[a.size() - d] : 1, y = d <= b.size() ? b[b.size() - d] : 1;
    STD_TORCH_CHECK(x == y || x == 1 || y == 1, kName, ": batches of ", x, " and ", y, " do not broadcast");
    sizes[sizes.size() - d] = x == 1 ? y : x;
  }
  return sizes;
}

// Where matrix `index` of the broadcast batch begins.
int64_t begin_of(const Matrices& m, const Sizes& batch, int64_t index) {
  int64_t at = 0;
  for (size_t d = 1; d <= batch.size(); ++d) {
    const int64_t size = batch[batch.size() - d], place = index % size;
    index /= size;
    if (d <= m.batch.size() && m.batch[m.batch.size() - d] != 1) at += place * m.batch_strides[m.batch.size() - d];
  }
  return at;
}

// `rows` rows of `columns` codes, one after the other, with the given bits flipped.
void gather(const uint8_t* from, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride, uint8_t flip,
            uint8_t* to) {
  constexpr int64_t kTile = 64;  // so that a transposed matrix is not read one byte a cache line
  for (int64_t c = 0; c < columns; c += kTile)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = c; i < std::min(c + kTile, columns); ++i)
        to[r * columns + i] = static_cast<uint8_t>(from[r * row_stride + i * column_stride] ^ flip);
}

// The same for outputs that are no bytes: every sum, then the contract's last step.
void wide_product(const uint8_t* a, int64_t a_zero, const int8_t* b, int64_t b_zero, int64_t m, int64_t n, int64_t k,
                  float factor, int64_t zero_point, int64_t low, int64_t high, int32_t* out) {
  constexpr double kFar = 1099511627776.0, kMagic = 6755399441055744.0;
  for (int64_t r = 0; r < m; ++r)
    for (int64_t c = 0; c < n; ++c) {
      int64_t sum = 0;
      for (int64_t i = 0; i < k; ++i) sum += (a[r * k + i] - a_zero) * (b[c * k + i] - b_zero);
      double y = static_cast<float>(sum) * factor;
      y = y == y ? std::clamp(y, -kFar, kFar) : 0.0;
      const auto code = static_cast<int64_t>((y + kMagic) - kMagic) + zero_point;
      out[r * n + c] = static_cast<int32_t>(std::clamp(code, low, high));
    }
}

bool is_byte(ScalarType dtype) { return dtype == ScalarType::Byte || dtype == ScalarType::Char; }

Tensor matmul(const Tensor& a, double a_scale, int64_t a_zero_point, const Tensor& b, double b_scale,
              int64_t b_zero_point, double out_scale, int64_t out_zero_point, int64_t out_min, int64_t out_max,
              ScalarType out_dtype) {
  STD_TORCH_CHECK(a.is_cpu() && b.is_cpu() && is_byte(a.scalar_type()) && is_byte(b.scalar_type()), kName,
                  " takes int8 or uint8 codes on the CPU");
  STD_TORCH_CHECK(a.dim() >= 1 && b.dim() >= 1, kName, " takes tensors of one dimension or more");
  const Matrices left = matrices_of(a, true), right = matrices_of(b, false);
  STD_TORCH_CHECK(left.columns == right.rows, kName, ": rows of ", left.columns, " do not meet columns of ", right.rows);
  const int64_t m = left.rows, k = left.columns, n = right.columns;
  STD_TORCH_CHECK(k <= gemm::kMaxDepth, kName, " sums up at most ", gemm::kMaxDepth, " products, got ", k);
  const bool a_signed = a.scalar_type() == ScalarType::Char, b_signed = b.scalar_type() == ScalarType::Char;
  const auto check_zero = [](int64_t zero, bool is_signed, const char* of) {
    const int64_t low = is_signed ? -128 : 0;
    STD_TORCH_CHECK(low <= zero && zero <= low + 255, kName, ": zero point ", zero, " of ", of, " is no code of it");
  };
  check_zero(a_zero_point, a_signed, "a");
  check_zero(b_zero_point, b_signed, "b");
  const bool bytes_out = is_byte(out_dtype), out_signed = out_dtype == ScalarType::Char;
  STD_TORCH_CHECK(bytes_out || out_dtype == ScalarType::Int, kName, " gives int8, uint8 or int32 codes");
  const int64_t least = !bytes_out ? INT32_MIN : out_signed ? -128 : 0, most = bytes_out ? least + 255 : INT32_MAX;
  STD_TORCH_CHECK(least <= out_min && out_min <= out_max && out_max <= most && least <= out_zero_point &&
                      out_zero_point <= most,
                  kName, ": codes from ", out_min, " to ", out_max, " around ", out_zero_point,
                  " do not fit the output's dtype");

  const Sizes batch = broadcast(left.batch, right.batch);
  Sizes sizes = batch;
  if (a.dim() > 1) sizes.push_back(m);
  if (b.dim() > 1) sizes.push_back(n);
  Tensor out = torch::stable::new_empty(a, sizes, out_dtype);
  int64_t count = 1;
  for (int64_t size : batch) count *= size;
  if (count * m * n == 0) return out;

  const Isa isa = active_isa();
  const auto* a_data = static_cast<const uint8_t*>(a.const_data_ptr());
  const auto* b_data = static_cast<const uint8_t*>(b.const_data_ptr());
  // Weights are int8: unsigned codes are 128 lower there, and their zero point with them.
  const auto b_zero = static_cast<int32_t>(b_signed ? b_zero_point : b_zero_point - 128);
  const auto one = [&](int64_t begin, int64_t end, const Parallel& parallel) {
    AlignedBytes rows(static_cast<size_t>(m * k)), weight(static_cast<size_t>(n * k)), packed;
    int64_t rows_from = -1, weight_from = -1;
    gemm::CodesCall call;
    gemm::Layer layer;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t a_begin = begin_of(left, batch, i), b_begin = begin_of(right, batch, i);
      if (a_begin != rows_from) {
        gather(a_data + a_begin, m, k, left.row_stride, left.column_stride, 0, rows.data());
        rows_from = a_begin;
      }
      if (b_begin != weight_from) {
        gather(b_data + b_begin, n, k, right.column_stride, right.row_stride, b_signed ? 0 : 0x80, weight.data());
        weight_from = b_begin;
        if (bytes_out) {
          packed = gemm::pack(isa, reinterpret_cast<const int8_t*>(weight.data()), k, n, k, parallel);
          const bool fits = gemm::view(packed.data(), static_cast<int64_t>(packed.size()), isa, n, k, &layer.weight);
          STD_TORCH_CHECK(fits, kName, ": the second operand could not be packed");
        }
      }
      if (!bytes_out) {
        if (a_signed && rows_from == a_begin) gemm::flip_sign(rows.data(), rows.data(), m * k);
        wide_product(rows.data(), a_signed ? a_zero_point + 128 : a_zero_point,
                     reinterpret_cast<const int8_t*>(weight.data()), b_zero, m, n, k,
                     static_cast<float>(a_scale * b_scale / out_scale), out_zero_point, out_min, out_max,
                     static_cast<int32_t*>(out.mutable_data_ptr()) + i * m * n);
        rows_from = -1;  // flipped in place
        continue;
      }
      layer.columns.scale = {&b_scale, gemm::Numbers::Type::f64, 1};
      layer.columns.zero_point = {&b_zero, gemm::Numbers::Type::i32, 1};
      call.x = rows.data();
      call.x_signed = a_signed;
      call.m = m;
      call.x_zero_point = static_cast<int32_t>(a_zero_point);
      call.out_zero_point = static_cast<int32_t>(out_zero_point);
      call.out_min = static_cast<int32_t>(out_min);
      call.out_max = static_cast<int32_t>(out_max);
      call.out = static_cast<uint8_t*>(out.mutable_data_ptr()) + i * m * n;
      gemm::linear(layer, a_scale, out_scale, call, parallel);
    }
  };
  const Parallel parallel = torch_parallel();
  if (count < 2 * parallel.threads) {
    one(0, count, parallel);
  } else {
    parallel.for_range(0, count, 1, [&](int64_t begin, int64_t end) { one(begin, end, Parallel::serial()); });
  }
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zeropoint, CPU, m) { m.impl("matmul", TORCH_BOX(&matmul)); }

}  // namespace zeropoint::binding
