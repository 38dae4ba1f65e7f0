// Packing, the check of packed bytes, and dense convolution on the matrix kernel. Explained in conv.h.
#include "conv/conv.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "conv/depthwise.h"
#include "gemm/kernel.h"

namespace zeropoint::conv {
namespace {

using gemm::round_up;

// What stands before the packed weights. Dense: one gemm blob a group follows, each at an offset of a table of
// (offset, length) pairs. Depthwise: the bytes of depthwise::pack.
struct Header {
  char magic[8];
  uint32_t version;
  int32_t isa;
  uint32_t kind;
  uint32_t form;
  int64_t out_channels, group_channels, groups;
  int64_t kernel[3];
  int64_t bytes;
  int64_t reserved[6];
};
static_assert(sizeof(Header) == 128);

constexpr char kMagic[8] = {'z', 'p', 'c', 'o', 'n', 'v', '8', '\0'};
constexpr uint32_t kVersion = 1;
constexpr int64_t kAlign = 64;
constexpr int64_t kLongestReach = 1 << 16;  // of a depthwise row, in positions: prepared rows stay small

Header header_of(Isa isa, Kind kind, depthwise::Form form, const WeightSize& size, int64_t bytes) {
  Header header = {};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.version = kVersion;
  header.isa = static_cast<int32_t>(isa);
  header.kind = static_cast<uint32_t>(kind);
  header.form = static_cast<uint32_t>(form);
  header.out_channels = size.out_channels;
  header.group_channels = size.group_channels;
  header.groups = size.groups;
  std::memcpy(header.kernel, size.kernel, sizeof header.kernel);
  header.bytes = bytes;
  return header;
}

std::vector<uint8_t> pack_dense(Isa isa, const int8_t* weight, const WeightSize& size, const Parallel& parallel) {
  // Canonical weights have a channel's taps together; rows of the left matrix have a tap's channels together.
  const int64_t depth = size.depth(), taps = size.taps();
  std::vector<int8_t> rows(static_cast<size_t>(size.out_channels * depth));
  for (int64_t n = 0; n < size.out_channels; ++n)
    for (int64_t c = 0; c < size.group_channels; ++c)
      for (int64_t t = 0; t < taps; ++t)
        rows[static_cast<size_t>(n * depth + t * size.group_channels + c)] =
            weight[(n * size.group_channels + c) * taps + t];

  const int64_t columns = size.group_columns();
  const int64_t table = sizeof(Header);
  std::vector<uint8_t> bytes(static_cast<size_t>(round_up(table + size.groups * 2 * int64_t{sizeof(int64_t)}, kAlign)));
  for (int64_t g = 0; g < size.groups; ++g) {
    const auto part = gemm::pack(isa, rows.data() + g * columns * depth, depth, columns, depth, parallel);
    const int64_t place[2] = {static_cast<int64_t>(bytes.size()), static_cast<int64_t>(part.size())};
    std::memcpy(bytes.data() + table + g * int64_t{sizeof place}, place, sizeof place);
    bytes.insert(bytes.end(), part.begin(), part.end());
    bytes.resize(static_cast<size_t>(round_up(static_cast<int64_t>(bytes.size()), kAlign)));
  }
  const Header header = header_of(isa, Kind::dense, {}, size, static_cast<int64_t>(bytes.size()));
  std::memcpy(bytes.data(), &header, sizeof header);
  return bytes;
}

std::vector<uint8_t> pack_depthwise(Isa isa, const int8_t* weight, const int32_t* weight_zero_point,
                                    const WeightSize& size) {
  const depthwise::Form form = depthwise::form_of(isa, weight_zero_point != nullptr);
  const int64_t length = int64_t{sizeof(Header)} + depthwise::packed_bytes(form, size);
  std::vector<uint8_t> bytes(static_cast<size_t>(length));
  const Header header = header_of(isa, Kind::depthwise, form, size, length);
  std::memcpy(bytes.data(), &header, sizeof header);
  depthwise::pack(form, weight, weight_zero_point, size, bytes.data() + sizeof header);
  return bytes;
}

bool fits(const uint8_t* bytes, int64_t length, Isa isa, Kind kind, depthwise::Form form, const WeightSize& size) {
  if (bytes == nullptr || length < int64_t{sizeof(Header)} || reinterpret_cast<uintptr_t>(bytes) % 8 != 0) return false;
  const Header expected = header_of(isa, kind, form, size, length);
  return std::memcmp(bytes, &expected, sizeof expected) == 0;
}

// Views of all groups of dense packed weights. False unless every one lies within the bytes and fits.
bool view_dense(const uint8_t* bytes, int64_t length, Isa isa, const WeightSize& size,
                std::vector<gemm::Packed>* groups) {
  if (!fits(bytes, length, isa, Kind::dense, {}, size)) return false;
  const int64_t table = sizeof(Header);
  int64_t place[2];
  if (size.groups > (length - table) / int64_t{sizeof place}) return false;
  groups->resize(static_cast<size_t>(size.groups));
  for (int64_t g = 0; g < size.groups; ++g) {
    std::memcpy(place, bytes + table + g * int64_t{sizeof place}, sizeof place);
    if (place[0] < 0 || place[1] < 0 || place[0] > length || place[1] > length - place[0]) return false;
    if (!gemm::view(bytes + place[0], place[1], isa, size.group_columns(), size.depth(),
                    &(*groups)[static_cast<size_t>(g)]))
      return false;
  }
  return true;
}

// Copies short runs of codes, flipping signs, in vectors that may write up to 15 bytes too many.
class Gather {
 public:
  Gather(const Geometry& geometry, const uint8_t* x, bool x_signed, uint8_t fill)
      : g_(geometry), x_(x), fill_(fill), channels_(geometry.weight.in_channels()) {
    std::memset(&flip_, x_signed ? 0x80 : 0, sizeof flip_);
    end_ = x + geometry.batch * geometry.in_positions() * channels_;
  }

