// Plans: a program against its kernels called one by one, and programs that are broken in every way.
#include "plan/plan.h"

#include <bit>
#include <concepts>
#include <cstring>
#include <stdexcept>

#include "conv/transpose.h"
#include "elementwise/elementwise.h"
#include "gemm/linear.h"
#include "interpolate/interpolate.h"
#include "pool/pool.h"
#include "tests/check.h"

namespace zeropoint::tests {
namespace {

using elementwise::Type;
using plan::Memory;
using plan::Opcode;

int64_t bits_of(double value) { return std::bit_cast<int64_t>(value); }

// Words of a program, written field by field.
class Writer {
 public:
  Writer& operator()(Opcode opcode) { return (*this)(static_cast<int64_t>(opcode)); }
  Writer& operator()(Type type) { return (*this)(static_cast<int64_t>(type)); }
  Writer& operator()(std::same_as<double> auto real) { return (*this)(bits_of(real)); }
  template <class... Words>
  Writer& operator()(int64_t first, Words... rest) {
    words.push_back(first);
    (words.push_back(static_cast<int64_t>(rest)), ...);
    return *this;
  }
  std::vector<int64_t> words;
};

// A picture of floats is quantized, convolved, added to itself, multiplied by its first position, looked up, pooled, copied,
// and classified.
struct Network {
  static constexpr int64_t kBatch = 2, kSide = 6, kChannels = 3, kFilters = 16, kClasses = 10;
  static constexpr int64_t kPicture = kBatch * kSide * kSide * kChannels, kMap = kBatch * kSide * kSide * kFilters;
  static constexpr int64_t kPooled = kBatch * 3 * 3 * kFilters;
  enum : int64_t { arena, input, output, conv_weight, conv_packed, conv_scale, conv_offset, conv_zero, table,
                   linear_weight, linear_packed, linear_zero, linear_multiplier, linear_offset, memory_count };

  std::vector<float> picture, result, multiplier, offset, scale, bias, class_multiplier, class_offset;
  std::vector<int8_t> filters, classes;
  std::vector<int32_t> filter_zero, class_zero;
  std::vector<uint8_t> space, entries;
  AlignedBytes packed_filters, packed_classes;
  conv::Geometry geometry;
  std::vector<int64_t> words;

  explicit Network(Isa isa) {
    Random random(51);
    picture = random.reals<float>(kPicture, -2, 2);
    result.resize(kBatch * kClasses);
    filters = random.codes<int8_t>(kFilters * kChannels * 9, -128, 127);
    multiplier = random.reals<float>(kFilters, 1e-4, 1e-3);
    offset = random.reals<float>(kFilters, -9, 9);
    filter_zero = random.codes<int32_t>(kFilters, -9, 9);
    entries = random.codes<uint8_t>(256, 0, 255);
    classes = random.codes<int8_t>(kClasses * kFilters * 9, -128, 127);
    scale = random.reals<float>(kClasses, 0.001, 0.002);
    class_zero = random.codes<int32_t>(kClasses, -2, 2);
    bias = random.reals<float>(kClasses, -1, 1);
    class_zero.resize(gemm::padded_columns(kClasses));
    class_multiplier.resize(gemm::padded_columns(kClasses));
    class_offset.resize(gemm::padded_columns(kClasses));
    gemm::ratios(scale.data(), kClasses, 0.05, 0.08, class_multiplier.data());
    gemm::ratios(bias.data(), kClasses, 1.0, 0.08, class_offset.data());
    geometry.weight = {kFilters, kChannels, 1, {1, 3, 3}};
    geometry.batch = kBatch;
    for (int d : {1, 2}) geometry.in[d] = geometry.out[d] = kSide, geometry.padding[d] = 1;
    packed_filters = conv::pack(isa, filters.data(), geometry.weight, Parallel::serial());
    packed_classes = gemm::pack(isa, classes.data(), kFilters * 9, kClasses, kFilters * 9, Parallel::serial());
    space.resize(kPicture + 3 * kMap + 2 * kPooled + kBatch * kClasses);
    write();
  }

