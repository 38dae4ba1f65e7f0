// Depthwise convolution: packing, the ring of prepared rows, and the portable row kernel. Explained in depthwise.h.
#include "conv/depthwise.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "gemm/kernel.h"

namespace zeropoint::conv::depthwise {
namespace {

struct Block {
  int64_t first, width;  // channels; `width` may reach beyond the last
  int64_t lane;          // where its lanes begin in per-lane arrays
  int64_t weights;       // where its weights begin, in bytes
};

int64_t taps_of(Form form) { return form == Form::quads ? 4 : form == Form::pairs ? 2 : 1; }
int64_t tap_bytes(Form form) { return form == Form::quads ? 1 : 2; }
int64_t widest(Form form) { return form == Form::quads ? 64 : form == Form::pairs ? 32 : 16; }

int64_t lane_bytes(Form form, const Kernel& kernel) {
  const int64_t groups = (kernel.rows + taps_of(form) - 1) / taps_of(form);
  return kernel.columns * groups * taps_of(form) * tap_bytes(form);
}

std::vector<Block> blocks_of(Form form, const WeightSize& size) {
  std::vector<Block> blocks;
  const int64_t bytes = lane_bytes(form, kernel_of(size));
  int64_t lane = 0;
  for (int64_t width = widest(form); width >= 16; width /= 2)
    while (size.out_channels - lane >= width || (width == 16 && lane < size.out_channels)) {
      blocks.push_back({lane, width, lane, lane * bytes});
      lane += width;
    }
  return blocks;
}

int64_t lanes_of(const WeightSize& size) { return gemm::round_up(size.out_channels, 16); }
int64_t sums_bytes(const WeightSize& size) { return gemm::round_up(lanes_of(size) * int64_t{sizeof(int32_t)}, 64); }

void run_single(const Row& row) {
  constexpr int64_t kWidth = 16;
  for (int64_t o = 0; o < row.columns; ++o) {
    uint32_t sums[kWidth];  // modulo 2**32: damaged weights may give any sum
    std::memcpy(sums, row.start, sizeof sums);
    const int16_t* w = static_cast<const int16_t*>(row.weights);
    for (int64_t k = 0; k < row.kernel_columns; ++k)
      for (int64_t r = 0; r < row.kernel_rows; ++r, w += kWidth) {
        const uint8_t* x = row.rows[r] + (o * row.stride + k * row.dilation) * kWidth;
        for (int64_t c = 0; c < kWidth; ++c) sums[c] += static_cast<uint32_t>(x[c] * w[c]);
      }
    for (int64_t c = 0; c < row.channels; ++c) {
      float y = static_cast<float>(static_cast<int32_t>(sums[c])) * row.multiplier[c];
      y = y + row.offset[c];
      y = std::min(std::max(y, static_cast<float>(row.low)), row.high);
      row.out[o * row.out_stride + c] =
          static_cast<uint8_t>(static_cast<int32_t>(std::nearbyintf(y)) + row.out_zero_point);
    }
  }
}

void copy_single(const uint8_t* from, int64_t from_stride, int64_t count, uint8_t flip, uint8_t* to) {
  for (int64_t i = 0; i < count; ++i, from += from_stride, to += 16)
    for (int64_t c = 0; c < 16; ++c) to[c] = from[c] ^ flip;
}

Choice choose(Form form, int64_t width, const Kernel& kernel, int64_t stride, int64_t dilation) {
#if defined(ZEROPOINT_HAS_AVX512VNNI)
  if (form == Form::quads) return choose_avx512vnni(width, kernel, stride, dilation);
#endif
#if defined(ZEROPOINT_HAS_AVX2)
  if (form == Form::pairs) return choose_avx2(width, kernel, stride, dilation);
#endif
  (void)form, (void)width, (void)kernel, (void)stride, (void)dilation;
  return {run_single, copy_single, 1};
}

// Per-lane arrays of one call.
struct Lanes {
  std::vector<int32_t> start;
  std::vector<float> multiplier, offset;
};

Lanes make_lanes(const std::vector<Block>& blocks, const WeightSize& size, const int32_t* sums, int32_t za,
                 const Requantize& requantize) {
  const size_t count = static_cast<size_t>(lanes_of(size));
  Lanes lanes{std::vector<int32_t>(count), std::vector<float>(count), std::vector<float>(count)};
  for (const Block& block : blocks) {
    const int64_t channels = std::min(block.width, size.out_channels - block.first);
    for (int64_t c = 0; c < channels; c += 4)  // four channels always stand together
      for (int64_t i = 0, lane = block.lane + lane_of(block.width, c); i < std::min<int64_t>(4, channels - c); ++i) {
        const size_t at = static_cast<size_t>(lane + i);
        lanes.start[at] = static_cast<int32_t>(0u - static_cast<uint32_t>(za) * static_cast<uint32_t>(sums[at]));
        lanes.multiplier[at] = requantize.multiplier[block.first + c + i];
        lanes.offset[at] = requantize.offset ? requantize.offset[block.first + c + i] : 0.0f;
      }
  }
  return lanes;
}

// The rows of one block and one range of columns, prepared for the row kernel.
class Ring {
 public:
  // `positions`: of a prepared row; `begin`: the input column of its first position, perhaps negative.
  Ring(const Geometry& geometry, const uint8_t* x, uint8_t flip, uint8_t fill, int64_t positions, int64_t width)
      : g_(geometry),
        x_(x),
        flip_(flip),
        multiplier_(geometry.weight.group_columns()),
        positions_(positions),
        row_bytes_(positions * width),
        slots_(geometry.weight.kernel[0] * geometry.weight.kernel[1]) {
    const size_t bytes = static_cast<size_t>((slots_ + 1) * row_bytes_);
    memory_ = static_cast<uint8_t*>(gemm::thread_scratch(gemm::Scratch::tile, bytes));
    std::memset(memory_ + slots_ * row_bytes_, fill, static_cast<size_t>(row_bytes_));
    held_.assign(static_cast<size_t>(slots_), -1);
    fill_ = fill;
  }

