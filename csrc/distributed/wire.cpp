#include "distributed/wire.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "isa.h"

namespace zeropoint::wire {
namespace {

constexpr int64_t kPiece = 16384;  // elements that a thread takes at a time: 64 KiB of floats stay in its cache
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kSmallestScale = std::numeric_limits<float>::min();

// Rows cut into pieces, so that one long row is shared out as well as many short ones.
struct Pieces {
  int64_t row, in_row, total;

  Pieces(int64_t rows, int64_t row) : row(row), in_row((row + kPiece - 1) / kPiece), total(rows * in_row) {}

  int64_t row_of(int64_t piece) const { return piece / in_row; }
  int64_t begin(int64_t piece) const { return row_of(piece) * row + piece % in_row * kPiece; }
  int64_t end(int64_t piece) const { return std::min(begin(piece) + kPiece, (row_of(piece) + 1) * row); }
  int64_t grain() const { return std::max<int64_t>(1, kPiece / std::max<int64_t>(1, std::min(row, kPiece))); }
};

int64_t blocks_a_task(Form form) { return std::max<int64_t>(1, kPiece / form.block); }

float read_scale(const uint8_t* at) {
  float scale;
  std::memcpy(&scale, at, sizeof(scale));
  return scale;
}

// One block of exactly form.block elements; `first` is the number of its first element in the tensor.
void pack_block(const Kernels& loops, const float* x, Form form, int64_t first, const uint32_t* seed, uint8_t* scale_out,
                uint8_t* codes) {
  const float limit = form.bits == 8 ? 127.0f : 7.0f;
  float scale = loops.largest(x, form.block) / limit;
  if (scale < kSmallestScale) scale = kSmallestScale;
  std::memcpy(scale_out, &scale, sizeof(scale));
  if (!(scale <= kLargest)) {  // NaN or infinite: the scale alone tells it
    std::memset(codes, form.bits == 8 ? 0 : 0x88, static_cast<size_t>(form.code_bytes()));
    return;
  }
  const float inverse = 1.0f / scale;
  const auto number = static_cast<uint32_t>(first);
  if (seed == nullptr)
    (form.bits == 8 ? loops.block_codes8 : loops.block_codes4)(x, codes, form.block, inverse);
  else
    (form.bits == 8 ? loops.random_codes8 : loops.random_codes4)(x, codes, form.block, inverse, *seed, number);
}

}  // namespace

const Kernels& kernels() { return kernels_of_level<kernels_portable, kernels_avx2, kernels_avx512>(); }

void row_range(const float* x, int64_t n, int64_t row, float* low, float* high, const Parallel& parallel) {
  const Kernels& loops = kernels();
  const int64_t rows = (n + row - 1) / row;
  const Pieces pieces(rows, row);
  std::vector<float> lows(static_cast<size_t>(pieces.total)), highs(static_cast<size_t>(pieces.total));
  parallel.for_range(0, pieces.total, pieces.grain(), [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t from = std::min(pieces.begin(p), n), to = std::min(pieces.end(p), n);
      loops.range(x + from, to - from, &lows[static_cast<size_t>(p)], &highs[static_cast<size_t>(p)]);
    }
  });
  for (int64_t r = 0; r < rows; ++r) {
    float least = 0.0f, most = 0.0f;
    for (int64_t p = r * pieces.in_row; p < (r + 1) * pieces.in_row; ++p) {
      const float a = lows[static_cast<size_t>(p)], b = highs[static_cast<size_t>(p)];
      if (!(a >= least)) least = a;  // also takes a NaN
      if (!(b <= most)) most = b;
      if (a != a) break;
    }
    low[r] = least;
    high[r] = most;
  }
}