  void write() {
    constexpr int64_t kOne = kPicture, kTwo = kOne + kMap, kThree = kTwo + kMap, kFour = kThree + kMap;
    constexpr int64_t kFive = kFour + kPooled, kSix = kFive + kPooled;
    Writer w;
    w(Opcode::quantize)(kPicture)(Type::f32)(Type::u8)(input, 0, arena, 0)(0.02)(128, 0, 255);
    w(Opcode::convolve)(kFilters, kChannels, 1, 1, 3, 3, kBatch);
    w(1, 1, 1, 0, 0)(kSide, 1, 1, 1, 1)(kSide, 1, 1, 1, 1)(0, 128, arena, 0, arena, kOne);
    w(conv_weight, 0, conv_packed, 0, conv_zero, 0, conv_scale, 0, conv_offset, 0)(Type::u8)(100, 0, 255);
    const auto ones = [&](int dims) {
      for (; dims > 0; --dims) w(1, 0, 0);
    };
    w(Opcode::add), ones(5);
    w(kMap, 1, 1)(Type::u8)(arena, kOne, 100)(Type::u8)(arena, kOne, 100)(0.5)(0.25)(Type::i8)(arena, kTwo);
    w(1, -128, 127);
    w(Opcode::mul), ones(3);
    w(kBatch, kMap / kBatch, kMap / kBatch)(kSide * kSide, kFilters, 0)(kFilters, 1, 1)(Type::i8)(arena, kTwo, 1);
    w(Type::u8)(arena, kOne, 100)(0.01)(0.0)(Type::u8)(arena, kThree);
    w(128, 0, 255);
    w(Opcode::lookup)(kMap)(Type::u8)(Type::u8)(arena, kThree, table, 0, arena, kOne);
    w(Opcode::max_pool)(kBatch, kFilters)(1, 1, 0, 1, 1, 0, 1, 0)(kSide, 3, 0, 3, 2, 1, 1, 0)(kSide, 3, 0, 2, 2, 0, 1, 0);
    w(Type::u8)(arena, kOne, arena, kFour, 0, 0);
    w(Opcode::average_pool)(kBatch, kFilters)(1, 1, 1)(3, 3, 0, 3, 1, 1, 1, 1)(3, 3, 1)(Type::u8);
    w(arena, kFour, arena, kFive, 77, 0);
    w(Opcode::copy)(1, 0, 0)(1, 0, 0)(1, 0, 0)(kBatch, 9 * kFilters, 9 * kFilters)(kFilters, 1, 9)(9, kFilters, 1);
    w(arena, kFive, arena, kFour);
    w(Opcode::linear)(kBatch, kClasses, 9 * kFilters, 0, 77)(arena, kFour, arena, kSix);
    w(linear_weight, 0, linear_packed, 0, linear_zero, 0, linear_multiplier, 0, linear_offset, 0)(Type::i8);
    w(3, -128, 127);
    w(Opcode::dequantize)(kBatch * kClasses)(Type::i8)(Type::f32)(arena, kSix, output, 0)(0.08)(3);
    words = w.words;
  }

  std::vector<Memory> memories() {
    const auto constant = [](auto& data) {
      return Memory{reinterpret_cast<uint8_t*>(data.data()), static_cast<int64_t>(data.size() * sizeof(data[0])), false};
    };
    std::vector<Memory> all = {constant(space), constant(picture), constant(result), constant(filters),
                               constant(packed_filters), constant(multiplier), constant(offset), constant(filter_zero),
                               constant(entries), constant(classes), constant(packed_classes), constant(class_zero),
                               constant(class_multiplier), constant(class_offset)};
    all[arena].writable = all[output].writable = true;
    return all;
  }

