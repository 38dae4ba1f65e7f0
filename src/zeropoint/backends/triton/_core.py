"""What every kernel shares: rounding, codes, numbers that arrive without loss, and launches.

Triton passes a Python float as float32, so float64 numbers travel as the 64 bits that they are (:func:`bits`,
``real``). Nothing here relies on a library of the device: the same text runs in Triton's interpreter.

May import: torch, triton, ``grid``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropoint.grid import compute_dtype

__all__ = [
    "INTERPRETED",
    "bits",
    "ceil_div",
    "channel_places",
    "code_from",
    "dense",
    "finite_low_high",
    "inverse",
    "is_wide",
    "launch",
    "lines",
    "narrowed",
    "places",
    "power_of_two",
    "quotient",
    "real",
    "replaced_launch",
    "rint",
    "same_layout",
    "steps_of",
    "tile",
    "triton_dtype",
]

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on the CPU."""

_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}
_8_BITS = (torch.int8, torch.uint8)


# --- on the host --------------------------------------------------------------------------------------------------


def bits(value: float) -> int:
    """A float64 number as an integer, which a kernel turns back with ``real``."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def inverse(scale: float, dtype: torch.dtype) -> float:
    """``1 / scale`` as ``grid.position`` takes it for an input of ``dtype``."""
    if compute_dtype(dtype) == torch.float64:
        return 1.0 / scale
    with np.errstate(all="ignore"):
        return float(np.float32(1.0) / np.float32(scale))


def quotient(in_scale: float, out_scale: float) -> float:
    """``grid.multiplier`` of two numbers, on the host."""
    with np.errstate(all="ignore"):
        return float(np.float32(in_scale / out_scale))


def triton_dtype(dtype: torch.dtype) -> Any:
    """The dtype in which a kernel computes on floats of ``dtype``."""
    return _DTYPES[compute_dtype(dtype)]


def is_wide(dtype: torch.dtype, zero_point: int = 0) -> bool:
    """Whether codes of ``dtype`` and this zero point need 64 bits on the way; 8-bit codes take 32."""
    return dtype not in _8_BITS or abs(zero_point) > 1024


def power_of_two(size: int, low: int, high: int) -> int:
    """The power of two that is not below ``size``, in ``[low, high]``."""
    return max(low, min(high, 1 << max(size - 1, 0).bit_length()))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def tile(size: int, device: int, interpreted: int) -> int:
    """A tile's length: the interpreter takes long ones, since there a step costs the same for any length."""
    return power_of_two(size, 16, interpreted if INTERPRETED else device)


def lines(count: int) -> tuple[int, int]:
    """Programs and elements a program of a kernel over ``count`` elements in memory order."""
    block = tile(count, 1024, 1 << 16)
    return ceil_div(count, block), block


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape have their elements in the same order in memory."""
    return all(p == q for size, p, q in zip(a.shape, a.stride(), b.stride(), strict=True) if size > 1)


def dense(x: Tensor, like: Tensor) -> Tensor:
    """``x`` without gaps, in the memory order of ``like``, which has its shape and none; a copy only where needed."""
    return x if same_layout(x, like) else torch.empty_like(like, dtype=x.dtype).copy_(x)


def channel_places(x: Tensor, axis: int) -> tuple[int, int]:
    """Step and number of the channels of a tensor without gaps: ``channel = place // step % number``."""
    return max(x.stride(axis), 1), x.shape[axis]


_replaced: Callable[..., None] | None = None


@contextmanager
def replaced_launch(instead: Callable[..., None]) -> Iterator[None]:
    """Inside this context, ``instead`` gets every launch's kernel, grid, arguments and settings: for tests."""
    global _replaced
    _replaced = instead
    try:
        yield
    finally:
        _replaced = None


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **settings: Any) -> None:
    """Runs a kernel on the device of its first argument; products and sums stay apart, as the contract wants.

    A grid without programs is nothing to do.
    """
    if 0 in grid:
        return
    device = arguments[0].device
    if _replaced is not None:
        _replaced(kernel, grid, *arguments, **settings)
    elif device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](*arguments, enable_fp_fusion=False, **settings)
    elif INTERPRETED:
        with np.errstate(all="ignore"):  # codes wrap and ranges overflow without a word on a device
            kernel[grid](*arguments, enable_fp_fusion=False, **settings)
    else:
        kernel[grid](*arguments, enable_fp_fusion=False, **settings)


# --- in kernels ---------------------------------------------------------------------------------------------------


@triton.jit
def real(word):
    """The float64 number of 64 bits."""
    return word.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def places(count, BLOCK: tl.constexpr):
    """Places of one program's elements, and which of them exist: of 32 bits, as ``count``, unless that needs 64.

    Dividing 64-bit numbers is what a device does slowest. In the last program 32 bits may run over.
    """
    at = (tl.program_id(0) + (count - count)) * BLOCK + tl.arange(0, BLOCK)
    return at, (at >= 0) & (at < count)


@triton.jit
def rint(x):
    """The nearest whole number, ties to even: adding 2**23 (2**52) leaves no place for a fraction."""
    if x.dtype == tl.float64:
        shifted = tl.where(
            x >= 0, (x + 4503599627370496.0) - 4503599627370496.0, (x - 4503599627370496.0) + 4503599627370496.0
        )
        whole = tl.where(tl.abs(x) < 4503599627370496.0, shifted, x)
    else:
        shifted = tl.where(x >= 0, (x + 8388608.0) - 8388608.0, (x - 8388608.0) + 8388608.0)
        whole = tl.where(tl.abs(x) < 8388608.0, shifted, x)
    return whole


@triton.jit
def narrowed(value, DTYPE: tl.constexpr):
    """A float in an output's dtype, to nearest, ties to even: for bfloat16 Triton's interpreter would cut instead."""
    if DTYPE == tl.bfloat16:
        word = value.to(tl.float32).to(tl.uint32, bitcast=True)
        upper = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
        upper = tl.where(value == value, upper, 0x7FC0)
        result = upper.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = value.to(DTYPE)
    return result


@triton.jit
def code_from(y, zero_point, low, high, WIDE: tl.constexpr):
    """``grid.clamp_codes`` of ``rint(y)``. Without WIDE, codes and zero point have 8 bits, and 32 hold every sum."""
    y = rint(tl.where(y == y, y, 0.0))
    if WIDE:
        y = tl.minimum(tl.maximum(y, -4611686018427387904.0), 4611686018427387904.0)
        code = y.to(tl.int64) + zero_point
    else:
        y = tl.minimum(tl.maximum(y, -4096.0), 4096.0)
        code = y.to(tl.int32) + zero_point
    return tl.minimum(tl.maximum(code, low), high)


@triton.jit
def steps_of(codes, zero_point, WIDE: tl.constexpr):
    """Codes counted from the zero point, exactly."""
    if WIDE:
        steps = codes.to(tl.int64) - zero_point
    else:
        steps = codes.to(tl.int32) - zero_point
    return steps


@triton.jit
def finite_low_high(x, inside, LARGEST: tl.constexpr):
    """``x`` where it counts towards a minimum, and towards a maximum: infinities of the other sign elsewhere."""
    counts = inside & (tl.abs(x) <= LARGEST)
    return tl.where(counts, x, float("inf")), tl.where(counts, x, float("-inf"))
