// Packing, the validated view of packed bytes, and the choice of kernel. The layout is described in kernel.h.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "gemm/kernels.h"

namespace zeropoint::gemm {
namespace {

// What stands before the packed weights. The file format of nothing: packed weights are made anew in every process.
struct Header {
  char magic[8];
  uint32_t version;
  int32_t isa;
  int64_t n, k;
  int64_t bytes;
  int64_t outliers;
  uint32_t form;
  uint32_t reserved[3];
};
static_assert(sizeof(Header) == 64);

constexpr char kMagic[8] = {'z', 'p', 'g', 'e', 'm', 'm', '8', '\0'};
constexpr uint32_t kVersion = 1;
constexpr int64_t kAlign = 64;

// Form::words from one outlier in so many weights. Only beside many columns do many rows pay for being transposed, and
// only in deep sums for starting from others.
int64_t outlier_share(Purpose purpose, int64_t n, int64_t k) {
  return purpose == Purpose::many_rows && n >= 64 && k >= 64 ? 10 : 256;
}

struct Offsets {
  int64_t column_sums, column_products, panels, outlier_begin, outliers, end;
};

Offsets layout(Isa isa, Form form, int64_t n, int64_t k, int64_t outliers) {
  Offsets at;
  const int64_t array = padded_columns(n) * int64_t{sizeof(int32_t)};
  at.column_sums = sizeof(Header);
  at.column_products = at.column_sums + array;
  at.panels = round_up(at.column_products + (form == Form::words ? array : 0), kAlign);
  const int64_t room = isa == Isa::amx_int8 ? kAmxDepth * kPanel : 0;  // a last tile may reach as far behind the panels
  at.outlier_begin = round_up(at.panels + padded_columns(n) * padded_depth(k) + room, kAlign);
  at.outliers = at.outlier_begin;
  if (outliers > 0) at.outliers += round_up((padded_columns(n) + 1) * int64_t{sizeof(uint32_t)}, kAlign);
  at.end = round_up(at.outliers + outliers * int64_t{sizeof(Outlier)}, kAlign);
  return at;
}

// Where weight (k, column) of a panel stands in it.
inline int64_t place(Form form, int64_t k, int64_t column) {
  const int64_t unit = form == Form::quads ? 4 : 2;
  return (k / unit * kPanel + column) * unit + k % unit;
}

// The four k whose products meet in one 16-bit lane of the avx2 kernel: two of a group, two of the next.
constexpr int64_t kLaneSteps[4] = {0, 1, 4, 5};

// Cuts the weights at `lane` until positive and negative parts stay within 128; `cut(i, rest)` hears what was cut off.
template <class Cut>
void make_safe(int32_t (&lane)[4], Cut&& cut) {
  for (int32_t sign : {1, -1}) {
    int32_t excess = -128;
    for (int32_t w : lane) excess += std::max(w * sign, 0);
    while (excess > 0) {
      int largest = 0;
      for (int i = 1; i < 4; ++i)
        if (lane[i] * sign > lane[largest] * sign) largest = i;
      const int32_t rest = std::min(excess, lane[largest] * sign);
      lane[largest] -= rest * sign;
      excess -= rest;
      cut(largest, rest * sign);
    }
  }
}

// Calls found(outlier) for every pair of weights of one column of which Form::quads has to cut on avx2.
template <class Found>
void find_outliers(const int8_t* column, int64_t k, Found&& found) {
  for (int64_t base = 0; base < k; base += 8)
    for (int64_t half : {0, 2}) {
      int32_t lane[4];
      for (int i = 0; i < 4; ++i) {
        const int64_t at = base + half + kLaneSteps[i];
        lane[i] = at < k ? column[at] : 0;
      }
      int16_t rests[4] = {};
      make_safe(lane, [&](int i, int32_t rest) { rests[i] = static_cast<int16_t>(rests[i] + rest); });
      for (int i : {0, 2})
        if (rests[i] != 0 || rests[i + 1] != 0)
          found({static_cast<uint32_t>((base + half + kLaneSteps[i]) / 2), {rests[i], rests[i + 1]}});
    }
}

struct Plan {
  Form form = Form::quads;
  std::vector<uint32_t> outlier_begin;  // [padded columns + 1]
  std::vector<Outlier> outliers;
};

// Only plain AVX2 has to look at the weights; a dot product instruction takes any.
Plan plan(Isa isa, const int8_t* weight, int64_t row_stride, int64_t n, int64_t k, Purpose purpose) {
  Plan result;
  if (isa != Isa::avx2) return result;
  // Outliers are not split with K, and quads take more codes at once than a short run has.
  if (k > kMaxNarrowDepth || purpose == Purpose::short_runs) {
    result.form = Form::words;
    return result;
  }
  const size_t limit = static_cast<size_t>(n * k / outlier_share(purpose, n, k));
  result.outlier_begin.reserve(static_cast<size_t>(padded_columns(n) + 1));
  for (int64_t column = 0; column < n; ++column) {
    result.outlier_begin.push_back(static_cast<uint32_t>(result.outliers.size()));
    find_outliers(weight + column * row_stride, k, [&](const Outlier& cut) { result.outliers.push_back(cut); });
    if (result.outliers.size() > limit) {
      result.form = Form::words;
      result.outliers.clear();
      return result;
    }
  }
  result.outlier_begin.resize(static_cast<size_t>(padded_columns(n) + 1), static_cast<uint32_t>(result.outliers.size()));
  return result;
}

// w0 w2 + w1 w3, summed over the groups of four in a column; modulo 2**32.
int32_t sum_of_products(const int8_t* column, int64_t k) {
  uint32_t sum = 0;
  for (int64_t i = 0; i + 2 < k; i += 1 + i % 2 * 2) sum += static_cast<uint32_t>(column[i] * column[i + 2]);
  return static_cast<int32_t>(sum);
}

// `column_products` is null but for Form::words.
void pack_panel(Form form, const int8_t* weight, int64_t row_stride, int64_t columns, int64_t k, int8_t* panel,
                int32_t* column_sums, int32_t* column_products) {
  const int64_t unit = form == Form::quads ? 4 : 2;
  for (int64_t c = 0; c < columns; ++c) {
    const int8_t* row = weight + c * row_stride;
    int8_t* to = panel + c * unit;
    int64_t at = 0;
    if (form == Form::quads)
      for (; at + 4 <= k; at += 4, to += 4 * kPanel) std::memcpy(to, row + at, 4);
    else
      for (; at + 2 <= k; at += 2, to += 2 * kPanel) std::memcpy(to, row + at, 2);
    for (; at < k; ++at) panel[place(form, at, c)] = row[at];
    int32_t sum = 0;
    for (int64_t i = 0; i < k; ++i) sum += row[i];
    column_sums[c] = sum;
    if (column_products) column_products[c] = sum_of_products(row, k);
  }
}

using RunJob = void (*)(const Job&);

RunJob kernel_of(Isa isa) {
  switch (isa) {
#if defined(ZEROPOINT_HAS_AVX2)
    case Isa::avx2:
      return run_avx2;
#endif
#if defined(ZEROPOINT_HAS_AVXVNNI)
    case Isa::avx_vnni:
      return run_avx_vnni;
#endif
#if defined(ZEROPOINT_HAS_AVX512VNNI)
    case Isa::avx512_vnni:
      return run_avx512_vnni;
#endif
#if defined(ZEROPOINT_HAS_AMXINT8)
    case Isa::amx_int8:
      return run_amx_int8;
#endif
#if defined(ZEROPOINT_HAS_NEON_DOT)
    case Isa::neon_dot:
      return run_neon_dot;
#endif
#if defined(ZEROPOINT_HAS_NEON_I8MM)
    case Isa::neon_i8mm:
      return run_neon_i8mm;
#endif
    default:
      return run_portable;
  }
}

}  // namespace

AlignedBytes pack(Isa isa, const int8_t* weight, int64_t row_stride, int64_t n, int64_t k, const Parallel& parallel,
                  Purpose purpose) {
  const Plan chosen = plan(isa, weight, row_stride, n, k, purpose);
  const int64_t outliers = static_cast<int64_t>(chosen.outliers.size());
  const Offsets at = layout(isa, chosen.form, n, k, outliers);
  AlignedBytes bytes(static_cast<size_t>(at.end));
  Header header = {};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.version = kVersion;
  header.isa = static_cast<int32_t>(isa);
  header.n = n;
  header.k = k;
  header.bytes = at.end;
  header.outliers = outliers;
  header.form = static_cast<uint32_t>(chosen.form);
  std::memcpy(bytes.data(), &header, sizeof header);

  auto* panels = reinterpret_cast<int8_t*>(bytes.data() + at.panels);
  auto* sums = reinterpret_cast<int32_t*>(bytes.data() + at.column_sums);
  auto* products = chosen.form == Form::words ? reinterpret_cast<int32_t*>(bytes.data() + at.column_products) : nullptr;
  const int64_t panel_bytes = padded_depth(k) * kPanel;
  const int64_t grain = std::max<int64_t>(1, (int64_t{1} << 17) / std::max<int64_t>(panel_bytes, 1));
  parallel.for_range(0, padded_columns(n) / kPanel, grain, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p)
      pack_panel(chosen.form, weight + p * kPanel * row_stride, row_stride, std::min(kPanel, n - p * kPanel), k,
                 panels + p * panel_bytes, sums + p * kPanel, products ? products + p * kPanel : nullptr);
  });
  if (outliers > 0) {
    std::memcpy(bytes.data() + at.outlier_begin, chosen.outlier_begin.data(),
                chosen.outlier_begin.size() * sizeof(uint32_t));
    std::memcpy(bytes.data() + at.outliers, chosen.outliers.data(), chosen.outliers.size() * sizeof(Outlier));
    for (int64_t column = 0; column < n; ++column)
      for (uint32_t i = chosen.outlier_begin[column]; i < chosen.outlier_begin[column + 1]; ++i)
        for (int64_t j : {0, 1}) {
          const int16_t rest = chosen.outliers[i].values[j];
          if (rest == 0) continue;  // its place may lie behind K
          int8_t* panel = panels + column / kPanel * panel_bytes;
          int8_t& weight_left = panel[place(chosen.form, 2 * chosen.outliers[i].pair + j, column % kPanel)];
          weight_left = static_cast<int8_t>(weight_left - rest);
        }
  }
  return bytes;
}

