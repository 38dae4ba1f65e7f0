// zeropoint::interpolate on the CPU: checks, positions, layouts.
#include "interpolate/interpolate.h"

#include <string>
#include <vector>

#include "layout.h"

namespace zeropoint::binding {
namespace {

constexpr const char* kName = "interpolate";

// Whether the dimensions lie in memory as (N, spatial, C).
bool has_channels_last(const Tensor& x) {
  if (x.numel() == 0) return true;
  int64_t step = 1;
  const auto dimension = [&](int64_t d) {
    const bool fits = x.size(d) == 1 || x.stride(d) == step;
    step *= x.size(d);
    return fits;
  };
  bool fits = dimension(1);
  for (int64_t d = x.dim() - 1; d >= 2; --d) fits = dimension(d) && fits;
  return dimension(0) && fits;
}

Tensor empty(std::vector<int64_t> sizes, bool channels_last, ScalarType dtype) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  const auto dimension = [&](size_t d) {
    strides[d] = step;
    step *= std::max<int64_t>(sizes[d], 1);
  };
  if (channels_last) dimension(1);
  for (size_t d = sizes.size(); d-- > 2;) dimension(d);
  if (!channels_last) dimension(1);
  dimension(0);
  AtenTensorHandle out = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)), aoti_torch_device_type_cpu(), 0, &out));
  return Tensor(out);
}

Tensor resize(const Tensor& input, int64_t zero_point, std::vector<int64_t> size, std::vector<double> ratio,
              std::string mode, bool align_corners) {
  const auto rank = static_cast<int64_t>(size.size());
  STD_TORCH_CHECK(mode == "nearest" || mode == "nearest-exact" || mode == "linear", kName,
                  " takes the modes nearest, nearest-exact and linear, got ", mode);
  STD_TORCH_CHECK(rank >= 1 && rank <= 3 && ratio.size() == size.size() && input.dim() == rank + 2, kName, " to ", rank,
                  " sizes takes an input (N, C, spatial) and a ratio a dimension, got ", input.dim(),
                  " dimensions and ", ratio.size(), " ratios");
  for (int64_t d = 1; d < input.dim(); ++d)
    STD_TORCH_CHECK(input.size(d) >= 1 && (d < 2 || size[d - 2] >= 1), kName, " takes sizes above 0");
  STD_TORCH_CHECK(input.is_cpu(), kName, ": the codes must be on the CPU");
  const auto type = code_type(input.scalar_type(), kName);

  const bool last = has_channels_last(input);
  const Tensor x = last || input.is_contiguous() ? input : torch::stable::contiguous(input);
  std::vector<int64_t> sizes{x.size(0), x.size(1)};
  sizes.insert(sizes.end(), size.begin(), size.end());
  Tensor out = empty(sizes, last, x.scalar_type());
  if (out.numel() == 0) return out;

  interpolate::Shape shape{last ? x.size(0) : x.size(0) * x.size(1), last ? x.size(1) : 1, {1, 1, 1}, {1, 1, 1}};
  interpolate::Way way;
  way.mode = mode == "linear"    ? interpolate::Mode::linear
             : mode == "nearest" ? interpolate::Mode::nearest
                                 : interpolate::Mode::nearest_exact;
  way.align_corners = align_corners;
  for (int64_t d = 3 - rank, own = 0; d < 3; ++d, ++own)
    shape.from[d] = x.size(2 + own), shape.to[d] = size[own], way.ratio[d] = ratio[own];
  interpolate::resize(shape, way, x.const_data_ptr(), type, zero_point, out.mutable_data_ptr(), torch_parallel());
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zeropoint, CPU, m) { m.impl("interpolate", TORCH_BOX(&resize)); }

}  // namespace zeropoint::binding
