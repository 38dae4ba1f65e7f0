// One function an instruction set: what `run` calls. Private to csrc/gemm.
//
// The files that hold them are compiled for instructions that the processor may lack, so they instantiate nothing of
// the standard library: the linker could keep their copy of an inline function for the whole program.
#pragma once
#include "gemm/kernel.h"

namespace zeropoint::gemm {

struct Job {
  const Packed* packed;
  const uint8_t* a;  // rows [0, m), codes of all K
  int64_t a_stride, m;
  int64_t n_begin, n_end;
  int64_t group_begin, group_end;  // the part of K to sum over, in groups of kGroup
  const Epilogue* epilogue;
  const Walk* walk = nullptr;  // instead of a_stride, for all of K; codes of `walk_bytes`
};

// An array of one tile's sums, row by row, in the order of the columns.
void store_tile_portable(const int32_t* tile, int64_t tile_stride, int64_t row, int64_t rows, int64_t column,
                         int64_t columns, const Packed& packed, const Epilogue& epilogue);

// A panel of the avx2 kernel's Form::quads as Form::words has it, with what was cut off: [K/2][16][2].
void restore_words_avx2(const Packed& packed, int64_t panel, int8_t* words);

void run_portable(const Job& job);
void run_avx2(const Job& job);
void run_avx_vnni(const Job& job);
void run_avx512_vnni(const Job& job);
void run_amx_int8(const Job& job);
void run_neon_dot(const Job& job);
void run_neon_i8mm(const Job& job);

}  // namespace zeropoint::gemm