bool view(const uint8_t* bytes, int64_t length, Isa isa, int64_t n, int64_t k, Packed* out) {
  Header header;
  if (bytes == nullptr || length < int64_t{sizeof header} || n < 0 || k < 0 || k > kMaxDepth) return false;
  std::memcpy(&header, bytes, sizeof header);
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0 || header.version != kVersion ||
      header.isa != static_cast<int32_t>(isa) || header.n != n || header.k != k || header.bytes != length)
    return false;
  if (header.form > static_cast<uint32_t>(Form::words) || header.outliers < 0 || header.outliers > length) return false;
  const Form form = static_cast<Form>(header.form);
  if (isa != Isa::avx2 && (form != Form::quads || header.outliers != 0)) return false;
  if (form == Form::words && header.outliers != 0) return false;
  if (reinterpret_cast<uintptr_t>(bytes) % alignof(int32_t) != 0) return false;
  const Offsets at = layout(isa, form, n, k, header.outliers);
  if (at.end != length) return false;
  out->isa = isa;
  out->form = form;
  out->n = n;
  out->k = k;
  out->column_sums = reinterpret_cast<const int32_t*>(bytes + at.column_sums);
  out->column_products =
      form == Form::words ? reinterpret_cast<const int32_t*>(bytes + at.column_products) : nullptr;
  out->panels = reinterpret_cast<const int8_t*>(bytes + at.panels);
  out->outlier_count = header.outliers;
  out->outlier_begin = nullptr;
  out->outliers = nullptr;
  out->unpacked = nullptr;
  if (header.outliers > 0) {
    out->outlier_begin = reinterpret_cast<const uint32_t*>(bytes + at.outlier_begin);
    out->outliers = reinterpret_cast<const Outlier*>(bytes + at.outliers);
  }
  return true;
}

