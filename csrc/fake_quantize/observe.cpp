// Statistics and grid of the fused fake quantizer.
#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>

#include "elementwise/qparams.h"
#include "fake_quantize/fake_quantize.h"
#include "fake_quantize/kernels.h"
#include "fake_quantize/plain.h"

namespace zeropoint::fake_quantize {
namespace {

constexpr int64_t kGrain = 1 << 15;
constexpr int64_t kBuffer = 1024;
constexpr double kFloatMax = std::numeric_limits<float>::max();

bool range_in_floats(const void* x, Type type, int64_t begin, int64_t n, float* low, float* high) {
  const Kernels& k = kernels();
  if (type == Type::f32) return k.range(static_cast<const float*>(x) + begin, n, low, high);
  if (type == Type::f64) {
    double ends[2] = {std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity()};
    const bool finite = range_of(static_cast<const double*>(x) + begin, n, &ends[0], &ends[1]);
    if (ends[0] <= ends[1]) {
      *low = std::min(*low, static_cast<float>(std::clamp(ends[0], -kFloatMax, kFloatMax)));
      *high = std::max(*high, static_cast<float>(std::clamp(ends[1], -kFloatMax, kFloatMax)));
    }
    return finite;
  }
  const auto& convert = elementwise::kernels();
  const auto* halves = static_cast<const uint16_t*>(x) + begin;
  float buffer[kBuffer];
  bool finite = true;
  for (int64_t i = 0; i < n; i += kBuffer) {
    const int64_t length = std::min(kBuffer, n - i);
    (type == Type::f16 ? convert.from_half : convert.from_bfloat16)(halves + i, buffer, length);
    finite &= k.range(buffer, length, low, high);
  }
  return finite;
}

}  // namespace

bool ranges(const void* x, Type type, Channels view, float* low, float* high, const Parallel& parallel) {
  bool finite = true;
  std::mutex merging;
  if (view.count == 1) {
    parallel.for_range(0, view.outer * view.inner, kGrain, [&](int64_t begin, int64_t end) {
      float ends[2] = {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()};
      const bool here = range_in_floats(x, type, begin, end - begin, &ends[0], &ends[1]);
      const std::lock_guard<std::mutex> lock(merging);
      finite &= here;
      *low = std::min(*low, ends[0]);
      *high = std::max(*high, ends[1]);
    });
    return finite;
  }
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, view.outer * view.inner));
  parallel.for_range(0, view.count, grain, [&](int64_t begin, int64_t end) {
    bool here = true;
    for (int64_t outer = 0; outer < view.outer; ++outer)
      for (int64_t c = begin; c < end; ++c)
        here &= range_in_floats(x, type, (outer * view.count + c) * view.inner, view.inner, &low[c], &high[c]);
    const std::lock_guard<std::mutex> lock(merging);
    finite &= here;
  });
  return finite;
}

float moving_average(float old, float batch, double constant) {
  if (std::isinf(old)) return batch;
  if (std::isinf(batch)) return old;
  const float moved = old + static_cast<float>(constant) * (batch - old);
  if (std::isfinite(moved)) return moved;
  // batch - old may leave float32 where the average itself does not
  return static_cast<float>(1.0 - constant) * old + static_cast<float>(constant) * batch;
}

void grid_of(float low, float high, Codes codes, float eps, float* scale, int32_t* zero_point) {
  if (!(low <= high)) {
    *scale = 1.0f;
    *zero_point = 0;
    return;
  }
  low = std::min(low, 0.0f);
  high = std::max(high, 0.0f);
  double least = low, most = high;
  if (codes.symmetric) {
    // A one-sided range is mirrored by half: that makes it span zero and never decides the step.
    least = low == 0.0f ? -high / 2 : low;
    most = high == 0.0f ? -low / 2 : high;
    const auto half = static_cast<double>((codes.high - codes.low) / 2);
    const double step = std::max(std::abs(least / -(half + 1)), std::abs(most / half));
    least = -(half + 1) * step;
    most = half * step;
  }
  const auto grid = elementwise::choose_qparams(least, most, codes.low, codes.high);
  auto zero = static_cast<int64_t>(grid.zero_point);
  double step = grid.scale;
  if (step < static_cast<double>(eps)) {
    step = eps;
    const float place = static_cast<float>(codes.low) - std::nearbyint(low / eps);
    zero = static_cast<int64_t>(
        std::clamp(place, static_cast<float>(codes.low), static_cast<float>(codes.high)));
  }
  *scale = static_cast<float>(step);
  *zero_point = static_cast<int32_t>(codes.symmetric ? codes.middle : zero);
}

}  // namespace zeropoint::fake_quantize
