// Runs every case on every instruction set that the processor has. `zeropoint_kernel_tests [part of a name]`
#include <cstdio>
#include <cstring>
#include <exception>

#include "tests/check.h"

namespace zeropoint::tests {
namespace {

int failures_of_case = 0;

// False if it failed.
bool run(const Case& test, Isa isa) {
  failures_of_case = 0;
  set_active_isa(isa);
  try {
    test.run(isa);
  } catch (const std::exception& error) {
    fail(test.name, 0, std::string("threw: ") + error.what());
  }
  if (failures_of_case == 0) return true;
  std::printf("FAILED %s on %s: %d checks\n", test.name, isa_name(isa), failures_of_case);
  return false;
}

}  // namespace

std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

void fail(const char* file, int line, const std::string& what) {
  constexpr int kShown = 3;
  if (++failures_of_case <= kShown) std::printf("%s:%d: %s\n", file, line, what.c_str());
}

}  // namespace zeropoint::tests

int main(int argc, char** argv) {
  using namespace zeropoint;
  int passed = 0, failed = 0;
  for (Isa isa : kIsas) {
    if (!processor_has(isa)) continue;
    const int before = passed + failed;
    for (const tests::Case& test : tests::cases()) {
      if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
      (tests::run(test, isa) ? passed : failed) += 1;
    }
    std::printf("%s: %d cases\n", isa_name(isa), passed + failed - before);
    std::fflush(stdout);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}
