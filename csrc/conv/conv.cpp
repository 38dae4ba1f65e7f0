// Packing, the check of packed bytes, and the choice of kernel. Explained in conv.h.
#include "conv/conv.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "conv/dense.h"
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

AlignedBytes pack_dense(Isa isa, const int8_t* weight, const WeightSize& size, const Parallel& parallel) {
  const int64_t table = sizeof(Header);
  AlignedBytes bytes(static_cast<size_t>(round_up(table + size.groups * 2 * int64_t{sizeof(int64_t)}, kAlign)));
  int64_t at = table;
  for (const AlignedBytes& part : dense::pack(isa, weight, size, parallel)) {
    const int64_t place[2] = {static_cast<int64_t>(bytes.size()), static_cast<int64_t>(part.size())};
    std::memcpy(bytes.data() + at, place, sizeof place);
    at += int64_t{sizeof place};
    bytes.insert(bytes.end(), part.begin(), part.end());
    bytes.resize(static_cast<size_t>(round_up(static_cast<int64_t>(bytes.size()), kAlign)));
  }
  const Header header = header_of(isa, Kind::dense, {}, size, static_cast<int64_t>(bytes.size()));
  std::memcpy(bytes.data(), &header, sizeof header);
  return bytes;
}

AlignedBytes pack_depthwise(Isa isa, const int8_t* weight, const int32_t* weight_zero_point, const WeightSize& size) {
  const depthwise::Form form = depthwise::form_of(isa, weight_zero_point != nullptr);
  const int64_t length = int64_t{sizeof(Header)} + depthwise::packed_bytes(form, size);
  AlignedBytes bytes(static_cast<size_t>(length));
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
    if (!gemm::view(bytes + place[0], place[1], isa, size.group_columns(), dense::depth(isa, size),
                    &(*groups)[static_cast<size_t>(g)]))
      return false;
  }
  return true;
}

bool all_finite(const float* values, int64_t count) {
  if (values == nullptr) return true;
  constexpr uint32_t kInfinity = 0x7f800000;
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::bit_cast<uint32_t>(values[i]) & 0x7fffffff);
  return largest < kInfinity;
}

}  // namespace

Kind kind_of(const WeightSize& size) {
  const bool single = size.group_channels == 1 && size.groups > 1 && size.taps() <= depthwise::kMaxTaps;
  return single ? Kind::depthwise : Kind::dense;
}

AlignedBytes pack(Isa isa, const int8_t* weight, const WeightSize& size, const Parallel& parallel) {
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
  AlignedBytes anew;
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
  dense::run(groups, geometry, x, x_signed, x_zero_point, weight_zero_point, requantize, out, parallel);
}

}  // namespace zeropoint::conv
