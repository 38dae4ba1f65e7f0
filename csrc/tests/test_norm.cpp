// Layer and group norm against docs/design.md, "Numeric contract" 8, 10 and 11.
#include "norm/norm.h"

#include "tests/check.h"

namespace zeropoint::tests {
namespace {

using elementwise::Grid;
using elementwise::Type;
using norm::Input;

struct Statistics {
  int64_t centre;
  double mean, var;
};

Statistics statistics_of(const std::vector<int64_t>& codes, int64_t zero_point) {
  int64_t sum = 0, first = 0, second = 0;
  for (int64_t code : codes) sum += code - zero_point;
  const auto n = static_cast<double>(codes.size());
  const auto k = static_cast<int64_t>(std::nearbyint(static_cast<double>(sum) / n));
  for (int64_t code : codes) {
    const int64_t step = code - zero_point - k;
    first += step;
    second += step * step;
  }
  const auto d1 = static_cast<double>(first);
  return {zero_point + k, d1 / n, std::max(0.0, (static_cast<double>(second) - d1 * d1 / n) / n)};
}

constexpr double kEps = 1e-5;

template <class T>
constexpr Type type_of() {
  return std::is_same_v<T, int8_t> ? Type::i8 : std::is_same_v<T, uint8_t> ? Type::u8 : Type::i32;
}

template <class T>
void check_layer_norm(Random& random, int64_t rows, int64_t size, int64_t low, int64_t high) {
  const auto x = random.codes<T>(rows * size, low, high);
  const Input input = {x.data(), type_of<T>(), 0.031, 4};
  const auto gain = random.reals<float>(size, 5, 30), shift = random.reals<float>(size, -20, 20);
  const Grid grid = {1, -128, 127};
  std::vector<int8_t> out(x.size()), expected;
  norm::layer_norm(input, rows, size, kEps, gain, shift, grid, out.data(), Type::i8, in_parts());
  for (int64_t row = 0; row < rows; ++row) {
    const Statistics s = statistics_of({x.begin() + row * size, x.begin() + (row + 1) * size}, 4);
    const double a = 1.0 / std::sqrt(s.var * (0.031 * 0.031) + kEps);
    const auto m = static_cast<float>(a * 0.031), b = static_cast<float>(0.0 - s.mean * 0.031 * a);
    for (int64_t j = 0; j < size; ++j) {
      const auto step = static_cast<float>(int64_t{x[static_cast<size_t>(row * size + j)]} - s.centre);
      const float normal = step * m + b;
      const float y = normal * gain[static_cast<size_t>(j)] + shift[static_cast<size_t>(j)];
      expected.push_back(static_cast<int8_t>(to_code(y, 1, -128, 127)));
    }
  }
  check_equal(out, expected, text("layer norm", rows, "of", size, "bytes", sizeof(T)));
}

ZEROPOINT_TEST(norm_layer) {
  Random random(41);
  for (int64_t size : {1, 2, 15, 64, 100, 769, 5000}) {
    check_layer_norm<uint8_t>(random, 3, size, 0, 255);
    check_layer_norm<int8_t>(random, 3, size, -128, 127);
    check_layer_norm<uint8_t>(random, 2, size, 255, 255);
    check_layer_norm<int8_t>(random, 2, size, -128, -128);
    check_layer_norm<int32_t>(random, 2, size, -3000, 3000);
  }
}

template <class T>
void check_group_norm(Random& random, norm::Shape shape, int64_t groups, int64_t low, int64_t high) {
  const int64_t sample = shape.channels * shape.spatial, members = shape.channels / groups;
  const auto x = random.codes<T>(shape.batch * sample, low, high);
  const Input input = {x.data(), type_of<T>(), 0.02, -3};
  const auto weight = random.reals<double>(shape.channels, -2, 2), bias = random.reals<double>(shape.channels, -1, 1);
  std::vector<uint8_t> out(x.size()), expected(x.size());
  norm::group_norm(input, shape, groups, kEps, weight, bias, 0.04, {128, 0, 255}, out.data(), Type::u8, in_parts());
  const auto place = [&](int64_t n, int64_t c, int64_t i) {
    return static_cast<size_t>(n * sample + (shape.channels_last ? i * shape.channels + c : c * shape.spatial + i));
  };
  for (int64_t n = 0; n < shape.batch; ++n)
    for (int64_t g = 0; g < groups; ++g) {
      std::vector<int64_t> codes;
      for (int64_t c = g * members; c < (g + 1) * members; ++c)
        for (int64_t i = 0; i < shape.spatial; ++i) codes.push_back(x[place(n, c, i)]);
      const Statistics s = statistics_of(codes, -3);
      for (int64_t c = g * members; c < (g + 1) * members; ++c) {
        const double a = weight[static_cast<size_t>(c)] / std::sqrt(s.var * (0.02 * 0.02) + kEps);
        const auto m = static_cast<float>(a * 0.02 / 0.04);
        const auto b = static_cast<float>((bias[static_cast<size_t>(c)] - s.mean * 0.02 * a) / 0.04);
        for (int64_t i = 0; i < shape.spatial; ++i) {
          const float y = static_cast<float>(int64_t{x[place(n, c, i)]} - s.centre) * m + b;
          expected[place(n, c, i)] = static_cast<uint8_t>(to_code(y, 128, 0, 255));
        }
      }
    }
  check_equal(out, expected, text("group norm", shape.channels, shape.spatial, "groups", groups, shape.channels_last));
}

ZEROPOINT_TEST(norm_group) {
  Random random(42);
  for (bool channels_last : {false, true})
    for (auto [channels, groups] : {std::pair<int64_t, int64_t>{1, 1}, {6, 3}, {6, 6}, {35, 5}, {64, 2}})
      for (int64_t spatial : {1, 9, 100}) {
        const norm::Shape shape = {4, channels, spatial, channels_last};
        check_group_norm<uint8_t>(random, shape, groups, 0, 255);
        check_group_norm<int8_t>(random, shape, groups, -128, 127);
        check_group_norm<int32_t>(random, shape, groups, -4000, 4000);
      }
  // More rows than the 32-bit sums of a column hold.
  check_group_norm<uint8_t>(random, {1, 2, 70000, true}, 2, 255, 255);
  check_group_norm<int8_t>(random, {1, 2, 40000, true}, 1, -128, 127);
}

}  // namespace
}  // namespace zeropoint::tests