  static constexpr int64_t kSlack = 16;  // bytes behind the last row that are written

  // The rows of output positions [first, first + count) of one group, `stride` bytes apart.
  void rows(int64_t first, int64_t count, int64_t group, int64_t stride, uint8_t* to) const {
    const int64_t first_channel = group * g_.weight.group_channels;
    int64_t w = first % g_.out[2], rest = first / g_.out[2];
    int64_t h = rest % g_.out[1];
    rest /= g_.out[1];
    int64_t d = rest % g_.out[0], image = rest / g_.out[0];
    for (int64_t i = 0; i < count; ++i) {
      row(image, d, h, w, first_channel, to + i * stride);
      if (++w < g_.out[2]) continue;
      w = 0;
      if (++h < g_.out[1]) continue;
      h = 0;
      if (++d < g_.out[0]) continue;
      d = 0;
      ++image;
    }
  }

 private:
  typedef uint8_t Vector __attribute__((vector_size(16)));

  void row(int64_t image, int64_t d, int64_t h, int64_t w, int64_t first_channel, uint8_t* to) const {
    const int64_t* kernel = g_.weight.kernel;
    const int64_t run = kernel[2] * g_.weight.group_channels;
    const int64_t first_w = w * g_.stride[2] - g_.padding[2];
    for (int64_t kd = 0; kd < kernel[0]; ++kd) {
      const int64_t in_d = d * g_.stride[0] - g_.padding[0] + kd * g_.dilation[0];
      for (int64_t kh = 0; kh < kernel[1]; ++kh, to += run) {
        const int64_t in_h = h * g_.stride[1] - g_.padding[1] + kh * g_.dilation[1];
        if (in_d < 0 || in_d >= g_.in[0] || in_h < 0 || in_h >= g_.in[1]) {
          std::memset(to, fill_, static_cast<size_t>(run));
          continue;
        }
        const int64_t line = ((image * g_.in[0] + in_d) * g_.in[1] + in_h) * g_.in[2];
        taps(line, first_w, first_channel, to);
      }
    }
  }

