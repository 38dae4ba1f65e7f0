// The left matrix of a convolution as a kernel that walks rows reads it (gemm::Walk): straight from the activations, or
// from a strip of them with its border.
//
// A row, the codes under the window of one output position, consists of segments: kernel lines, or single taps where
// these lie apart. In memory they are where the window is; rows of neighbouring positions overlap. What is missing for
// that is the border, for signed codes the flipped sign, and for some kernels 16 bits: so the input lines under a strip of output positions are
// copied once, with their border, into memory that stays in the cache. That is a fraction of what gathering rows takes.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "conv/conv.h"
#include "gemm/kernel.h"

namespace zeropoint::conv {

class Strips {
 public:
  // Whether the windows' rows can be walked at all, in runs of `unit` codes: segments must be as the weights are packed,
  // and the lines under few positions not too long to be copied.
  static bool possible(const Geometry& g, int64_t unit) {
    constexpr int64_t kMostCodes = 1 << 24;
    int64_t window = g.weight.in_channels();
    for (int d = 0; d < 3; ++d) {
      const int64_t reach = (g.weight.kernel[d] - 1) * g.dilation[d] + 1;
      const int64_t positions = d == 2 ? g.out[2] : std::min(g.out[d], (kLeastRows - 2 + g.out[2]) / g.out[2] + 1);
      if (window > kMostCodes || reach > kMostCodes || (positions - 1) * g.stride[d] > kMostCodes) return false;
      window *= d == 0 ? reach : (positions - 1) * g.stride[d] + reach;
    }
    return window <= kMostCodes && ((g.weight.groups == 1 && g.dilation[2] == 1) || g.weight.kernel[2] == 1 ||
                                    g.weight.group_channels % unit == 0);
  }

  // `line`: codes of a kernel line in the packed weights.
  Strips(const Geometry& geometry, const uint8_t* x, bool x_signed, uint8_t fill, int64_t line,
         const gemm::Packed& packed, int64_t threads)
      : g_(geometry),
        x_(x),
        flip_(x_signed ? 0x80 : 0),
        fill_(fill),
        bytes_(gemm::walk_bytes(packed)),
        channels_(geometry.weight.in_channels()) {
    const int64_t* kernel = g_.weight.kernel;
    const bool whole = kernel[2] == 1 || (g_.weight.groups == 1 && g_.dilation[2] == 1);
    run_ = whole ? line : g_.weight.group_channels;
    bool inside = line == kernel[2] * g_.weight.group_channels;  // or else a row's last bytes are another row's
    for (int d = 0; d < 3; ++d) {
      reach_[d] = (kernel[d] - 1) * g_.dilation[d] + 1;
      inside = inside && g_.padding[d] == 0 && (g_.out[d] - 1) * g_.stride[d] + reach_[d] <= g_.in[d];
    }
    in_place_ = inside && !x_signed && bytes_ == 1;
    choose_rows(packed, threads);
    for (int64_t d = 0; d < kernel[0]; ++d)
      for (int64_t h = 0; h < kernel[1]; ++h)
        for (int64_t w = 0; w < (whole ? 1 : kernel[2]); ++w)
          segments_.push_back(d * depth_step() + h * g_.dilation[1] * line_pitch_ +
                              w * g_.dilation[2] * channels_);
  }

  // Output positions of a strip; the last may have fewer.
  int64_t rows() const { return rows_; }

  // Bytes of a code in what `prepare` returns.
  int64_t bytes() const { return bytes_; }

