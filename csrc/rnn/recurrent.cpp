// The loop over time. Of every chunk of steps, all inputs are projected in one product; then step follows step.
//
// Threads share a step in one of two ways. Many sequences: every thread takes some of them through the whole chunk,
// and waits for nobody. Few: every thread takes some hidden units with all their gates, and they meet after each step.
#include "rnn/recurrent.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "elementwise/kernels.h"
#include "elementwise/qparams.h"
#include "rnn/kernels.h"

namespace zeropoint::rnn {
namespace {

constexpr int64_t kWorkPerThread = int64_t{1} << 19;  // fewer products cost less than waking a thread
constexpr int64_t kChunkReals = int64_t{1} << 19;     // projected inputs that stay in the caches until they are used
constexpr int64_t kBlockRows = 48;                    // rows whose raw sums are kept at once

int64_t threads_for(int64_t work, const Parallel& parallel) {
  return std::clamp<int64_t>(work / kWorkPerThread, 1, parallel.threads);
}

// Rows on their grids.
struct Codes {
  AlignedBytes codes;
  std::vector<Row> rows;
  int64_t stride = 0;

  void quantize(const float* x, int64_t count, int64_t k, bool need_sums) {
    stride = gemm::padded_depth(k);
    codes.resize(static_cast<size_t>(count * stride));
    rows.resize(static_cast<size_t>(count));
    const elementwise::Kernels& kernels = elementwise::kernels();
    for (int64_t r = 0; r < count; ++r) {
      float low = std::numeric_limits<float>::infinity(), high = -low;
      kernels.finite_range(x + r * k, k, &low, &high);
      if (low > high) low = high = 0.0f;
      const auto grid = elementwise::choose_qparams(low, high, 0, 255);
      const float scale = static_cast<float>(grid.scale);
      const elementwise::Target target = {0x80, static_cast<int16_t>(grid.zero_point - 128),
                                          static_cast<float>(-grid.zero_point),
                                          static_cast<float>(255 - grid.zero_point)};
      kernels.quantize(x + r * k, codes.data() + r * stride, k, 1.0f / scale, target);
      int32_t sum = 0;
      if (need_sums) gemm::row_sums(codes.data() + r * stride, stride, 1, k, &sum);
      rows[static_cast<size_t>(r)] = {scale, static_cast<uint32_t>(grid.zero_point), static_cast<uint32_t>(sum),
                                      static_cast<uint32_t>(k)};
    }
  }
};

// Columns [begin, end) of the product of `count` rows from `first` on; the result's rows are `out_stride` apart.
void project(const Projection& by, const Codes& from, int64_t first, int64_t count, int64_t begin, int64_t end,
             float* out, int64_t out_stride, std::vector<int32_t>& sums) {
  const int64_t columns = end - begin;
  if (columns <= 0) return;
  sums.resize(static_cast<size_t>(std::min(count, kBlockRows) * columns));
  gemm::Epilogue raw;
  raw.output = gemm::Epilogue::Output::sums;
  raw.out = sums.data();
  raw.out_stride = columns;
  raw.out_column = begin;
  // Zero point 0 leaves the plain sums of codes: what every row's own zero point adds comes with `finish`.
  const Columns numbers = {by.weight.column_sums + begin, by.zero_point ? by.zero_point + begin : nullptr,
                           by.scale + begin, by.bias ? by.bias + begin : nullptr};
  for (int64_t block = 0; block < count; block += kBlockRows) {
    const int64_t rows = std::min(kBlockRows, count - block);
    gemm::run(by.weight, from.codes.data() + (first + block) * from.stride, from.stride, rows, begin, end, raw);
    for (int64_t r = 0; r < rows; ++r)
      kernels().finish(sums.data() + r * columns, from.rows[static_cast<size_t>(first + block + r)], numbers,
                       out + (block + r) * out_stride, columns);
  }
}

// What `codes` leave of the rows that they were made from.
void subtract(const Codes& codes, const float* x, int64_t count, int64_t k, float* rest) {
  for (int64_t r = 0; r < count; ++r) {
    const Row& row = codes.rows[static_cast<size_t>(r)];
    const uint8_t* from = codes.codes.data() + r * codes.stride;
    const auto zero = static_cast<int32_t>(row.zero_point);
    for (int64_t i = 0; i < k; ++i) rest[r * k + i] = x[r * k + i] - static_cast<float>(from[i] - zero) * row.scale;
  }
}

// What a thread keeps from step to step.
struct Workspace {
  Codes codes;
  std::vector<int32_t> sums;
  std::vector<float> gates, units;
};

// One step of rows [row_begin, row_end) and hidden units [unit_begin, unit_end). `given` and `out` start at the
// step's first row.
void step(const Call& call, const float* given, float* out, int64_t row_begin, int64_t row_end, int64_t unit_begin,
          int64_t unit_end, Workspace& work) {
  const int64_t rows = row_end - row_begin, units = unit_end - unit_begin, hidden = call.hidden;
  const int64_t gates = gates_of(call.mode), state = call.recurrent.weight.k;
  if (rows <= 0 || units <= 0) return;
  work.codes.quantize(call.h + row_begin * state, rows, state, call.recurrent.zero_point != nullptr);
  work.gates.resize(static_cast<size_t>(rows * gates * units));
  float* recurrent = work.gates.data();
  if (units == hidden)
    project(call.recurrent, work.codes, 0, rows, 0, gates * hidden, recurrent, gates * units, work.sums);
  else
    for (int64_t gate = 0; gate < gates; ++gate)
      project(call.recurrent, work.codes, 0, rows, gate * hidden + unit_begin, gate * hidden + unit_end,
              recurrent + gate * units, gates * units, work.sums);

  if (call.output) work.units.resize(static_cast<size_t>(rows * hidden));
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = row_begin + r;
    const Gates operands = {given + row * gates * hidden + unit_begin, recurrent + r * gates * units, hidden, units};
    float* to = call.output ? work.units.data() + r * hidden : out + row * state + unit_begin;
    switch (call.mode) {
      case Mode::lstm: kernels().lstm(operands, call.c + row * hidden + unit_begin, to, units); break;
      case Mode::gru: kernels().gru(operands, call.h + row * state + unit_begin, to, units); break;
      case Mode::tanh: kernels().tanh(operands, to, units); break;
      case Mode::relu: kernels().relu(operands, to, units); break;
    }
  }
  if (call.output) {
    work.codes.quantize(work.units.data(), rows, hidden, call.output->zero_point != nullptr);
    project(*call.output, work.codes, 0, rows, 0, state, out + row_begin * state, state, work.sums);
  }
}

void keep_state(const Call& call, const float* out, int64_t row_begin, int64_t row_end) {
  const int64_t state = call.recurrent.weight.k;
  if (row_end > row_begin)
    std::memcpy(call.h + row_begin * state, out + row_begin * state,
                static_cast<size_t>((row_end - row_begin) * state) * sizeof(float));
}

}  // namespace

