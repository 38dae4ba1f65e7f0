// AMX: tdpbusd multiplies a tile of up to 16 rows of 64 uint8 codes by a tile of 64 x 16 int8 codes, in 32 bits, with no
// saturation. A panel of packed weights is a row of such tiles as it stands: 16 groups of four k, 16 columns each.
//
// Sums stand in up to four tile registers, `Rows` tiles of rows by `Panels` panels; each chunk of 64 k takes a tile of
// codes for each of the former, and a tile of weights for each of the latter. Tiles whose rows cross cache lines load at a
// sixth of the speed: so rows that are not aligned are first copied to where they are, a block at a time.
//
// Where rows are deep, and do not overlap, weights are loaded past the first-level cache, which would else lose the rows
// to them: a tile of weights meets two tiles of rows before others take its place, a tile of rows meets all panels.
//
// All tiles of a job have one shape, as shaping them takes as long as ten products. The rows of a line are split as evenly
// as can be, and its last tile begins early enough to be whole: what rows two tiles share, both store. K is padded by
// zeros behind the copied rows, which meet whatever follows in the weights (pack leaves room for that behind the last
// panel).
#if defined(__x86_64__)
#include "gemm/store_avx512.h"

namespace zeropoint::gemm {
namespace {

constexpr int64_t kStep = kGroup * kPanel;
constexpr int64_t kTileGroups = kAmxDepth / kGroup;
constexpr int kMaxTiles = 4;  // of sums
constexpr int64_t kMaxChunks = kMaxNarrowDepth / kAmxDepth;  // deeper sums come in parts
static_assert(kMaxNarrowDepth % kAmxDepth == 0);

struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Registers 0 to 3 hold sums, 4 and 5 codes, 6 and 7 weights.
template <int kTile>
inline __attribute__((always_inline)) void load_tile(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
inline __attribute__((always_inline)) void load_passing_tile(const void* from, int64_t stride) {
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
inline __attribute__((always_inline)) void store_tile(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
inline __attribute__((always_inline)) void zero_tile() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

template <int kSums, int kCodes, int kWeights>
inline __attribute__((always_inline)) void multiply_tiles() {
  __asm__ volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kCodes), "i"(kWeights));
}

// f(integral constant) for 0, 1, ... kCount - 1.
template <int kIndex>
struct Index {
  static constexpr int value = kIndex;
};
template <int kCount, int kFrom = 0, class F>
inline __attribute__((always_inline)) void for_each(F&& f) {
  if constexpr (kFrom < kCount) {
    f(Index<kFrom>{});
    for_each<kCount, kFrom + 1>(f);
  }
}

struct Tiles {
  const uint8_t* a[kMaxTiles];  // the first row of each
  int64_t a_stride;
  const int64_t* places;  // of the chunks of K, from the beginning of a row
  const int8_t* b;  // of the first panel
  int64_t panel_bytes;
  int64_t chunks;  // of K
  const int32_t* start;  // of the sums of a row, or null: 0
};

// sums[Rows][kAmxRows][`width` panels][16], of which these are the first.
template <int Rows, int Panels, bool kPassing>
void multiply(const Tiles& tiles, int64_t width, int32_t* sums) {
  static_assert(Rows * Panels <= kMaxTiles);
  const auto load_codes = [&](auto r, int64_t k) __attribute__((always_inline)) {
    load_tile<4 + r.value % 2>(tiles.a[r.value] + tiles.places[k], tiles.a_stride);
  };
  const auto load_weights = [&](auto p, int64_t k) __attribute__((always_inline)) {
    const int8_t* const from = tiles.b + p.value * tiles.panel_bytes + k * kTileGroups * kStep;
    if constexpr (kPassing)
      load_passing_tile<6 + p.value % 2>(from, kStep);
    else
      load_tile<6 + p.value % 2>(from, kStep);
  };
  for_each<Rows>([&](auto r) __attribute__((always_inline)) {
    for_each<Panels>([&](auto p) __attribute__((always_inline)) {
      constexpr int kSums = decltype(r)::value * Panels + decltype(p)::value;
      if (tiles.start != nullptr)
        load_tile<kSums>(tiles.start + p.value * kPanel, 0);
      else
        zero_tile<kSums>();
    });
  });
  for (int64_t k = 0; k < tiles.chunks; ++k) {
    if constexpr (Rows <= 2) {
      for_each<Rows>([&](auto r) __attribute__((always_inline)) { load_codes(r, k); });
      for_each<Panels>([&](auto p) __attribute__((always_inline)) {
        load_weights(p, k);
        for_each<Rows>([&](auto r) __attribute__((always_inline)) {
          constexpr int kRow = decltype(r)::value, kColumn = decltype(p)::value;
          multiply_tiles<kRow * Panels + kColumn, 4 + kRow, 6 + kColumn % 2>();
        });
      });
    } else {
      load_weights(Index<0>{}, k);
      for_each<Rows>([&](auto r) __attribute__((always_inline)) {
        load_codes(r, k);
        multiply_tiles<decltype(r)::value, 4 + decltype(r)::value % 2, 6>();
      });
    }
  }
  for_each<Rows>([&](auto r) __attribute__((always_inline)) {
    for_each<Panels>([&](auto p) __attribute__((always_inline)) {
      constexpr int kSums = decltype(r)::value * Panels + decltype(p)::value;
      store_tile<kSums>(sums + (r.value * kAmxRows * width + p.value) * kPanel,
                        width * kPanel * int64_t{sizeof(int32_t)});
    });
  });
}

using Multiply = void (*)(const Tiles&, int64_t, int32_t*);

template <bool kPassing>
constexpr Multiply kKernels[kMaxTiles + 1][kMaxTiles + 1] = {
    {},
    {nullptr, multiply<1, 1, kPassing>, multiply<1, 2, kPassing>, multiply<1, 3, kPassing>, multiply<1, 4, kPassing>},
    {nullptr, multiply<2, 1, kPassing>, multiply<2, 2, kPassing>},
    {nullptr, multiply<3, 1, kPassing>},
    {nullptr, multiply<4, 1, kPassing>},
};

// `rows` rows of Panels * 16 sums, four times 16 at once, whose numbers `codes` has side by side.
template <int Panels>
void store_codes(const int32_t* sums, int64_t rows, const Codes& codes, uint8_t* out) {
  constexpr int64_t kColumns = Panels * kPanel, kRowsAtOnce = Panels == 3 ? 1 : kMaxPanels / Panels;
  const Narrow narrow(codes);
  __m512 multiplier[kMaxPanels], offset[kMaxPanels];
#pragma GCC unroll 4
  for (int i = 0; i < kMaxPanels; ++i) {
    multiplier[i] = _mm512_load_ps(codes.multiplier + i * kPanel);
    offset[i] = _mm512_load_ps(codes.offset + i * kPanel);
  }
  const __mmask64 mask = first_bytes(codes.columns);
  for (int64_t row = 0; row < rows; row += kRowsAtOnce, sums += kRowsAtOnce * kColumns) {
    __m512i steps[kMaxPanels];
#pragma GCC unroll 4
    for (int i = 0; i < kMaxPanels; ++i) {
      const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums + i * kPanel)), multiplier[i]);
      steps[i] = _mm512_cvtps_epi32(_mm512_add_ps(scaled, offset[i]));
    }
    const __m512i bytes = narrow(steps);
    uint8_t* const to = out + row * codes.out_stride;
    if constexpr (kRowsAtOnce == 1) {
      _mm512_mask_storeu_epi8(to, mask, bytes);
    } else if constexpr (kRowsAtOnce == 2) {
      _mm256_mask_storeu_epi8(to, static_cast<__mmask32>(mask), _mm512_castsi512_si256(bytes));
      if (row + 1 < rows)
        _mm256_mask_storeu_epi8(to + codes.out_stride, static_cast<__mmask32>(mask), _mm512_extracti64x4_epi64(bytes, 1));
    } else {
      const __m128i parts[4] = {_mm512_castsi512_si128(bytes), _mm512_extracti32x4_epi32(bytes, 1),
                                _mm512_extracti32x4_epi32(bytes, 2), _mm512_extracti32x4_epi32(bytes, 3)};
      for (int64_t r = 0; r < kRowsAtOnce && row + r < rows; ++r)
        _mm_mask_storeu_epi8(to + r * codes.out_stride, static_cast<__mmask16>(mask), parts[r]);
    }
  }
}

