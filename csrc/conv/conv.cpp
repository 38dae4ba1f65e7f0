// Packing, the check of packed bytes, and dense convolution on the matrix kernel. Explained in conv.h.
#include "conv/conv.h"

#include <algorithm>
#include <bit>
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
// Of a depthwise row, in positions: prepared rows stay small.
constexpr int64_t kLongestReach = 1 << 16, kLongestStride = 1 << 8;

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

// Gathers rows of the left matrix: for output positions side by side, the channels of all taps, signs flipped, the zero
// point where a tap lies outside. Runs of codes are copied in vectors that may write up to 15 bytes too many: always
// where a later run of the same row goes, or behind the row. Hence the order of loops, and `row_stride`.
class Gather {
 public:
  Gather(const Geometry& geometry, const uint8_t* x, bool x_signed, uint8_t fill)
      : g_(geometry),
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
  static int64_t row_stride(int64_t depth) { return round_up(depth + kVector - 1, kVector); }

  // The rows of output positions [first, first + count) of one group.
  void rows(int64_t first, int64_t count, int64_t group, int64_t stride, uint8_t* to) const {
    while (count > 0) {
      const int64_t w = first % g_.out[2], line = first / g_.out[2];
      const int64_t length = std::min(count, g_.out[2] - w);
      const int64_t h = line % g_.out[1], d = line / g_.out[1] % g_.out[0];
      segment(line / g_.out[1] / g_.out[0], d, h, w, length, group * g_.weight.group_channels, stride, to);
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
      for (int64_t kh = 0; kh < kernel[1]; ++kh, to += line_bytes) {
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
  const uint8_t* x_;
  const uint8_t* end_;
  uint8_t fill_;
  int64_t channels_;
  bool signed_;
  Vector flip_;
  int64_t runs_, run_, inner_begin_, inner_end_;
};

// Requantization arrays of one group, padded as the matrix kernel reads them.
struct Columns {
  std::vector<float> multiplier, offset;
  std::vector<int32_t> weight_zero_point;

  template <class T>
  static std::vector<T> pad(const T* from, int64_t begin, int64_t count) {
    std::vector<T> to(static_cast<size_t>(gemm::padded_columns(count)));
    std::copy(from + begin, from + begin + count, to.begin());
    return to;
  }
};

void run_dense(const std::vector<gemm::Packed>& groups, const Geometry& g, const uint8_t* x, bool x_signed,
               int32_t x_zero_point, const int32_t* weight_zero_point, const Requantize& requantize, uint8_t* out,
               const Parallel& parallel) {
  const WeightSize& size = g.weight;
  const int64_t depth = size.depth(), columns = size.group_columns(), rows = g.batch * g.out_positions();
  const int64_t stride = Gather::row_stride(depth);
  const int32_t za = x_zero_point + (x_signed ? 128 : 0);

  std::vector<Columns> arrays(groups.size());
  for (int64_t i = 0; i < size.groups; ++i) {
    Columns& to = arrays[static_cast<size_t>(i)];
    to.multiplier = Columns::pad(requantize.multiplier, i * columns, columns);
    if (requantize.offset) to.offset = Columns::pad(requantize.offset, i * columns, columns);
    if (weight_zero_point) to.weight_zero_point = Columns::pad(weight_zero_point, i * columns, columns);
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
    std::vector<int64_t> wide;
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
            gemm::thread_scratch(gemm::Scratch::rows, static_cast<size_t>(tile * stride)));
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
      ep.output = requantize.floats ? gemm::Epilogue::Output::floats : gemm::Epilogue::Output::codes;
      ep.relu = requantize.relu;
      ep.out = out + (first * size.out_channels + group * columns) * requantize.out_bytes();
      ep.out_stride = size.out_channels;
      if (weight_zero_point) {
        sums.resize(static_cast<size_t>(m));
        gemm::row_sums(a, a_stride, m, depth, sums.data());
        ep.weight_zero_point = array.weight_zero_point.data();
        ep.row_sums = sums.data();
      }
      const gemm::Packed& packed = groups[static_cast<size_t>(group)];
      const int64_t end = std::min(begin + part_columns, columns);
      if (depth <= gemm::kMaxNarrowDepth) {
        gemm::run(packed, a, a_stride, m, begin, end, ep);
      } else {
        wide.resize(static_cast<size_t>(m * (end - begin)));
        gemm::run_wide(packed, a, a_stride, m, begin, end, ep, wide.data(), end - begin);
        gemm::store_wide(wide.data(), m, begin, end, ep);
      }
    }
  });
}

bool all_finite(const float* values, int64_t count) {
  if (values == nullptr) return true;
  constexpr uint32_t kInfinity = 0x7f800000;
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::bit_cast<uint32_t>(values[i]) & 0x7fffffff);
  return largest < kInfinity;
}

}  // namespace

template <class T>
void ratios(const T* from, int64_t count, double factor, double divisor, float* to) {
  for (int64_t i = 0; i < count; ++i)
    to[i] = static_cast<float>(factor * static_cast<double>(from[i]) / divisor);
}
template void ratios<float>(const float*, int64_t, double, double, float*);
template void ratios<double>(const double*, int64_t, double, double, float*);

Kind kind_of(const WeightSize& size) {
  const bool single = size.group_channels == 1 && size.groups > 1 && size.taps() <= depthwise::kMaxTaps;
  return single ? Kind::depthwise : Kind::dense;
}

std::vector<uint8_t> pack(Isa isa, const int8_t* weight, const WeightSize& size, const Parallel& parallel) {
  if (kind_of(size) == Kind::depthwise) return pack_depthwise(isa, weight, nullptr, size);
  return pack_dense(isa, weight, size, parallel);
}

bool reads_packed_alone(Isa isa, const WeightSize& size, const uint8_t* packed, int64_t packed_length) {
  std::vector<gemm::Packed> groups;
  return kind_of(size) == Kind::dense && view_dense(packed, packed_length, isa, size, &groups);
}

void run(Isa isa, const Geometry& geometry, const uint8_t* x, bool x_signed, int32_t x_zero_point, const int8_t* weight,
         const int32_t* weight_zero_point, const uint8_t* packed, int64_t packed_length, const Requantize& requantize,
         uint8_t* out, const Parallel& parallel) {
  const WeightSize& size = geometry.weight;
  if (geometry.batch * geometry.out_positions() == 0) return;
  std::vector<uint8_t> anew;
  const bool short_rows =
      (size.kernel[2] - 1) * geometry.dilation[2] < kLongestReach && geometry.stride[2] < kLongestStride;
  // The row kernels leave out what NaN needs; no sensible grid has an infinite ratio of scales.
  const bool finite =
      all_finite(requantize.multiplier, size.out_channels) && all_finite(requantize.offset, size.out_channels);
  if (kind_of(size) == Kind::depthwise && short_rows && finite && !requantize.floats) {
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
