// Spans, the walk over output positions, and the kernels of 32-bit codes. Explained in pool.h.
#include "pool/pool.h"

#include <algorithm>

namespace zeropoint::pool {
namespace {

// 32-bit codes are rare here, and sums of them need 64 bits.
template <class F>
void each_position(const int32_t* image, const Position& p, F&& f) {
  const Span &d = p.span[0], &h = p.span[1], &w = p.span[2];
  for (int64_t i = 0; i < d.count; ++i)
    for (int64_t j = 0; j < h.count; ++j)
      for (int64_t k = 0; k < w.count; ++k)
        f(image[(d.first + i * d.step) * p.stride[0] + (h.first + j * h.step) * p.stride[1] +
                (w.first + k * w.step) * p.stride[2]]);
}

void max_wide(const int32_t* image, const Position& p, int32_t* out) {
  for (int64_t c = 0; c < p.channels; ++c) {
    int32_t best = std::numeric_limits<int32_t>::min();
    each_position(image + c, p, [&](int32_t code) { best = std::max(best, code); });
    out[c] = best;
  }
}

void average_wide(const int32_t* image, const Position& p, int32_t zero_point, double divisor, int32_t* out) {
  for (int64_t c = 0; c < p.channels; ++c) {
    int64_t sum = 0;
    each_position(image + c, p, [&](int32_t code) { sum += int64_t{code} - zero_point; });
    out[c] = mean_code<int32_t>(static_cast<double>(sum), divisor, zero_point);
  }
}

Kernels<int32_t> kernels_of(Isa, int32_t) { return {max_wide, average_wide}; }

template <class T>
Kernels<T> kernels_of(Isa isa, T type) {
#if defined(ZEROPOINT_HAS_AVX2)
  if (isa == Isa::avx2 || isa == Isa::avx_vnni || isa == Isa::avx512_vnni) return kernels_avx2(type);
#endif
  (void)isa;
  return kernels_portable(type);
}

// Calls f(image, position, number of the output position) for every output position.
template <class T, class F>
void each_output(const Windows& w, const T* x, const Parallel& parallel, F&& f) {
  const int64_t out_h = static_cast<int64_t>(w.spans[1].size()), out_w = static_cast<int64_t>(w.spans[2].size());
  const int64_t positions = w.out_positions();
  const int64_t in_positions = w.in[0] * w.in[1] * w.in[2];
  if (w.batch * positions == 0) return;
  const int64_t work = std::max<int64_t>(
      1, w.channels * w.spans[0][0].count * w.spans[1][0].count * std::max<int64_t>(1, w.spans[2][0].count));
  const int64_t grain = std::max<int64_t>(1, (int64_t{1} << 16) / work);
  parallel.for_range(0, w.batch * positions, grain, [&](int64_t begin, int64_t end) {
    Position p;
    p.channels = w.channels;
    p.stride[2] = w.channels;
    p.stride[1] = w.in[2] * p.stride[2];
    p.stride[0] = w.in[1] * p.stride[1];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t at = i % positions;
      p.span[0] = w.spans[0][static_cast<size_t>(at / out_w / out_h)];
      p.span[1] = w.spans[1][static_cast<size_t>(at / out_w % out_h)];
      p.span[2] = w.spans[2][static_cast<size_t>(at % out_w)];
      f(x + i / positions * in_positions * w.channels, p, i);
    }
  });
}

}  // namespace

std::vector<Span> window_spans(int64_t in, int64_t out, int64_t kernel, int64_t stride, int64_t padding,
                               int64_t dilation, bool count_padding) {
  std::vector<Span> spans(static_cast<size_t>(out));
  for (int64_t o = 0; o < out; ++o) {
    const int64_t start = o * stride - padding;
    const int64_t skipped = start < 0 ? (-start + dilation - 1) / dilation : 0;
    const int64_t last = std::min(start + (kernel - 1) * dilation, in - 1);
    Span& span = spans[static_cast<size_t>(o)];
    span.first = start + skipped * dilation;
    span.step = dilation;
    span.count = last < span.first ? 0 : (last - span.first) / dilation + 1;
    span.length = count_padding ? std::min(start + kernel, in + padding) - start : span.count;
  }
  return spans;
}

std::vector<Span> adaptive_spans(int64_t in, int64_t out) {
  std::vector<Span> spans(static_cast<size_t>(out));
  for (int64_t o = 0; o < out; ++o) {
    Span& span = spans[static_cast<size_t>(o)];
    span.first = o * in / out;
    span.count = ((o + 1) * in + out - 1) / out - span.first;
    span.length = span.count;
  }
  return spans;
}

template <class T>
void max(Isa isa, const Windows& windows, const T* x, T* out, const Parallel& parallel) {
  const Kernels<T> kernels = kernels_of(isa, T{});
  each_output(windows, x, parallel, [&](const T* image, const Position& position, int64_t i) {
    kernels.max(image, position, out + i * windows.channels);
  });
}

template <class T>
void average(Isa isa, const Windows& windows, const T* x, int32_t zero_point, int64_t divisor, T* out,
             const Parallel& parallel) {
  const Kernels<T> kernels = kernels_of(isa, T{});
  each_output(windows, x, parallel, [&](const T* image, const Position& position, int64_t i) {
    int64_t lengths = 1;
    for (const Span& span : position.span) lengths *= span.length;
    kernels.average(image, position, zero_point, static_cast<double>(divisor != 0 ? divisor : lengths),
                    out + i * windows.channels);
  });
}

template <class T>
void row_means(const T* x, int64_t rows, int64_t count, int32_t zero_point, T* out, const Parallel& parallel) {
  const int64_t grain = std::max<int64_t>(1, (int64_t{1} << 16) / std::max<int64_t>(1, count));
  parallel.for_range(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* codes = x + row * count;
      int64_t total = 0;
      for (int64_t i = 0; i < count; ++i) total += int64_t{codes[i]} - zero_point;
      out[row] = mean_code<T>(static_cast<double>(total), static_cast<double>(std::max<int64_t>(count, 1)), zero_point);
    }
  });
}

#define ZEROPOINT_POOL_OF(T)                                                                                       \
  template void max<T>(Isa, const Windows&, const T*, T*, const Parallel&);                                       \
  template void average<T>(Isa, const Windows&, const T*, int32_t, int64_t, T*, const Parallel&);                 \
  template void row_means<T>(const T*, int64_t, int64_t, int32_t, T*, const Parallel&);
ZEROPOINT_POOL_OF(uint8_t)
ZEROPOINT_POOL_OF(int8_t)
ZEROPOINT_POOL_OF(int32_t)
#undef ZEROPOINT_POOL_OF

}  // namespace zeropoint::pool