  // The taps of one kernel line, over input line `line` (positions), from input column `first_w`, perhaps outside.
  void taps(int64_t line, int64_t first_w, int64_t first_channel, uint8_t* to) const {
    const int64_t count = g_.weight.kernel[2], group_channels = g_.weight.group_channels;
    if (g_.dilation[2] == 1 && g_.weight.groups == 1) {
      const int64_t begin = std::clamp<int64_t>(-first_w, 0, count);
      const int64_t end = std::clamp<int64_t>(g_.in[2] - first_w, begin, count);
      if (begin > 0) std::memset(to, fill_, static_cast<size_t>(begin * channels_));
      if (end > begin)
        copy(x_ + (line + first_w + begin) * channels_, (end - begin) * channels_, to + begin * channels_);
      if (end < count) std::memset(to + end * channels_, fill_, static_cast<size_t>((count - end) * channels_));
      return;
    }
    for (int64_t k = 0; k < count; ++k, to += group_channels) {
      const int64_t in_w = first_w + k * g_.dilation[2];
      if (in_w < 0 || in_w >= g_.in[2])
        std::memset(to, fill_, static_cast<size_t>(group_channels));
      else
        copy(x_ + (line + in_w) * channels_ + first_channel, group_channels, to);
    }
  }

  void copy(const uint8_t* from, int64_t count, uint8_t* to) const {
    int64_t i = 0;
    const int64_t readable = end_ - from;
    for (; i < count && i + 16 <= readable; i += 16) {
      Vector codes;
      std::memcpy(&codes, from + i, sizeof codes);
      codes ^= flip_;
      std::memcpy(to + i, &codes, sizeof codes);
    }
    for (; i < count; ++i) to[i] = from[i] ^ flip_[0];
  }

  const Geometry& g_;
  const uint8_t* x_;
  const uint8_t* end_;
  uint8_t fill_;
  Vector flip_;
  int64_t channels_;
};

// Requantization arrays of one group, padded as the matrix kernel reads them.
struct Columns {
  std::vector<float> multiplier, offset;
  std::vector<int32_t> weight_zero_point;

  template <class T>
  static std::vector<T> pad(const T* from, int64_t begin, int64_t count) {
    std::vector<T> to(static_cast<size_t>(gemm::padded_columns(count)));
    if (from) std::copy(from + begin, from + begin + count, to.begin());
    return to;
  }
};

void run_dense(const std::vector<gemm::Packed>& groups, const Geometry& g, const uint8_t* x, bool x_signed,
               int32_t x_zero_point, const int32_t* weight_zero_point, const Requantize& requantize, uint8_t* out,
               const Parallel& parallel) {
  const WeightSize& size = g.weight;
  const int64_t depth = size.depth(), columns = size.group_columns(), rows = g.batch * g.out_positions();
  const int64_t stride = gemm::padded_depth(depth);
  const int32_t za = x_zero_point + (x_signed ? 128 : 0);

  std::vector<Columns> arrays(groups.size());
  for (int64_t i = 0; i < size.groups; ++i) {
    Columns& to = arrays[static_cast<size_t>(i)];
    to.multiplier = Columns::pad(requantize.multiplier, i * columns, columns);
    to.offset = Columns::pad(requantize.offset, i * columns, columns);
    to.weight_zero_point = Columns::pad(weight_zero_point, i * columns, columns);
  }

  bool in_place = !x_signed && size.taps() == 1 && depth % gemm::kGroup == 0;
  for (int i = 0; i < 3; ++i) in_place = in_place && g.stride[i] == 1 && g.padding[i] == 0 && g.in[i] == g.out[i];

  // Rows are split into tiles that stay in L1 with their panel. With few of them, columns are split as well.
  constexpr int64_t kTileBytes = 16 * 1024;
  const int64_t unit = gemm::tile_rows(groups[0]);
  const int64_t tile = std::clamp<int64_t>(kTileBytes / stride / unit, 1, 8) * unit;
  const int64_t tiles = (rows + tile - 1) / tile;
  const int64_t panels = gemm::padded_columns(columns) / gemm::kPanel;
  int64_t parts = 1;
  if (parallel.threads > 1 && in_place && tiles < 4 * parallel.threads)
    parts = std::min<int64_t>(parallel.threads, panels);
  const int64_t part_columns = (panels + parts - 1) / parts * gemm::kPanel;
  parts = (columns + part_columns - 1) / part_columns;

  const Gather gather(g, x, x_signed, static_cast<uint8_t>(za));
  const int64_t work = std::max<int64_t>(1, tile * std::min(part_columns, columns) * depth);
  const int64_t grain = std::max<int64_t>(1, (int64_t{1} << 20) / work);
  parallel.for_range(0, size.groups * parts * tiles, grain, [&](int64_t item, int64_t item_end) {
    std::vector<int32_t> sums;
    while (item < item_end) {
      // Rows that lie side by side in memory go to the kernel together.
      const int64_t part = item / tiles, group = part / parts;
      const int64_t count = in_place ? std::min(item_end, (part + 1) * tiles) - item : 1;
      const int64_t first = item % tiles * tile;
      const int64_t m = std::min(count * tile, rows - first);
      item += count;

      const uint8_t* a = x + first * size.in_channels() + group * size.group_channels;
      int64_t a_stride = size.in_channels();
      if (!in_place) {
        auto* gathered = static_cast<uint8_t*>(
            gemm::thread_scratch(gemm::Scratch::tile, static_cast<size_t>(tile * stride + Gather::kSlack)));
        gather.rows(first, m, group, stride, gathered);
        a = gathered;
        a_stride = stride;
      }
      const Columns& array = arrays[static_cast<size_t>(group)];
      const int64_t begin = part % parts * part_columns;
      gemm::Epilogue ep;
      ep.activation_zero_point = za;
      ep.multiplier = array.multiplier.data();
      ep.offset = requantize.offset ? array.offset.data() : nullptr;
      ep.low = static_cast<float>(requantize.out_min - requantize.out_zero_point);
      ep.high = static_cast<float>(requantize.out_max - requantize.out_zero_point);
      ep.out_zero_point = requantize.out_zero_point;
      ep.out = out + first * size.out_channels + group * columns;
      ep.out_stride = size.out_channels;
      if (weight_zero_point) {
        sums.resize(static_cast<size_t>(m));
        gemm::row_sums(a, a_stride, m, depth, sums.data());
        ep.weight_zero_point = array.weight_zero_point.data();
        ep.row_sums = sums.data();
      }
      gemm::run(groups[static_cast<size_t>(group)], a, a_stride, m, begin, std::min(begin + part_columns, columns), ep);
    }
  });
}

bool all_finite(const float* values, int64_t count) {
  if (values == nullptr) return true;
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) finite = finite && std::isfinite(values[i]);
  return finite;
}

}  // namespace