  // What follows belongs to another image, block or range of columns.
  void start(int64_t image, const Block& block, int64_t begin, CopyPositions copy) {
    image_ = image;
    block_ = block;
    begin_ = begin;
    copy_ = copy;
    channels_ = std::min(block.width, g_.weight.out_channels - block.first);
    std::fill(held_.begin(), held_.end(), -1);
  }

  // Input row (d, h), where kernel row (kd, kh) meets it.
  const uint8_t* row(int64_t d, int64_t h, int64_t kd, int64_t kh) {
    if (d < 0 || d >= g_.in[0] || h < 0 || h >= g_.in[1]) return memory_ + slots_ * row_bytes_;
    const int64_t rows = g_.weight.kernel[1];
    const int64_t slot = kd * rows + (g_.dilation[1] == 1 ? h % rows : kh);
    uint8_t* to = memory_ + slot * row_bytes_;
    const int64_t number = d * g_.in[1] + h;
    if (held_[static_cast<size_t>(slot)] != number) {
      held_[static_cast<size_t>(slot)] = number;
      prepare(((image_ * g_.in[0] + d) * g_.in[1] + h) * g_.in[2], to);
    }
    return to;
  }

 private:
  void prepare(int64_t first_position, uint8_t* to) const {
    const int64_t width = block_.width;
    const int64_t before = std::clamp<int64_t>(-begin_, 0, positions_);
    const int64_t end = std::clamp<int64_t>(g_.in[2] - begin_, before, positions_);
    const int64_t in_channels = g_.weight.in_channels();
    const uint8_t* from = x_ + (first_position + begin_ + before) * in_channels;
    std::memset(to, fill_, static_cast<size_t>(before * width));
    if (multiplier_ == 1 && channels_ == width)
      copy_(from + block_.first, in_channels, end - before, flip_, to + before * width);
    else
      for (int64_t p = before; p < end; ++p, from += in_channels) {
        uint8_t* lanes = to + p * width;
        for (int64_t c = 0; c < channels_; ++c) lanes[c] = from[(block_.first + c) / multiplier_] ^ flip_;
        std::memset(lanes + channels_, 0, static_cast<size_t>(width - channels_));
      }
    std::memset(to + end * width, fill_, static_cast<size_t>((positions_ - end) * width));
  }

