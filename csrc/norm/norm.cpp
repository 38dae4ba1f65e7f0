#include "norm/norm.h"

#include <algorithm>
#include <cmath>

#include "elementwise/wide.h"

namespace zeropoint::norm {
namespace {

using elementwise::at;
using elementwise::is_byte;
using elementwise::Kernels;
using elementwise::kernels;

// Of a set of codes: the code nearest to their mean, the mean counted from there, and the biased variance, in steps.
struct Statistics {
  int64_t centre;
  double mean;
  double var;
};

// `first` and `second` sum the centred codes and their squares.
Statistics statistics(int64_t centre, int64_t first, double second, int64_t count) {
  const double sum = static_cast<double>(first), n = static_cast<double>(count);
  const double var = (second - sum * sum / n) / n;
  return {centre, sum / n, var < 0.0 ? 0.0 : var};
}

int64_t rounded_mean(int64_t sum, int64_t count) {
  return static_cast<int64_t>(std::nearbyint(static_cast<double>(sum) / static_cast<double>(count)));
}

// From sums of the codes themselves, moved to the centre in integers: sum((c - k)^2) = sum(c^2) - 2k sum(c) + n k^2.
Statistics from_sums(int64_t sum, int64_t squares, int64_t zero_point, int64_t count) {
  const int64_t centre = zero_point + rounded_mean(sum - count * zero_point, count);
  const int64_t second = squares - 2 * centre * sum + count * centre * centre;
  return statistics(centre, sum - count * centre, static_cast<double>(second), count);
}

// 32-bit codes: two passes, and squares in halves of 16 bits, since their sum does not fit 64 bits.
// The codes lie in `blocks` runs of `run` elements, a stride apart within a run and between runs.
Statistics from_codes(const int32_t* codes, int64_t blocks, int64_t block_stride, int64_t run, int64_t run_stride,
                      int64_t zero_point) {
  const int64_t count = blocks * run;
  const auto each = [&](auto&& f) {
    for (int64_t i = 0; i < blocks; ++i)
      for (int64_t j = 0; j < run; ++j) f(static_cast<int64_t>(codes[i * block_stride + j * run_stride]));
  };
  int64_t sum = 0;
  each([&](int64_t code) { sum += code - zero_point; });
  const int64_t centre = zero_point + rounded_mean(sum, count);
  int64_t first = 0, high_high = 0, high_low = 0, low_low = 0;
  each([&](int64_t code) {
    const int64_t step = code - centre;
    const int64_t high = (step + 32768) >> 16, low = step - high * 65536;
    first += step;
    high_high += high * high;
    high_low += high * low;
    low_low += low * low;
  });
  const double second = static_cast<double>(high_high) * 4294967296.0 + static_cast<double>(high_low) * 131072.0 +
                        static_cast<double>(low_low);
  return statistics(centre, first, second, count);
}

Statistics of_run(Input x, int64_t begin, int64_t n) {
  if (!is_byte(x.type)) return from_codes(static_cast<const int32_t*>(x.codes) + begin, 1, 0, n, 1, x.zero_point);
  int64_t sum = 0, squares = 0;
  kernels().sums(static_cast<const uint8_t*>(x.codes) + begin, x.type == Type::i8, n, &sum, &squares);
  return from_sums(sum, squares, x.zero_point, n);
}

// The statistics of every group of one channels_last sample: sums of each column first, then of a group's columns.
void of_columns(Input x, int64_t begin, Shape shape, int64_t groups, Statistics* out) {
  const int64_t channels = shape.channels, members = channels / groups;
  if (!is_byte(x.type)) {
    for (int64_t g = 0; g < groups; ++g)
      out[g] = from_codes(static_cast<const int32_t*>(x.codes) + begin + g * members, shape.spatial, channels, members,
                          1, x.zero_point);
    return;
  }
  std::vector<int64_t> sum(static_cast<size_t>(channels)), squares(sum.size());
  kernels().column_sums(static_cast<const uint8_t*>(x.codes) + begin, x.type == Type::i8, shape.spatial, channels,
                        sum.data(), squares.data());
  std::vector<int64_t> group_sum(static_cast<size_t>(groups)), group_squares(group_sum.size());
  for (int64_t c = 0; c < channels; ++c) {
    group_sum[c / members] += sum[c];
    group_squares[c / members] += squares[c];
  }
  for (int64_t g = 0; g < groups; ++g)
    out[g] = from_sums(group_sum[g], group_squares[g], x.zero_point, members * shape.spatial);
}

// 32-bit codes of a row of layer norm, where gain and shift differ from element to element.
void finish_row(Input x, int64_t begin, int64_t n, int64_t centre, Line row, const float* gain, const float* shift,
                Grid grid, void* out, Type out_type) {
  using elementwise::kChunk;
  double y[kChunk], zeros[kChunk];
  std::fill(zeros, zeros + std::min(n, kChunk), static_cast<double>(grid.zero_point));
  for (int64_t i = 0; i < n; i += kChunk) {
    const int64_t length = std::min(kChunk, n - i);
    elementwise::read_wide(at(x.codes, x.type, begin + i), x.type, 1, length, y);
    for (int64_t j = 0; j < length; ++j) {
      const float normal = static_cast<float>(y[j] - static_cast<double>(centre)) * row.factor + row.offset;
      y[j] = normal * gain[i + j] + shift[i + j];
    }
    elementwise::write_codes(y, zeros, length, grid, at(out, out_type, begin + i), out_type);
  }
}

}  // namespace

Line line(double weight, double bias, double mean, double var, double eps, double x_scale, double out_scale) {
  const double slope = weight / std::sqrt(var + eps);
  const double shift = bias - mean * slope;
  return {static_cast<float>(slope * x_scale / out_scale), static_cast<float>(shift / out_scale)};
}

void layer_norm(Input x, int64_t rows, int64_t size, double eps, const std::vector<float>& gain,
                const std::vector<float>& shift, Grid grid, void* out, Type out_type, const Parallel& parallel) {
  const Kernels& k = kernels();
  const bool bytes = is_byte(x.type) && is_byte(out_type);
  parallel.for_range(0, rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(size, 1)), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const int64_t begin = row * size;
      const Statistics s = of_run(x, begin, size);
      const Line normal = line(1.0, 0.0, s.mean * x.scale, s.var * (x.scale * x.scale), eps, x.scale, 1.0);
      if (bytes)
        k.affine_twice(elementwise::bytes(at(x.codes, x.type, begin), x.type, s.centre), normal.factor, normal.offset,
                       gain.data(), shift.data(), static_cast<uint8_t*>(out) + begin, size,
                       elementwise::target(out_type, grid));
      else
        finish_row(x, begin, size, s.centre, normal, gain.data(), shift.data(), grid, out, out_type);
    }
  });
}