  std::vector<float> by_hand(Isa isa) const {
    const Parallel serial = Parallel::serial();
    std::vector<uint8_t> x(kPicture), map(kMap), sum(kMap), product(kMap), pooled(kPooled), mean(kPooled);
    std::vector<uint8_t> flat(kPooled), codes(kBatch * kClasses);
    elementwise::quantize(picture.data(), Type::f32, kPicture, 0.02, {128, 0, 255}, x.data(), Type::u8, serial);
    conv::Requantize to;
    to.multiplier = multiplier.data(), to.offset = offset.data(), to.out_zero_point = 100;
    conv::run(isa, geometry, x.data(), false, 128, filters.data(), filter_zero.data(), nullptr, 0, to, map.data(), serial);
    const elementwise::Operand u = {map.data(), Type::u8, 100, {1}};
    elementwise::add({kMap}, u, 0.5f, u, 0.25f, {1, -128, 127}, sum.data(), Type::i8, serial);
    const elementwise::Operand first = {map.data(), Type::u8, 100, {kMap / kBatch, 0, 1}};
    const elementwise::Operand all = {sum.data(), Type::i8, 1, {kMap / kBatch, kFilters, 1}};
    elementwise::mul({kBatch, kSide * kSide, kFilters}, all, first, 0.01f, {128, 0, 255}, product.data(), Type::u8, serial);
    elementwise::lookup(product.data(), Type::u8, kMap, entries.data(), map.data(), Type::u8, serial);
    pool::Windows windows;
    windows.batch = kBatch, windows.channels = kFilters, windows.in[1] = windows.in[2] = kSide;
    windows.spans[1] = pool::window_spans(kSide, 3, 3, 2, 1, 1, false);
    windows.spans[2] = pool::window_spans(kSide, 3, 2, 2, 0, 1, false);
    pool::max<uint8_t>(isa, windows, map.data(), pooled.data(), serial);
    windows.in[1] = windows.in[2] = 3;
    windows.spans[1] = pool::window_spans(3, 3, 3, 1, 1, 1, true);
    windows.spans[2] = pool::adaptive_spans(3, 3);
    pool::average<uint8_t>(isa, windows, pooled.data(), 77, 0, mean.data(), serial);
    for (int64_t n = 0; n < kBatch; ++n)
      for (int64_t c = 0; c < kFilters; ++c)
        for (int64_t i = 0; i < 9; ++i)
          flat[static_cast<size_t>((n * kFilters + c) * 9 + i)] = mean[static_cast<size_t>((n * 9 + i) * kFilters + c)];
    gemm::Layer layer;
    gemm::view(packed_classes.data(), static_cast<int64_t>(packed_classes.size()), isa, kClasses, 9 * kFilters,
               &layer.weight);
    layer.columns.scale = {scale.data(), gemm::Numbers::Type::f32, kClasses};
    layer.columns.zero_point = {class_zero.data(), gemm::Numbers::Type::i32, kClasses};
    layer.columns.bias = {bias.data(), gemm::Numbers::Type::f32, kClasses};
    gemm::CodesCall call;
    call.x = flat.data(), call.m = kBatch, call.x_zero_point = 77;
    call.out_zero_point = 3, call.out_min = -128, call.out_max = 127, call.out = codes.data();
    gemm::linear(layer, 0.05, 0.08, call, serial);
    std::vector<float> out(codes.size());
    elementwise::dequantize(codes.data(), Type::i8, kBatch * kClasses, 0.08, 3, out.data(), Type::f32, serial);
    return out;
  }
};

// A picture of codes is resized and convolved transposed.
struct Growing {
  static constexpr int64_t kSide = 4, kWide = 7, kChannels = 3, kFilters = 5, kOut = 2 * kWide;
  enum : int64_t { arena, input, output, weight, packed, multiplier, memory_count };

