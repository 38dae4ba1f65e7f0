#include "gemm/columns.h"

#include <algorithm>

#include "gemm/kernel.h"

namespace zeropoint::gemm {
namespace {

template <class Work>
void typed(const Numbers& numbers, Work&& work) {
  switch (numbers.type) {
    case Numbers::Type::f32: return work(static_cast<const float*>(numbers.data));
    case Numbers::Type::f64: return work(static_cast<const double*>(numbers.data));
    case Numbers::Type::i32: return work(static_cast<const int32_t*>(numbers.data));
    case Numbers::Type::i64: return work(static_cast<const int64_t*>(numbers.data));
  }
}

void write_ratios(const Numbers& numbers, int64_t begin, int64_t end, double factor, double divisor, float* to) {
  typed(numbers, [&](auto* from) {
    if (numbers.count > 1) return ratios(from + begin, end - begin, factor, divisor, to + begin);
    float ratio;
    ratios(from, 1, factor, divisor, &ratio);
    std::fill(to + begin, to + end, ratio);
  });
}

}  // namespace

template <class T>
void ratios(const T* from, int64_t count, double factor, double divisor, float* to) {
  if (divisor == 1.0) {  // the same, and faster
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(factor * static_cast<double>(from[i]));
    return;
  }
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(factor * static_cast<double>(from[i]) / divisor);
}
template void ratios<float>(const float*, int64_t, double, double, float*);
template void ratios<double>(const double*, int64_t, double, double, float*);
template void ratios<int32_t>(const int32_t*, int64_t, double, double, float*);
template void ratios<int64_t>(const int64_t*, int64_t, double, double, float*);

int64_t column_bytes(int64_t n) { return padded_columns(n) * int64_t{2 * sizeof(float) + sizeof(int32_t)}; }

void* column_memory(int64_t n) { return thread_scratch(Scratch::columns, static_cast<size_t>(column_bytes(n))); }

Columns read_columns(const void* memory, int64_t n, bool has_offset, bool has_zero_point) {
  const auto* multiplier = static_cast<const float*>(memory);
  const float* offset = multiplier + padded_columns(n);
  const auto* zero_point = reinterpret_cast<const int32_t*>(offset + padded_columns(n));
  return {multiplier, has_offset ? offset : nullptr, has_zero_point ? zero_point : nullptr};
}

Columns write_columns(const ColumnNumbers& numbers, double x_scale, double out_scale, int64_t begin, int64_t end,
                      int64_t n, void* memory) {
  const bool has_offset = numbers.bias.data != nullptr;
  if (begin >= end) return read_columns(memory, n, has_offset, false);
  auto* multiplier = static_cast<float*>(memory);
  float* offset = multiplier + padded_columns(n);
  auto* zero_point = reinterpret_cast<int32_t*>(offset + padded_columns(n));
  write_ratios(numbers.scale, begin, end, x_scale, out_scale, multiplier);
  if (has_offset) write_ratios(numbers.bias, begin, end, 1.0, out_scale, offset);
  int32_t any = 0;
  typed(numbers.zero_point, [&](auto* from) {
    const int64_t step = numbers.zero_point.count > 1 ? 1 : 0;
    for (int64_t i = begin; i < end; ++i) any |= zero_point[i] = static_cast<int32_t>(from[i * step]);
  });
  // A kernel computes whole panels: the columns behind the last are computed and not stored.
  for (int64_t i = end; i < std::min(round_up(end, kPanel), padded_columns(n)); ++i)
    multiplier[i] = offset[i] = 0.0f, zero_point[i] = 0;
  return read_columns(memory, n, has_offset, any != 0);
}

}  // namespace zeropoint::gemm
