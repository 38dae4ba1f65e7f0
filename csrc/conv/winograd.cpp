#include "conv/winograd.h"

#include <algorithm>
#include <vector>

namespace zeropoint::conv::winograd {
namespace {

using gemm::kPanel;

constexpr int64_t kCacheBytes = 1 << 20;
constexpr int64_t kFewTiles = 96;  // for which transforming all weights is no small part of the work

Kernels kernels() {
#if defined(ZEROPOINT_HAS_AVX2)
  return kernels_avx2();
#else
  return {};
#endif
}

class Convolution {
 public:
  Convolution(const Geometry& g, const gemm::Packed& packed, const uint8_t* x, uint8_t flip, uint8_t fill, int64_t line,
              const gemm::Epilogue& epilogue)
      : g_(g),
        packed_(packed),
        x_(x),
        flip_(flip),
        fill_(fill),
        line_(line),
        channels_(g.weight.group_channels),
        epilogue_(epilogue),
        kernels_(kernels()),
        across_((g.out[2] + kOut - 1) / kOut),
        down_((g.out[1] + kOut - 1) / kOut),
        outside_(static_cast<size_t>(channels_), static_cast<uint8_t>(fill ^ flip)) {
    epilogue_.activation_zero_point = 0;
  }

  void run(const Parallel& parallel) const {
    const int64_t tiles = g_.batch * down_ * across_, tile_bytes = kPoints * channels_ * int64_t{sizeof(int16_t)};
    const int64_t most = std::max(kCacheBytes / tile_bytes, 2 * kBlock);
    int64_t chunks = (tiles + most - 1) / most;
    if (tiles >= parallel.threads * kFewTiles) chunks = gemm::round_up(chunks, parallel.threads);
    if (chunks % parallel.threads != 0) {
      for (int64_t i = 0; i < chunks; ++i) chunk(part_begin(i, chunks, tiles), part_begin(i + 1, chunks, tiles), parallel);
      return;
    }
    parallel.for_shares(0, chunks, 1, [&](int64_t i, int64_t end) {
      for (; i < end; ++i)
        chunk(part_begin(i, chunks, tiles), part_begin(i + 1, chunks, tiles), Parallel::serial());
    });
  }

 private:
  template <class T>
  static T* scratch(gemm::Scratch slot, int64_t count) {
    return static_cast<T*>(gemm::thread_scratch(slot, static_cast<size_t>(count) * sizeof(T)));
  }

  // Tiles [first, end): their inputs are transformed, and then multiplied panel by panel.
  void chunk(int64_t first, int64_t end, const Parallel& parallel) const {
    const int64_t count = end - first, blocks = (count + kBlock - 1) / kBlock;
    const int64_t block_words = kPoints * input_plane(channels_);
    auto* v = scratch<int16_t>(gemm::Scratch::rows, blocks * block_words);
    std::vector<Place> places(static_cast<size_t>(count));
    parallel.for_shares(0, count, kBlock / 4, [&](int64_t i, int64_t stop) {
      for (; i < stop; ++i) {
        int16_t* to = v + i / kBlock * block_words + i % kBlock * channels_;
        places[static_cast<size_t>(i)] = transform(first + i, to);
      }
    });
    const int64_t panels = gemm::padded_columns(packed_.n) / kPanel;
    const int64_t parts = panels >= parallel.threads ? 1 : std::min<int64_t>(blocks, parallel.threads);
    parallel.for_shares(0, panels * parts, 1, [&](int64_t item, int64_t item_end) {
      auto* u = scratch<int16_t>(gemm::Scratch::words, kPoints * weight_plane(channels_));
      auto* sums = scratch<int32_t>(gemm::Scratch::tile, kPoints * kBlock * kPanel);
      for (; item < item_end; ++item) {
        const int64_t panel = item / parts, n = panel * kPanel;
        kernels_.weights(words_of(panel), channels_, line_, u);
        const int64_t stop = part_begin(item % parts + 1, parts, blocks);
        for (int64_t i = part_begin(item % parts, parts, blocks); i < stop; ++i) {
          const int64_t tiles = std::min(kBlock, count - i * kBlock);
          kernels_.multiply(v + i * block_words, tiles, channels_, u, sums);
          kernels_.output(sums, tiles, places.data() + i * kBlock, g_.out[2], n, std::min(kPanel, packed_.n - n),
                          packed_, epilogue_);
        }
      }
    });
  }

