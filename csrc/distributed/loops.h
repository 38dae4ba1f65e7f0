// The loops behind the table in wire.h, over what the including file has defined in its own namespace:
//   Floats, Ints, kLanes; splat, load, store, add, sub, mul, smaller, larger, zero_if_nan, is_nan, floor_of;
//   whole, iload, both, either, times, exclusive, right<k>, left<k>, plus, bits_of, magnitude, above, count_up,
//   rounded (to Ints, ties to even), to_floats, signed_bytes, unsigned_bytes, put_signed, put_unsigned.
// Included once by each instruction set's file, inside its namespace: no code is shared between them, because the
// linker would keep only one copy of it, with one file's instructions.

// Calls body(i) at every kLanes-th element; the rest of an array goes through `rest(i, count)`.
template <class Body, class Rest>
inline void in_lanes(int64_t n, Body body, Rest rest) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i);
  if (i < n) rest(i, n - i);
}

inline Floats load_some(const float* x, int64_t n) {
  float padded[kLanes] = {};
  std::memcpy(padded, x, static_cast<size_t>(n) * sizeof(float));
  return load(padded);
}

// --- rows ---------------------------------------------------------------------------------------------------------

void range(const float* x, int64_t n, float* low, float* high) {
  constexpr int kSets = 4;  // independent chains, since each minimum waits for the one before
  Floats least[kSets], most[kSets];
  Ints nan[kSets];
  for (int k = 0; k < kSets; ++k) {
    least[k] = most[k] = splat(0.0f);
    nan[k] = whole(0);
  }
  const auto merge = [&](int k, Floats v) {
    least[k] = smaller(v, least[k]);
    most[k] = larger(v, most[k]);
    nan[k] = either(nan[k], is_nan(v));
  };
  int64_t i = 0;
  for (; i + kSets * kLanes <= n; i += kSets * kLanes)
    for (int k = 0; k < kSets; ++k) merge(k, load(x + i + k * kLanes));
  in_lanes(
      n - i, [&](int64_t j) { merge(0, load(x + i + j)); },
      [&](int64_t j, int64_t count) { merge(0, load_some(x + i + j, count)); });
  float lows[kSets * kLanes], highs[kSets * kLanes];
  int32_t nans[kSets * kLanes];
  for (int k = 0; k < kSets; ++k) {
    store(lows + k * kLanes, least[k]);
    store(highs + k * kLanes, most[k]);
    istore(nans + k * kLanes, nan[k]);
  }
  float first = 0.0f, last = 0.0f;
  bool any = false;
  for (int k = 0; k < kSets * kLanes; ++k) {
    first = lows[k] < first ? lows[k] : first;
    last = highs[k] > last ? highs[k] : last;
    any |= nans[k] != 0;
  }
  *low = any ? std::numeric_limits<float>::quiet_NaN() : first;
  *high = any ? std::numeric_limits<float>::quiet_NaN() : last;
}

void row_codes(const float* x, uint8_t* out, int64_t n, float inverse, float zero) {
  const Floats factor = splat(inverse), low = splat(-zero), high = splat(255.0f - zero);
  const Ints shift = whole(static_cast<int32_t>(zero));
  const auto codes = [=](Floats v) {
    return plus(rounded(smaller(larger(zero_if_nan(mul(v, factor)), low), high)), shift);
  };
  in_lanes(
      n, [=](int64_t i) { put_unsigned(codes(load(x + i)), out + i); },
      [=](int64_t i, int64_t count) {
        uint8_t some[kLanes];
        put_unsigned(codes(load_some(x + i, count)), some);
        std::memcpy(out + i, some, static_cast<size_t>(count));
      });
}

void add_row(const uint8_t* codes, float* out, int64_t n, float zero, float scale) {
  const Floats shift = splat(zero), factor = splat(scale);
  const auto sum = [=](const uint8_t* c, const float* o) {
    return add(load(o), mul(sub(to_floats(unsigned_bytes(c)), shift), factor));
  };
  in_lanes(
      n, [=](int64_t i) { store(out + i, sum(codes + i, out + i)); },
      [=](int64_t i, int64_t count) {
        uint8_t some[kLanes] = {};
        float padded[kLanes] = {};
        std::memcpy(some, codes + i, static_cast<size_t>(count));
        std::memcpy(padded, out + i, static_cast<size_t>(count) * sizeof(float));
        store(padded, sum(some, padded));
        std::memcpy(out + i, padded, static_cast<size_t>(count) * sizeof(float));
      });
}

