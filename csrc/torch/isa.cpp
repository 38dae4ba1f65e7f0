// Which kernels run here: read and set from Python.
#include "common.h"
#include "isa.h"

namespace zeropoint::binding {
namespace {

int64_t active() { return static_cast<int64_t>(active_isa()); }
bool available(int64_t isa) { return processor_has(static_cast<Isa>(isa)); }
bool set_active(int64_t isa) { return set_active_isa(static_cast<Isa>(isa)); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(zeropoint, m) {
  m.def("_isa_active() -> int");
  m.def("_isa_available(int isa) -> bool");
  m.def("_isa_set(int isa) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(zeropoint, CompositeExplicitAutograd, m) {
  m.impl("_isa_active", TORCH_BOX(&active));
  m.impl("_isa_available", TORCH_BOX(&available));
  m.impl("_isa_set", TORCH_BOX(&set_active));
}

}  // namespace zeropoint::binding
