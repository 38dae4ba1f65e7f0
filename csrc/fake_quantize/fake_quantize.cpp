#include "fake_quantize/fake_quantize.h"

#include <algorithm>

#include "elementwise/kernels.h"
#include "fake_quantize/kernels.h"
#include "fake_quantize/plain.h"

namespace zeropoint::fake_quantize {
namespace {

constexpr int64_t kGrain = 1 << 15;
constexpr int64_t kBuffer = 1024;

// Calls f(x, y, mask, n) on [begin, begin + n) in float32: halves are widened and narrowed in pieces.
template <class F>
void in_floats(const void* x, Type type, void* y, uint8_t* mask, int64_t begin, int64_t n, F&& f) {
  if (type == Type::f32) {
    f(static_cast<const float*>(x) + begin, static_cast<float*>(y) + begin, mask + begin, n);
    return;
  }
  const auto& convert = elementwise::kernels();
  const auto* halves = static_cast<const uint16_t*>(x) + begin;
  auto* out = static_cast<uint16_t*>(y) + begin;
  float from[kBuffer], to[kBuffer];
  for (int64_t i = 0; i < n; i += kBuffer) {
    const int64_t length = std::min(kBuffer, n - i);
    (type == Type::f16 ? convert.from_half : convert.from_bfloat16)(halves + i, from, length);
    f(from, to, mask + begin + i, length);
    (type == Type::f16 ? convert.to_half : convert.to_bfloat16)(to, out + i, length);
  }
}

template <class T>
void round_plain(const T* x, T* y, uint8_t* mask, int64_t n, double scale, double zero, bool floating, int64_t low,
                 int64_t high) {
  const T step = static_cast<T>(scale), shift = floating ? static_cast<T>(zero) : T{0};
  const int64_t from = floating ? 0 : static_cast<int64_t>(zero);
  const T least = static_cast<T>(low - from), most = static_cast<T>(high - from);
  const T inverse = T{1} / step;
  for (int64_t i = 0; i < n; ++i) mask[i] = round_one(x[i], &y[i], inverse, step, shift, least, most);
}

}  // namespace

void round(const void* x, Type type, Channels view, const ChannelGrid& grid, int64_t low, int64_t high, void* y,
           uint8_t* mask, const Parallel& parallel) {
  const Kernels& k = kernels();
  const auto run = [&](int64_t channel, int64_t begin, int64_t n) {
    const double scale = grid.scale[channel], zero = grid.zero_point[channel];
    if (type == Type::f64) {
      round_plain(static_cast<const double*>(x) + begin, static_cast<double*>(y) + begin, mask + begin, n, scale, zero,
                  grid.floating, low, high);
      return;
    }
    in_floats(x, type, y, mask, begin, n, [&](const float* from, float* to, uint8_t* inside, int64_t length) {
      if (grid.floating) {
        round_plain(from, to, inside, length, scale, zero, true, low, high);
        return;
      }
      const auto shift = static_cast<int64_t>(zero);
      const auto step = static_cast<float>(scale);
      k.round(from, to, inside, length,
              {1.0f / step, step, static_cast<float>(low - shift), static_cast<float>(high - shift)});
    });
  };
  parallel.for_range(0, view.outer * view.count * view.inner, kGrain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t row = begin / view.inner;
      const int64_t stop = std::min(end, (row + 1) * view.inner);
      run(row % view.count, begin, stop - begin);
      begin = stop;
    }
  });
}

void pass(const void* grad, Type type, const uint8_t* mask, int64_t n, void* out, const Parallel& parallel) {
  const Kernels& k = kernels();
  parallel.for_range(0, n, kGrain, [&](int64_t begin, int64_t end) {
    if (type == Type::f64) {
      const auto* from = static_cast<const double*>(grad);
      auto* to = static_cast<double*>(out);
      for (int64_t i = begin; i < end; ++i) to[i] = from[i] * static_cast<double>(mask[i]);
      return;
    }
    // the mask is only read
    in_floats(grad, type, out, const_cast<uint8_t*>(mask), begin, end - begin,
              [&](const float* from, float* to, const uint8_t* inside, int64_t length) {
                k.pass(from, inside, to, length);
              });
  });
}

}  // namespace zeropoint::fake_quantize
