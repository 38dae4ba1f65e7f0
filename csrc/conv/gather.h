// The left matrix of a convolution, gathered row by row, for kernels that want every row in one piece.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "conv/conv.h"
#include "gemm/kernel.h"

namespace zeropoint::conv {

// Gathers rows of the left matrix: for output positions side by side, the channels of all taps, signs flipped, the zero
// point where a tap lies outside. Kernel lines stand `line` bytes apart, as the weights are packed. Runs of codes are
// copied in vectors that may write up to 15 bytes too many: always where a later run of the same row goes, or behind the
// row. Hence the order of loops, and `row_stride`.
class Gather {
 public:
  Gather(const Geometry& geometry, const uint8_t* x, bool x_signed, uint8_t fill, int64_t line)
      : g_(geometry),
        line_(line),
        x_(x),
        end_(x + geometry.batch * geometry.in_positions() * geometry.weight.in_channels()),
        fill_(fill),
        channels_(geometry.weight.in_channels()),
        signed_(x_signed) {
    std::memset(&flip_, x_signed ? 0x80 : 0, sizeof flip_);
    // A kernel line is one run where its taps lie side by side, and else one run a tap.
    const bool whole = g_.weight.groups == 1 && (g_.dilation[2] == 1 || g_.weight.kernel[2] == 1);
    runs_ = whole ? 1 : g_.weight.kernel[2];
    run_ = whole ? g_.weight.kernel[2] * g_.weight.group_channels : g_.weight.group_channels;
    // Output columns [inner_begin_, inner_end_) have all their taps inside.
    const int64_t step = g_.stride[2], reach = (g_.weight.kernel[2] - 1) * g_.dilation[2];
    const int64_t room = g_.in[2] - 1 - reach + g_.padding[2];
    inner_begin_ = (g_.padding[2] + step - 1) / step;
    inner_end_ = room < 0 ? 0 : room / step + 1;
  }

  // Bytes from one gathered row to the next.
  static int64_t row_stride(int64_t depth) { return gemm::round_up(depth + kVector - 1, kVector); }

  // The rows of output positions [first, first + count) of one group.
  void rows(int64_t first, int64_t count, int64_t group, int64_t stride, uint8_t* to) const {
    while (count > 0) {
      const int64_t w = first % g_.out[2], line = first / g_.out[2];
      const int64_t length = std::min(count, g_.out[2] - w);
      const int64_t h = line % g_.out[1], d = line / g_.out[1] % g_.out[0];
      segment(line / g_.out[1] / g_.out[0], d, h, w, length, group * g_.weight.group_channels, stride, to);
      fill_gaps(length, stride, to);
      first += length;
      count -= length;
      to += length * stride;
    }
  }

 private:
  static constexpr int64_t kVector = 16;
  typedef uint8_t Vector __attribute__((vector_size(kVector)));

  // Output positions [w, w + length) of one output line.
  void segment(int64_t image, int64_t d, int64_t h, int64_t w, int64_t length, int64_t first_channel, int64_t stride,
               uint8_t* to) const {
    const int64_t* kernel = g_.weight.kernel;
    const int64_t line_bytes = kernel[2] * g_.weight.group_channels;
    const int64_t begin = std::clamp(inner_begin_, w, w + length), end = std::clamp(inner_end_, begin, w + length);
    for (int64_t kd = 0; kd < kernel[0]; ++kd) {
      const int64_t in_d = d * g_.stride[0] - g_.padding[0] + kd * g_.dilation[0];
      for (int64_t kh = 0; kh < kernel[1]; ++kh, to += line_) {
        const int64_t in_h = h * g_.stride[1] - g_.padding[1] + kh * g_.dilation[1];
        if (in_d < 0 || in_d >= g_.in[0] || in_h < 0 || in_h >= g_.in[1]) {
          for (int64_t i = 0; i < length; ++i) std::memset(to + i * stride, fill_, static_cast<size_t>(line_bytes));
          continue;
        }
        const uint8_t* from = x_ + ((image * g_.in[0] + in_d) * g_.in[1] + in_h) * g_.in[2] * channels_ + first_channel;
        for (int64_t i = w; i < begin; ++i) border(from, i, to + (i - w) * stride);
        inner(from + (begin * g_.stride[2] - g_.padding[2]) * channels_, end - begin, stride, to + (begin - w) * stride);
        for (int64_t i = end; i < w + length; ++i) border(from, i, to + (i - w) * stride);
      }
    }
  }

  // Between kernel lines the zero point: there it counts as 0 whatever the zero points of the weights are.
  void fill_gaps(int64_t length, int64_t stride, uint8_t* to) const {
    const int64_t line_bytes = g_.weight.kernel[2] * g_.weight.group_channels;
    const int64_t lines = g_.weight.kernel[0] * g_.weight.kernel[1];
    if (line_ == line_bytes) return;
    for (int64_t i = 0; i < length; ++i)
      for (int64_t k = 0; k < lines; ++k)
        std::memset(to + i * stride + k * line_ + line_bytes, fill_, static_cast<size_t>(line_ - line_bytes));
  }

  // One kernel line of one output position, some of whose taps lie outside.
  void border(const uint8_t* line, int64_t w, uint8_t* to) const {
    for (int64_t k = 0; k < g_.weight.kernel[2]; ++k, to += g_.weight.group_channels) {
      const int64_t in_w = w * g_.stride[2] - g_.padding[2] + k * g_.dilation[2];
      if (in_w < 0 || in_w >= g_.in[2])
        std::memset(to, fill_, static_cast<size_t>(g_.weight.group_channels));
      else
        copy(line + in_w * channels_, g_.weight.group_channels, to);
    }
  }

  // One kernel line of `count` output positions.
  void inner(const uint8_t* from, int64_t count, int64_t stride, uint8_t* to) const {
    const int64_t step = g_.stride[2] * channels_, hop = g_.dilation[2] * channels_;
    if (runs_ == 1 && run_ <= kVector) {
      for (; count > 0 && end_ - from >= (count - 1) * step + kVector; --count, from += step, to += stride)
        copy_vector(from, to);
    }
    for (int64_t i = 0; i < count; ++i, from += step, to += stride)
      for (int64_t r = 0; r < runs_; ++r) copy(from + r * hop, run_, to + r * run_);
  }

  void copy_vector(const uint8_t* from, uint8_t* to) const {
    Vector codes;
    std::memcpy(&codes, from, sizeof codes);
    codes ^= flip_;
    std::memcpy(to, &codes, sizeof codes);
  }

  void copy(const uint8_t* from, int64_t count, uint8_t* to) const {
    constexpr int64_t kLong = 256;
    if (!signed_ && count >= kLong) return static_cast<void>(std::memcpy(to, from, static_cast<size_t>(count)));
    int64_t i = 0;
    for (; i < count && i + kVector <= end_ - from; i += kVector) copy_vector(from + i, to + i);
    for (; i < count; ++i) to[i] = from[i] ^ flip_[0];
  }

  const Geometry& g_;
  int64_t line_;
  const uint8_t* x_;
  const uint8_t* end_;
  uint8_t fill_;
  int64_t channels_;
  bool signed_;
  Vector flip_;
  int64_t runs_, run_, inner_begin_, inner_end_;
};

}  // namespace zeropoint::conv
