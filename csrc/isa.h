// Which instruction set runs: chosen once, when the library is loaded.
#pragma once

namespace zeropoint {

// In rising order: a level includes the ones below it on the same architecture.
enum class Isa : int { portable, avx2, avx_vnni, avx512_vnni, amx_int8, neon_dot, neon_i8mm };
constexpr Isa kIsas[] = {Isa::portable, Isa::avx2,     Isa::avx_vnni, Isa::avx512_vnni,
                         Isa::amx_int8, Isa::neon_dot, Isa::neon_i8mm};

// The best level of this processor that this build holds, lowered by the environment
// variable ZEROPOINT_ISA (portable, avx2, avx_vnni, avx512_vnni, amx_int8) when it is set.
Isa active_isa();

// Lowers or restores the active level: for tests, and for a self-check that failed.
// Returns false, and changes nothing, if the processor does not have it.
bool set_active_isa(Isa isa);

bool processor_has(Isa isa);

// Whether `isa` is a level of x86 that includes `level`.
constexpr bool includes_x86(Isa isa, Isa level) { return isa <= Isa::amx_int8 && isa >= level; }

const char* isa_name(Isa isa);

// The active level's of a family's three tables of kernels. Those that this build does not hold are not asked for.
template <auto kPortable, auto kAvx2, auto kAvx512>
const auto& kernels_of_level() {
  const Isa isa = active_isa();
#if defined(ZEROPOINT_HAS_AVX512VNNI)
  if (includes_x86(isa, Isa::avx512_vnni)) return kAvx512();
#endif
#if defined(ZEROPOINT_HAS_AVX2)
  if (includes_x86(isa, Isa::avx2)) return kAvx2();
#endif
  (void)isa;
  return kPortable();
}

}  // namespace zeropoint
