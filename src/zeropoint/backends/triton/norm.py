"""Normalization of codes: batch norm with given statistics; layer and group norm with the input's own.

Statistics are sums of integers, so that neither tiles nor their order matter: a row is read three times, for its
rounded mean, for the sums around it, and to be written.

May import: ``backends.triton``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    real,
    rint,
    steps_of,
    tile,
)

__all__ = ["batch_norm", "group_norm", "layer_norm"]


# --- kernels ------------------------------------------------------------------------------------------------------


@triton.jit
def _affine(weight, bias, mean, var, eps, x_scale, out_scale, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Multiplier and offset, as the reference's ``_affine``: all in float64, each rounded to float32 once."""
    spread = tl.sqrt(var + eps)
    if HAS_WEIGHT:
        slope = weight / spread
    else:
        slope = 1.0 / spread
    shift = -(mean * slope)
    if HAS_BIAS:
        shift = bias + shift
    return (slope * x_scale / out_scale).to(tl.float32), (shift / out_scale).to(tl.float32)


@triton.jit(do_not_specialize=["eps", "x_scale", "out_scale"])
def _channel_factors(
    weight_ptr,
    bias_ptr,
    mean_ptr,
    var_ptr,
    factor_ptr,
    offset_ptr,
    eps,
    x_scale,
    out_scale,
    channels,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    weight = tl.load(weight_ptr + c, mask=inside, other=0.0).to(tl.float64)
    bias = tl.load(bias_ptr + c, mask=inside, other=0.0).to(tl.float64)
    mean = tl.load(mean_ptr + c, mask=inside, other=0.0).to(tl.float64)
    var = tl.load(var_ptr + c, mask=inside, other=1.0).to(tl.float64)
    factor, offset = _affine(weight, bias, mean, var, real(eps), real(x_scale), real(out_scale), HAS_WEIGHT, HAS_BIAS)
    tl.store(factor_ptr + c, factor, mask=inside)
    tl.store(offset_ptr + c, offset, mask=inside)


@triton.jit(do_not_specialize=["x_zero", "out_zero", "low", "high"])
def _per_channel(
    x_ptr,
    out_ptr,
    factor_ptr,
    offset_ptr,
    count,
    step,
    channels,
    x_zero,
    out_zero,
    low,
    high,
    WIDE_IN: tl.constexpr,
    WIDE_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at, inside = places(count, BLOCK)
    channel = at // step % channels
    steps = steps_of(tl.load(x_ptr + at, mask=inside, other=0), x_zero, WIDE_IN)
    y = steps.to(tl.float32) * tl.load(factor_ptr + channel, mask=inside, other=0.0)
    y = y + tl.load(offset_ptr + channel, mask=inside, other=0.0)
    code = code_from(y, out_zero, low, high, WIDE_OUT)
    tl.store(out_ptr + at, code.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _places(e, spatial, members, channel_step, spatial_step, CHANNELS_LAST: tl.constexpr):
    """Where element ``e`` of a group lies, and its channel in the group; neighbours in memory follow one another."""
    if CHANNELS_LAST:
        channel, position = e % members, e // members
    else:
        channel, position = e // spatial, e % spatial
    return channel.to(tl.int64) * channel_step + position.to(tl.int64) * spatial_step, channel


@triton.jit(do_not_specialize=["x_zero", "eps", "x_scale", "var_scale", "out_scale", "out_zero", "low", "high"])
def _normalize(
    x_ptr,
    out_ptr,
    weight_ptr,
    bias_ptr,
    count,
    groups,
    batch_step,
    members,
    spatial,
    channel_step,
    spatial_step,
    x_zero,
    eps,
    x_scale,
    var_scale,
    out_scale,
    out_zero,
    low,
    high,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BY_ELEMENT: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WIDE_IN: tl.constexpr,
    WIDE_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One group of one sample. BY_ELEMENT is layer norm: weight and bias belong to elements, not to channels."""
    group = tl.program_id(0) % groups
    base = (tl.program_id(0) // groups).to(tl.int64) * batch_step + group.to(tl.int64) * members * channel_step
    parts = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, count, BLOCK):
        e = start + tl.arange(0, BLOCK)
        place, _ = _places(e, spatial, members, channel_step, spatial_step, CHANNELS_LAST)
        steps = steps_of(tl.load(x_ptr + base + place, mask=e < count, other=0), x_zero, WIDE_IN)
        parts += tl.where(e < count, steps, 0).to(tl.int64)
    size = tl.full((1,), count, tl.int64).to(tl.float64)
    middle = rint(tl.sum(parts, axis=0).to(tl.float64) / size).to(tl.int64)

    first = tl.zeros((BLOCK,), tl.int64)
    both = tl.zeros((BLOCK,), tl.int64)
    mixed = tl.zeros((BLOCK,), tl.int64)
    upper = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, count, BLOCK):
        e = start + tl.arange(0, BLOCK)
        place, _ = _places(e, spatial, members, channel_step, spatial_step, CHANNELS_LAST)
        steps = steps_of(tl.load(x_ptr + base + place, mask=e < count, other=0), x_zero, WIDE_IN)
        steps = tl.where(e < count, steps.to(tl.int64) - middle, 0)
        first += steps
        if WIDE_IN:  # squares of 32-bit steps do not fit 64 bits when summed: halves of 16 bits
            half = (steps + 32768) >> 16
            rest = steps - (half << 16)
            upper += half * half
            mixed += half * rest
            both += rest * rest
        else:
            both += steps * steps
    second = tl.sum(both, axis=0).to(tl.float64)
    if WIDE_IN:
        second = (
            tl.sum(upper, axis=0).to(tl.float64) * 4294967296.0
            + tl.sum(mixed, axis=0).to(tl.float64) * 131072.0
            + second
        )
    total = tl.sum(first, axis=0).to(tl.float64)
    mean = total / size
    var = tl.maximum((second - total * total / size) / size, 0.0)
    mean, var = mean * real(x_scale), var * real(var_scale)

    for start in range(0, count, BLOCK):
        e = start + tl.arange(0, BLOCK)
        inside = e < count
        place, channel = _places(e, spatial, members, channel_step, spatial_step, CHANNELS_LAST)
        steps = steps_of(tl.load(x_ptr + base + place, mask=inside, other=0), x_zero, WIDE_IN)
        steps = (steps.to(tl.int64) - middle).to(tl.float32)
        if BY_ELEMENT:
            one = tl.full((1,), 1.0, tl.float64)
            factor, offset = _affine(one, one, mean, var, real(eps), real(x_scale), one, False, False)
            y = steps * factor + offset
            weight = one
            if HAS_WEIGHT:
                weight = tl.load(weight_ptr + e, mask=inside, other=0.0).to(tl.float64)
            y = y * (weight / real(out_scale)).to(tl.float32)
            if HAS_BIAS:
                y = y + (tl.load(bias_ptr + e, mask=inside, other=0.0).to(tl.float64) / real(out_scale)).to(tl.float32)
        else:
            at = group * members + channel
            weight = tl.full((BLOCK,), 1.0, tl.float64)
            bias = weight
            if HAS_WEIGHT:
                weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float64)
            if HAS_BIAS:
                bias = tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float64)
            factor, offset = _affine(
                weight, bias, mean, var, real(eps), real(x_scale), real(out_scale), HAS_WEIGHT, HAS_BIAS
            )
            y = steps * factor + offset
        code = code_from(y, out_zero, low, high, WIDE_OUT)
        tl.store(out_ptr + base + place, code.to(out_ptr.dtype.element_ty), mask=inside)


# --- operators ----------------------------------------------------------------------------------------------------


def batch_norm(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    eps: float,
    out_scale: float,
    out_zero_point: int,
    out_min: int,
    out_max: int,
    out_dtype: torch.dtype,
) -> Tensor:
    out = torch.empty_like(x, dtype=out_dtype)
    channels = x.shape[1]
    for name, value in (("weight", weight), ("bias", bias), ("mean", mean), ("var", var)):
        if value is not None and value.numel() != channels:
            raise RuntimeError(
                f"batch_norm over {channels} channels takes as many entries of {name}, got {value.numel()}"
            )
    factor, offset = torch.empty((2, channels), dtype=torch.float32, device=x.device)
    block = tile(channels, 256, 1 << 16)
    launch(
        _channel_factors,
        (-(-channels // block),),
        (mean if weight is None else weight).contiguous(),
        (mean if bias is None else bias).contiguous(),
        mean.contiguous(),
        var.contiguous(),
        factor,
        offset,
        bits(eps),
        bits(x_scale),
        bits(out_scale),
        channels,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        BLOCK=block,
    )
    programs, block = lines(x.numel())
    launch(
        _per_channel,
        (programs,),
        dense(x, out),
        out,
        factor,
        offset,
        x.numel(),
        *channel_places(out, 1),
        x_zero_point,
        out_zero_point,
        out_min,
        out_max,
        WIDE_IN=is_wide(x.dtype, x_zero_point),
        WIDE_OUT=is_wide(out_dtype, out_zero_point),
        BLOCK=block,
    )
    return out


def layer_norm(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out_scale: float,
    out_zero_point: int,
    out_min: int,
    out_max: int,
    out_dtype: torch.dtype,
) -> Tensor:
    size = math.prod(normalized_shape)
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.numel() != size:
            raise RuntimeError(f"layer_norm over {size} elements takes as many entries of {name}, got {value.numel()}")
    codes = x.contiguous()
    result = torch.empty_like(codes, dtype=out_dtype)
    block = tile(size, 1024, 1 << 14)
    launch(
        _normalize,
        (codes.numel() // max(size, 1),),
        codes,
        result,
        codes if weight is None else weight.contiguous(),
        codes if bias is None else bias.contiguous(),
        size,
        1,
        size,
        1,
        size,
        size,
        1,
        x_zero_point,
        bits(eps),
        bits(x_scale),
        bits(x_scale * x_scale),
        bits(out_scale),
        out_zero_point,
        out_min,
        out_max,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        BY_ELEMENT=True,
        CHANNELS_LAST=False,
        WIDE_IN=is_wide(x.dtype, x_zero_point),
        WIDE_OUT=is_wide(out_dtype, out_zero_point),
        BLOCK=block,
    )
    out = torch.empty_like(x, dtype=out_dtype)
    return result if out.stride() == result.stride() else out.copy_(result)


def group_norm(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out_scale: float,
    out_zero_point: int,
    out_min: int,
    out_max: int,
    out_dtype: torch.dtype,
) -> Tensor:
    batch, channels = x.shape[:2]
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.numel() != channels:
            raise RuntimeError(
                f"group_norm of {channels} channels takes as many entries of {name}, got {value.numel()}"
            )
    if num_groups < 1 or channels % num_groups:
        raise RuntimeError(f"group_norm: {channels} channels do not split into {num_groups} groups")
    spatial, members = math.prod(x.shape[2:]), channels // num_groups
    last = x.movedim(1, -1).is_contiguous()
    codes = x if last else x.contiguous()
    result = torch.empty_like(codes, dtype=out_dtype)
    if not last:
        result = torch.empty(codes.shape, dtype=out_dtype, device=x.device)
    channel_step, spatial_step = (1, channels) if last else (spatial, 1)
    block = tile(members * spatial, 1024, 1 << 14)
    launch(
        _normalize,
        (batch * num_groups if spatial else 0,),
        codes,
        result,
        codes if weight is None else weight.contiguous(),
        codes if bias is None else bias.contiguous(),
        members * spatial,
        num_groups,
        channels * spatial,
        members,
        spatial,
        channel_step,
        spatial_step,
        x_zero_point,
        bits(eps),
        bits(x_scale),
        bits(x_scale * x_scale),
        bits(out_scale),
        out_zero_point,
        out_min,
        out_max,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        BY_ELEMENT=False,
        CHANNELS_LAST=last,
        WIDE_IN=is_wide(x.dtype, x_zero_point),
        WIDE_OUT=is_wide(out_dtype, out_zero_point),
        BLOCK=block,
    )
    out = torch.empty_like(x, dtype=out_dtype)
    return result if out.stride() == result.stride() else out.copy_(result)
