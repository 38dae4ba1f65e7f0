// Element-wise loops against the numeric contract, one element at a time.
#include <bit>
#include <limits>

#include "elementwise/elementwise.h"
#include "tests/check.h"

namespace zeropoint::tests {
namespace {

using elementwise::Channels;
using elementwise::ChannelGrid;
using elementwise::Grid;
using elementwise::Operand;
using elementwise::Type;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kSizes[] = {0, 1, 2, 7, 15, 16, 31, 33, 63, 64, 65, 127, 129, 1030};

template <class T>
constexpr Type type_of() {
  if constexpr (std::is_same_v<T, float>) return Type::f32;
  if constexpr (std::is_same_v<T, double>) return Type::f64;
  if constexpr (std::is_same_v<T, int8_t>) return Type::i8;
  if constexpr (std::is_same_v<T, uint8_t>) return Type::u8;
  return Type::i32;
}

template <class T>
constexpr Grid whole_grid(int64_t zero_point) {
  return {zero_point, std::numeric_limits<T>::min(), std::numeric_limits<T>::max()};
}

// Ordinary values, ties, and everything that is special.
template <class T>
std::vector<T> make_values(Random& random, int64_t n) {
  const T special[] = {T(kNaN), T(kInfinity), T(-kInfinity), T(0.0), T(-0.0), std::numeric_limits<T>::max(),
                       std::numeric_limits<T>::lowest(), std::numeric_limits<T>::denorm_min(), T(4294967296.0),
                       T(-4294967296.0), T(2147483648.0), T(0.125), T(0.375), T(-0.125)};
  auto values = random.reals<T>(n, -40.0, 40.0);
  for (size_t i = 0; i < values.size(); ++i) {
    if (random.between(0, 4) == 0) values[i] = static_cast<T>(std::nearbyint(values[i]) + 0.5) / 4;
    if (random.between(0, 9) == 0) values[i] = special[random.bits() % std::size(special)];
  }
  return values;
}

template <class From, class To>
void check_quantize(Random& random, double scale, int64_t zero_point) {
  const Grid grid = whole_grid<To>(zero_point);
  for (int64_t n : kSizes) {
    const auto x = make_values<From>(random, n);
    std::vector<To> out(x.size()), expected;
    elementwise::quantize(x.data(), type_of<From>(), n, scale, grid, out.data(), type_of<To>(), in_parts());
    for (From v : x) {
      const double y = std::is_same_v<From, double> ? static_cast<double>(v) * (1.0 / scale)
                                                    : static_cast<float>(v) * (1.0f / static_cast<float>(scale));
      expected.push_back(static_cast<To>(to_code(y, zero_point, grid.low, grid.high)));
    }
    check_equal(out, expected, text("quantize", n, "scale", scale, "zero", zero_point));
    std::vector<From> back(x.size()), expected_back;
    elementwise::dequantize(out.data(), type_of<To>(), n, scale, zero_point, back.data(), type_of<From>(), in_parts());
    for (To code : out)
      expected_back.push_back(static_cast<From>(int64_t{code} - zero_point) * static_cast<From>(scale));
    check_equal(back, expected_back, text("dequantize", n, "scale", scale, "zero", zero_point));
  }
}

ZEROPOINT_TEST(elementwise_quantize) {
  Random random(31);
  for (double scale : {0.25, 0.0371, 1e-6, 3e38, 1e-38}) {
    check_quantize<float, uint8_t>(random, scale, 131);
    check_quantize<float, int8_t>(random, scale, -128);
    check_quantize<float, int32_t>(random, scale, 0);
    check_quantize<double, uint8_t>(random, scale, 0);
    check_quantize<double, int8_t>(random, scale, 17);
    check_quantize<double, int32_t>(random, scale, -5);
  }
}

template <class To>
void check_channels(Random& random, Channels view, bool floating) {
  const int64_t n = view.outer * view.count * view.inner;
  const auto x = make_values<float>(random, n);
  ChannelGrid channels;
  channels.floating = floating;
  for (int64_t c = 0; c < view.count; ++c) {
    channels.scale.push_back(static_cast<double>(static_cast<float>(random.real(0.05, 0.5))));
    channels.zero_point.push_back(floating ? static_cast<double>(static_cast<float>(random.real(-20, 20)))
                                           : static_cast<double>(random.between(0, 100)));
  }
  constexpr Grid grid = whole_grid<To>(0);
  std::vector<To> out(x.size()), expected;
  elementwise::quantize_channels(x.data(), Type::f32, view, channels, grid.low, grid.high, out.data(), type_of<To>(),
                                 in_parts());
  std::vector<float> back(x.size()), expected_back;
  for (int64_t i = 0; i < n; ++i) {
    const auto c = static_cast<size_t>(i / view.inner % view.count);
    const float inverse = 1.0f / static_cast<float>(channels.scale[c]);
    const auto zero = static_cast<float>(channels.zero_point[c]);
    const float y = x[static_cast<size_t>(i)] * inverse;
    if (floating)
      expected.push_back(static_cast<To>(to_code(std::isnan(y) ? zero : y + zero, 0, grid.low, grid.high)));
    else
      expected.push_back(static_cast<To>(to_code(y, static_cast<int64_t>(zero), grid.low, grid.high)));
    const auto code = static_cast<double>(expected.back());
    const float steps = floating ? static_cast<float>(code) - zero
                                 : static_cast<float>(code - channels.zero_point[c]);
    expected_back.push_back(steps * static_cast<float>(channels.scale[c]));
  }
  const std::string where = text(view.outer, view.count, view.inner, "floating", floating);
  check_equal(out, expected, where);
  elementwise::dequantize_channels(expected.data(), type_of<To>(), view, channels, back.data(), Type::f32, in_parts());
  check_equal(back, expected_back, where + "back");
}

ZEROPOINT_TEST(elementwise_channels) {
  Random random(32);
  for (Channels view : {Channels{1, 5, 1}, {3, 7, 1}, {2, 3, 5}, {400, 3, 2}, {2, 4, 16}, {2, 3, 40}, {1, 2, 1500}})
    for (bool floating : {false, true}) {
      check_channels<uint8_t>(random, view, floating);
      check_channels<int8_t>(random, view, floating);
      check_channels<int32_t>(random, view, floating);
    }
}

float value_of_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return fraction ? kNaN : sign * kInfinity;
  return sign * (exponent ? std::ldexp(1024.0f + static_cast<float>(fraction), exponent - 25)
                          : std::ldexp(static_cast<float>(fraction), -24));
}

ZEROPOINT_TEST(elementwise_half) {
  const auto& k = elementwise::kernels();
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  std::vector<float> values(all.size()), expected;
  k.from_half(all.data(), values.data(), 65536);
  for (uint16_t bits : all) expected.push_back(value_of_half(bits));
  check_equal(values, expected, "from_half");
  k.from_bfloat16(all.data(), values.data(), 65536);
  for (uint16_t bits : all) expected[bits] = std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  check_equal(values, expected, "from_bfloat16");

  // Each number, the middle to the next, and what lies just below and above the middle.
  const auto check_rounding = [&](auto value_of, uint16_t infinity, auto narrow, const char* where) {
    std::vector<float> x;
    std::vector<uint16_t> rounded, out;
    for (uint16_t bits = 0; bits < infinity; ++bits)
      for (uint16_t sign : {0, 0x8000}) {
        const double low = value_of(bits);
        // The number behind the largest one would be as far away as the one before it.
        const double high = bits + 1 < infinity ? double{value_of(static_cast<uint16_t>(bits + 1))}
                                                : 2 * low - value_of(static_cast<uint16_t>(bits - 1));
        const auto middle = static_cast<float>(low + (high - low) / 2);
        const auto up = static_cast<uint16_t>(bits + 1);
        const float points[] = {static_cast<float>(low), std::nextafter(middle, 0.0f), middle,
                                std::nextafter(middle, kInfinity)};
        const uint16_t codes[] = {bits, bits, bits % 2 ? up : bits, up};
        for (int i = 0; i < 4; ++i) {
          x.push_back(sign ? -points[i] : points[i]);
          rounded.push_back(static_cast<uint16_t>(codes[i] | sign));
        }
      }
    for (float v : {kInfinity, -kInfinity, std::numeric_limits<float>::max()}) x.push_back(v);
    for (uint16_t bits : {infinity, static_cast<uint16_t>(infinity | 0x8000), infinity}) rounded.push_back(bits);
    out.resize(x.size());
    narrow(x.data(), out.data(), static_cast<int64_t>(x.size()));
    check_equal(out, rounded, where);
    const float nan = kNaN;
    uint16_t bits = 0;
    narrow(&nan, &bits, 1);
    ZEROPOINT_CHECK((bits & infinity) == infinity && (bits & ~(infinity | 0x8000)) != 0, where << " NaN " << bits);
  };
  check_rounding(value_of_half, 0x7c00, k.to_half, "to_half");
  const auto value_of_bfloat16 = [](uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); };
  check_rounding(value_of_bfloat16, 0x7f80, k.to_bfloat16, "to_bfloat16");
}

