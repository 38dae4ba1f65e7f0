// Splitting a transposed convolution into convolutions. Explained in transpose.h.
#include "conv/transpose.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>

namespace zeropoint::conv {
namespace {

// The taps of one remainder in one dimension: first, first + step, ... `lag` is how many input positions the first one
// lies behind  (o + padding) / stride, `dilation` how many the next one lies behind that.
struct Taps {
  int64_t remainder = 0, first = 0, step = 1, count = 1, dilation = 1, lag = 0;
};

// One entry for every remainder that has taps.
std::vector<Taps> taps_of(int64_t kernel, int64_t stride, int64_t dilation) {
  const int64_t common = std::gcd(stride, dilation), step = stride / common;
  std::vector<Taps> all;
  for (int64_t k = 0; k < std::min(kernel, step); ++k)
    all.push_back({k * dilation % stride, k, step, (kernel - 1 - k) / step + 1, dilation / common, k * dilation / stride});
  return all;
}

// One combination of remainders.
struct Part {
  Taps taps[3];

  WeightSize size(const TransposedWeight& weight) const {
    WeightSize size;
    size.out_channels = weight.out_channels;
    size.group_channels = weight.in_channels / weight.groups;
    size.groups = weight.groups;
    for (int d = 0; d < 3; ++d) size.kernel[d] = taps[d].count;
    return size;
  }
};

std::vector<Part> parts_of(const TransposedWeight& weight) {
  std::vector<Taps> taps[3];
  for (int d = 0; d < 3; ++d) taps[d] = taps_of(weight.kernel[d], weight.stride[d], weight.dilation[d]);
  std::vector<Part> parts;
  for (const Taps& a : taps[0])
    for (const Taps& b : taps[1])
      for (const Taps& c : taps[2]) parts.push_back({{a, b, c}});
  return parts;
}

// The weight of a part's convolution, (out_channels, in_channels / groups, taps in reverse order).
std::vector<int8_t> gather_weight(const int8_t* weight, const TransposedWeight& size, const Part& part) {
  const int64_t columns = size.out_channels / size.groups, rows = size.in_channels / size.groups;
  const int64_t plane = size.kernel[1] * size.kernel[2], volume = size.kernel[0] * plane;
  const WeightSize to_size = part.size(size);
  std::vector<int8_t> result(static_cast<size_t>(to_size.out_channels * to_size.depth()));
  int8_t* to = result.data();
  const auto tap = [&](int d, int64_t j) {
    const Taps& t = part.taps[d];
    return t.first + (t.count - 1 - j) * t.step;
  };
  for (int64_t n = 0; n < size.out_channels; ++n)
    for (int64_t c = 0; c < rows; ++c) {
      const int8_t* from = weight + ((n / columns * rows + c) * columns + n % columns) * volume;
      for (int64_t d = 0; d < to_size.kernel[0]; ++d)
        for (int64_t h = 0; h < to_size.kernel[1]; ++h)
          for (int64_t w = 0; w < to_size.kernel[2]; ++w)
            *to++ = from[tap(0, d) * plane + tap(1, h) * size.kernel[2] + tap(2, w)];
    }
  return result;
}

// Before the packed parts: a magic word, their number, and (offset, length) of each.
constexpr char kMagic[8] = {'z', 'p', 'c', 'o', 'n', 'v', 't', '8'};
constexpr int64_t kHead = 16, kAlign = 64;

struct Bytes {
  const uint8_t* data = nullptr;
  int64_t length = 0;
};

// The bytes of part `index`; none if the table does not fit. What they hold is checked where they are used.
Bytes packed_part(const uint8_t* packed, int64_t length, int64_t index, int64_t count) {
  int64_t found = 0, place[2];
  if (packed == nullptr || length < kHead || std::memcmp(packed, kMagic, sizeof kMagic) != 0) return {};
  std::memcpy(&found, packed + sizeof kMagic, sizeof found);
  if (found != count || count > (length - kHead) / int64_t{sizeof place}) return {};
  std::memcpy(place, packed + kHead + index * int64_t{sizeof place}, sizeof place);
  if (place[0] < 0 || place[1] < 0 || place[0] > length || place[1] > length - place[0]) return {};
  return {packed + place[0], place[1]};
}

// The output positions of one part in one dimension, and the convolution that computes them.
struct Lane {
  int64_t first = 0, count = 0, padding = 0, crop = 0;
};

Lane lane_of(const Taps& taps, int64_t stride, int64_t padding, int64_t out) {
  const int64_t ahead = padding - taps.remainder;
  const int64_t start = ahead > 0 ? (ahead + stride - 1) / stride : 0;
  Lane lane;
  lane.first = start * stride - ahead;
  lane.count = lane.first < out ? (out - 1 - lane.first) / stride + 1 : 0;
  const int64_t before = taps.lag + (taps.count - 1) * taps.dilation - start;
  lane.padding = std::max<int64_t>(before, 0);
  lane.crop = std::max<int64_t>(-before, 0);
  return lane;
}

// What outputs without taps hold: a sum of 0, requantized.
std::vector<uint8_t> constant_outputs(const Requantize& to, int64_t channels) {
  std::vector<uint8_t> outputs(static_cast<size_t>(channels * to.out_bytes()));
  for (int64_t n = 0; n < channels; ++n) {
    float y = 0.0f * to.multiplier[n];
    if (to.offset) y = y + to.offset[n];
    if (to.floats) {
      if (to.relu && y < 0.0f) y = 0.0f;
      std::memcpy(outputs.data() + n * to.out_bytes(), &y, sizeof y);
      continue;
    }
    y = std::isnan(y) ? 0.0f : std::nearbyint(y);
    const float low = static_cast<float>(to.out_min - to.out_zero_point);
    const float high = static_cast<float>(to.out_max - to.out_zero_point);
    outputs[static_cast<size_t>(n)] =
        static_cast<uint8_t>(static_cast<int32_t>(std::clamp(y, low, high)) + to.out_zero_point);
  }
  return outputs;
}

// The input without the positions that lie before the lanes, dense.
void copy_cropped(const uint8_t* x, int64_t batch, const int64_t in[3], const Lane lanes[3], int64_t channels,
                  uint8_t* to) {
  const int64_t begin = lanes[2].crop, length = (in[2] - begin) * channels;
  for (int64_t n = 0; n < batch; ++n)
    for (int64_t d = lanes[0].crop; d < in[0]; ++d)
      for (int64_t h = lanes[1].crop; h < in[1]; ++h, to += length)
        std::memcpy(to, x + (((n * in[0] + d) * in[1] + h) * in[2] + begin) * channels, static_cast<size_t>(length));
}

// Every row of a part's outputs to its places; `pixel` is how many bytes the channels of a position have.
void scatter(const uint8_t* outputs, const TransposedGeometry& g, const Lane lanes[3], int64_t pixel, uint8_t* out,
             const Parallel& parallel) {
  const int64_t step = g.weight.stride[2] * pixel, line = lanes[2].count * pixel;
  const int64_t grain = std::max<int64_t>(1, (int64_t{1} << 15) / line);
  parallel.for_range(0, g.batch * lanes[0].count * lanes[1].count, grain, [&](int64_t row, int64_t end) {
    for (; row < end; ++row) {
      const int64_t h = lanes[1].first + row % lanes[1].count * g.weight.stride[1];
      const int64_t slab = row / lanes[1].count;
      const int64_t d = lanes[0].first + slab % lanes[0].count * g.weight.stride[0], n = slab / lanes[0].count;
      const uint8_t* from = outputs + row * line;
      uint8_t* to = out + (((n * g.out[0] + d) * g.out[1] + h) * g.out[2] + lanes[2].first) * pixel;
      for (int64_t w = 0; w < lanes[2].count; ++w, from += pixel, to += step)
        std::memcpy(to, from, static_cast<size_t>(pixel));
    }
  });
}

}  // namespace

AlignedBytes pack_transposed(Isa isa, const int8_t* weight, const TransposedWeight& size, const Parallel& parallel) {
  const std::vector<Part> parts = parts_of(size);
  const auto align = [](AlignedBytes& to) { to.resize((to.size() + kAlign - 1) / kAlign * kAlign); };
  const auto count = static_cast<int64_t>(parts.size());
  AlignedBytes bytes(static_cast<size_t>(kHead + count * 2 * int64_t{sizeof(int64_t)}));
  std::memcpy(bytes.data(), kMagic, sizeof kMagic);
  std::memcpy(bytes.data() + sizeof kMagic, &count, sizeof count);
  align(bytes);
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto part = pack(isa, gather_weight(weight, size, parts[i]).data(), parts[i].size(size), parallel);
    const int64_t place[2] = {static_cast<int64_t>(bytes.size()), static_cast<int64_t>(part.size())};
    std::memcpy(bytes.data() + kHead + i * sizeof place, place, sizeof place);
    bytes.insert(bytes.end(), part.begin(), part.end());
    align(bytes);
  }
  return bytes;
}

