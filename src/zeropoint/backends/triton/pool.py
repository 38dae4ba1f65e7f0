"""Pooling and means: the largest code or the rounded mean of windows, on the input's grid.

One kernel serves one, two and three dimensions, any layout, and adaptive windows too: a program takes neighbouring
outputs and walks through their windows.

May import: ``backends.triton``, the checks of ``ops.pool``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropoint.backends.triton._core import ceil_div, is_wide, launch, lines, rint, steps_of, tile
from zeropoint.ops.pool import _avg_pool_sizes, _check_adaptive, _empty, _is_channels_last, _mean_axes, _pool_sizes

__all__ = ["adaptive_avg_pool", "avg_pool", "max_pool", "mean"]


# --- kernels ------------------------------------------------------------------------------------------------------


@triton.jit
def _bounds(o, size, out, kernel, stride, pad, dilate, ADAPTIVE: tl.constexpr):
    """First position and number of positions of a window, which may hang over both ends."""
    if ADAPTIVE:
        first = o * size // out
        length = ((o + 1) * size + out - 1) // out - first
    else:
        first = o * stride - pad
        length = tl.zeros_like(o) + kernel
    return first, length


@triton.jit
def _counted(first, length, size, pad, WITH_PADDING: tl.constexpr):
    """How many positions of a window count: inside the input, or inside the padded input."""
    if WITH_PADDING:
        count = tl.minimum(first + length, size + pad) - first
    else:
        count = tl.minimum(first + length, size) - tl.maximum(first, 0)
    return count


@triton.jit(do_not_specialize=["zero_point", "divisor", "low", "high"])
def _pool(
    x_ptr,
    out_ptr,
    count,
    channels,
    zero_point,
    divisor,
    low,
    high,
    in_d,
    in_h,
    in_w,
    out_d,
    out_h,
    out_w,
    kernel_d,
    kernel_h,
    kernel_w,
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
    MAX: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    WITH_PADDING: tl.constexpr,
    HAS_DIVISOR: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    if CHANNELS_LAST:
        c, rest = at % channels, at // channels
        ow, oh = rest % out_w, rest // out_w % out_h
        od, n = rest // out_w // out_h % out_d, rest // out_w // out_h // out_d
    else:
        ow, oh, od = at % out_w, at // out_w % out_h, at // out_w // out_h % out_d
        plane = at // out_w // out_h // out_d
        c, n = plane % channels, plane // channels
    first_d, length_d = _bounds(od, in_d, out_d, kernel_d, stride_d, pad_d, dilate_d, ADAPTIVE)
    first_h, length_h = _bounds(oh, in_h, out_h, kernel_h, stride_h, pad_h, dilate_h, ADAPTIVE)
    first_w, length_w = _bounds(ow, in_w, out_w, kernel_w, stride_w, pad_w, dilate_w, ADAPTIVE)
    base = x_ptr + n * x_n + c * x_c
    if MAX:
        result = tl.zeros((BLOCK,), tl.int64) + low
    else:
        result = tl.zeros((BLOCK,), tl.int64)
    for i in range(kernel_d):
        d = first_d + i * dilate_d
        for j in range(kernel_h):
            h = first_h + j * dilate_h
            for k in range(kernel_w):
                w = first_w + k * dilate_w
                inside = here & (d >= 0) & (d < in_d) & (h >= 0) & (h < in_h) & (w >= 0) & (w < in_w)
                if ADAPTIVE:
                    inside = inside & (i < length_d) & (j < length_h) & (k < length_w)
                codes = tl.load(base + d * x_d + h * x_h + w * x_w, mask=inside, other=0)
                if MAX:
                    result = tl.maximum(result, tl.where(inside, codes.to(tl.int64), low))
                else:
                    result += tl.where(inside, steps_of(codes, zero_point, WIDE).to(tl.int64), 0)
    if not MAX:
        if HAS_DIVISOR:
            size = tl.zeros((BLOCK,), tl.int64) + divisor
        else:
            size = _counted(first_d, length_d, in_d, pad_d, WITH_PADDING)
            size = size * _counted(first_h, length_h, in_h, pad_h, WITH_PADDING)
            size = size * _counted(first_w, length_w, in_w, pad_w, WITH_PADDING)
        mean = rint(result.to(tl.float64) / tl.where(here, size, 1).to(tl.float64)).to(tl.int64) + zero_point
        result = tl.minimum(tl.maximum(mean, low), high)
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["zero_point", "low", "high"])
def _row_mean(
    x_ptr,
    out_ptr,
    rows,
    count,
    row_step,
    step,
    zero_point,
    low,
    high,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Means of rows whose elements lie ``step`` apart."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    total = tl.zeros((BLOCK_M,), tl.int64)
    for start in range(0, count, BLOCK):
        k = start + tl.arange(0, BLOCK)
        inside = (m < rows)[:, None] & (k < count)[None, :]
        codes = tl.load(x_ptr + m[:, None] * row_step + k.to(tl.int64)[None, :] * step, mask=inside, other=0)
        total += tl.sum(tl.where(inside, steps_of(codes, zero_point, WIDE), 0).to(tl.int64), axis=1)
    size = tl.full((1,), count, tl.int64).to(tl.float64)
    mean = rint(total.to(tl.float64) / size).to(tl.int64) + zero_point
    mean = tl.minimum(tl.maximum(mean, low), high)
    tl.store(out_ptr + m, mean.to(out_ptr.dtype.element_ty), mask=m < rows)


# --- operators ----------------------------------------------------------------------------------------------------


def _run(
    x: Tensor,
    sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *,
    zero_point: int = 0,
    maximum: bool = False,
    adaptive: bool = False,
    with_padding: bool = False,
    divisor: int | None = None,
) -> Tensor:
    out = _empty(x, sizes)
    missing = 3 - len(sizes)
    limits = torch.iinfo(x.dtype)
    programs, block = lines(out.numel())
    ones, zeros = [1] * missing, [0] * missing
    launch(
        _pool,
        (programs,),
        x,
        out,
        out.numel(),
        x.shape[1],
        zero_point,
        1 if divisor is None else divisor,
        limits.min,
        limits.max,
        *ones,
        *x.shape[2:],
        *ones,
        *sizes,
        *ones,
        *kernel,
        *ones,
        *stride,
        *zeros,
        *padding,
        *ones,
        *dilation,
        x.stride(0),
        x.stride(1),
        *zeros,
        *x.stride()[2:],
        MAX=maximum,
        ADAPTIVE=adaptive,
        WITH_PADDING=with_padding,
        HAS_DIVISOR=divisor is not None,
        CHANNELS_LAST=_is_channels_last(x),
        WIDE=is_wide(x.dtype, zero_point),
        BLOCK=block,
    )
    return out


def max_pool(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Tensor:
    sizes = _pool_sizes("max_pool", x, kernel_size, stride, padding, dilation, ceil_mode)
    return _run(x, sizes, kernel_size, stride, padding, dilation, maximum=True)


def avg_pool(
    x: Tensor,
    zero_point: int,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    sizes = _avg_pool_sizes(x, kernel_size, stride, padding, ceil_mode, divisor_override)
    return _run(
        x,
        sizes,
        kernel_size,
        stride,
        padding,
        [1] * len(sizes),
        zero_point=zero_point,
        with_padding=count_include_pad,
        divisor=divisor_override,
    )


def adaptive_avg_pool(x: Tensor, zero_point: int, output_size: Sequence[int]) -> Tensor:
    _check_adaptive(x, output_size)
    if all(size == 1 for size in output_size):
        axes = list(range(2, x.dim()))
        return _empty(x, output_size).copy_(mean(x, zero_point, axes, True))
    rank = len(output_size)
    # the longest window: whole parts, and one position more at each end where the sizes do not divide
    longest = [
        size // max(out, 1) + (0 if size % max(out, 1) == 0 else 2)
        for size, out in zip(x.shape[2:], output_size, strict=True)
    ]
    return _run(x, output_size, longest, [1] * rank, [0] * rank, [1] * rank, zero_point=zero_point, adaptive=True)


def mean(x: Tensor, zero_point: int, dim: Sequence[int], keepdim: bool) -> Tensor:
    axes = _mean_axes(x, dim)
    kept = [d for d in range(x.dim()) if d not in axes]
    shape = [1 if d in axes else size for d, size in enumerate(x.shape) if keepdim or d not in axes]
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    count = math.prod(x.shape[d] for d in axes)
    if count == 0:
        return out.fill_(zero_point)
    rows = x.permute(*kept, *axes).reshape(-1, count)
    block_m, block = (tile(out.numel(), 16, 1024), tile(count, 128, 1024))
    limits = torch.iinfo(x.dtype)
    launch(
        _row_mean,
        (ceil_div(out.numel(), block_m),),
        rows,
        out,
        out.numel(),
        count,
        rows.stride(0),
        rows.stride(1),
        zero_point,
        limits.min,
        limits.max,
        WIDE=is_wide(x.dtype, zero_point),
        BLOCK_M=block_m,
        BLOCK=block,
    )
    return out
