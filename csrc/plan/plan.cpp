#include "plan/plan.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

#include "conv/conv.h"
#include "conv/layout.h"
#include "conv/transpose.h"
#include "elementwise/elementwise.h"
#include "gemm/linear.h"
#include "interpolate/interpolate.h"
#include "isa.h"
#include "pool/pool.h"

namespace zeropoint::plan {
namespace {

using elementwise::Type;

constexpr int64_t kLargest = int64_t{1} << 31;  // of a size: products of two fit 64 bits
constexpr int64_t kMostWindows = 1 << 20;       // of a dimension, before its buffers are known to hold them

// Reads the fields of one program, and checks them.
class Reader {
 public:
  Reader(const int64_t* words, int64_t count, const std::vector<Memory>& memories)
      : words_(words), count_(count), memories_(memories) {}

  bool done() const { return at_ == count_; }

  int64_t word() {
    require(at_ < count_, "it ends within an instruction");
    return words_[at_++];
  }

  int64_t between(int64_t low, int64_t high, const char* what) {
    const int64_t value = word();
    require(low <= value && value <= high, what);
    return value;
  }

  int64_t size(const char* what) { return between(0, kLargest, what); }
  bool flag(const char* what) { return between(0, 1, what) == 1; }
  double real() { return std::bit_cast<double>(word()); }

  Type type(const char* what) { return static_cast<Type>(between(0, static_cast<int64_t>(Type::i32), what)); }
  Type byte_type(const char* what) {
    const Type found = type(what);
    require(elementwise::is_byte(found), what);
    return found;
  }

  elementwise::Grid grid(Type of) {
    const int64_t least = of == Type::i8 ? -128 : of == Type::u8 ? 0 : INT32_MIN;
    const int64_t most = of == Type::i8 ? 127 : of == Type::u8 ? 255 : INT32_MAX;
    elementwise::Grid found;
    found.zero_point = between(least, most, "a zero point is no code");
    found.low = between(least, most, "the smallest code is no code");
    found.high = between(found.low, most, "the largest code is no code");
    return found;
  }

  // A buffer of `count` elements of `element` bytes.
  const uint8_t* input(int64_t count, int64_t element, const char* what) {
    return locate(count, element, false, what);
  }
  uint8_t* output(int64_t count, int64_t element, const char* what) { return locate(count, element, true, what); }

  // A buffer of elements of `element` bytes whose length the program does not say: all that follows the offset. Null
  // where the memory is -1.
  const uint8_t* rest(int64_t element, int64_t* length, const char* what) {
    const int64_t index = between(-1, static_cast<int64_t>(memories_.size()) - 1, what);
    const int64_t offset = word();
    *length = 0;
    if (index < 0) return nullptr;
    const Memory& memory = memories_[static_cast<size_t>(index)];
    require(0 <= offset && offset <= memory.size && offset % element == 0, what);
    *length = memory.size - offset;
    return memory.data + offset;
  }

  void require(bool condition, const char* what) const {
    if (!condition)
      throw std::invalid_argument("plan: instruction " + std::to_string(instruction) + ": " + what);
  }

  int64_t instruction = 0;

 private:
  uint8_t* locate(int64_t count, int64_t element, bool write, const char* what) {
    const int64_t index = between(0, static_cast<int64_t>(memories_.size()) - 1, what);
    const int64_t offset = word();
    const Memory& memory = memories_[static_cast<size_t>(index)];
    int64_t bytes;
    require(!__builtin_mul_overflow(count, element, &bytes) && 0 <= offset && offset <= memory.size &&
                bytes <= memory.size - offset && offset % element == 0 && (!write || memory.writable),
            what);
    return memory.data + offset;
  }

