// zeropoint::run_plan on the CPU: hands the memory of tensors to a program.
#include "plan/plan.h"

#include <memory>
#include <vector>

#include "common.h"

namespace zeropoint::binding {
namespace {

plan::Memory memory_of(const Tensor& x, bool writable, const char* name) {
  STD_TORCH_CHECK(x.is_cpu(), "run_plan: ", name, " must be on the CPU");
  // A program addresses bytes from the first element on: what it may touch is what the strides reach.
  int64_t reach = x.numel() == 0 ? 0 : 1;
  for (int64_t d = 0; reach != 0 && d < x.dim(); ++d) reach += (x.size(d) - 1) * x.stride(d);
  return {static_cast<uint8_t*>(x.mutable_data_ptr()), reach * static_cast<int64_t>(x.element_size()), writable};
}

// The arena of the calling thread. It grows to the largest that any plan asked for.
uint8_t* arena_of(int64_t bytes) {
  constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(uint8_t* memory) const { ::operator delete[](memory, kAlignment); }
  };
  thread_local std::unique_ptr<uint8_t[], Free> memory;
  thread_local int64_t size = 0;
  if (bytes > size) {
    memory.reset();
    memory.reset(new (kAlignment) uint8_t[static_cast<size_t>(bytes)]);
    size = bytes;
  }
  return memory.get();
}

void run_plan(const Tensor& program, std::vector<Tensor> constants, std::vector<Tensor> inputs,
              std::vector<Tensor> outputs, int64_t arena) {
  STD_TORCH_CHECK(program.is_cpu() && program.is_contiguous() && program.scalar_type() == ScalarType::Long,
                  "run_plan takes a program of int64 words on the CPU");
  STD_TORCH_CHECK(0 <= arena && arena <= (int64_t{1} << 40), "run_plan: an arena of ", arena, " bytes");
  std::vector<plan::Memory> memories = {{arena_of(arena), arena, true}};
  memories.reserve(1 + inputs.size() + outputs.size() + constants.size());
  for (const Tensor& x : inputs) memories.push_back(memory_of(x, false, "an input"));
  for (const Tensor& x : outputs) memories.push_back(memory_of(x, true, "an output"));
  for (const Tensor& x : constants) memories.push_back(memory_of(x, false, "a constant"));
  plan::run(static_cast<const int64_t*>(program.const_data_ptr()), program.numel(), memories, torch_parallel());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zeropoint, CPU, m) { m.impl("run_plan", TORCH_BOX(&run_plan)); }

}  // namespace zeropoint::binding
