// Convolution against seven plain loops.
#include <algorithm>
#include <cstring>
#include <limits>

#include "conv/conv.h"
#include "conv/layout.h"
#include "tests/check.h"

namespace zeropoint::tests {
namespace {

using conv::Geometry;
using conv::Kind;
using conv::Requantize;

struct Dimension {
  int64_t in = 1, kernel = 1, stride = 1, dilation = 1, before = 0, after = 0;
};

struct Shape {
  const char* name;
  int64_t batch, groups, group_channels, group_columns;
  Dimension d[3];

  Geometry geometry() const {
    Geometry g;
    g.weight.groups = groups;
    g.weight.group_channels = group_channels;
    g.weight.out_channels = groups * group_columns;
    g.batch = batch;
    for (int i = 0; i < 3; ++i) {
      g.weight.kernel[i] = d[i].kernel;
      g.in[i] = d[i].in;
      g.stride[i] = d[i].stride;
      g.dilation[i] = d[i].dilation;
      g.padding[i] = d[i].before;
      g.out[i] = (d[i].in + d[i].before + d[i].after - d[i].dilation * (d[i].kernel - 1) - 1) / d[i].stride + 1;
    }
    return g;
  }
};

const Shape kShapes[] = {
    {"1d", 2, 1, 5, 7, {{}, {}, {19, 3, 1, 1, 1, 1}}},
    {"1d same, even kernel", 1, 1, 4, 16, {{}, {}, {12, 4, 1, 1, 1, 2}}},
    {"1x1 in place", 2, 1, 24, 40, {{}, {5, 1}, {7, 1}}},
    {"1x1 of 12", 2, 1, 12, 19, {{}, {5, 1}, {7, 1}}},
    {"1x1 odd channels", 1, 1, 13, 33, {{}, {5, 1}, {7, 1}}},
    {"1x1 stride", 1, 1, 16, 17, {{}, {9, 1, 2}, {8, 1, 3}}},
    {"3x3", 2, 1, 8, 20, {{}, {9, 3, 1, 1, 1, 1}, {11, 3, 1, 1, 1, 1}}},
    {"7x7 of 3", 1, 1, 3, 16, {{}, {20, 7, 2, 1, 3, 3}, {23, 7, 2, 1, 3, 3}}},
    {"3x3 dilated", 1, 1, 6, 5, {{}, {12, 3, 1, 2, 2, 2}, {13, 3, 2, 3, 1, 4}}},
    {"padding beyond the kernel", 1, 1, 2, 3, {{}, {3, 2, 1, 1, 4, 3}, {2, 2, 1, 1, 5, 2}}},
    {"one code", 1, 1, 1, 1, {{}, {1, 1}, {1, 1}}},
    {"deep, 17 channels", 1, 1, 17, 35, {{}, {6, 5, 1, 1, 2, 2}, {6, 5, 1, 1, 2, 2}}},
    {"3d", 1, 1, 3, 6, {{5, 2, 1, 1, 1, 0}, {6, 3, 2, 1, 1, 1}, {7, 3, 1, 2, 2, 2}}},
    {"several strips", 2, 1, 20, 18, {{}, {31, 3, 1, 1, 1, 1}, {30, 3, 1, 1, 1, 1}}},
    {"several strips, 3d", 2, 1, 9, 5, {{6, 3, 1, 1, 1, 1}, {14, 3, 1, 1, 1, 1}, {12, 3, 1, 1, 1, 1}}},
    {"strips within a line, 1d", 2, 1, 16, 5, {{}, {}, {1300, 3, 1, 4, 4, 4}}},
    {"strips within a line, 2d", 1, 1, 20, 2, {{}, {3, 3, 1, 1, 1, 1}, {1401, 3, 4, 1, 1, 1}}},
    {"3x3 of 64 channels", 2, 1, 64, 33, {{}, {4, 3, 1, 1, 1, 1}, {21, 3, 1, 1, 1, 1}}},
    {"3x3 stride, 64 channels, short lines", 1, 1, 64, 20, {{}, {12, 3, 2, 1, 1, 1}, {12, 3, 2, 1, 1, 1}}},
    {"64 channels, several strips", 1, 1, 64, 3, {{}, {41, 3, 1, 1, 1, 1}, {29, 1}}},
    {"3x3 of 64 channels, no border, taps apart", 1, 1, 64, 18, {{}, {5, 3}, {23, 3, 1, 2}}},
    {"groups of 64", 1, 2, 64, 18, {{}, {3, 3, 1, 1, 1, 1}, {10, 3, 1, 1, 1, 1}}},
    {"1x1 of 64", 1, 1, 64, 40, {{}, {9, 1}, {10, 1}}},
    {"1x1 stride, 64 channels", 1, 1, 64, 40, {{}, {9, 1, 2}, {21, 1, 2}}},
    {"3d of 64 channels", 1, 1, 64, 17, {{4, 2, 1, 1, 1, 0}, {5, 3, 1, 1, 1, 1}, {9, 3, 1, 1, 1, 1}}},
    {"no border", 2, 1, 12, 17, {{}, {9, 3}, {10, 3, 2}}},
    {"taps apart", 1, 1, 8, 5, {{}, {9, 3, 1, 2, 2, 2}, {11, 3, 2, 2, 2, 2}}},
    {"lines too long to copy", 1, 1, 4, 3, {{}, {3, 3, 1, 1, 1, 1}, {1, 2, 1, 1 << 25, 1 << 25}}},
    {"3d, taps apart in depth", 1, 1, 8, 5, {{7, 2, 1, 3, 1, 2}, {6, 3, 1, 2, 2, 2}, {5, 3, 1, 1, 1, 1}}},
    {"3d, taps apart, no border", 1, 1, 8, 5, {{7, 2, 1, 3}, {6, 2, 1, 2}, {5, 3}}},
    {"3x3 of 16 channels", 2, 1, 16, 40, {{}, {14, 3, 1, 1, 1, 1}, {13, 3, 1, 1, 1, 1}}},
    {"3x3 of 48 channels, several blocks", 3, 1, 48, 18, {{}, {17, 3, 1, 1, 1, 1}, {16, 3, 1, 1, 0, 2}}},
    {"3x3 of 16 channels, 70 columns", 1, 1, 16, 70, {{}, {13, 3, 1, 1, 1, 1}, {9, 3, 1, 1, 1, 1}}},
    {"3x3 stride, 70 columns", 1, 1, 16, 70, {{}, {15, 3, 2, 1, 1, 1}, {14, 3, 2, 1, 1, 1}}},
    {"1x1 of 68, 70 columns", 1, 1, 68, 70, {{}, {9, 1}, {7, 1}}},
    {"3x3 of 32 channels, no border", 1, 1, 32, 16, {{}, {9, 3}, {11, 3}}},
    {"3x3, padding beyond the kernel", 1, 1, 16, 3, {{}, {4, 3, 1, 1, 4, 5}, {3, 3, 1, 1, 6, 2}}},
    {"3x3 as deep as words go", 1, 1, 1792, 2, {{}, {6, 3, 1, 1, 1, 1}, {6, 3, 1, 1, 1, 1}}},
    {"3x3 deeper", 1, 1, 1808, 2, {{}, {6, 3, 1, 1, 1, 1}, {6, 3, 1, 1, 1, 1}}},
    {"lines of 9 codes, stride", 2, 1, 3, 33, {{}, {15, 3, 2, 1, 1, 1}, {17, 3, 2, 1, 1, 1}}},
    {"lines of 3 codes, several strips", 1, 1, 1, 20, {{}, {40, 3, 1, 1, 1, 1}, {33, 3, 1, 1, 1, 1}}},
    {"lines of 5 codes", 1, 1, 1, 7, {{}, {9, 5, 1, 1, 2, 2}, {11, 5, 2, 1, 2, 2}}},
    {"lines of 9 codes, no border", 1, 1, 3, 8, {{}, {9, 3}, {10, 3}}},
    {"lines of 9 codes, taps apart", 1, 1, 3, 8, {{}, {9, 3, 1, 2, 2, 2}, {9, 3, 1, 2, 2, 2}}},
    {"lines of 10 codes", 2, 1, 10, 18, {{}, {9, 3, 1, 2, 2, 2}, {7, 1}}},
    {"1x1 of 10", 1, 1, 10, 70, {{}, {8, 1}, {9, 1}}},
    {"lines of 9 codes, 3d", 1, 1, 3, 4, {{5, 2, 1, 1, 1, 0}, {6, 3, 1, 1, 1, 1}, {7, 3, 1, 1, 1, 1}}},
    {"groups of 10, 1x1", 1, 3, 10, 5, {{}, {6, 1}, {7, 1, 2}}},
    {"grouped", 2, 3, 4, 5, {{}, {7, 3, 1, 1, 1, 1}, {6, 3, 2, 1, 1, 1}}},
    {"grouped 1x1", 1, 4, 8, 16, {{}, {5, 1}, {6, 1}}},
    {"groups of different weights", 1, 8, 2, 1, {{}, {5, 1}, {6, 1}}},
    {"grouped 3d", 1, 2, 3, 2, {{4, 2, 2, 1, 1, 1}, {5, 3, 1, 1, 1, 1}, {5, 2, 1, 2, 1, 1}}},
    {"depthwise 3x3", 2, 67, 1, 1, {{}, {9, 3, 1, 1, 1, 1}, {10, 3, 1, 1, 1, 1}}},
    {"depthwise 3x3 stride", 1, 112, 1, 1, {{}, {12, 3, 2, 1, 1, 1}, {13, 3, 2, 1, 1, 1}}},
    {"depthwise 5x5", 1, 48, 1, 1, {{}, {8, 5, 1, 1, 2, 2}, {9, 5, 1, 1, 2, 2}}},
    {"depthwise 5x5 stride", 1, 17, 1, 1, {{}, {11, 5, 2, 1, 2, 2}, {10, 5, 2, 1, 1, 2}}},
    {"depthwise 7x7", 1, 33, 1, 1, {{}, {8, 7, 1, 1, 3, 3}, {9, 7, 1, 1, 3, 3}}},
    {"depthwise 1d", 1, 20, 1, 1, {{}, {}, {40, 5, 1, 1, 2, 2}}},
    {"depthwise 1d dilated", 2, 5, 1, 1, {{}, {}, {33, 4, 3, 2, 3, 3}}},
    {"depthwise 2x4", 1, 64, 1, 1, {{}, {7, 2, 1, 1, 0, 1}, {9, 4, 3, 1, 2, 1}}},
    {"depthwise 3x2", 1, 40, 1, 1, {{}, {7, 3, 1, 1, 1, 1}, {9, 2, 1, 1, 0, 1}}},
    {"depthwise 5x6", 1, 16, 1, 1, {{}, {9, 5, 2, 1, 2, 2}, {11, 6, 1, 1, 3, 2}}},
    {"depthwise 5x5 dilated", 1, 32, 1, 1, {{}, {13, 5, 1, 2, 4, 4}, {15, 5, 2, 2, 4, 4}}},
    {"depthwise dilated", 1, 19, 1, 1, {{}, {11, 3, 1, 2, 2, 2}, {12, 3, 1, 3, 3, 3}}},
    {"depthwise 3d", 1, 18, 1, 1, {{4, 2, 1, 1, 1, 1}, {5, 3, 1, 1, 1, 1}, {6, 3, 2, 1, 1, 1}}},
    {"depthwise multiplier", 1, 11, 1, 3, {{}, {6, 3, 1, 1, 1, 1}, {7, 3, 1, 1, 1, 1}}},
    {"depthwise long rows", 1, 16, 1, 1, {{}, {3, 3, 1, 1, 1, 1}, {600, 3, 1, 1, 1, 1}}},
    {"depthwise stride beyond the input", 1, 16, 1, 1, {{}, {3, 3, 1, 1, 1, 1}, {5, 3, int64_t{1} << 30, 1, 1, 1}}},
    {"depthwise of no tap inside", 1, 3, 1, 1, {{}, {1, 2, 1, 1, 2, 2}, {1, 2, 1, 1, 2, 2}}},
};

// x as the reference reads it: code minus zero point, 0 outside.
struct Data {
  Geometry g;
  bool x_signed;
  int32_t zero_point;
  std::vector<uint8_t> x;
  std::vector<int8_t> weight;
  std::vector<int32_t> weight_zero_points;
  std::vector<float> multiplier, offset;

