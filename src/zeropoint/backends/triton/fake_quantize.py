"""Fake quantize and its gradients, and the statistics of the fused fake quantizer; nothing waits for the device.

May import: ``backends.triton``, ``ops.ranges``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropoint.backends.triton._core import (
    INTERPRETED,
    bits,
    ceil_div,
    channel_places,
    dense,
    finite_low_high,
    launch,
    lines,
    narrowed,
    places,
    power_of_two,
    real,
    rint,
    tile,
    triton_dtype,
)
from zeropoint.backends.triton.quantize import choose_grid
from zeropoint.grid import compute_dtype
from zeropoint.ops.ranges import channels_first

__all__ = [
    "fake_quantize_backward",
    "fake_quantize_learnable_backward",
    "fake_quantize_per_channel",
    "fake_quantize_per_tensor",
    "moving_average_observe",
]

_FLOAT32_MAX = torch.finfo(torch.float32).max
_EXACT_IN_FLOAT32 = 2**23  # as in grid: wider grids have ends that float32 rounds


# --- kernels ------------------------------------------------------------------------------------------------------


@triton.jit
def _steps(x, scale, zero, low, high, FLOAT: tl.constexpr, REAL_ZERO: tl.constexpr, WIDE: tl.constexpr):
    """``grid.fake_quantize`` before the product with the scale, and whether the codes were inside."""
    if FLOAT == tl.float32:
        place = x * tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    else:
        place = x * (1.0 / scale)
    if REAL_ZERO:
        shift = zero.to(FLOAT)
        place = rint(place + shift)
        bottom, top = tl.zeros_like(place) + low.to(FLOAT), tl.zeros_like(place) + high.to(FLOAT)
    else:
        place = rint(place)
        bottom, top = (low - zero.to(tl.int64)).to(FLOAT), (high - zero.to(tl.int64)).to(FLOAT)
    kept = (place >= bottom) & (place <= top)
    clamped = tl.where(place < bottom, bottom, tl.where(place > top, top, place))  # NaN stays
    if REAL_ZERO:
        steps = clamped - shift
    else:
        if WIDE:
            far = tl.where(place == place, place, 0.0)
            far = tl.minimum(tl.maximum(far, -4611686018427387904.0), 4611686018427387904.0).to(tl.int64)
            code = tl.minimum(tl.maximum(far + zero.to(tl.int64), low), high)
            steps = tl.where(place == place, (code - zero.to(tl.int64)).to(FLOAT), place)
        else:
            steps = clamped + 0.0
    return steps, kept


@triton.jit(do_not_specialize=["low", "high"])
def _fake_quantize(
    x_ptr,
    out_ptr,
    mask_ptr,
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
    """``grid.fake_quantize``; one grid is one channel."""
    at, inside = places(count, BLOCK)
    channel = at // step % channels
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(FLOAT)
    scale = tl.load(scale_ptr + channel, mask=inside, other=1.0).to(FLOAT)
    zero = tl.load(zero_ptr + channel, mask=inside, other=0)
    steps, kept = _steps(x, scale, zero, low, high, FLOAT, REAL_ZERO, WIDE)
    tl.store(out_ptr + at, narrowed(steps * scale, out_ptr.dtype.element_ty), mask=inside)
    tl.store(mask_ptr + at, kept.to(tl.int8), mask=inside)


@triton.jit
def _through_mask(grad_ptr, mask_ptr, out_ptr, count, FLOAT: tl.constexpr, BLOCK: tl.constexpr):
    """``grad * mask``: a NaN passes wherever it stands."""
    at, inside = places(count, BLOCK)
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(FLOAT)
    mask = tl.load(mask_ptr + at, mask=inside, other=0)
    tl.store(out_ptr + at, narrowed(grad * mask.to(FLOAT), out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["low", "high"])
def _learn(
    grad_ptr,
    x_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    sums_ptr,
    channels,
    count,
    step,
    numel,
    part_length,
    parts,
    low,
    high,
    FLOAT: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of one part of some channels' elements, and what that part adds to the gradients of their grids.

    A channel's ``count`` elements lie in runs of ``step``.
    """
    none = numel - numel  # of 64 bits where places need them, as in places
    m = (tl.program_id(0) + none) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    scale = tl.load(scale_ptr + m, mask=m < channels, other=1.0).to(FLOAT)
    zero = tl.load(zero_ptr + m, mask=m < channels, other=0).to(tl.int64)
    bottom, top = (low - zero).to(FLOAT), (high - zero).to(FLOAT)
    by_scale = tl.zeros((BLOCK_M, BLOCK), tl.float64)
    by_zero = tl.zeros((BLOCK_M, BLOCK), tl.float64)
    begin = (tl.program_id(1) + none) * part_length
    for start in range(0, part_length, BLOCK):
        k = begin + start + tl.arange(0, BLOCK)[None, :]
        inside = (m < channels) & (k >= 0) & (k < count)
        at = k // step * (channels * step) + m * step + k % step
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(FLOAT)
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(FLOAT)
        steps, kept = _steps(x, scale, zero, low, high, FLOAT, False, WIDE)
        y = steps * scale
        if FLOAT == tl.float32:
            error = tl.div_rn(y - x, tl.zeros_like(x) + scale)
        else:
            error = (y - x) / scale
        shares = tl.where(kept, error, tl.where(x > y, top, bottom)) * grad
        moves = tl.where(kept, 0.0, -scale * grad)
        tl.store(out_ptr + at, narrowed(kept.to(FLOAT) * grad, out_ptr.dtype.element_ty), mask=inside)
        by_scale += tl.where(inside, shares, 0.0).to(tl.float64)
        by_zero += tl.where(inside, moves, 0.0).to(tl.float64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = row.to(tl.int64) * parts + tl.program_id(1)
    tl.store(sums_ptr + at, tl.sum(by_scale, axis=1), mask=row < channels)
    tl.store(sums_ptr + at + channels * parts, tl.sum(by_zero, axis=1), mask=row < channels)


@triton.jit(do_not_specialize=["factor"])
def _totals(sums_ptr, out_ptr, rows, parts, factor, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of each row's parts, times a factor."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK)
    shown = (m < rows)[:, None] & (k < parts)[None, :]
    total = tl.sum(tl.load(sums_ptr + m[:, None] * parts + k[None, :], mask=shown, other=0.0), axis=1)
    tl.store(out_ptr + m, narrowed(total * real(factor), out_ptr.dtype.element_ty), mask=m < rows)


@triton.jit
def _row_parts(
    x_ptr,
    low_ptr,
    high_ptr,
    odd_ptr,
    rows,
    count,
    row_step,
    step,
    part_length,
    parts,
    FLOAT: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Range of the finite values of one part of some rows, and whether there were others."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    low = tl.full((BLOCK_M, BLOCK), float("inf"), FLOAT)
    high = tl.full((BLOCK_M, BLOCK), float("-inf"), FLOAT)
    odd = tl.zeros((BLOCK_M, BLOCK), tl.int32)
    begin = tl.program_id(1).to(tl.int64) * part_length
    for start in range(0, part_length, BLOCK):
        k = begin + start + tl.arange(0, BLOCK)
        inside = (m < rows)[:, None] & (k < count)[None, :]
        x = tl.load(x_ptr + m[:, None] * row_step + k[None, :] * step, mask=inside, other=0.0).to(FLOAT)
        below, above = finite_low_high(x, inside, LARGEST)
        low, high = tl.minimum(low, below), tl.maximum(high, above)
        odd = odd | tl.where(tl.abs(x) <= LARGEST, 0, 1)
    at = m * parts + tl.program_id(1)
    tl.store(low_ptr + at, tl.min(low, axis=1), mask=m < rows)
    tl.store(high_ptr + at, tl.max(high, axis=1), mask=m < rows)
    tl.store(odd_ptr + at, tl.max(odd, axis=1), mask=m < rows)


@triton.jit
def _moved(old, new, constant, rest):
    """``ops.ranges.moving_average``."""
    moved = old + constant * (new - old)
    moved = tl.where(tl.abs(moved) <= 3.4028234663852886e38, moved, rest * old + constant * new)
    moved = tl.where(tl.abs(new) == float("inf"), old, moved)
    return tl.where(tl.abs(old) == float("inf"), new, moved)


@triton.jit
def _narrow(ends):
    """``ops.ranges.narrow``."""
    if ends.dtype == tl.float64:
        limited = tl.minimum(tl.maximum(ends, -3.4028234663852886e38), 3.4028234663852886e38)
        ends = tl.where(tl.abs(ends) == float("inf"), ends, limited)
    return ends.to(tl.float32)


@triton.jit(do_not_specialize=["constant", "rest", "quant_min", "quant_max", "middle"])
def _observe(
    low_ptr,
    high_ptr,
    min_ptr,
    max_ptr,
    scale_ptr,
    zero_ptr,
    eps_ptr,
    rows,
    parts,
    constant,
    rest,
    quant_min,
    quant_max,
    middle,
    SEEN: tl.constexpr,
    UPDATE: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Takes the parts' ranges into the averages, and makes the grids: ``moving_average_qparams``."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = m < rows
    low = tl.load(min_ptr + m, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(max_ptr + m, mask=inside, other=0.0).to(tl.float32)
    if SEEN:
        k = tl.arange(0, BLOCK)
        shown = inside[:, None] & (k < parts)[None, :]
        at = m.to(tl.int64)[:, None] * parts + k[None, :]
        least = tl.min(tl.load(low_ptr + at, mask=shown, other=float("inf")), axis=1)
        most = tl.max(tl.load(high_ptr + at, mask=shown, other=float("-inf")), axis=1)
        weight, others = real(constant).to(tl.float32), real(rest).to(tl.float32)
        low = _moved(low, _narrow(least), weight, others)
        high = _moved(high, _narrow(most), weight, others)
        tl.store(min_ptr + m, low, mask=inside)
        tl.store(max_ptr + m, high, mask=inside)
    if UPDATE:
        seen = low <= high
        low, high = tl.minimum(tl.where(seen, low, 0.0), 0.0), tl.maximum(tl.where(seen, high, 0.0), 0.0)
        if SYMMETRIC:  # a one-sided range is mirrored by half: it then spans zero, and never decides the step
            mirrored = tl.where(low == 0, -high * 0.5, low)
            high = tl.where(high == 0, -low * 0.5, high)
            low = mirrored
        eps = tl.load(eps_ptr + tl.zeros((BLOCK_M,), tl.int32))
        scale, zero = choose_grid(low, high, quant_min, quant_max, SYMMETRIC)
        small = scale < eps.to(tl.float64)
        if eps.dtype == tl.float64:
            steps = low.to(tl.float64) / eps
        else:
            steps = tl.div_rn(low, eps.to(tl.float32))
        floored = tl.minimum(tl.maximum(quant_min - rint(steps), quant_min), quant_max)
        scale = tl.where(small, eps.to(tl.float64), scale)
        zero = tl.where(small, floored.to(tl.float64), zero)
        if SYMMETRIC:
            zero = tl.zeros_like(zero) + middle
        tl.store(scale_ptr + m, tl.where(seen, scale, 1.0).to(scale_ptr.dtype.element_ty), mask=inside)
        tl.store(zero_ptr + m, tl.where(seen, zero, 0.0).to(zero_ptr.dtype.element_ty), mask=inside)


# --- operators ----------------------------------------------------------------------------------------------------


def _run(
    x: Tensor, scales: Tensor, zero_points: Tensor, axis: int | None, quant_min: int, quant_max: int
) -> tuple[Tensor, Tensor]:
    out, mask = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
    programs, block = lines(x.numel())
    real_zero = zero_points.is_floating_point()
    launch(
        _fake_quantize,
        (programs,),
        dense(x, out),
        out,
        mask.view(torch.uint8),
        scales.contiguous(),
        zero_points.to(x.device).contiguous(),
        x.numel(),
        *((1, 1) if axis is None else channel_places(out, axis)),
        quant_min,
        quant_max,
        FLOAT=triton_dtype(x.dtype),
        REAL_ZERO=real_zero,
        WIDE=quant_max - quant_min > _EXACT_IN_FLOAT32,
        BLOCK=block,
    )
    return out, mask


def fake_quantize_per_tensor(
    x: Tensor, scale: Tensor, zero_point: Tensor, quant_min: int, quant_max: int
) -> tuple[Tensor, Tensor]:
    if scale.numel() != 1 or zero_point.numel() != 1:
        raise RuntimeError(
            "fake_quantize_per_tensor takes one scale and one zero point, got shapes "
            f"{tuple(scale.shape)} and {tuple(zero_point.shape)}"
        )
    return _run(x, scale.to(x.device), zero_point, None, quant_min, quant_max)


def fake_quantize_per_channel(
    x: Tensor, scales: Tensor, zero_points: Tensor, axis: int, quant_min: int, quant_max: int
) -> tuple[Tensor, Tensor]:
    if not -x.dim() <= axis < x.dim():
        raise RuntimeError(f"fake_quantize_per_channel: axis {axis} is not a dimension of shape {tuple(x.shape)}")
    if not scales.numel() == zero_points.numel() == x.shape[axis]:
        raise RuntimeError(
            f"fake_quantize_per_channel: {x.shape[axis]} channels along axis {axis} need as many scales and zero "
            f"points, got {scales.numel()} and {zero_points.numel()}"
        )
    return _run(x, scales, zero_points, axis, quant_min, quant_max)


def fake_quantize_backward(grad: Tensor, mask: Tensor) -> Tensor:
    if grad.shape != mask.shape:
        raise RuntimeError(f"a gradient of shape {tuple(grad.shape)} does not fit a mask of {tuple(mask.shape)}")
    out = torch.empty_like(grad)
    programs, block = lines(grad.numel())
    launch(
        _through_mask,
        (programs,),
        dense(grad, out),
        dense(mask, out).view(torch.uint8),
        out,
        grad.numel(),
        FLOAT=triton_dtype(grad.dtype),
        BLOCK=block,
    )
    return out


def fake_quantize_learnable_backward(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    axis: int | None,
    quant_min: int,
    quant_max: int,
    factor: float,
) -> tuple[Tensor, Tensor, Tensor]:
    channels = 1 if axis is None else x.shape[axis]
    if grad.shape != x.shape:
        raise RuntimeError(f"a gradient of shape {tuple(grad.shape)} does not fit values of {tuple(x.shape)}")
    if not scale.numel() == zero_point.numel() == channels:
        raise RuntimeError(
            f"fake_quantize_learnable_backward: {channels} grids need as many scales and zero points, got "
            f"{scale.numel()} and {zero_point.numel()}"
        )
    out = torch.empty_like(x, dtype=grad.dtype)
    shared = torch.zeros((2, *scale.shape), dtype=scale.dtype, device=x.device)
    if x.numel() == 0:
        return out, shared[0], shared[1]
    step = count = x.numel() // channels
    if axis is not None and channels > 1:
        step = channel_places(out, axis)[0]
    # neighbours in memory are elements of one channel, or, where runs are short, of several channels
    size = 1 << 16 if INTERPRETED else 1024
    block = power_of_two(count, 16, size // power_of_two(channels, 1, 32 // power_of_two(step, 1, 32)))
    block_m = power_of_two(channels, 1, size // block)
    rows = ceil_div(channels, block_m)
    parts = max(1, min(ceil_div(1024, rows), ceil_div(count, block)))
    part_length = ceil_div(ceil_div(count, parts), block) * block
    parts = ceil_div(count, part_length)
    sums = torch.empty((2, channels, parts), dtype=torch.float64, device=x.device)
    launch(
        _learn,
        (rows, parts),
        dense(grad, out),
        dense(x, out),
        scale.contiguous(),
        zero_point.contiguous(),
        out,
        sums,
        channels,
        count,
        step,
        x.numel(),
        part_length,
        parts,
        quant_min,
        quant_max,
        FLOAT=triton_dtype(torch.promote_types(x.dtype, scale.dtype)),
        WIDE=quant_max - quant_min > _EXACT_IN_FLOAT32,
        BLOCK_M=block_m,
        BLOCK=block,
    )
    block = power_of_two(parts, 1, 1024)
    block_m = power_of_two(2 * channels, 1, size // block)
    launch(
        _totals,
        (ceil_div(2 * channels, block_m),),
        sums,
        shared,
        2 * channels,
        parts,
        bits(factor),
        BLOCK_M=block_m,
        BLOCK=block,
    )
    return out, shared[0], shared[1]


def moving_average_observe(
    x: Tensor,
    min_val: Tensor,
    max_val: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    eps: Tensor,
    averaging_constant: float,
    quant_min: int,
    quant_max: int,
    axis: int | None,
    symmetric: bool,
    middle: int,
    update_grid: bool,
) -> Tensor:
    values = x.detach()
    if axis is None:  # the order does not matter for one range
        rows = dense(values, torch.empty_like(values)).as_strided((1, values.numel()), (values.numel(), 1))
    else:
        rows = channels_first(values, axis)
    count, length = rows.shape
    buffers = (min_val, max_val, scale, zero_point)
    if min_val.numel() != count or max_val.numel() != count or (update_grid and scale.numel() != count):
        raise RuntimeError(f"moving_average_observe: {count} ranges do not fit buffers of {min_val.numel()} entries")
    block_m, block = (tile(count, 4, 4096) if count > 1 else 1), power_of_two(length, 16, 4096 if INTERPRETED else 1024)
    if not INTERPRETED and count > 1:
        block_m, block = 4, power_of_two(length, 16, 256)
    parts = max(1, min(256 if count == 1 else 8, ceil_div(length, block)))
    part_length = ceil_div(ceil_div(length, parts), block) * block
    parts = ceil_div(length, part_length) if length else 1
    dtype = compute_dtype(x.dtype)
    ends = torch.empty((2, count, parts), dtype=dtype, device=x.device)
    odd = torch.zeros((count, parts), dtype=torch.int32, device=x.device)
    seen = rows.numel() > 0
    if seen:
        launch(
            _row_parts,
            (ceil_div(count, block_m), parts),
            rows,
            ends[0],
            ends[1],
            odd,
            count,
            length,
            rows.stride(0),
            rows.stride(1),
            part_length,
            parts,
            FLOAT=triton_dtype(x.dtype),
            LARGEST=torch.finfo(dtype).max,
            BLOCK_M=block_m,
            BLOCK=block,
        )
    plain = [buffer if buffer.is_contiguous() else buffer.contiguous() for buffer in buffers]
    block_m = power_of_two(count, 1, 4096 if INTERPRETED else 32)
    if seen or update_grid:
        launch(
            _observe,
            (ceil_div(count, block_m),),
            ends[0],
            ends[1],
            *plain,
            eps,
            count,
            parts,
            bits(averaging_constant),
            bits(1.0 - averaging_constant),
            quant_min,
            quant_max,
            middle,
            SEEN=seen,
            UPDATE=update_grid,
            SYMMETRIC=symmetric,
            BLOCK_M=block_m,
            BLOCK=power_of_two(parts, 1, 256),
        )
    for buffer, written in zip(buffers, plain, strict=True):
        if buffer is not written:
            buffer.copy_(written)
    return odd.any()
