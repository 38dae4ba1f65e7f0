// Vectors of four in the compiler's own notation: SSE2, NEON or scalar code, whatever the target has.
#include <cstring>
#include <limits>

#include "distributed/wire.h"

namespace zeropoint::wire {
namespace {

typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));
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
inline Ints is_nan(Floats v) { return v != v; }

inline Ints whole(int32_t v) { return Ints{v, v, v, v}; }
inline void istore(int32_t* p, Ints v) { std::memcpy(p, &v, sizeof(v)); }
inline Ints both(Ints a, Ints b) { return a & b; }
inline Ints either(Ints a, Ints b) { return a | b; }
inline Ints exclusive(Ints a, Ints b) { return a ^ b; }
inline Ints plus(Ints a, Ints b) { return (Ints)((Words)a + (Words)b); }
inline Ints times(Ints a, Ints b) { return (Ints)((Words)a * (Words)b); }
template <int k>
inline Ints right(Ints a) { return (Ints)((Words)a >> k); }
template <int k>
inline Ints left(Ints a) { return (Ints)((Words)a << k); }
inline Ints bits_of(Floats v) { return (Ints)v; }
inline Ints magnitude(Ints v) { return v & whole(0x7fffffff); }
inline Ints above(Ints a, Ints b) {
  const Ints mask = a > b;
  return (mask & a) | (~mask & b);
}
inline Ints count_up() { return Ints{0, 1, 2, 3}; }
inline Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }

// Adding 1.5 * 2^23 leaves no room for a fraction, so the sum is rounded to a whole number, ties to even. All callers
// have saturated within a byte's range.
inline Ints rounded(Floats v) {
  const Floats magic = splat(12582912.0f);
  return __builtin_convertvector((v + magic) - magic, Ints);
}

// Right within a byte's range and well beyond it, which is all that a block's own scale leaves.
inline Floats floor_of(Floats v) {
  const Floats cut = __builtin_convertvector(__builtin_convertvector(v, Ints), Floats);
  return cut - (Floats)((cut > v) & (Ints)splat(1.0f));
}

inline Ints signed_bytes(const uint8_t* p) {
  Ints v;
  for (int k = 0; k < kLanes; ++k) v[k] = static_cast<int8_t>(p[k]);
  return v;
}
inline Ints unsigned_bytes(const uint8_t* p) {
  Ints v;
  for (int k = 0; k < kLanes; ++k) v[k] = p[k];
  return v;
}
inline void put_signed(Ints v, uint8_t* out) {
  for (int k = 0; k < kLanes; ++k) out[k] = static_cast<uint8_t>(v[k]);
}
inline void put_unsigned(Ints v, uint8_t* out) { put_signed(v, out); }

#include "distributed/loops.h"

}  // namespace

const Kernels& kernels_portable() { return kTable; }

}  // namespace zeropoint::wire