  // Weights of either kind that trained and untrained networks have, or the worst ones.
  enum Weights { uniform, bell, lowest };

  Data(const Shape& shape, Random& random, bool with_sign, Weights kind) : g(shape.geometry()), x_signed(with_sign) {
    zero_point = static_cast<int32_t>(random.between(0, 255)) - (with_sign ? 128 : 0);
    const auto& w = g.weight;
    x = random.codes<uint8_t>(g.batch * g.in_positions() * w.in_channels(), 0, 255);
    weight = random.codes<int8_t>(w.out_channels * w.depth(), -128, kind == lowest ? -128 : 127);
    for (int8_t& code : weight) {
      int64_t sum = 0;
      for (int i = 0; kind == bell && i < 12; ++i) sum += random.between(-19, 19);
      if (kind == bell) code = static_cast<int8_t>(std::clamp<int64_t>(sum, -128, 127));
    }
    if (kind == lowest) std::fill(x.begin(), x.end(), with_sign ? 127 : 255), zero_point = with_sign ? -128 : 0;
    weight_zero_points = random.codes<int32_t>(w.out_channels, -128, 127);
    multiplier = random.reals<float>(w.out_channels, 1e-4, 2e-3);
    offset = random.reals<float>(w.out_channels, -50, 50);
  }

