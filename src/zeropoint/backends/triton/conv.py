"""Convolution of codes in one, two and three dimensions: implicit matrix products, and depthwise.

Every convolution runs as one in three dimensions, the missing ones of size 1. A dense or grouped one is a matrix
product whose left matrix, (output positions, taps * channels), is gathered tile by tile; positions outside the input
are the zero point, so that they count as real zero. A 1x1 convolution of a channels-last input is a plain matrix
product. Depthwise takes no tensor cores: a tile of positions and channels, tap after tap, zero points off at once.

Packed weights: int32 sums over (taps, channels), then the weights as (output channel, tap, channel); the length is odd,
so that weights packed for the CPU are never taken for them.

May import: ``dtypes``, ``backends.triton``, the checks of ``ops.conv``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropoint import grid
from zeropoint.backends.triton._core import INTERPRETED, bits, ceil_div, launch, narrowed, power_of_two, real
from zeropoint.backends.triton._product import EXACT_DEPTH, flip, less_weight_zero_points, outputs
from zeropoint.backends.triton.linear import column_sums, multiply
from zeropoint.backends.triton.quantize import dynamic_codes
from zeropoint.dtypes import quint8
from zeropoint.ops.conv import _check_conv
from zeropoint.ops.quantize import reduced_range

__all__ = ["conv", "conv_dynamic", "conv_pack"]


# --- kernels ------------------------------------------------------------------------------------------------------


@triton.jit
def _position(m, size_d, size_h, size_w):
    """Batch, depth, height and width of an output position, counted through."""
    w = m % size_w
    h = m // size_w % size_h
    d = m // size_w // size_h % size_d
    return m // size_w // size_h // size_d, d, h, w


@triton.jit
def _window(
    k,
    batch,
    d,
    h,
    w,
    channels,
    kernel_h,
    kernel_w,
    in_d,
    in_h,
    in_w,
    stride_d,
    stride_h,
    stride_w,
    pad_d,
    pad_h,
    pad_w,
    dilate_d,
    dilate_h,
    dilate_w,
    x_n,
    x_c,
    x_d,
    x_h,
    x_w,
):
    """Where the window elements ``k`` (tap, channel) of some output positions lie, and whether they are inside."""
    channel, tap = k % channels, k // channels
    at_w = (w * stride_w - pad_w)[:, None] + (tap % kernel_w * dilate_w)[None, :]
    at_h = (h * stride_h - pad_h)[:, None] + (tap // kernel_w % kernel_h * dilate_h)[None, :]
    at_d = (d * stride_d - pad_d)[:, None] + (tap // kernel_w // kernel_h * dilate_d)[None, :]
    inside = (at_w >= 0) & (at_w < in_w) & (at_h >= 0) & (at_h < in_h) & (at_d >= 0) & (at_d < in_d)
    place = batch.to(tl.int64)[:, None] * x_n + channel.to(tl.int64)[None, :] * x_c
    return place + at_d.to(tl.int64) * x_d + at_h.to(tl.int64) * x_h + at_w.to(tl.int64) * x_w, inside


@triton.jit(do_not_specialize=["x_scale", "x_zero", "out_scale_bits", "out_zero", "low", "high"])
def _conv(
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
    out_scale_bits,
    out_zero,
    low,
    high,
    m_count,
    n_count,
    k_count,
    channels,
    out_channels,
    kernel_h,
    kernel_w,
    in_d,
    in_h,
    in_w,
    out_d,
    out_h,
    out_w,
    stride_d,
    stride_h,
    stride_w,
    pad_d,
    pad_h,
    pad_w,
    dilate_d,
    dilate_h,
    dilate_w,
    x_n,
    x_c,
    x_d,
    x_h,
    x_w,
    X_UNSIGNED: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    REAL: tl.constexpr,
    RELU: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of the output of one group: ``n_count`` output channels, each of ``k_count`` weights."""
    group = tl.program_id(2)
    tiles_n = tl.cdiv(n_count, BLOCK_N)
    m = (tl.program_id(0) // tiles_n + (m_count - m_count)) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = column < n_count
    n = group * n_count + column
    batch, d, h, w = _position(m, out_d, out_h, out_w)
    x_group = x_ptr + group.to(tl.int64) * channels * x_c
    if ON_DEVICE:
        scale, zero = tl.load(x_scale), tl.load(x_zero).to(tl.int32)
    else:
        scale, zero = real(x_scale), x_zero
    xz = zero
    if X_UNSIGNED:
        xz = zero - 128
    wz = tl.load(w_zero_ptr + n * w_zero_step, mask=inside_n, other=0).to(tl.int32)
    if WIDE:
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.int64)
    else:
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in range(0, k_count, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        place, inside = _window(
            k,
            batch,
            d,
            h,
            w,
            channels,
            kernel_h,
            kernel_w,
            in_d,
            in_h,
            in_w,
            stride_d,
            stride_h,
            stride_w,
            pad_d,
            pad_h,
            pad_w,
            dilate_d,
            dilate_h,
            dilate_w,
            x_n,
            x_c,
            x_d,
            x_h,
            x_w,
        )
        shown = inside & ((m >= 0) & (m < m_count))[:, None] & (k < k_count)[None, :]
        x = flip(tl.load(x_group + place, mask=shown, other=zero), X_UNSIGNED)
        weights = w_ptr + n.to(tl.int64)[None, :] * k_count + k[:, None]
        taps = tl.load(weights, mask=inside_n[None, :] & (k < k_count)[:, None], other=0)
        if WIDE:
            sums += tl.dot(x, taps, out_dtype=tl.int32).to(tl.int64)
        else:
            sums = tl.dot(x, taps, sums, out_dtype=tl.int32)
    sums -= xz * tl.load(sums_ptr + n, mask=inside_n, other=0).to(sums.dtype)[None, :]
    if tl.max(tl.abs(wz), axis=0) != 0:  # rare, and known on the device only: windows are summed where it is so
        rows = tl.zeros((BLOCK_M,), tl.int32)
        for start in range(0, k_count, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            place, inside = _window(
                k,
                batch,
                d,
                h,
                w,
                channels,
                kernel_h,
                kernel_w,
                in_d,
                in_h,
                in_w,
                stride_d,
                stride_h,
                stride_w,
                pad_d,
                pad_h,
                pad_w,
                dilate_d,
                dilate_h,
                dilate_w,
                x_n,
                x_c,
                x_d,
                x_h,
                x_w,
            )
            shown = inside & ((m >= 0) & (m < m_count))[:, None] & (k < k_count)[None, :]
            x = flip(tl.load(x_group + place, mask=shown, other=zero), X_UNSIGNED)
            rows += tl.sum(tl.where((k < k_count)[None, :], x, 0).to(tl.int32), axis=1)
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
    places = out_ptr + m.to(tl.int64)[:, None] * out_channels + n[None, :]
    tl.store(
        places, narrowed(y, out_ptr.dtype.element_ty), mask=((m >= 0) & (m < m_count))[:, None] & inside_n[None, :]
    )


@triton.jit(do_not_specialize=["x_scale", "x_zero", "out_scale_bits", "out_zero", "low", "high"])
def _depthwise(
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
    m_count,
    out_channels,
    factor,
    taps,
    kernel_h,
    kernel_w,
    in_d,
    in_h,
    in_w,
    out_d,
    out_h,
    out_w,
    stride_d,
    stride_h,
    stride_w,
    pad_d,
    pad_h,
    pad_w,
    dilate_d,
    dilate_h,
    dilate_w,
    x_n,
    x_c,
    x_d,
    x_h,
    x_w,
    ON_DEVICE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    REAL: tl.constexpr,
    RELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A tile of positions and channels; ``factor`` output channels read each input channel."""
    m = (tl.program_id(0) + (m_count - m_count)) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = n < out_channels
    batch, d, h, w = _position(m, out_d, out_h, out_w)
    if ON_DEVICE:
        scale, zero = tl.load(x_scale), tl.load(x_zero).to(tl.int32)
    else:
        scale, zero = real(x_scale), x_zero
    wz = tl.load(w_zero_ptr + n * w_zero_step, mask=inside_n, other=0).to(tl.int32)
    channels = (n // factor).to(tl.int64) * x_c
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for tap in range(taps):
        at_w = w * stride_w - pad_w + tap % kernel_w * dilate_w
        at_h = h * stride_h - pad_h + tap // kernel_w % kernel_h * dilate_h
        at_d = d * stride_d - pad_d + tap // kernel_w // kernel_h * dilate_d
        inside = (
            (at_w >= 0)
            & (at_w < in_w)
            & (at_h >= 0)
            & (at_h < in_h)
            & (at_d >= 0)
            & (at_d < in_d)
            & (m >= 0)
            & (m < m_count)
        )
        place = batch.to(tl.int64) * x_n + at_d.to(tl.int64) * x_d + at_h.to(tl.int64) * x_h + at_w.to(tl.int64) * x_w
        shown = inside[:, None] & inside_n[None, :]
        x = tl.load(x_ptr + place[:, None] + channels[None, :], mask=shown, other=0).to(tl.int32)
        weight = tl.load(w_ptr + n * taps + tap, mask=inside_n, other=0).to(tl.int32) - wz
        sums += tl.where(shown, x - zero, 0) * weight[None, :]
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
    places = out_ptr + m.to(tl.int64)[:, None] * out_channels + n[None, :]
    tl.store(
        places, narrowed(y, out_ptr.dtype.element_ty), mask=((m >= 0) & (m < m_count))[:, None] & inside_n[None, :]
    )


# --- packed weights -----------------------------------------------------------------------------------------------


def _ordered(weight: Tensor) -> Tensor:
    """Weights as (output channel, tap, channel)."""
    return weight.movedim(1, -1).reshape(weight.shape[0], -1).contiguous()


def _packed_length(weight: Tensor) -> int:
    """4 bytes of sums and 1 of each weight; and as many more as make the length 1 more than a multiple of 4."""
    return ceil_div(4 * weight.shape[0] + weight.numel(), 4) * 4 + 1


def conv_pack(weight: Tensor, groups: int) -> Tensor:
    ordered = _ordered(weight)
    packed = weight.new_zeros(_packed_length(weight), dtype=torch.uint8)
    sums = column_sums(ordered).view(torch.uint8)
    packed[: sums.numel()] = sums
    packed[sums.numel() : sums.numel() + ordered.numel()] = ordered.view(torch.uint8).view(-1)
    return packed


def _unpacked(weight: Tensor, packed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sums, and weights (output channel, tap * channel): as packed, or anew where the bytes cannot be those."""
    rows = weight.shape[0]
    if packed is None or packed.numel() != _packed_length(weight) or packed.device != weight.device:
        ordered = _ordered(weight)
        return column_sums(ordered), ordered
    weights = packed[4 * rows : 4 * rows + weight.numel()].view(torch.int8)
    return packed[: 4 * rows].view(torch.int32), weights.view(rows, -1)


# --- operators ----------------------------------------------------------------------------------------------------


def _tiles(positions: int, columns: int, depth: int) -> tuple[int, int, int]:
    if INTERPRETED:
        return power_of_two(positions, 16, 256), power_of_two(columns, 16, 256), power_of_two(depth, 32, 512)
    return (128 if positions >= 1 << 14 else 64), power_of_two(columns, 16, 64), 64


def _run(
    x: Tensor,
    x_scale: int | Tensor,
    x_zero_point: int | Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    sizes: Sequence[int],
    packed: Tensor | None,
    out_dtype: torch.dtype,
    *,
    out_scale: float = 1.0,
    out_zero_point: int = 0,
    out_min: int = 0,
    out_max: int = 0,
    relu: bool = False,
) -> Tensor:
    """Codes or floats (N, C, spatial), channels-last in memory; arguments are checked."""
    batch, rank = x.shape[0], len(sizes)
    out_channels, channels = weight.shape[:2]
    out = x.new_empty((batch, *sizes, out_channels), dtype=out_dtype)
    positions = batch * math.prod(sizes)
    sums, weights = _unpacked(weight, packed)
    last = x.movedim(1, -1)
    pointwise = math.prod(weight.shape[2:]) == 1 and not any(padding) and all(s == 1 for s in stride)
    if pointwise and groups == 1 and last.is_contiguous():
        multiply(
            last.view(positions, channels),
            weights,
            sums,
            x_scale,
            x_zero_point,
            weight_scale,
            weight_zero_point,
            bias,
            out.view(positions, out_channels),
            relu=relu,
            out_scale=out_scale,
            out_zero_point=out_zero_point,
            out_min=out_min,
            out_max=out_max,
        )
        return out.movedim(-1, 1)
    missing = 3 - rank
    space: list[Any] = [
        *([1] * missing),
        *x.shape[2:],
        *([1] * missing),
        *sizes,
        *([1] * missing),
        *stride,
        *([0] * missing),
        *padding[::2],
        *([1] * missing),
        *dilation,
        x.stride(0),
        x.stride(1),
        *([0] * missing),
        *x.stride()[2:],
    ]
    kernel = [1, 1, 1, *weight.shape[2:]]
    grids = (
        weight_scale.contiguous(),
        int(weight_scale.numel() > 1),
        weight_zero_point.contiguous(),
        int(weight_zero_point.numel() > 1),
        x if bias is None else bias.contiguous(),
        x_scale,
        x_zero_point,
        bits(out_scale),
        out_zero_point,
        out_min,
        out_max,
    )
    last_step = {
        "ON_DEVICE": isinstance(x_scale, Tensor),
        "HAS_BIAS": bias is not None,
        "REAL": out_dtype.is_floating_point,
        "RELU": relu,
    }
    depth = weights.shape[1]
    if channels == 1 and groups > 1 and depth <= EXACT_DEPTH:
        block_n = power_of_two(out_channels, 16, 1024 if INTERPRETED else 64)
        block_m = power_of_two(positions, 16, 256) if INTERPRETED else 32
        launch(
            _depthwise,
            (ceil_div(positions, block_m), ceil_div(out_channels, block_n)),
            x,
            weights,
            out,
            *grids,
            positions,
            out_channels,
            out_channels // groups,
            depth,
            *kernel[-2:],
            *space,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            **last_step,
        )
        return out.movedim(-1, 1)
    columns = out_channels // groups
    block_m, block_n, block_k = _tiles(positions, columns, depth)
    launch(
        _conv,
        (ceil_div(positions, block_m) * ceil_div(columns, block_n), 1, groups),
        x,
        weights,
        out,
        sums,
        *grids,
        positions,
        columns,
        depth,
        channels,
        out_channels,
        *kernel[-2:],
        *space,
        X_UNSIGNED=x.dtype == torch.uint8,
        WIDE=depth > EXACT_DEPTH,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        **last_step,
    )
    return out.movedim(-1, 1)


def conv(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    out_scale: float,
    out_zero_point: int,
    out_min: int,
    out_max: int,
    out_dtype: torch.dtype,
    packed: Tensor | None,
) -> Tensor:
    sizes = _check_conv(
        x,
        x_zero_point,
        weight,
        weight_scale,
        weight_zero_point,
        bias,
        stride,
        padding,
        dilation,
        groups,
        out_zero_point,
        out_min,
        out_max,
        out_dtype,
    )
    grid.check_operator_scales("conv", x_scale, out_scale)
    return _run(
        x,
        bits(x_scale),
        x_zero_point,
        weight,
        weight_scale,
        weight_zero_point,
        bias,
        stride,
        padding,
        dilation,
        groups,
        sizes,
        packed,
        out_dtype,
        out_scale=out_scale,
        out_zero_point=out_zero_point,
        out_min=out_min,
        out_max=out_max,
    )


def conv_dynamic(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    reduce_range: bool,
    relu: bool,
    packed: Tensor | None,
) -> Tensor:
    if not x.is_floating_point():
        raise RuntimeError(f"dynamic convolution takes a float16, bfloat16, float32 or float64 tensor, got {x.dtype}")
    codes, scale, zero_point = dynamic_codes(x, *reduced_range(quint8, reduce_range))
    sizes = _check_conv(
        codes,
        0,
        weight,
        weight_scale,
        weight_zero_point,
        bias,
        stride,
        padding,
        dilation,
        groups,
        0,
        0,
        255,
        torch.uint8,
    )
    return _run(
        codes,
        scale,
        zero_point,
        weight,
        weight_scale,
        weight_zero_point,
        bias,
        stride,
        padding,
        dilation,
        groups,
        sizes,
        packed,
        x.dtype,
        relu=relu,
    )
