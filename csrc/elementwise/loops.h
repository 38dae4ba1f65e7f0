// The loops behind the table in kernels.h, over the vectors that the including file has defined in its own namespace:
//   Floats, kLanes, splat, load, store, add, sub, mul, smaller, larger, nearest, any_nan, zero_if_nan, or_if_nan,
//   finite_or, saturated, from_bytes, write_bytes, lookup, sums, and the conversions of half precision.
// Included once by each instruction set's file, inside its namespace: no code is shared between them, because the
// linker would keep only one copy of it, with one file's instructions.

constexpr int kBlock = 4 * kLanes;

template <class T>
struct Padded {
  alignas(64) T values[kBlock];
  Padded(const T* from, int64_t n) {
    std::memset(values, 0, sizeof(values));
    std::memcpy(values, from, static_cast<size_t>(n) * sizeof(T));
  }
};

// Calls body(out, in...) on blocks of kBlock elements. The last block overlaps the one before it; an array shorter than
// a block goes through padded copies.
template <class Out, class Body, class... In>
inline void in_blocks(int64_t n, Body body, Out* out, const In*... in) {
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) body(out + i, in + i...);
  if (i == n) return;
  if (n >= kBlock) {
    body(out + (n - kBlock), in + (n - kBlock)...);
    return;
  }
  alignas(64) Out padded[kBlock];
  body(padded, static_cast<const In*>(Padded<In>(in, n).values)...);
  std::memcpy(out, padded, static_cast<size_t>(n) * sizeof(Out));
}

// Calls f(std::true_type) for signed codes, f(std::false_type) for unsigned ones.
template <class F>
inline void by_sign(bool is_signed, F&& f) {
  if (is_signed)
    f(std::true_type{});
  else
    f(std::false_type{});
}

// Results that may be anything: NaN is looked for in four vectors at once, since it is rare.
inline void emit(Floats (&y)[4], Target target, uint8_t* out) {
  if (__builtin_expect(any_nan(y[0], y[1], y[2], y[3]), 0))
    for (Floats& v : y) v = zero_if_nan(v);
  for (Floats& v : y) v = saturated(v);
  write_bytes(y[0], y[1], y[2], y[3], target, out);
}

void quantize(const float* x, uint8_t* out, int64_t n, float inverse, Target target) {
  const Floats factor = splat(inverse);
  in_blocks(
      n,
      [=](uint8_t* o, const float* v) {
        Floats y[4];
        for (int k = 0; k < 4; ++k) y[k] = mul(load(v + k * kLanes), factor);
        emit(y, target, o);
      },
      out, x);
}

void quantize_each(const float* x, const float* inverse, const float* zero, uint8_t* out, int64_t n, Target target) {
  in_blocks(
      n,
      [=](uint8_t* o, const float* v, const float* factor, const float* shift) {
        Floats y[4];
        for (int k = 0; k < 4; ++k) y[k] = mul(load(v + k * kLanes), load(factor + k * kLanes));
        if (__builtin_expect(any_nan(y[0], y[1], y[2], y[3]), 0))
          for (Floats& step : y) step = zero_if_nan(step);
        for (int k = 0; k < 4; ++k) y[k] = add(nearest(y[k]), load(shift + k * kLanes));
        emit(y, target, o);
      },
      out, x, inverse, zero);
}

void quantize_shifted(const float* x, const float* inverse, const float* zero, uint8_t* out, int64_t n,
                      Target target) {
  in_blocks(
      n,
      [=](uint8_t* o, const float* v, const float* factor, const float* shift) {
        Floats y[4];
        for (int k = 0; k < 4; ++k) {
          const Floats at_zero = load(shift + k * kLanes);
          y[k] = or_if_nan(add(mul(load(v + k * kLanes), load(factor + k * kLanes)), at_zero), at_zero);
        }
        emit(y, target, o);
      },
      out, x, inverse, zero);
}

void dequantize(Bytes x, float* out, int64_t n, float scale) {
  const Floats zero = splat(x.zero), factor = splat(scale);
  by_sign(x.is_signed, [=](auto sign) {
    in_blocks(
        n,
        [=](float* o, const uint8_t* c) {
          for (int k = 0; k < 4; ++k)
            store(o + k * kLanes, mul(sub(from_bytes(c + k * kLanes, sign), zero), factor));
        },
        out, x.codes);
  });
}

