"""Compiles kernels for a GPU where there is none: launches go to Triton's compiler and stop there.

A kernel that the interpreter runs may still be no program for a device: this shows types, loops and branches that the
compiler refuses, and everything up to the machine code, but runs nothing. Outputs of operators are garbage.

Run as a program (``python triton_offline.py 86``), it compiles the kernels of every operator and looks at their code:
no product and sum may have become one rounding, no quotient an approximation, and tensor cores must multiply the bytes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from zeropoint.backends import triton as backend
from zeropoint.backends.triton import _core


class _Driver:
    """As much of a driver as the compiler asks for."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        raise RuntimeError("there is no device")


@contextmanager
def compiler(arch: int) -> Iterator[list[tuple[str, str]]]:
    """Inside, launches only compile for compute capability ``arch`` (86 is 8.6); gives the kernels' names and PTX."""
    assert not triton.knobs.runtime.interpret
    seen: list[tuple[str, str]] = []

    def compile_only(kernel: Any, grid: tuple[int, ...], *arguments: Any, **settings: Any) -> None:
        if 0 not in grid:
            compiled = kernel.warmup(*arguments, grid=grid, enable_fp_fusion=False, **settings)
            seen.append((kernel.__name__, compiled.asm["ptx"]))

    before = driver._active
    driver.set_active(_Driver(arch))
    try:
        with _core.replaced_launch(compile_only):
            yield seen
    finally:
        driver._active = before