void run(const Packed& packed, const uint8_t* a, int64_t a_stride, int64_t m, int64_t n_begin, int64_t n_end,
         const Epilogue& epilogue) {
  const RunJob kernel = kernel_of(packed.isa);
  const int64_t block = block_rows(packed);
  const size_t item = epilogue.output == Epilogue::Output::codes ? 1 : 4;
  Epilogue part = epilogue;
  for (int64_t row = 0; row < m; row += block) {
    part.out = static_cast<uint8_t*>(epilogue.out) + static_cast<size_t>(row * epilogue.out_stride) * item;
    part.row_sums = epilogue.row_sums ? epilogue.row_sums + row : nullptr;
    kernel({&packed, a + row * a_stride, a_stride, std::min(block, m - row), n_begin, n_end, 0,
            padded_depth(packed.k) / kGroup, &part});
  }
}

int64_t walk_unit(Isa isa, Form form) {
  if (includes_x86(isa, Isa::avx512_vnni)) return kGroup;
  if (isa != Isa::avx2) return 0;
  return form == Form::quads ? 2 * kGroup : 2;
}

int64_t walk_bytes(const Packed& packed) { return packed.form == Form::words ? 2 : 1; }

void run_walk(const Packed& packed, const void* a, const Walk& walk, int64_t m, int64_t n_begin, int64_t n_end,
              const Epilogue& epilogue) {
  kernel_of(packed.isa)({&packed, static_cast<const uint8_t*>(a), 0, m, n_begin, n_end, 0,
                         padded_depth(packed.k) / kGroup, &epilogue, &walk});
}

