// prelu and softmax on the CPU.
#include "elementwise/curves.h"

#include "layout.h"

namespace zeropoint::binding {
namespace {

using elementwise::Channels;

elementwise::Grid whole_grid(elementwise::Type type, int64_t zero_point, const char* name) {
  const bool is_byte = elementwise::is_byte(type);
  const int64_t low = !is_byte ? INT32_MIN : type == elementwise::Type::i8 ? -128 : 0;
  return out_grid(type, zero_point, low, is_byte ? low + 255 : INT32_MAX, name);
}

Tensor prelu(const Tensor& input, double x_scale, int64_t x_zero_point, const Tensor& slope, double out_scale,
             int64_t out_zero_point, int64_t out_min, int64_t out_max, ScalarType out_dtype) {
  const char* name = "prelu";
  STD_TORCH_CHECK(input.is_cpu(), name, ": the codes must be on the CPU");
  const auto from = code_type(input.scalar_type(), name), to = code_type(out_dtype, name);
  const auto grid = out_grid(to, out_zero_point, out_min, out_max, name);
  const int64_t slopes = slope.numel(), channels = input.dim() > 1 ? input.size(1) : 1;
  STD_TORCH_CHECK(slopes == 1 || slopes == channels, name, " takes one slope, or one a channel, got ", slopes, " for ",
                  channels, " channels");
  const Tensor x = dense(input);
  Tensor out = dense_like(x, out_dtype);
  if (x.numel() == 0) return out;
  std::vector<float> below;
  for (double value : values(slope, name)) below.push_back(static_cast<float>(value * x_scale / out_scale));
  const Channels view = slopes == 1 ? Channels{1, 1, x.numel()} : channel_view(x, 1);
  elementwise::prelu(x.const_data_ptr(), from, view, x_zero_point, static_cast<float>(x_scale / out_scale), below, grid,
                     out.mutable_data_ptr(), to, torch_parallel());
  return out;
}

Tensor softmax(const Tensor& input, double x_scale, int64_t dim, double out_scale, int64_t out_zero_point,
               ScalarType out_dtype) {
  const char* name = "softmax";
  STD_TORCH_CHECK(input.is_cpu(), name, ": the codes must be on the CPU");
  const auto from = code_type(input.scalar_type(), name), to = code_type(out_dtype, name);
  const auto grid = whole_grid(to, out_zero_point, name);
  const int64_t rank = input.dim(), least = std::max<int64_t>(rank, 1);
  STD_TORCH_CHECK(-least <= dim && dim < least, name, ": dim ", dim, " is out of range for ", rank, " dimensions");
  const Tensor x = dense(input);
  Tensor out = dense_like(x, out_dtype);
  if (x.numel() == 0) return out;
  const Channels view = rank == 0 ? Channels{1, 1, 1} : channel_view(x, dim < 0 ? dim + rank : dim);
  elementwise::softmax(x.const_data_ptr(), from, view, x_scale, out_scale, grid, out.mutable_data_ptr(), to,
                       torch_parallel());
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zeropoint, CPU, m) {
  m.impl("prelu", TORCH_BOX(&prelu));
  m.impl("softmax", TORCH_BOX(&softmax));
}

}  // namespace zeropoint::binding
