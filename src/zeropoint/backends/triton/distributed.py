"""Gradients as bytes: what communication hooks send, and how it is summed.

May import: ``backends.triton``, the checks of ``ops.distributed``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropoint.backends.triton._core import ceil_div, code_from, launch, lines, power_of_two, rint, tile
from zeropoint.ops.distributed import SMALLEST_SCALE, _require, _require_form, _rows, block_bytes, blocks_per_chunk

__all__ = ["block_pack", "block_sum", "block_unpack", "row_quantize", "row_range", "row_sum"]


# --- rows ---------------------------------------------------------------------------------------------------------


@triton.jit
def _extremes(x, axis: tl.constexpr):
    """Smallest and largest value with 0, NaN where there is a NaN."""
    odd = tl.max((x != x).to(tl.int32), axis=axis) > 0
    known = tl.where(x == x, x, 0.0)
    low, high = tl.minimum(tl.min(known, axis=axis), 0.0), tl.maximum(tl.max(known, axis=axis), 0.0)
    return tl.where(odd, float("nan"), low), tl.where(odd, float("nan"), high)


@triton.jit
def _row_range(x_ptr, low_ptr, high_ptr, count, rows, row, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    low = tl.zeros((BLOCK_M,), tl.float32)
    high = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, row, BLOCK):
        k = start + tl.arange(0, BLOCK)
        at = m[:, None] * row + k[None, :]
        x = tl.load(x_ptr + at, mask=(k < row)[None, :] & (at < count), other=0.0)
        least, most = _extremes(x, 1)
        low = tl.where((low != low) | (least != least), float("nan"), tl.minimum(low, least))
        high = tl.where((high != high) | (most != most), float("nan"), tl.maximum(high, most))
    tl.store(low_ptr + m, low, mask=m < rows)
    tl.store(high_ptr + m, high, mask=m < rows)


@triton.jit
def _row_quantize(x_ptr, qparams_ptr, out_ptr, count, rows, row, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.full((), rows, tl.int64) * row
    x = tl.load(x_ptr + at, mask=at < count, other=0.0)
    scale = tl.load(qparams_ptr + at // row, mask=inside, other=1.0)
    zero = tl.load(qparams_ptr + rows + at // row, mask=inside, other=0.0).to(tl.int64)
    code = code_from(x * tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), scale), zero, 0, 255, True)
    tl.store(out_ptr + at, code.to(tl.uint8), mask=inside)


@triton.jit
def _row_sum(codes_ptr, qparams_ptr, out_ptr, length, ranks, rows, row, BLOCK: tl.constexpr):
    """Dequantize and add, in the ranks' order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    total = tl.zeros((BLOCK,), tl.float32)
    own = qparams_ptr + at // row
    for _ in range(ranks):
        scale = tl.load(own, mask=inside, other=1.0)
        zero = tl.load(own + rows, mask=inside, other=0.0).to(tl.int64)
        codes = tl.load(codes_ptr + at, mask=inside, other=0).to(tl.int64)
        total += (codes - zero).to(tl.float32) * scale
        own += 2 * rows
        codes_ptr += tl.full((), rows, tl.int64) * row
    tl.store(out_ptr + at, total, mask=inside)


def row_range(x: Tensor, row: int) -> tuple[Tensor, Tensor]:
    rows = _rows(x.numel(), row)
    low, high = x.new_empty(rows), x.new_empty(rows)
    block_m, block = tile(rows, 16, 1024), power_of_two(row, 16, 1024)
    launch(
        _row_range,
        (ceil_div(rows, block_m),),
        x.contiguous(),
        low,
        high,
        x.numel(),
        rows,
        row,
        BLOCK_M=block_m,
        BLOCK=block,
    )
    return low, high


def row_quantize(x: Tensor, qparams: Tensor, row: int) -> Tensor:
    rows = _rows(x.numel(), row)
    _require(qparams.shape == (2, rows), f"row_quantize: qparams must be (2, {rows}), got {tuple(qparams.shape)}")
    out = x.new_empty((rows, row), dtype=torch.uint8)
    programs, block = lines(rows * row)
    launch(_row_quantize, (programs,), x.contiguous(), qparams.contiguous(), out, x.numel(), rows, row, BLOCK=block)
    return out


