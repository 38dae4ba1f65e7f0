// Between float and codes, per tensor and per channel.
#include <algorithm>
#include <limits>
#include <mutex>

#include "elementwise/elementwise.h"
#include "elementwise/wide.h"

namespace zeropoint::elementwise {
namespace {

constexpr int64_t kGrain = 1 << 15;
constexpr int64_t kBuffer = 1024;
constexpr int64_t kShortRow = 16;  // below it a channel's rows are worked on together, from arrays of parameters

// Calls f(floats, offset, n) on x[begin, begin + n), in pieces of at most kBuffer where it has to be widened first.
template <class F>
void as_floats(const Kernels& k, const void* x, Type type, int64_t begin, int64_t n, F&& f) {
  if (type == Type::f32) {
    f(static_cast<const float*>(x) + begin, int64_t{0}, n);
    return;
  }
  const auto* halves = static_cast<const uint16_t*>(x) + begin;
  float buffer[kBuffer];
  for (int64_t i = 0; i < n; i += kBuffer) {
    const int64_t length = std::min(kBuffer, n - i);
    (type == Type::f16 ? k.from_half : k.from_bfloat16)(halves + i, buffer, length);
    f(buffer, i, length);
  }
}

// Calls f(floats, offset, n) to fill out[begin, begin + n), narrowed afterwards where needed.
template <class F>
void to_floats(const Kernels& k, void* out, Type type, int64_t begin, int64_t n, F&& f) {
  if (type == Type::f32) {
    f(static_cast<float*>(out) + begin, int64_t{0}, n);
    return;
  }
  auto* halves = static_cast<uint16_t*>(out) + begin;
  float buffer[kBuffer];
  for (int64_t i = 0; i < n; i += kBuffer) {
    const int64_t length = std::min(kBuffer, n - i);
    f(buffer, i, length);
    (type == Type::f16 ? k.to_half : k.to_bfloat16)(buffer, halves + i, length);
  }
}

// Calls f(channel, begin, n) on the runs of one channel in [begin, end).
template <class F>
void by_channel(Channels view, int64_t begin, int64_t end, F&& f) {
  while (begin < end) {
    const int64_t row = begin / view.inner;
    const int64_t stop = std::min(end, (row + 1) * view.inner);
    f(row % view.count, begin, stop - begin);
    begin = stop;
  }
}

// Parameters of every element of a period of the memory, repeated until the period is long enough to work on.
struct Period {
  int64_t length;
  int64_t repeats;

  explicit Period(Channels view) : length(view.count * view.inner), repeats((kBuffer + length - 1) / length) {}

  template <class T, class Value>
  std::vector<T> spread(Channels view, Value&& value) const {
    std::vector<T> out(static_cast<size_t>(length * repeats));
    for (int64_t c = 0; c < view.count; ++c)
      std::fill_n(out.begin() + c * view.inner, view.inner, static_cast<T>(value(c)));
    for (int64_t r = 1; r < repeats; ++r) std::copy_n(out.begin(), length, out.begin() + r * length);
    return out;
  }

