// The matrix product and linear layers against sums in 64 bits.
#include <algorithm>
#include <cstring>
#include <limits>

#include "elementwise/qparams.h"
#include "gemm/linear.h"
#include "tests/check.h"

namespace zeropoint::tests {
namespace {

using gemm::Epilogue;
using gemm::Packed;
using Output = Epilogue::Output;

// Kinds of weights: any; bell-shaped, as trained ones are; mild with rare large ones, which avx2 packs as outliers; the
// worst of either sign; both.
enum class Weights { any, bell, mild, lowest, highest, alternating };
constexpr Weights kWeights[] = {Weights::any, Weights::mild, Weights::lowest, Weights::highest, Weights::alternating};

std::vector<int8_t> make_weight(Random& random, Weights kind, int64_t n, int64_t k) {
  std::vector<int8_t> weight(static_cast<size_t>(n * k));
  for (size_t i = 0; i < weight.size(); ++i) switch (kind) {
      case Weights::any: weight[i] = static_cast<int8_t>(random.between(-128, 127)); break;
      case Weights::bell: {
        int64_t sum = 0;
        for (int j = 0; j < 12; ++j) sum += random.between(-38, 38);
        weight[i] = static_cast<int8_t>(std::clamp<int64_t>(sum / 2, -128, 127));
        break;
      }
      case Weights::mild:
        weight[i] = static_cast<int8_t>(random.between(0, 999) == 0 ? random.between(-128, 127)
                                                                   : random.between(-32, 31));
        break;
      case Weights::lowest: weight[i] = -128; break;
      case Weights::highest: weight[i] = 127; break;
      case Weights::alternating: weight[i] = i % 2 ? 127 : -128; break;
    }
  return weight;
}

struct Problem {
  int64_t m, n, k, stride;
  std::vector<uint8_t> a;  // readable up to padded_depth in the last row, and not a byte more
  std::vector<int8_t> weight;
  std::vector<int32_t> zero_points, row_sums;
  std::vector<float> multiplier, offset;
  int32_t za;

  Problem(Random& random, Weights kind, int64_t rows, int64_t columns, int64_t depth)
      : m(rows), n(columns), k(depth), stride(gemm::padded_depth(depth) + random.between(0, 2) * 3) {
    const bool worst = kind != Weights::any && kind != Weights::mild;
    a = random.codes<uint8_t>((m - 1) * stride + gemm::padded_depth(k), worst ? 255 : 0, 255);
    weight = make_weight(random, kind, n, k);
    zero_points = random.codes<int32_t>(gemm::padded_columns(n), -128, 127);
    multiplier = random.reals<float>(gemm::padded_columns(n), 1e-4, 3e-3);
    offset = random.reals<float>(gemm::padded_columns(n), -40, 40);
    za = static_cast<int32_t>(random.between(0, 255));
    row_sums.resize(static_cast<size_t>(m));
    gemm::row_sums(a.data(), stride, m, k, row_sums.data());
  }

  int64_t sum(int64_t row, int64_t column, bool shifted) const {
    int64_t total = 0;
    const int64_t zw = shifted ? zero_points[static_cast<size_t>(column)] : 0;
    for (int64_t i = 0; i < k; ++i)
      total += (int64_t{a[static_cast<size_t>(row * stride + i)]} - za) *
               (int64_t{weight[static_cast<size_t>(column * k + i)]} - zw);
    return total;
  }