void dequantize_each(Bytes x, const float* zero, const float* scale, float* out, int64_t n) {
  by_sign(x.is_signed, [=](auto sign) {
    in_blocks(
        n,
        [=](float* o, const uint8_t* c, const float* shift, const float* factor) {
          for (int k = 0; k < 4; ++k) {
            const Floats steps = sub(from_bytes(c + k * kLanes, sign), load(shift + k * kLanes));
            store(o + k * kLanes, mul(steps, load(factor + k * kLanes)));
          }
        },
        out, x.codes, zero, scale);
  });
}

void affine(Bytes x, float factor, float offset, uint8_t* out, int64_t n, Target target) {
  const Floats zero = splat(x.zero), m = splat(factor), b = splat(offset);
  by_sign(x.is_signed, [=](auto sign) {
    in_blocks(
        n,
        [=](uint8_t* o, const uint8_t* c) {
          Floats y[4];
          for (int k = 0; k < 4; ++k) y[k] = add(mul(sub(from_bytes(c + k * kLanes, sign), zero), m), b);
          write_bytes(y[0], y[1], y[2], y[3], target, o);
        },
        out, x.codes);
  });
}

void affine_each(Bytes x, const float* zero, const float* factor, const float* offset, uint8_t* out, int64_t n,
                 Target target) {
  by_sign(x.is_signed, [=](auto sign) {
    in_blocks(
        n,
        [=](uint8_t* o, const uint8_t* c, const float* z, const float* m, const float* b) {
          Floats y[4];
          for (int k = 0; k < 4; ++k) {
            const Floats steps = sub(from_bytes(c + k * kLanes, sign), load(z + k * kLanes));
            y[k] = add(mul(steps, load(m + k * kLanes)), load(b + k * kLanes));
          }
          write_bytes(y[0], y[1], y[2], y[3], target, o);
        },
        out, x.codes, zero, factor, offset);
  });
}

void affine_twice(Bytes x, float factor, float offset, const float* gain, const float* shift, uint8_t* out, int64_t n,
                  Target target) {
  const Floats zero = splat(x.zero), m = splat(factor), b = splat(offset);
  by_sign(x.is_signed, [=](auto sign) {
    in_blocks(
        n,
        [=](uint8_t* o, const uint8_t* c, const float* g, const float* s) {
          Floats y[4];
          for (int k = 0; k < 4; ++k) {
            const Floats normal = add(mul(sub(from_bytes(c + k * kLanes, sign), zero), m), b);
            y[k] = add(mul(normal, load(g + k * kLanes)), load(s + k * kLanes));
          }
          emit(y, target, o);
        },
        out, x.codes, gain, shift);
  });
}

void add_codes(Bytes a, float a_factor, Bytes b, float b_factor, uint8_t* out, int64_t n, Target target) {
  const Floats a_zero = splat(a.zero), b_zero = splat(b.zero), ma = splat(a_factor), mb = splat(b_factor);
  by_sign(a.is_signed, [=](auto a_sign) {
    by_sign(b.is_signed, [=](auto b_sign) {
      in_blocks(
          n,
          [=](uint8_t* o, const uint8_t* p, const uint8_t* q) {
            Floats y[4];
            for (int k = 0; k < 4; ++k)
              y[k] = add(mul(sub(from_bytes(p + k * kLanes, a_sign), a_zero), ma),
                         mul(sub(from_bytes(q + k * kLanes, b_sign), b_zero), mb));
            write_bytes(y[0], y[1], y[2], y[3], target, o);
          },
          out, a.codes, b.codes);
    });
  });
}

