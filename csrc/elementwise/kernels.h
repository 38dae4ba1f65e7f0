// The inner loops of element-wise operators: serial, over contiguous memory, one table an instruction set.
//
// Every loop ends in the same step, docs/design.md "Numeric contract" 1 and 4:
//   code = clamp(rint(y), low, high) + zero_point, NaN counts as 0
// with `low` and `high` counted from the zero point. Products and sums are rounded one by one, never fused.
// Loops from codes to codes ask more of their caller: parameters so moderate (`is_moderate`) that y is a number and
// fits 32 bits. What is left to do is then saturation, which packing to bytes does by itself.
//
// Unsigned results are made as signed ones 128 below, whose top bit is flipped at the end: `flip` is 0x80 for uint8
// and 0 for int8, and the target's zero point is 128 less for uint8.
#pragma once
#include <cstdint>

namespace zeropoint::elementwise {

// An 8-bit operand and its zero point.
struct Bytes {
  const uint8_t* codes;
  bool is_signed;
  float zero;
};

// Bounds under which a loop from codes to codes stays below 2^31: zero points up to 1024 leave steps below 1280.
constexpr float kModerateZero = 1024.0f;
constexpr float kModerateFactor = 262144.0f;    // of one operand: 1280 * 2^18 < 2^29
constexpr float kModerateProduct = 256.0f;      // of two: 1280 * 1280 * 2^8 < 2^29
constexpr float kModerateOffset = 536870912.0f;  // 2^29

// False for NaN.
inline bool is_moderate(float value, float bound) { return -bound <= value && value <= bound; }

// Where 8-bit results go: the zero point of the flipped codes, and how far from it codes may lie.
struct Target {
  uint8_t flip;
  int16_t zero;
  float low;
  float high;
};

struct Kernels {
  // y = x * inverse
  void (*quantize)(const float* x, uint8_t* out, int64_t n, float inverse, Target target);
  // The same with one grid an element: code = clamp(rint(x * inverse[i]) + zero[i], low, high); target.zero is added last.
  void (*quantize_each)(const float* x, const float* inverse, const float* zero, uint8_t* out, int64_t n, Target target);
  // Zero points that need not be codes: code = clamp(rint(x * inverse[i] + zero[i]), low, high), then as above.
  void (*quantize_shifted)(const float* x, const float* inverse, const float* zero, uint8_t* out, int64_t n, Target target);

  // (code - zero) * scale
  void (*dequantize)(Bytes x, float* out, int64_t n, float scale);
  // (code - zero[i]) * scale[i]; x.zero is not used
  void (*dequantize_each)(Bytes x, const float* zero, const float* scale, float* out, int64_t n);

  // y = (code - zero) * factor + offset
  void (*affine)(Bytes x, float factor, float offset, uint8_t* out, int64_t n, Target target);
  // The same with a zero point, a factor and an offset an element; x.zero is not used
  void (*affine_each)(Bytes x, const float* zero, const float* factor, const float* offset, uint8_t* out, int64_t n,
                      Target target);
  // y = ((code - zero) * factor + offset) * gain[i] + shift[i], for any parameters
  void (*affine_twice)(Bytes x, float factor, float offset, const float* gain, const float* shift, uint8_t* out,
                       int64_t n, Target target);

  // y = (a - a.zero) * a_factor + (b - b.zero) * b_factor
  void (*add)(Bytes a, float a_factor, Bytes b, float b_factor, uint8_t* out, int64_t n, Target target);
  // y = ((a - a.zero) * (b - b.zero)) * factor, and the same where b is one number
  void (*mul)(Bytes a, Bytes b, float factor, uint8_t* out, int64_t n, Target target);
  void (*mul_one)(Bytes a, float b, float factor, uint8_t* out, int64_t n, Target target);

  // out = table[byte]
  void (*lookup)(const uint8_t* codes, const uint8_t* table, uint8_t* out, int64_t n);
  // Smallest and largest finite value, merged into *low and *high.
  void (*finite_range)(const float* x, int64_t n, float* low, float* high);
  // Sum and sum of squares of codes, added to *sum and *squares.
  void (*sums)(const uint8_t* codes, bool is_signed, int64_t n, int64_t* sum, int64_t* squares);
  // The same for each of n columns of `rows` rows that lie one after the other.
  void (*column_sums)(const uint8_t* codes, bool is_signed, int64_t rows, int64_t n, int64_t* sum, int64_t* squares);

  void (*from_half)(const uint16_t* x, float* out, int64_t n);
  void (*from_bfloat16)(const uint16_t* x, float* out, int64_t n);
  void (*to_half)(const float* x, uint16_t* out, int64_t n);
  void (*to_bfloat16)(const float* x, uint16_t* out, int64_t n);
};

// The table of the active instruction set.
const Kernels& kernels();

const Kernels& kernels_portable();
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();

}  // namespace zeropoint::elementwise
