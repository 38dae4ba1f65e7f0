// How a linear layer is computed: split rows and columns among threads; every thread prepares the numbers of its
// columns, brings a block of rows into the kernel's form, and multiplies.
#include "gemm/linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <vector>

#include "elementwise/kernels.h"
#include "elementwise/qparams.h"

namespace zeropoint::gemm {
namespace {

using Output = Epilogue::Output;

// Fewer products than this a thread cost less than waking it, which takes some microseconds.
int64_t work_per_thread(Isa isa, int64_t rows) {
  if (isa == Isa::amx_int8 && rows >= kAmxLeastRows) return int64_t{1} << 22;
  return int64_t{1} << (includes_x86(isa, Isa::avx512_vnni) ? 19 : 18);
}

// Has the kernel requantize with these arrays.
void set_columns(const Columns& columns, Epilogue* ep) {
  ep->multiplier = columns.multiplier;
  ep->offset = columns.offset;
  ep->weight_zero_point = columns.zero_point;
}

}  // namespace

void store_wide(const int64_t* sums, int64_t m, int64_t n_begin, int64_t n_end, const Epilogue& ep) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2**23: adding it rounds to an integer, ties to even
  for (int64_t row = 0; row < m; ++row)
    for (int64_t n = n_begin; n < n_end; ++n) {
      float y = static_cast<float>(*sums++) * ep.multiplier[n];
      if (ep.offset) y = y + ep.offset[n];
      const int64_t at = row * ep.out_stride + n - ep.out_column;
      if (ep.output == Output::floats) {
        static_cast<float*>(ep.out)[at] = ep.relu && y < 0.0f ? 0.0f : y;
        continue;
      }
      y = y == y ? y : 0.0f;
      y = std::min(std::max(y, ep.low), ep.high);
      const int32_t code = static_cast<int32_t>((y + kShift) - kShift) + ep.out_zero_point;
      static_cast<uint8_t*>(ep.out)[at] = static_cast<uint8_t>(code);
    }
}

namespace {

// How many parts the rows and the columns are cut into.
struct Split {
  int64_t rows = 1, columns = 1;
};

// The split into at most `parts` parts whose largest costs least. Beside its products, a part brings each of its rows into
// the kernel's form, which for each code costs as much as some products, and reads each of its columns.
Split choose_split(int64_t m, int64_t row_unit, int64_t n, int64_t column_unit, int64_t parts) {
  constexpr int64_t kRowCost = 16, kColumnCost = 4;
  const auto largest = [](int64_t count, int64_t unit, int64_t into) {
    const int64_t units = (count + unit - 1) / unit;
    return std::min((units + into - 1) / into * unit, count);
  };
  Split best;
  int64_t best_cost = std::numeric_limits<int64_t>::max();
  for (int64_t columns = 1; columns <= std::min(parts, (n + column_unit - 1) / column_unit); ++columns) {
    const int64_t rows = std::min(parts / columns, (m + row_unit - 1) / row_unit);
    const int64_t height = largest(m, row_unit, rows), width = largest(n, column_unit, columns);
    const int64_t cost = height * width + kRowCost * height + kColumnCost * width;
    if (cost < best_cost) best = {rows, columns}, best_cost = cost;
  }
  return best;
}

// `rows(row, count, thread's memory)` gives the kernel's rows: their place and stride.
struct Rows {
  const uint8_t* codes;
  int64_t stride;
};

// Rows to compute at once whose results are floats: so few that they lie in few pages, whose addresses the processor
// remembers while panel after panel adds to them.
int64_t float_rows(const Packed& weight) {
  constexpr int64_t kBytes = 128 * 1024, kLeast = 32;
  const int64_t unit = round_up(kLeast, tile_rows(weight));
  const int64_t fit = kBytes / (weight.n * int64_t{sizeof(float)});
  return std::min(block_rows(weight), std::max<int64_t>(fit / unit, 1) * unit);
}

// `get_columns(begin, end)` gives arrays whose entries [begin, end) are those of these columns.
template <class GetColumns, class GetRows>
void multiply(const Packed& weight, int64_t m, const Epilogue& epilogue, const Parallel& parallel,
              GetColumns&& get_columns, GetRows&& get_rows) {
  const int64_t column_unit = kPanel * (weight.n >= 128 * parallel.threads ? 4 : 1);
  const int64_t row_unit = std::min(m, tile_rows(weight));
  const int64_t row_units = (m + row_unit - 1) / row_unit, column_units = (weight.n + column_unit - 1) / column_unit;
  const int64_t work = m * weight.n * std::max<int64_t>(weight.k, 1);
  const int64_t threads = std::clamp<int64_t>(work / work_per_thread(weight.isa, m), 1, parallel.threads);
  // Long work is cut into more parts than there are threads, as they do not always get on equally fast.
  constexpr int64_t kLongWork = int64_t{1} << 24;
  const int64_t parts = work / threads >= kLongWork ? 4 * threads : threads;
  const Split split = choose_split(m, row_unit, weight.n, column_unit, threads == 1 ? 1 : parts);

  parallel.for_shares(0, split.rows * split.columns, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const int64_t i = part % split.rows, j = part / split.rows;
      const int64_t row_begin = part_begin(i, split.rows, row_units) * row_unit;
      const int64_t row_end = std::min(part_begin(i + 1, split.rows, row_units) * row_unit, m);
      const int64_t n_begin = part_begin(j, split.columns, column_units) * column_unit;
      const int64_t n_end = std::min(part_begin(j + 1, split.columns, column_units) * column_unit, weight.n);
      Epilogue ep = epilogue;
      set_columns(get_columns(n_begin, n_end), &ep);
      std::vector<int32_t> sums;
      std::vector<int64_t> wide;
      const int64_t block = ep.output == Output::floats ? float_rows(weight) : block_rows(weight);
      const int64_t item = ep.output == Output::floats ? sizeof(float) : 1;
      for (int64_t row = row_begin; row < row_end; row += block) {
        const int64_t count = std::min(block, row_end - row);
        const Rows rows = get_rows(row, count);
        if (ep.weight_zero_point) {
          sums.resize(static_cast<size_t>(count));
          row_sums(rows.codes, rows.stride, count, weight.k, sums.data());
          ep.row_sums = sums.data();
        }
        ep.out = static_cast<uint8_t*>(epilogue.out) + row * epilogue.out_stride * item;
        if (weight.k <= kMaxNarrowDepth) {
          run(weight, rows.codes, rows.stride, count, n_begin, n_end, ep);
          continue;
        }
        wide.resize(static_cast<size_t>(count * (n_end - n_begin)));
        run_wide(weight, rows.codes, rows.stride, count, n_begin, n_end, ep, wide.data(), n_end - n_begin);
        store_wide(wide.data(), count, n_begin, n_end, ep);
      }
    }
  });
}

