#include "isa.h"

#include <cstdlib>
#include <cstring>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace zeropoint {
namespace {

constexpr Isa kAll[] = {Isa::portable, Isa::avx2,     Isa::avx_vnni,
                        Isa::avx512_vnni, Isa::neon_dot, Isa::neon_i8mm};

Isa best_of_processor() {
  Isa best = Isa::portable;
  for (Isa isa : kAll)
    if (processor_has(isa)) best = isa;
  return best;
}

Isa chosen_at_load() {
  Isa best = best_of_processor();
  const char* wish = std::getenv("ZEROPOINT_ISA");
  if (wish == nullptr) return best;
  for (Isa isa : kAll)
    if (std::strcmp(wish, isa_name(isa)) == 0 && processor_has(isa)) return isa;
  return best;
}

Isa& state() {
  static Isa isa = chosen_at_load();
  return isa;
}

}  // namespace

bool processor_has(Isa isa) {
  switch (isa) {
    case Isa::portable:
      return true;
#if defined(__x86_64__)
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Isa::avx_vnni:
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
      return processor_has(Isa::avx2) && __builtin_cpu_supports("avxvnni");
#else
      return false;
#endif
    case Isa::avx512_vnni:
      return processor_has(Isa::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512vnni");
#endif
#if defined(__aarch64__) && defined(__linux__)
    case Isa::neon_dot:
      return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
    case Isa::neon_i8mm:
      return processor_has(Isa::neon_dot) && (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
#endif
    default:
      return false;
  }
}

Isa active_isa() { return state(); }

bool set_active_isa(Isa isa) {
  if (!processor_has(isa)) return false;
  state() = isa;
  return true;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::portable: return "portable";
    case Isa::avx2: return "avx2";
    case Isa::avx_vnni: return "avx_vnni";
    case Isa::avx512_vnni: return "avx512_vnni";
    case Isa::neon_dot: return "neon_dot";
    case Isa::neon_i8mm: return "neon_i8mm";
  }
  return "unknown";
}

}  // namespace zeropoint
