// zeropoint::max_pool, avg_pool, adaptive_avg_pool and mean on the CPU. Sizes are checked here.
#include "pool/pool.h"

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "common.h"
#include "isa.h"

namespace zeropoint::binding {
namespace {

using Sizes = std::vector<int64_t>;

Sizes shape_of(const Tensor& x) { return {x.sizes().begin(), x.sizes().end()}; }

// Calls f with a null pointer of the codes' type.
template <class F>
void with_codes(const Tensor& x, const char* name, F&& f) {
  STD_TORCH_CHECK(x.is_cpu(), name, " on the CPU takes a tensor on the CPU");
  switch (x.scalar_type()) {
    case ScalarType::Byte: return f(static_cast<uint8_t*>(nullptr));
    case ScalarType::Char: return f(static_cast<int8_t*>(nullptr));
    case ScalarType::Int: return f(static_cast<int32_t*>(nullptr));
    default: STD_TORCH_CHECK(false, name, " takes int8, uint8 or int32 codes");
  }
}

template <class T>
const T* read(const Tensor& x, T*) {
  return static_cast<const T*>(x.const_data_ptr());
}
template <class T>
T* write(const Tensor& x, T*) {
  return static_cast<T*>(x.mutable_data_ptr());
}

// --- memory order -----------------------------------------------------------------------------------------------

// Strides of a dense tensor whose dimensions, from the outermost in, are `order`.
Sizes dense_strides(const Sizes& shape, const Sizes& order) {
  Sizes strides(shape.size());
  int64_t step = 1;
  for (size_t i = order.size(); i-- > 0;) {
    const size_t d = static_cast<size_t>(order[i]);
    strides[d] = step;
    step *= std::max<int64_t>(shape[d], 1);
  }
  return strides;
}

Sizes channels_last_order(size_t dims) {
  Sizes order{0};
  for (size_t d = 2; d < dims; ++d) order.push_back(static_cast<int64_t>(d));
  order.push_back(1);
  return order;
}

Sizes plain_order(size_t dims) {
  Sizes order(dims);
  for (size_t d = 0; d < dims; ++d) order[d] = static_cast<int64_t>(d);
  return order;
}

bool is_dense(const Tensor& x, const Sizes& order) {
  const Sizes shape = shape_of(x), wanted = dense_strides(shape, order);
  if (x.numel() == 0) return true;
  for (size_t d = 0; d < shape.size(); ++d)
    if (shape[d] != 1 && x.stride(static_cast<int64_t>(d)) != wanted[d]) return false;
  return true;
}

Tensor empty_dense(const Sizes& shape, const Sizes& order, ScalarType dtype) {
  const Sizes strides = dense_strides(shape, order);
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(),
                                                         strides.data(), static_cast<int32_t>(dtype),
                                                         aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

// `x`, or a copy of it, dense in an order of dimensions.
Tensor dense(const Tensor& x, const Sizes& order) {
  if (is_dense(x, order)) return x;
  Tensor copy = empty_dense(shape_of(x), order, x.scalar_type());
  torch::stable::copy_(copy, x);
  return copy;
}

// --- pooling ----------------------------------------------------------------------------------------------------

constexpr int64_t kLargest = int64_t{1} << 31;

bool all_between(const Sizes& values, int64_t low, int64_t high) {
  return std::all_of(values.begin(), values.end(), [&](int64_t v) { return low <= v && v <= high; });
}

void check_input(const char* name, const Sizes& shape, size_t rank) {
  STD_TORCH_CHECK(rank >= 1 && rank <= 3 && shape.size() == rank + 2, name, " over ", rank,
                  " dimensions takes an input (N, C, spatial), got shape ", text_of(shape));
  STD_TORCH_CHECK(all_between({shape.begin() + 1, shape.end()}, 1, kLargest), name,
                  " takes an input whose sizes, but for the batch, are above 0 and at most 2**31, got shape ",
                  text_of(shape));
}

// The windows of a pooling, and its output's shape.
pool::Windows windows_of(const char* name, const Sizes& shape, const Sizes& kernel, const Sizes& stride,
                         const Sizes& padding, const Sizes& dilation, bool ceil_mode, bool count_padding,
                         Sizes* out_shape) {
  const size_t rank = kernel.size();
  check_input(name, shape, rank);
  STD_TORCH_CHECK(stride.size() == rank && padding.size() == rank && dilation.size() == rank, name,
                  " with kernel_size ", text_of(kernel), " takes ", rank, " strides, paddings and dilations, got ",
                  text_of(stride), ", ", text_of(padding), " and ", text_of(dilation));
  STD_TORCH_CHECK(all_between(kernel, 1, kLargest) && all_between(stride, 1, kLargest) &&
                      all_between(dilation, 1, kLargest),
                  name, " takes a kernel_size, stride and dilation of at least 1 and at most 2**31, got ",
                  text_of(kernel), ", ", text_of(stride), " and ", text_of(dilation));
  pool::Windows w;
  w.batch = shape[0];
  w.channels = shape[1];
  out_shape->assign({shape[0], shape[1]});
  for (size_t d = 0; d < rank; ++d) {
    const int64_t extent = dilation[d] * (kernel[d] - 1) + 1, size = shape[2 + d];
    STD_TORCH_CHECK(padding[d] >= 0 && padding[d] <= extent / 2, name,
                    " takes a padding between 0 and half of the kernel's extent, got padding ", text_of(padding),
                    " for kernel_size ", text_of(kernel), ", dilation ", text_of(dilation));
    const int64_t room = size + 2 * padding[d] - extent;
    const int64_t wanted = room + (ceil_mode ? stride[d] - 1 : 0);
    int64_t out = wanted < 0 ? 0 : wanted / stride[d] + 1;
    if (ceil_mode && (out - 1) * stride[d] >= size + padding[d]) --out;
    STD_TORCH_CHECK(out >= 1, name, ": the kernel covers ", extent, " positions of spatial dimension ", d,
                    ", more than the ", size + 2 * padding[d], " of the padded input (input ", text_of(shape), ")");
    const size_t to = 3 - rank + d;
    w.in[to] = size;
    w.spans[to] = pool::window_spans(size, out, kernel[d], stride[d], padding[d], dilation[d], count_padding);
    out_shape->push_back(out);
  }
  return w;
}

// Runs `f(input, output)` on channels-last memory. A channels-last input gives a channels-last output, another a
// contiguous one.
template <class F>
Tensor in_channels_last(const Tensor& x, const Sizes& out_shape, F&& f) {
  const Sizes last = channels_last_order(out_shape.size());
  const bool kept = is_dense(x, last);
  Tensor out = empty_dense(out_shape, kept ? last : plain_order(out_shape.size()), x.scalar_type());
  if (out.numel() == 0) return out;
  if (is_dense(out, last)) {
    f(dense(x, last), out);
  } else {
    Tensor moved = empty_dense(out_shape, last, x.scalar_type());
    f(dense(x, last), moved);
    torch::stable::copy_(out, moved);
  }
  return out;
}

Tensor max_pool(const Tensor& x, Sizes kernel_size, Sizes stride, Sizes padding, Sizes dilation, bool ceil_mode) {
  Sizes out_shape;
  const pool::Windows windows =
      windows_of("max_pool", shape_of(x), kernel_size, stride, padding, dilation, ceil_mode, false, &out_shape);
  return in_channels_last(x, out_shape, [&](const Tensor& from, const Tensor& to) {
    with_codes(from, "max_pool", [&](auto type) {
      pool::max(active_isa(), windows, read(from, type), write(to, type), torch_parallel());
    });
  });
}

Tensor average(const char* name, const Tensor& x, int64_t zero_point, const pool::Windows& windows,
               const Sizes& out_shape, int64_t divisor) {
  return in_channels_last(x, out_shape, [&](const Tensor& from, const Tensor& to) {
    with_codes(from, name, [&](auto type) {
      pool::average(active_isa(), windows, read(from, type), static_cast<int32_t>(zero_point), divisor,
                    write(to, type), torch_parallel());
    });
  });
}

Tensor avg_pool(const Tensor& x, int64_t zero_point, Sizes kernel_size, Sizes stride, Sizes padding, bool ceil_mode,
                bool count_include_pad, std::optional<int64_t> divisor_override) {
  STD_TORCH_CHECK(divisor_override.value_or(1) != 0, "avg_pool takes a divisor_override other than 0");
  Sizes out_shape;
  const Sizes dilation(kernel_size.size(), 1);
  const pool::Windows windows = windows_of("avg_pool", shape_of(x), kernel_size, stride, padding, dilation, ceil_mode,
                                           count_include_pad, &out_shape);
  return average("avg_pool", x, zero_point, windows, out_shape, divisor_override.value_or(0));
}

Tensor adaptive_avg_pool(const Tensor& x, int64_t zero_point, Sizes output_size) {
  const Sizes shape = shape_of(x);
  const size_t rank = output_size.size();
  check_input("adaptive_avg_pool", shape, rank);
  STD_TORCH_CHECK(all_between(output_size, 0, kLargest),
                  "adaptive_avg_pool takes output sizes of at least 0 and at most 2**31, got ",
                  text_of(output_size));
  pool::Windows windows;
  windows.batch = shape[0];
  windows.channels = shape[1];
  Sizes out_shape{shape[0], shape[1]};
  for (size_t d = 0; d < rank; ++d) {
    windows.in[3 - rank + d] = shape[2 + d];
    windows.spans[3 - rank + d] = pool::adaptive_spans(shape[2 + d], output_size[d]);
    out_shape.push_back(output_size[d]);
  }
  return average("adaptive_avg_pool", x, zero_point, windows, out_shape, 0);
}

// --- mean -------------------------------------------------------------------------------------------------------

Tensor mean(const Tensor& x, int64_t zero_point, Sizes dim, bool keepdim) {
  const Sizes shape = shape_of(x);
  const int64_t dims = x.dim(), wrap = std::max<int64_t>(dims, 1);
  std::vector<bool> reduced(static_cast<size_t>(wrap), dim.empty());
  for (int64_t d : dim) {
    STD_TORCH_CHECK(-wrap <= d && d < wrap, "mean: dimension ", d, " is out of range for a tensor of ", dims,
                    " dimensions");
    const size_t at = static_cast<size_t>((d + wrap) % wrap);
    STD_TORCH_CHECK(!reduced[at], "mean: a dimension appears twice in ", text_of(dim));
    reduced[at] = true;
  }
  Sizes out_shape, kept, summed;
  int64_t rows = 1, count = 1;
  for (int64_t d = 0; d < dims; ++d) {
    const bool gone = reduced[static_cast<size_t>(d)];
    (gone ? summed : kept).push_back(d);
    (gone ? count : rows) *= shape[static_cast<size_t>(d)];
    if (!gone || keepdim) out_shape.push_back(gone ? 1 : shape[static_cast<size_t>(d)]);
  }
  Tensor out = empty_dense(out_shape, plain_order(out_shape.size()), x.scalar_type());
  if (rows == 0) return out;
  const int32_t zero = static_cast<int32_t>(zero_point);

  // The mean over the positions of a channels-last tensor is one large window; every other goes row by row.
  const bool over_positions = dims >= 3 && count > 0 && kept == Sizes{0, 1} && is_dense(x, channels_last_order(shape.size()));
  with_codes(x, "mean", [&](auto type) {
    if (over_positions) {
      pool::Windows windows;
      windows.batch = shape[0];
      windows.channels = shape[1];
      windows.in[2] = count;
      windows.spans[2] = pool::adaptive_spans(count, 1);
      pool::average(active_isa(), windows, read(x, type), zero, 0, write(out, type), torch_parallel());
      return;
    }
    Sizes order = kept;
    order.insert(order.end(), summed.begin(), summed.end());
    const Tensor from = dense(x, order);
    pool::row_means(read(from, type), rows, count, zero, write(out, type), torch_parallel());
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zeropoint, CPU, m) {
  m.impl("max_pool", TORCH_BOX(&max_pool));
  m.impl("avg_pool", TORCH_BOX(&avg_pool));
  m.impl("adaptive_avg_pool", TORCH_BOX(&adaptive_avg_pool));
  m.impl("mean", TORCH_BOX(&mean));
}

}  // namespace zeropoint::binding
