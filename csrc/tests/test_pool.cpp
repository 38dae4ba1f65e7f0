// Pooling and means against plain loops over every window.
#include "pool/pool.h"

#include <limits>

#include "tests/check.h"

namespace zeropoint::tests {
namespace {

using pool::Span;
using pool::Windows;

struct Dimension {
  int64_t in = 1, out = 1, kernel = 1, stride = 1, padding = 0, dilation = 1;
};
struct Shape {
  const char* name;
  Dimension d[3];
};

// Output sizes are given, because ceil_mode and odd sizes make them differ from one formula.
const Shape kShapes[] = {
    {"3x3 stride 2", {{}, {9, 5, 3, 2, 1}, {8, 4, 3, 2, 1}}},
    {"2x2 ceil", {{}, {5, 3, 2, 2, 0}, {7, 4, 2, 2, 0}}},
    {"dilated", {{}, {9, 5, 3, 1, 0, 2}, {11, 5, 3, 2, 1, 2}}},
    {"3d", {{4, 3, 2, 1, 0}, {5, 3, 3, 2, 1}, {6, 6, 3, 1, 1}}},
    {"1d", {{}, {}, {40, 13, 4, 3, 2}}},
    {"more than 257 taps", {{}, {20, 2, 17, 3, 0}, {19, 3, 17, 1, 0}}},
    {"one", {{}, {1, 1, 1, 1, 0}, {1, 1, 1, 1, 0}}},
};

// The windows of one dimension, from their definition.
std::vector<Span> spans_of(const Dimension& d, bool count_padding) {
  return pool::window_spans(d.in, d.out, d.kernel, d.stride, d.padding, d.dilation, count_padding);
}

// Calls f(code) for every code of one channel that window `o` covers; returns how many positions count.
template <class T, class F>
int64_t each_code(const Shape& s, const std::vector<T>& x, int64_t image, int64_t channels, int64_t c,
                  const int64_t (&o)[3], bool count_padding, F&& f) {
  int64_t inside = 0, padded = 1;
  for (int i = 0; i < 3; ++i) {
    const Dimension& d = s.d[i];
    const int64_t start = o[i] * d.stride - d.padding;
    padded *= std::min(start + d.kernel, d.in + d.padding) - start;
  }
  for (int64_t a = 0; a < s.d[0].kernel; ++a)
    for (int64_t b = 0; b < s.d[1].kernel; ++b)
      for (int64_t e = 0; e < s.d[2].kernel; ++e) {
        const int64_t k[3] = {a, b, e};
        int64_t position = image;
        bool in_range = true;
        for (int i = 0; i < 3; ++i) {
          const Dimension& d = s.d[i];
          const int64_t place = o[i] * d.stride - d.padding + k[i] * d.dilation;
          in_range = in_range && place >= 0 && place < d.in;
          position = position * d.in + place;
        }
        if (!in_range) continue;
        ++inside;
        f(int64_t{x[static_cast<size_t>(position * channels + c)]});
      }
  return count_padding ? padded : inside;
}

template <class T>
void check_windows(Isa isa, Random& random, const Shape& s, int64_t channels, bool extreme) {
  constexpr int64_t kLow = std::numeric_limits<T>::min(), kHigh = std::numeric_limits<T>::max();
  constexpr int64_t kBatch = 2;
  const auto x = random.codes<T>(kBatch * s.d[0].in * s.d[1].in * s.d[2].in * channels, extreme ? kHigh : kLow, kHigh);
  const auto zero_point = static_cast<int32_t>(random.between(std::max<int64_t>(kLow, -1000), std::min<int64_t>(kHigh, 1000)));
  const bool dilated = s.d[2].dilation > 1;
  for (int64_t divisor : {int64_t{0}, int64_t{3}, int64_t{-7}})
    for (bool count_padding : {false, true}) {
      if (dilated && count_padding) continue;
      Windows w;
      w.batch = kBatch, w.channels = channels;
      for (int i = 0; i < 3; ++i) w.in[i] = s.d[i].in, w.spans[i] = spans_of(s.d[i], count_padding);
      std::vector<T> largest, mean;
      for (int64_t image = 0; image < kBatch; ++image)
        for (int64_t p = 0; p < w.out_positions(); ++p) {
          const int64_t o[3] = {p / s.d[2].out / s.d[1].out, p / s.d[2].out % s.d[1].out, p % s.d[2].out};
          for (int64_t c = 0; c < channels; ++c) {
            int64_t best = kLow, sum = 0;
            const int64_t count = each_code(s, x, image, channels, c, o, count_padding, [&](int64_t code) {
              best = std::max(best, code);
              sum += code - zero_point;
            });
            largest.push_back(static_cast<T>(best));
            const double y = static_cast<double>(sum) / static_cast<double>(divisor != 0 ? divisor : count);
            mean.push_back(static_cast<T>(to_code(y, zero_point, kLow, kHigh)));
          }
        }
      std::vector<T> out(largest.size());
      const std::string where = text(s.name, "channels", channels, "divisor", divisor, "bytes", sizeof(T));
      if (divisor == 0) {
        pool::max<T>(isa, w, x.data(), out.data(), in_parts());
        check_equal(out, largest, where + "max");
      }
      pool::average<T>(isa, w, x.data(), zero_point, divisor, out.data(), in_parts());
      check_equal(out, mean, where + "average");
    }
}

ZEROPOINT_TEST(pool_windows) {
  Random random(21);
  for (const Shape& shape : kShapes)
    for (int64_t channels : {1, 3, 8, 15, 17, 40, 65, 130}) {
      if (channels > 20 && shape.d[1].kernel > 16) continue;
      check_windows<uint8_t>(isa, random, shape, channels, channels == 17);
      check_windows<int8_t>(isa, random, shape, channels, channels == 17);
      if (channels <= 8) check_windows<int32_t>(isa, random, shape, channels, false);
    }
}

template <class T>
void check_adaptive(Isa isa, Random& random, int64_t in, int64_t out_size) {
  constexpr int64_t kLow = std::numeric_limits<T>::min(), kHigh = std::numeric_limits<T>::max(), kChannels = 19;
  const auto x = random.codes<T>(in * kChannels, kLow, kHigh);
  Windows w;
  w.channels = kChannels;
  w.in[2] = in;
  w.spans[2] = pool::adaptive_spans(in, out_size);
  std::vector<T> out(static_cast<size_t>(out_size * kChannels)), expected;
  pool::average<T>(isa, w, x.data(), 5, 0, out.data(), Parallel::serial());
  for (int64_t o = 0; o < out_size; ++o)
    for (int64_t c = 0; c < kChannels; ++c) {
      const int64_t begin = o * in / out_size, end = ((o + 1) * in + out_size - 1) / out_size;
      int64_t sum = 0;
      for (int64_t i = begin; i < end; ++i) sum += int64_t{x[static_cast<size_t>(i * kChannels + c)]} - 5;
      expected.push_back(
          static_cast<T>(to_code(static_cast<double>(sum) / static_cast<double>(end - begin), 5, kLow, kHigh)));
    }
  check_equal(out, expected, text("adaptive", in, "to", out_size));
}

ZEROPOINT_TEST(pool_adaptive) {
  Random random(22);
  for (int64_t in : {1, 2, 7, 49, 300, 1000})
    for (int64_t out : {1, 3, 7}) {
      check_adaptive<uint8_t>(isa, random, in, out);
      check_adaptive<int8_t>(isa, random, in, out);
      check_adaptive<int32_t>(isa, random, in, out);
    }
}

ZEROPOINT_TEST(pool_row_means) {
  Random random(23);
  for (int64_t count : {0, 1, 2, 5, 64, 1001}) {
    const auto x = random.codes<int8_t>(7 * count, -128, 127);
    std::vector<int8_t> out(7), expected;
    pool::row_means<int8_t>(x.data(), 7, count, -3, out.data(), in_parts());
    for (int64_t row = 0; row < 7; ++row) {
      int64_t sum = 0;
      for (int64_t i = 0; i < count; ++i) sum += x[static_cast<size_t>(row * count + i)] + 3;
      const double mean = count ? static_cast<double>(sum) / static_cast<double>(count) : 0.0;
      expected.push_back(static_cast<int8_t>(to_code(mean, -3, -128, 127)));
    }
    check_equal(out, expected, text("count", count));
  }
}

}  // namespace
}  // namespace zeropoint::tests