void mul_codes(Bytes a, Bytes b, float factor, uint8_t* out, int64_t n, Target target) {
  const Floats a_zero = splat(a.zero), b_zero = splat(b.zero), m = splat(factor);
  by_sign(a.is_signed, [=](auto a_sign) {
    by_sign(b.is_signed, [=](auto b_sign) {
      in_blocks(
          n,
          [=](uint8_t* o, const uint8_t* p, const uint8_t* q) {
            Floats y[4];
            for (int k = 0; k < 4; ++k)
              y[k] = mul(mul(sub(from_bytes(p + k * kLanes, a_sign), a_zero),
                             sub(from_bytes(q + k * kLanes, b_sign), b_zero)),
                         m);
            write_bytes(y[0], y[1], y[2], y[3], target, o);
          },
          out, a.codes, b.codes);
    });
  });
}

void mul_one(Bytes a, float b, float factor, uint8_t* out, int64_t n, Target target) {
  const Floats a_zero = splat(a.zero), steps = splat(b), m = splat(factor);
  by_sign(a.is_signed, [=](auto sign) {
    in_blocks(
        n,
        [=](uint8_t* o, const uint8_t* p) {
          Floats y[4];
          for (int k = 0; k < 4; ++k) y[k] = mul(mul(sub(from_bytes(p + k * kLanes, sign), a_zero), steps), m);
          write_bytes(y[0], y[1], y[2], y[3], target, o);
        },
        out, a.codes);
  });
}

void finite_range(const float* x, int64_t n, float* low, float* high) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Floats least[4], most[4];
  for (int k = 0; k < 4; ++k) least[k] = splat(kInfinity), most[k] = splat(-kInfinity);
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock)
    for (int k = 0; k < 4; ++k) {
      const Floats v = load(x + i + k * kLanes);
      least[k] = smaller(least[k], finite_or(v, least[k]));
      most[k] = larger(most[k], finite_or(v, most[k]));
    }
  alignas(64) float lanes[2 * kLanes];
  store(lanes, smaller(smaller(least[0], least[1]), smaller(least[2], least[3])));
  store(lanes + kLanes, larger(larger(most[0], most[1]), larger(most[2], most[3])));
  const auto merge = [&](float a, float b) {
    if (a < *low) *low = a;
    if (b > *high) *high = b;
  };
  for (int k = 0; k < kLanes; ++k) merge(lanes[k], lanes[kLanes + k]);
  for (; i < n; ++i)
    if (x[i] - x[i] == 0.0f) merge(x[i], x[i]);  // an infinity minus itself is NaN
}

// The sums of kColumns columns stay in registers, in 32 bits for as many rows as fit, then in 64.
template <class Code>
inline void column_sums_of(const uint8_t* codes, int64_t rows, int64_t n, int64_t* sum, int64_t* squares) {
  constexpr int64_t kColumns = 32, kSafe = 32768;  // squares of 255 that fit 31 bits
  for (int64_t column = 0; column < n; column += kColumns) {
    const int64_t width = n - column < kColumns ? n - column : kColumns;
    for (int64_t begin = 0; begin < rows; begin += kSafe) {
      const int64_t end = rows - begin < kSafe ? rows : begin + kSafe;
      int32_t first[kColumns] = {}, second[kColumns] = {};
      const auto add_row = [&](const uint8_t* row, int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
          const int32_t code = static_cast<Code>(row[i]);
          first[i] += code;
          second[i] += code * code;
        }
      };
      if (width == kColumns)
        for (int64_t r = begin; r < end; ++r) add_row(codes + r * n + column, kColumns);
      else
        for (int64_t r = begin; r < end; ++r) add_row(codes + r * n + column, width);
      for (int64_t i = 0; i < width; ++i) {
        sum[column + i] += first[i];
        squares[column + i] += second[i];
      }
    }
  }
}

void column_sums(const uint8_t* codes, bool is_signed, int64_t rows, int64_t n, int64_t* sum, int64_t* squares) {
  (is_signed ? column_sums_of<int8_t> : column_sums_of<uint8_t>)(codes, rows, n, sum, squares);
}

constexpr Kernels kTable = {
    quantize,     quantize_each, quantize_shifted, dequantize,   dequantize_each, affine,        affine_each,
    affine_twice, add_codes,     mul_codes,        mul_one,      lookup,          finite_range,  sums,
    column_sums,  from_half,     from_bfloat16,    to_half,      to_bfloat16,
};