using StoreCodes = void (*)(const int32_t*, int64_t, const Codes&, uint8_t*);
constexpr StoreCodes kStoreCodes[kMaxPanels + 1] = {nullptr, store_codes<1>, store_codes<2>, store_codes<3>,
                                                    store_codes<4>};

// The numbers of the first `panels` panels, as often as they fit.
void repeat(int64_t panels, Codes* codes) {
  for (int64_t i = panels * kPanel; i < kMaxPanels * kPanel; i += kPanel) {
    _mm512_store_ps(codes->multiplier + i, _mm512_load_ps(codes->multiplier + i - panels * kPanel));
    _mm512_store_ps(codes->offset + i, _mm512_load_ps(codes->offset + i - panels * kPanel));
  }
}

// Copies a row of `count` codes; writes whole vectors, zeros behind the last code.
inline __attribute__((always_inline)) void copy_row(const uint8_t* from, int64_t count, uint8_t* to) {
  int64_t i = 0;
  for (; i + kAmxDepth <= count; i += kAmxDepth) _mm512_store_si512(to + i, _mm512_loadu_si512(from + i));
  if (i < count) _mm512_store_si512(to + i, _mm512_maskz_loadu_epi8(first_bytes(count - i), from + i));
}

// The same for a row in segments of `run` codes: of whole vectors, and a rest of up to 32 or 64 codes. What is written
// behind the rest lies where the next segment goes, or behind the row.
template <bool kShortRest>
void copy_segments(const uint8_t* from, const int64_t* segments, int64_t count, int64_t run, uint8_t* to) {
  const int64_t whole = run / kAmxDepth * kAmxDepth;
  const __mmask64 rest = run > whole ? first_bytes(run - whole) : 0;
  for (int64_t s = 0; s < count; ++s, to += run) {
    const uint8_t* const segment = from + segments[s];
    for (int64_t i = 0; i < whole; i += kAmxDepth) _mm512_storeu_si512(to + i, _mm512_loadu_si512(segment + i));
    if (kShortRest)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + whole),
                          _mm256_maskz_loadu_epi8(static_cast<__mmask32>(rest), segment + whole));
    else
      _mm512_storeu_si512(to + whole, _mm512_maskz_loadu_epi8(rest, segment + whole));
  }
}