void recurrent(const Call& call, const Parallel& parallel) {
  const int64_t width = gates_of(call.mode) * call.hidden, state = call.recurrent.weight.k, depth = call.input.weight.k;
  std::vector<int64_t> first(static_cast<size_t>(call.steps) + 1, 0);
  for (int64_t t = 0; t < call.steps; ++t) first[t + 1] = first[t] + call.batch_sizes[t];
  const int64_t batch = call.steps ? *std::max_element(call.batch_sizes, call.batch_sizes + call.steps) : 0;
  if (batch == 0 || state == 0) return;

  // Weights are read anew for every thread's sequences, so each of them needs a few to be worth it.
  const int64_t threads = threads_for(batch * width * state, parallel);
  const bool by_rows = batch >= 8 * threads;
  const bool by_units = !by_rows && !call.output && call.hidden % gemm::kPanel == 0;
  const int64_t parts = by_rows || by_units ? threads : 1;
  std::vector<Workspace> workspaces(static_cast<size_t>(parts));

  const bool fine = call.input_rest != nullptr;
  const bool need_sums = call.input.zero_point || (fine && call.input_rest->zero_point);
  Projection again = call.input;
  again.bias = nullptr;
  Codes codes, rest_codes;
  std::vector<float> given, rest;
  int64_t done = 0;
  while (done < call.steps) {
    // Steps [begin, end) in time, as many as fit; the loop runs from the end if reversed.
    int64_t begin = call.reverse ? call.steps - done - 1 : done, end = begin + 1;
    const auto fits = [&](int64_t b, int64_t e) { return (first[e] - first[b]) * width <= kChunkReals; };
    if (call.reverse)
      while (begin > 0 && fits(begin - 1, end)) --begin;
    else
      while (end < call.steps && fits(begin, end + 1)) ++end;
    done += end - begin;

    const int64_t rows = first[end] - first[begin];
    codes.quantize(call.x + first[begin] * depth, rows, depth, need_sums);
    if (fine) {
      rest.resize(static_cast<size_t>(rows * depth));
      subtract(codes, call.x + first[begin] * depth, rows, depth, rest.data());
      rest_codes.quantize(rest.data(), rows, depth, call.input.zero_point != nullptr);
    }
    given.resize(static_cast<size_t>(rows * width));
    const int64_t panels = gemm::padded_columns(width) / gemm::kPanel;
    const int64_t shares = std::min(threads_for(rows * width * depth, parallel), panels);
    parallel.for_range(0, shares, 1, [&](int64_t from, int64_t to) {
      std::vector<int32_t> sums;
      const int64_t left = part_begin(from, shares, panels) * gemm::kPanel;
      const int64_t right = std::min(part_begin(to, shares, panels) * gemm::kPanel, width);
      project(call.input, codes, 0, rows, left, right, given.data() + left, width, sums);
      if (!fine) return;
      const int64_t columns = right - left;
      std::vector<float> more(static_cast<size_t>(rows * columns));
      const auto add = [&](const Projection& by, const Codes& of) {
        project(by, of, 0, rows, left, right, more.data(), columns, sums);
        for (int64_t r = 0; r < rows; ++r) {
          float* y = given.data() + r * width + left;
          for (int64_t n = 0; n < columns; ++n) y[n] = y[n] + more[static_cast<size_t>(r * columns + n)];
        }
      };
      add(again, rest_codes);
      add(*call.input_rest, codes);
    });

    const auto walk = [&](auto&& visit) {
      for (int64_t i = 0; i < end - begin; ++i) {
        const int64_t t = call.reverse ? end - 1 - i : begin + i;
        visit(call.batch_sizes[t], given.data() + (first[t] - first[begin]) * width, call.out + first[t] * state);
      }
    };
    if (by_rows) {
      parallel.for_range(0, parts, 1, [&](int64_t from, int64_t to) {
        for (int64_t part = from; part < to; ++part) {
          const int64_t top = part_begin(part, parts, batch), bottom = part_begin(part + 1, parts, batch);
          walk([&](int64_t size, const float* inputs, float* out) {
            const int64_t last = std::min(bottom, size);
            step(call, inputs, out, top, last, 0, call.hidden, workspaces[static_cast<size_t>(part)]);
            keep_state(call, out, top, last);
          });
        }
      });
    } else {
      const int64_t units = parts == 1 ? 1 : call.hidden / gemm::kPanel;
      const int64_t unit = parts == 1 ? call.hidden : gemm::kPanel;
      walk([&](int64_t size, const float* inputs, float* out) {
        parallel.for_range(0, parts, 1, [&](int64_t from, int64_t to) {
          for (int64_t part = from; part < to; ++part)
            step(call, inputs, out, 0, size, part_begin(part, parts, units) * unit,
                 part_begin(part + 1, parts, units) * unit, workspaces[static_cast<size_t>(part)]);
        });
        keep_state(call, out, 0, size);
      });
    }
  }
}

}  // namespace zeropoint::rnn
