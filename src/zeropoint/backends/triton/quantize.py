"""Between float and codes: quantize, dequantize, requantize; and the range and grid of a float tensor.

May import: ``grid``, ``backends.triton._core``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropoint import grid
from zeropoint.backends.triton._core import (
    bits,
    ceil_div,
    channel_places,
    code_from,
    dense,
    finite_low_high,
    inverse,
    is_wide,
    launch,
    lines,
    narrowed,
    places,
    quotient,
    real,
    rint,
    steps_of,
    tile,
    triton_dtype,
)

__all__ = [
    "choose_grid",
    "dequantize_per_channel",
    "dequantize_per_tensor",
    "dynamic_codes",
    "dynamic_qparams",
    "dynamic_range",
    "quantize_per_channel",
    "quantize_per_tensor",
    "requantize",
]


# --- kernels ------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["inverse_bits", "zero_point", "low", "high"])
def _quantize(
    x_ptr,
    out_ptr,
    count,
    inverse_bits,
    zero_point,
    low,
    high,
    FLOAT: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at, inside = places(count, BLOCK)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(FLOAT)
    code = code_from(x * real(inverse_bits).to(FLOAT), zero_point, low, high, WIDE)
    tl.store(out_ptr + at, code.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["low", "high"])
def _quantize_from(x_ptr, out_ptr, scale_ptr, zero_ptr, count, low, high, BLOCK: tl.constexpr):
    """8-bit codes on a grid that lies on the device: float64 scale, int64 zero point; arithmetic in float32."""
    at, inside = places(count, BLOCK)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    step = tl.div_rn(tl.full((1,), 1.0, tl.float32), tl.load(scale_ptr + tl.zeros((1,), tl.int32)).to(tl.float32))
    code = code_from(x * step, tl.load(zero_ptr).to(tl.int32), low, high, False)
    tl.store(out_ptr + at, code.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["low", "high"])
def _quantize_channels(
    x_ptr,
    out_ptr,
    scale_ptr,
    zero_ptr,
    count,
    step,
    channels,
    low,
    high,
    FLOAT: tl.constexpr,
    REAL_ZERO: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at, inside = places(count, BLOCK)
    channel = at // step % channels
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(FLOAT)
    scale = tl.load(scale_ptr + channel, mask=inside, other=1.0).to(FLOAT)
    zero = tl.load(zero_ptr + channel, mask=inside, other=0)
    if FLOAT == tl.float32:
        place = x * tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), scale)
    else:
        place = x * (1.0 / scale)
    if REAL_ZERO:
        shift = zero.to(FLOAT)
        place = place + shift
        place = tl.where(place == place, place, shift)
        code = code_from(place, 0, low, high, True)
    else:
        code = code_from(place, zero.to(tl.int64), low, high, WIDE)
    tl.store(out_ptr + at, code.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["scale_bits", "zero_point"])
def _dequantize(
    codes_ptr, out_ptr, count, scale_bits, zero_point, FLOAT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    at, inside = places(count, BLOCK)
    steps = steps_of(tl.load(codes_ptr + at, mask=inside, other=0), zero_point, WIDE)
    value = steps.to(FLOAT) * real(scale_bits).to(FLOAT)
    tl.store(out_ptr + at, narrowed(value, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dequantize_channels(
    codes_ptr,
    out_ptr,
    scale_ptr,
    zero_ptr,
    count,
    step,
    channels,
    FLOAT: tl.constexpr,
    REAL_ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at, inside = places(count, BLOCK)
    channel = at // step % channels
    codes = tl.load(codes_ptr + at, mask=inside, other=0)
    zero = tl.load(zero_ptr + channel, mask=inside, other=0)
    if REAL_ZERO:
        steps = codes.to(FLOAT) - zero.to(FLOAT)
    else:
        steps = (codes.to(tl.int64) - zero.to(tl.int64)).to(FLOAT)
    value = steps * tl.load(scale_ptr + channel, mask=inside, other=1.0).to(FLOAT)
    tl.store(out_ptr + at, narrowed(value, out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["zero_point", "factor_bits", "out_zero", "low", "high"])
def _requantize(
    codes_ptr,
    out_ptr,
    count,
    zero_point,
    factor_bits,
    out_zero,
    low,
    high,
    WIDE_IN: tl.constexpr,
    WIDE_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at, inside = places(count, BLOCK)
    steps = steps_of(tl.load(codes_ptr + at, mask=inside, other=0), zero_point, WIDE_IN)
    code = code_from(steps.to(tl.float32) * real(factor_bits).to(tl.float32), out_zero, low, high, WIDE_OUT)
    tl.store(out_ptr + at, code.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _range_parts(
    x_ptr, low_ptr, high_ptr, count, per_program, FLOAT: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr
):
    """Smallest and largest finite value of a stretch of ``per_program`` elements; infinities where there is none."""
    start = tl.program_id(0).to(tl.int64) * per_program
    low = tl.full((BLOCK,), float("inf"), FLOAT)
    high = tl.full((BLOCK,), float("-inf"), FLOAT)
    for offset in range(0, per_program, BLOCK):
        at = start + offset + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(FLOAT)
        below, above = finite_low_high(x, at < count, LARGEST)
        low, high = tl.minimum(low, below), tl.maximum(high, above)
    tl.store(low_ptr + tl.program_id(0), tl.min(low, axis=0))
    tl.store(high_ptr + tl.program_id(0), tl.max(high, axis=0))


@triton.jit
def _joined(low_ptr, high_ptr, parts, BLOCK: tl.constexpr):
    """The range over all parts; (0, 0) without a finite value."""
    at = tl.arange(0, BLOCK)
    low = tl.min(tl.load(low_ptr + at, mask=at < parts, other=float("inf")), axis=0)
    high = tl.max(tl.load(high_ptr + at, mask=at < parts, other=float("-inf")), axis=0)
    none = low > high
    return tl.where(none, 0.0, low), tl.where(none, 0.0, high)


@triton.jit
def _range_join(low_ptr, high_ptr, out_low_ptr, out_high_ptr, parts, BLOCK: tl.constexpr):
    low, high = _joined(low_ptr, high_ptr, parts, BLOCK)
    tl.store(out_low_ptr, low)
    tl.store(out_high_ptr, high)


@triton.jit
def choose_grid(low, high, quant_min, quant_max, SYMMETRIC: tl.constexpr):
    """``grid.choose_qparams`` in float64: scale, and the zero point as a whole float64 number."""
    low = tl.minimum(low.to(tl.float64), 0.0)
    high = tl.maximum(high.to(tl.float64), 0.0)
    least, most = quant_min.to(tl.float64), quant_max.to(tl.float64)
    spans = (low < 0) & (high > 0)
    if SYMMETRIC:
        half = ((quant_max - quant_min) // 2).to(tl.float64)
        step = tl.maximum(tl.abs(low / -(half + 1)), tl.abs(high / half))
        low = tl.where(spans, -(half + 1) * step, low)
        high = tl.where(spans, half * step, high)
    scale = (high - low) / (most - least)
    # up to 2**-128 the reciprocal is infinite in float32
    scale = tl.where(scale.to(tl.float32).to(tl.float64) <= 2.938735877055719e-39, 0.1, scale)
    small = scale < 6.1e-5
    safe = tl.where(small, scale, 1.0)
    stretch = 6.1e-5 / safe
    one_sided = 6.1e-5 * (most - least)
    stretched_low = tl.where(low == 0, low, tl.where(high == 0, -one_sided, low * stretch))
    stretched_high = tl.where(low == 0, one_sided, tl.where(high == 0, high, high * stretch))
    low = tl.where(small, stretched_low, low)
    high = tl.where(small, stretched_high, high)
    scale = tl.where(small, 6.1e-5, scale)
    from_low, from_high = least - low / scale, most - high / scale
    error_low = tl.abs(least) - tl.abs(low / scale)
    error_high = tl.abs(most) - tl.abs(high / scale)
    zero = tl.where(error_low < error_high, from_low, from_high)
    if SYMMETRIC:
        zero = tl.where(spans, (least + most) / 2, zero)
    return scale, rint(tl.minimum(tl.maximum(zero, least), most))


@triton.jit(do_not_specialize=["quant_min", "quant_max"])
def _grid_join(low_ptr, high_ptr, scale_ptr, zero_ptr, parts, quant_min, quant_max, BLOCK: tl.constexpr):
    low, high = _joined(low_ptr, high_ptr, parts, BLOCK)
    scale, zero = choose_grid(low, high, quant_min, quant_max, False)
    tl.store(scale_ptr, scale)
    tl.store(zero_ptr, zero.to(tl.int64))


# --- operators ----------------------------------------------------------------------------------------------------


def quantize_per_tensor(
    x: Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: torch.dtype
) -> Tensor:
    out = torch.empty_like(x, dtype=dtype)
    programs, block = lines(x.numel())
    launch(
        _quantize,
        (programs,),
        dense(x, out),
        out,
        x.numel(),
        bits(inverse(scale, x.dtype)),
        zero_point,
        quant_min,
        quant_max,
        FLOAT=triton_dtype(x.dtype),
        WIDE=is_wide(dtype, zero_point),
        BLOCK=block,
    )
    return out


def quantize_per_channel(
    x: Tensor, scales: Tensor, zero_points: Tensor, axis: int, quant_min: int, quant_max: int, dtype: torch.dtype
) -> Tensor:
    out = torch.empty_like(x, dtype=dtype)
    programs, block = lines(x.numel())
    launch(
        _quantize_channels,
        (programs,),
        dense(x, out),
        out,
        scales.contiguous(),
        zero_points.contiguous(),
        x.numel(),
        *channel_places(out, axis),
        quant_min,
        quant_max,
        FLOAT=triton_dtype(x.dtype),
        REAL_ZERO=zero_points.is_floating_point(),
        WIDE=True,
        BLOCK=block,
    )
    return out


def dequantize_per_tensor(codes: Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(codes, dtype=dtype)
    programs, block = lines(codes.numel())
    launch(
        _dequantize,
        (programs,),
        dense(codes, out),
        out,
        codes.numel(),
        bits(scale),
        zero_point,
        FLOAT=triton_dtype(dtype),
        WIDE=is_wide(codes.dtype, zero_point),
        BLOCK=block,
    )
    return out


def dequantize_per_channel(codes: Tensor, scales: Tensor, zero_points: Tensor, axis: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(codes, dtype=dtype)
    programs, block = lines(codes.numel())
    launch(
        _dequantize_channels,
        (programs,),
        dense(codes, out),
        out,
        scales.contiguous(),
        zero_points.contiguous(),
        codes.numel(),
        *channel_places(out, axis),
        FLOAT=triton_dtype(dtype),
        REAL_ZERO=zero_points.is_floating_point(),
        BLOCK=block,
    )
    return out


def requantize(
    codes: Tensor,
    scale: float,
    zero_point: int,
    out_scale: float,
    out_zero_point: int,
    out_min: int,
    out_max: int,
    out_dtype: torch.dtype,
) -> Tensor:
    out = torch.empty_like(codes, dtype=out_dtype)
    programs, block = lines(codes.numel())
    launch(
        _requantize,
        (programs,),
        dense(codes, out),
        out,
        codes.numel(),
        zero_point,
        bits(quotient(scale, out_scale)),
        out_zero_point,
        out_min,
        out_max,
        WIDE_IN=is_wide(codes.dtype, zero_point),
        WIDE_OUT=is_wide(out_dtype, out_zero_point),
        BLOCK=block,
    )
    return out


_PARTS = 256


def _parts(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Ranges of at most 256 stretches of ``x``, whose order does not matter: of any layout, without gaps."""
    values = x.detach()
    values = dense(values, torch.empty_like(values))
    count = values.numel()
    block = tile(count, 1024, 1 << 16)
    per_program = ceil_div(ceil_div(count, block), _PARTS) * block
    parts = ceil_div(count, per_program)
    ends = values.new_empty((2, parts), dtype=grid.compute_dtype(x.dtype))
    launch(
        _range_parts,
        (parts,),
        values,
        ends[0],
        ends[1],
        count,
        per_program,
        FLOAT=triton_dtype(x.dtype),
        LARGEST=torch.finfo(grid.compute_dtype(x.dtype)).max,
        BLOCK=block,
    )
    return ends[0], ends[1], parts


