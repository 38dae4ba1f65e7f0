// What linear layers and convolutions share: the grids of a call, the numbers of its columns, its packed weights, and
// all of that bound once for many calls.
#pragma once
#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "common.h"
#include "gemm/columns.h"
#include "gemm/kernel.h"

namespace zeropoint::binding {

using Ints = std::span<const int64_t>;

inline bool is_codes(ScalarType dtype) { return dtype == ScalarType::Char || dtype == ScalarType::Byte; }

inline Tensor empty_bytes(int64_t size) {
  const int64_t stride = 1;
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &size, &stride, static_cast<int32_t>(ScalarType::Byte),
                                                         aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
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

// The activations' dtype and zero point, and the output's codes.
struct Grids {
  int32_t x_signed = 0, out_signed = 0;
  int32_t x_zero_point = 0, out_zero_point = 0, out_min = 0, out_max = 255;

  ScalarType x_dtype() const { return x_signed ? ScalarType::Char : ScalarType::Byte; }
  ScalarType out_dtype() const { return out_signed ? ScalarType::Char : ScalarType::Byte; }
};

inline Grids grids_of(const char* op, ScalarType x_dtype, double x_scale, int64_t x_zero_point, double out_scale,
                      int64_t out_zero_point, int64_t out_min, int64_t out_max, ScalarType out_dtype) {
  STD_TORCH_CHECK(is_codes(x_dtype) && is_codes(out_dtype), op, " takes and gives int8 or uint8 codes");
  check_scales(op, x_scale, out_scale);
  const auto check_code = [&](int64_t code, ScalarType dtype, const char* name) {
    const int64_t low = dtype == ScalarType::Char ? -128 : 0;
    STD_TORCH_CHECK(low <= code && code <= low + 255, op, " takes a ", name, " in [", low, ", ", low + 255, "], got ",
                    code);
    return static_cast<int32_t>(code);
  };
  STD_TORCH_CHECK(out_min <= out_max, op, " takes out_min <= out_max, got ", out_min, " and ", out_max);
  return {x_dtype == ScalarType::Char,
          out_dtype == ScalarType::Char,
          check_code(x_zero_point, x_dtype, "x_zero_point"),
          check_code(out_zero_point, out_dtype, "out_zero_point"),
          check_code(out_min, out_dtype, "out_min"),
          check_code(out_max, out_dtype, "out_max")};
}

// The numbers of `n` columns, checked, and the tensors that hold them.
class ColumnTensors {
 public:
  ColumnTensors(const char* op, const Tensor& weight_scale, const Tensor& weight_zero_point,
                const std::optional<Tensor>& bias, int64_t n)
      : op_(op), n_(n) {
    kept_.reserve(3);
    numbers_.scale = read(weight_scale, "weight_scale", true);
    numbers_.zero_point = read(weight_zero_point, "weight_zero_point", true);
    if (numbers_.zero_point.type == gemm::Numbers::Type::i32)
      check_zero_points<int32_t>();
    else if (numbers_.zero_point.type == gemm::Numbers::Type::i64)
      check_zero_points<int64_t>();
    else
      STD_TORCH_CHECK(false, op, ": weight_zero_point must hold int32 or int64");
    if (bias) {
      const bool half = bias->scalar_type() == ScalarType::Half || bias->scalar_type() == ScalarType::BFloat16;
      numbers_.bias = read(half ? torch::stable::to(*bias, ScalarType::Float) : *bias, "bias", false);
    }
  }

  const gemm::ColumnNumbers& numbers() const { return numbers_; }

  // Arrays for one call, in memory of this thread.
  gemm::Columns for_call(double x_scale, double out_scale) const {
    return gemm::write_columns(numbers_, x_scale, out_scale, 0, n_, n_, gemm::column_memory(n_));
  }

 private:
  gemm::Numbers read(const Tensor& x, const char* name, bool may_be_one) {
    gemm::Numbers numbers;
    switch (x.scalar_type()) {
      case ScalarType::Float: numbers.type = gemm::Numbers::Type::f32; break;
      case ScalarType::Double: numbers.type = gemm::Numbers::Type::f64; break;
      case ScalarType::Int: numbers.type = gemm::Numbers::Type::i32; break;
      case ScalarType::Long: numbers.type = gemm::Numbers::Type::i64; break;
      default: STD_TORCH_CHECK(false, op_, ": ", name, " must hold float32, float64, int32 or int64");
    }
    numbers.count = x.numel();
    STD_TORCH_CHECK(x.is_cpu(), op_, " on the CPU takes ", name, " on the CPU");
    STD_TORCH_CHECK(numbers.count == n_ || (may_be_one && numbers.count == 1), op_, ": ", name, " must hold ", n_,
                    " numbers, one an output channel", may_be_one ? ", or one for all" : "", "; it has shape ",
                    text_of(x));
    kept_.push_back(contiguous_of(x));
    numbers.data = kept_.back().const_data_ptr();
    return numbers;
  }

  template <class T>
  void check_zero_points() const {
    const auto* data = static_cast<const T*>(numbers_.zero_point.data);
    bool fits = true;
    for (int64_t i = 0; i < numbers_.zero_point.count; ++i) fits &= data[i] >= -128 && data[i] <= 127;
    STD_TORCH_CHECK(fits, op_, ": every weight_zero_point must lie in [-128, 127]");
  }

  const char* op_;
  int64_t n_;
  gemm::ColumnNumbers numbers_;
  std::vector<Tensor> kept_;
};

// How a window goes over the spatial dimensions of a convolution; paddings before and after each.
struct Window {
  int64_t rank = 0, groups = 1;
  int64_t stride[3] = {}, padding[6] = {}, dilation[3] = {};
};

// All of a layer that stays the same while its input and its output keep their grids: made once, as the bytes of this
// header and of the arrays of gemm/columns.h, and then handed to every call in place of a dozen arguments.
struct Bound {
  char magic[8] = {'z', 'p', 'b', 'o', 'u', 'n', 'd', '1'};
  int64_t n = 0;
  Grids grids;
  int32_t has_offset = 0, has_zero_point = 0;
  Window window;
  int64_t reserved[12] = {};

  int64_t bytes() const { return int64_t{sizeof(Bound)} + gemm::column_bytes(n); }
};
static_assert(sizeof(Bound) == 256);

inline Tensor bind(const Grids& grids, const ColumnTensors& tensors, double x_scale, double out_scale, int64_t n,
                   const Window& window) {
  Bound bound;
  bound.n = n;
  bound.grids = grids;
  bound.window = window;
  Tensor bytes = empty_bytes(bound.bytes());
  auto* memory = static_cast<uint8_t*>(bytes.mutable_data_ptr());
  std::memset(memory, 0, static_cast<size_t>(bound.bytes()));
  const auto columns =
      gemm::write_columns(tensors.numbers(), x_scale, out_scale, 0, n, n, memory + sizeof(Bound));
  bound.has_offset = columns.offset != nullptr;
  bound.has_zero_point = columns.zero_point != nullptr;
  std::memcpy(memory, &bound, sizeof bound);
  return bytes;
}

// What `bind` made for a weight of `n` output channels and a window of `rank` dimensions; an error if it is anything else.
inline const Bound& bound_of(const char* op, const Tensor& bytes, int64_t n, int64_t rank, gemm::Columns* columns) {
  const Bytes found = packed_bytes(bytes);
  const auto* bound = reinterpret_cast<const Bound*>(found.data);
  const bool fits = found.length >= int64_t{sizeof(Bound)} && reinterpret_cast<uintptr_t>(bound) % alignof(Bound) == 0 &&
                    std::memcmp(bound->magic, Bound().magic, sizeof bound->magic) == 0 && bound->n == n &&
                    bound->window.rank == rank && found.length == bound->bytes();
  STD_TORCH_CHECK(fits, op, ": these bytes are not what was bound for a weight of ", n, " output channels");
  *columns = gemm::read_columns(found.data + sizeof(Bound), n, bound->has_offset, bound->has_zero_point);
  return *bound;
}

}  // namespace zeropoint::binding