  const Geometry& g_;
  const uint8_t* x_;
  uint8_t flip_, fill_ = 0;
  int64_t multiplier_, positions_, row_bytes_, slots_;
  uint8_t* memory_;
  std::vector<int64_t> held_;  // the row in each slot, or -1
  int64_t image_ = 0, begin_ = 0, channels_ = 0;
  Block block_ = {};
  CopyPositions copy_ = nullptr;
};

}  // namespace

Kernel kernel_of(const WeightSize& size) {
  if (size.kernel[0] == 1 && size.kernel[1] == 1) return {size.kernel[2], 1, true};
  return {size.kernel[0] * size.kernel[1], size.kernel[2], false};
}

Form form_of(Isa isa, bool weight_zero_points) {
  switch (isa) {
    case Isa::avx512_vnni:
    case Isa::amx_int8:
      return weight_zero_points ? Form::pairs : Form::quads;
    case Isa::avx2:
    case Isa::avx_vnni:
      return Form::pairs;
    default:
      return Form::single;
  }
}

int64_t packed_bytes(Form form, const WeightSize& size) {
  return sums_bytes(size) + lanes_of(size) * lane_bytes(form, kernel_of(size));
}

void pack(Form form, const int8_t* weight, const int32_t* weight_zero_point, const WeightSize& size, uint8_t* to) {
  const Kernel kernel = kernel_of(size);
  const int64_t unit = taps_of(form);
  const int64_t groups = (kernel.rows + unit - 1) / unit;
  std::memset(to, 0, static_cast<size_t>(packed_bytes(form, size)));
  auto* sums = reinterpret_cast<int32_t*>(to);
  uint8_t* weights = to + sums_bytes(size);
  for (const Block& block : blocks_of(form, size))
    for (int64_t c = 0; c < std::min(block.width, size.out_channels - block.first); ++c) {
      const int64_t channel = block.first + c, lane = lane_of(block.width, c);
      const int32_t zero_point = weight_zero_point ? weight_zero_point[channel] : 0;
      int32_t sum = 0;
      for (int64_t r = 0; r < kernel.rows; ++r)
        for (int64_t k = 0; k < kernel.columns; ++k) {
          const int32_t w = weight[channel * size.taps() + r * kernel.columns + k] - zero_point;
          const bool along = pairs_along(unit, kernel.rows, r / unit);
          const int64_t column = along ? k - k % 2 : k, tap = along ? k % 2 : r % unit;
          const int64_t place = ((column * groups + r / unit) * block.width + lane) * unit + tap;
          sum += w;
          if (form == Form::quads)
            reinterpret_cast<int8_t*>(weights + block.weights)[place] = static_cast<int8_t>(w);
          else
            reinterpret_cast<int16_t*>(weights + block.weights)[place] = static_cast<int16_t>(w);
        }
      sums[block.lane + lane] = sum;
    }
}

void run(Form form, const Geometry& g, const uint8_t* x, bool x_signed, int32_t x_zero_point, const uint8_t* packed,
         const Requantize& requantize, uint8_t* out, const Parallel& parallel) {
  const WeightSize& size = g.weight;
  const Kernel kernel = kernel_of(size);
  const std::vector<Block> blocks = blocks_of(form, size);
  const uint8_t flip = x_signed ? 0x80 : 0;
  const int32_t za = x_zero_point + (x_signed ? 128 : 0);
  const Lanes lanes = make_lanes(blocks, size, reinterpret_cast<const int32_t*>(packed), za, requantize);
  const uint8_t* weights = packed + sums_bytes(size);

  // Columns are cut into ranges short enough for the ring to stay in L1.
  constexpr int64_t kRingBytes = 24 * 1024, kLargestTile = 4;
  const int64_t ring_rows = size.kernel[0] * size.kernel[1];
  const int64_t reach = (size.kernel[2] - 1) * g.dilation[2];
  const int64_t fitting = (kRingBytes / (ring_rows * widest(form)) - reach) / g.stride[2];
  const int64_t range = gemm::round_up(std::min(std::max<int64_t>(fitting, 16), g.out[2]), kLargestTile);
  const int64_t ranges = (g.out[2] + range - 1) / range;
  const int64_t positions = (range - 1) * g.stride[2] + reach + 1;

  const int64_t block_count = static_cast<int64_t>(blocks.size());
  const int64_t rows = g.out[0] * g.out[1];
  const int64_t work = std::max<int64_t>(1, range * size.taps() * widest(form));
  const int64_t grain = std::max<int64_t>(1, (int64_t{1} << 18) / work);
  parallel.for_shares(0, g.batch * block_count * ranges * rows, grain, [&](int64_t item, int64_t item_end) {
    Ring ring(g, x, flip, static_cast<uint8_t>(za), positions, widest(form));
    std::vector<const uint8_t*> row_pointers(static_cast<size_t>(kernel.rows));
    while (item < item_end) {
      const int64_t part = item / rows;
      const int64_t part_end = std::min(item_end, (part + 1) * rows);
      const int64_t first_column = part % ranges * range;
      const Block& block = blocks[static_cast<size_t>(part / ranges % block_count)];
      const int64_t image = part / ranges / block_count;
      const Choice choice = choose(form, block.width, kernel, g.stride[2], g.dilation[2]);
      ring.start(image, block, first_column * g.stride[2] - g.padding[2], choice.copy);
      Row row;
      row.rows = row_pointers.data();
      row.weights = weights + block.weights;
      row.kernel_rows = kernel.rows, row.kernel_columns = kernel.columns;
      row.stride = g.stride[2], row.dilation = g.dilation[2];
      row.columns = std::min(range, g.out[2] - first_column);
      row.start = lanes.start.data() + block.lane;
      row.multiplier = lanes.multiplier.data() + block.lane;
      row.offset = lanes.offset.data() + block.lane;
      row.low = requantize.out_min - requantize.out_zero_point;
      row.high = static_cast<float>(requantize.out_max - requantize.out_zero_point);
      row.out_zero_point = requantize.out_zero_point;
      row.out_signed = requantize.out_signed;
      row.out_stride = size.out_channels;
      row.channels = std::min(block.width, size.out_channels - block.first);
      for (; item < part_end; ++item) {
        const int64_t out_d = item % rows / g.out[1], out_h = item % rows % g.out[1];
        for (int64_t kd = 0; kd < size.kernel[0]; ++kd)
          for (int64_t kh = 0; kh < size.kernel[1]; ++kh)
            row_pointers[static_cast<size_t>(kd * size.kernel[1] + kh)] =
                ring.row(out_d * g.stride[0] - g.padding[0] + kd * g.dilation[0],
                         out_h * g.stride[1] - g.padding[1] + kh * g.dilation[1], kd, kh);
        if (kernel.swapped)
          for (int64_t k = kernel.rows - 1; k >= 0; --k)
            row_pointers[static_cast<size_t>(k)] = row_pointers[0] + k * g.dilation[2] * block.width;
        const int64_t position = ((image * g.out[0] + out_d) * g.out[1] + out_h) * g.out[2] + first_column;
        row.out = out + position * size.out_channels + block.first;
        choice.run(row);
      }
    }
  });
}

}  // namespace zeropoint::conv::depthwise
