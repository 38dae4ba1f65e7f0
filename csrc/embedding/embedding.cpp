#include "embedding/embedding.h"

#include <algorithm>
#include <vector>

#include "elementwise/kernels.h"

namespace zeropoint::embedding {
namespace {

constexpr int64_t kGrain = 1 << 14;  // values a thread

// `codes` is memory for one row of codes, used with 4 bits only.
void read_row(const Table& table, int64_t index, uint8_t* codes, float* out) {
  const uint8_t* row = table.codes + index * table.row_bytes;
  if (table.bits == 4) {
    for (int64_t i = 0; i < table.row_bytes; ++i) {
      codes[2 * i] = row[i] & 15;
      codes[2 * i + 1] = row[i] >> 4;
    }
    row = codes;
  }
  elementwise::kernels().dequantize({row, false, table.zero_point[index]}, out, table.columns, table.scale[index]);
}

int64_t grain_of(const Table& table) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(table.columns, 1)); }

}  // namespace

void rows(const Table& table, const int64_t* indices, int64_t count, float* out, const Parallel& parallel) {
  parallel.for_range(0, count, grain_of(table), [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> codes(static_cast<size_t>(2 * table.row_bytes));
    for (int64_t i = begin; i < end; ++i) read_row(table, indices[i], codes.data(), out + i * table.columns);
  });
}

void bags(const Table& table, const Bags& given, float* out, const Parallel& parallel) {
  parallel.for_range(0, given.count, std::max<int64_t>(1, grain_of(table) / 8), [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> codes(static_cast<size_t>(2 * table.row_bytes));
    std::vector<float> row(static_cast<size_t>(table.columns));
    for (int64_t bag = begin; bag < end; ++bag) {
      float* total = out + bag * table.columns;
      int64_t count = 0;
      for (int64_t i = given.bounds[bag]; i < given.bounds[bag + 1]; ++i) {
        if (given.indices[i] == given.padding) continue;
        float* to = count == 0 ? total : row.data();
        read_row(table, given.indices[i], codes.data(), to);
        if (given.weights)
          for (int64_t c = 0; c < table.columns; ++c) to[c] = to[c] * given.weights[i];
        if (count++ == 0) continue;
        if (given.mode == Mode::max)
          for (int64_t c = 0; c < table.columns; ++c) total[c] = row[c] > total[c] ? row[c] : total[c];
        else
          for (int64_t c = 0; c < table.columns; ++c) total[c] = total[c] + row[c];
      }
      if (count == 0) std::fill_n(total, table.columns, 0.0f);
      if (count > 1 && given.mode == Mode::mean)
        for (int64_t c = 0; c < table.columns; ++c) total[c] = total[c] / static_cast<float>(count);
    }
  });
}

}  // namespace zeropoint::embedding
