// The loops of kernels.h in plain C++, for the compiler to vectorize; included inside an anonymous namespace by one
// file an instruction set, so that no copy reaches the rest of the program.

static_assert(sizeof(float) == sizeof(uint32_t));

// e^x as in zeropoint.ops.rnn: 2^n times a Taylor series of the rest, which lies within ln(2) / 2.
inline float exp_of(float x) {
  x = x > 87.0f ? 87.0f : x;
  x = x < -87.0f ? -87.0f : x;
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even
  const float shifted = x * 1.4426950216293335f + kShift;
  const float exponent = shifted - kShift;
  const float rest = (x - exponent * 0.693359375f) - exponent * -0.00021219444170128554f;
  float series = 0.00019841270113829523f;
  series = series * rest + 0.0013888889225199819f;
  series = series * rest + 0.008333333767950535f;
  series = series * rest + 0.0416666679084301f;
  series = series * rest + 0.1666666716337204f;
  series = series * rest + 0.5f;
  series = series * rest + 1.0f;
  series = series * rest + 1.0f;
  // The low bits of `shifted` hold the exponent; what stands above them leaves on the left. NaN stays by `series`.
  const uint32_t power = (__builtin_bit_cast(uint32_t, shifted) << 23) + 0x3F800000u;
  return series * __builtin_bit_cast(float, power);
}

inline float sigmoid_of(float x) { return 1.0f / (exp_of(-x) + 1.0f); }
inline float tanh_of(float x) { return 2.0f / (exp_of(x * -2.0f) + 1.0f) - 1.0f; }

void finish(const int32_t* __restrict raw, Row row, Columns columns, float* __restrict out, int64_t n) {
  const int32_t* __restrict sums = columns.sums;
  const float* __restrict scale = columns.scale;
  const float* __restrict bias = columns.bias;
  if (columns.zero_point) {
    const int32_t* __restrict zero_point = columns.zero_point;
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t zw = static_cast<uint32_t>(zero_point[i]);
      const uint32_t constant = row.zero_point * (row.depth * zw - static_cast<uint32_t>(sums[i])) - zw * row.sum;
      out[i] = static_cast<float>(static_cast<int32_t>(static_cast<uint32_t>(raw[i]) + constant)) *
               (row.scale * scale[i]);
    }
  } else {
    for (int64_t i = 0; i < n; ++i)
      out[i] = static_cast<float>(static_cast<int32_t>(static_cast<uint32_t>(raw[i]) -
                                                       row.zero_point * static_cast<uint32_t>(sums[i]))) *
               (row.scale * scale[i]);
  }
  if (bias)
    for (int64_t i = 0; i < n; ++i) out[i] = out[i] + bias[i];
}

void lstm(Gates gates, float* __restrict c, float* __restrict h, int64_t n) {
  const float* __restrict x = gates.given;
  const float* __restrict r = gates.recurrent;
  const int64_t xs = gates.given_stride, rs = gates.recurrent_stride;
  for (int64_t i = 0; i < n; ++i) {
    const float in = sigmoid_of(x[i] + r[i]);
    const float forget = sigmoid_of(x[xs + i] + r[rs + i]);
    const float cell = tanh_of(x[2 * xs + i] + r[2 * rs + i]);
    const float out = sigmoid_of(x[3 * xs + i] + r[3 * rs + i]);
    c[i] = forget * c[i] + in * cell;
    h[i] = out * tanh_of(c[i]);
  }
}

void gru(Gates gates, const float* __restrict before, float* __restrict h, int64_t n) {
  const float* __restrict x = gates.given;
  const float* __restrict r = gates.recurrent;
  const int64_t xs = gates.given_stride, rs = gates.recurrent_stride;
  for (int64_t i = 0; i < n; ++i) {
    const float reset = sigmoid_of(x[i] + r[i]);
    const float update = sigmoid_of(x[xs + i] + r[rs + i]);
    const float fresh = tanh_of(x[2 * xs + i] + reset * r[2 * rs + i]);
    h[i] = (before[i] - fresh) * update + fresh;
  }
}

void tanh_step(Gates gates, float* __restrict h, int64_t n) {
  const float* __restrict x = gates.given;
  const float* __restrict r = gates.recurrent;
  for (int64_t i = 0; i < n; ++i) h[i] = tanh_of(x[i] + r[i]);
}

void relu_step(Gates gates, float* __restrict h, int64_t n) {
  const float* __restrict x = gates.given;
  const float* __restrict r = gates.recurrent;
  for (int64_t i = 0; i < n; ++i) {
    const float y = x[i] + r[i];
    h[i] = y < 0.0f ? 0.0f : y;
  }
}

const Kernels kTable = {finish, lstm, gru, tanh_step, relu_step};