void row_quantize(const float* x, int64_t n, int64_t row, const float* scale, const float* zero, uint8_t* codes,
                  const Parallel& parallel) {
  const Kernels& loops = kernels();
  const Pieces pieces((n + row - 1) / row, row);
  parallel.for_range(0, pieces.total, pieces.grain(), [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t r = pieces.row_of(p), from = pieces.begin(p), to = pieces.end(p);
      const bool finite = scale[r] <= kLargest;
      const int64_t known = finite ? std::clamp<int64_t>(n - from, 0, to - from) : 0;
      if (known > 0) loops.row_codes(x + from, codes + from, known, 1.0f / scale[r], zero[r]);
      std::memset(codes + from + known, static_cast<uint8_t>(zero[r]), static_cast<size_t>(to - from - known));
    }
  });
}

void row_sum(const uint8_t* codes, const float* qparams, int64_t ranks, int64_t rows, int64_t row, float* out, int64_t n,
             const Parallel& parallel) {
  const Kernels& loops = kernels();
  const Pieces pieces(rows, row);
  parallel.for_range(0, pieces.total, pieces.grain(), [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t r = pieces.row_of(p), from = pieces.begin(p), to = std::min(pieces.end(p), n);
      if (to <= from) continue;
      std::fill(out + from, out + to, 0.0f);
      for (int64_t k = 0; k < ranks; ++k) {
        const float* grid = qparams + k * 2 * rows;
        loops.add_row(codes + k * rows * row + from, out + from, to - from, grid[rows + r], grid[r]);
      }
    }
  });
}

void block_pack(const float* x, int64_t n, Form form, int64_t chunks, int64_t count, const uint32_t* seed, uint8_t* out,
                const Parallel& parallel) {
  const Kernels& loops = kernels();
  const int64_t row_bytes = count * form.block_bytes();
  parallel.for_range(0, chunks * count, blocks_a_task(form), [&](int64_t begin, int64_t end) {
    std::vector<float> padded;
    for (int64_t b = begin; b < end; ++b) {
      uint8_t* row = out + b / count * row_bytes;
      const int64_t i = b % count, first = b * form.block, known = std::clamp<int64_t>(n - first, 0, form.block);
      const float* values = x + first;
      if (known < form.block) {
        padded.assign(static_cast<size_t>(form.block), 0.0f);
        if (known > 0) std::copy(x + first, x + first + known, padded.begin());
        values = padded.data();
      }
      pack_block(loops, values, form, first, seed, row + 4 * i, row + 4 * count + i * form.code_bytes());
    }
  });
}

void block_sum(Packed packed, Form form, float* out, const Parallel& parallel) {
  const Kernels& loops = kernels();
  const auto first = form.bits == 8 ? loops.block_values8 : loops.block_values4;
  const auto more = form.bits == 8 ? loops.add_block8 : loops.add_block4;
  parallel.for_range(0, packed.count, blocks_a_task(form), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b)
      for (int64_t r = 0; r < packed.rows; ++r) {
        const uint8_t* row = packed.data + r * packed.stride;
        const uint8_t* codes = row + 4 * packed.count + b * form.code_bytes();
        (r == 0 ? first : more)(codes, out + b * form.block, form.block, read_scale(row + 4 * b));
      }
  });
}

void block_unpack(Packed packed, Form form, float* out, int64_t n, const Parallel& parallel) {
  const Kernels& loops = kernels();
  const auto values = form.bits == 8 ? loops.block_values8 : loops.block_values4;
  const int64_t blocks = (n + form.block - 1) / form.block;
  parallel.for_range(0, blocks, blocks_a_task(form), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const uint8_t* row = packed.data + b / packed.count * packed.stride;
      const int64_t i = b % packed.count, from = b * form.block;
      const uint8_t* codes = row + 4 * packed.count + i * form.code_bytes();
      if (from + form.block <= n) {
        values(codes, out + from, form.block, read_scale(row + 4 * i));
      } else {
        std::vector<float> whole_block(static_cast<size_t>(form.block));
        values(codes, whole_block.data(), form.block, read_scale(row + 4 * i));
        std::copy(whole_block.begin(), whole_block.begin() + (n - from), out + from);
      }
    }
  });
}

}  // namespace zeropoint::wire