  // Prepares output positions [first, first + count), count <= rows(). Returns what `walk` counts from, in codes, for the
  // first channel; `offsets` has room for rows().
  const uint8_t* prepare(int64_t first, int64_t count, int64_t* offsets) const {
    uint8_t* strip = nullptr;
    if (!in_place_)
      strip = static_cast<uint8_t*>(gemm::thread_scratch(gemm::Scratch::rows, static_cast<size_t>(scratch_bytes_)));
    int64_t slab = 0;
    while (count > 0) {
      // The part that lies in one depth of one image or, where strips are narrow, in one line.
      const int64_t plane = g_.out[1] * g_.out[2], in_plane = first % plane;
      const int64_t part = std::min(count, narrow_ ? g_.out[2] - in_plane % g_.out[2] : plane - in_plane);
      const int64_t d = first / plane % g_.out[0], image = first / plane / g_.out[0];
      const int64_t top = in_plane / g_.out[2], bottom = (in_plane + part - 1) / g_.out[2];
      int64_t w = in_plane % g_.out[2];
      int64_t from = 0, lines_above = 0, columns_before = 0;
      if (in_place_) {
        from = (image * g_.in[0] + d * g_.stride[0]) * g_.in[1] * line_pitch_;
      } else {
        lines_above = top * g_.stride[1];
        columns_before = narrow_ ? w * g_.stride[2] : 0;
        from = slab++ * g_.weight.kernel[0] * depth_pitch_;
        copy(image, d, lines_above, (bottom - top) * g_.stride[1] + reach_[1], columns_before, strip + from * bytes_);
      }
      for (int64_t h = top; h <= bottom; ++h, w = 0) {
        const int64_t line = from + (h * g_.stride[1] - lines_above) * line_pitch_ - columns_before * channels_;
        const int64_t end = h == bottom ? (in_plane + part - 1) % g_.out[2] + 1 : g_.out[2];
        for (; w < end; ++w) *offsets++ = line + w * g_.stride[2] * channels_;
      }
      first += part;
      count -= part;
    }
    return in_place_ ? x_ : strip;
  }

  gemm::Walk walk(const int64_t* offsets) const {
    return {offsets, segments_.data(), static_cast<int64_t>(segments_.size()), run_};
  }

 private:
  static constexpr int64_t kVector = 32;
  typedef uint8_t Vector __attribute__((vector_size(kVector)));

  static constexpr int64_t kLeastRows = 48, kMostRows = 1024;  // that weights are read for

  // Codes from the tap of one depth to the tap of the next.
  int64_t depth_step() const { return in_place_ ? g_.dilation[0] * g_.in[1] * line_pitch_ : depth_pitch_; }

  // What `rows` output positions need.
  void measure(int64_t rows) {
    const int64_t plane = narrow_ ? g_.out[2] : g_.out[1] * g_.out[2];
    const int64_t lines = narrow_ ? 1 : std::min(g_.out[1], (rows - 2 + g_.out[2]) / g_.out[2] + 1);
    const int64_t columns = narrow_ ? std::min(rows, g_.out[2]) : g_.out[2];
    width_ = in_place_ ? g_.in[2] : (columns - 1) * g_.stride[2] + reach_[2];
    line_pitch_ = width_ * channels_;
    depth_pitch_ = ((lines - 1) * g_.stride[1] + reach_[1]) * line_pitch_;
    const int64_t slabs = (rows - 2 + plane) / plane + 1;
    scratch_bytes_ = (slabs * g_.weight.kernel[0] * depth_pitch_ + kVector) * bytes_;
  }

  // What strips have a multiple of. Tiles of AMX are loaded from lines, as long as all are whole.
  int64_t row_unit(const gemm::Packed& packed) const {
    const int64_t tile = gemm::tile_rows(packed), line = g_.out[2];
    return packed.isa != Isa::amx_int8 || line > kMostRows ? tile : gemm::round_up(tile, line);
  }