def dynamic_range(x: Tensor) -> tuple[Tensor, Tensor]:
    dtype = grid.compute_dtype(x.dtype)
    if x.numel() == 0:
        return x.new_zeros((), dtype=dtype), x.new_zeros((), dtype=dtype)
    low, high = x.new_empty((), dtype=dtype), x.new_empty((), dtype=dtype)
    lows, highs, parts = _parts(x)
    launch(_range_join, (1,), lows, highs, low, high, parts, BLOCK=_PARTS)
    return low, high


def dynamic_qparams(x: Tensor, quant_min: int, quant_max: int) -> tuple[Tensor, Tensor]:
    scale, zero_point = x.new_empty((), dtype=torch.float64), x.new_empty((), dtype=torch.int64)
    lows, highs, parts = _parts(x) if x.numel() else (scale, scale, 0)
    launch(_grid_join, (1,), lows, highs, scale, zero_point, parts, quant_min, quant_max, BLOCK=_PARTS)
    return scale, zero_point


def dynamic_codes(x: Tensor, quant_min: int, quant_max: int) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 codes of ``x`` in its own memory order, on the grid of its finite range as float32; scale, zero point."""
    values = x.to(torch.float32) if x.dtype == torch.float64 else x
    scale, zero_point = dynamic_qparams(values, quant_min, quant_max)
    out = torch.empty_like(values, dtype=torch.uint8)
    programs, block = lines(values.numel())
    launch(_quantize_from, (programs,), dense(values, out), out, scale, zero_point, values.numel(), 0, 255, BLOCK=block)
    return out, scale, zero_point
