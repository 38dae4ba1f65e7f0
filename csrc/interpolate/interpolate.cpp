// Output rows (of the last spatial dimension, with what lies inside it) are shared among threads. A linear row is
// made of up to four input rows, which are resized first and kept until the output has gone past them.
#include "interpolate/interpolate.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "wide/kernels.h"

namespace zeropoint::interpolate {
namespace {

constexpr int64_t kGrain = 1 << 14;  // output elements a thread takes at once, at least

int64_t grain_of(int64_t row) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(row, 1)); }

// Calls f(outer index, output position 0, output position 1) on rows [begin, end).
template <class F>
void walk(const Shape& shape, int64_t begin, int64_t end, F&& f) {
  for (int64_t row = begin; row < end; ++row)
    f(row / (shape.to[0] * shape.to[1]), row / shape.to[1] % shape.to[0], row % shape.to[1]);
}

// Positions past every input position, and what is no number, count as the last one and the first one.
int64_t whole(double position, int64_t last) {
  if (!(position > 0)) return 0;
  return position >= static_cast<double>(last) ? last : static_cast<int64_t>(position);
}

Places nearest_places(int64_t from, int64_t to, double ratio, bool exact) {
  Places places;
  for (int64_t o = 0; o < to; ++o) {
    const float position = (static_cast<float>(o) + (exact ? 0.5f : 0.0f)) * static_cast<float>(ratio);
    places.low.push_back(whole(std::floor(position), from - 1));
  }
  return places;
}

Places linear_places(int64_t from, int64_t to, double ratio, bool align_corners) {
  Places places;
  const int64_t last = from - 1;
  for (int64_t o = 0; o < to; ++o) {
    const double place = static_cast<double>(o);
    const double position = align_corners ? place * ratio : std::max((place + 0.5) * ratio - 0.5, 0.0);
    const int64_t low = whole(std::floor(position), last);
    places.low.push_back(low);
    places.high.push_back(std::min(low + 1, last));
    const double share = position - static_cast<double>(low);
    places.share.push_back(share > 0 ? std::min(share, 1.0) : 0.0);
  }
  return places;
}

template <class T>
void copy_row(const T* from, const Places& places, int64_t inner, int64_t n, T* to) {
  if (inner == 1)
    for (int64_t i = 0; i < n; ++i) to[i] = from[places.low[i]];
  else
    for (int64_t i = 0; i < n; ++i) std::memcpy(to + i * inner, from + places.low[i] * inner, inner * sizeof(T));
}

template <class T>
void nearest_of(const Shape& s, const Places (&places)[3], const T* x, T* out, const Parallel& parallel) {
  const int64_t row = s.to[2] * s.inner;
  parallel.for_range(0, s.outer * s.to[0] * s.to[1], grain_of(row), [&](int64_t begin, int64_t end) {
    int64_t last = -1;
    T* to = out + row * begin;
    walk(s, begin, end, [&](int64_t o, int64_t i, int64_t j) {
      const int64_t place = ((o * s.from[0] + places[0].low[i]) * s.from[1] + places[1].low[j]) * s.from[2];
      if (place == last)
        std::memcpy(to, to - row, row * sizeof(T));
      else
        copy_row(x + place * s.inner, places[2], s.inner, s.to[2], to);
      last = place;
      to += row;
    });
  });
}

}  // namespace

void nearest(const Shape& shape, const Places (&places)[3], const void* x, Type type, void* out,
             const Parallel& parallel) {
  if (type == Type::i32)
    nearest_of(shape, places, static_cast<const int32_t*>(x), static_cast<int32_t*>(out), parallel);
  else
    nearest_of(shape, places, static_cast<const uint8_t*>(x), static_cast<uint8_t*>(out), parallel);
}

void linear(const Shape& s, const Places (&places)[3], const void* x, Type type, int64_t zero_point, void* out,
            const Parallel& parallel) {
  const wide::Kernels& k = wide::kernels();
  const int64_t row = s.to[2] * s.inner, input = s.from[2] * s.inner;
  const double zero = static_cast<double>(zero_point);
  const double least = type == Type::i32 ? INT32_MIN : type == Type::i8 ? -128 : 0;
  const double most = type == Type::i32 ? INT32_MAX : least + 255;
  parallel.for_range(0, s.outer * s.to[0] * s.to[1], grain_of(row), [&](int64_t begin, int64_t end) {
    std::vector<double> steps(static_cast<size_t>(input)), kept(static_cast<size_t>(4 * row)),
        mixed(static_cast<size_t>(3 * row));
    // Neighbours have different lowest bits, so each of two and two rows has a place of its own.
    int64_t held[4] = {-1, -1, -1, -1};
    const auto resized = [&](int64_t o, int64_t i, int64_t j) -> const double* {
      const int64_t slot = (i & 1) * 2 + (j & 1), place = (o * s.from[0] + i) * s.from[1] + j;
      double* to = kept.data() + slot * row;
      if (held[slot] == place) return to;
      held[slot] = place;
      k.widen(elementwise::at(x, type, place * input), type, input, zero, steps.data());
      const Places& p = places[2];
      if (s.inner == 1)
        k.mix_each(steps.data(), p.low.data(), p.high.data(), p.share.data(), row, to);
      else
        for (int64_t i2 = 0; i2 < s.to[2]; ++i2)
          k.mix(steps.data() + p.low[i2] * s.inner, steps.data() + p.high[i2] * s.inner, p.share[i2], s.inner,
                to + i2 * s.inner);
      return to;
    };
    int64_t at = begin;
    walk(s, begin, end, [&](int64_t o, int64_t i, int64_t j) {
      double* total = mixed.data();
      const auto plane = [&](int64_t from, double* to) {
        const double* low = resized(o, from, places[1].low[j]);
        k.mix(low, resized(o, from, places[1].high[j]), places[1].share[j], row, to);
      };
      if (s.from[0] == 1 && s.to[0] == 1) {
        plane(0, total);
      } else {
        plane(places[0].low[i], mixed.data() + row);
        plane(places[0].high[i], mixed.data() + 2 * row);
        k.mix(mixed.data() + row, mixed.data() + 2 * row, places[0].share[i], row, total);
      }
      k.store(total, 1.0, row, zero, least, most, elementwise::at(out, type, row * at++), type);
    });
  });
}

void resize(const Shape& shape, const Way& way, const void* x, Type type, int64_t zero_point, void* out,
            const Parallel& parallel) {
  Places places[3];
  for (int d = 0; d < 3; ++d)
    places[d] = way.mode == Mode::linear
                    ? linear_places(shape.from[d], shape.to[d], way.ratio[d], way.align_corners)
                    : nearest_places(shape.from[d], shape.to[d], way.ratio[d], way.mode == Mode::nearest_exact);
  if (way.mode == Mode::linear)
    linear(shape, places, x, type, zero_point, out, parallel);
  else
    nearest(shape, places, x, type, out, parallel);
}

}  // namespace zeropoint::interpolate