// --- blocks -------------------------------------------------------------------------------------------------------

// As integers, magnitudes are in the order of the floats, and NaN is above infinity.
float largest(const float* x, int64_t n) {
  Ints first = whole(0), second = whole(0);
  for (int64_t i = 0; i < n; i += 2 * kLanes) {
    first = above(first, magnitude(bits_of(load(x + i))));
    second = above(second, magnitude(bits_of(load(x + i + kLanes))));
  }
  int32_t lanes[kLanes];
  istore(lanes, above(first, second));
  int32_t most = 0;
  for (int k = 0; k < kLanes; ++k) most = lanes[k] > most ? lanes[k] : most;
  float value;
  std::memcpy(&value, &most, sizeof(value));
  return value;
}

// Uniform in [0, 1): a multiply-and-shift hash of the element's number, docs in ops/distributed.py.
inline Floats noise(uint32_t seed, uint32_t first) {
  Ints word = plus(times(plus(count_up(), whole(static_cast<int32_t>(first))), whole(static_cast<int32_t>(0x9E3779B1u))),
                   whole(static_cast<int32_t>(seed)));
  word = times(exclusive(word, right<16>(word)), whole(static_cast<int32_t>(0x85EBCA6Bu)));
  word = times(exclusive(word, right<13>(word)), whole(static_cast<int32_t>(0xC2B2AE35u)));
  word = exclusive(word, right<16>(word));
  return mul(to_floats(right<8>(word)), splat(0x1p-24f));
}

struct Nearest {
  Floats factor, limit;
  Ints operator()(const float* x, int64_t) const {
    return rounded(smaller(larger(mul(load(x), factor), sub(splat(0.0f), limit)), limit));
  }
};

struct Random {
  Floats factor, limit;
  uint32_t seed, first;
  Ints operator()(const float* x, int64_t i) const {
    const Floats y = floor_of(add(mul(load(x), factor), noise(seed, first + static_cast<uint32_t>(i))));
    return rounded(smaller(larger(y, sub(splat(0.0f), limit)), limit));
  }
};

template <class Codes>
inline void pack8(const float* x, uint8_t* out, int64_t n, Codes codes) {
  for (int64_t i = 0; i < n; i += kLanes) put_signed(codes(x + i, i), out + i);
}

template <class Codes>
inline void pack4(const float* x, uint8_t* out, int64_t n, Codes codes) {
  const int64_t half = n / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const Ints low = plus(codes(x + i, i), whole(8));
    const Ints high = plus(codes(x + half + i, half + i), whole(8));
    put_unsigned(either(low, left<4>(high)), out + i);
  }
}

void block_codes8(const float* x, uint8_t* out, int64_t n, float inverse) {
  pack8(x, out, n, Nearest{splat(inverse), splat(127.0f)});
}
void block_codes4(const float* x, uint8_t* out, int64_t n, float inverse) {
  pack4(x, out, n, Nearest{splat(inverse), splat(7.0f)});
}
void random_codes8(const float* x, uint8_t* out, int64_t n, float inverse, uint32_t seed, uint32_t first) {
  pack8(x, out, n, Random{splat(inverse), splat(127.0f), seed, first});
}
void random_codes4(const float* x, uint8_t* out, int64_t n, float inverse, uint32_t seed, uint32_t first) {
  pack4(x, out, n, Random{splat(inverse), splat(7.0f), seed, first});
}

template <bool kAdd>
inline void emit(Ints codes, Floats factor, float* out) {
  const Floats value = mul(to_floats(codes), factor);
  store(out, kAdd ? add(load(out), value) : value);
}

template <bool kAdd>
inline void unpack8(const uint8_t* codes, float* out, int64_t n, float scale) {
  const Floats factor = splat(scale);
  for (int64_t i = 0; i < n; i += kLanes) emit<kAdd>(signed_bytes(codes + i), factor, out + i);
}

template <bool kAdd>
inline void unpack4(const uint8_t* codes, float* out, int64_t n, float scale) {
  const Floats factor = splat(scale);
  const int64_t half = n / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const Ints both_halves = unsigned_bytes(codes + i);
    emit<kAdd>(plus(both(both_halves, whole(15)), whole(-8)), factor, out + i);
    emit<kAdd>(plus(right<4>(both_halves), whole(-8)), factor, out + half + i);
  }
}

constexpr Kernels kTable = {range,         row_codes,      add_row,        largest,        block_codes8, block_codes4,
                            random_codes8, random_codes4,  unpack8<false>, unpack4<false>, unpack8<true>, unpack4<true>};
