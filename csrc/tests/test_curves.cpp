// PReLU, softmax and interpolation against docs/design.md, "Numeric contract" 7 and 12; recurrent layers for memory.
#include <type_traits>

#include "elementwise/curves.h"
#include "gemm/kernel.h"
#include "interpolate/interpolate.h"
#include "rnn/recurrent.h"
#include "tests/check.h"

namespace zeropoint::tests {
namespace {

using elementwise::Channels;
using elementwise::Grid;
using elementwise::Type;

template <class T>
constexpr Type type_of() {
  return std::is_same_v<T, int8_t> ? Type::i8 : std::is_same_v<T, uint8_t> ? Type::u8 : Type::i32;
}

template <class T>
Grid grid_of() {
  return {3, std::numeric_limits<T>::min(), std::numeric_limits<T>::max()};
}

template <class T>
void check_prelu(Random& random, Channels view, int64_t low, int64_t high) {
  const auto x = random.codes<T>(view.outer * view.count * view.inner, low, high);
  const auto below = random.reals<float>(view.count, -2, 2);
  const Grid grid = grid_of<T>();
  std::vector<T> out(x.size()), expected;
  elementwise::prelu(x.data(), type_of<T>(), view, 5, 1.7f, below, grid, out.data(), type_of<T>(), in_parts());
  for (size_t i = 0; i < x.size(); ++i) {
    const int64_t step = x[i] - 5, c = static_cast<int64_t>(i) / view.inner % view.count;
    const float y = static_cast<float>(step) * (step < 0 ? below[static_cast<size_t>(c)] : 1.7f);
    expected.push_back(static_cast<T>(to_code(y, grid.zero_point, grid.low, grid.high)));
  }
  check_equal(out, expected, text("prelu", view.outer, view.count, view.inner));
}

template <class T>
void check_softmax(Random& random, Channels view, int64_t low, int64_t high) {
  const auto x = random.codes<T>(view.outer * view.count * view.inner, low, high);
  const Grid grid = {0, std::numeric_limits<T>::min(), std::numeric_limits<T>::max()};
  std::vector<T> out(x.size()), expected(x.size());
  elementwise::softmax(x.data(), type_of<T>(), view, 0.04, 1.0 / 256, grid, out.data(), type_of<T>(), in_parts());
  for (int64_t o = 0; o < view.outer; ++o)
    for (int64_t i = 0; i < view.inner; ++i) {
      const auto at = [&](int64_t c) { return static_cast<size_t>((o * view.count + c) * view.inner + i); };
      int64_t largest = x[at(0)];
      for (int64_t c = 0; c < view.count; ++c) largest = std::max<int64_t>(largest, x[at(c)]);
      std::vector<double> exps;
      double lanes[8] = {};
      for (int64_t c = 0; c < view.count; ++c) {
        exps.push_back(std::exp(-static_cast<double>(largest - x[at(c)]) * 0.04));
        lanes[c % 8] = lanes[c % 8] + exps.back();
      }
      const double total = ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
      for (int64_t c = 0; c < view.count; ++c)
        expected[at(c)] = static_cast<T>(to_code(exps[static_cast<size_t>(c)] * (256.0 / total), 0, grid.low, grid.high));
    }
  check_equal(out, expected, text("softmax", view.outer, view.count, view.inner));
}

ZEROPOINT_TEST(curves_of_channels_and_rows) {
  Random random(5);
  for (int64_t outer : {1, 2})
    for (int64_t count : {1, 3, 40})
      for (int64_t inner : {1, 7, 64, 129}) {
        check_prelu<int8_t>(random, {outer, count, inner}, -128, 127);
        check_prelu<uint8_t>(random, {outer, count, inner}, 0, 255);
        check_prelu<int32_t>(random, {outer, count, inner}, -70000, 70000);
        check_softmax<int8_t>(random, {outer, count, inner}, -128, 127);
        check_softmax<uint8_t>(random, {outer, count, inner}, 0, 255);
        check_softmax<int32_t>(random, {outer, count, inner}, -400, 400);
      }
}

// Positions that fall anywhere, the last ones included.
interpolate::Places places_of(Random& random, int64_t from, int64_t to) {
  interpolate::Places places;
  for (int64_t i = 0; i < to; ++i) {
    const int64_t low = std::min(i * from / to, from - 1);
    places.low.push_back(low);
    places.high.push_back(std::min(low + 1, from - 1));
    places.share.push_back(from == 1 ? 0.0 : random.real(0, 1));
  }
  return places;
}

template <class T>
void check_interpolate(Random& random, interpolate::Shape s, int64_t low, int64_t high) {
  const auto x = random.codes<T>(s.outer * s.from[0] * s.from[1] * s.from[2] * s.inner, low, high);
  const interpolate::Places places[3] = {places_of(random, s.from[0], s.to[0]), places_of(random, s.from[1], s.to[1]),
                                         places_of(random, s.from[2], s.to[2])};
  std::vector<T> near(static_cast<size_t>(s.outer * s.to[0] * s.to[1] * s.to[2] * s.inner)), out(near.size()),
      expected_near, expected;
  interpolate::nearest(s, places, x.data(), type_of<T>(), near.data(), in_parts());
  interpolate::linear(s, places, x.data(), type_of<T>(), 5, out.data(), in_parts());
  const auto mix = [](double a, double b, double share) { return a * (1.0 - share) + b * share; };
  for (int64_t o = 0; o < s.outer; ++o)
    for (int64_t i = 0; i < s.to[0]; ++i)
      for (int64_t j = 0; j < s.to[1]; ++j)
        for (int64_t k = 0; k < s.to[2]; ++k)
          for (int64_t c = 0; c < s.inner; ++c) {
            const auto at = [&](int64_t a, int64_t b, int64_t d) {
              return x[static_cast<size_t>((((o * s.from[0] + a) * s.from[1] + b) * s.from[2] + d) * s.inner + c)];
            };
            const auto &p = places[0], &q = places[1], &r = places[2];
            const auto row = [&](int64_t a, int64_t b) {
              return mix(static_cast<double>(at(a, b, r.low[k])) - 5.0, static_cast<double>(at(a, b, r.high[k])) - 5.0,
                         r.share[k]);
            };
            const auto plane = [&](int64_t a) { return mix(row(a, q.low[j]), row(a, q.high[j]), q.share[j]); };
            expected_near.push_back(at(p.low[i], q.low[j], r.low[k]));
            expected.push_back(static_cast<T>(to_code(mix(plane(p.low[i]), plane(p.high[i]), p.share[i]), 5,
                                                      std::numeric_limits<T>::min(), std::numeric_limits<T>::max())));
          }
  const std::string where = text(s.outer, s.inner, s.to[0], s.to[1], s.to[2]);
  check_equal(near, expected_near, "nearest " + where);
  check_equal(out, expected, "linear " + where);
}

ZEROPOINT_TEST(interpolation) {
  Random random(6);
  for (const interpolate::Shape& shape :
       {interpolate::Shape{2, 1, {1, 1, 7}, {1, 1, 15}}, interpolate::Shape{3, 1, {1, 5, 6}, {1, 9, 4}},
        interpolate::Shape{1, 17, {1, 40, 3}, {1, 80, 6}}, interpolate::Shape{2, 3, {3, 4, 5}, {5, 3, 8}},
        interpolate::Shape{1, 1, {4, 1, 1}, {2, 3, 2}}}) {
    check_interpolate<int8_t>(random, shape, -128, 127);
    check_interpolate<uint8_t>(random, shape, 0, 255);
    check_interpolate<int32_t>(random, shape, -70000, 70000);
  }
}

// What threads share must not change a bit; that the integers are right is tested from Python.
ZEROPOINT_TEST(recurrent_layers_alone_and_in_parts) {
  Random random(7);
  constexpr int64_t kSteps = 3, kColumns = 6;
  for (auto mode : {rnn::Mode::lstm, rnn::Mode::gru, rnn::Mode::tanh, rnn::Mode::relu})
    for (int64_t hidden : {5, 32})
      for (int64_t batch : {1, 9}) {
        const int64_t width = rnn::gates_of(mode) * hidden;
        const auto scale = random.reals<float>(width, 0.001, 0.01), bias = random.reals<float>(width, -1, 1);
        const auto zeros = random.codes<int32_t>(width, -20, 20);
        std::vector<AlignedBytes> packed;
        const auto projection = [&](int64_t columns, const float* with_bias) {
          const auto weight = random.codes<int8_t>(width * columns, -128, 127);
          packed.push_back(gemm::pack(isa, weight.data(), columns, width, columns, Parallel::serial()));
          rnn::Projection made;
          const bool fits = gemm::view(packed.back().data(), static_cast<int64_t>(packed.back().size()), isa, width,
                                       columns, &made.weight);
          ZEROPOINT_CHECK(fits, width << " by " << columns);
          made.scale = scale.data();
          made.zero_point = zeros.data();
          made.bias = with_bias;
          return made;
        };
        rnn::Call call;
        call.mode = mode;
        call.steps = kSteps;
        call.hidden = hidden;
        const int64_t sizes[kSteps] = {batch, batch, (batch + 1) / 2};
        call.batch_sizes = sizes;
        const auto x = random.reals<float>((2 * batch + sizes[2]) * kColumns, -3, 3);
        call.x = x.data();
        call.input = projection(kColumns, bias.data());
        call.recurrent = projection(hidden, nullptr);
        const rnn::Projection rest = projection(kColumns, nullptr);
        call.input_rest = &rest;
        std::vector<float> out[2];
        for (int turn : {0, 1}) {
          std::vector<float> h(static_cast<size_t>(batch * hidden), 0.25f), c(h.size(), -0.5f);
          out[turn].resize(static_cast<size_t>((2 * batch + sizes[2]) * hidden));
          call.h = h.data();
          call.c = mode == rnn::Mode::lstm ? c.data() : nullptr;
          call.out = out[turn].data();
          rnn::recurrent(call, turn ? in_parts() : Parallel::serial());
        }
        check_equal(out[1], out[0], text("recurrent", hidden, batch));
      }
}

}  // namespace
}  // namespace zeropoint::tests
