#include "isa.h"

#include <array>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace zeropoint {
namespace {

Isa best_of_processor() {
  Isa best = Isa::portable;
  for (Isa isa : kIsas)
    if (processor_has(isa)) best = isa;
  return best;
}

Isa chosen_at_load() {
  Isa best = best_of_processor();
  const char* wish = std::getenv("ZEROPOINT_ISA");
  if (wish == nullptr) return best;
  for (Isa isa : kIsas)
    if (std::strcmp(wish, isa_name(isa)) == 0 && processor_has(isa)) return isa;
  return best;
}

Isa& state() {
  static Isa isa = chosen_at_load();
  return isa;
}

#if defined(__x86_64__)
// F16C, AVX-VNNI and AMX, which not every compiler's __builtin_cpu_supports knows by name.
enum class Word { eax, ecx, edx };
[[maybe_unused]] bool cpuid_bit(unsigned leaf, unsigned subleaf, Word word, int bit) {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(leaf, subleaf, &eax, &ebx, &ecx, &edx)) return false;
  return ((word == Word::eax ? eax : word == Word::ecx ? ecx : edx) >> bit & 1) != 0;
}
#endif

#if defined(__x86_64__) && defined(__linux__)
// Linux has a process ask before it uses tile registers, as they enlarge what a signal handler's stack has to hold.
[[maybe_unused]] bool allow_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

// ZEROPOINT_HAS_... says what this build holds: CMakeLists.txt leaves out what the compiler does not know.
bool ask_processor(Isa isa) {
  switch (isa) {
    case Isa::portable:
      return true;
#if defined(ZEROPOINT_HAS_AVX2)
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && cpuid_bit(1, 0, Word::ecx, 29);
#endif
#if defined(ZEROPOINT_HAS_AVXVNNI)
    case Isa::avx_vnni:
      return ask_processor(Isa::avx2) && cpuid_bit(7, 1, Word::eax, 4);
#endif
#if defined(ZEROPOINT_HAS_AVX512VNNI)
    case Isa::avx512_vnni:
      return ask_processor(Isa::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512vnni");
#endif
#if defined(ZEROPOINT_HAS_AMXINT8) && defined(__linux__)
    case Isa::amx_int8:
      return ask_processor(Isa::avx512_vnni) && cpuid_bit(7, 0, Word::edx, 24) && cpuid_bit(7, 0, Word::edx, 25) &&
             allow_tiles();
#endif
#if defined(ZEROPOINT_HAS_NEON_DOT) && defined(__linux__)
    case Isa::neon_dot:
      return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#endif
#if defined(ZEROPOINT_HAS_NEON_I8MM) && defined(__linux__)
    case Isa::neon_i8mm:
      return ask_processor(Isa::neon_dot) && (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
#endif
    default:
      return false;
  }
}

}  // namespace

bool processor_has(Isa isa) {
  // Asked once: in a virtual machine the question leaves it, and takes microseconds.
  static const auto answers = [] {
    std::array<bool, std::size(kIsas)> found{};
    for (Isa each : kIsas) found[static_cast<size_t>(each)] = ask_processor(each);
    return found;
  }();
  const auto index = static_cast<size_t>(isa);
  return index < answers.size() && answers[index];
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
    case Isa::amx_int8: return "amx_int8";
    case Isa::neon_dot: return "neon_dot";
    case Isa::neon_i8mm: return "neon_i8mm";
  }
  return "unknown";
}

}  // namespace zeropoint
