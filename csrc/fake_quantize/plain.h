// Fake quantize of one value, and ranges, in plain C++: for float64, for floating zero points, and where no instruction set helps.
#pragma once
#include <cmath>
#include <cstdint>

namespace zeropoint::fake_quantize {

// `shift` is a floating zero point, added before rounding; `low` and `high` are then codes. Returns the mask.
template <class T>
inline uint8_t round_one(T x, T* y, T inverse, T scale, T shift, T low, T high) {
  const T place = std::nearbyint(x * inverse + shift);
  const T below = place < low ? low : place;  // NaN passes both comparisons
  const T inside = below > high ? high : below;
  *y = (inside - shift + T{0}) * scale;
  return low <= place && place <= high;
}

template <class T>
inline bool range_of(const T* x, int64_t n, T* low, T* high) {
  bool finite = true;
  for (int64_t i = 0; i < n; ++i) {
    if (!std::isfinite(x[i])) {
      finite = false;
      continue;
    }
    *low = x[i] < *low ? x[i] : *low;
    *high = x[i] > *high ? x[i] : *high;
  }
  return finite;
}

}  // namespace zeropoint::fake_quantize
