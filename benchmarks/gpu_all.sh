#!/usr/bin/env bash
# Everything on a GPU in one go, since time on one is short: builds, checks that the integers are right, then times every
# suite, and leaves one folder.
#
#     benchmarks/gpu_all.sh [FOLDER]      # default: benchmarks/results/gpu-<name of the GPU>-<date>
#
# PYTHON chooses the interpreter: one that has torch with CUDA and Triton. QUICK=1 takes few cases of every suite.
# A step that fails is named at the end, and the others still run.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}"
unset TRITON_INTERPRET

name="$("$PYTHON" -c 'import torch; print(torch.cuda.get_device_name().replace(" ", "-"))')" || {
  echo "torch sees no CUDA device here" >&2
  exit 1
}
folder="${1:-benchmarks/results/gpu-$name-$(date -u +%Y%m%d-%H%M)}"
mkdir -p "$folder"
folder="$(cd "$folder" && pwd)"
failed=()

step() { # name, command: output goes to the terminal and to <name>.txt
  local label="$1"
  shift
  echo "=== $label: $*"
  "$@" 2>&1 | tee "$folder/$label.txt"
  [ "${PIPESTATUS[0]}" = 0 ] || failed+=("$label")
}

{ nvidia-smi; "$PYTHON" -m pip list; git rev-parse HEAD; } >"$folder/machine.txt" 2>&1

# The native library: results on a GPU are compared with the CPU's. Without a compiler the reference serves.
build() {
  cmake -S . -B build/gpu -G Ninja && cmake --build build/gpu --target zeropoint_native
}
if "$PYTHON" -c 'import sys, zeropoint; sys.exit(not zeropoint.backends.is_native())' 2>/dev/null; then
  echo "the native library is there"
elif command -v cmake ninja >/dev/null; then
  step build build
  [ -f build/gpu/zeropoint_native.so ] && export ZEROPOINT_NATIVE="$PWD/build/gpu/zeropoint_native.so"
fi

# Right first: the same tests that run in the interpreter, on the device.
step tests "$PYTHON" -m pytest -q -m cuda tests/cuda

quick=()
[ -n "${QUICK:-}" ] && quick=(--quick)
for suite in quantized_packing linear conv elementwise fake_quantize networks recurrent ddp; do
  step "$suite" "$PYTHON" -m benchmarks --device cuda --suite "$suite" --results "$folder" "${quick[@]+"${quick[@]}"}"
done

echo "results: $folder"
if [ "${#failed[@]}" -gt 0 ]; then
  echo "failed: ${failed[*]}" >&2
  exit 1
fi
