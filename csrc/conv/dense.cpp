#include "conv/dense.h"

#include <algorithm>

#include "conv/gather.h"
#include "conv/strip.h"
#include "conv/winograd.h"

namespace zeropoint::conv::dense {
namespace {

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

// One convolution, less what says where its rows are.
class Products {
 public:
  Products(const std::vector<gemm::Packed>& groups, const Geometry& g, int32_t activation_zero_point,
           const int32_t* weight_zero_point, const Requantize& requantize, uint8_t* out)
      : groups_(groups), size_(g.weight), requantize_(requantize), out_(out), arrays_(groups.size()) {
    const int64_t columns = size_.group_columns();
    for (int64_t i = 0; i < size_.groups; ++i) {
      Columns& to = arrays_[static_cast<size_t>(i)];
      to.multiplier = Columns::pad(requantize.multiplier, i * columns, columns);
      to.offset = Columns::pad(requantize.offset, i * columns, columns);
      to.weight_zero_point = Columns::pad(weight_zero_point, i * columns, columns);
    }
    shifted_ = weight_zero_point != nullptr;
    epilogue_.activation_zero_point = activation_zero_point;
    epilogue_.low = static_cast<float>(requantize.out_min - requantize.out_zero_point);
    epilogue_.high = static_cast<float>(requantize.out_max - requantize.out_zero_point);
    epilogue_.out_zero_point = requantize.out_zero_point;
    epilogue_.output = requantize.floats ? gemm::Epilogue::Output::floats : gemm::Epilogue::Output::codes;
    epilogue_.relu = requantize.relu;
    epilogue_.out_stride = size_.out_channels;
  }

  // Output positions [first, first + m) and columns [begin, end) of a group, from rows a_stride apart.
  void rows(int64_t group, int64_t first, int64_t m, int64_t begin, int64_t end, const uint8_t* a,
            int64_t a_stride) const {
    const gemm::Packed& packed = groups_[static_cast<size_t>(group)];
    gemm::Epilogue ep = epilogue(group, first);
    std::vector<int32_t> sums;
    if (shifted_) {
      sums.resize(static_cast<size_t>(m));
      gemm::row_sums(a, a_stride, m, packed.k, sums.data());
      ep.row_sums = sums.data();
    }
    if (packed.k <= gemm::kMaxNarrowDepth) return gemm::run(packed, a, a_stride, m, begin, end, ep);
    std::vector<int64_t> wide(static_cast<size_t>(m * (end - begin)));
    gemm::run_wide(packed, a, a_stride, m, begin, end, ep, wide.data(), end - begin);
    gemm::store_wide(wide.data(), m, begin, end, ep);
  }

  // The same from rows that are walked.
  void walked(int64_t group, int64_t first, int64_t m, int64_t begin, int64_t end, const uint8_t* a,
              const gemm::Walk& walk) const {
    gemm::run_walk(groups_[static_cast<size_t>(group)], a, walk, m, begin, end, epilogue(group, first));
  }

  // Of a group, from output position `first` on.
  gemm::Epilogue epilogue(int64_t group, int64_t first) const {
    const Columns& array = arrays_[static_cast<size_t>(group)];
    gemm::Epilogue ep = epilogue_;
    ep.multiplier = array.multiplier.data();
    ep.offset = requantize_.offset ? array.offset.data() : nullptr;
    ep.weight_zero_point = shifted_ ? array.weight_zero_point.data() : nullptr;
    ep.out = out_ + (first * size_.out_channels + group * size_.group_columns()) * requantize_.out_bytes();
    return ep;
  }

 private:
  const std::vector<gemm::Packed>& groups_;
  const WeightSize& size_;
  const Requantize& requantize_;
  uint8_t* out_;
  std::vector<Columns> arrays_;
  gemm::Epilogue epilogue_;
  bool shifted_;
};

// Columns split into at most `most` parts of whole panels.
struct Split {
  int64_t columns, part, parts;

