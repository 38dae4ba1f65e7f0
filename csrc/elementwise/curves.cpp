// PReLU's 8-bit codes go through a table a channel where channels lie apart; side by side, both slopes are computed for
// all and the sign chooses. Softmax takes its exponentials from a table of the 256 possible differences.
#include "elementwise/curves.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "elementwise/wide.h"
#include "wide/kernels.h"

namespace zeropoint::elementwise {
namespace {

constexpr int64_t kGrain = 1 << 14;
constexpr double kFarAway = 1099511627776.0;  // beyond every code
constexpr int64_t kInside = 64;  // codes of one channel side by side, from which on a table a channel is worth it

template <class T>
T code_of(double y, Grid grid) {
  return static_cast<T>(to_code(y, static_cast<double>(grid.zero_point), static_cast<double>(grid.low),
                                static_cast<double>(grid.high)));
}

// Calls f(channel, first element, count) on runs of one channel within [begin, end).
template <class F>
void by_channel(Channels view, int64_t begin, int64_t end, F&& f) {
  while (begin < end) {
    const int64_t run = std::min(end - begin, view.inner - begin % view.inner);
    f(begin / view.inner % view.count, begin, run);
    begin += run;
  }
}

// Puts what stands in `negative` where codes are below the zero point.
template <class In, class Out>
void choose(const In* __restrict codes, In zero, const Out* __restrict negative, int64_t n, Out* __restrict out) {
  for (int64_t i = 0; i < n; ++i) {
    const Out below = negative[i], above = out[i];
    out[i] = codes[i] < zero ? below : above;
  }
}

template <class In, class Out>
void prelu_of(const In* x, Channels view, int64_t zero_point, float above, const std::vector<float>& below, Grid grid,
              Out* out, const Parallel& parallel) {
  const int64_t total = view.outer * view.count * view.inner;
  const auto value = [&](int64_t code, int64_t channel) {
    const int64_t step = code - zero_point;
    return code_of<Out>(static_cast<float>(step) * (step < 0 ? below[channel] : above), grid);
  };
  if constexpr (sizeof(In) > 1 || sizeof(Out) > 1) {
    parallel.for_range(0, total, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) out[i] = value(x[i], i / view.inner % view.count);
    });
  } else if (view.count > 1 && view.inner < kInside && is_moderate(above, kModerateFactor) &&
             std::all_of(below.begin(), below.end(), [](float f) { return is_moderate(f, kModerateFactor); }) &&
             std::numeric_limits<In>::min() <= zero_point && zero_point <= std::numeric_limits<In>::max()) {
    // One pattern of slopes, long enough to be worth a call, lies over the memory again and again.
    const int64_t period = view.count * view.inner, length = period * std::max<int64_t>(1, kChunk / period);
    std::vector<float> slopes(static_cast<size_t>(length)), zeros(slopes.size(), static_cast<float>(zero_point)),
        none(slopes.size(), 0.0f);
    for (int64_t i = 0; i < length; ++i) slopes[i] = below[i / view.inner % view.count];
    const Type in = std::is_signed_v<In> ? Type::i8 : Type::u8, to = std::is_signed_v<Out> ? Type::i8 : Type::u8;
    parallel.for_range(0, (total + length - 1) / length, std::max<int64_t>(1, kGrain / length),
                       [&](int64_t begin, int64_t end) {
      std::vector<Out> negative(static_cast<size_t>(length));
      for (int64_t at = begin * length; at < std::min(end * length, total); at += length) {
        const int64_t n = std::min(length, total - at);
        const Bytes from = bytes(x + at, in, zero_point);
        kernels().affine_each(from, zeros.data(), slopes.data(), none.data(),
                              reinterpret_cast<uint8_t*>(negative.data()), n, target(to, grid));
        kernels().affine(from, above, 0.0f, reinterpret_cast<uint8_t*>(out + at), n, target(to, grid));
        choose(x + at, static_cast<In>(zero_point), negative.data(), n, out + at);
      }
    });
  } else {
    // Under the byte of a code, signed or not.
    std::vector<Out> table(static_cast<size_t>(view.count) * 256);
    for (int64_t c = 0; c < view.count; ++c)
      for (int64_t byte = 0; byte < 256; ++byte)
        table[static_cast<size_t>(c * 256 + byte)] = value(static_cast<In>(static_cast<uint8_t>(byte)), c);
    const auto* bytes = reinterpret_cast<const uint8_t*>(x);
    parallel.for_range(0, total, kGrain, [&](int64_t begin, int64_t end) {
      if (view.inner >= kInside)
        by_channel(view, begin, end, [&](int64_t c, int64_t first, int64_t n) {
          kernels().lookup(bytes + first, reinterpret_cast<const uint8_t*>(table.data() + c * 256),
                           reinterpret_cast<uint8_t*>(out + first), n);
        });
      else
        for (int64_t i = begin, c = begin / view.inner % view.count, left = view.inner - begin % view.inner; i < end;
             ++i) {
          out[i] = table[static_cast<size_t>(c * 256 + bytes[i])];
          if (--left == 0) left = view.inner, c = c + 1 == view.count ? 0 : c + 1;
        }
    });
  }
}

