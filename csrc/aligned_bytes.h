// Bytes that begin with a cache line, as packed weights should: loads that cross lines take several times as long.
#pragma once
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace zeropoint {

template <class T>
struct LineAligned {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};

  LineAligned() = default;
  template <class Other>
  explicit LineAligned(const LineAligned<Other>&) {}

  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kLine)); }
  void deallocate(T* memory, size_t) { ::operator delete(memory, kLine); }
  bool operator==(const LineAligned&) const { return true; }
};

using AlignedBytes = std::vector<uint8_t, LineAligned<uint8_t>>;

}  // namespace zeropoint
