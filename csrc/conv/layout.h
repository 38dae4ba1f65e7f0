// From any strides to channels-last.
#pragma once
#include <cstdint>

#include "parallel.h"

namespace zeropoint::conv {

// A tensor of bytes (batch, channels, three spatial dimensions) with any strides, in elements.
struct Strided {
  const uint8_t* data = nullptr;
  int64_t batch = 1, channels = 1;
  int64_t size[3] = {1, 1, 1};
  int64_t batch_stride = 0, channel_stride = 0;
  int64_t stride[3] = {0, 0, 0};

  bool is_channels_last() const;
};

// Copies to (batch, spatial, channels), dense.
void to_channels_last(const Strided& x, uint8_t* out, const Parallel& parallel);

// Three planes of `count` codes, `plane` apart, as triples: pictures on their way to a first layer.
void interleave3_avx2(const uint8_t* from, int64_t plane, int64_t count, uint8_t* to);

}  // namespace zeropoint::conv