  std::vector<uint8_t> picture, space, result;
  AlignedBytes packed_weight;
  std::vector<int8_t> filters;
  std::vector<float> scales;
  conv::TransposedGeometry geometry;
  interpolate::Shape shape{1, kChannels, {1, kSide, kSide}, {1, kWide, kWide}};
  interpolate::Way way;
  std::vector<int64_t> words;

  explicit Growing(Isa isa) : space(kWide * kWide * kChannels), result(kOut * kOut * kFilters) {
    Random random(53);
    picture = random.codes<uint8_t>(kSide * kSide * kChannels, 0, 255);
    filters = random.codes<int8_t>(kChannels * kFilters * 9, -128, 127);
    scales = random.reals<float>(kFilters, 1e-4, 1e-3);
    geometry.weight = {kChannels, kFilters, 1, {1, 3, 3}, {1, 2, 2}, {1, 1, 1}};
    for (int d : {1, 2}) geometry.in[d] = kWide, geometry.out[d] = kOut, geometry.padding[d] = 1;
    packed_weight = conv::pack_transposed(isa, filters.data(), geometry.weight, Parallel::serial());
    way.mode = interpolate::Mode::linear;
    way.ratio[1] = way.ratio[2] = static_cast<double>(kSide) / kWide;
    Writer w;
    w(Opcode::resize)(1, kChannels)(1, 1)(1.0)(kSide, kWide)(way.ratio[1])(kSide, kWide)(way.ratio[2])(2, 0);
    w(Type::u8)(9, input, 0, arena, 0);
    w(Opcode::convolve_transposed)(kChannels, kFilters, 1, 1, 3, 3, 1);
    w(1, 1, 1, 0, 0)(kWide, 2, 1, 1, 1)(kWide, 2, 1, 1, 1)(0, 9, arena, 0, output, 0);
    w(weight, 0, packed, 0, -1, 0, multiplier, 0, -1, 0)(Type::u8)(128, 0, 255);
    words = w.words;
  }

  std::vector<Memory> memories() {
    const auto memory = [](auto& data, bool writable = false) {
      return Memory{reinterpret_cast<uint8_t*>(data.data()), static_cast<int64_t>(data.size() * sizeof(data[0])), writable};
    };
    return {memory(space, true), memory(picture), memory(result, true), memory(filters), memory(packed_weight), memory(scales)};
  }

