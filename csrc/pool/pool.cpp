// Spans, the walk over output lines, and what is done code by code. Explained in pool.h.
#include "pool/pool.h"

#include <algorithm>

#include "gemm/kernel.h"

namespace zeropoint::pool {
namespace {

int64_t lines_of(const Windows& w) { return static_cast<int64_t>(w.spans[0].size() * w.spans[1].size()); }

int64_t most(const std::vector<Span>& spans) {
  int64_t count = 0;
  for (const Span& span : spans) count = std::max(count, span.count);
  return count;
}

// Calls f(image, spans of depth and height, number of the line) for ranges of output lines.
template <class T, class F>
void each_line(const Windows& w, const T* x, const Parallel& parallel, F&& f) {
  const int64_t height = static_cast<int64_t>(w.spans[1].size()), lines = lines_of(w);
  const int64_t image = w.in[0] * w.in[1] * w.in[2] * w.channels;
  const int64_t work = w.channels * w.in[2] * most(w.spans[0]) * most(w.spans[1]);
  const int64_t grain = std::max<int64_t>(1, (int64_t{1} << 16) / std::max<int64_t>(1, work));
  parallel.for_range(0, w.batch * lines, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      f(x + i / lines * image, w.spans[0][static_cast<size_t>(i % lines / height)],
        w.spans[1][static_cast<size_t>(i % lines % height)], i);
  });
}

// Calls f(line, number of the line) for every output line of 8-bit codes.
template <class T, class F>
void each_packed_line(const Windows& w, const T* x, const Parallel& parallel, F&& f) {
  const std::vector<Span>& spans = w.spans[2];
  int64_t first = w.in[2], last = -1;
  for (const Span& span : spans)
    if (span.count > 0) {
      first = std::min(first, span.first);
      last = std::max(last, span.first + (span.count - 1) * span.step);
    }
  const int64_t begin = std::min(first, last + 1), row = w.in[2] * w.channels;
  const int64_t most_rows = most(w.spans[0]) * most(w.spans[1]);
  each_line(w, x, parallel, [&](const T* image, const Span& d, const Span& h, int64_t i) {
    auto* rows = static_cast<const uint8_t**>(
        gemm::thread_scratch(gemm::Scratch::rows, static_cast<size_t>(most_rows) * sizeof(const uint8_t*)));
    int64_t count = 0;
    for (int64_t a = 0; a < d.count; ++a)
      for (int64_t b = 0; b < h.count; ++b)
        rows[count++] = reinterpret_cast<const uint8_t*>(
            image + ((d.first + a * d.step) * w.in[1] + h.first + b * h.step) * row + begin * w.channels);
    void* buffer = gemm::thread_scratch(gemm::Scratch::tile,
                                        static_cast<size_t>((last + 1 - begin) * w.channels) * sizeof(uint16_t));
    f(Line{rows, count, d.length * h.length, spans.data(), static_cast<int64_t>(spans.size()), begin, last + 1,
           w.channels, buffer},
      i);
  });
}

// Calls f(image, the window's spans in each dimension, offset of the output position's first channel) for every output
// position.
template <class T, class F>
void each_position(const Windows& w, const T* x, const Parallel& parallel, F&& f) {
  const int64_t outputs = static_cast<int64_t>(w.spans[2].size());
  each_line(w, x, parallel, [&](const T* image, const Span& d, const Span& h, int64_t i) {
    for (int64_t o = 0; o < outputs; ++o)
      f(image, d, h, w.spans[2][static_cast<size_t>(o)], (i * outputs + o) * w.channels);
  });
}

// Calls f(code) for every code of channel c that a window sees.
template <class T, class F>
void each_code(const Windows& w, const T* image, const Span& d, const Span& h, const Span& s, int64_t c, F&& f) {
  for (int64_t i = 0; i < d.count; ++i)
    for (int64_t j = 0; j < h.count; ++j)
      for (int64_t k = 0; k < s.count; ++k)
        f(image[(((d.first + i * d.step) * w.in[1] + h.first + j * h.step) * w.in[2] + s.first + k * s.step) *
                    w.channels +
                c]);
}

template <class T>
Kernels<T> kernels_of(Isa isa, T type) {
#if defined(ZEROPOINT_HAS_AVX2)
  if (includes_x86(isa, Isa::avx2)) return kernels_avx2(type);
#endif
  (void)isa;
  return kernels_portable(type);
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
void max(Isa isa, const Windows& w, const T* x, T* out, const Parallel& parallel) {
  if constexpr (sizeof(T) == 1) {
    const Kernels<T> kernels = kernels_of(isa, T{});
    const int64_t step = static_cast<int64_t>(w.spans[2].size()) * w.channels;
    each_packed_line(w, x, parallel, [&](const Line& line, int64_t i) { kernels.max(line, out + i * step); });
  } else {
    each_position(w, x, parallel, [&](const T* image, const Span& d, const Span& h, const Span& s, int64_t at) {
      for (int64_t c = 0; c < w.channels; ++c) {
        T best = std::numeric_limits<T>::min();
        each_code(w, image, d, h, s, c, [&](T code) { best = std::max(best, code); });
        out[at + c] = best;
      }
    });
  }
}

template <class T>
void average(Isa isa, const Windows& w, const T* x, int32_t zero_point, int64_t divisor, T* out,
             const Parallel& parallel) {
  if constexpr (sizeof(T) == 1) {
    const int64_t taps = most(w.spans[0]) * most(w.spans[1]) * most(w.spans[2]);
    if (taps <= kMostTapsWide) {
      const Kernels<T> kernels = kernels_of(isa, T{});
      // Wide windows hardly overlap: nothing is gained by adding lines up before.
      const bool slides = taps <= kMostTaps && most(w.spans[2]) <= 8;
      const auto average_line = slides ? kernels.average : kernels.average_wide;
      const int64_t step = static_cast<int64_t>(w.spans[2].size()) * w.channels;
      return each_packed_line(w, x, parallel, [&](const Line& line, int64_t i) {
        average_line(line, zero_point, divisor, out + i * step);
      });
    }
  }
  each_position(w, x, parallel, [&](const T* image, const Span& d, const Span& h, const Span& s, int64_t at) {
    const auto by = static_cast<double>(divisor != 0 ? divisor : d.length * h.length * s.length);
    for (int64_t c = 0; c < w.channels; ++c) {
      int64_t sum = 0;
      each_code(w, image, d, h, s, c, [&](T code) { sum += int64_t{code} - zero_point; });
      out[at + c] = mean_code<T>(static_cast<double>(sum), by, zero_point);
    }
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