  const int64_t* words_;
  int64_t count_;
  const std::vector<Memory>& memories_;
  int64_t at_ = 0;
};

int64_t product(Reader& in, std::initializer_list<int64_t> sizes) {
  int64_t result = 1;
  for (int64_t size : sizes) in.require(!__builtin_mul_overflow(result, size, &result), "a size is too large");
  return result;
}

// Adds a dimension to what a strided buffer reaches beyond its first element.
void extend(Reader& in, int64_t size, int64_t stride, int64_t* reach) {
  if (size > 0)
    in.require(!__builtin_add_overflow(*reach, product(in, {size - 1, stride}), reach), "a size is too large");
}

void quantize(Reader& in, const Parallel& parallel) {
  const int64_t n = in.size("a size");
  const Type from = in.type("a dtype"), to = in.type("a dtype");
  in.require(from <= Type::f64 && to > Type::f64, "quantize goes from floats to codes");
  const auto* x = in.input(n, elementwise::size_of(from), "quantize reads outside its memory");
  auto* out = in.output(n, elementwise::size_of(to), "quantize writes outside its memory");
  const double scale = in.real();
  elementwise::quantize(x, from, n, scale, in.grid(to), out, to, parallel);
}

void dequantize(Reader& in, const Parallel& parallel) {
  const int64_t n = in.size("a size");
  const Type from = in.type("a dtype"), to = in.type("a dtype");
  in.require(from > Type::f64 && to <= Type::f64, "dequantize goes from codes to floats");
  const auto* codes = in.input(n, elementwise::size_of(from), "dequantize reads outside its memory");
  auto* out = in.output(n, elementwise::size_of(to), "dequantize writes outside its memory");
  const double scale = in.real();
  const int64_t zero_point = in.word();
  elementwise::dequantize(codes, from, n, scale, zero_point, out, to, parallel);
}

// The weights of a convolution or a linear layer, and what becomes of its sums.
struct Filters {
  const int8_t* weight;
  const uint8_t* packed;
  int64_t packed_length;
  const int32_t* zero_points;
  conv::Requantize requantize;
};

Filters filters(Reader& in, int64_t count, int64_t channels) {
  Filters found;
  int64_t zero_length, offset_length;
  found.weight = reinterpret_cast<const int8_t*>(in.input(count, 1, "layer: weight"));
  found.packed = in.rest(1, &found.packed_length, "layer: packed weight");
  found.zero_points = reinterpret_cast<const int32_t*>(in.rest(4, &zero_length, "layer: weight zero points"));
  in.require(found.zero_points == nullptr || zero_length >= channels * 4, "layer: weight zero points");
  found.requantize.multiplier = reinterpret_cast<const float*>(in.input(channels, 4, "layer: multiplier"));
  found.requantize.offset = reinterpret_cast<const float*>(in.rest(4, &offset_length, "layer: offset"));
  in.require(found.requantize.offset == nullptr || offset_length >= channels * 4, "layer: offset");
  const Type to = in.byte_type("layer: output dtype");
  const elementwise::Grid grid = in.grid(to);
  found.requantize.out_zero_point = static_cast<int32_t>(grid.zero_point);
  found.requantize.out_min = static_cast<int32_t>(grid.low);
  found.requantize.out_max = static_cast<int32_t>(grid.high);
  found.requantize.out_signed = to == Type::i8;
  return found;
}

// The activations' sign and zero point.
bool read_sign(Reader& in, int32_t* zero_point) {
  const bool x_signed = in.flag("the sign of codes");
  *zero_point = static_cast<int32_t>(in.between(x_signed ? -128 : 0, x_signed ? 127 : 255, "a zero point is no code"));
  return x_signed;
}

void convolve(Reader& in, const Parallel& parallel) {
  conv::Geometry g;
  g.weight.out_channels = in.between(1, kLargest, "conv: output channels");
  g.weight.group_channels = in.between(1, kLargest, "conv: channels of a group");
  g.weight.groups = in.between(1, g.weight.out_channels, "conv: groups");
  in.require(g.weight.out_channels % g.weight.groups == 0, "conv: output channels do not split into the groups");
  for (int64_t& size : g.weight.kernel) size = in.between(1, kLargest, "conv: kernel size");
  in.require(product(in, {g.weight.group_channels, g.weight.kernel[0], g.weight.kernel[1], g.weight.kernel[2]}) <=
                 gemm::kMaxDepth,
             "conv: too many weights an output channel");
  g.batch = in.size("conv: batch");
  for (int d = 0; d < 3; ++d) {
    g.in[d] = in.between(1, kLargest, "conv: input size");
    g.stride[d] = in.between(1, kLargest, "conv: stride");
    g.dilation[d] = in.between(1, kLargest, "conv: dilation");
    g.padding[d] = in.size("conv: padding");
    const int64_t after = in.size("conv: padding"), padded = g.in[d] + g.padding[d] + after;
    const int64_t extent = g.dilation[d] * (g.weight.kernel[d] - 1) + 1;
    in.require(padded >= extent, "conv: the kernel is larger than the padded input");
    g.out[d] = (padded - extent) / g.stride[d] + 1;
  }
  int32_t x_zero_point;
  const bool x_signed = read_sign(in, &x_zero_point);
  const int64_t x_size = product(in, {g.batch, g.in[0], g.in[1], g.in[2], g.weight.in_channels()});
  const int64_t out_size = product(in, {g.batch, g.out[0], g.out[1], g.out[2], g.weight.out_channels});
  const auto* x = in.input(x_size, 1, "conv reads outside its memory");
  auto* out = in.output(out_size, 1, "conv writes outside its memory");
  const Filters f = filters(in, product(in, {g.weight.out_channels, g.weight.depth()}), g.weight.out_channels);
  if (out_size == 0) return;
  conv::run(active_isa(), g, x, x_signed, x_zero_point, f.weight, f.zero_points, f.packed, f.packed_length, f.requantize,
            out, parallel);
}

void convolve_transposed(Reader& in, const Parallel& parallel) {
  conv::TransposedGeometry g;
  conv::TransposedWeight& w = g.weight;
  w.in_channels = in.between(1, kLargest, "conv_transpose: input channels");
  const int64_t columns = in.between(1, kLargest, "conv_transpose: output channels of a group");
  w.groups = in.between(1, w.in_channels, "conv_transpose: groups");
  in.require(w.in_channels % w.groups == 0, "conv_transpose: input channels do not split into the groups");
  w.out_channels = product(in, {columns, w.groups});
  for (int64_t& size : w.kernel) size = in.between(1, kLargest, "conv_transpose: kernel size");
  const int64_t taps = product(in, {w.kernel[0], w.kernel[1], w.kernel[2]});
  in.require(product(in, {w.in_channels / w.groups, taps}) <= gemm::kMaxDepth,
             "conv_transpose: too many weights an output channel");
  g.batch = in.size("conv_transpose: batch");
  for (int d = 0; d < 3; ++d) {
    g.in[d] = in.between(1, kLargest, "conv_transpose: input size");
    w.stride[d] = in.between(1, kLargest, "conv_transpose: stride");
    w.dilation[d] = in.between(1, kLargest, "conv_transpose: dilation");
    g.padding[d] = in.size("conv_transpose: padding");
    const int64_t more = in.between(0, std::max(w.stride[d], w.dilation[d]) - 1, "conv_transpose: output padding");
    g.out[d] = (g.in[d] - 1) * w.stride[d] - 2 * g.padding[d] + w.dilation[d] * (w.kernel[d] - 1) + more + 1;
    in.require(1 <= g.out[d] && g.out[d] <= kLargest, "conv_transpose: output size");
  }
  int32_t x_zero_point;
  const bool x_signed = read_sign(in, &x_zero_point);
  const int64_t x_size = product(in, {g.batch, g.in[0], g.in[1], g.in[2], w.in_channels});
  const int64_t out_size = product(in, {g.batch, g.out[0], g.out[1], g.out[2], w.out_channels});
  const auto* x = in.input(x_size, 1, "conv_transpose reads outside its memory");
  auto* out = in.output(out_size, 1, "conv_transpose writes outside its memory");
  const Filters f = filters(in, product(in, {w.in_channels, columns, taps}), w.out_channels);
  if (out_size == 0) return;
  conv::run_transposed(active_isa(), g, x, x_signed, x_zero_point, f.weight, f.zero_points, f.packed, f.packed_length,
                       f.requantize, out, parallel);
}

void linear(Reader& in, const Parallel& parallel) {
  gemm::CodesCall call;
  call.m = in.size("linear: rows");
  const int64_t n = in.size("linear: columns"), k = in.between(0, gemm::kMaxDepth, "linear: depth");
  call.x_signed = read_sign(in, &call.x_zero_point);
  call.x = in.input(product(in, {call.m, k}), 1, "linear reads outside its memory");
  call.out = in.output(product(in, {call.m, n}), 1, "linear writes outside its memory");
  const Filters f = filters(in, product(in, {n, k}), gemm::padded_columns(n));
  call.out_zero_point = f.requantize.out_zero_point;
  call.out_min = f.requantize.out_min;
  call.out_max = f.requantize.out_max;
  gemm::Packed weight;
  AlignedBytes packed_now;
  if (f.packed == nullptr || !gemm::view(f.packed, f.packed_length, active_isa(), n, k, &weight)) {
    packed_now = gemm::pack(active_isa(), f.weight, k, n, k, parallel);
    in.require(gemm::view(packed_now.data(), static_cast<int64_t>(packed_now.size()), active_isa(), n, k, &weight),
               "linear: the weight cannot be packed");
  }
  weight.unpacked = f.weight;
  gemm::linear(weight, {f.requantize.multiplier, f.requantize.offset, f.zero_points}, call, parallel);
}

constexpr int kStridedRank = 6;  // of what is listed with its strides

// Element-wise sum or product of two strided operands; the output is dense, its outermost dimension comes first.
void combine(Reader& in, bool product_of, const Parallel& parallel) {
  std::vector<int64_t> sizes;
  elementwise::Operand operands[2];
  int64_t count = 1, reach[2] = {1, 1};
  for (int d = 0; d < kStridedRank; ++d) {
    sizes.push_back(in.size("add or mul: size"));
    count = product(in, {count, sizes.back()});
    for (int i : {0, 1}) {
      operands[i].strides.push_back(in.size("add or mul: stride"));
      extend(in, sizes.back(), operands[i].strides.back(), &reach[i]);
    }
  }
  for (int i : {0, 1}) {
    operands[i].type = in.byte_type("add and mul take bytes");
    operands[i].data = in.input(count == 0 ? 0 : reach[i], 1, "add or mul reads outside its memory");
    operands[i].zero_point = in.between(-128, 255, "add or mul: zero point");
  }
  const double first = in.real(), second = in.real();
  const Type to = in.byte_type("add and mul give bytes");
  auto* out = in.output(count, 1, "add or mul writes outside its memory");
  const elementwise::Grid grid = in.grid(to);
  if (count == 0) return;
  if (product_of)
    elementwise::mul(sizes, operands[0], operands[1], static_cast<float>(first), grid, out, to, parallel);
  else
    elementwise::add(sizes, operands[0], static_cast<float>(first), operands[1], static_cast<float>(second), grid, out,
                     to, parallel);
}

// Codes on their own grid, of another spatial size. Channels lie outside or inside.
void resize(Reader& in, const Parallel& parallel) {
  interpolate::Shape shape;
  interpolate::Way way;
  shape.outer = in.size("resize: batch");
  shape.inner = in.size("resize: channels");
  for (int d = 0; d < 3; ++d) {
    shape.from[d] = in.between(1, kLargest, "resize: input size");
    shape.to[d] = in.between(1, kLargest, "resize: output size");
    way.ratio[d] = in.real();
  }
  way.mode = static_cast<interpolate::Mode>(in.between(0, static_cast<int64_t>(interpolate::Mode::linear), "resize: mode"));
  way.align_corners = in.flag("resize: whether corners are aligned");
  const Type type = in.byte_type("resize takes bytes");
  const int64_t zero_point = in.between(-128, 255, "resize: zero point");
  const int64_t in_size = product(in, {shape.outer, shape.from[0], shape.from[1], shape.from[2], shape.inner});
  const int64_t out_size = product(in, {shape.outer, shape.to[0], shape.to[1], shape.to[2], shape.inner});
  const auto* x = in.input(in_size, 1, "resize reads outside its memory");
  auto* out = in.output(out_size, 1, "resize writes outside its memory");
  if (out_size > 0) interpolate::resize(shape, way, x, type, zero_point, out, parallel);
}

void lookup(Reader& in, const Parallel& parallel) {
  const int64_t n = in.size("a size");
  const Type from = in.byte_type("lookup takes bytes"), to = in.byte_type("lookup gives bytes");
  const auto* codes = in.input(n, 1, "lookup reads outside its memory");
  const auto* table = in.input(256, 1, "lookup: table");
  auto* out = in.output(n, 1, "lookup writes outside its memory");
  elementwise::lookup(codes, from, n, table, out, to, parallel);
}

// Max or average over windows of channels-last bytes. Windows are strided, or adaptive: as many as the output has.
void pool_windows(Reader& in, bool average, const Parallel& parallel) {
  pool::Windows windows;
  windows.batch = in.size("pool: batch");
  windows.channels = in.size("pool: channels");
  int64_t positions = 1, volume = 1;
  for (int d = 0; d < 3; ++d) {
    windows.in[d] = in.between(1, kLargest, "pool: input size");
    const int64_t out = in.between(1, kMostWindows, "pool: output size");
    positions = product(in, {positions, out});
    if (in.flag("pool: adaptive")) {
      windows.spans[d] = pool::adaptive_spans(windows.in[d], out);
      continue;
    }
    const int64_t kernel = in.between(1, kLargest, "pool: kernel size"), stride = in.between(1, kLargest, "pool: stride");
    const int64_t padding = in.between(0, kernel / 2, "pool: padding"), dilation = in.between(1, kLargest, "pool: dilation");
    const bool count_padding = in.flag("pool: whether padding counts");
    volume = product(in, {volume, kernel});
    in.require((out - 1) * stride < windows.in[d] + padding, "pool: a window lies outside the input");
    windows.spans[d] = pool::window_spans(windows.in[d], out, kernel, stride, padding, dilation, count_padding);
  }
  const Type type = in.byte_type("pool takes bytes");
  const int64_t in_size = product(in, {windows.batch, windows.in[0], windows.in[1], windows.in[2], windows.channels});
  const auto* x = in.input(in_size, 1, "pool reads outside its memory");
  const int64_t out_size = product(in, {windows.batch, positions, windows.channels});
  auto* out = in.output(out_size, 1, "pool writes outside its memory");
  const auto zero_point = static_cast<int32_t>(in.between(-128, 255, "pool: zero point"));
  const int64_t divisor = in.between(-kLargest, kLargest, "pool: divisor");
  if (out_size == 0) return;
  const auto run = [&](const auto* codes, auto* to) {
    if (average)
      pool::average(active_isa(), windows, codes, zero_point, divisor, to, parallel);
    else
      pool::max(active_isa(), windows, codes, to, parallel);
  };
  if (type == Type::u8)
    run(x, out);
  else
    run(reinterpret_cast<const int8_t*>(x), reinterpret_cast<int8_t*>(out));
}

// Brings a (batch, channels, three spatial dimensions) tensor of bytes from any strides to channels-last.
void channels_last(Reader& in, const Parallel& parallel) {
  conv::Strided x;
  int64_t reach = 1, count = 1;
  const auto dimension = [&](int64_t* size, int64_t* stride) {
    *size = in.size("channels_last: size");
    *stride = in.size("channels_last: stride");
    count = product(in, {count, *size});
    extend(in, *size, *stride, &reach);
  };
  dimension(&x.batch, &x.batch_stride);
  dimension(&x.channels, &x.channel_stride);
  for (int d = 0; d < 3; ++d) dimension(&x.size[d], &x.stride[d]);
  x.data = in.input(count == 0 ? 0 : reach, 1, "channels_last reads outside its memory");
  auto* out = in.output(count, 1, "channels_last writes outside its memory");
  if (count > 0) conv::to_channels_last(x, out, parallel);
}

// Moves bytes between two layouts of up to six dimensions, listed from the output's outermost to its innermost.
void copy(Reader& in, const Parallel& parallel) {
  constexpr int kRank = kStridedRank;
  int64_t size[kRank], from[kRank], to[kRank], reach_from = 1, reach_to = 1;
  int64_t count = 1;
  for (int d = 0; d < kRank; ++d) {
    size[d] = in.size("copy: size");
    from[d] = in.size("copy: stride");
    to[d] = in.size("copy: stride");
    count = product(in, {count, size[d]});
    extend(in, size[d], from[d], &reach_from);
    extend(in, size[d], to[d], &reach_to);
  }
  in.require(count <= reach_to, "copy writes places twice");
  const auto* x = in.input(count == 0 ? 0 : reach_from, 1, "copy reads outside its memory");
  auto* out = in.output(count == 0 ? 0 : reach_to, 1, "copy writes outside its memory");
  if (count == 0) return;
  const int64_t lines = count / size[kRank - 1], length = size[kRank - 1];
  const int64_t step_from = from[kRank - 1], step_to = to[kRank - 1];
  parallel.for_range(0, lines, std::max<int64_t>(1, 32768 / length), [&](int64_t begin, int64_t end) {
    for (int64_t line = begin; line < end; ++line) {
      const uint8_t* source = x;
      uint8_t* target = out;
      int64_t left = line;
      for (int d = kRank - 2; d >= 0; --d) {
        source += left % size[d] * from[d];
        target += left % size[d] * to[d];
        left /= size[d];
      }
      if (step_from == 1 && step_to == 1) {
        std::memcpy(target, source, static_cast<size_t>(length));
      } else {
        for (int64_t i = 0; i < length; ++i) target[i * step_to] = source[i * step_from];
      }
    }
  });
}

}  // namespace

void run(const int64_t* words, int64_t count, const std::vector<Memory>& memories, const Parallel& parallel) {
  Reader in(words, count, memories);
  for (; !in.done(); ++in.instruction) {
    switch (static_cast<Opcode>(in.word())) {
      case Opcode::quantize: quantize(in, parallel); break;
      case Opcode::dequantize: dequantize(in, parallel); break;
      case Opcode::convolve: convolve(in, parallel); break;
      case Opcode::linear: linear(in, parallel); break;
      case Opcode::add: combine(in, false, parallel); break;
      case Opcode::mul: combine(in, true, parallel); break;
      case Opcode::lookup: lookup(in, parallel); break;
      case Opcode::copy: copy(in, parallel); break;
      case Opcode::channels_last: channels_last(in, parallel); break;
      case Opcode::resize: resize(in, parallel); break;
      case Opcode::convolve_transposed: convolve_transposed(in, parallel); break;
      case Opcode::max_pool: pool_windows(in, false, parallel); break;
      case Opcode::average_pool: pool_windows(in, true, parallel); break;
      default: in.require(false, "its opcode is unknown");
    }
  }
}

}  // namespace zeropoint::plan