uint8_t* row_memory(int64_t rows, int64_t stride) {
  return static_cast<uint8_t*>(thread_scratch(Scratch::rows, static_cast<size_t>(rows * stride)));
}

struct Range {
  float low = std::numeric_limits<float>::infinity();
  float high = -std::numeric_limits<float>::infinity();
};

// Smallest and largest finite value; (0, 0) if there is none.
Range range_of(const float* x, int64_t count, const Parallel& parallel) {
  constexpr int64_t kGrain = 1 << 16;
  Range range;
  std::mutex mutex;
  parallel.for_range(0, count, kGrain, [&](int64_t begin, int64_t end) {
    Range part;
    elementwise::kernels().finite_range(x + begin, end - begin, &part.low, &part.high);
    const std::lock_guard<std::mutex> lock(mutex);
    range = {std::min(range.low, part.low), std::max(range.high, part.high)};
  });
  return range.low > range.high ? Range{0.0f, 0.0f} : range;
}

}  // namespace

void linear(const Packed& weight, const Columns& columns, const CodesCall& call, const Parallel& parallel) {
  const int64_t k = weight.k;
  if (call.m == 0 || weight.n == 0) return;
  Epilogue ep;
  ep.activation_zero_point = call.x_zero_point + (call.x_signed ? 128 : 0);
  ep.low = static_cast<float>(call.out_min - call.out_zero_point);
  ep.high = static_cast<float>(call.out_max - call.out_zero_point);
  ep.out_zero_point = call.out_zero_point;
  ep.out = call.out;
  ep.out_stride = weight.n;
  const auto get_columns = [&](int64_t, int64_t) { return columns; };
  const bool in_place = !call.x_signed && k % kGroup == 0;
  multiply(weight, call.m, ep, parallel, get_columns, [&](int64_t row, int64_t count) -> Rows {
    const uint8_t* x = call.x + row * k;
    if (in_place) return {x, k};
    const int64_t stride = padded_depth(k);
    uint8_t* rows = row_memory(count, stride);
    if (stride == k) {
      flip_sign(x, rows, count * k);
    } else {
      for (int64_t r = 0; r < count; ++r)
        if (call.x_signed)
          flip_sign(x + r * k, rows + r * stride, k);
        else
          std::memcpy(rows + r * stride, x + r * k, static_cast<size_t>(k));
    }
    return {rows, stride};
  });
}

void linear(const Layer& layer, double x_scale, double out_scale, const CodesCall& call, const Parallel& parallel) {
  const int64_t n = layer.weight.n;
  const auto columns = write_columns(layer.columns, x_scale, out_scale, 0, n, n, column_memory(n));
  linear(layer.weight, columns, call, parallel);
}

void linear_dynamic(const Layer& layer, const FloatCall& call, const Parallel& parallel) {
  const int64_t k = layer.weight.k, stride = padded_depth(k);
  if (call.m == 0 || layer.weight.n == 0) return;
  const Range range = range_of(call.x, call.m * k, parallel);
  const auto grid = elementwise::choose_qparams(range.low, range.high, 0, call.reduce_range ? 127 : 255);
  const float inverse = 1.0f / static_cast<float>(grid.scale);
  const elementwise::Target target = {0x80, static_cast<int16_t>(grid.zero_point - 128),
                                      static_cast<float>(-grid.zero_point), static_cast<float>(255 - grid.zero_point)};
  Epilogue ep;
  ep.output = Output::floats;
  ep.activation_zero_point = static_cast<int32_t>(grid.zero_point);
  ep.relu = call.relu;
  ep.out = call.out;
  ep.out_stride = layer.weight.n;
  // Every thread makes the arrays of its own columns.
  const auto get_columns = [&](int64_t begin, int64_t end) {
    const int64_t n = layer.weight.n;
    return write_columns(layer.columns, grid.scale, 1.0, begin, end, n, column_memory(n));
  };
  multiply(layer.weight, call.m, ep, parallel, get_columns, [&](int64_t row, int64_t count) -> Rows {
    uint8_t* rows = row_memory(count, stride);
    for (int64_t r = 0; r < count; ++r)
      elementwise::kernels().quantize(call.x + (row + r) * k, rows + r * stride, k, inverse, target);
    return {rows, stride};
  });
}

}  // namespace zeropoint::gemm
