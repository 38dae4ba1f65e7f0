"""Rows of embeddings: 8- or 4-bit codes, each row on a grid of its own.

An index outside the table cannot raise without waiting for the device: its row is NaN.

May import: ``backends.triton``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zeropoint.backends.triton._core import INTERPRETED, ceil_div, launch, power_of_two

__all__ = ["embedding", "embedding_bag"]


# --- kernels ------------------------------------------------------------------------------------------------------


@triton.jit
def _row(weight_ptr, scale_ptr, zero_ptr, index, columns_at, rows, width, inside, FOUR_BITS: tl.constexpr):
    """Real values of some columns of some rows."""
    known = (index >= 0) & (index < rows)
    shown = inside & known
    if FOUR_BITS:
        pair = tl.load(weight_ptr + index * width + columns_at // 2, mask=shown, other=0).to(tl.int32)
        codes = tl.where(columns_at % 2 == 0, pair & 15, pair >> 4)
    else:
        codes = tl.load(weight_ptr + index * width + columns_at, mask=shown, other=0).to(tl.int32)
    zero = tl.load(zero_ptr + index, mask=known, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + index, mask=known, other=float("nan")).to(tl.float32)
    return (codes.to(tl.float32) - zero) * scale


@triton.jit
def _embedding(
    index_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    count,
    columns,
    rows,
    width,
    FOUR_BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (m < count)[:, None] & (n < columns)[None, :]
    index = tl.load(index_ptr + m, mask=m < count, other=0).to(tl.int64)[:, None]
    value = _row(weight_ptr, scale_ptr, zero_ptr, index, n[None, :], rows, width, inside, FOUR_BITS)
    tl.store(out_ptr + m[:, None] * columns + n[None, :], value, mask=inside)


@triton.jit(do_not_specialize=["padding"])
def _embedding_bag(
    index_ptr,
    bounds_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    own_ptr,
    out_ptr,
    columns,
    rows,
    width,
    padding,
    FOUR_BITS: tl.constexpr,
    MODE: tl.constexpr,
    HAS_OWN: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some columns of one bag: its rows one after the other, each sum rounded by itself."""
    bag = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < columns
    start, end = tl.load(bounds_ptr + bag).to(tl.int64), tl.load(bounds_ptr + bag + 1).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    taken = tl.zeros((BLOCK,), tl.int32)
    for at in range(start, end):
        index = tl.load(index_ptr + at).to(tl.int64) + tl.zeros((BLOCK,), tl.int64)
        value = _row(weight_ptr, scale_ptr, zero_ptr, index, n, rows, width, inside, FOUR_BITS)
        if HAS_OWN:
            value = value * tl.load(own_ptr + at).to(tl.float32)
        if MODE == "max":
            joined = tl.where((total != total) | (value != value), float("nan"), tl.maximum(total, value))
        else:
            joined = total + value
        joined = tl.where(taken == 0, value, joined)
        if HAS_PADDING:
            counts = index != padding
            total = tl.where(counts, joined, total)
            taken += counts.to(tl.int32)
        else:
            total = joined
            taken += 1
    if MODE == "mean":
        total = tl.div_rn(total, tl.maximum(taken, 1).to(tl.float32))
    tl.store(out_ptr + bag * columns + n, total, mask=inside)


# --- operators ----------------------------------------------------------------------------------------------------


def _check(weight: Tensor, scale: Tensor, zero_point: Tensor, bits: int, columns: int) -> None:
    if bits not in (4, 8) or weight.shape[1] * 8 // bits < columns:
        raise RuntimeError(f"embedding rows of {weight.shape[1]} bytes do not hold {columns} columns of {bits} bits")
    if not scale.numel() == zero_point.numel() == weight.shape[0]:
        raise RuntimeError(f"{weight.shape[0]} rows need as many grids, got {scale.numel()} and {zero_point.numel()}")


def embedding(indices: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor, bits: int, columns: int) -> Tensor:
    _check(weight, scale, zero_point, bits, columns)
    out = scale.new_empty((*indices.shape, columns))
    count = indices.numel()
    block_m = power_of_two(count, 1, 1024 if INTERPRETED else 4)
    block_n = power_of_two(columns, 16, 1024 if INTERPRETED else 256)
    launch(
        _embedding,
        (ceil_div(count, block_m), ceil_div(columns, block_n)),
        indices.contiguous(),
        weight.contiguous(),
        scale.contiguous(),
        zero_point.contiguous(),
        out,
        count,
        columns,
        weight.shape[0],
        weight.shape[1],
        FOUR_BITS=bits == 4,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
    )
    return out


def embedding_bag(
    indices: Tensor,
    bounds: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    bits: int,
    columns: int,
    mode: str,
    per_sample_weights: Tensor | None,
    padding_idx: int | None,
) -> Tensor:
    _check(weight, scale, zero_point, bits, columns)
    bags = bounds.shape[0] - 1
    out = scale.new_empty((bags, columns))
    block = power_of_two(columns, 16, 1024 if INTERPRETED else 256)
    own = scale if per_sample_weights is None else per_sample_weights
    launch(
        _embedding_bag,
        (bags, ceil_div(columns, block)),
        indices.contiguous(),
        bounds.contiguous(),
        weight.contiguous(),
        scale.contiguous(),
        zero_point.contiguous(),
        own.contiguous(),
        out,
        columns,
        weight.shape[0],
        weight.shape[1],
        -1 if padding_idx is None else padding_idx,
        FOUR_BITS=bits == 4,
        MODE=mode,
        HAS_OWN=per_sample_weights is not None,
        HAS_PADDING=padding_idx is not None,
        BLOCK=block,
    )
    return out