def row_sum(codes: Tensor, qparams: Tensor, length: int) -> Tensor:
    ranks, rows, row = codes.shape
    _require(length <= rows * row, f"row_sum: {rows * row} codes a rank do not hold {length} elements")
    _require(
        qparams.shape == (ranks, 2, rows), f"row_sum: qparams must be {(ranks, 2, rows)}, got {tuple(qparams.shape)}"
    )
    out = codes.new_empty(length, dtype=torch.float32)
    programs, block = lines(length)
    launch(_row_sum, (programs,), codes.contiguous(), qparams.contiguous(), out, length, ranks, rows, row, BLOCK=block)
    return out


# --- blocks -------------------------------------------------------------------------------------------------------


@triton.jit
def _noise(index, seed):
    """The reference's ``_noise``: 32-bit words wrap."""
    word = index.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32)
    word = (word ^ (word >> 16)) * 0x85EBCA6B
    word = (word ^ (word >> 13)) * 0xC2B2AE35
    word = word ^ (word >> 16)
    return (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _stochastic(x, inverse, index, seed, limit):
    """Codes of ``grid.quantize_stochastic``."""
    y = x * inverse + _noise(index, seed)
    y = tl.where(y == y, y, 0.0)
    y = tl.minimum(tl.maximum(y, -4096.0), 4096.0)
    whole = rint(y)  # Triton's own floor takes the smallest floats for 0
    code = tl.where(whole > y, whole - 1.0, whole).to(tl.int32)
    return tl.minimum(tl.maximum(code, -limit), limit)


@triton.jit(do_not_specialize=["seed"])
def _block_pack(
    x_ptr,
    out_ptr,
    count,
    blocks,
    per_chunk,
    seed,
    SMALLEST: tl.constexpr,
    FOUR_BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    LENGTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Some blocks of ``LENGTH`` elements, read as two halves: with 4 bits, these share bytes."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, HALF)
    inside = (m < blocks)[:, None] & (k < LENGTH // 2)[None, :]
    at = m[:, None] * LENGTH + k[None, :]
    first = tl.load(x_ptr + at, mask=inside & (at < count), other=0.0)
    later = at + LENGTH // 2
    second = tl.load(x_ptr + later, mask=inside & (later < count), other=0.0)
    low_1, high_1 = _extremes(first, 1)
    low_2, high_2 = _extremes(second, 1)
    odd = (low_1 != low_1) | (low_2 != low_2)
    far = tl.maximum(tl.maximum(-low_1, -low_2), tl.maximum(high_1, high_2))
    limit = 7 if FOUR_BITS else 127
    scale = tl.div_rn(far, tl.full((BLOCK_M,), limit, tl.float32))
    scale = tl.where(odd, float("nan"), tl.maximum(scale, SMALLEST))
    inverse = tl.div_rn(tl.full((BLOCK_M,), 1.0, tl.float32), scale)[:, None]
    if STOCHASTIC:
        first_code = _stochastic(first, inverse, at, seed, limit)
        second_code = _stochastic(second, inverse, later, seed, limit)
    else:
        first_code = code_from(first * inverse, 0, -limit, limit, False)
        second_code = code_from(second * inverse, 0, -limit, limit, False)
    width = LENGTH // 2 if FOUR_BITS else LENGTH
    chunk, place = m // per_chunk, m % per_chunk
    base = chunk * per_chunk * (4 + width)
    word = scale.to(tl.uint32, bitcast=True)
    for byte in tl.static_range(4):  # rows of bytes may start anywhere: a float would have to be aligned
        tl.store(out_ptr + base + place * 4 + byte, (word >> (8 * byte)).to(tl.uint8), mask=m < blocks)
    coded = out_ptr + (base + per_chunk * 4 + place * width)[:, None] + k[None, :]
    if FOUR_BITS:
        tl.store(coded, ((first_code + 8) | ((second_code + 8) << 4)).to(tl.uint8), mask=inside)
    else:
        tl.store(coded, first_code.to(tl.uint8), mask=inside)
        tl.store(coded + LENGTH // 2, second_code.to(tl.uint8), mask=inside)


@triton.jit
def _block_value(row_ptr, place, inside, per_row, FOUR_BITS: tl.constexpr, LENGTH: tl.constexpr):
    """Values of elements of one packed row."""
    block, element = place // LENGTH, place % LENGTH
    word = tl.zeros_like(place).to(tl.uint32)
    for byte in tl.static_range(4):
        part = tl.load(row_ptr + block * 4 + byte, mask=inside, other=0).to(tl.uint32)
        word = word | (part << (8 * byte))
    scale = word.to(tl.float32, bitcast=True)
    if FOUR_BITS:
        pair = tl.load(row_ptr + per_row * 4 + block * (LENGTH // 2) + element % (LENGTH // 2), mask=inside, other=0)
        steps = tl.where(element < LENGTH // 2, pair & 15, pair >> 4).to(tl.int32) - 8
    else:
        steps = tl.load(row_ptr + per_row * 4 + place, mask=inside, other=0).to(tl.int8, bitcast=True).to(tl.int32)
    return steps.to(tl.float32) * scale


@triton.jit
def _block_sum(
    data_ptr, out_ptr, rows, row_bytes, per_row, FOUR_BITS: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < per_row * LENGTH
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(rows):
        total += _block_value(data_ptr, at, inside, per_row, FOUR_BITS, LENGTH)
        data_ptr += row_bytes
    tl.store(out_ptr + at, total, mask=inside)


@triton.jit
def _block_unpack(
    data_ptr, out_ptr, length, row_bytes, per_row, FOUR_BITS: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    elements = per_row * LENGTH
    row = at // elements
    value = _block_value(data_ptr + row * row_bytes, at % elements, inside, per_row, FOUR_BITS, LENGTH)
    tl.store(out_ptr + at, value, mask=inside)


def block_pack(x: Tensor, chunks: int, bits: int, block: int, seed: int | None) -> Tensor:
    _require_form("block_pack", bits, block)
    per_chunk = blocks_per_chunk(x.numel(), chunks, block)
    out = x.new_empty((chunks, per_chunk * block_bytes(bits, block)), dtype=torch.uint8)
    blocks = chunks * per_chunk
    block_m = tile(blocks, 16, 1024)
    launch(
        _block_pack,
        (ceil_div(blocks, block_m),),
        x.contiguous(),
        out,
        x.numel(),
        blocks,
        per_chunk,
        seed or 0,
        SMALLEST=SMALLEST_SCALE,
        FOUR_BITS=bits == 4,
        STOCHASTIC=seed is not None,
        LENGTH=block,
        HALF=power_of_two(block // 2, 16, 1 << 20),
        BLOCK_M=block_m,
    )
    return out


def _per_row(who: str, data: Tensor, bits: int, block: int) -> int:
    """Blocks in each packed row."""
    _require_form(who, bits, block)
    _require(
        data.dim() == 2 and data.shape[1] % block_bytes(bits, block) == 0,
        f"{who}: rows of shape {tuple(data.shape)} do not hold whole blocks of {block_bytes(bits, block)} bytes",
    )
    return data.shape[1] // block_bytes(bits, block)


def block_sum(data: Tensor, bits: int, block: int) -> Tensor:
    per_row = _per_row("block_sum", data, bits, block)
    out = data.new_empty(per_row * block, dtype=torch.float32)
    programs, size = lines(out.numel())
    launch(
        _block_sum,
        (programs,),
        data.contiguous(),
        out,
        data.shape[0],
        data.shape[1],
        per_row,
        FOUR_BITS=bits == 4,
        LENGTH=block,
        BLOCK=size,
    )
    return out


def block_unpack(data: Tensor, bits: int, block: int, length: int) -> Tensor:
    per_row = _per_row("block_unpack", data, bits, block)
    held = data.shape[0] * per_row * block
    _require(length <= held, f"block_unpack: {held} elements do not hold {length}")
    out = data.new_empty(length, dtype=torch.float32)
    programs, size = lines(length)
    launch(
        _block_unpack,
        (programs,),
        data.contiguous(),
        out,
        length,
        data.shape[1],
        per_row,
        FOUR_BITS=bits == 4,
        LENGTH=block,
        BLOCK=size,
    )
    return out
