// The exact int8 matrix product that linear and convolution stand on.
//
//   out[m][n] = epilogue( sum_k (x[m][k] - x_zero_point) * (w[n][k] - w_zero_point[n]) )
//
// Weights are packed once (`pack`, `view`); activations are read in place (`run`). No torch, no threads: the caller
// splits rows and columns, and every thread calls `run` on its own part.
//
// Algebra
//   Activations reach the kernel as uint8 `a`. Signed codes get their top bit flipped: a = x + 128, and their zero
//   point moves along: za = x_zero_point + 128 (`flip_sign` does both). With it
//     sum (a - za) * (w - zw) = sum a*w  +  za * (K*zw - sum w)  -  zw * sum a
//   The first sum is the kernel's. The second term is one constant a column (sum w is packed with the weights); the
//   third is there only where a weight zero point is not 0, and needs `row_sums`.
//   Each term is computed modulo 2**32. The whole sum is at most K*255*255 in size, so for K <= kMaxNarrowDepth the
//   wrapped result is the exact one. Beyond, `run` splits K, adds the parts in 64 bits, and is slower but as exact.
//
// Layout of packed weights (every instruction set)
//   Columns (rows of the weight) stand in panels of kPanel = 16, zero padded. K is zero padded to groups of 4 codes.
//     Form::quads   panel[K/4][16][4]: one 32-bit lane holds four successive k of one column: what vpdpbusd reads,
//                   and, 16 groups at a time, tdpbusd.
//                   The avx2 kernel adds two vpmaddubsw results in 16 bits before it widens them. That is exact where,
//                   of the four weights that meet in a 16-bit lane, the positive ones add up to at most 128 and the
//                   negative ones to at least -128 (255 * 128 < 2**15). Weights that break this rule are cut, and what
//                   was cut off stands in a list of outliers, whose products the kernel adds, for many rows at once.
//     Form::words   panel[K/2][16][2]: one 32-bit lane of the widened panel holds two successive k of one column, for
//                   vpmaddwd. The avx2 kernel takes it when there would be too many outliers. For many rows it
//                   computes, of each four k, (a0 + w2) (a2 + w0) + (a1 + w3) (a3 + w1), half the multiplications;
//                   what is too much is a sum of products of the row alone, and one of the column alone, packed as well.
//   Rows of `a` must be readable up to `padded_depth(K)`; the values there do not matter, they meet zeros.
#pragma once
#include <cstddef>
#include <cstdint>

#include "aligned_bytes.h"
#include "isa.h"
#include "parallel.h"

namespace zeropoint::gemm {

constexpr int64_t kPanel = 16;
constexpr int64_t kGroup = 4;
constexpr int64_t kMaxNarrowDepth = 33024;     // 33024 * 255 * 255 < 2**31
constexpr int64_t kMaxDepth = int64_t{1} << 23;  // row and column sums fit 32 bits

// Of a tile of AMX; fewer rows than the least are left to vectors.
constexpr int64_t kAmxRows = 16, kAmxDepth = 64, kAmxLeastRows = 6;

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
// Bytes that the kernel reads of a row of `k` activation codes.
constexpr int64_t padded_depth(int64_t k) { return round_up(k, kGroup); }
// Length of every per-column array of an epilogue.
constexpr int64_t padded_columns(int64_t n) { return round_up(n, kPanel); }

enum class Form : uint32_t { quads = 0, words = 1 };

// What was cut off the weights of a column at k = 2 pair and after it.
struct Outlier {
  uint32_t pair;
  int16_t values[2];
};

// Packed weights, read in place: pointers into the packed bytes, computed from sizes, never read from them.
struct Packed {
  Isa isa = Isa::portable;
  Form form = Form::quads;
  int64_t n = 0, k = 0;
  const int32_t* column_sums = nullptr;      // [padded_columns(n)]
  const int32_t* column_products = nullptr;  // [padded_columns(n)], of Form::words: sum over k of w0 w2 + w1 w3
  const int8_t* panels = nullptr;           // [padded_columns(n) / 16][padded_depth(k) * 16]
  const uint32_t* outlier_begin = nullptr;  // [padded_columns(n) + 1], or null if there are none
  const Outlier* outliers = nullptr;
  int64_t outlier_count = 0;
  // The weights as they were, dense rows, or null. Where there are, few rows do without outliers, which pay beside many.
  const int8_t* unpacked = nullptr;

