#include "conv/layout.h"

#if defined(__AVX2__)
#include <immintrin.h>

namespace zeropoint::conv {

namespace {

// Byte j of the 48 that 16 triples fill is code j / 3 of plane j % 3; -1 leaves a zero for the other planes.
struct Places {
  alignas(16) int8_t of[3][3][16];

  constexpr Places() : of() {
    for (int part = 0; part < 3; ++part)
      for (int plane = 0; plane < 3; ++plane)
        for (int i = 0; i < 16; ++i) {
          const int j = part * 16 + i;
          of[part][plane][i] = static_cast<int8_t>(j % 3 == plane ? j / 3 : -1);
        }
  }
};
constexpr Places kPlaces;

}  // namespace

void interleave3_avx2(const uint8_t* from, int64_t plane, int64_t count, uint8_t* to) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16, to += 48) {
    __m128i codes[3];
    for (int p = 0; p < 3; ++p) codes[p] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + p * plane + i));
    for (int part = 0; part < 3; ++part) {
      __m128i mixed = _mm_setzero_si128();
      for (int p = 0; p < 3; ++p)
        mixed = _mm_or_si128(
            mixed, _mm_shuffle_epi8(codes[p], _mm_load_si128(reinterpret_cast<const __m128i*>(kPlaces.of[part][p]))));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + part * 16), mixed);
    }
  }
  for (; i < count; ++i, to += 3)
    for (int p = 0; p < 3; ++p) to[p] = from[p * plane + i];
}

}  // namespace zeropoint::conv
#endif