// Rows as tiles are loaded from: row i at `a` + `places[i]`, or + i * `stride`. Within each line of `line` rows they are
// `stride` bytes apart; there are whole lines only.
struct Rows {
  const uint8_t* a;
  const int64_t* places;
  int64_t stride, line, count;

  const uint8_t* row(int64_t index) const { return a + (places != nullptr ? places[index] : index * stride); }
};

class Product {
 public:
  explicit Product(const Job& job)
      : job_(job),
        packed_(*job.packed),
        ep_(*job.epilogue),
        depth_((job.group_end - job.group_begin) * kGroup),
        deep_(depth_ >= kDeep && job.walk == nullptr),
        to_codes_(ep_.output == Epilogue::Output::codes && ep_.weight_zero_point == nullptr),
        codes_(ep_) {
    tiles_.panel_bytes = packed_.panel_bytes();
    tiles_.chunks = (depth_ + kAmxDepth - 1) / kAmxDepth;
    tiles_.places = places_;
  }

  void run() {
    for (int64_t k = 0; k < tiles_.chunks; ++k) places_[k] = k * kAmxDepth;
    Rows rows;
    if (find_lines(&rows)) return block(rows, 0);
    // An odd number of cache lines from row to row: rows of a tile share no set of the cache.
    rows = {nullptr, nullptr, (tiles_.chunks | 1) * kAmxDepth, 0, 0};
    const int64_t fit = kCopiedBytes / rows.stride / (2 * kAmxRows), most = (fit > 1 ? fit : 1) * 2 * kAmxRows;
    const int64_t blocks = (job_.m + most - 1) / most, height = (job_.m + blocks - 1) / blocks;
    const auto bytes = static_cast<size_t>(height * rows.stride + kAmxDepth);
    auto* const copied = static_cast<uint8_t*>(thread_scratch(Scratch::words, bytes));
    rows.a = copied;
    for (int64_t first = 0; first < job_.m; first += height) {
      rows.count = rows.line = job_.m - first < height ? job_.m - first : height;
      copy_rows(first, rows.count, rows.stride, copied);
      block(rows, first);
    }
  }

 private:
  static constexpr int64_t kCopiedBytes = 1024 * 1024;  // which stay in the second-level cache
  static constexpr int64_t kKeptBytes = 1024 * 1024;    // of weights, beside the rows
  static constexpr int64_t kDeep = 512;
  static constexpr int64_t kLeastLine = 8;  // rows that shorter lines leave out of tiles would cost more than copying