Kind kind_of(const WeightSize& size) {
  const bool single = size.group_channels == 1 && size.groups > 1 && size.taps() <= depthwise::kMaxTaps;
  return single ? Kind::depthwise : Kind::dense;
}

std::vector<uint8_t> pack(Isa isa, const int8_t* weight, const WeightSize& size, const Parallel& parallel) {
  if (kind_of(size) == Kind::depthwise) return pack_depthwise(isa, weight, nullptr, size);
  return pack_dense(isa, weight, size, parallel);
}

void run(Isa isa, const Geometry& geometry, const uint8_t* x, bool x_signed, int32_t x_zero_point, const int8_t* weight,
         const int32_t* weight_zero_point, const uint8_t* packed, int64_t packed_length, const Requantize& requantize,
         uint8_t* out, const Parallel& parallel) {
  const WeightSize& size = geometry.weight;
  if (geometry.batch * geometry.out_positions() == 0) return;
  std::vector<uint8_t> anew;
  const bool short_rows = (size.kernel[2] - 1) * geometry.dilation[2] < kLongestReach;
  // The row kernels leave out what NaN needs; no sensible grid has an infinite ratio of scales.
  const bool finite =
      all_finite(requantize.multiplier, size.out_channels) && all_finite(requantize.offset, size.out_channels);
  if (kind_of(size) == Kind::depthwise && short_rows && finite) {
    const depthwise::Form form = depthwise::form_of(isa, weight_zero_point != nullptr);
    if (weight_zero_point != nullptr || !fits(packed, packed_length, isa, Kind::depthwise, form, size)) {
      anew = pack_depthwise(isa, weight, weight_zero_point, size);
      packed = anew.data();
    }
    depthwise::run(form, geometry, x, x_signed, x_zero_point, packed + sizeof(Header), requantize, out, parallel);
    return;
  }
  std::vector<gemm::Packed> groups;
  if (!view_dense(packed, packed_length, isa, size, &groups)) {
    anew = pack_dense(isa, weight, size, parallel);
    view_dense(anew.data(), static_cast<int64_t>(anew.size()), isa, size, &groups);
  }
  run_dense(groups, geometry, x, x_signed, x_zero_point, weight_zero_point, requantize, out, parallel);
}

}  // namespace zeropoint::conv