  const int8_t* words_of(int64_t panel) const {
    if (packed_.form == gemm::Form::words) return packed_.panel(panel);
    auto* words = scratch<int8_t>(gemm::Scratch::panel, packed_.panel_bytes());
    kernels_.restore_words(packed_, panel, words);
    return words;
  }

  // The input of one tile; says where its output goes.
  Place transform(int64_t tile, int16_t* v) const {
    const int64_t image = tile / (down_ * across_);
    const int64_t h = tile / across_ % down_ * kOut, w = tile % across_ * kOut;
    const uint8_t* from[kPoints];
    for (int64_t i = 0; i < kIn; ++i) {
      const int64_t in_h = h + i - g_.padding[1];
      const bool inside = in_h >= 0 && in_h < g_.in[1];
      const uint8_t* row = x_ + (image * g_.in[1] + in_h) * g_.in[2] * channels_;
      for (int64_t j = 0; j < kIn; ++j) {
        const int64_t in_w = w + j - g_.padding[2];
        from[i * kIn + j] = inside && in_w >= 0 && in_w < g_.in[2] ? row + in_w * channels_ : outside();
      }
    }
    kernels_.input(from, channels_, flip_, fill_, v);
    return {(image * g_.out[1] + h) * g_.out[2] + w, static_cast<int32_t>(std::min<int64_t>(kOut, g_.out[1] - h)),
            static_cast<int32_t>(std::min<int64_t>(kOut, g_.out[2] - w))};
  }

  // The zero point once a channel, as a code of x.
  const uint8_t* outside() const { return outside_.data(); }

  const Geometry& g_;
  const gemm::Packed& packed_;
  const uint8_t* x_;
  uint8_t flip_, fill_;
  int64_t line_, channels_;
  gemm::Epilogue epilogue_;
  Kernels kernels_;
  int64_t across_, down_;  // tiles of an image
  std::vector<uint8_t> outside_;
};

}  // namespace

bool fits(const WeightSize& size) {
  return size.groups == 1 && size.kernel[0] == 1 && size.kernel[1] == 3 && size.kernel[2] == 3 &&
         size.group_channels % kChannelUnit == 0 && size.group_channels <= kMaxChannels;
}

bool chosen(const Geometry& g, const gemm::Packed& packed, const int32_t* weight_zero_point) {
  if (packed.isa != Isa::avx2 || weight_zero_point != nullptr || !fits(g.weight)) return false;
  if (g.in[0] != 1 || g.out[0] != 1 || g.padding[0] != 0) return false;
  for (int d = 1; d < 3; ++d)
    if (g.stride[d] != 1 || g.dilation[d] != 1) return false;
  // Instructions for two channels of a column: at every position nine products and additions; at every tile 25 with
  // transforms, and for the weights themselves.
  const int64_t tiles = g.batch * ((g.out[1] + kOut - 1) / kOut) * ((g.out[2] + kOut - 1) / kOut);
  return tiles * 64 + 140 < g.batch * g.out_positions() * 18;
}

void run(const Geometry& geometry, const gemm::Packed& packed, const uint8_t* x, uint8_t flip, uint8_t fill, int64_t line,
         const gemm::Epilogue& epilogue, const Parallel& parallel) {
  Convolution(geometry, packed, x, flip, fill, line, epilogue).run(parallel);
}

}  // namespace zeropoint::conv::winograd