  // Whether all rows can be loaded from where they are. If so, `places_` says where their chunks are.
  bool find_lines(Rows* rows) {
    if (depth_ % kAmxDepth != 0) return false;
    const uint8_t* const a = job_.a + job_.group_begin * kGroup;
    int64_t misfit = static_cast<int64_t>(reinterpret_cast<uintptr_t>(a));
    const Walk* const walk = job_.walk;
    if (walk == nullptr) {
      *rows = {a, nullptr, job_.a_stride, job_.m, job_.m};
      return ((misfit | job_.a_stride) & (kAmxDepth - 1)) == 0;
    }
    if (job_.m < 2) return false;
    const int64_t stride = walk->rows[1] - walk->rows[0];
    int64_t line = 2;
    while (line < job_.m && walk->rows[line] - walk->rows[line - 1] == stride) ++line;
    if (line < kLeastLine || job_.m % line != 0) return false;
    for (int64_t first = 0; first < job_.m; first += line) {
      misfit |= walk->rows[first];
      for (int64_t i = first + 1; i < first + line; ++i)
        if (walk->rows[i] - walk->rows[i - 1] != stride) return false;
    }
    misfit |= stride | walk->run;
    for (int64_t s = 0; s < walk->count; ++s) misfit |= walk->segments[s];
    if ((misfit & (kAmxDepth - 1)) != 0) return false;
    int64_t* place = places_;
    for (int64_t s = 0; s < walk->count; ++s)
      for (int64_t i = 0; i < walk->run; i += kAmxDepth) *place++ = walk->segments[s] + i;
    *rows = {a, walk->rows, stride, line, job_.m};
    return true;
  }

  // Rows [first, first + count) as tiles want them: aligned, and zeros behind K.
  void copy_rows(int64_t first, int64_t count, int64_t stride, uint8_t* to) const {
    if (job_.walk == nullptr) {
      const uint8_t* from = job_.a + first * job_.a_stride + job_.group_begin * kGroup;
      for (int64_t r = 0; r < count; ++r, from += job_.a_stride, to += stride) copy_row(from, depth_, to);
      return;
    }
    const Walk walk = *job_.walk;
    const int64_t last = (tiles_.chunks - 1) * kAmxDepth;
    const __mmask64 behind = ~first_bytes(depth_ - last);
    const bool short_rest = walk.run % kAmxDepth <= kAmxDepth / 2;
    for (int64_t r = 0; r < count; ++r, to += stride) {
      const uint8_t* const from = job_.a + walk.rows[first + r];
      if (short_rest)
        copy_segments<true>(from, walk.segments, walk.count, walk.run, to);
      else
        copy_segments<false>(from, walk.segments, walk.count, walk.run, to);
      _mm512_mask_storeu_epi8(to + last, behind, _mm512_setzero_si512());
    }
  }

  void shape(int64_t rows) {
    if (rows == tile_rows_) return;
    tile_rows_ = rows;
    Shapes shapes;
    for (int t = 0; t < 8; ++t) {
      shapes.rows[t] = static_cast<uint8_t>(t < 6 ? rows : kTileGroups);
      shapes.row_bytes[t] = kAmxDepth;
    }
    _tile_loadconfig(&shapes);
  }

  // Rows that are [first, ...) of the job.
  void block(const Rows& rows, int64_t first) {
    const int64_t line_tiles = (rows.line + kAmxRows - 1) / kAmxRows, row_tiles = rows.count / rows.line * line_tiles;
    shape((rows.line + line_tiles - 1) / line_tiles);
    tiles_.a_stride = rows.stride;
    // Deep rows stay in the first-level cache while they meet as many columns as the second holds; shallow ones leave
    // room there for four panels, which then meet all rows.
    int64_t part = kMaxPanels * kPanel;
    if (deep_) part = round_up(kKeptBytes / depth_, part);
    for (int64_t n = job_.n_begin; n < job_.n_end; n += part)
      columns(rows, first, line_tiles, row_tiles, n, job_.n_end - n < part ? job_.n_end : n + part);
  }

