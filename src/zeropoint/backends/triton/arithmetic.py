"""Element-wise operators: sum, product and quotient of two tensors of codes, PReLU, and tables of 256 entries.

May import: ``dtypes``, ``backends.triton``, ``ops.arithmetic`` (layouts).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropoint.backends.triton._core import (
    bits,
    channel_places,
    code_from,
    dense,
    is_wide,
    launch,
    lines,
    places,
    quotient,
    real,
    same_layout,
    steps_of,
)
from zeropoint.dtypes import as_qdtype
from zeropoint.ops.arithmetic import _broadcast_empty

__all__ = ["add", "div", "lookup", "mul", "prelu"]


# --- kernels ------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["a_zero", "b_zero", "first", "second", "out_zero", "low", "high"])
def _binary(
    a_ptr,
    b_ptr,
    out_ptr,
    count,
    a_zero,
    b_zero,
    first,
    second,
    out_zero,
    low,
    high,
    size_1,
    size_2,
    size_3,
    a_0,
    a_1,
    a_2,
    a_3,
    b_0,
    b_1,
    b_2,
    b_3,
    OPERATION: tl.constexpr,
    FLAT: tl.constexpr,
    WIDE_A: tl.constexpr,
    WIDE_B: tl.constexpr,
    WIDE_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Two operands in the output's memory order (FLAT), or in up to four dimensions with steps of their own."""
    at, inside = places(count, BLOCK)
    if FLAT:
        a_at, b_at = at, at
    else:
        i_3 = (at % size_3).to(tl.int64)
        i_2 = (at // size_3 % size_2).to(tl.int64)
        i_1 = (at // size_3 // size_2 % size_1).to(tl.int64)
        i_0 = (at // size_3 // size_2 // size_1).to(tl.int64)
        a_at = i_0 * a_0 + i_1 * a_1 + i_2 * a_2 + i_3 * a_3
        b_at = i_0 * b_0 + i_1 * b_1 + i_2 * b_2 + i_3 * b_3
    a = steps_of(tl.load(a_ptr + a_at, mask=inside, other=0), a_zero, WIDE_A)
    b = steps_of(tl.load(b_ptr + b_at, mask=inside, other=0), b_zero, WIDE_B)
    if OPERATION == "add":
        y = a.to(tl.float32) * real(first).to(tl.float32) + b.to(tl.float32) * real(second).to(tl.float32)
    elif OPERATION == "mul":
        if WIDE_A or WIDE_B:
            product = (a.to(tl.float64) * b.to(tl.float64)).to(tl.float32)
        else:
            product = (a * b).to(tl.float32)
        y = product * real(first).to(tl.float32)
    else:
        y = a.to(tl.float64) / b.to(tl.float64) * real(first)
    code = code_from(y, out_zero, low, high, WIDE_OUT)
    tl.store(out_ptr + at, code.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["x_zero", "x_scale", "out_scale", "above", "out_zero", "low", "high"])
def _prelu(
    x_ptr,
    slope_ptr,
    out_ptr,
    count,
    step,
    channels,
    x_zero,
    x_scale,
    out_scale,
    above,
    out_zero,
    low,
    high,
    WIDE_IN: tl.constexpr,
    WIDE_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at, inside = places(count, BLOCK)
    steps = steps_of(tl.load(x_ptr + at, mask=inside, other=0), x_zero, WIDE_IN)
    slope = tl.load(slope_ptr + at // step % channels, mask=inside, other=0.0).to(tl.float64)
    below = (slope * real(x_scale) / real(out_scale)).to(tl.float32)
    factor = tl.where(steps < 0, below, real(above).to(tl.float32))
    code = code_from(steps.to(tl.float32) * factor, out_zero, low, high, WIDE_OUT)
    tl.store(out_ptr + at, code.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _lookup(codes_ptr, table_ptr, out_ptr, count, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    at, inside = places(count, BLOCK)
    place = tl.load(codes_ptr + at, mask=inside, other=0).to(tl.int32) - FIRST
    tl.store(out_ptr + at, tl.load(table_ptr + place, mask=inside, other=0), mask=inside)


# --- operators ----------------------------------------------------------------------------------------------------


def _collapsed(out: Tensor, a: Tensor, b: Tensor) -> tuple[list[int], list[int], list[int]] | None:
    """Sizes of the output's dimensions in memory order and the steps of both operands, as four dimensions.

    Neighbouring dimensions become one where both operands allow it; None if more than four remain.
    """
    order = sorted((d for d in range(out.dim()) if out.shape[d] > 1), key=out.stride, reverse=True)
    sizes: list[int] = []
    steps: list[list[int]] = [[], []]
    for d in order:
        size, own = out.shape[d], (a.stride(d), b.stride(d))
        if sizes and all(part[-1] == step * size for part, step in zip(steps, own, strict=True)):
            sizes[-1] *= size
            for part, step in zip(steps, own, strict=True):
                part[-1] = step
        else:
            sizes.append(size)
            for part, step in zip(steps, own, strict=True):
                part.append(step)
    if len(sizes) > 4:
        return None
    missing = 4 - len(sizes)
    return [1] * missing + sizes, [0] * missing + steps[0], [0] * missing + steps[1]


def _run(
    operation: str,
    a: Tensor,
    a_zero_point: int,
    b: Tensor,
    b_zero_point: int,
    first: float,
    second: float,
    out_zero_point: int,
    out_min: int,
    out_max: int,
    out_dtype: torch.dtype,
) -> Tensor:
    out = _broadcast_empty(a, 1.0, 0, b, 1.0, 0, 1.0, 0, 0, 0, out_dtype)
    left, right = a.expand(out.shape), b.expand(out.shape)
    flat = same_layout(left, out) and same_layout(right, out)
    shape = ([1] * 4, [0] * 4, [0] * 4) if flat else _collapsed(out, left, right)
    if shape is None:
        left, right, flat, shape = dense(left, out), dense(right, out), True, ([1] * 4, [0] * 4, [0] * 4)
    programs, block = lines(out.numel())
    launch(
        _binary,
        (programs,),
        left,
        right,
        out,
        out.numel(),
        a_zero_point,
        b_zero_point,
        bits(first),
        bits(second),
        out_zero_point,
        out_min,
        out_max,
        *shape[0][1:],
        *shape[1],
        *shape[2],
        OPERATION=operation,
        FLAT=flat,
        WIDE_A=is_wide(a.dtype, a_zero_point),
        WIDE_B=is_wide(b.dtype, b_zero_point),
        WIDE_OUT=is_wide(out_dtype, out_zero_point),
        BLOCK=block,
    )
    return out


def add(
    a: Tensor,
    a_scale: float,
    a_zero_point: int,
    b: Tensor,
    b_scale: float,
    b_zero_point: int,
    out_scale: float,
    out_zero_point: int,
    out_min: int,
    out_max: int,
    out_dtype: torch.dtype,
) -> Tensor:
    first, second = quotient(a_scale, out_scale), quotient(b_scale, out_scale)
    return _run("add", a, a_zero_point, b, b_zero_point, first, second, out_zero_point, out_min, out_max, out_dtype)


def mul(
    a: Tensor,
    a_scale: float,
    a_zero_point: int,
    b: Tensor,
    b_scale: float,
    b_zero_point: int,
    out_scale: float,
    out_zero_point: int,
    out_min: int,
    out_max: int,
    out_dtype: torch.dtype,
) -> Tensor:
    factor = quotient(a_scale * b_scale, out_scale)
    return _run("mul", a, a_zero_point, b, b_zero_point, factor, 0.0, out_zero_point, out_min, out_max, out_dtype)


def div(
    a: Tensor,
    a_scale: float,
    a_zero_point: int,
    b: Tensor,
    b_scale: float,
    b_zero_point: int,
    out_scale: float,
    out_zero_point: int,
    out_min: int,
    out_max: int,
    out_dtype: torch.dtype,
) -> Tensor:
    factor = a_scale / b_scale / out_scale
    return _run("div", a, a_zero_point, b, b_zero_point, factor, 0.0, out_zero_point, out_min, out_max, out_dtype)


def prelu(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    slope: Tensor,
    out_scale: float,
    out_zero_point: int,
    out_min: int,
    out_max: int,
    out_dtype: torch.dtype,
) -> Tensor:
    out = torch.empty_like(x, dtype=out_dtype)
    many = x.dim() > 1 and slope.numel() > 1
    if slope.numel() != (x.shape[1] if many else 1):
        raise RuntimeError(f"prelu takes one slope, or one a channel, got {slope.numel()} for shape {tuple(x.shape)}")
    programs, block = lines(x.numel())
    launch(
        _prelu,
        (programs,),
        dense(x, out),
        slope.contiguous(),
        out,
        x.numel(),
        *(channel_places(out, 1) if many else (1, 1)),
        x_zero_point,
        bits(x_scale),
        bits(out_scale),
        bits(quotient(x_scale, out_scale)),
        out_zero_point,
        out_min,
        out_max,
        WIDE_IN=is_wide(x.dtype, x_zero_point),
        WIDE_OUT=is_wide(out_dtype, out_zero_point),
        BLOCK=block,
    )
    return out


def lookup(codes: Tensor, table: Tensor) -> Tensor:
    if codes.dtype not in (torch.int8, torch.uint8) or table.numel() != 256:
        raise RuntimeError(f"lookup takes 8-bit codes and 256 entries, got {codes.dtype} and {table.numel()}")
    out = torch.empty_like(codes, dtype=table.dtype)
    programs, block = lines(codes.numel())
    launch(
        _lookup,
        (programs,),
        dense(codes, out),
        table.contiguous(),
        out,
        codes.numel(),
        FIRST=as_qdtype(codes.dtype).qmin,
        BLOCK=block,
    )
    return out
