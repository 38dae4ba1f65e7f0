// How a kernel splits its work, without knowing whose threads run it.
//
// The kernels take a `const Parallel&`. Inside torch it runs on torch's own pool
// (csrc/torch/common.h); in a plain test program `Parallel::serial()` runs in place.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>

namespace zeropoint {

// Where part `index` of `parts` of `count` things begins: parts as even as can be.
constexpr int64_t part_begin(int64_t index, int64_t parts, int64_t count) { return index * count / parts; }

struct Parallel {
  using Body = void (*)(int64_t begin, int64_t end, void* context);

  int threads = 1;
  // Calls `body` on disjoint ranges that cover [begin, end), each at least `grain` long but the last.
  void (*run)(int64_t begin, int64_t end, int64_t grain, Body body, void* context) = nullptr;

  static Parallel serial() {
    return {1, [](int64_t begin, int64_t end, int64_t, Body body, void* context) { body(begin, end, context); }};
  }

  template <class F>
  void for_range(int64_t begin, int64_t end, int64_t grain, F&& f) const {
    if (begin >= end) return;
    if (threads <= 1 || end - begin <= grain) {
      f(begin, end);
      return;
    }
    using Fn = std::remove_reference_t<F>;
    run(begin, end, grain, [](int64_t b, int64_t e, void* context) { (*static_cast<Fn*>(context))(b, e); },
        const_cast<void*>(static_cast<const void*>(&f)));
  }

  // The same in more and shorter ranges, which threads take as they come free: one that others slow down holds up none.
  // For work whose result does not depend on where ranges end.
  template <class F>
  void for_shares(int64_t begin, int64_t end, int64_t grain, F&& f) const {
    constexpr int64_t kSharesPerThread = 4;
    if (threads <= 1 || end - begin <= grain) return for_range(begin, end, grain, f);
    const int64_t shares = kSharesPerThread * threads, share = std::max(grain, (end - begin + shares - 1) / shares);
    std::atomic<int64_t> next{begin};
    for_range(0, threads, 1, [&](int64_t, int64_t) {
      for (int64_t at = next.fetch_add(share); at < end; at = next.fetch_add(share)) f(at, std::min(at + share, end));
    });
  }
};

}  // namespace zeropoint