def compile_everything() -> None:
    """One call of every operator, and of every way to multiply."""

    def run(name: str, *arguments: Any) -> Any:
        return backend.function(name)(*arguments)

    u8, i8, i32, f32 = torch.uint8, torch.int8, torch.int32, torch.float32
    x, weight, one, zero = (
        torch.randn(70, 96),
        torch.zeros(48, 96, dtype=i8),
        torch.ones(48),
        torch.zeros(48, dtype=i32),
    )
    to_i8, to_u8 = (0.1, 3, -128, 127, i8), (0.1, 3, 0, 255, u8)
    for values in (x, x.double(), x.bfloat16()):
        run("dequantize_per_tensor", run("quantize_per_tensor", values, *to_i8), 0.1, 3, values.dtype)
        run("dynamic_qparams", values, 0, 255)
        run("fake_quantize_backward", *run("fake_quantize_per_tensor", values, one[:1], zero[:1], 0, 255))
        run("fake_quantize_learnable_backward", values, values, one[:1], zero[:1], None, 0, 255, 1.0)
    run("dynamic_range", x)
    run("quantize_per_tensor", x, 0.1, 3, -(2**31), 2**31 - 1, i32)
    for zeros in (torch.zeros(96, dtype=torch.int64), torch.zeros(96)):
        codes = run("quantize_per_channel", x, torch.ones(96), zeros, 1, *to_u8[2:])
        run("dequantize_per_channel", codes, torch.ones(96), zeros, 1, f32)
        run("fake_quantize_per_channel", x, torch.ones(96), zeros, 1, 0, 255)
    for axis, ends in ((0, (0, 255)), (1, (-(2**31), 2**31 - 1))):  # runs, neighbouring channels; narrow, wide
        grids = (torch.ones(x.shape[axis]), torch.zeros(x.shape[axis], dtype=i32))
        run("fake_quantize_learnable_backward", x, x, *grids, axis, *ends, 1.0)
    run("requantize", codes, 0.1, 3, *to_i8)
    for axis, symmetric in ((None, False), (0, True)):
        buffers = [torch.zeros(70 if axis == 0 else 1) for _ in range(3)]
        grid = torch.zeros(buffers[0].numel(), dtype=i32)
        run("moving_average_observe", x, *buffers, grid, torch.ones(()), 0.01, 0, 255, axis, symmetric, 128, True)

    for rows in (1, 20, 600):
        activations = torch.zeros(rows, 96, dtype=u8)
        run("linear", activations, 0.1, 3, weight, one, zero, one, *to_u8, run("linear_pack", weight))
        run("linear_dynamic", torch.randn(rows, 96).half(), weight, one[:1], zero, None, False, True, None)
    multiply = backend.function("linear").__globals__["multiply"]
    for parts, engine in ((3, "triton"), (None, "int_mm")):
        out = torch.empty(70, 48, dtype=u8)
        grids = (zero, _core.bits(0.1), 3, one, zero, None, out)
        multiply(torch.zeros(70, 96, dtype=u8), weight, *grids, parts=parts, engine=engine)
    long = torch.zeros(70, 40000, dtype=i8)
    run("linear", long, 0.1, 3, torch.zeros(48, 40000, dtype=i8), one, zero, None, *to_i8, None)
    a = torch.zeros(3, 20, 32, dtype=u8)
    run("matmul", a, 0.1, 3, a.transpose(1, 2), 0.1, 3, *to_u8)
    run("matmul", a.transpose(1, 2), 0.1, 3, a, 0.1, 3, *to_u8)
    b = torch.zeros(2, 256, 512, dtype=u8)
    run("matmul", b.transpose(1, 2), 0.1, 3, b, 0.1, 3, *to_u8)

    for rank, groups, kernel in ((1, 1, 3), (2, 2, 3), (3, 48, 3)):
        picture = torch.zeros(2, 48, *[9] * rank, dtype=u8)
        taps = torch.zeros(48, 48 // groups, *[kernel] * rank, dtype=i8)
        window = ([2] * rank, [1] * (2 * rank), [1] * rank, groups)
        run("conv", picture, 0.1, 3, taps, one, zero, one, *window, *to_u8, run("conv_pack", taps, groups))
        run("conv_dynamic", picture.float(), taps, one, zero, None, *window, False, True, None)

    picture = torch.zeros(2, 48, 9, 9, dtype=u8)
    for dtype in (u8, i32):
        run("batch_norm", picture.to(dtype), 0.1, 3, one, one, one, one, 1e-5, *to_u8)
        run("group_norm", picture.to(dtype), 0.1, 3, 4, one, None, 1e-5, *to_u8)
        run("layer_norm", picture.to(dtype), 0.1, 3, (9, 9), None, torch.zeros(9, 9), 1e-5, *to_u8)
        for name in ("add", "mul", "div"):
            run(name, picture.to(dtype), 0.1, 3, picture[:, :, :1, :1], 0.1, 3, *to_u8)
            run(name, picture, 0.1, 3, picture, 0.1, 3, *to_u8)
        run("prelu", picture.to(dtype), 0.1, 3, one, *to_u8)
    run("lookup", picture, torch.arange(256))
    run("softmax", picture, 0.1, 1, 1 / 256, 0, u8)
    run("max_pool", picture, [3, 3], [2, 2], [1, 1], [1, 1], True)
    run("avg_pool", picture, 3, [3, 3], [2, 2], [1, 1], True, False, None)
    run("adaptive_avg_pool", picture, 3, [2, 2])
    run("mean", picture, 3, [2, 3], True)
    for bits in (8, 4):
        table = (torch.zeros(9, 48, dtype=u8), one[:9], one[:9], bits, 48)
        run("embedding", zero, *table)
        run("embedding_bag", zero, torch.tensor([0, 3, 48]), *table, "max", one, 0)
        for seed in (None, 2**32 - 1):
            packed = run("block_pack", x.view(-1), 3, bits, 64, seed)
        run("block_sum", packed, bits, 64)
        run("block_unpack", packed, bits, 64, 6720)
    run("row_range", x.view(-1), 64)
    run("row_sum", run("row_quantize", x.view(-1), torch.ones(2, 105), 64)[None], torch.ones(1, 2, 105), 6720)


def main() -> None:
    with compiler(int(sys.argv[1])) as seen:
        compile_everything()
    wrong = r"\bfma\.rn|\bdiv\.(full|approx)|\b(rcp|sqrt|rsqrt|ex2|lg2)\.approx|\.ftz"
    found = {name: match.group() for name, code in seen if (match := re.search(wrong, code))}
    assert not found, found
    products = [code for name, code in seen if name in ("_gemm", "_conv")]
    assert products
    assert all(re.search(r"(mma|wgmma)\S*\.s32\.s8\.s8", code) for code in products)
    print(f"{len(seen)} programs of {len({name for name, _ in seen})} kernels")


if __name__ == "__main__":
    main()