void group_norm(Input x, Shape shape, int64_t groups, double eps, const std::vector<double>& weight,
                const std::vector<double>& bias, double out_scale, Grid grid, void* out, Type out_type,
                const Parallel& parallel) {
  const int64_t members = shape.channels / groups, sample = shape.channels * shape.spatial;
  std::vector<Statistics> stats(static_cast<size_t>(shape.batch * groups));
  if (shape.channels_last)
    parallel.for_range(0, shape.batch, 1, [&](int64_t first, int64_t last) {
      for (int64_t n = first; n < last; ++n) of_columns(x, n * sample, shape, groups, stats.data() + n * groups);
    });
  else
    parallel.for_range(0, shape.batch * groups, 1, [&](int64_t first, int64_t last) {
      for (int64_t g = first; g < last; ++g) stats[g] = of_run(x, g * members * shape.spatial, members * shape.spatial);
    });

  const auto finish = [&](int64_t n, const Parallel& inner) {
    std::vector<int64_t> centre(static_cast<size_t>(shape.channels));
    std::vector<float> factor(centre.size()), offset(centre.size());
    for (int64_t c = 0; c < shape.channels; ++c) {
      const Statistics& s = stats[n * groups + c / members];
      const Line channel = line(weight[c], bias[c], s.mean * x.scale, s.var * (x.scale * x.scale), eps, x.scale,
                                out_scale);
      centre[c] = s.centre;
      factor[c] = channel.factor;
      offset[c] = channel.offset;
    }
    const elementwise::Channels view = shape.channels_last ? elementwise::Channels{shape.spatial, shape.channels, 1}
                                                           : elementwise::Channels{1, shape.channels, shape.spatial};
    elementwise::affine_channels(at(x.codes, x.type, n * sample), x.type, view, centre, factor, offset, grid,
                                 at(out, out_type, n * sample), out_type, inner);
  };
  if (shape.batch < parallel.threads)
    for (int64_t n = 0; n < shape.batch; ++n) finish(n, parallel);
  else
    parallel.for_range(0, shape.batch, 1, [&](int64_t first, int64_t last) {
      for (int64_t n = first; n < last; ++n) finish(n, Parallel{});
    });
}

}  // namespace zeropoint::norm
