"""Softmax of 8-bit codes: exponentials are 256 numbers made on the host, and sums keep the contract's order.

May import: ``backends.triton``, ``ops.activation`` (exponentials).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropoint.backends.triton._core import bits, ceil_div, code_from, is_wide, launch, real, tile
from zeropoint.ops import activation as reference

__all__ = ["softmax"]


@triton.jit(do_not_specialize=["inverse", "out_zero", "low", "high"])
def _softmax(
    x_ptr,
    exps_ptr,
    out_ptr,
    rows,
    count,
    inverse,
    out_zero,
    low,
    high,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Some rows: the largest code, the total in eight lanes, the outputs."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    lane = tl.arange(0, 8)
    start = x_ptr + (m * count)[:, None]
    largest = tl.full((BLOCK_M, 8), -1024, tl.int32)
    for i in range(0, count, 8):
        inside = (m < rows)[:, None] & (i + lane < count)[None, :]
        codes = tl.load(start + (i + lane)[None, :], mask=inside, other=0).to(tl.int32)
        largest = tl.maximum(largest, tl.where(inside, codes, -1024))
    top = tl.max(largest, axis=1)[:, None]
    total = tl.zeros((BLOCK_M, 8), tl.float64)
    for i in range(0, count, 8):
        inside = (m < rows)[:, None] & (i + lane < count)[None, :]
        codes = tl.load(start + (i + lane)[None, :], mask=inside, other=0).to(tl.int32)
        total += tl.load(exps_ptr + (top - codes), mask=inside, other=0.0)
    pairs = tl.sum(tl.reshape(total, (BLOCK_M, 2, 4)), axis=1)
    whole = tl.sum(tl.sum(tl.reshape(pairs, (BLOCK_M, 2, 2)), axis=1), axis=1)[:, None]
    factor = real(inverse) / whole
    for i in range(0, count, 8):
        inside = (m < rows)[:, None] & (i + lane < count)[None, :]
        codes = tl.load(start + (i + lane)[None, :], mask=inside, other=0).to(tl.int32)
        y = tl.load(exps_ptr + (top - codes), mask=inside, other=0.0) * factor
        code = code_from(y, out_zero, low, high, WIDE)
        tl.store(out_ptr + (m * count)[:, None] + (i + lane)[None, :], code.to(out_ptr.dtype.element_ty), mask=inside)


@functools.lru_cache(maxsize=1024)
def _exps_on(device: torch.device, scale: float) -> Tensor:
    """The exponentials, copied to a device once."""
    return reference._exps(range(256), scale).to(device)


def softmax(
    x: Tensor, x_scale: float, dim: int, out_scale: float, out_zero_point: int, out_dtype: torch.dtype
) -> Tensor:
    if x.dtype == torch.int32 or x.numel() == 0 or x.dim() == 0:
        return reference.softmax_reference(x, x_scale, dim, out_scale, out_zero_point, out_dtype)
    last = x.movedim(dim, -1).contiguous()
    result = torch.empty_like(last, dtype=out_dtype)
    count = last.shape[-1]
    rows = last.numel() // count
    block = tile(rows, 16, 1024)
    limits = torch.iinfo(out_dtype)
    launch(
        _softmax,
        (ceil_div(rows, block),),
        last,
        _exps_on(x.device, x_scale),
        result,
        rows,
        count,
        bits(1.0 / out_scale),
        out_zero_point,
        limits.min,
        limits.max,
        WIDE=is_wide(out_dtype, out_zero_point),
        BLOCK_M=block,
    )
    result = result.movedim(-1, dim)
    out = torch.empty_like(x, dtype=out_dtype)
    return result if out.stride() == result.stride() else out.copy_(result)
