// Operands that are not 8-bit codes on both sides: 32-bit codes and float64. Everything that passes through here is
// exact in a double, so rounding happens only where the numeric contract says, by a conversion to float.
#pragma once
#include <cstdint>
#include <cstring>

#include "elementwise/elementwise.h"

namespace zeropoint::elementwise {

constexpr int64_t kChunk = 512;

template <class T>
inline void gather(const void* data, int64_t stride, int64_t n, double* out) {
  const T* from = static_cast<const T*>(data);
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<double>(from[i * stride]);
}

// n <= kChunk codes or float64 values as doubles; `stride` counts elements.
inline void read_wide(const void* data, Type type, int64_t stride, int64_t n, double* out) {
  switch (type) {
    case Type::i8: return gather<int8_t>(data, stride, n, out);
    case Type::u8: return gather<uint8_t>(data, stride, n, out);
    case Type::i32: return gather<int32_t>(data, stride, n, out);
    case Type::f32: return gather<float>(data, stride, n, out);
    default: return gather<double>(data, stride, n, out);
  }
}

// The last step of the contract, in doubles: positions far beyond every code are brought near first, so that the
// rounding by 1.5 * 2^52 holds.
inline double to_code(double y, double zero, double low, double high) {
  constexpr double kFar = 1099511627776.0, kMagic = 6755399441055744.0;
  y = y == y ? y : 0.0;
  y = y < -kFar ? -kFar : y;
  y = y > kFar ? kFar : y;
  const double code = ((y + kMagic) - kMagic) + zero;
  return code < low ? low : code > high ? high : code;
}

template <class T>
inline void put_codes(const double* y, const double* zero, int64_t n, double low, double high, void* out) {
  T* to = static_cast<T*>(out);
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<T>(to_code(y[i], zero[i], low, high));
}

inline void write_codes(const double* y, const double* zero, int64_t n, Grid grid, void* out, Type type) {
  const double low = static_cast<double>(grid.low), high = static_cast<double>(grid.high);
  if (type == Type::i8) return put_codes<int8_t>(y, zero, n, low, high, out);
  if (type == Type::u8) return put_codes<uint8_t>(y, zero, n, low, high, out);
  put_codes<int32_t>(y, zero, n, low, high, out);
}

}  // namespace zeropoint::elementwise