  Epilogue epilogue(bool shifted, bool with_offset) const {
    Epilogue ep;
    ep.activation_zero_point = za;
    if (shifted) ep.weight_zero_point = zero_points.data(), ep.row_sums = row_sums.data();
    ep.multiplier = multiplier.data();
    if (with_offset) ep.offset = offset.data();
    return ep;
  }
};

// Runs columns [n_begin, n_end) to `T`, rows `gap` elements apart, and checks them and that the gaps stay untouched.
template <class T>
void check_run(const Packed& packed, const Problem& p, Epilogue ep, int64_t n_begin, int64_t n_end, int64_t gap,
               const std::string& where) {
  constexpr T kUntouched = static_cast<T>(99);
  const int64_t width = n_end - n_begin;
  ep.out_stride = width + gap;
  ep.out_column = n_begin;
  std::vector<T> out(static_cast<size_t>((p.m - 1) * ep.out_stride + width), kUntouched);
  ep.out = out.data();
  gemm::run(packed, p.a.data(), p.stride, p.m, n_begin, n_end, ep);
  std::vector<T> expected(out.size(), kUntouched);
  for (int64_t row = 0; row < p.m; ++row)
    for (int64_t n = n_begin; n < n_end; ++n) {
      const int64_t sum = p.sum(row, n, ep.weight_zero_point != nullptr);
      const float y = scaled(sum, ep.multiplier[n], ep.offset ? ep.offset + n : nullptr);
      T& to = expected[static_cast<size_t>(row * ep.out_stride + n - n_begin)];
      if (ep.output == Output::sums) to = static_cast<T>(sum);
      if (ep.output == Output::floats) to = static_cast<T>(ep.relu && y < 0 ? 0.0f : y);
      if (ep.output == Output::codes) {
        const auto low = static_cast<int64_t>(ep.low), high = static_cast<int64_t>(ep.high);
        to = static_cast<T>(to_code(y, ep.out_zero_point, low + ep.out_zero_point, high + ep.out_zero_point));
      }
    }
  check_equal(out, expected, where);
}

void check_all_outputs(Isa isa, Random& random, Weights kind, int64_t m, int64_t n, int64_t k,
                       gemm::Purpose purpose = gemm::Purpose::any, bool keep_unpacked = false) {
  const Problem p(random, kind, m, n, k);
  const auto bytes = gemm::pack(isa, p.weight.data(), k, n, k, in_parts(), purpose);
  Packed packed;
  const std::string where = text("m", m, "n", n, "k", k, "weights", static_cast<int>(kind));
  const bool fits = gemm::view(bytes.data(), static_cast<int64_t>(bytes.size()), isa, n, k, &packed);
  ZEROPOINT_CHECK(fits, where);
  if (!fits) return;
  if (keep_unpacked) packed.unpacked = p.weight.data();
  const int64_t n_begin = n > 32 && random.between(0, 1) ? 16 : 0;
  for (bool shifted : {false, true}) {
    Epilogue ep = p.epilogue(shifted, random.between(0, 1) == 1);
    ep.output = Output::sums;
    check_run<int32_t>(packed, p, ep, n_begin, n, 3, where + "sums");
    ep.output = Output::floats;
    ep.relu = shifted;
    check_run<float>(packed, p, ep, n_begin, n, 0, where + "floats");
    ep.output = Output::codes;
    ep.out_zero_point = static_cast<int32_t>(random.between(0, 255));
    ep.low = static_cast<float>(random.between(0, 255) / 2 - ep.out_zero_point);
    ep.high = static_cast<float>(255 - random.between(0, 60) - ep.out_zero_point);
    check_run<uint8_t>(packed, p, ep, n_begin, n, 1, where + "uint8");
    ep.out_zero_point -= 128;
    check_run<int8_t>(packed, p, ep, n_begin, n, 0, where + "int8");
  }
}

ZEROPOINT_TEST(gemm_sizes) {
  Random random(1);
  for (int64_t m : {1, 2, 3, 5, 6, 7, 11, 12, 13, 26})
    for (int64_t n : {1, 16, 17, 50, 79})
      for (int64_t k : {0, 1, 4, 7, 12, 33}) check_all_outputs(isa, random, Weights::any, m, n, k);
}

ZEROPOINT_TEST(gemm_worst_magnitudes) {
  Random random(2);
  for (Weights kind : kWeights)
    for (int64_t k : {3, 8, 130, 1024}) check_all_outputs(isa, random, kind, 5, 35, k);
  check_all_outputs(isa, random, Weights::highest, 2, 17, gemm::kMaxNarrowDepth);
  check_all_outputs(isa, random, Weights::lowest, 2, 17, gemm::kMaxNarrowDepth);
}

ZEROPOINT_TEST(gemm_many_rows) {
  Random random(3);
  check_all_outputs(isa, random, Weights::mild, 700, 20, 300);  // several blocks of rows
}

ZEROPOINT_TEST(gemm_packed_for_many_rows) {
  Random random(7);
  for (int64_t m : {1, 4, 7, 8, 49, 56, 57, 130})
    for (int64_t n : {64, 87})
      for (int64_t k : {64, 69, 300})
        for (bool keep_unpacked : {false, true})
          check_all_outputs(isa, random, Weights::bell, m, n, k, gemm::Purpose::many_rows, keep_unpacked);
  check_all_outputs(isa, random, Weights::bell, 9, 70, gemm::kMaxNarrowDepth, gemm::Purpose::many_rows);
}

// Every way in which rows and panels fill tiles of 16, and depths that fill a last tile or do not.
ZEROPOINT_TEST(gemm_tiles) {
  Random random(10);
  for (int64_t m : {8, 17, 33, 64})
    for (int64_t n : {16, 33, 48, 63, 98})
      for (int64_t k : {128, 173}) check_all_outputs(isa, random, Weights::any, m, n, k);
  for (Weights kind : kWeights) check_all_outputs(isa, random, kind, 17, 24, 1024);
  check_all_outputs(isa, random, Weights::highest, 17, 17, gemm::kMaxNarrowDepth);
}

// Weights as trained ones are spread take the kernel of two additions in 16 bits there; uniform ones cannot.
ZEROPOINT_TEST(gemm_form_for_many_rows) {
  Random random(8);
  for (Weights kind : {Weights::bell, Weights::any}) {
    const auto weight = make_weight(random, kind, 80, 160);
    for (gemm::Purpose purpose : {gemm::Purpose::any, gemm::Purpose::many_rows}) {
      const auto bytes = gemm::pack(isa, weight.data(), 160, 80, 160, Parallel::serial(), purpose);
      Packed packed;
      ZEROPOINT_CHECK(gemm::view(bytes.data(), static_cast<int64_t>(bytes.size()), isa, 80, 160, &packed), "");
      const bool quads = isa != Isa::avx2 || (kind == Weights::bell && purpose == gemm::Purpose::many_rows);
      ZEROPOINT_CHECK((packed.form == gemm::Form::quads) == quads, "purpose " << static_cast<int>(purpose));
    }
  }
}

ZEROPOINT_TEST(gemm_steps_that_are_no_numbers) {
  Random random(4);
  Problem p(random, Weights::any, 7, 40, 9);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (size_t n = 0; n < 40; ++n) {
    p.multiplier[n] = n % 5 == 0 ? kInfinity : n % 5 == 1 ? std::numeric_limits<float>::quiet_NaN() : 1e30f;
    p.offset[n] = n % 3 == 0 ? -kInfinity : 1.0f;
  }
  const auto bytes = gemm::pack(isa, p.weight.data(), 9, 40, 9, Parallel::serial());
  Packed packed;
  ZEROPOINT_CHECK(gemm::view(bytes.data(), static_cast<int64_t>(bytes.size()), isa, 40, 9, &packed), "");
  for (bool with_offset : {false, true}) {
    Epilogue ep = p.epilogue(true, with_offset);
    for (float low : {-100.0f, 0.0f, 5.0f}) {
      ep.low = low, ep.high = 120, ep.out_zero_point = 7;
      check_run<int8_t>(packed, p, ep, 0, 40, 0, "codes");
    }
    ep.output = Output::floats;
    for (bool relu : {false, true}) ep.relu = relu, check_run<float>(packed, p, ep, 0, 40, 0, "floats");
  }
}

ZEROPOINT_TEST(gemm_wide_sums) {
  Random random(5);
  for (Weights kind : {Weights::any, Weights::lowest, Weights::highest})
    for (int64_t k : {int64_t{37}, gemm::kMaxNarrowDepth + 1, int64_t{70003}}) {
      const int64_t m = 3, n = 18;
      const Problem p(random, kind, m, n, k);
      const auto bytes = gemm::pack(isa, p.weight.data(), k, n, k, Parallel::serial());
      Packed packed;
      ZEROPOINT_CHECK(gemm::view(bytes.data(), static_cast<int64_t>(bytes.size()), isa, n, k, &packed), k);
      for (bool shifted : {false, true})
        for (int64_t n_begin : {0, 16}) {
          std::vector<int64_t> out(static_cast<size_t>(m * (n - n_begin))), expected(out.size());
          gemm::run_wide(packed, p.a.data(), p.stride, m, n_begin, n, p.epilogue(shifted, false), out.data(),
                         n - n_begin);
          for (size_t i = 0; i < out.size(); ++i) {
            const auto at = static_cast<int64_t>(i);
            expected[i] = p.sum(at / (n - n_begin), n_begin + at % (n - n_begin), shifted);
          }
          check_equal(out, expected, text("k", k, "shifted", shifted, "from", n_begin));
        }
    }
}

ZEROPOINT_TEST(gemm_self_check) { ZEROPOINT_CHECK(gemm::self_check(isa), isa_name(isa)); }

// Whatever stands in packed bytes, a view is refused or stays within them.
ZEROPOINT_TEST(gemm_damaged_bytes) {
  Random random(6);
  for (const auto& size : {std::pair<int64_t, int64_t>{70, 61}, {48, 1024}}) {
    const int64_t n = size.first, k = size.second;
    Problem p(random, Weights::mild, 8, n, k);
    for (int i = 0; i < 3; ++i) p.weight[static_cast<size_t>(i)] = p.weight[static_cast<size_t>(i) + 8] = 127;
    const auto bytes = gemm::pack(isa, p.weight.data(), k, n, k, Parallel::serial());
    const auto length = static_cast<int64_t>(bytes.size());
    std::vector<int32_t> out(static_cast<size_t>(p.m * n));
    Epilogue ep = p.epilogue(true, true);
    ep.output = Output::sums;
    ep.out = out.data();
    ep.out_stride = n;
    Packed packed;
    const auto run_if_fits = [&](const AlignedBytes& damaged) {
      if (gemm::view(damaged.data(), static_cast<int64_t>(damaged.size()), isa, n, k, &packed))
        gemm::run(packed, p.a.data(), p.stride, p.m, 0, n, ep);
    };
    for (int64_t cut : {int64_t{1}, int64_t{64}, length / 2, length - 63, length - 1, length})
      ZEROPOINT_CHECK(
          !gemm::view(AlignedBytes(bytes.begin(), bytes.end() - cut).data(), length - cut, isa, n, k, &packed),
          "cut " << cut);
    for (auto [other_n, other_k] : {std::pair<int64_t, int64_t>{n + 1, k}, {n, k + 1}, {n, k - 1}, {k, n}})
      ZEROPOINT_CHECK(!gemm::view(bytes.data(), length, isa, other_n, other_k, &packed), other_n << " " << other_k);
    ZEROPOINT_CHECK(!gemm::view(nullptr, 0, isa, n, k, &packed), "nothing");
    AlignedBytes moved(bytes.size() + 1);
    std::memcpy(moved.data() + 1, bytes.data(), bytes.size());
    ZEROPOINT_CHECK(!gemm::view(moved.data() + 1, length, isa, n, k, &packed), "not aligned");
    for (Isa other : kIsas)
      if (other != isa) ZEROPOINT_CHECK(!gemm::view(bytes.data(), length, other, n, k, &packed), isa_name(other));
    for (size_t at = 0; at < 64; ++at)
      for (uint8_t bits : {0x01, 0x80, 0xff}) {
        auto damaged = bytes;
        damaged[at] ^= bits;
        run_if_fits(damaged);
      }
    for (int round = 0; round < 200; ++round) {  // the lists of outliers stand at the end
      auto damaged = bytes;
      const int64_t reach = round % 2 ? std::min<int64_t>(length, 256) : length;
      for (int i = 0; i < 8; ++i)
        damaged[static_cast<size_t>(length - 1 - random.between(0, reach - 65))] =
            static_cast<uint8_t>(random.between(0, 255));
      run_if_fits(damaged);
    }
  }
}

struct Columns {
  std::vector<float> scale, bias;
  std::vector<double> scale64, bias64;
  std::vector<int32_t> zero;
  std::vector<int64_t> zero64;
};

ZEROPOINT_TEST(linear_codes) {
  Random random(7);
  for (int64_t m : {1, 5, 40})
    for (int64_t n : {1, 17, 64, 400})
      for (int64_t k : {1, 8, 30, 129})
        for (int variant = 0; variant < 4; ++variant) {
          const bool is_signed = variant % 2, wide_numbers = variant / 2, shifted = random.between(0, 1);
          const auto x = random.codes<uint8_t>(m * k, 0, 255);
          const auto weight = make_weight(random, variant == 0 ? Weights::mild : Weights::any, n, k);
          const int64_t count = random.between(0, 1) ? n : 1;
          Columns c;
          c.scale = random.reals<float>(count, 0.001, 0.01);
          c.scale64.assign(c.scale.begin(), c.scale.end());
          c.zero = random.codes<int32_t>(count, shifted ? -128 : 0, shifted ? 127 : 0);
          c.zero64.assign(c.zero.begin(), c.zero.end());
          c.bias = random.reals<float>(n, -3, 3);
          c.bias64.assign(c.bias.begin(), c.bias.end());
          const auto bytes = gemm::pack(isa, weight.data(), k, n, k, in_parts());
          gemm::Layer layer;
          ZEROPOINT_CHECK(gemm::view(bytes.data(), static_cast<int64_t>(bytes.size()), isa, n, k, &layer.weight), n);
          using Type = gemm::Numbers::Type;
          layer.columns.scale = {c.scale.data(), Type::f32, count};
          layer.columns.zero_point = {c.zero.data(), Type::i32, count};
          if (random.between(0, 2)) layer.columns.bias = {c.bias.data(), Type::f32, n};
          if (wide_numbers) {
            layer.columns.scale = {c.scale64.data(), Type::f64, count};
            layer.columns.zero_point = {c.zero64.data(), Type::i64, count};
            if (layer.columns.bias.data) layer.columns.bias = {c.bias64.data(), Type::f64, n};
          }
          gemm::CodesCall call;
          call.x = x.data();
          call.x_signed = is_signed;
          call.m = m;
          call.x_zero_point = static_cast<int32_t>(random.between(0, 255)) - (is_signed ? 128 : 0);
          call.out_zero_point = 100, call.out_min = random.between(0, 1) ? 100 : 0;
          std::vector<uint8_t> out(static_cast<size_t>(m * n)), expected(out.size());
          call.out = out.data();
          gemm::linear(layer, 0.037, 0.11, call, in_parts());
          for (int64_t row = 0; row < m; ++row)
            for (int64_t col = 0; col < n; ++col) {
              const size_t at = static_cast<size_t>(count == 1 ? 0 : col);
              int64_t sum = 0;
              for (int64_t i = 0; i < k; ++i) {
                const uint8_t code = x[static_cast<size_t>(row * k + i)];
                sum += (int64_t{is_signed ? static_cast<int8_t>(code) : int{code}} - call.x_zero_point) *
                       (int64_t{weight[static_cast<size_t>(col * k + i)]} - c.zero[at]);
              }
              const auto multiplier = static_cast<float>(0.037 * static_cast<double>(c.scale[at]) / 0.11);
              const auto offset = static_cast<float>(c.bias64[static_cast<size_t>(col)] / 0.11);
              const float y = scaled(sum, multiplier, layer.columns.bias.data ? &offset : nullptr);
              expected[static_cast<size_t>(row * n + col)] =
                  static_cast<uint8_t>(to_code(y, call.out_zero_point, call.out_min, call.out_max));
            }
          check_equal(out, expected, text("m", m, "n", n, "k", k, "variant", variant));
        }
}

void check_dynamic(Isa isa, Random& random, int64_t m, int64_t n, int64_t k, bool special) {
  auto x = random.reals<float>(m * k, -2.5, 4.0);
  if (special) {
    x[0] = std::numeric_limits<float>::quiet_NaN();
    x[x.size() / 2] = std::numeric_limits<float>::infinity();
    x[x.size() - 1] = -std::numeric_limits<float>::infinity();
  }
  float low = 0, high = 0;
  for (float v : x)
    if (std::isfinite(v)) low = std::min(low, v), high = std::max(high, v);
  const auto weight = make_weight(random, Weights::any, n, k);
  const auto scale = random.reals<float>(n, 0.001, 0.01), bias = random.reals<float>(n, -3, 3);
  const auto zero = random.codes<int32_t>(n, special ? -3 : 0, 0);
  const auto bytes = gemm::pack(isa, weight.data(), k, n, k, Parallel::serial());
  using Type = gemm::Numbers::Type;
  gemm::Layer layer;
  ZEROPOINT_CHECK(gemm::view(bytes.data(), static_cast<int64_t>(bytes.size()), isa, n, k, &layer.weight), n);
  layer.columns.scale = {scale.data(), Type::f32, n};
  layer.columns.zero_point = {zero.data(), Type::i32, n};
  layer.columns.bias = {bias.data(), Type::f32, n};
  gemm::FloatCall call;
  call.x = x.data();
  call.m = m;
  call.reduce_range = special;
  call.relu = !special;
  std::vector<float> out(static_cast<size_t>(m * n)), expected(out.size());
  call.out = out.data();
  gemm::linear_dynamic(layer, call, in_parts());
  const int64_t most = call.reduce_range ? 127 : 255;
  const auto grid = elementwise::choose_qparams(low, high, 0, most);
  const float inverse = 1.0f / static_cast<float>(grid.scale);
  std::vector<int64_t> codes;
  for (float v : x) codes.push_back(to_code(v * inverse, grid.zero_point, 0, 255) - grid.zero_point);
  for (int64_t row = 0; row < m; ++row)
    for (int64_t col = 0; col < n; ++col) {
      const auto at = static_cast<size_t>(col);
      int64_t sum = 0;
      for (int64_t i = 0; i < k; ++i)
        sum += codes[static_cast<size_t>(row * k + i)] * (int64_t{weight[static_cast<size_t>(col * k + i)]} - zero[at]);
      const float y = scaled(sum, static_cast<float>(grid.scale * static_cast<double>(scale[at])), &bias[at]);
      expected[static_cast<size_t>(row * n + col)] = call.relu && y < 0 ? 0.0f : y;
    }
  check_equal(out, expected, text("m", m, "n", n, "k", k));
}

ZEROPOINT_TEST(linear_dynamic) {
  Random random(8);
  for (int64_t m : {1, 7, 30})
    for (int64_t n : {1, 33})
      for (int64_t k : {1, 16, 45, 200}) check_dynamic(isa, random, m, n, k, k != 16);
  check_dynamic(isa, random, 41, 70, 256, false);  // rows that tiles are loaded from
}

ZEROPOINT_TEST(linear_deeper_than_32_bits) {
  Random random(9);
  check_dynamic(isa, random, 2, 5, gemm::kMaxNarrowDepth + 3, true);
  check_dynamic(isa, random, 9, 5, gemm::kMaxNarrowDepth + 64, true);
}

}  // namespace
}  // namespace zeropoint::tests
