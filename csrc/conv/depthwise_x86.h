// Registers of three widths under one set of names, and what the depthwise kernels do with them. In an unnamed
// namespace, as depthwise_kernel.h.
#pragma once
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // in the compiler's own _mm512_undefined
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "conv/depthwise_kernel.h"

namespace zeropoint::conv::depthwise {
namespace {

// sum + products of words with those in memory. Written out: the compiler would take weights that two output positions share
// for values worth keeping, and having no register left, copy them from one place in memory to another.
template <class Int>
inline __attribute__((always_inline)) Int add_words_from_memory(Int sum, Int words, const void* weights) {
  typedef Int __attribute__((may_alias, aligned(1))) InMemory;
  Int products;
  __asm__("vpmaddwd %[weights], %[words], %[products]\n\t"
          "vpaddd %[products], %[sum], %[sum]"
          : [sum] "+x"(sum), [products] "=&x"(products)
          : [words] "x"(words), [weights] "m"(*static_cast<const InMemory*>(weights)));
  return sum;
}

struct Register128 {
  using Int = __m128i;
  static constexpr int kBytes = 16;
  static Int load(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
  static void save(void* to, Int a) { _mm_storeu_si128(static_cast<__m128i*>(to), a); }
  static Int zero() { return _mm_setzero_si128(); }
  static Int words(int value) { return _mm_set1_epi16(static_cast<int16_t>(value)); }
  static Int low8(Int a, Int b) { return _mm_unpacklo_epi8(a, b); }
  static Int high8(Int a, Int b) { return _mm_unpackhi_epi8(a, b); }
  static Int low16(Int a, Int b) { return _mm_unpacklo_epi16(a, b); }
  static Int high16(Int a, Int b) { return _mm_unpackhi_epi16(a, b); }
  static Int pack32(Int a, Int b) { return _mm_packs_epi32(a, b); }
  static Int pack16(Int a, Int b) { return _mm_packs_epi16(a, b); }
  static Int packu16(Int a, Int b) { return _mm_packus_epi16(a, b); }
  static Int max16(Int a, Int b) { return _mm_max_epi16(a, b); }
  static Int add16(Int a, Int b) { return _mm_add_epi16(a, b); }
  static Int add32(Int a, Int b) { return _mm_add_epi32(a, b); }
  static Int madd16(Int a, Int b) { return _mm_madd_epi16(a, b); }
  static Int add_products(Int sum, Int words, const void* weights) { return add_words_from_memory(sum, words, weights); }
  static Int flip(Int a, uint8_t bits) { return _mm_xor_si128(a, _mm_set1_epi8(static_cast<char>(bits))); }
  // rint(min(sum * multiplier + offset, high)), each step rounded by itself.
  static Int scale(Int sum, const float* multiplier, const float* offset, float high) {
    const __m128 y = _mm_mul_ps(_mm_cvtepi32_ps(sum), _mm_loadu_ps(multiplier));
    return _mm_cvtps_epi32(_mm_min_ps(_mm_add_ps(y, _mm_loadu_ps(offset)), _mm_set1_ps(high)));
  }
};

struct Register256 {
  using Int = __m256i;
  static constexpr int kBytes = 32;
  static Int load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
  static void save(void* to, Int a) { _mm256_storeu_si256(static_cast<__m256i*>(to), a); }
  static Int zero() { return _mm256_setzero_si256(); }
  static Int words(int value) { return _mm256_set1_epi16(static_cast<int16_t>(value)); }
  static Int low8(Int a, Int b) { return _mm256_unpacklo_epi8(a, b); }
  static Int high8(Int a, Int b) { return _mm256_unpackhi_epi8(a, b); }
  static Int low16(Int a, Int b) { return _mm256_unpacklo_epi16(a, b); }
  static Int high16(Int a, Int b) { return _mm256_unpackhi_epi16(a, b); }
  static Int pack32(Int a, Int b) { return _mm256_packs_epi32(a, b); }
  static Int pack16(Int a, Int b) { return _mm256_packs_epi16(a, b); }
  static Int packu16(Int a, Int b) { return _mm256_packus_epi16(a, b); }
  static Int max16(Int a, Int b) { return _mm256_max_epi16(a, b); }
  static Int add16(Int a, Int b) { return _mm256_add_epi16(a, b); }
  static Int add32(Int a, Int b) { return _mm256_add_epi32(a, b); }
  static Int madd16(Int a, Int b) { return _mm256_madd_epi16(a, b); }
  static Int add_products(Int sum, Int words, const void* weights) { return add_words_from_memory(sum, words, weights); }
  static Int flip(Int a, uint8_t bits) { return _mm256_xor_si256(a, _mm256_set1_epi8(static_cast<char>(bits))); }
  // rint(min(sum * multiplier + offset, high)), each step rounded by itself.
  static Int scale(Int sum, const float* multiplier, const float* offset, float high) {
    const __m256 y = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_loadu_ps(multiplier));
    return _mm256_cvtps_epi32(_mm256_min_ps(_mm256_add_ps(y, _mm256_loadu_ps(offset)), _mm256_set1_ps(high)));
  }
};

#if defined(__AVX512BW__)
struct Register512 {
  using Int = __m512i;
  static constexpr int kBytes = 64;
  static Int load(const void* from) { return _mm512_loadu_si512(from); }
  static void save(void* to, Int a) { _mm512_storeu_si512(to, a); }
  static Int zero() { return _mm512_setzero_si512(); }
  static Int words(int value) { return _mm512_set1_epi16(static_cast<int16_t>(value)); }
  static Int low8(Int a, Int b) { return _mm512_unpacklo_epi8(a, b); }
  static Int high8(Int a, Int b) { return _mm512_unpackhi_epi8(a, b); }
  static Int low16(Int a, Int b) { return _mm512_unpacklo_epi16(a, b); }
  static Int high16(Int a, Int b) { return _mm512_unpackhi_epi16(a, b); }
  static Int pack32(Int a, Int b) { return _mm512_packs_epi32(a, b); }
  static Int pack16(Int a, Int b) { return _mm512_packs_epi16(a, b); }
  static Int packu16(Int a, Int b) { return _mm512_packus_epi16(a, b); }
  static Int max16(Int a, Int b) { return _mm512_max_epi16(a, b); }
  static Int add16(Int a, Int b) { return _mm512_add_epi16(a, b); }
  static Int add32(Int a, Int b) { return _mm512_add_epi32(a, b); }
  static Int madd16(Int a, Int b) { return _mm512_madd_epi16(a, b); }
  static Int add_products(Int sum, Int words, const void* weights) { return add32(sum, madd16(words, load(weights))); }
  static Int flip(Int a, uint8_t bits) { return _mm512_xor_si512(a, _mm512_set1_epi8(static_cast<char>(bits))); }
  // rint(min(sum * multiplier + offset, high)), each step rounded by itself.
  static Int scale(Int sum, const float* multiplier, const float* offset, float high) {
    const __m512 y = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_loadu_ps(multiplier));
    return _mm512_cvtps_epi32(_mm512_min_ps(_mm512_add_ps(y, _mm512_loadu_ps(offset)), _mm512_set1_ps(high)));
  }
};
#endif

// What both forms share. One register of bytes holds one tap of a block, four registers of 32-bit lanes its sums.
template <class R>
struct Block : R {
  using typename R::Int;
  static constexpr int kWidth = R::kBytes;