  // The input position that a tap of an output position reads, or -1 outside.
  int64_t position(int64_t image, const int64_t (&o)[3], const int64_t (&k)[3]) const {
    int64_t found = image;
    for (int i = 0; i < 3; ++i) {
      const int64_t place = o[i] * g.stride[i] - g.padding[i] + k[i] * g.dilation[i];
      if (place < 0 || place >= g.in[i]) return -1;
      found = found * g.in[i] + place;
    }
    return found;
  }

  std::vector<uint8_t> expected(bool shifted, bool with_offset, const Requantize& to) const {
    const auto& w = g.weight;
    std::vector<uint8_t> out;
    std::vector<int64_t> sums(static_cast<size_t>(w.out_channels));
    for (int64_t image = 0; image < g.batch; ++image)
      for (int64_t p = 0; p < g.out_positions(); ++p) {
        const int64_t o[3] = {p / g.out[2] / g.out[1], p / g.out[2] % g.out[1], p % g.out[2]};
        std::fill(sums.begin(), sums.end(), 0);
        for (int64_t t = 0; t < w.taps(); ++t) {
          const int64_t k[3] = {t / w.kernel[2] / w.kernel[1], t / w.kernel[2] % w.kernel[1], t % w.kernel[2]};
          const int64_t from = position(image, o, k);
          if (from < 0) continue;
          for (int64_t n = 0; n < w.out_channels; ++n) {
            const int64_t first = n / w.group_columns() * w.group_channels;
            const uint8_t* codes = &x[static_cast<size_t>(from * w.in_channels() + first)];
            const int8_t* values = &weight[static_cast<size_t>(n * w.depth() + t)];
            const int32_t zero = shifted ? weight_zero_points[static_cast<size_t>(n)] : 0;
            int64_t sum = 0;
            for (int64_t c = 0; c < w.group_channels; ++c) {
              const int32_t code = x_signed ? static_cast<int8_t>(codes[c]) : int32_t{codes[c]};
              sum += (code - zero_point) * (values[c * w.taps()] - zero);
            }
            sums[static_cast<size_t>(n)] += sum;
          }
        }
        for (size_t n = 0; n < sums.size(); ++n) {
          const float y = scaled(sums[n], multiplier[n], with_offset ? &offset[n] : nullptr);
          out.push_back(static_cast<uint8_t>(to_code(y, to.out_zero_point, to.out_min, to.out_max)));
        }
      }
    return out;
  }

