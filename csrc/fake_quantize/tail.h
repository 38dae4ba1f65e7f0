// What is left after the last whole block goes through a padded copy. Included by each instruction set's file inside an
// unnamed namespace of its own, so that the linker does not keep one file's instructions for all.
#pragma once
#include <cstdint>
#include <cstring>

namespace {

template <int64_t kBlock, class Blocks, class Steps>
inline void round_with_tail(Blocks blocks, const float* x, float* y, uint8_t* mask, int64_t n, Steps steps) {
  const int64_t whole = n - n % kBlock;
  blocks(x, y, mask, whole, steps);
  if (whole == n) return;
  float from[kBlock] = {}, to[kBlock];
  uint8_t inside[kBlock];
  std::memcpy(from, x + whole, static_cast<size_t>(n - whole) * sizeof(float));
  blocks(from, to, inside, kBlock, steps);
  std::memcpy(y + whole, to, static_cast<size_t>(n - whole) * sizeof(float));
  std::memcpy(mask + whole, inside, static_cast<size_t>(n - whole));
}

template <int64_t kBlock, class Blocks>
inline void pass_with_tail(Blocks blocks, const float* grad, const uint8_t* mask, float* out, int64_t n) {
  const int64_t whole = n - n % kBlock;
  blocks(grad, mask, out, whole);
  for (int64_t i = whole; i < n; ++i) out[i] = grad[i] * static_cast<float>(mask[i]);
}

// Merges the lanes of two vectors, and the values after the last whole block, into *low and *high.
inline bool merge_range(const float* least, const float* most, int lanes, const float* rest, int64_t n, float* low,
                        float* high) {
  for (int i = 0; i < lanes; ++i) {
    *low = least[i] < *low ? least[i] : *low;
    *high = most[i] > *high ? most[i] : *high;
  }
  bool finite = true;
  for (int64_t i = 0; i < n; ++i) {
    const bool number = rest[i] - rest[i] == 0.0f;
    finite &= number;
    *low = number && rest[i] < *low ? rest[i] : *low;
    *high = number && rest[i] > *high ? rest[i] : *high;
  }
  return finite;
}

}  // namespace
