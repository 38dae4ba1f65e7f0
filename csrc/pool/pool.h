// Pooling and means of codes. No torch: pointers, sizes, threads through Parallel.
//
// Everything works on channels-last codes, (batch, depth, height, width, channels), and is vectorized over channels.
// What a window covers is worked out once for every output coordinate of each dimension (`Span`), so max, average,
// adaptive average and mean differ only in how spans are made. Codes of 8 bits are done line by line (`Line`); 32-bit
// codes, and averages of more than kMostTapsWide, position by position.
#pragma once
#include <cstdint>
#include <limits>
#include <vector>

#include "isa.h"
#include "parallel.h"

namespace zeropoint::pool {

// The input positions first, first + step, ... that one output coordinate of one dimension sees, all of them inside.
struct Span {
  int64_t first = 0, step = 1, count = 1;
  int64_t length = 1;  // what the dimension contributes to the divisor of an average
};

struct Windows {
  int64_t batch = 1, channels = 1;
  int64_t in[3] = {1, 1, 1};
  // One an output coordinate.
  std::vector<Span> spans[3] = {std::vector<Span>(1), std::vector<Span>(1), std::vector<Span>(1)};

  int64_t out_positions() const {
    return static_cast<int64_t>(spans[0].size() * spans[1].size() * spans[2].size());
  }
};

// Spans of a pooling window: positions outside the input drop out. `count_padding`: the length counts padding too, but
// nothing behind it.
std::vector<Span> window_spans(int64_t in, int64_t out, int64_t kernel, int64_t stride, int64_t padding,
                               int64_t dilation, bool count_padding);

// Spans of adaptive pooling: output coordinate o sees positions floor(o * in / out) to ceil((o + 1) * in / out) - 1.
std::vector<Span> adaptive_spans(int64_t in, int64_t out);

// The largest code of each window; the smallest code there is where a window sees nothing. T: uint8, int8, int32.
template <class T>
void max(Isa isa, const Windows& windows, const T* x, T* out, const Parallel& parallel);

// rint(sum(code - zero_point) / divisor) + zero_point, saturated; the division in float64, ties to even. The divisor is
// the product of the spans' lengths, unless one is given (not 0).
template <class T>
void average(Isa isa, const Windows& windows, const T* x, int32_t zero_point, int64_t divisor, T* out,
             const Parallel& parallel);

// The same mean over `count` codes side by side, for each of `rows` rows; the zero point where there are none.
template <class T>
void row_means(const T* x, int64_t rows, int64_t count, int32_t zero_point, T* out, const Parallel& parallel);

// One line of output positions of 8-bit codes: all of the last dimension. Private to csrc/pool.
struct Line {
  const uint8_t* const* rows;  // the input lines under it, from input position `begin` on
  int64_t count;               // of them
  int64_t length;              // what the other dimensions contribute to the divisor of an average
  const Span* spans;           // of the last dimension, one an output position
  int64_t outputs;
  int64_t begin, end;  // input positions that they see
  int64_t channels;
  void* buffer;  // room for end - begin positions of 16-bit words
};
template <class T>
struct Kernels {
  void (*max)(const Line& line, T* out);
  // Lines become one before windows slide along it, or every window is summed by itself; for windows of at most kMostTaps
  // or kMostTapsWide positions. Divisor 0: the product of the lengths.
  void (*average)(const Line& line, int32_t zero_point, int64_t divisor, T* out);
  void (*average_wide)(const Line& line, int32_t zero_point, int64_t divisor, T* out);
};
constexpr int64_t kMostTaps = 257;                  // 257 * 255 < 2**16
constexpr int64_t kMostTapsWide = int64_t{1} << 24;  // 2**24 * 255 < 2**32
Kernels<uint8_t> kernels_portable(uint8_t);
Kernels<int8_t> kernels_portable(int8_t);
Kernels<uint8_t> kernels_avx2(uint8_t);
Kernels<int8_t> kernels_avx2(int8_t);

// The code of a mean: rint(total / divisor) + zero_point, saturated. Adding and subtracting 1.5 * 2**52 rounds a double
// below 2**51 to an integer, ties to even, in two instructions that every processor has as vectors. Static: a file's
// code is its own.
template <class T>
static inline T mean_code(double total, double divisor, int32_t zero_point) {
  constexpr double kRounder = 6755399441055744.0;
  constexpr double kLow = std::numeric_limits<T>::min(), kHigh = std::numeric_limits<T>::max();
  double code = ((total / divisor + kRounder) - kRounder) + zero_point;
  code = code < kLow ? kLow : code;
  code = code > kHigh ? kHigh : code;
  return static_cast<T>(static_cast<int32_t>(code));
}

}  // namespace zeropoint::pool
