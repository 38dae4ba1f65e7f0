"""Pieces of every integer product: signed bytes, corrections for zero points, and the step from sums to outputs.

All bytes are multiplied as int8: unsigned codes are flipped by 128, and so are their zero points. With ``x`` and ``w``
flipped where needed, and all sums over k::

    sum((x - xz) * (w - wz)) = sum(x * w) - xz * sum(w) - wz * sum(x) + K * xz * wz

32-bit arithmetic wraps on the way, which does no harm as long as the result fits; behind ``EXACT_DEPTH``, 64 bits hold
it.

May import: triton, ``backends.triton._core``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zeropoint.backends.triton._core import code_from, narrowed, real

__all__ = ["EXACT_DEPTH", "SPLIT_DEPTH", "flip", "less_weight_zero_points", "outputs", "store_tile"]

EXACT_DEPTH = (2**31 - 1) // 255**2
"""Products of two codes' steps that a 32-bit sum holds in the worst case."""

SPLIT_DEPTH = 2**31 // 128**2 - 1
"""Products of two signed bytes that a 32-bit sum holds in the worst case."""


@triton.jit
def flip(codes, UNSIGNED: tl.constexpr):
    """Signed bytes of codes."""
    if UNSIGNED:
        codes = (codes ^ 0x80).to(tl.int8, bitcast=True)
    return codes


@triton.jit
def less_weight_zero_points(sums, row_sums, depth, x_zero, weight_zeros):
    """What zero points of the weights take from the sums over ``depth`` products, in the sums' own integers."""
    zeros = weight_zeros.to(sums.dtype)
    both = depth * x_zero * zeros
    return sums + both[None, :] - zeros[None, :] * row_sums.to(sums.dtype)[:, None]


@triton.jit
def outputs(
    sums,
    n,
    inside,
    weight_scale_ptr,
    weight_step,
    bias_ptr,
    x_scale,
    out_scale_bits,
    out_zero,
    low,
    high,
    HAS_BIAS: tl.constexpr,
    REAL: tl.constexpr,
    RELU: tl.constexpr,
):
    """Codes, or floats with REAL, of exact sums (rows, columns): ``grid.requantize``, or the step of dynamic layers.

    ``x_scale`` is a float64 number, ``n`` the columns' channels, ``weight_step`` 0 for one scale, 1 for one a channel.
    """
    scale = tl.load(weight_scale_ptr + n * weight_step, mask=inside, other=1.0).to(tl.float64) * x_scale
    if not REAL:
        scale = scale / real(out_scale_bits)
    y = sums.to(tl.float32) * scale.to(tl.float32)[None, :]
    if HAS_BIAS:
        offset = tl.load(bias_ptr + n, mask=inside, other=0.0)
        if REAL:
            shift = offset.to(tl.float32)
        else:
            shift = (offset.to(tl.float64) / real(out_scale_bits)).to(tl.float32)
        y = y + shift[None, :]
    if REAL:
        if RELU:
            y = tl.where(y < 0, 0.0, y)
        result = y
    else:
        result = code_from(y, out_zero, low, high, False)
    return result


@triton.jit
def store_tile(out_ptr, values, rows, columns, row_step, inside):
    """A tile of outputs whose columns are neighbours in memory."""
    places = out_ptr + rows[:, None] * row_step + columns[None, :]
    tl.store(places, narrowed(values, out_ptr.dtype.element_ty), mask=inside)