void run_transposed(Isa isa, const TransposedGeometry& g, const uint8_t* x, bool x_signed, int32_t x_zero_point,
                    const int8_t* weight, const int32_t* weight_zero_point, const uint8_t* packed,
                    int64_t packed_length, const Requantize& requantize, uint8_t* out, const Parallel& parallel) {
  const TransposedWeight& size = g.weight;
  const int64_t pixel = size.out_channels * requantize.out_bytes();
  const int64_t positions = g.batch * g.out[0] * g.out[1] * g.out[2];
  if (positions == 0) return;
  const std::vector<Part> parts = parts_of(size);

  if (static_cast<int64_t>(parts.size()) < size.stride[0] * size.stride[1] * size.stride[2]) {
    const std::vector<uint8_t> outputs = constant_outputs(requantize, size.out_channels);
    for (int64_t i = 0; i < positions; ++i) std::memcpy(out + i * pixel, outputs.data(), static_cast<size_t>(pixel));
  }

  for (size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    Lane lanes[3];
    Geometry to;
    to.weight = part.size(size);
    to.batch = g.batch;
    bool cropped = false, whole = true;
    for (int d = 0; d < 3; ++d) {
      lanes[d] = lane_of(part.taps[d], size.stride[d], g.padding[d], g.out[d]);
      lanes[d].crop = std::min(lanes[d].crop, g.in[d]);
      cropped = cropped || lanes[d].crop > 0;
      whole = whole && size.stride[d] == 1;
      to.in[d] = g.in[d] - lanes[d].crop;
      to.out[d] = lanes[d].count;
      to.dilation[d] = part.taps[d].dilation;
      to.padding[d] = lanes[d].padding;
    }
    const int64_t count = g.batch * to.out_positions();
    if (count == 0) continue;

    std::unique_ptr<uint8_t[]> input, outputs;
    const uint8_t* from = x;
    if (cropped) {
      input.reset(new uint8_t[static_cast<size_t>(g.batch * to.in_positions() * size.in_channels)]);
      copy_cropped(x, g.batch, g.in, lanes, size.in_channels, input.get());
      from = input.get();
    }
    if (!whole) outputs.reset(new uint8_t[static_cast<size_t>(count * pixel)]);
    const Bytes bytes = packed_part(packed, packed_length, static_cast<int64_t>(i), static_cast<int64_t>(parts.size()));
    std::vector<int8_t> gathered;
    if (!reads_packed_alone(isa, to.weight, bytes.data, bytes.length)) gathered = gather_weight(weight, size, part);
    uint8_t* result = whole ? out : outputs.get();
    run(isa, to, from, x_signed, x_zero_point, gathered.data(), weight_zero_point, bytes.data, bytes.length,
        requantize, result, parallel);
    if (!whole) scatter(outputs.get(), g, lanes, pixel, out, parallel);
  }
}

}  // namespace zeropoint::conv
