// The frame of the native tests: cases that register themselves, checks that count, and what most of them need.
//
// A case runs once for every instruction set that the processor has, with that set active. Buffers are vectors of
// exactly the size that a kernel may touch, so that AddressSanitizer and valgrind see one byte too many.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "isa.h"
#include "parallel.h"

namespace zeropoint::tests {

struct Case {
  const char* name;
  void (*run)(Isa isa);
};
std::vector<Case>& cases();

struct Registered {
  Registered(const char* name, void (*run)(Isa)) { cases().push_back({name, run}); }
};

#define ZEROPOINT_TEST(name)                                            \
  static void name(::zeropoint::Isa isa);                               \
  static const ::zeropoint::tests::Registered registered_##name(#name, name); \
  static void name([[maybe_unused]] ::zeropoint::Isa isa)

// Counts a failure of the case that runs; prints the first few of each.
void fail(const char* file, int line, const std::string& what);

// What follows the condition says which sizes were at work: it is streamed only if the check fails.
#define ZEROPOINT_CHECK(condition, ...)                                                       \
  do {                                                                                        \
    if (!(condition)) {                                                                       \
      std::ostringstream text;                                                                \
      text << #condition << " [" << __VA_ARGS__ << "]";                                       \
      ::zeropoint::tests::fail(__FILE__, __LINE__, text.str());                               \
    }                                                                                         \
  } while (false)

// Equal arrays; says where they differ first. Floats are compared by value, NaN equal to NaN.
template <class T>
void check_equal(const std::vector<T>& got, const std::vector<T>& expected, const std::string& where) {
  ZEROPOINT_CHECK(got.size() == expected.size(), where);
  for (size_t i = 0; i < got.size() && i < expected.size(); ++i) {
    const bool both_nan = got[i] != got[i] && expected[i] != expected[i];
    if (got[i] == expected[i] || both_nan) continue;
    ZEROPOINT_CHECK(false, where << ": element " << i << " of " << got.size() << " is " << +got[i] << ", not "
                                 << +expected[i]);
    return;
  }
}

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  ((out << parts << ' '), ...);
  return out.str();
}

// A fixed sequence of numbers, the same on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2654435761u + 88172645463325252u) {}

  uint64_t bits() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_;
  }
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(bits() % static_cast<uint64_t>(high - low + 1));
  }
  double real(double low, double high) {
    return low + (high - low) * (static_cast<double>(bits() >> 11) * 0x1p-53);
  }
  template <class T>
  std::vector<T> codes(int64_t count, int64_t low, int64_t high) {
    std::vector<T> out(static_cast<size_t>(count));
    for (T& code : out) code = static_cast<T>(between(low, high));
    return out;
  }
  template <class T>
  std::vector<T> reals(int64_t count, double low, double high) {
    std::vector<T> out(static_cast<size_t>(count));
    for (T& value : out) value = static_cast<T>(real(low, high));
    return out;
  }

 private:
  uint64_t state_;
};

// Cuts every range into parts of one grain and runs the last first: what threads may do, but the same every time.
inline Parallel in_parts() {
  return {3, [](int64_t begin, int64_t end, int64_t grain, Parallel::Body body, void* context) {
            const int64_t step = grain < 1 ? 1 : grain;
            for (int64_t part = (end - begin + step - 1) / step; part-- > 0;)
              body(begin + part * step, std::min(end, begin + (part + 1) * step), context);
          }};
}

// The last step of docs/design.md, "Numeric contract" 4, as it stands there.
inline int64_t to_code(double y, int64_t zero_point, int64_t low, int64_t high) {
  if (std::isnan(y)) y = 0.0;
  const double code = std::nearbyint(y) + static_cast<double>(zero_point);
  if (code < static_cast<double>(low)) return low;
  if (code > static_cast<double>(high)) return high;
  return static_cast<int64_t>(code);
}

inline float scaled(int64_t sum, float multiplier, const float* offset) {
  float y = static_cast<float>(sum) * multiplier;
  if (offset) y = y + *offset;
  return y;
}

}  // namespace zeropoint::tests
