#include "conv/layout.h"

#include <algorithm>
#include <cstring>

#include "isa.h"

namespace zeropoint::conv {
namespace {

// One line of positions. The usual source has each channel's positions side by side.
template <int64_t kChannels>
void interleave(const uint8_t* from, int64_t channel_stride, int64_t count, uint8_t* to) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t c = 0; c < kChannels; ++c) to[i * kChannels + c] = from[c * channel_stride + i];
}

void line(const uint8_t* from, int64_t channel_stride, int64_t stride, int64_t channels, int64_t count, uint8_t* to) {
  if (stride == 1) {
    if (channels == 1) return static_cast<void>(std::memcpy(to, from, static_cast<size_t>(count)));
    if (channels == 2) return interleave<2>(from, channel_stride, count, to);
    if (channels == 3) {
#if defined(ZEROPOINT_HAS_AVX2)
      static const bool has_avx2 = processor_has(Isa::avx2);  // asks CPUID, which traps in a virtual machine
      if (has_avx2) return interleave3_avx2(from, channel_stride, count, to);
#endif
      return interleave<3>(from, channel_stride, count, to);
    }
    if (channels == 4) return interleave<4>(from, channel_stride, count, to);
  }
  // Squares, so that neither side leaves the cache before its lines are used up.
  constexpr int64_t kSquare = 32;
  for (int64_t i = 0; i < count; i += kSquare)
    for (int64_t c = 0; c < channels; c += kSquare) {
      const int64_t i_end = std::min(count, i + kSquare), c_end = std::min(channels, c + kSquare);
      for (int64_t p = i; p < i_end; ++p)
        for (int64_t q = c; q < c_end; ++q) to[p * channels + q] = from[q * channel_stride + p * stride];
    }
}

}  // namespace

bool Strided::is_channels_last() const {
  int64_t expected = 1;
  const auto fits = [&](int64_t length, int64_t step) {
    const bool ok = length == 1 || step == expected;
    expected *= length;
    return ok;
  };
  return fits(channels, channel_stride) && fits(size[2], stride[2]) && fits(size[1], stride[1]) &&
         fits(size[0], stride[0]) && fits(batch, batch_stride);
}

void to_channels_last(const Strided& x, uint8_t* out, const Parallel& parallel) {
  const int64_t row = x.size[2] * x.channels;
  const int64_t grain = std::max<int64_t>(1, (int64_t{1} << 16) / std::max<int64_t>(1, row));
  parallel.for_range(0, x.batch * x.size[0] * x.size[1], grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t h = i % x.size[1], d = i / x.size[1] % x.size[0], n = i / x.size[1] / x.size[0];
      line(x.data + n * x.batch_stride + d * x.stride[0] + h * x.stride[1], x.channel_stride, x.stride[2], x.channels,
           x.size[2], out + i * row);
    }
  });
}

}  // namespace zeropoint::conv
