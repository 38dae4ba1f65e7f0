// The loops of kernels.h in plain C++, for the compiler to vectorize; included inside an anonymous namespace by one
// file an instruction set, so that no copy reaches the rest of the program.

template <class T>
inline void widen_of(const T* __restrict codes, int64_t n, double zero, double* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<double>(codes[i]) - zero;
}

void widen(const void* codes, Type type, int64_t n, double zero, double* out) {
  if (type == Type::i8) return widen_of(static_cast<const int8_t*>(codes), n, zero, out);
  if (type == Type::u8) return widen_of(static_cast<const uint8_t*>(codes), n, zero, out);
  widen_of(static_cast<const int32_t*>(codes), n, zero, out);
}

void mix(const double* __restrict low, const double* __restrict high, double share, int64_t n,
         double* __restrict out) {
  const double rest = 1.0 - share;
  for (int64_t i = 0; i < n; ++i) out[i] = low[i] * rest + high[i] * share;
}

void mix_each(const double* __restrict x, const int64_t* __restrict low, const int64_t* __restrict high,
              const double* __restrict share, int64_t n, double* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = x[low[i]] * (1.0 - share[i]) + x[high[i]] * share[i];
}

template <class T>
inline void store_of(const double* __restrict x, double factor, int64_t n, double zero, double low, double high,
                     T* __restrict out) {
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer, ties to even
  for (int64_t i = 0; i < n; ++i) {
    double y = x[i] * factor;
    y = ((y + kMagic) - kMagic) + zero;
    y = y < low ? low : y;
    y = y > high ? high : y;
    out[i] = static_cast<T>(static_cast<int32_t>(y));
  }
}

void store(const double* x, double factor, int64_t n, double zero, double low, double high, void* out, Type type) {
  if (type == Type::i8) return store_of(x, factor, n, zero, low, high, static_cast<int8_t*>(out));
  if (type == Type::u8) return store_of(x, factor, n, zero, low, high, static_cast<uint8_t*>(out));
  store_of(x, factor, n, zero, low, high, static_cast<int32_t*>(out));
}

template <class T>
inline void below_largest_of(const T* __restrict codes, int64_t n, const double* __restrict table,
                             double* __restrict out) {
  T most = codes[0];
  for (int64_t i = 0; i < n; ++i) most = codes[i] > most ? codes[i] : most;
  const int32_t largest = most;
  for (int64_t i = 0; i < n; ++i) out[i] = table[largest - static_cast<int32_t>(codes[i])];
}

void below_largest(const void* codes, Type type, int64_t n, const double* table, double* out) {
  if (type == Type::i8)
    below_largest_of(static_cast<const int8_t*>(codes), n, table, out);
  else
    below_largest_of(static_cast<const uint8_t*>(codes), n, table, out);
}

double sum(const double* x, int64_t n) {
  double lanes[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int64_t k = 0; k < 8; ++k) lanes[k] = lanes[k] + x[i + k];
  for (; i < n; ++i) lanes[i % 8] = lanes[i % 8] + x[i];
  for (int64_t apart = 4; apart > 0; apart /= 2)
    for (int64_t k = 0; k < apart; ++k) lanes[k] = lanes[k] + lanes[k + apart];
  return lanes[0];
}

const Kernels kTable = {widen, mix, mix_each, store, below_largest, sum};