  Split(int64_t all, int64_t most) : columns(all) {
    const int64_t panels = gemm::padded_columns(columns) / gemm::kPanel;
    part = (panels + most - 1) / most * gemm::kPanel;
    parts = (columns + part - 1) / part;
  }
  int64_t begin(int64_t index) const { return index * part; }
  int64_t end(int64_t index) const { return std::min(columns, (index + 1) * part); }
};

// Items of so much work that handing them to a thread is worth it.
int64_t grain_of(int64_t multiplications) {
  return std::max<int64_t>(1, (int64_t{1} << 20) / std::max<int64_t>(1, multiplications));
}

void run_walked(const Products& products, const Strips& strips, const Geometry& g, int64_t depth,
                const Parallel& parallel) {
  const int64_t rows = g.batch * g.out_positions(), count = (rows + strips.rows() - 1) / strips.rows();
  const Split split(g.weight.group_columns(), count % parallel.threads == 0 ? 1 : parallel.threads);
  const int64_t grain = grain_of(strips.rows() * split.part * depth * g.weight.groups);
  parallel.for_shares(0, count * split.parts, grain, [&](int64_t item, int64_t item_end) {
    std::vector<int64_t> offsets(static_cast<size_t>(strips.rows()));
    const gemm::Walk walk = strips.walk(offsets.data());
    int64_t prepared = -1;
    const uint8_t* a = nullptr;
    for (; item < item_end; ++item) {
      const int64_t part = item / count, first = item % count * strips.rows();
      const int64_t m = std::min(strips.rows(), rows - first);
      if (prepared != first) a = strips.prepare(first, m, offsets.data());
      prepared = first;
      for (int64_t group = 0; group < g.weight.groups; ++group)
        products.walked(group, first, m, split.begin(part), split.end(part),
                        a + group * g.weight.group_channels * strips.bytes(), walk);
    }
  });
}

void run_rows(const Products& products, const gemm::Packed& packed, const Geometry& g, const uint8_t* x, bool in_place,
              const Gather& gather, const Parallel& parallel) {
  const WeightSize& size = g.weight;
  const int64_t rows = g.batch * g.out_positions(), stride = Gather::row_stride(packed.k);
  // Rows are split into tiles that stay in L1 with their panel. With few of them, columns are split as well.
  constexpr int64_t kTileBytes = 16 * 1024;
  const int64_t unit = gemm::tile_rows(packed);
  const int64_t tile = std::clamp<int64_t>(kTileBytes / stride / unit, 1, 8) * unit;
  const int64_t tiles = (rows + tile - 1) / tile;
  const Split split(size.group_columns(), in_place && tiles < 4 * parallel.threads ? parallel.threads : 1);
  const int64_t grain = grain_of(tile * split.part * packed.k);
  parallel.for_shares(0, size.groups * split.parts * tiles, grain, [&](int64_t item, int64_t item_end) {
    while (item < item_end) {
      // Rows that lie side by side in memory go to the kernel together.
      const int64_t index = item / tiles, group = index / split.parts, part = index % split.parts;
      const int64_t count = in_place ? std::min(item_end, (index + 1) * tiles) - item : 1;
      const int64_t first = item % tiles * tile;
      const int64_t m = std::min(count * tile, rows - first);
      item += count;
      const uint8_t* a = x + first * size.in_channels() + group * size.group_channels;
      int64_t a_stride = size.in_channels();
      if (!in_place) {
        auto* gathered =
            static_cast<uint8_t*>(gemm::thread_scratch(gemm::Scratch::rows, static_cast<size_t>(tile * stride)));
        gather.rows(first, m, group, stride, gathered);
        a = gathered;
        a_stride = stride;
      }
      products.rows(group, first, m, split.begin(part), split.end(part), a, a_stride);
    }
  });
}

// The form that kernel lines are laid out for: on avx2 words, where rounding lines up for quads costs more than words do.
// So it is with three input channels.
gemm::Form line_form(Isa isa, const WeightSize& size) {
  const int64_t codes = size.kernel[2] * size.group_channels;
  const auto rounded = [&](gemm::Form form) { return gemm::round_up(codes, gemm::walk_unit(isa, form)); };
  if (isa != Isa::avx2 || 3 * rounded(gemm::Form::quads) < 4 * rounded(gemm::Form::words)) return gemm::Form::quads;
  return gemm::Form::words;
}

}  // namespace

int64_t line_codes(Isa isa, const WeightSize& size) {
  const int64_t codes = size.kernel[2] * size.group_channels, unit = gemm::walk_unit(isa, line_form(isa, size));
  return unit > 0 ? gemm::round_up(codes, unit) : codes;
}

std::vector<AlignedBytes> pack(Isa isa, const int8_t* weight, const WeightSize& size, const Parallel& parallel) {
  const int64_t taps = size.taps(), rows = depth(isa, size), line = line_codes(isa, size), columns = size.group_columns();
  std::vector<int8_t> matrix(static_cast<size_t>(size.out_channels * rows));
  for (int64_t n = 0; n < size.out_channels; ++n)
    for (int64_t c = 0; c < size.group_channels; ++c)
      for (int64_t t = 0; t < taps; ++t) {
        const int64_t at = t / size.kernel[2] * line + t % size.kernel[2] * size.group_channels + c;
        matrix[static_cast<size_t>(n * rows + at)] = weight[(n * size.group_channels + c) * taps + t];
      }
  // Winograd's transforms start from words.
  const auto purpose = line_form(isa, size) == gemm::Form::words ? gemm::Purpose::short_runs
                       : winograd::fits(size)                    ? gemm::Purpose::any
                                                                 : gemm::Purpose::many_rows;
  std::vector<AlignedBytes> groups;
  for (int64_t g = 0; g < size.groups; ++g)
    groups.push_back(gemm::pack(isa, matrix.data() + g * columns * rows, rows, columns, rows, parallel, purpose));
  return groups;
}

void run(const std::vector<gemm::Packed>& groups, const Geometry& g, const uint8_t* x, bool x_signed,
         int32_t x_zero_point, const int32_t* weight_zero_point, const Requantize& requantize, uint8_t* out,
         const Parallel& parallel) {
  const gemm::Packed& packed = groups[0];
  const int64_t line = line_codes(packed.isa, g.weight);
  const int32_t za = x_zero_point + (x_signed ? 128 : 0);
  const auto fill = static_cast<uint8_t>(za);
  const Products products(groups, g, za, weight_zero_point, requantize, out);
  if (winograd::chosen(g, packed, weight_zero_point)) {
    const auto flip = static_cast<uint8_t>(x_signed ? 0x80 : 0);
    return winograd::run(g, packed, x, flip, fill, line, products.epilogue(0, 0), parallel);
  }
  bool in_place = !x_signed && g.weight.taps() == 1 && gemm::padded_depth(packed.k) == g.weight.group_channels;
  for (int i = 0; i < 3; ++i) in_place = in_place && g.stride[i] == 1 && g.padding[i] == 0 && g.in[i] == g.out[i];
  // A strip serves all groups, so their weights have to want codes of one size.
  const int64_t unit = gemm::walk_unit(packed.isa, packed.form), bytes = gemm::walk_bytes(packed);
  const bool alike = std::all_of(groups.begin(), groups.end(),
                                 [&](const gemm::Packed& group) { return gemm::walk_bytes(group) == bytes; });
  if (!in_place && unit > 0 && alike && weight_zero_point == nullptr && packed.k <= gemm::kMaxNarrowDepth &&
      Strips::possible(g, unit)) {
    const Strips strips(g, x, x_signed, fill, line, packed, parallel.threads);
    return run_walked(products, strips, g, packed.k, parallel);
  }
  run_rows(products, packed, g, x, in_place, Gather(g, x, x_signed, fill, line), parallel);
}

}  // namespace zeropoint::conv::dense
