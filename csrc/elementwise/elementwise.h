// Element-wise operators over pointers and sizes: threads, layouts, and the choice between the 8-bit loops of
// kernels.h and the wide ones of wide.h. The definitions stand in docs/design.md, "Numeric contract".
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "elementwise/kernels.h"
#include "parallel.h"

namespace zeropoint::elementwise {

enum class Type : int { f32, f16, bf16, f64, i8, u8, i32 };

inline bool is_byte(Type type) { return type == Type::i8 || type == Type::u8; }
// Whether the loops of kernels.h may work on these codes.
inline bool fits_byte_loops(Type type, int64_t zero_point) {
  return is_byte(type) && is_moderate(static_cast<float>(zero_point), kModerateZero);
}
inline int64_t size_of(Type type) {
  switch (type) {
    case Type::f64: return 8;
    case Type::f32:
    case Type::i32: return 4;
    case Type::f16:
    case Type::bf16: return 2;
    default: return 1;
  }
}
inline const char* at(const void* data, Type type, int64_t i) {
  return static_cast<const char*>(data) + i * size_of(type);
}
inline char* at(void* data, Type type, int64_t i) { return static_cast<char*>(data) + i * size_of(type); }

// A per-tensor output: zero point, and the codes between which results are clamped.
struct Grid {
  int64_t zero_point;
  int64_t low;
  int64_t high;
};

// Element m of the memory belongs to channel (m / inner) % channels.
struct Channels {
  int64_t outer;
  int64_t count;
  int64_t inner;
};

// A per-channel grid; every entry is exact in a double. Floating zero points are added before rounding.
struct ChannelGrid {
  std::vector<double> scale;
  std::vector<double> zero_point;
  bool floating;
};

inline uint8_t flip_of(Type type) { return type == Type::u8 ? 0x80 : 0; }
inline int64_t shift_of(Type type) { return type == Type::u8 ? 128 : 0; }
inline Bytes bytes(const void* codes, Type type, int64_t zero_point) {
  return {static_cast<const uint8_t*>(codes), type == Type::i8, static_cast<float>(zero_point)};
}
inline Target target(Type type, Grid grid) {
  return {flip_of(type), static_cast<int16_t>(grid.zero_point - shift_of(type)),
          static_cast<float>(grid.low - grid.zero_point), static_cast<float>(grid.high - grid.zero_point)};
}

void quantize(const void* x, Type x_type, int64_t n, double scale, Grid grid, void* out, Type out_type,
              const Parallel& parallel);
void quantize_channels(const void* x, Type x_type, Channels view, const ChannelGrid& channels, int64_t low,
                       int64_t high, void* out, Type out_type, const Parallel& parallel);

void dequantize(const void* codes, Type type, int64_t n, double scale, int64_t zero_point, void* out, Type out_type,
                const Parallel& parallel);
void dequantize_channels(const void* codes, Type type, Channels view, const ChannelGrid& channels, void* out,
                         Type out_type, const Parallel& parallel);

// (code - zero_point) * factor + offset, on another grid.
void affine(const void* codes, Type type, int64_t n, int64_t zero_point, float factor, float offset, Grid grid,
            void* out, Type out_type, const Parallel& parallel);
// The same with a zero point, a factor and an offset for each channel.
void affine_channels(const void* codes, Type type, Channels view, const std::vector<int64_t>& zero_point,
                     const std::vector<float>& factor, const std::vector<float>& offset, Grid grid, void* out,
                     Type out_type, const Parallel& parallel);

// Smallest and largest finite value; (0, 0) if there is none.
void finite_range(const void* x, Type type, int64_t n, double* low, double* high, const Parallel& parallel);

// out[i] = table[code - smallest code], 256 entries; codes are bytes, table and output of one type of codes.
void lookup(const void* codes, Type type, int64_t n, const void* table, void* out, Type out_type,
            const Parallel& parallel);

// An operand of a broadcast: strides count elements, in the output's dimensions, 0 where it is repeated.
struct Operand {
  const void* data;
  Type type;
  int64_t zero_point;
  std::vector<int64_t> strides;
};

// The output is dense; `sizes` and all strides are listed from its outermost dimension in memory to its innermost.
void add(const std::vector<int64_t>& sizes, Operand a, float a_factor, Operand b, float b_factor, Grid grid, void* out,
         Type out_type, const Parallel& parallel);
void mul(const std::vector<int64_t>& sizes, Operand a, Operand b, float factor, Grid grid, void* out, Type out_type,
         const Parallel& parallel);
// In float64; by zero, the end of the sign, and 0 / 0 is the zero point.
void div(const std::vector<int64_t>& sizes, Operand a, Operand b, double factor, Grid grid, void* out, Type out_type,
         const Parallel& parallel);

}  // namespace zeropoint::elementwise
