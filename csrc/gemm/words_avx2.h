// The step that products of 16-bit words consist of in AVX2. Included only by files that are compiled for AVX2.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace zeropoint::gemm {
namespace {

// sums += two words of a row times two words of each of 16 columns, or of the first 8. Written out, because six rows take
// every register there is: twelve sums, two of weights and the two here. Left to itself the compiler reorders and spills.
template <int kHalves>
inline __attribute__((always_inline)) void accumulate_words(__m256i (&sums)[2], const int16_t* words, __m256i w0,
                                                            __m256i w1) {
  typedef int32_t __attribute__((may_alias)) Two;
  __m256i x, products;
  if constexpr (kHalves == 2) {
    __asm__("vpbroadcastd %[two], %[x]\n\t"
            "vpmaddwd %[w0], %[x], %[products]\n\t"
            "vpmaddwd %[w1], %[x], %[x]\n\t"
            "vpaddd %[products], %[sum0], %[sum0]\n\t"
            "vpaddd %[x], %[sum1], %[sum1]"
            : [sum0] "+x"(sums[0]), [sum1] "+x"(sums[1]), [x] "=&x"(x), [products] "=&x"(products)
            : [two] "m"(*reinterpret_cast<const Two*>(words)), [w0] "x"(w0), [w1] "x"(w1));
  } else {
    __asm__("vpbroadcastd %[two], %[x]\n\t"
            "vpmaddwd %[w0], %[x], %[x]\n\t"
            "vpaddd %[x], %[sum0], %[sum0]"
            : [sum0] "+x"(sums[0]), [x] "=&x"(x)
            : [two] "m"(*reinterpret_cast<const Two*>(words)), [w0] "x"(w0));
  }
}

// sums += (a0 + w2) (a2 + w0) + (a1 + w3) (a3 + w1) for four words of a row and of each of 16 columns.
inline __attribute__((always_inline)) void accumulate_crossed(__m256i (&sums)[2], const int16_t* words,
                                                              const __m256i (&w01)[2], const __m256i (&w23)[2]) {
  typedef int32_t __attribute__((may_alias)) Two;
  __m256i x, y, u, v;
  __asm__("vpbroadcastd %[a01], %[x]\n\t"
          "vpbroadcastd %[a23], %[y]\n\t"
          "vpaddw %[w230], %[x], %[u]\n\t"
          "vpaddw %[w010], %[y], %[v]\n\t"
          "vpaddw %[w231], %[x], %[x]\n\t"
          "vpmaddwd %[v], %[u], %[u]\n\t"
          "vpaddw %[w011], %[y], %[y]\n\t"
          "vpaddd %[u], %[sum0], %[sum0]\n\t"
          "vpmaddwd %[y], %[x], %[x]\n\t"
          "vpaddd %[x], %[sum1], %[sum1]"
          : [sum0] "+x"(sums[0]), [sum1] "+x"(sums[1]), [x] "=&x"(x), [y] "=&x"(y), [u] "=&x"(u), [v] "=&x"(v)
          : [a01] "m"(*reinterpret_cast<const Two*>(words)), [a23] "m"(*reinterpret_cast<const Two*>(words + 2)),
            [w010] "x"(w01[0]), [w011] "x"(w01[1]), [w230] "x"(w23[0]), [w231] "x"(w23[1]));
}

}  // namespace
}  // namespace zeropoint::gemm
