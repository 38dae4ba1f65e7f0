"""Matrix products of codes: linear, dynamic linear, and the product of two activations.

One kernel multiplies tiles; where the output has too few tiles to fill a device, K is split over programs and a second
kernel adds the parts. Up to four rows take a kernel without tensor cores, which reads the weights once. All three end
in the same step from sums to codes.

Packed weights are the column sums, int32, and one byte more: an odd length, so that weights packed for the CPU are
never taken for them.

May import: ``dtypes``, ``backends.triton``, the checks of ``ops.linear``.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropoint import grid
from zeropoint.backends.triton._core import INTERPRETED, bits, ceil_div, launch, power_of_two, real
from zeropoint.backends.triton._product import (
    EXACT_DEPTH,
    SPLIT_DEPTH,
    flip,
    less_weight_zero_points,
    outputs,
    store_tile,
)
from zeropoint.backends.triton.quantize import dynamic_codes
from zeropoint.dtypes import quint8
from zeropoint.ops.quantize import reduced_range

__all__ = ["linear", "linear_dynamic", "linear_pack", "matmul", "multiply"]

_ENGINE = "ZEROPOINT_CUDA_LINEAR"  # "int_mm": torch._int_mm where its limits hold; else the kernels here


# --- kernels ------------------------------------------------------------------------------------------------------


@triton.jit
def _x_grid(x_scale, x_zero, ON_DEVICE: tl.constexpr):
    """Scale and zero point of the activations: bits and a number, or where they lie on the device."""
    if ON_DEVICE:
        scale, zero = tl.load(x_scale), tl.load(x_zero).to(tl.int32)
    else:
        scale, zero = real(x_scale), x_zero
    return scale, zero


@triton.jit
def _column_sums(weight_ptr, out_ptr, n_count, k_count, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Sums of the rows of a contiguous (N, K) int8 matrix."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.int32)
    for start in range(0, k_count, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (n < n_count)[:, None] & (k < k_count)[None, :]
        w = tl.load(weight_ptr + n.to(tl.int64)[:, None] * k_count + k[None, :], mask=inside, other=0)
        total += tl.sum(w.to(tl.int32), axis=1)
    tl.store(out_ptr + n, total, mask=n < n_count)


@triton.jit
def _weight_zeros(w_zero_ptr, w_zero_step, n, inside, w_zero, ON_DEVICE: tl.constexpr, W_UNSIGNED: tl.constexpr):
    if ON_DEVICE:
        zeros = tl.load(w_zero_ptr + n * w_zero_step, mask=inside, other=0).to(tl.int32)
    else:
        zeros = tl.zeros_like(n).to(tl.int32) + w_zero
    if W_UNSIGNED:
        zeros = zeros - 128
    return zeros


@triton.jit(do_not_specialize=["x_zero", "x_scale", "w_zero", "out_scale_bits", "out_zero", "low", "high"])
def _gemm(
    x_ptr,
    w_ptr,
    out_ptr,
    sums_ptr,
    w_scale_ptr,
    w_scale_step,
    w_zero_ptr,
    w_zero_step,
    bias_ptr,
    x_scale,
    x_zero,
    w_zero,
    out_scale_bits,
    out_zero,
    low,
    high,
    m_count,
    n_count,
    k_count,
    k_part,
    x_row,
    x_step,
    x_batch,
    w_column,
    w_step,
    w_batch,
    X_UNSIGNED: tl.constexpr,
    W_UNSIGNED: tl.constexpr,
    X_ON_DEVICE: tl.constexpr,
    W_ON_DEVICE: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    REAL: tl.constexpr,
    RELU: tl.constexpr,
    PARTS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One tile of the output; with PARTS, of the sums over one part of k, which ``_finish`` adds."""
    tiles_m, tiles_n = tl.cdiv(m_count, BLOCK_M), tl.cdiv(n_count, BLOCK_N)
    pid, part, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = pid // (GROUP * tiles_n) * GROUP  # neighbours share rows and columns, so that the cache holds them
    height = tl.minimum(tiles_m - first, GROUP)
    m = (first + pid % (GROUP * tiles_n) % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = pid % (GROUP * tiles_n) // height * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_m, inside_n = m < m_count, n < n_count
    x_rows = x_ptr + batch * x_batch + m.to(tl.int64)[:, None] * x_row
    w_columns = w_ptr + batch * w_batch + n.to(tl.int64)[None, :] * w_column
    scale, xz = _x_grid(x_scale, x_zero, X_ON_DEVICE)
    if X_UNSIGNED:
        xz = xz - 128
    wz = _weight_zeros(w_zero_ptr, w_zero_step, n, inside_n, w_zero, W_ON_DEVICE, W_UNSIGNED)
    start, end = part * k_part, tl.minimum((part + 1) * k_part, k_count)

    if WIDE:
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.int64)
    else:
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for at in range(start, end, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        x = flip(
            tl.load(x_rows + k[None, :] * x_step, mask=inside_m[:, None] & (k < end)[None, :], other=0), X_UNSIGNED
        )
        w = flip(
            tl.load(w_columns + k[:, None] * w_step, mask=inside_n[None, :] & (k < end)[:, None], other=0), W_UNSIGNED
        )
        if W_UNSIGNED:
            w = tl.where((k < end)[:, None], w, 0).to(tl.int8)
        if WIDE:
            sums += tl.dot(x, w, out_dtype=tl.int32).to(tl.int64)
        else:
            sums = tl.dot(x, w, sums, out_dtype=tl.int32)

    if HAS_SUMS:
        if part == 0:
            sums -= xz * tl.load(sums_ptr + n, mask=inside_n, other=0).to(sums.dtype)[None, :]
    else:
        columns = tl.zeros((BLOCK_N,), tl.int32)
        for at in range(start, end, BLOCK_K):
            k = at + tl.arange(0, BLOCK_K)
            w = flip(
                tl.load(w_columns + k[:, None] * w_step, mask=inside_n[None, :] & (k < end)[:, None], other=0),
                W_UNSIGNED,
            )
            columns += tl.sum(tl.where((k < end)[:, None], w, 0).to(tl.int32), axis=0)
        sums -= xz * columns.to(sums.dtype)[None, :]
    if tl.max(tl.abs(wz), axis=0) != 0:  # rare, and known on the device only: rows are summed where it is so
        rows = tl.zeros((BLOCK_M,), tl.int32)
        for at in range(start, end, BLOCK_K):
            k = at + tl.arange(0, BLOCK_K)
            x = flip(
                tl.load(x_rows + k[None, :] * x_step, mask=inside_m[:, None] & (k < end)[None, :], other=0), X_UNSIGNED
            )
            rows += tl.sum(tl.where((k < end)[None, :], x, 0).to(tl.int32), axis=1)
        sums = less_weight_zero_points(sums, rows, (end - start), xz, wz)

    inside = inside_m[:, None] & inside_n[None, :]
    if PARTS:
        store_tile(out_ptr + part.to(tl.int64) * m_count * n_count, sums, m.to(tl.int64), n, n_count, inside)
    else:
        y = outputs(
            sums,
            n,
            inside_n,
            w_scale_ptr,
            w_scale_step,
            bias_ptr,
            scale,
            out_scale_bits,
            out_zero,
            low,
            high,
            HAS_BIAS,
            REAL,
            RELU,
        )
        store_tile(out_ptr + batch * m_count * n_count, y, m.to(tl.int64), n, n_count, inside)


@triton.jit(do_not_specialize=["x_scale", "x_zero", "out_scale_bits", "out_zero", "low", "high"])
def _finish(
    parts_ptr,
    x_ptr,
    out_ptr,
    sums_ptr,
    w_scale_ptr,
    w_scale_step,
    w_zero_ptr,
    w_zero_step,
    bias_ptr,
    x_scale,
    x_zero,
    out_scale_bits,
    out_zero,
    low,
    high,
    m_count,
    n_count,
    k_count,
    parts,
    CORRECT: tl.constexpr,
    X_ON_DEVICE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    REAL: tl.constexpr,
    RELU: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Adds parts of sums and takes the last step. CORRECT: they are sums of signed bytes alone (``torch._int_mm``)."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = n < n_count
    inside = (m < m_count)[:, None] & inside_n[None, :]
    if WIDE:
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.int64)
    else:
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    at = parts_ptr + m.to(tl.int64)[:, None] * n_count + n[None, :]
    for _ in range(parts):
        sums += tl.load(at, mask=inside, other=0).to(sums.dtype)
        at += tl.full((), m_count, tl.int64) * n_count
    scale, xz = _x_grid(x_scale, x_zero, X_ON_DEVICE)
    if CORRECT:
        sums -= xz * tl.load(sums_ptr + n, mask=inside_n, other=0).to(sums.dtype)[None, :]
        wz = tl.load(w_zero_ptr + n * w_zero_step, mask=inside_n, other=0).to(tl.int32)
        if tl.max(tl.abs(wz), axis=0) != 0:
            rows = tl.zeros((BLOCK_M,), tl.int32)
            for start in range(0, k_count, BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)
                shown = (m < m_count)[:, None] & (k < k_count)[None, :]
                x = tl.load(x_ptr + m.to(tl.int64)[:, None] * k_count + k[None, :], mask=shown, other=0)
                rows += tl.sum(x.to(tl.int32), axis=1)
            sums = less_weight_zero_points(sums, rows, k_count, xz, wz)
    y = outputs(
        sums,
        n,
        inside_n,
        w_scale_ptr,
        w_scale_step,
        bias_ptr,
        scale,
        out_scale_bits,
        out_zero,
        low,
        high,
        HAS_BIAS,
        REAL,
        RELU,
    )
    store_tile(out_ptr, y, m.to(tl.int64), n, n_count, inside)


@triton.jit(do_not_specialize=["x_scale", "x_zero", "out_scale_bits", "out_zero", "low", "high"])
def _gemv(
    x_ptr,
    w_ptr,
    out_ptr,
    w_scale_ptr,
    w_scale_step,
    w_zero_ptr,
    w_zero_step,
    bias_ptr,
    x_scale,
    x_zero,
    out_scale_bits,
    out_zero,
    low,
    high,
    n_count,
    k_count,
    X_ON_DEVICE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    REAL: tl.constexpr,
    RELU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One row times some columns: zero points are taken off right away, since a row's bytes are few."""
    m = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = n < n_count
    scale, xz = _x_grid(x_scale, x_zero, X_ON_DEVICE)
    wz = tl.load(w_zero_ptr + n * w_zero_step, mask=inside_n, other=0).to(tl.int32)
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.int32)
    for start in range(0, k_count, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + m * k_count + k, mask=k < k_count, other=0).to(tl.int32)
        x = tl.where(k < k_count, x - xz, 0)
        inside = inside_n[:, None] & (k < k_count)[None, :]
        w = tl.load(w_ptr + n.to(tl.int64)[:, None] * k_count + k[None, :], mask=inside, other=0).to(tl.int32)
        sums += (w - wz[:, None]) * x[None, :]
    y = outputs(
        tl.sum(sums, axis=1)[None, :],
        n,
        inside_n,
        w_scale_ptr,
        w_scale_step,
        bias_ptr,
        scale,
        out_scale_bits,
        out_zero,
        low,
        high,
        HAS_BIAS,
        REAL,
        RELU,
    )
    store_tile(out_ptr + m * n_count, y, tl.zeros((1,), tl.int32), n, n_count, inside_n[None, :])


@triton.jit
def _flip_bytes(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, flip(tl.load(x_ptr + at, mask=at < count, other=0), True), mask=at < count)


# --- packed weights -----------------------------------------------------------------------------------------------


def column_sums(weight: Tensor) -> Tensor:
    """int32 sums of the rows of an int8 matrix (N, K)."""
    rows, depth = weight.shape
    out = torch.zeros(rows, dtype=torch.int32, device=weight.device)
    block_n, block_k = (256, 4096) if INTERPRETED else (16, 256)
    launch(
        _column_sums,
        (ceil_div(rows, block_n),),
        weight.contiguous(),
        out,
        rows,
        depth,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
    )
    return out


def linear_pack(weight: Tensor) -> Tensor:
    return torch.cat([column_sums(weight).view(torch.uint8), weight.new_zeros(1, dtype=torch.uint8)])


def _unpacked(weight: Tensor, packed: Tensor | None) -> Tensor:
    """Column sums: those that were packed, or made anew where the bytes cannot be what :func:`linear_pack` gave."""
    length = 4 * weight.shape[0]
    if packed is None or packed.numel() != length + 1 or packed.device != weight.device:
        return column_sums(weight)
    return packed[:length].view(torch.int32)


# --- operators ----------------------------------------------------------------------------------------------------


def _check(
    x: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> None:
    """As the native kernel: sizes that a kernel relies on, whoever calls."""
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise RuntimeError(f"linear takes x (..., K) and weight (N, K), got {tuple(x.shape)} and {tuple(weight.shape)}")
    if x.dtype not in (torch.int8, torch.uint8) or weight.dtype != torch.int8:
        raise RuntimeError(f"linear takes int8 or uint8 codes and int8 weights, got {x.dtype} and {weight.dtype}")
    if out_dtype not in (torch.int8, torch.uint8) and not out_dtype.is_floating_point:
        raise RuntimeError(f"linear gives int8 or uint8 codes, got out_dtype={out_dtype}")
    for name, value in (("weight_scale", scale), ("weight_zero_point", zero_point)):
        if value.numel() not in (1, weight.shape[0]):
            raise RuntimeError(f"linear with {weight.shape[0]} rows takes 1 or as many {name}, got {value.numel()}")
    if bias is not None and bias.numel() != weight.shape[0]:
        raise RuntimeError(f"linear with {weight.shape[0]} rows takes as many biases, got {bias.numel()}")


def _tiles(rows: int, columns: int, depth: int) -> tuple[int, int, int]:
    """Sizes of a tile: M, N, K."""
    if INTERPRETED:
        return power_of_two(rows, 16, 256), power_of_two(columns, 16, 256), power_of_two(depth, 32, 512)
    if rows <= 64:
        return power_of_two(rows, 16, 64), 64, power_of_two(depth, 32, 128)
    return (128, 128 if columns > 64 else 64, 64) if rows * columns >= 1 << 18 else (64, 64, 64)


def _parts(tiles: int, depth: int) -> int:
    """Over how many programs K is split, so that a device with about a hundred multiprocessors is busy."""
    if tiles >= 64 or depth < 1024:
        return 1
    return max(1, min(16, 128 // tiles, depth // 512))


def multiply(
    x: Tensor,
    weight: Tensor,
    sums: Tensor,
    x_scale: int | Tensor,
    x_zero_point: int | Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    out_scale: float = 1.0,
    out_zero_point: int = 0,
    out_min: int = 0,
    out_max: int = 0,
    relu: bool = False,
    parts: int | None = None,
    engine: str | None = None,
) -> Tensor:
    """Fills ``out`` (M, N) from codes ``x`` (M, K) and ``weight`` (N, K); floats where ``out`` is floating.

    Args:
        x_scale, x_zero_point: bits of a scale and a number, or one-element tensors on the device.
        sums: column sums of ``weight``.
        parts: over how many programs K is split; None decides by the sizes.
        engine: "int_mm" takes ``torch._int_mm`` where its limits hold; None asks the environment.
    """
    (rows, depth), columns = x.shape, weight.shape[0]
    if rows == 0 or columns == 0:
        return out
    x, weight = x.contiguous(), weight.contiguous()
    real = out.dtype.is_floating_point
    offsets = x if bias is None else bias.contiguous()
    grids: tuple[Any, ...] = (
        weight_scale.contiguous(),
        int(weight_scale.numel() > 1),
        weight_zero_point.contiguous(),
        int(weight_zero_point.numel() > 1),
        offsets,
    )
    ends = (bits(out_scale), out_zero_point, out_min, out_max)
    last = {"HAS_BIAS": bias is not None, "REAL": real, "RELU": relu, "X_ON_DEVICE": isinstance(x_scale, Tensor)}
    wide = depth > EXACT_DEPTH
    if rows <= 4 and not wide and engine is None and parts is None:
        block_n, block_k = (power_of_two(columns, 16, 512), power_of_two(depth, 32, 1024)) if INTERPRETED else (16, 256)
        launch(
            _gemv,
            (ceil_div(columns, block_n), rows),
            x,
            weight,
            out,
            *grids,
            x_scale,
            x_zero_point,
            *ends,
            columns,
            depth,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            **last,
        )
        return out
    block_m, block_n, block_k = _tiles(rows, columns, depth)
    finish = {
        "BLOCK_M": min(block_m, 64) if not INTERPRETED else block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "WIDE": wide,
    }
    finish_grid = (ceil_div(rows, finish["BLOCK_M"]), ceil_div(columns, block_n))
    chosen = os.environ.get(_ENGINE, "") if engine is None else engine
    if chosen == "int_mm" and rows > 16 and depth % 8 == columns % 8 == 0 and depth <= SPLIT_DEPTH:
        signed, zero = _signed(x, x_zero_point)
        launch(
            _finish,
            finish_grid,
            torch._int_mm(signed, weight.t()),
            signed,
            out,
            sums,
            *grids,
            x_scale,
            zero,
            *ends,
            rows,
            columns,
            depth,
            1,
            CORRECT=True,
            **last,
            **finish,
        )
        return out
    tiles = ceil_div(rows, block_m) * ceil_div(columns, block_n)
    split = _parts(tiles, depth) if parts is None else parts
    part = ceil_div(ceil_div(depth, split), block_k) * block_k
    split = ceil_div(depth, part) if depth else 1
    target = out
    if split > 1:
        target = torch.empty((split, rows, columns), dtype=torch.int64 if wide else torch.int32, device=x.device)
    launch(
        _gemm,
        (tiles, split, 1),
        x,
        weight,
        target,
        sums,
        *grids,
        x_scale,
        x_zero_point,
        0,
        *ends,
        rows,
        columns,
        depth,
        part,
        depth,
        1,
        0,
        depth,
        1,
        0,
        X_UNSIGNED=x.dtype == torch.uint8,
        W_UNSIGNED=False,
        W_ON_DEVICE=True,
        HAS_SUMS=True,
        PARTS=split > 1,
        WIDE=wide,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP=8,
        num_warps=8 if block_m * block_n >= 1 << 14 else 4,
        **last,
    )
    if split > 1:
        launch(
            _finish,
            finish_grid,
            target,
            x,
            out,
            sums,
            *grids,
            x_scale,
            x_zero_point,
            *ends,
            rows,
            columns,
            depth,
            split,
            CORRECT=False,
            **last,
            **finish,
        )
    return out


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones(1, dtype=torch.float64, device=device)


def _signed(x: Tensor, zero_point: int | Tensor) -> tuple[Tensor, int | Tensor]:
    """Codes and zero point as ``torch._int_mm`` takes them: signed."""
    if x.dtype == torch.int8:
        return x, zero_point
    out = torch.empty_like(x, dtype=torch.int8)
    block = 1 << 16 if INTERPRETED else 1024
    launch(_flip_bytes, (ceil_div(x.numel(), block),), x, out, x.numel(), BLOCK=block)
    return out, zero_point - 128


def linear(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor,
    bias: Tensor | None,
    out_scale: float,
    out_zero_point: int,
    out_min: int,
    out_max: int,
    out_dtype: torch.dtype,
    packed: Tensor | None,
) -> Tensor:
    _check(x, weight, weight_scale, weight_zero_point, bias, out_dtype)
    grid.check_operator_scales("linear", x_scale, out_scale)
    rows = x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.new_empty((x.shape[:-1].numel(), 0))
    out = x.new_empty((rows.shape[0], weight.shape[0]), dtype=out_dtype)
    multiply(
        rows,
        weight,
        _unpacked(weight, packed),
        bits(x_scale),
        x_zero_point,
        weight_scale,
        weight_zero_point,
        bias,
        out,
        out_scale=out_scale,
        out_zero_point=out_zero_point,
        out_min=out_min,
        out_max=out_max,
    )
    return out.view(*x.shape[:-1], weight.shape[0])


def linear_dynamic(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor,
    bias: Tensor | None,
    reduce_range: bool,
    relu: bool,
    packed: Tensor | None,
) -> Tensor:
    codes, scale, zero_point = dynamic_codes(x.contiguous(), *reduced_range(quint8, reduce_range))
    _check(codes, weight, weight_scale, weight_zero_point, bias, x.dtype)
    rows = codes.reshape(-1, x.shape[-1]) if x.shape[-1] else codes.new_empty((x.shape[:-1].numel(), 0))
    out = x.new_empty((rows.shape[0], weight.shape[0]))
    multiply(
        rows,
        weight,
        _unpacked(weight, packed),
        scale,
        zero_point,
        weight_scale,
        weight_zero_point,
        bias,
        out,
        relu=relu,
    )
    return out.view(*x.shape[:-1], weight.shape[0])


def matmul(
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
    """``torch.matmul`` of two 8-bit activations, batches broadcast."""
    if a.dim() < 1 or b.dim() < 1 or a.shape[-1] != b.shape[max(b.dim() - 2, 0)]:
        raise RuntimeError(f"matmul takes a (..., M, K) and b (..., K, N), got {tuple(a.shape)} and {tuple(b.shape)}")
    left, right = (a.unsqueeze(0) if a.dim() == 1 else a), (b.unsqueeze(1) if b.dim() == 1 else b)
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    rows, depth, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    count = batch.numel()
    left = left.expand(*batch, rows, depth).reshape(count, rows, depth)
    right = right.expand(*batch, depth, columns).reshape(count, depth, columns)
    out = a.new_empty((*batch, rows, columns), dtype=out_dtype)
    block_m, block_n, block_k = _tiles(rows, columns, depth)
    scale = _one(a.device)
    tiles = ceil_div(rows, block_m) * ceil_div(columns, block_n)
    if out.numel():
        launch(
            _gemm,
            (tiles, 1, count),
            left,
            right,
            out,
            left,
            scale,
            0,
            left,
            0,
            left,
            bits(a_scale * b_scale),
            a_zero_point,
            b_zero_point,
            bits(out_scale),
            out_zero_point,
            out_min,
            out_max,
            rows,
            columns,
            depth,
            max(depth, 1),
            left.stride(1),
            left.stride(2),
            left.stride(0),
            right.stride(2),
            right.stride(1),
            right.stride(0),
            X_UNSIGNED=a.dtype == torch.uint8,
            W_UNSIGNED=b.dtype == torch.uint8,
            X_ON_DEVICE=False,
            W_ON_DEVICE=False,
            HAS_SUMS=False,
            HAS_BIAS=False,
            REAL=False,
            RELU=False,
            PARTS=False,
            WIDE=depth > EXACT_DEPTH,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            GROUP=8,
            num_warps=8 if block_m * block_n >= 1 << 14 else 4,
        )
    if a.dim() == 1:
        out = out.squeeze(-2)
    return out.squeeze(-1) if b.dim() == 1 else out