  int64_t panel_bytes() const { return padded_depth(k) * kPanel; }
  const int8_t* panel(int64_t index) const { return panels + index * panel_bytes(); }
};

// What products are to be expected: a few outliers cost little beside many rows, and much beside one. Short runs: rows
// will be walked in runs of which only Form::words can take every one.
enum class Purpose { any, many_rows, short_runs };

// Packs `weight` (n rows of k codes, `row_stride` codes apart) for `isa`.
AlignedBytes pack(Isa isa, const int8_t* weight, int64_t row_stride, int64_t n, int64_t k, const Parallel& parallel,
                  Purpose purpose = Purpose::any);

// The packed weights in `bytes`, if header and length say that they are n x k for `isa`. False, and nothing is read
// beyond `length`, if they are anything else. `bytes` must outlive the view.
bool view(const uint8_t* bytes, int64_t length, Isa isa, int64_t n, int64_t k, Packed* out);

// The last step: what becomes of the exact sum `acc` of column n and row m. Per-column arrays are indexed by absolute
// column and have padded_columns(n) entries; per-row arrays and `out` count from the first row of `a`.
//   codes:    y = float(acc) * multiplier[n];  y += offset[n] if there is one;
//             out = int(rint(clamp(y, low, high))) + out_zero_point,  NaN counting as 0. Each step rounds by itself.
//   floats:   the same y, with max(y, 0) if relu.
//   sums:     out = acc, modulo 2**32 (64-bit outputs: `run_wide`).
struct Epilogue {
  enum class Output { codes, floats, sums };

  Output output = Output::codes;
  int32_t activation_zero_point = 0;           // of uint8 `a`: za above
  const int32_t* weight_zero_point = nullptr;  // zw, or null if all are 0
  const int32_t* row_sums = nullptr;           // sum over k of a[m][k]; needed with weight_zero_point
  const float* multiplier = nullptr;
  const float* offset = nullptr;
  float low = 0, high = 0;  // out_min - out_zero_point, out_max - out_zero_point
  int32_t out_zero_point = 0;
  bool relu = false;
  void* out = nullptr;     // int8 or uint8, float, or int32
  int64_t out_stride = 0;  // elements from row to row
  int64_t out_column = 0;  // the column that stands first in `out`
};

// Computes rows [0, m) and columns [n_begin, n_end) of the product and stores them in `out`.
// `a`: uint8 rows `a_stride` bytes apart. n_begin is a multiple of kPanel; n_end is too, or is packed.n.
void run(const Packed& packed, const uint8_t* a, int64_t a_stride, int64_t m, int64_t n_begin, int64_t n_end,
         const Epilogue& epilogue);

// Rows that overlap in memory, as those of a convolution do: code k of row m is a[rows[m] + segments[k / run] + k % run].
struct Walk {
  const int64_t* rows;
  const int64_t* segments;  // count of them
  int64_t count, run;       // count * run == K, run a multiple of walk_unit
};

// What the runs of a walk are multiples of: the codes that a kernel takes at once. 0: the instruction set cannot walk.
int64_t walk_unit(Isa isa, Form form);

// Bytes of a code in rows that are walked: 2 for Form::words, whose kernel wants them widened.
int64_t walk_bytes(const Packed& packed);

// The same as `run` with rows that are walked, for K <= kMaxNarrowDepth.
void run_walk(const Packed& packed, const void* a, const Walk& walk, int64_t m, int64_t n_begin, int64_t n_end,
              const Epilogue& epilogue);

// The exact sums in 64 bits, for any K: out[row * out_stride + column - n_begin].
void run_wide(const Packed& packed, const uint8_t* a, int64_t a_stride, int64_t m, int64_t n_begin, int64_t n_end,
              const Epilogue& epilogue, int64_t* out, int64_t out_stride);

// The epilogue, to codes or floats, of sums that `run_wide` gave: what `run` does with its own.
void store_wide(const int64_t* sums, int64_t m, int64_t n_begin, int64_t n_end, const Epilogue& epilogue);

// sums[m] = sum over k < K of a[m][k].
void row_sums(const uint8_t* a, int64_t a_stride, int64_t m, int64_t k, int32_t* sums);

// to[i] = from[i] with the top bit flipped: int8 codes as uint8 codes 128 higher. May work in place.
void flip_sign(const uint8_t* from, uint8_t* to, int64_t count);

// Rows that the kernel of `packed` computes at once: a good grain for splitting rows among threads.
int64_t tile_rows(const Packed& packed);

// Rows that `run` goes through before it turns to the next columns: what a caller gathers or converts at once.
int64_t block_rows(const Packed& packed);

// Memory of the calling thread that lasts until its next call with the same slot: rows that a caller of `run` gathers,
// rows that a kernel widens or aligns, a panel of weights, per-column arrays, and what other families need.
enum class Scratch { rows, words, panel, columns, tile, layout, count_ };
void* thread_scratch(Scratch slot, size_t bytes);

// Whether `isa` gives the same integers as the portable kernels on a small problem of worst cases.
bool self_check(Isa isa);

}  // namespace zeropoint::gemm