template <class A, class B, class To>
void check_pair(Random& random, const std::vector<int64_t>& sizes, const std::vector<int64_t>& a_strides,
                const std::vector<int64_t>& b_strides, float a_factor, float b_factor, float factor) {
  const auto reach = [&](const std::vector<int64_t>& strides) {
    int64_t last = 0;
    for (size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides[d];
    return last + 1;
  };
  const auto a = random.codes<A>(reach(a_strides), whole_grid<A>(0).low, whole_grid<A>(0).high);
  const auto b = random.codes<B>(reach(b_strides), whole_grid<B>(0).low, whole_grid<B>(0).high);
  const int64_t a_zero = 7, b_zero = std::is_signed_v<B> ? -128 : 255;
  const Grid grid = {std::is_signed_v<To> ? -11 : 90, std::is_signed_v<To> ? -100 : 90, 120};
  const Operand left = {a.data(), type_of<A>(), a_zero, a_strides}, right = {b.data(), type_of<B>(), b_zero, b_strides};
  int64_t total = 1;
  for (int64_t size : sizes) total *= size;
  std::vector<To> sum(static_cast<size_t>(total)), product(sum.size()), expected_sum, expected_product;
  elementwise::add(sizes, left, a_factor, right, b_factor, grid, sum.data(), type_of<To>(), in_parts());
  elementwise::mul(sizes, left, right, factor, grid, product.data(), type_of<To>(), in_parts());
  for (int64_t i = 0; i < total; ++i) {
    int64_t rest = i, in_a = 0, in_b = 0;
    for (size_t d = sizes.size(); d-- > 0; rest /= sizes[d]) {
      in_a += rest % sizes[d] * a_strides[d];
      in_b += rest % sizes[d] * b_strides[d];
    }
    const int64_t p = int64_t{a[static_cast<size_t>(in_a)]} - a_zero, q = int64_t{b[static_cast<size_t>(in_b)]} - b_zero;
    const float from_a = static_cast<float>(p) * a_factor, from_b = static_cast<float>(q) * b_factor;
    expected_sum.push_back(static_cast<To>(to_code(from_a + from_b, grid.zero_point, grid.low, grid.high)));
    const float y = static_cast<float>(static_cast<double>(p) * static_cast<double>(q)) * factor;
    expected_product.push_back(static_cast<To>(to_code(y, grid.zero_point, grid.low, grid.high)));
  }
  const std::string where = text(total, "factors", a_factor, b_factor, factor);
  check_equal(sum, expected_sum, "sum " + where);
  check_equal(product, expected_product, "product " + where);
}

template <class A, class B, class To>
void check_pairs(Random& random) {
  constexpr float kFactors[][3] = {{0.5f, 0.25f, 0.01f}, {-0.37f, 1.9f, 0.5f}, {3e5f, 2e5f, 300.0f},
                                   {kInfinity, 1.0f, kNaN}, {kNaN, -kInfinity, kInfinity}};
  for (const auto& f : kFactors) {
    for (int64_t n : {1, 5, 16, 64, 100, 700}) check_pair<A, B, To>(random, {n}, {1}, {1}, f[0], f[1], f[2]);
    check_pair<A, B, To>(random, {3, 70}, {70, 1}, {0, 1}, f[0], f[1], f[2]);
    check_pair<A, B, To>(random, {3, 70}, {1, 0}, {70, 1}, f[0], f[1], f[2]);
    check_pair<A, B, To>(random, {3, 70}, {70, 1}, {1, 0}, f[0], f[1], f[2]);
    check_pair<A, B, To>(random, {4, 3, 5}, {15, 1, 3}, {0, 5, 1}, f[0], f[1], f[2]);
  }
}

ZEROPOINT_TEST(elementwise_add_and_mul) {
  Random random(33);
  check_pairs<uint8_t, uint8_t, uint8_t>(random);
  check_pairs<int8_t, int8_t, int8_t>(random);
  check_pairs<uint8_t, int8_t, int8_t>(random);
  check_pairs<int32_t, uint8_t, uint8_t>(random);
  check_pairs<int32_t, int32_t, int32_t>(random);
}

ZEROPOINT_TEST(elementwise_affine) {
  Random random(34);
  constexpr float kParameters[][2] = {{0.5f, 0.0f}, {-3.7f, 100.25f}, {1e6f, 1.0f}, {kNaN, 0.0f}, {kInfinity, kNaN}};
  for (const auto& [factor, offset] : kParameters)
    for (int64_t n : kSizes) {
      const auto x = random.codes<int8_t>(n, -128, 127);
      std::vector<uint8_t> out(x.size()), expected;
      elementwise::affine(x.data(), Type::i8, n, -4, factor, offset, {3, 0, 250}, out.data(), Type::u8, in_parts());
      for (int8_t code : x)
        expected.push_back(static_cast<uint8_t>(to_code(static_cast<float>(code + 4) * factor + offset, 3, 0, 250)));
      check_equal(out, expected, text("affine", n, factor, offset));
    }
  for (Channels view : {Channels{40, 3, 1}, {1, 5, 70}, {2, 3, 4}}) {
    const int64_t n = view.outer * view.count * view.inner;
    const auto x = random.codes<uint8_t>(n, 0, 255);
    const auto zero = random.codes<int64_t>(view.count, 0, 255);
    const auto factor = random.reals<float>(view.count, -2, 2), offset = random.reals<float>(view.count, -90, 90);
    std::vector<int8_t> out(x.size()), expected;
    elementwise::affine_channels(x.data(), Type::u8, view, zero, factor, offset, {-9, -128, 127}, out.data(), Type::i8,
                                 in_parts());
    for (int64_t i = 0; i < n; ++i) {
      const auto c = static_cast<size_t>(i / view.inner % view.count);
      const float y = static_cast<float>(x[static_cast<size_t>(i)] - zero[c]) * factor[c] + offset[c];
      expected.push_back(static_cast<int8_t>(to_code(y, -9, -128, 127)));
    }
    check_equal(out, expected, text("affine_channels", view.count, view.inner));
  }
}

ZEROPOINT_TEST(elementwise_lookup) {
  Random random(35);
  for (int64_t n : kSizes) {
    const auto codes = random.codes<uint8_t>(n, 0, 255);
    const auto bytes = random.codes<uint8_t>(256, 0, 255);
    const auto words = random.codes<int32_t>(256, INT32_MIN, INT32_MAX);
    for (Type type : {Type::u8, Type::i8}) {
      const uint8_t sign = type == Type::i8 ? 0x80 : 0;
      std::vector<uint8_t> out(codes.size()), expected;
      std::vector<int32_t> wide(codes.size()), expected_wide;
      elementwise::lookup(codes.data(), type, n, bytes.data(), out.data(), Type::u8, in_parts());
      elementwise::lookup(codes.data(), type, n, words.data(), wide.data(), Type::i32, in_parts());
      for (uint8_t code : codes) {
        expected.push_back(bytes[code ^ sign]);
        expected_wide.push_back(words[code ^ sign]);
      }
      check_equal(out, expected, text("bytes", n));
      check_equal(wide, expected_wide, text("words", n));
    }
  }
}

ZEROPOINT_TEST(elementwise_finite_range) {
  Random random(36);
  for (int64_t n : kSizes) {
    const auto x = make_values<float>(random, n);
    double low = 0, high = 0, expected_low = kInfinity, expected_high = -kInfinity;
    elementwise::finite_range(x.data(), Type::f32, n, &low, &high, in_parts());
    for (float v : x)
      if (std::isfinite(v))
        expected_low = std::min<double>(expected_low, v), expected_high = std::max<double>(expected_high, v);
    if (expected_low > expected_high) expected_low = expected_high = 0;
    ZEROPOINT_CHECK(low == expected_low && high == expected_high, n << ": " << low << " " << high);
  }
}

}  // namespace
}  // namespace zeropoint::tests