  std::vector<uint8_t> by_hand(Isa isa) const {
    std::vector<uint8_t> wide(space.size()), out(result.size());
    interpolate::resize(shape, way, picture.data(), Type::u8, 9, wide.data(), Parallel::serial());
    conv::Requantize to;
    to.multiplier = scales.data(), to.out_zero_point = 128;
    conv::run_transposed(isa, geometry, wide.data(), false, 9, filters.data(), nullptr, nullptr, 0, to, out.data(),
                         Parallel::serial());
    return out;
  }
};

// What became of a program: 0 it ran, 1 it was refused. The words lie in memory of exactly their size.
int run(const std::vector<int64_t>& words, const std::vector<Memory>& memories) {
  const std::vector<int64_t> exact(words);
  try {
    plan::run(exact.data(), static_cast<int64_t>(exact.size()), memories, Parallel::serial());
  } catch (const std::invalid_argument&) {
    return 1;
  }
  return 0;
}

ZEROPOINT_TEST(plan_runs_its_kernels) {
  Network network(isa);
  ZEROPOINT_CHECK(run(network.words, network.memories()) == 0, "whole program");
  check_equal(network.result, network.by_hand(isa), "result");
  ZEROPOINT_CHECK(run({}, network.memories()) == 0, "empty program");
  Growing growing(isa);
  ZEROPOINT_CHECK(run(growing.words, growing.memories()) == 0, "program of the ways to grow");
  check_equal(growing.result, growing.by_hand(isa), "grown");
}

ZEROPOINT_TEST(plan_cut_short) {
  Network network(isa);
  const auto memories = network.memories();
  int complete = 0;
  for (size_t length = 0; length < network.words.size(); ++length)
    complete += run({network.words.begin(), network.words.begin() + static_cast<ptrdiff_t>(length)}, memories) == 0;
  ZEROPOINT_CHECK(complete == 10, complete << " prefixes are whole instructions");
}

// Every word replaced: refused, or run within its memories.
template <class Program>
void replace_every_word(Program program) {
  const auto memories = program.memories();
  constexpr int64_t kTwo31 = int64_t{1} << 31;
  for (size_t at = 0; at < program.words.size(); ++at) {
    const auto right = static_cast<uint64_t>(program.words[at]);
    for (int64_t wrong : {int64_t{-1}, int64_t{0}, int64_t{1}, int64_t{2}, int64_t{3}, int64_t{7},
                          static_cast<int64_t>(right + 1), static_cast<int64_t>(right - 1),
                          static_cast<int64_t>(right * 2), int64_t{1} << 20, kTwo31, kTwo31 + 1, INT64_MAX, INT64_MIN}) {
      auto words = program.words;
      words[at] = wrong;
      run(words, memories);
    }
  }
}

ZEROPOINT_TEST(plan_wrong_words) {
  replace_every_word(Network(isa));
  replace_every_word(Growing(isa));
}

template <class Program>
void replace_random_words(Program program) {
  const auto memories = program.memories();
  Random random(52);
  for (int round = 0; round < 1500; ++round) {
    auto words = program.words;
    for (int64_t changes = random.between(1, 4); changes > 0; --changes)
      words[random.bits() % words.size()] = random.between(0, 2) ? random.between(-2, 40)
                                                                 : static_cast<int64_t>(random.bits());
    run(words, memories);
  }
}

ZEROPOINT_TEST(plan_random_words) {
  replace_random_words(Network(isa));
  replace_random_words(Growing(isa));
}

ZEROPOINT_TEST(plan_sizes_that_overflow) {
  Network network(isa);
  const auto memories = network.memories();
  constexpr int64_t kTwo31 = int64_t{1} << 31, kTwo20 = int64_t{1} << 20;
  // No channels at all, and more windows than could ever be walked.
  Writer none;
  none(Opcode::max_pool)(1, 0)(1, kTwo20, 1)(1, kTwo20, 1)(1, kTwo20, 1)(Type::u8)(0, 0, 0, 0, 0, 0);
  run(none.words, memories);
  // One position, and padding whose volume fits no integer.
  Writer padded;
  padded(Opcode::average_pool)(1, 1);
  for (int d = 0; d < 3; ++d) padded(1, 1, 0, kTwo31, 1, kTwo31 / 2, 1, 1);
  padded(Type::u8)(0, 0, 0, 0, 0, 0);
  run(padded.words, memories);
  // Arrays that do not stand on whole elements.
  for (int64_t index : {Network::conv_zero, Network::conv_offset, Network::linear_offset}) {
    auto words = network.words;
    for (size_t i = 0; i + 1 < words.size(); ++i)
      if (words[i] == index && words[i + 1] == 0) {
        auto moved = words;
        moved[i + 1] = 1;
        run(moved, memories);
      }
  }
}

ZEROPOINT_TEST(plan_memories) {
  Network network(isa);
  auto memories = network.memories();
  ZEROPOINT_CHECK(run(network.words, {}) == 1, "no memories");
  memories[Network::output].writable = false;
  ZEROPOINT_CHECK(run(network.words, memories) == 1, "an output that may not be written");
  for (size_t i = 0; i < memories.size(); ++i) {
    if (i == Network::conv_packed || i == Network::linear_packed) continue;  // packed anew when they do not fit
    auto shorter = network.memories();
    shorter[i].size -= 1;
    ZEROPOINT_CHECK(run(network.words, shorter) == 1, "memory " << i << " is one byte short");
  }
}

}  // namespace
}  // namespace zeropoint::tests