  // Strips of equal length whose input lines stay in the second-level cache.
  void choose_rows(const gemm::Packed& packed, int64_t threads) {
    // Processors with AMX have 2 MiB of it, and weights pass through quickly.
    const int64_t most_bytes = packed.isa == Isa::amx_int8 ? 384 * 1024 : 96 * 1024;
    const int64_t all = g_.batch * g_.out[0] * g_.out[1] * g_.out[2];
    measure(kLeastRows);
    narrow_ = scratch_bytes_ > most_bytes || (g_.out[0] == 1 && g_.out[1] == 1);
    rows_ = kMostRows;
    for (measure(rows_); rows_ > kLeastRows && scratch_bytes_ > most_bytes; measure(rows_)) rows_ -= kLeastRows / 3;
    int64_t strips = (all + rows_ - 1) / rows_;
    if (all >= kLeastRows * threads) strips = gemm::round_up(strips, threads);
    rows_ = gemm::round_up((all + strips - 1) / strips, row_unit(packed));
    measure(rows_);
  }

  // Input lines [top, top + lines) from column `before` on, both counted from the border's first, at the depths of all
  // taps.
  void copy(int64_t image, int64_t d, int64_t top, int64_t lines, int64_t before, uint8_t* to) const {
    // Columns [left, right) of the strip lie inside the input.
    const int64_t left = std::clamp<int64_t>(g_.padding[2] - before, 0, width_);
    const int64_t right = std::clamp<int64_t>(g_.in[2] + g_.padding[2] - before, left, width_);
    for (int64_t k = 0; k < g_.weight.kernel[0]; ++k, to += depth_pitch_ * bytes_) {
      const int64_t in_d = d * g_.stride[0] - g_.padding[0] + k * g_.dilation[0];
      for (int64_t i = 0; i < lines; ++i) {
        uint8_t* line = to + i * line_pitch_ * bytes_;
        const int64_t in_h = top + i - g_.padding[1];
        if (in_d < 0 || in_d >= g_.in[0] || in_h < 0 || in_h >= g_.in[1]) {
          fill(line, 0, width_);
          continue;
        }
        const int64_t position = ((image * g_.in[0] + in_d) * g_.in[1] + in_h) * g_.in[2] + left + before - g_.padding[2];
        fill(line, 0, left);
        copy_codes(x_ + position * channels_, (right - left) * channels_, line + left * channels_ * bytes_);
        fill(line, right, width_);
      }
    }
  }

  // Positions [begin, end) of a line become the zero point.
  void fill(uint8_t* line, int64_t begin, int64_t end) const {
    const int64_t count = (end - begin) * channels_;
    line += begin * channels_ * bytes_;
    if (bytes_ == 1) return static_cast<void>(std::memset(line, fill_, static_cast<size_t>(count)));
    std::fill_n(reinterpret_cast<uint16_t*>(line), count, fill_);
  }

  void copy_codes(const uint8_t* from, int64_t count, uint8_t* to) const {
    if (bytes_ == 2) return convert(from, count, reinterpret_cast<uint16_t*>(to));
    if (flip_ == 0) return static_cast<void>(std::memcpy(to, from, static_cast<size_t>(count)));
    convert(from, count, to);
  }

  template <class Code>
  void convert(const uint8_t* from, int64_t count, Code* to) const {
    typedef Code To __attribute__((vector_size(kVector * sizeof(Code))));
    int64_t i = 0;
    for (; i + kVector <= count; i += kVector) {
      Vector codes;
      std::memcpy(&codes, from + i, sizeof codes);
      const To converted = __builtin_convertvector(codes ^ flip_, To);
      std::memcpy(to + i, &converted, sizeof converted);
    }
    for (; i < count; ++i) to[i] = from[i] ^ flip_;
  }

  const Geometry& g_;
  const uint8_t* x_;
  uint8_t flip_, fill_;
  int64_t bytes_, channels_;
  int64_t reach_[3];
  bool in_place_, narrow_ = false;
  int64_t width_ = 0, line_pitch_ = 0, run_;
  int64_t rows_ = 0, depth_pitch_ = 0, scratch_bytes_ = 0;
  std::vector<int64_t> segments_;
};

}  // namespace zeropoint::conv