template <class T>
void softmax_of(const T* x, Channels view, double scale, double out_scale, Grid grid, void* out, Type out_type,
                const Parallel& parallel) {
  const wide::Kernels& k = wide::kernels();
  double table[256];
  for (int64_t below = 0; below < 256 && sizeof(T) == 1; ++below)
    table[below] = std::exp(-static_cast<double>(below) * scale);
  const int64_t n = view.count, rows = view.outer * view.inner;
  parallel.for_range(0, rows, std::max<int64_t>(1, kGrain / n), [&](int64_t begin, int64_t end) {
    std::vector<T> together(view.inner == 1 ? 0 : static_cast<size_t>(n));
    std::vector<int32_t> apart(view.inner == 1 ? 0 : static_cast<size_t>(n));
    std::vector<double> exps(static_cast<size_t>(n));
    for (int64_t row = begin; row < end; ++row) {
      const int64_t first = row / view.inner * n * view.inner + row % view.inner;
      const T* codes = x + first;
      if (view.inner > 1) {
        for (int64_t i = 0; i < n; ++i) together[i] = x[first + i * view.inner];
        codes = together.data();
      }
      if constexpr (sizeof(T) == 1) {
        k.below_largest(codes, std::is_signed_v<T> ? Type::i8 : Type::u8, n, table, exps.data());
      } else {
        const int64_t largest = *std::max_element(codes, codes + n);
        for (int64_t i = 0; i < n; ++i) exps[i] = std::exp(-static_cast<double>(largest - codes[i]) * scale);
      }
      double factor = 1.0 / out_scale / k.sum(exps.data(), n);
      if (!(factor < kFarAway)) {  // steps so small that every share above zero is beyond all codes, or no number
        for (double& e : exps) e = e * factor == e * factor ? std::min(e * factor, kFarAway) : 0.0;
        factor = 1.0;
      }
      const auto store = [&](void* to, Type type) {
        k.store(exps.data(), factor, n, static_cast<double>(grid.zero_point), static_cast<double>(grid.low),
                static_cast<double>(grid.high), to, type);
      };
      if (view.inner == 1) {
        store(at(out, out_type, first), out_type);
        continue;
      }
      store(apart.data(), Type::i32);
      const auto spread = [&](auto* to) {
        for (int64_t i = 0; i < n; ++i)
          to[first + i * view.inner] = static_cast<std::remove_pointer_t<decltype(to)>>(apart[i]);
      };
      if (is_byte(out_type))
        spread(static_cast<uint8_t*>(out));
      else
        spread(static_cast<int32_t*>(out));
    }
  });
}

// Calls f with null pointers of both types of codes.
template <class F>
void with_types(Type in, Type out, F&& f) {
  const auto second = [&](auto* first) {
    if (out == Type::i8) return f(first, static_cast<int8_t*>(nullptr));
    if (out == Type::u8) return f(first, static_cast<uint8_t*>(nullptr));
    return f(first, static_cast<int32_t*>(nullptr));
  };
  if (in == Type::i8) return second(static_cast<const int8_t*>(nullptr));
  if (in == Type::u8) return second(static_cast<const uint8_t*>(nullptr));
  return second(static_cast<const int32_t*>(nullptr));
}

}  // namespace

void prelu(const void* codes, Type type, Channels view, int64_t zero_point, float above,
           const std::vector<float>& below, Grid grid, void* out, Type out_type, const Parallel& parallel) {
  with_types(type, out_type, [&](auto* in, auto* to) {
    prelu_of(static_cast<decltype(in)>(codes), view,
             zero_point, above, below, grid, static_cast<decltype(to)>(out), parallel);
  });
}

void softmax(const void* codes, Type type, Channels view, double scale, double out_scale, Grid grid, void* out,
             Type out_type, const Parallel& parallel) {
  with_types(type, Type::i32, [&](auto* in, auto*) {
    softmax_of(static_cast<decltype(in)>(codes), view, scale, out_scale, grid, out, out_type, parallel);
  });
}

}  // namespace zeropoint::elementwise
