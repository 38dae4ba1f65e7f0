// Pooling of 8-bit codes, in vectors of the compiler: included by one file an instruction set. A line of output positions
// is computed in two steps: the input lines under it become one, then windows slide along that.
// In an unnamed namespace and without the standard library, so that no file's code is linked in place of another's.
#pragma once
#include <cstring>

#include "pool/pool.h"

namespace zeropoint::pool {
namespace {

#if defined(__AVX2__)
constexpr int kNative = 32;  // bytes of a register
#else
constexpr int kNative = 16;
#endif

template <int kLanes>
struct Vectors {
  typedef uint8_t OfBytes __attribute__((vector_size(kLanes)));
  typedef uint16_t OfWords __attribute__((vector_size(kLanes * 2)));
};
template <int kLanes>
using Bytes = typename Vectors<kLanes>::OfBytes;
template <int kLanes>
using Words = typename Vectors<kLanes>::OfWords;

// Calls f(offset) for vectors of `kLanes` elements that cover n. A rest is one more vector that overlaps the last; with
// fewer elements than one vector has, `one(offset)` takes them singly.
template <int kLanes, class F, class One>
inline __attribute__((always_inline)) void vectors(int64_t n, F&& f, One&& one) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i);
  if (i == n) return;
  if (n >= kLanes) return f(n - kLanes);
  for (; i < n; ++i) one(i);
}