  // Calls f(place in the period, begin, n).
  template <class F>
  void walk(int64_t begin, int64_t end, F&& f) const {
    const int64_t whole = length * repeats;
    while (begin < end) {
      const int64_t place = begin % whole, n = std::min(end - begin, whole - place);
      f(place, begin, n);
      begin += n;
    }
  }
};

// One grid for a run of values, 32-bit codes or float64: in chunks of doubles.
void quantize_wide(const void* x, Type x_type, int64_t n, double scale, double zero, bool floating, Grid grid,
                   void* out, Type out_type) {
  const Kernels& k = kernels();
  const float inverse_float = 1.0f / static_cast<float>(scale);
  const double inverse = 1.0 / scale;
  double y[kChunk], zeros[kChunk];
  std::fill(zeros, zeros + std::min(n, kChunk), floating ? 0.0 : zero);
  const auto finish = [&](int64_t i, int64_t length) {
    write_codes(y, zeros, length, grid, at(out, out_type, i), out_type);
  };
  if (x_type == Type::f64) {
    const auto* values = static_cast<const double*>(x);
    for (int64_t i = 0; i < n; i += kChunk) {
      const int64_t length = std::min(kChunk, n - i);
      for (int64_t j = 0; j < length; ++j) {
        y[j] = values[i + j] * inverse;
        if (floating) y[j] += zero, y[j] = y[j] == y[j] ? y[j] : zero;
      }
      finish(i, length);
    }
    return;
  }
  const float shift = static_cast<float>(zero);
  as_floats(k, x, x_type, 0, n, [&](const float* values, int64_t offset, int64_t count) {
    for (int64_t i = 0; i < count; i += kChunk) {
      const int64_t length = std::min(kChunk, count - i);
      for (int64_t j = 0; j < length; ++j) {
        float step = values[i + j] * inverse_float;
        if (floating) step += shift, step = step == step ? step : shift;
        y[j] = step;
      }
      finish(offset + i, length);
    }
  });
}

void dequantize_wide(const void* codes, Type type, int64_t n, double scale, double zero, bool floating, void* out,
                     Type out_type) {
  const Kernels& k = kernels();
  double values[kChunk];
  if (out_type == Type::f64) {
    auto* to = static_cast<double*>(out);
    for (int64_t i = 0; i < n; i += kChunk) {
      const int64_t length = std::min(kChunk, n - i);
      read_wide(at(codes, type, i), type, 1, length, values);
      for (int64_t j = 0; j < length; ++j) to[i + j] = (values[j] - zero) * scale;
    }
    return;
  }
  const float factor = static_cast<float>(scale), shift = static_cast<float>(zero);
  to_floats(k, out, out_type, 0, n, [&](float* to, int64_t offset, int64_t count) {
    for (int64_t i = 0; i < count; i += kChunk) {
      const int64_t length = std::min(kChunk, count - i);
      read_wide(at(codes, type, offset + i), type, 1, length, values);
      for (int64_t j = 0; j < length; ++j) {
        const float steps = floating ? static_cast<float>(values[j]) - shift : static_cast<float>(values[j] - zero);
        to[i + j] = steps * factor;
      }
    }
  });
}

}  // namespace

void quantize(const void* x, Type x_type, int64_t n, double scale, Grid grid, void* out, Type out_type,
              const Parallel& parallel) {
  if (x_type == Type::f64 || !is_byte(out_type)) {
    parallel.for_range(0, n, kGrain, [&](int64_t begin, int64_t end) {
      quantize_wide(at(x, x_type, begin), x_type, end - begin, scale, static_cast<double>(grid.zero_point), false,
                    grid, at(out, out_type, begin), out_type);
    });
    return;
  }
  const Kernels& k = kernels();
  const float inverse = 1.0f / static_cast<float>(scale);
  const Target place = target(out_type, grid);
  auto* codes = static_cast<uint8_t*>(out);
  parallel.for_range(0, n, kGrain, [&](int64_t begin, int64_t end) {
    as_floats(k, x, x_type, begin, end - begin, [&](const float* values, int64_t offset, int64_t length) {
      k.quantize(values, codes + begin + offset, length, inverse, place);
    });
  });
}

void quantize_channels(const void* x, Type x_type, Channels view, const ChannelGrid& channels, int64_t low,
                       int64_t high, void* out, Type out_type, const Parallel& parallel) {
  const int64_t n = view.outer * view.count * view.inner;
  if (x_type == Type::f64 || !is_byte(out_type)) {
    parallel.for_range(0, n, kGrain, [&](int64_t from, int64_t to) {
      by_channel(view, from, to, [&](int64_t c, int64_t begin, int64_t length) {
        quantize_wide(at(x, x_type, begin), x_type, length, channels.scale[c], channels.zero_point[c],
                      channels.floating, {0, low, high}, at(out, out_type, begin), out_type);
      });
    });
    return;
  }
  const Kernels& k = kernels();
  auto* codes = static_cast<uint8_t*>(out);
  const auto inverse_of = [&](int64_t c) { return 1.0f / static_cast<float>(channels.scale[c]); };
  if (view.inner >= kShortRow && !channels.floating) {
    parallel.for_range(0, n, kGrain, [&](int64_t from, int64_t to) {
      by_channel(view, from, to, [&](int64_t c, int64_t begin, int64_t length) {
        const float inverse = inverse_of(c);
        const Target place = target(out_type, {static_cast<int64_t>(channels.zero_point[c]), low, high});
        as_floats(k, x, x_type, begin, length, [&](const float* values, int64_t offset, int64_t count) {
          k.quantize(values, codes + begin + offset, count, inverse, place);
        });
      });
    });
    return;
  }
  const auto each = channels.floating ? k.quantize_shifted : k.quantize_each;
  const Target place = {flip_of(out_type), static_cast<int16_t>(-shift_of(out_type)), static_cast<float>(low),
                        static_cast<float>(high)};
  if (view.inner >= kShortRow) {
    parallel.for_range(0, n, kGrain, [&](int64_t from, int64_t to) {
      float factor[kBuffer], zero[kBuffer];
      by_channel(view, from, to, [&](int64_t c, int64_t begin, int64_t length) {
        std::fill(factor, factor + std::min(kBuffer, length), inverse_of(c));
        std::fill(zero, zero + std::min(kBuffer, length), static_cast<float>(channels.zero_point[c]));
        as_floats(k, x, x_type, begin, length, [&](const float* values, int64_t offset, int64_t count) {
          for (int64_t i = 0; i < count; i += kBuffer)
            each(values + i, factor, zero, codes + begin + offset + i, std::min(kBuffer, count - i), place);
        });
      });
    });
    return;
  }
  const Period period(view);
  const auto factor = period.spread<float>(view, inverse_of);
  const auto zero = period.spread<float>(view, [&](int64_t c) { return channels.zero_point[c]; });
  parallel.for_range(0, n, kGrain, [&](int64_t from, int64_t to) {
    period.walk(from, to, [&](int64_t p, int64_t begin, int64_t length) {
      as_floats(k, x, x_type, begin, length, [&](const float* values, int64_t offset, int64_t count) {
        each(values, factor.data() + p + offset, zero.data() + p + offset, codes + begin + offset, count, place);
      });
    });
  });
}

void dequantize(const void* codes, Type type, int64_t n, double scale, int64_t zero_point, void* out, Type out_type,
                const Parallel& parallel) {
  if (out_type == Type::f64 || !fits_byte_loops(type, zero_point)) {
    parallel.for_range(0, n, kGrain, [&](int64_t begin, int64_t end) {
      dequantize_wide(at(codes, type, begin), type, end - begin, scale, static_cast<double>(zero_point), false,
                      at(out, out_type, begin), out_type);
    });
    return;
  }
  const Kernels& k = kernels();
  const float factor = static_cast<float>(scale);
  parallel.for_range(0, n, kGrain, [&](int64_t begin, int64_t end) {
    to_floats(k, out, out_type, begin, end - begin, [&](float* to, int64_t offset, int64_t length) {
      k.dequantize(bytes(at(codes, type, begin + offset), type, zero_point), to, length, factor);
    });
  });
}

void dequantize_channels(const void* codes, Type type, Channels view, const ChannelGrid& channels, void* out,
                         Type out_type, const Parallel& parallel) {
  const int64_t n = view.outer * view.count * view.inner;
  const bool rows = view.inner >= kShortRow;
  if (out_type == Type::f64 || !is_byte(type) || (rows && channels.floating)) {
    parallel.for_range(0, n, kGrain, [&](int64_t from, int64_t to) {
      by_channel(view, from, to, [&](int64_t c, int64_t begin, int64_t length) {
        dequantize_wide(at(codes, type, begin), type, length, channels.scale[c], channels.zero_point[c],
                        channels.floating, at(out, out_type, begin), out_type);
      });
    });
    return;
  }
  const Kernels& k = kernels();
  if (rows) {
    parallel.for_range(0, n, kGrain, [&](int64_t from, int64_t to) {
      by_channel(view, from, to, [&](int64_t c, int64_t begin, int64_t length) {
        const auto zero = static_cast<int64_t>(channels.zero_point[c]);
        to_floats(k, out, out_type, begin, length, [&](float* values, int64_t offset, int64_t count) {
          k.dequantize(bytes(at(codes, type, begin + offset), type, zero), values, count,
                       static_cast<float>(channels.scale[c]));
        });
      });
    });
    return;
  }
  const Period period(view);
  const auto factor = period.spread<float>(view, [&](int64_t c) { return channels.scale[c]; });
  const auto zero = period.spread<float>(view, [&](int64_t c) { return channels.zero_point[c]; });
  parallel.for_range(0, n, kGrain, [&](int64_t from, int64_t to) {
    period.walk(from, to, [&](int64_t p, int64_t begin, int64_t length) {
      to_floats(k, out, out_type, begin, length, [&](float* values, int64_t offset, int64_t count) {
        k.dequantize_each(bytes(at(codes, type, begin + offset), type, 0), zero.data() + p + offset,
                          factor.data() + p + offset, values, count);
      });
    });
  });
}

void affine(const void* codes, Type type, int64_t n, int64_t zero_point, float factor, float offset, Grid grid,
            void* out, Type out_type, const Parallel& parallel) {
  const Kernels& k = kernels();
  const bool by_bytes = fits_byte_loops(type, zero_point) && is_byte(out_type) &&
                        is_moderate(factor, kModerateFactor) && is_moderate(offset, kModerateOffset);
  parallel.for_range(0, n, kGrain, [&](int64_t begin, int64_t end) {
    if (by_bytes) {
      k.affine(bytes(at(codes, type, begin), type, zero_point), factor, offset,
               static_cast<uint8_t*>(out) + begin, end - begin, target(out_type, grid));
      return;
    }
    double y[kChunk], zeros[kChunk];
    std::fill(zeros, zeros + std::min(end - begin, kChunk), static_cast<double>(grid.zero_point));
    for (int64_t i = begin; i < end; i += kChunk) {
      const int64_t length = std::min(kChunk, end - i);
      read_wide(at(codes, type, i), type, 1, length, y);
      for (int64_t j = 0; j < length; ++j)
        y[j] = static_cast<float>(y[j] - static_cast<double>(zero_point)) * factor + offset;
      write_codes(y, zeros, length, grid, at(out, out_type, i), out_type);
    }
  });
}

void affine_channels(const void* codes, Type type, Channels view, const std::vector<int64_t>& zero_point,
                     const std::vector<float>& factor, const std::vector<float>& offset, Grid grid, void* out,
                     Type out_type, const Parallel& parallel) {
  const int64_t n = view.outer * view.count * view.inner;
  bool by_bytes = is_byte(out_type) && view.inner < kShortRow;
  for (int64_t c = 0; c < view.count && by_bytes; ++c)
    by_bytes = fits_byte_loops(type, zero_point[c]) && is_moderate(factor[c], kModerateFactor) &&
               is_moderate(offset[c], kModerateOffset);
  if (!by_bytes) {
    parallel.for_range(0, n, kGrain, [&](int64_t from, int64_t to) {
      by_channel(view, from, to, [&](int64_t c, int64_t begin, int64_t length) {
        affine(at(codes, type, begin), type, length, zero_point[c], factor[c], offset[c], grid,
               at(out, out_type, begin), out_type, Parallel{});
      });
    });
    return;
  }
  const Kernels& k = kernels();
  const Period period(view);
  const auto zero = period.spread<float>(view, [&](int64_t c) { return zero_point[c]; });
  const auto m = period.spread<float>(view, [&](int64_t c) { return factor[c]; });
  const auto b = period.spread<float>(view, [&](int64_t c) { return offset[c]; });
  const Target place = target(out_type, grid);
  parallel.for_range(0, n, kGrain, [&](int64_t from, int64_t to) {
    period.walk(from, to, [&](int64_t p, int64_t begin, int64_t length) {
      k.affine_each(bytes(at(codes, type, begin), type, 0), zero.data() + p, m.data() + p, b.data() + p,
                    static_cast<uint8_t*>(out) + begin, length, place);
    });
  });
}

void finite_range(const void* x, Type type, int64_t n, double* low, double* high, const Parallel& parallel) {
  const Kernels& k = kernels();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  double least = kInfinity, most = -kInfinity;
  std::mutex merging;
  parallel.for_range(0, n, kGrain, [&](int64_t begin, int64_t end) {
    double here_least = kInfinity, here_most = -kInfinity;
    if (type == Type::f64) {
      const auto* values = static_cast<const double*>(x);
      for (int64_t i = begin; i < end; ++i) {
        const double v = values[i];
        if (v - v != 0.0) continue;  // an infinity or NaN minus itself is NaN
        here_least = std::min(here_least, v);
        here_most = std::max(here_most, v);
      }
    } else {
      float small = std::numeric_limits<float>::infinity(), large = -small;
      as_floats(k, x, type, begin, end - begin,
                [&](const float* values, int64_t, int64_t length) { k.finite_range(values, length, &small, &large); });
      here_least = small;
      here_most = large;
    }
    const std::lock_guard<std::mutex> lock(merging);
    least = std::min(least, here_least);
    most = std::max(most, here_most);
  });
  const bool none = least > most;
  *low = none ? 0.0 : least;
  *high = none ? 0.0 : most;
}

void lookup(const void* codes, Type type, int64_t n, const void* table, void* out, Type out_type,
            const Parallel& parallel) {
  const auto* from = static_cast<const uint8_t*>(codes);
  // A code counted from the smallest one is the byte with its sign bit flipped, for signed codes.
  const uint8_t sign = type == Type::i8 ? 0x80 : 0;
  if (is_byte(out_type)) {
    uint8_t by_byte[256];
    for (int byte = 0; byte < 256; ++byte) by_byte[byte] = static_cast<const uint8_t*>(table)[byte ^ sign];
    const Kernels& k = kernels();
    parallel.for_range(0, n, 2 * kGrain, [&](int64_t begin, int64_t end) {
      k.lookup(from + begin, by_byte, static_cast<uint8_t*>(out) + begin, end - begin);
    });
    return;
  }
  const auto* entries = static_cast<const int32_t*>(table);
  auto* to = static_cast<int32_t*>(out);
  parallel.for_range(0, n, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] = entries[from[i] ^ sign];
  });
}

}  // namespace zeropoint::elementwise
