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

template <class To>
void spread(const Numbers& numbers, int64_t begin, int64_t end, To* to) {
  const auto copy = [&](auto* from) {
    if (numbers.count == 1)
      std::fill(to + begin, to + end, static_cast<To>(from[0]));
    else
      for (int64_t n = begin; n < end; ++n) to[n] = static_cast<To>(from[n]);
  };
  switch (numbers.type) {
    case Numbers::Type::f32: return copy(static_cast<const float*>(numbers.data));
    case Numbers::Type::f64: return copy(static_cast<const double*>(numbers.data));
    case Numbers::Type::i32: return copy(static_cast<const int32_t*>(numbers.data));
    case Numbers::Type::i64: return copy(static_cast<const int64_t*>(numbers.data));
  }
}

// The per-column arrays of an epilogue, in memory of the thread.
void prepare_columns(const Layer& layer, double x_scale, double out_scale, int64_t begin, int64_t end, Epilogue* ep) {
  const int64_t columns = padded_columns(layer.weight.n);
  auto* reals = static_cast<double*>(
      thread_scratch(Scratch::columns, static_cast<size_t>(columns) * (sizeof(double) + 3 * sizeof(float))));
  auto* multiplier = reinterpret_cast<float*>(reals + columns);
  auto* offset = multiplier + columns;
  auto* zero_point = reinterpret_cast<int32_t*>(offset + columns);

  spread(layer.scale, begin, end, reals);
  for (int64_t n = begin; n < end; ++n) multiplier[n] = static_cast<float>(x_scale * reals[n] / out_scale);
  ep->multiplier = multiplier;
  if (layer.bias.data) {
    spread(layer.bias, begin, end, reals);
    for (int64_t n = begin; n < end; ++n) offset[n] = static_cast<float>(reals[n] / out_scale);
    ep->offset = offset;
  }
  spread(layer.zero_point, begin, end, zero_point);
  const bool shifted = std::any_of(zero_point + begin, zero_point + end, [](int32_t z) { return z != 0; });
  ep->weight_zero_point = shifted ? zero_point : nullptr;
  // A kernel computes whole panels: the columns behind the last are computed and not stored.
  for (int64_t n = end; n < std::min(round_up(end, kPanel), columns); ++n)
    multiplier[n] = offset[n] = 0.0f, zero_point[n] = 0;
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

template <class GetRows>
void multiply(const Layer& layer, int64_t m, double x_scale, double out_scale, const Epilogue& epilogue,
              const Parallel& parallel, GetRows&& get_rows) {
  const Packed& weight = layer.weight;
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
      prepare_columns(layer, x_scale, out_scale, n_begin, n_end, &ep);
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

void linear(const Layer& layer, const CodesCall& call, const Parallel& parallel) {
  const int64_t k = layer.weight.k;
  if (call.m == 0 || layer.weight.n == 0) return;
  Epilogue ep;
  ep.activation_zero_point = call.x_zero_point + (call.x_signed ? 128 : 0);
  ep.low = static_cast<float>(call.out_min - call.out_zero_point);
  ep.high = static_cast<float>(call.out_max - call.out_zero_point);
  ep.out_zero_point = call.out_zero_point;
  ep.out = call.out;
  ep.out_stride = layer.weight.n;
  const bool in_place = !call.x_signed && k % kGroup == 0;
  multiply(layer, call.m, call.x_scale, call.out_scale, ep, parallel, [&](int64_t row, int64_t count) -> Rows {
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
  multiply(layer, call.m, grid.scale, 1.0, ep, parallel, [&](int64_t row, int64_t count) -> Rows {
    uint8_t* rows = row_memory(count, stride);
    for (int64_t r = 0; r < count; ++r)
      elementwise::kernels().quantize(call.x + (row + r) * k, rows + r * stride, k, inverse, target);
    return {rows, stride};
  });
}

}  // namespace zeropoint::gemm