  std::vector<uint8_t> run(Isa isa, bool shifted, const Requantize& to, const AlignedBytes& packed) const {
    std::vector<uint8_t> out(static_cast<size_t>(g.batch * g.out_positions() * g.weight.out_channels), 99);
    conv::run(isa, g, x.data(), x_signed, zero_point, weight.data(), shifted ? weight_zero_points.data() : nullptr,
              packed.empty() ? nullptr : packed.data(), static_cast<int64_t>(packed.size()), to, out.data(),
              in_parts());
    return out;
  }

  Requantize requantize(bool with_offset, bool out_signed) const {
    Requantize to;
    to.multiplier = multiplier.data();
    to.offset = with_offset ? offset.data() : nullptr;
    to.out_signed = out_signed;
    to.out_zero_point = out_signed ? 3 : 131;
    to.out_min = out_signed ? -128 : 131;  // the second has a ReLU in it
    to.out_max = out_signed ? 100 : 255;
    return to;
  }
};

ZEROPOINT_TEST(conv_shapes) {
  Random random(11);
  for (const Shape& shape : kShapes)
    for (int variant = 0; variant < 8; ++variant) {
      const bool x_signed = variant & 1, shifted = variant & 2, with_offset = variant & 4;
      const Data data(shape, random, x_signed, (variant ^ variant >> 1) & 1 ? Data::bell : Data::uniform);
      const Requantize to = data.requantize(with_offset, x_signed != with_offset);
      const auto packed = conv::pack(isa, data.weight.data(), data.g.weight, in_parts());
      const auto expected = data.expected(shifted, with_offset, to);
      const std::string where = text(shape.name, "variant", variant);
      check_equal(data.run(isa, shifted, to, packed), expected, where);
      if (variant == 5) check_equal(data.run(isa, shifted, to, {}), expected, where + "packed anew");
    }
}

ZEROPOINT_TEST(conv_worst_magnitudes) {
  Random random(12);
  for (const Shape& shape : kShapes)
    for (bool x_signed : {false, true}) {
      const Data data(shape, random, x_signed, Data::lowest);
      const Requantize to = data.requantize(true, true);
      for (bool shifted : {false, true})
        check_equal(data.run(isa, shifted, to, {}), data.expected(shifted, true, to), shape.name);
    }
}

ZEROPOINT_TEST(conv_steps_that_are_no_numbers) {
  Random random(13);
  for (const Shape& shape : kShapes) {
    if (shape.batch != 1) continue;
    Data data(shape, random, false, Data::bell);
    data.multiplier[0] = std::numeric_limits<float>::infinity();
    data.multiplier.back() = std::numeric_limits<float>::quiet_NaN();
    data.offset[0] = -std::numeric_limits<float>::infinity();
    const Requantize to = data.requantize(true, false);
    check_equal(data.run(isa, false, to, {}), data.expected(false, true, to), shape.name);
  }
}

// Bytes whose header does not fit are ignored; others may give any codes, and stay within the buffers.
ZEROPOINT_TEST(conv_damaged_bytes) {
  Random random(14);
  for (const Shape& shape : kShapes) {
    const Data data(shape, random, false, Data::bell);
    if (data.x.size() > 2000) continue;
    const Requantize to = data.requantize(false, false);
    const auto expected = data.expected(false, false, to);
    const auto packed = conv::pack(isa, data.weight.data(), data.g.weight, Parallel::serial());
    for (size_t at = 0; at < 128; at += 3) {
      auto damaged = packed;
      damaged[at] ^= 0x10;
      check_equal(data.run(isa, false, to, damaged), expected, text(shape.name, "header byte", at));
    }
    for (size_t cut : {size_t{1}, size_t{64}, packed.size() / 2, packed.size() - 1}) {
      const AlignedBytes damaged(packed.begin(), packed.end() - static_cast<ptrdiff_t>(cut));
      check_equal(data.run(isa, false, to, damaged), expected, text(shape.name, "cut", cut));
    }
    for (int round = 0; round < 20; ++round) {
      auto damaged = packed;
      for (int i = 0; i < 4; ++i) {
        const size_t reach = round % 2 ? std::min<size_t>(packed.size(), 320) : packed.size();
        damaged[128 + random.bits() % (reach - 128)] = static_cast<uint8_t>(random.bits());
      }
      data.run(isa, false, to, damaged);
    }
  }
}

ZEROPOINT_TEST(conv_layout) {
  Random random(15);
  for (int64_t channels : {1, 2, 3, 4, 5, 33})
    for (int64_t width : {1, 15, 31, 32, 33, 70})
      for (bool dense : {true, false}) {
        const int64_t step = dense ? 1 : 2, height = 3, batch = 2;
        conv::Strided x;
        x.batch = batch, x.channels = channels;
        x.size[1] = height, x.size[2] = width;
        x.stride[2] = step, x.stride[1] = width * step;
        x.channel_stride = height * width * step, x.batch_stride = channels * x.channel_stride;
        x.stride[0] = x.channel_stride;
        const auto codes = random.codes<uint8_t>(batch * x.batch_stride - step + 1, 0, 255);
        x.data = codes.data();
        std::vector<uint8_t> out(static_cast<size_t>(batch * channels * height * width)), expected;
        conv::to_channels_last(x, out.data(), in_parts());
        for (int64_t n = 0; n < batch; ++n)
          for (int64_t h = 0; h < height; ++h)
            for (int64_t w = 0; w < width; ++w)
              for (int64_t c = 0; c < channels; ++c)
                expected.push_back(codes[static_cast<size_t>(n * x.batch_stride + c * x.channel_stride +
                                                             h * x.stride[1] + w * step)]);
        check_equal(out, expected, text("channels", channels, "width", width));
      }
}

}  // namespace
}  // namespace zeropoint::tests