  // The same, of columns [begin, end).
  void columns(const Rows& rows, int64_t first, int64_t line_tiles, int64_t row_tiles, int64_t begin, int64_t end) {
    // A lone panel takes four tiles of rows at once; two by two tiles need the fewest loads for their products.
    const int64_t rows_at_once = end - begin <= kPanel ? kMaxTiles : 2;
    for (int64_t tile = 0; tile < row_tiles; tile += rows_at_once) {
      const int64_t at_once = row_tiles - tile < rows_at_once ? row_tiles - tile : rows_at_once;
      int64_t row[kMaxTiles];
      for (int64_t r = 0; r < at_once; ++r) {
        const int64_t in_line = (tile + r) % line_tiles * tile_rows_, last = rows.line - tile_rows_;
        row[r] = (tile + r) / line_tiles * rows.line + (in_line < last ? in_line : last);
        tiles_.a[r] = rows.row(row[r]);
        row[r] += first;
      }
      // Four panels give whole cache lines of codes.
      for (int64_t n = begin; n < end; n += kMaxPanels * kPanel) {
        const int64_t count = end - n < kMaxPanels * kPanel ? end - n : kMaxPanels * kPanel;
        tile_rows_by_panels(row, at_once, n, count);
      }
    }
  }

  // `at_once` tiles of rows, which begin at these rows of the job, by `columns` columns, up to four panels of them.
  void tile_rows_by_panels(const int64_t* row, int64_t at_once, int64_t n, int64_t columns) {
    const int64_t panels = (columns + kPanel - 1) / kPanel, panels_at_once = kMaxTiles / at_once;
    if (prepared_ != n) {
      fast_ = to_codes_ && prepare_codes(packed_, ep_, n, columns, &codes_);
      if (fast_) repeat(panels, &codes_);
      prepared_ = n;
    }
    for (int64_t p = 0; p < panels; p += panels_at_once) {
      tiles_.b = packed_.panel(n / kPanel + p) + job_.group_begin * kStep;
      tiles_.start = fast_ ? codes_.constant + p * kPanel : nullptr;
      const int64_t count = panels - p < panels_at_once ? panels - p : panels_at_once;
      (deep_ ? kKernels<true> : kKernels<false>)[at_once][count](tiles_, panels, sums_ + p * kPanel);
    }
    for (int64_t r = 0; r < at_once; ++r) store(sums_ + r * kAmxRows * panels * kPanel, row[r], n, columns, panels);
  }

  // One tile of rows, from `row` of the job on.
  void store(const int32_t* sums, int64_t row, int64_t n, int64_t columns, int64_t panels) const {
    if (fast_) {
      auto* out = static_cast<uint8_t*>(ep_.out) + row * ep_.out_stride + n - ep_.out_column;
      return kStoreCodes[panels](sums, tile_rows_, codes_, out);
    }
    const StorePanel store_panel = store_for(ep_.output);
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t rest = columns - p * kPanel;
      store_panel(sums + p * kPanel, panels * kPanel, row, tile_rows_, n + p * kPanel, rest < kPanel ? rest : kPanel,
                  packed_, ep_);
    }
  }

  const Job& job_;
  const Packed& packed_;
  const Epilogue& ep_;
  int64_t depth_;  // codes of a row to sum over
  bool deep_;      // rows that fill much of the first-level cache; those of a walk overlap there
  bool to_codes_;
  Codes codes_;
  Tiles tiles_;
  int64_t places_[kMaxChunks];
  int64_t tile_rows_ = 0;
  int64_t prepared_ = -1;  // the column that `codes_` begins with
  bool fast_ = false;      // whether they serve there
  alignas(64) int32_t sums_[(2 * kAmxRows + 1) * kMaxPanels * kPanel];
};

// Whether tiles are worth it, in instructions a row: a dot product for each group of each panel takes as long as 16 rows
// of products of tiles do, but sums have to leave their tiles, and segments to be copied.
bool worth_tiles(const Job& job) {
  constexpr int64_t kLeastProducts = 6000;
  const int64_t groups = job.group_end - job.group_begin, chunks = (groups + kTileGroups - 1) / kTileGroups;
  const int64_t panels = (job.n_end - job.n_begin + kPanel - 1) / kPanel;
  const int64_t segments = job.walk != nullptr ? job.walk->count : 1;
  if (job.m < kAmxLeastRows || job.m * groups * panels < kLeastProducts || chunks > kMaxChunks) return false;
  return 2 * panels * (groups - 6) > 3 * panels * chunks + 12 * segments;
}

}  // namespace

void run_amx_int8(const Job& job) {
  if (!worth_tiles(job)) return run_avx512_vnni(job);
  Product(job).run();
  _tile_release();
}

}  // namespace zeropoint::gemm
#endif