void run_wide(const Packed& packed, const uint8_t* a, int64_t a_stride, int64_t m, int64_t n_begin, int64_t n_end,
              const Epilogue& epilogue, int64_t* out, int64_t out_stride) {
  const RunJob kernel = kernel_of(packed.isa);
  const int64_t columns = n_end - n_begin;
  const int64_t za = epilogue.activation_zero_point;
  for (int64_t row = 0; row < m; ++row)
    for (int64_t n = n_begin; n < n_end; ++n) {
      const int64_t zw = epilogue.weight_zero_point ? epilogue.weight_zero_point[n] : 0;
      const int64_t row_sum = epilogue.weight_zero_point ? epilogue.row_sums[row] : 0;
      out[row * out_stride + n - n_begin] = za * (packed.k * zw - packed.column_sums[n]) - zw * row_sum;
    }
  // Raw sums of one part of K fit 32 bits: with activation zero point 0 the epilogue adds no constant.
  Epilogue raw;
  raw.output = Epilogue::Output::sums;
  constexpr int64_t kRows = 24;
  constexpr int64_t kGroups = kMaxNarrowDepth / kGroup;
  raw.out_stride = columns;
  raw.out_column = n_begin;
  std::vector<int32_t> sums(static_cast<size_t>(kRows * columns));
  raw.out = sums.data();
  const int64_t groups = padded_depth(packed.k) / kGroup;
  for (int64_t row = 0; row < m; row += kRows) {
    const int64_t rows = std::min(kRows, m - row);
    for (int64_t group = 0; group < groups; group += kGroups) {
      kernel({&packed, a + row * a_stride, a_stride, rows, n_begin, n_end, group, std::min(groups, group + kGroups),
              &raw});
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < columns; ++c) out[(row + r) * out_stride + c] += sums[r * raw.out_stride + c];
    }
  }
}

void row_sums(const uint8_t* a, int64_t a_stride, int64_t m, int64_t k, int32_t* sums) {
  for (int64_t row = 0; row < m; ++row) {
    const uint8_t* x = a + row * a_stride;
    int32_t sum = 0;
    for (int64_t i = 0; i < k; ++i) sum += x[i];
    sums[row] = sum;
  }
}

void flip_sign(const uint8_t* from, uint8_t* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] ^ 0x80;
}

int64_t tile_rows(const Packed& packed) {
  if (packed.isa == Isa::amx_int8) return kAmxRows;
  if (packed.isa == Isa::avx2 && packed.form == Form::quads) return 4;
  return packed.isa == Isa::portable || packed.isa == Isa::neon_dot ? 4 : 6;
}

