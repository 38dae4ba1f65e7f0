// Sums, products and quotients of two operands, with broadcasting.
#include <algorithm>

#include "elementwise/elementwise.h"
#include "elementwise/wide.h"

namespace zeropoint::elementwise {
namespace {

constexpr int64_t kGrain = 1 << 15;

// The dimensions of a broadcast, neighbours merged where both operands allow it; innermost last.
struct Loops {
  std::vector<int64_t> sizes, a, b;
  int64_t total = 1;

  Loops(const std::vector<int64_t>& all, const Operand& x, const Operand& y) {
    for (size_t d = 0; d < all.size(); ++d) {
      total *= all[d];
      if (all[d] == 1) continue;
      if (!sizes.empty() && a.back() == x.strides[d] * all[d] && b.back() == y.strides[d] * all[d]) {
        sizes.back() *= all[d];
        a.back() = x.strides[d];
        b.back() = y.strides[d];
      } else {
        sizes.push_back(all[d]);
        a.push_back(x.strides[d]);
        b.push_back(y.strides[d]);
      }
    }
    if (sizes.empty()) sizes = {1}, a = {1}, b = {1};
  }

  // Calls f(offset in a, offset in b, place in the output, n) on the innermost rows of [begin, end).
  template <class F>
  void walk(int64_t begin, int64_t end, F&& f) const {
    const size_t outer = sizes.size() - 1;
    std::vector<int64_t> place(outer);
    int64_t rest = begin / sizes.back(), column = begin % sizes.back(), row_a = 0, row_b = 0;
    for (size_t d = outer; d-- > 0; rest /= sizes[d]) {
      place[d] = rest % sizes[d];
      row_a += place[d] * a[d];
      row_b += place[d] * b[d];
    }
    while (begin < end) {
      const int64_t n = std::min(end - begin, sizes.back() - column);
      f(row_a + column * a.back(), row_b + column * b.back(), begin, n);
      begin += n;
      column = 0;
      for (size_t d = outer; d-- > 0;) {
        row_a += a[d];
        row_b += b[d];
        if (++place[d] < sizes[d]) break;
        row_a -= sizes[d] * a[d];
        row_b -= sizes[d] * b[d];
        place[d] = 0;
      }
    }
  }
};

// A row of bytes that is not contiguous, brought together.
const uint8_t* together(const uint8_t* from, int64_t stride, int64_t n, uint8_t* buffer) {
  if (stride == 1) return from;
  for (int64_t i = 0; i < n; ++i) buffer[i] = from[i * stride];
  return buffer;
}

// The one walk behind sums and products. `rows(a, b, out, n)` works on contiguous bytes; `repeated(a, b, swapped, out, n)`
// where the second operand is one code; `wide(a, b)` is the formula on steps.
template <class Rows, class Repeated, class Wide>
void broadcast(const std::vector<int64_t>& sizes, const Operand& a, const Operand& b, Grid grid, void* out,
               Type out_type, bool moderate, const Parallel& parallel, Rows&& rows, Repeated&& repeated,
               Wide&& wide) {
  const Loops loops(sizes, a, b);
  const int64_t a_stride = loops.sizes.back() == 1 ? 1 : loops.a.back();
  const int64_t b_stride = loops.sizes.back() == 1 ? 1 : loops.b.back();
  const bool by_bytes = moderate && is_byte(out_type) && fits_byte_loops(a.type, a.zero_point) &&
                        fits_byte_loops(b.type, b.zero_point);
  const auto on_bytes = [&](int64_t in_a, int64_t in_b, int64_t place, int64_t n) {
    const auto* from_a = static_cast<const uint8_t*>(a.data) + in_a;
    const auto* from_b = static_cast<const uint8_t*>(b.data) + in_b;
    auto* to = static_cast<uint8_t*>(out) + place;
    if (a_stride == 1 && b_stride == 1)
      rows(from_a, from_b, to, n);
    else if (a_stride == 1 && b_stride == 0)
      repeated(from_a, from_b, false, to, n);
    else if (a_stride == 0 && b_stride == 1)
      repeated(from_b, from_a, true, to, n);
    else
      for (int64_t i = 0; i < n; i += kChunk) {
        uint8_t left[kChunk], right[kChunk];
        const int64_t length = std::min(kChunk, n - i);
        rows(together(from_a + i * a_stride, a_stride, length, left),
             together(from_b + i * b_stride, b_stride, length, right), to + i, length);
      }
  };
  const auto on_any = [&](int64_t in_a, int64_t in_b, int64_t place, int64_t n) {
    double left[kChunk], right[kChunk], zeros[kChunk];
    std::fill(zeros, zeros + std::min(n, kChunk), static_cast<double>(grid.zero_point));
    for (int64_t i = 0; i < n; i += kChunk) {
      const int64_t length = std::min(kChunk, n - i);
      read_wide(at(a.data, a.type, in_a + i * a_stride), a.type, a_stride, length, left);
      read_wide(at(b.data, b.type, in_b + i * b_stride), b.type, b_stride, length, right);
      for (int64_t j = 0; j < length; ++j)
        left[j] = wide(left[j] - static_cast<double>(a.zero_point), right[j] - static_cast<double>(b.zero_point));
      write_codes(left, zeros, length, grid, at(out, out_type, place + i), out_type);
    }
  };
  parallel.for_range(0, loops.total, kGrain, [&](int64_t begin, int64_t end) {
    if (by_bytes)
      loops.walk(begin, end, on_bytes);
    else
      loops.walk(begin, end, on_any);
  });
}

float steps(Bytes x) {
  return (x.is_signed ? static_cast<float>(static_cast<int8_t>(*x.codes)) : static_cast<float>(*x.codes)) - x.zero;
}

}  // namespace

void add(const std::vector<int64_t>& sizes, Operand a, float a_factor, Operand b, float b_factor, Grid grid, void* out,
         Type out_type, const Parallel& parallel) {
  const Kernels& k = kernels();
  const Target place = target(out_type, grid);
  const auto left = [&](const uint8_t* codes) { return bytes(codes, a.type, a.zero_point); };
  const auto right = [&](const uint8_t* codes) { return bytes(codes, b.type, b.zero_point); };
  const bool moderate = is_moderate(a_factor, kModerateFactor) && is_moderate(b_factor, kModerateFactor);
  broadcast(
      sizes, a, b, grid, out, out_type, moderate, parallel,
      [&](const uint8_t* x, const uint8_t* y, uint8_t* to, int64_t n) {
        k.add(left(x), a_factor, right(y), b_factor, to, n, place);
      },
      [&](const uint8_t* row, const uint8_t* one, bool swapped, uint8_t* to, int64_t n) {
        if (swapped)
          k.affine(right(row), b_factor, steps(left(one)) * a_factor, to, n, place);
        else
          k.affine(left(row), a_factor, steps(right(one)) * b_factor, to, n, place);
      },
      [=](double x, double y) -> double {
        const float from_a = static_cast<float>(x) * a_factor, from_b = static_cast<float>(y) * b_factor;
        return from_a + from_b;
      });
}

void mul(const std::vector<int64_t>& sizes, Operand a, Operand b, float factor, Grid grid, void* out, Type out_type,
         const Parallel& parallel) {
  const Kernels& k = kernels();
  const Target place = target(out_type, grid);
  const auto left = [&](const uint8_t* codes) { return bytes(codes, a.type, a.zero_point); };
  const auto right = [&](const uint8_t* codes) { return bytes(codes, b.type, b.zero_point); };
  broadcast(
      sizes, a, b, grid, out, out_type, is_moderate(factor, kModerateProduct), parallel,
      [&](const uint8_t* x, const uint8_t* y, uint8_t* to, int64_t n) { k.mul(left(x), right(y), factor, to, n, place); },
      [&](const uint8_t* row, const uint8_t* one, bool swapped, uint8_t* to, int64_t n) {
        if (swapped)
          k.mul_one(right(row), steps(left(one)), factor, to, n, place);
        else
          k.mul_one(left(row), steps(right(one)), factor, to, n, place);
      },
      [=](double x, double y) -> double { return static_cast<float>(x * y) * factor; });
}

void div(const std::vector<int64_t>& sizes, Operand a, Operand b, double factor, Grid grid, void* out, Type out_type,
         const Parallel& parallel) {
  const auto none = [](auto...) {};
  broadcast(sizes, a, b, grid, out, out_type, false, parallel, none, none,
            [=](double x, double y) -> double { return x / y * factor; });
}

}  // namespace zeropoint::elementwise