template <class Vector, class Element>
inline __attribute__((always_inline)) Vector load(const Element* from) {
  Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

// Goes through the channels in blocks of `kWide`, then `kNarrow`, and a rest as `vectors` does.
template <int kWide, int kNarrow, class Wide, class Narrow, class One>
inline __attribute__((always_inline)) void blocks(int64_t channels, Wide&& wide, Narrow&& narrow, One&& one) {
  int64_t c = 0;
  for (; c + kWide <= channels; c += kWide) wide(c);
  for (; c + kNarrow <= channels; c += kNarrow) narrow(c);
  if (c == channels) return;
  if (channels >= kNarrow) return narrow(channels - kNarrow);
  for (; c < channels; ++c) one(c);
}

// Signed codes are compared and added as unsigned ones, 128 higher (`flip`).
template <int kLanes>
inline void max_rows(const Line& line, uint8_t flip, int64_t at, uint8_t* to) {
  Bytes<kLanes> best = {};
  for (int64_t r = 0; r < line.count; ++r) {
    const Bytes<kLanes> codes = load<Bytes<kLanes>>(line.rows[r] + at) ^ flip;
    best = codes > best ? codes : best;
  }
  std::memcpy(to + at, &best, sizeof best);
}

template <int kLanes, int kVectors>
inline void max_block(const uint8_t* from, const Span& span, int64_t channels, uint8_t flip, uint8_t* out) {
  Bytes<kLanes> best[kVectors] = {};
  for (int64_t k = 0; k < span.count; ++k, from += span.step * channels)
    for (int v = 0; v < kVectors; ++v) {
      const Bytes<kLanes> codes = load<Bytes<kLanes>>(from + v * kLanes);
      best[v] = codes > best[v] ? codes : best[v];
    }
  for (int v = 0; v < kVectors; ++v) {
    best[v] ^= flip;
    std::memcpy(out + v * kLanes, &best[v], sizeof best[v]);
  }
}

template <class T>
void max_line(const Line& line, T* to) {
  constexpr uint8_t kFlip = T(-1) < T(0) ? 0x80 : 0;
  auto* rows = static_cast<uint8_t*>(line.buffer);
  auto* out = reinterpret_cast<uint8_t*>(to);
  const int64_t channels = line.channels;
  vectors<kNative>(
      (line.end - line.begin) * channels, [&](int64_t i) { max_rows<kNative>(line, kFlip, i, rows); },
      [&](int64_t i) { max_rows<1>(line, kFlip, i, rows); });
  for (int64_t o = 0; o < line.outputs; ++o, out += channels) {
    const Span& span = line.spans[o];
    const uint8_t* from = rows + (span.first - line.begin) * channels;
    blocks<2 * kNative, 16>(
        channels, [&](int64_t c) { max_block<kNative, 2>(from + c, span, channels, kFlip, out + c); },
        [&](int64_t c) { max_block<16, 1>(from + c, span, channels, kFlip, out + c); },
        [&](int64_t c) { max_block<1, 1>(from + c, span, channels, kFlip, out + c); });
  }
}

// The codes of means from 16-bit sums, in float32. |sum| < 2**23 keeps a quotient that is no tie off every tie by more
// than float32 rounds, so the code is that of the quotient in float64. Adding and subtracting 1.5 * 2**23 rounds.
template <class T, int kLanes>
inline void finish(const uint16_t* sums, int32_t zero, float divisor, int32_t zero_point, uint8_t* out) {
  constexpr float kRounder = 12582912.0f;
  constexpr float kLow = T(-1) < T(0) ? -128 : 0, kHigh = kLow + 255;
  const float shift = static_cast<float>(zero_point);
  for (int i = 0; i < kLanes; ++i) {
    float code = ((static_cast<float>(sums[i] - zero) / divisor + kRounder) - kRounder) + shift;
    code = code < kLow ? kLow : code;
    code = code > kHigh ? kHigh : code;
    out[i] = static_cast<uint8_t>(static_cast<int32_t>(code));
  }
}

// The same from 32-bit sums, in float64.
template <class T, int kLanes>
inline void finish(const uint32_t* sums, int64_t zero, double divisor, int32_t zero_point, uint8_t* out) {
  for (int i = 0; i < kLanes; ++i)
    out[i] = static_cast<uint8_t>(mean_code<T>(static_cast<double>(int64_t{sums[i]} - zero), divisor, zero_point));
}

// What the means of one window are computed from.
template <class T>
struct Mean {
  static constexpr uint8_t kFlip = T(-1) < T(0) ? 0x80 : 0;
  int64_t zero, divisor;
  int32_t zero_point;

  Mean(const Line& line, const Span& span, int32_t zero_point_, int64_t divisor_)
      : zero(line.count * span.count * (zero_point_ + kFlip)),
        divisor(divisor_ != 0 ? divisor_ : line.length * span.length),
        zero_point(zero_point_) {}
};

template <int kLanes>
inline void add_rows(const Line& line, uint8_t flip, int64_t at, uint16_t* to) {
  Words<kLanes> sum = {};
  for (int64_t r = 0; r < line.count; ++r)
    sum += __builtin_convertvector(load<Bytes<kLanes>>(line.rows[r] + at) ^ flip, Words<kLanes>);
  std::memcpy(to + at, &sum, sizeof sum);
}

template <class T, int kLanes, int kVectors>
inline void average_block(const uint16_t* from, const Span& span, int64_t channels, const Mean<T>& mean, uint8_t* out) {
  Words<kLanes> sums[kVectors] = {};
  for (int64_t k = 0; k < span.count; ++k, from += span.step * channels)
    for (int v = 0; v < kVectors; ++v) sums[v] += load<Words<kLanes>>(from + v * kLanes);
  uint16_t parts[kLanes * kVectors];
  std::memcpy(parts, sums, sizeof parts);
  finish<T, kLanes * kVectors>(parts, static_cast<int32_t>(mean.zero), static_cast<float>(mean.divisor), mean.zero_point,
                               out);
}

template <class T>
void average_line(const Line& line, int32_t zero_point, int64_t divisor, T* to) {
  constexpr int kLanes = kNative / 2;
  auto* rows = static_cast<uint16_t*>(line.buffer);
  auto* out = reinterpret_cast<uint8_t*>(to);
  const int64_t channels = line.channels;
  vectors<kLanes>(
      (line.end - line.begin) * channels, [&](int64_t i) { add_rows<kLanes>(line, Mean<T>::kFlip, i, rows); },
      [&](int64_t i) { add_rows<1>(line, Mean<T>::kFlip, i, rows); });
  for (int64_t o = 0; o < line.outputs; ++o, out += channels) {
    const Span& span = line.spans[o];
    const Mean<T> mean(line, span, zero_point, divisor);
    const uint16_t* from = rows + (span.first - line.begin) * channels;
    blocks<4 * kLanes, kLanes>(
        channels, [&](int64_t c) { average_block<T, kLanes, 4>(from + c, span, channels, mean, out + c); },
        [&](int64_t c) { average_block<T, kLanes, 1>(from + c, span, channels, mean, out + c); },
        [&](int64_t c) { average_block<T, 1, 1>(from + c, span, channels, mean, out + c); });
  }
}

// Means of one window straight from the codes: 16-bit sums of kMostTaps codes at most, added up in 32 bits.
template <class T, int kLanes, int kVectors>
inline void average_codes(const Line& line, const Span& span, int64_t at, const Mean<T>& mean, uint8_t* out) {
  constexpr int kChannels = kLanes * kVectors;
  Words<kLanes> words[kVectors] = {};
  uint32_t sums[kChannels] = {};
  uint16_t parts[kChannels];
  const auto flush = [&]() __attribute__((always_inline)) {
    std::memcpy(parts, words, sizeof parts);
    for (int i = 0; i < kChannels; ++i) sums[i] += parts[i];
    for (int v = 0; v < kVectors; ++v) words[v] = Words<kLanes>{};
  };
  int64_t held = 0;
  for (int64_t r = 0; r < line.count; ++r) {
    const uint8_t* from = line.rows[r] + at;
    for (int64_t k = 0; k < span.count; ++k, from += span.step * line.channels) {
      for (int v = 0; v < kVectors; ++v)
        words[v] += __builtin_convertvector(load<Bytes<kLanes>>(from + v * kLanes) ^ Mean<T>::kFlip, Words<kLanes>);
      if (++held == kMostTaps) flush(), held = 0;
    }
  }
  flush();
  finish<T, kChannels>(sums, mean.zero, static_cast<double>(mean.divisor), mean.zero_point, out);
}

template <class T>
void average_wide_line(const Line& line, int32_t zero_point, int64_t divisor, T* to) {
  constexpr int kLanes = kNative / 2;
  auto* out = reinterpret_cast<uint8_t*>(to);
  for (int64_t o = 0; o < line.outputs; ++o, out += line.channels) {
    const Span& span = line.spans[o];
    const Mean<T> mean(line, span, zero_point, divisor);
    const int64_t at = (span.first - line.begin) * line.channels;
    blocks<4 * kLanes, kLanes>(
        line.channels, [&](int64_t c) { average_codes<T, kLanes, 4>(line, span, at + c, mean, out + c); },
        [&](int64_t c) { average_codes<T, kLanes, 1>(line, span, at + c, mean, out + c); },
        [&](int64_t c) { average_codes<T, 1, 1>(line, span, at + c, mean, out + c); });
  }
}

template <class T>
Kernels<T> kernels() {
  return {max_line<T>, average_line<T>, average_wide_line<T>};
}

}  // namespace
}  // namespace zeropoint::pool