  static Int start(const int32_t* from, int v) { return R::load(from + kWidth / 4 * v); }

  static Int steps(const Row& row, Int sum, int v) {
    return R::scale(sum, row.multiplier + kWidth / 4 * v, row.offset + kWidth / 4 * v, row.high);
  }

  // Positive overflow was cut as a float; negative overflow converted to INT_MIN, which saturates as it should.
  static void store(const Row& row, Int (&sums)[4], uint8_t* out) {
    const Int low = R::words(row.low), zero_point = R::words(row.out_zero_point);
    Int a = R::pack32(steps(row, sums[0], 0), steps(row, sums[1], 1));
    Int b = R::pack32(steps(row, sums[2], 2), steps(row, sums[3], 3));
    a = R::add16(R::max16(a, low), zero_point);
    b = R::add16(R::max16(b, low), zero_point);
    R::save(out, row.out_signed ? R::pack16(a, b) : R::packu16(a, b));
  }

  static void copy(const uint8_t* from, uint8_t flip, uint8_t* to) { R::save(to, R::flip(R::load(from), flip)); }
};

// Form::pairs: two taps of a channel as 16-bit words.
template <class R>
struct Pairs : Block<R> {
  using typename R::Int;
  static constexpr int kTaps = 2;

  static void interleave(const uint8_t* const (&taps)[2], Int (&x)[4]) {
    const Int a = R::load(taps[0]), b = R::load(taps[1]), zero = R::zero();
    const Int low = R::low8(a, b), high = R::high8(a, b);
    x[0] = R::low8(low, zero);
    x[1] = R::high8(low, zero);
    x[2] = R::low8(high, zero);
    x[3] = R::high8(high, zero);
  }

  static Int dot(Int sum, Int x, const uint8_t* weights) {
    return R::add_products(sum, x, weights);
  }
};

// Form::quads: four taps of a channel as bytes. The instruction's file adds `dot`.
template <class R>
struct Quads : Block<R> {
  using typename R::Int;
  static constexpr int kTaps = 4;

  static void interleave(const uint8_t* const (&taps)[4], Int (&x)[4]) {
    const Int a = R::load(taps[0]), b = R::load(taps[1]), c = R::load(taps[2]), d = R::load(taps[3]);
    const Int low_ab = R::low8(a, b), high_ab = R::high8(a, b), low_cd = R::low8(c, d), high_cd = R::high8(c, d);
    x[0] = R::low16(low_ab, low_cd);
    x[1] = R::high16(low_ab, low_cd);
    x[2] = R::low16(high_ab, high_cd);
    x[3] = R::high16(high_ab, high_cd);
  }
};

}  // namespace
}  // namespace zeropoint::conv::depthwise
