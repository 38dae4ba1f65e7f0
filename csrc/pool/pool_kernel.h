// One output position of a pooling of 8-bit codes, in vectors of the compiler: included by one file an instruction set.
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
struct Wide {
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  typedef uint16_t Words __attribute__((vector_size(kLanes * 2)));
};

// Calls f(pointer to the first channel) for every input position of the window.
template <class F>
inline __attribute__((always_inline)) void each_position(const uint8_t* image, const Position& p, F&& f) {
  const Span &d = p.span[0], &h = p.span[1], &w = p.span[2];
  for (int64_t i = 0; i < d.count; ++i)
    for (int64_t j = 0; j < h.count; ++j) {
      const uint8_t* line = image + (d.first + i * d.step) * p.stride[0] + (h.first + j * h.step) * p.stride[1];
      for (int64_t k = 0; k < w.count; ++k) f(line + (w.first + k * w.step) * p.stride[2]);
    }
}

// Signed codes are compared and added as unsigned ones, 128 higher (`flip`).
template <int kLanes, int kVectors>
inline void max_block(const uint8_t* image, const Position& p, uint8_t flip, uint8_t* out) {
  using Bytes = typename Wide<kLanes>::Bytes;
  Bytes best[kVectors] = {};
  each_position(image, p, [&](const uint8_t* from) __attribute__((always_inline)) {
    for (int v = 0; v < kVectors; ++v) {
      Bytes codes;
      std::memcpy(&codes, from + v * kLanes, sizeof codes);
      codes ^= flip;
      best[v] = codes > best[v] ? codes : best[v];
    }
  });
  for (int v = 0; v < kVectors; ++v) {
    best[v] ^= flip;
    std::memcpy(out + v * kLanes, &best[v], sizeof best[v]);
  }
}

// 16-bit words hold the sum of this many bytes: 257 * 255 < 2**16.
constexpr int64_t kMostTaps = 257;

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

// Means of kVectors half registers of channels.
template <class T, int kVectors>
inline void average_block(const uint8_t* image, const Position& p, int32_t zero_point, double divisor, uint8_t* out) {
  constexpr uint8_t kFlip = T(-1) < T(0) ? 0x80 : 0;
  constexpr int kLanes = kNative / 2, kChannels = kLanes * kVectors;
  using Bytes = typename Wide<kLanes>::Bytes;
  using Words = typename Wide<kLanes>::Words;
  const int64_t taps = p.span[0].count * p.span[1].count * p.span[2].count;
  const int64_t zero = taps * (zero_point + kFlip);

  Words words[kVectors] = {};
  uint16_t parts[kChannels];
  double sums[kChannels] = {};
  int64_t held = 0;
  each_position(image, p, [&](const uint8_t* from) __attribute__((always_inline)) {
    for (int v = 0; v < kVectors; ++v) {
      Bytes codes;
      std::memcpy(&codes, from + v * kLanes, sizeof codes);
      codes ^= kFlip;
      words[v] += __builtin_convertvector(codes, Words);
    }
    if (++held < kMostTaps) return;
    held = 0;
    std::memcpy(parts, words, sizeof parts);
    for (int i = 0; i < kChannels; ++i) sums[i] += static_cast<double>(static_cast<int32_t>(parts[i]));
    for (int v = 0; v < kVectors; ++v) words[v] = Words{};
  });
  std::memcpy(parts, words, sizeof parts);
  if (taps < kMostTaps) {
    finish<T, kChannels>(parts, static_cast<int32_t>(zero), static_cast<float>(divisor), zero_point, out);
    return;
  }
  for (int i = 0; i < kChannels; ++i) {
    sums[i] += static_cast<double>(static_cast<int32_t>(parts[i]));
    out[i] = static_cast<uint8_t>(mean_code<T>(sums[i] - static_cast<double>(zero), divisor, zero_point));
  }
}

// Goes through the channels in blocks of `kWide`, then `kNarrow`. A rest is one more block that overlaps the last, if
// there is one; fewer channels than the narrowest block are done one by one.
template <int kWide, int kNarrow, class Wide, class Narrow, class One>
inline __attribute__((always_inline)) void blocks(int64_t channels, Wide&& wide, Narrow&& narrow, One&& one) {
  int64_t c = 0;
  for (; c + kWide <= channels; c += kWide) wide(c);
  for (; c + kNarrow <= channels; c += kNarrow) narrow(c);
  if (c == channels) return;
  if (channels >= kNarrow) return narrow(channels - kNarrow);
  for (; c < channels; ++c) one(c);
}

template <class T>
void max_position(const T* image, const Position& p, T* to) {
  constexpr uint8_t kFlip = T(-1) < T(0) ? 0x80 : 0;
  const auto* from = reinterpret_cast<const uint8_t*>(image);
  auto* out = reinterpret_cast<uint8_t*>(to);
  blocks<4 * kNative, 16>(
      p.channels, [&](int64_t at) { max_block<kNative, 4>(from + at, p, kFlip, out + at); },
      [&](int64_t at) { max_block<16, 1>(from + at, p, kFlip, out + at); },
      [&](int64_t at) {
        uint8_t best = 0;
        each_position(from + at, p, [&](const uint8_t* code) {
          const uint8_t flipped = *code ^ kFlip;
          best = flipped > best ? flipped : best;
        });
        out[at] = best ^ kFlip;
      });
}

template <class T>
void average_position(const T* image, const Position& p, int32_t zero_point, double divisor, T* to) {
  const auto* from = reinterpret_cast<const uint8_t*>(image);
  auto* out = reinterpret_cast<uint8_t*>(to);
  blocks<2 * kNative, kNative / 2>(
      p.channels, [&](int64_t at) { average_block<T, 4>(from + at, p, zero_point, divisor, out + at); },
      [&](int64_t at) { average_block<T, 1>(from + at, p, zero_point, divisor, out + at); },
      [&](int64_t at) {
        double sum = 0.0;
        each_position(from + at, p, [&](const uint8_t* code) {
          sum += static_cast<double>(static_cast<T>(*code) - zero_point);
        });
        out[at] = static_cast<uint8_t>(mean_code<T>(sum, divisor, zero_point));
      });
}

template <class T>
Kernels<T> kernels() {
  return {max_position<T>, average_position<T>};
}

}  // namespace
}  // namespace zeropoint::pool