// Their codes stay in the second-level cache meanwhile. A multiple of every kernel's tile.
int64_t block_rows(const Packed& packed) {
  const int64_t cache_bytes = packed.isa == Isa::amx_int8 ? 512 * 1024 : 128 * 1024;
  const int64_t row_bytes = padded_depth(packed.k) * (packed.form == Form::words ? 2 : 1);
  const int64_t unit = packed.isa == Isa::amx_int8 ? 2 * kAmxRows : 24;
  return std::max<int64_t>(cache_bytes / std::max<int64_t>(row_bytes, 1) / unit, 1) * unit;
}

void* thread_scratch(Scratch slot, size_t bytes) {
  struct Free {
    void operator()(void* memory) const { ::operator delete(memory, std::align_val_t{kAlign}); }
  };
  struct Block {
    std::unique_ptr<void, Free> memory;
    size_t size = 0;
  };
  thread_local Block blocks[static_cast<size_t>(Scratch::count_)];
  Block& block = blocks[static_cast<size_t>(slot)];
  if (block.size < bytes) {
    block.memory.reset();
    block.size = 0;
    block.memory.reset(::operator new(bytes, std::align_val_t{kAlign}));
    block.size = bytes;
  }
  return block.memory.get();
}

namespace {

// One small product that leaves a part of every tile empty. `wild` weights take the whole range, a few columns at its
// ends; mild ones let the avx2 kernel use quads, with a few outliers.
bool same_as_portable(Isa isa, bool wild) {
  const bool tiled = isa == Isa::amx_int8;  // which takes tiles for larger products only
  const int64_t rows = tiled ? 20 : 13, columns = 70, depth = tiled ? 261 : 69;
  const int64_t stride = padded_depth(depth);
  uint32_t state = 1;
  const auto random = [&state](int bits) {  // a fixed sequence
    state = state * 1664525u + 1013904223u;
    return static_cast<int32_t>(state) >> (32 - bits);
  };
  std::vector<int8_t> weight(columns * depth);
  for (auto& w : weight) w = static_cast<int8_t>(random(wild ? 8 : 5));
  for (int64_t k = 0; k < depth; ++k)
    for (int64_t n = 0; n < 4 && wild; ++n) weight[n * depth + k] = n % 2 ? 127 : -128;
  for (int64_t n : {1, 17, 69})
    for (int64_t k : {8, 9, 44}) weight[n * depth + k] = n == 17 ? -128 : 127;
  std::vector<uint8_t> a(static_cast<size_t>(rows * stride), 255);
  for (int64_t i = 3 * stride; i < rows * stride; ++i) a[i] = static_cast<uint8_t>(random(8));
  std::vector<int32_t> zero_points(padded_columns(columns), 0), sums(rows);
  for (int64_t n = 0; n < columns; ++n) zero_points[n] = random(8);
  row_sums(a.data(), stride, rows, depth, sums.data());
  const std::vector<float> multiplier(padded_columns(columns), 0.003f), offset(padded_columns(columns), -1.5f);

  Epilogue ep;
  ep.activation_zero_point = 131;
  ep.weight_zero_point = zero_points.data();
  ep.row_sums = sums.data();
  ep.multiplier = multiplier.data();
  ep.offset = offset.data();
  ep.low = -100, ep.high = 120, ep.out_zero_point = 7;
  const auto product = [&](Isa which, Epilogue::Output output, auto item) {
    const auto bytes = pack(which, weight.data(), depth, columns, depth, Parallel::serial());
    Packed packed;
    std::vector<decltype(item)> out(rows * columns);
    if (!view(bytes.data(), static_cast<int64_t>(bytes.size()), which, columns, depth, &packed)) return out;
    ep.output = output;
    ep.out = out.data();
    ep.out_stride = columns;
    run(packed, a.data(), stride, rows, 0, columns, ep);
    return out;
  };
  using Output = Epilogue::Output;
  const auto same = [&](Output output, auto item) {
    return product(isa, output, item) == product(Isa::portable, output, item);
  };
  const bool shifted = same(Output::sums, int32_t{}) && same(Output::codes, int8_t{}) && same(Output::floats, float{});
  ep.weight_zero_point = nullptr;  // codes straight from the sums
  return shifted && same(Output::codes, int8_t{});
}

}  // namespace

bool self_check(Isa isa) { return same_as_portable(isa, false) && same_as_portable(isa, true); }

}  // namespace zeropoint::gemm
