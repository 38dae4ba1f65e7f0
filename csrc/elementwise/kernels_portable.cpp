// Vectors of four in the compiler's own notation: SSE2, NEON or scalar code, whatever the target has.
#include <cstring>
#include <limits>
#include <type_traits>

#include "elementwise/kernels.h"

namespace zeropoint::elementwise {
namespace {

typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
constexpr int kLanes = 4;

inline Floats choose(Ints mask, Floats yes, Floats no) { return (Floats)((mask & (Ints)yes) | (~mask & (Ints)no)); }

inline Floats splat(float v) { return Floats{v, v, v, v}; }
inline Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof(v)); }
inline Floats add(Floats a, Floats b) { return a + b; }
inline Floats sub(Floats a, Floats b) { return a - b; }
inline Floats mul(Floats a, Floats b) { return a * b; }
inline Floats smaller(Floats a, Floats b) { return choose(a < b, a, b); }
inline Floats larger(Floats a, Floats b) { return choose(a > b, a, b); }
inline Floats zero_if_nan(Floats v) { return (Floats)((Ints)v & (v == v)); }
inline Floats or_if_nan(Floats v, Floats other) { return choose(v == v, v, other); }
inline Floats finite_or(Floats v, Floats other) { return choose((v - v) == splat(0.0f), v, other); }

// Adding 1.5 * 2^23 leaves no room for a fraction, so the sum is rounded to a whole number, ties to even.
// Beyond 2^22 the caller saturates, so it does not matter that the rest is cut there.
inline Floats nearest(Floats v) {
  const Floats bound = splat(4194304.0f), magic = splat(12582912.0f);
  return (smaller(larger(v, -bound), bound) + magic) - magic;
}

inline Floats saturated(Floats v) { return v; }  // `nearest` does it

inline bool any_nan(Floats a, Floats b, Floats c, Floats d) {
  const Ints numbers = (a == a) & (b == b) & (c == c) & (d == d);
  return (numbers[0] & numbers[1] & numbers[2] & numbers[3]) == 0;
}

template <class Signed>
inline Floats from_bytes(const uint8_t* p, Signed) {
  Ints codes;
  for (int k = 0; k < kLanes; ++k) codes[k] = Signed::value ? static_cast<int8_t>(p[k]) : static_cast<int>(p[k]);
  return __builtin_convertvector(codes, Floats);
}

inline void write_bytes(Floats a, Floats b, Floats c, Floats d, Target target, uint8_t* out) {
  const Floats low = splat(target.low), high = splat(target.high);
  const Floats parts[4] = {a, b, c, d};
  int32_t codes[4 * kLanes];
  for (int k = 0; k < 4; ++k) {
    const Ints steps = __builtin_convertvector(smaller(larger(nearest(parts[k]), low), high), Ints);
    std::memcpy(codes + k * kLanes, &steps, sizeof(steps));
  }
  for (int k = 0; k < 4 * kLanes; ++k) out[k] = static_cast<uint8_t>(codes[k] + target.zero) ^ target.flip;
}

void lookup(const uint8_t* codes, const uint8_t* table, uint8_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = table[codes[i]];
}

template <class Code>
void sums_of(const uint8_t* codes, int64_t n, int64_t* sum, int64_t* squares) {
  constexpr int64_t kSafe = 32768;  // squares of 255 that fit 31 bits
  for (int64_t begin = 0; begin < n; begin += kSafe) {
    const int64_t end = n - begin < kSafe ? n : begin + kSafe;
    int32_t first = 0, second = 0;
    for (int64_t i = begin; i < end; ++i) {
      const int32_t code = static_cast<Code>(codes[i]);
      first += code;
      second += code * code;
    }
    *sum += first;
    *squares += second;
  }
}

void sums(const uint8_t* codes, bool is_signed, int64_t n, int64_t* sum, int64_t* squares) {
  (is_signed ? sums_of<int8_t> : sums_of<uint8_t>)(codes, n, sum, squares);
}

// The exponent moves from bias 15 to 127 by one product; infinities and NaN keep an exponent of ones.
void from_half(const uint16_t* x, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t sign = static_cast<uint32_t>(x[i] & 0x8000u) << 16, rest = static_cast<uint32_t>(x[i] & 0x7fffu);
    uint32_t bits = rest << 13;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    value *= 0x1p112f;
    std::memcpy(&bits, &value, sizeof(bits));
    bits = (rest >= 0x7c00u ? (rest << 13) | 0x7f800000u : bits) | sign;
    std::memcpy(out + i, &bits, sizeof(bits));
  }
}

void to_half(const float* x, uint16_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    const uint32_t sign = (bits >> 16) & 0x8000u;
    bits &= 0x7fffffffu;
    uint32_t half;
    if (bits > 0x7f800000u) {
      half = 0x7e00u;
    } else if (bits >= 0x477ff000u) {  // 65520, where rounding reaches infinity
      half = 0x7c00u;
    } else if (bits < 0x38800000u) {  // below 2^-14: adding 1/2 aligns the fraction of a subnormal half at bit 0
      float value;
      std::memcpy(&value, &bits, sizeof(value));
      value += 0.5f;
      std::memcpy(&half, &value, sizeof(half));
      half -= 0x3f000000u;
    } else {
      half = (bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13;
    }
    out[i] = static_cast<uint16_t>(half | sign);
  }
}

#include "elementwise/bfloat16.h"
#include "elementwise/loops.h"

}  // namespace

const Kernels& kernels_portable() { return kTable; }

}  // namespace zeropoint::elementwise
