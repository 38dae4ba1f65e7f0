"""Normalization of codes: batch norm with running statistics; layer, group and instance norm with the input's own.

May import: ``dtypes``, ``grid``, ``tensor``, ``ops.registry``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zeropoint import grid
from zeropoint.dtypes import as_qdtype
from zeropoint.ops.registry import operator
from zeropoint.tensor import QTensor, make_qtensor

__all__ = ["batch_norm", "group_norm", "instance_norm", "layer_norm"]

_OUT = " float out_scale, int out_zero_point, int out_min, int out_max, ScalarType out_dtype) -> Tensor"


# --- operators over plain tensors ---------------------------------------------------------------------------------


def _like(x: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(x, dtype=arguments[-1])


@operator(
    "batch_norm(Tensor x, float x_scale, int x_zero_point, Tensor? weight, Tensor? bias, Tensor mean, Tensor var,"
    " float eps," + _OUT,
    meta=_like,
)
def batch_norm_reference(
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
    """Batch norm with given statistics: one multiplier and one offset a channel (dimension 1)."""
    factor, offset = _affine(weight, bias, mean, var, eps, x_scale, out_scale)
    shape = [1, -1] + [1] * (x.dim() - 2)
    steps = x.to(torch.int64) - x_zero_point
    codes = grid.requantize(steps, factor.reshape(shape), offset.reshape(shape), out_zero_point, out_min, out_max)
    return _like(x, out_dtype).copy_(codes)


@operator(
    "layer_norm(Tensor x, float x_scale, int x_zero_point, int[] normalized_shape, Tensor? weight, Tensor? bias,"
    " float eps," + _OUT,
    meta=_like,
)
def layer_norm_reference(
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
    """Layer norm: one multiplier and one offset a row, rounded, then weight and bias in steps of the output grid."""
    size = math.prod(normalized_shape)
    rows = x.numel() // max(size, 1)
    steps, mean, var = _statistics((x.to(torch.int64) - x_zero_point).reshape(rows, size))
    factor, offset = _affine(None, None, mean * x_scale, var * (x_scale * x_scale), eps, x_scale, 1.0)
    normalized = steps.to(torch.float32) * factor + offset
    gain = grid.multiplier(1.0 if weight is None else weight.reshape(-1), out_scale).to(x.device)
    shift = grid.multiplier(0.0 if bias is None else bias.reshape(-1), out_scale).to(x.device)
    codes = grid.requantize(normalized, gain, shift, out_zero_point, out_min, out_max)
    return _like(x, out_dtype).copy_(codes.reshape(x.shape))


@operator(
    "group_norm(Tensor x, float x_scale, int x_zero_point, int num_groups, Tensor? weight, Tensor? bias,"
    " float eps," + _OUT,
    meta=_like,
)
def group_norm_reference(
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
    """Group norm: as batch norm, with the statistics of each group of each sample."""
    batch, channels = x.shape[:2]
    members = channels // num_groups
    spatial = math.prod(x.shape[2:])
    size = members * spatial
    steps, mean, var = _statistics((x.to(torch.int64) - x_zero_point).reshape(batch, num_groups, size))
    factor, offset = _affine(
        None if weight is None else weight.reshape(num_groups, members),
        None if bias is None else bias.reshape(num_groups, members),
        mean * x_scale,
        var * (x_scale * x_scale),
        eps,
        x_scale,
        out_scale,
    )
    steps = steps.reshape(batch, num_groups, members, spatial)
    codes = grid.requantize(steps, factor.unsqueeze(-1), offset.unsqueeze(-1), out_zero_point, out_min, out_max)
    return _like(x, out_dtype).copy_(codes.reshape(x.shape))


def _statistics(steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Centred steps, and mean and biased variance of the last dimension, in steps.

    Everything that is summed is an integer, so no order of summation matters. The rows are first shifted by their
    rounded mean: a variance is then never the small difference of two large numbers. Squares of 32-bit steps do not
    fit int64 when summed, so a step is split in two halves of 16 bits; for 8-bit codes the upper one is 0.

    Args:
        steps: int64 codes counted from the zero point, shape (..., n).

    Returns:
        int64 steps counted from the rounded mean, the mean of these (float64, at most a half), and the variance
        (float64), the last two of shape (..., 1).
    """
    count = steps.shape[-1]
    steps = steps - grid.round_mean(steps.sum(-1, keepdim=True), count)
    high = (steps + 2**15) >> 16
    low = steps - (high << 16)
    squares = [(x * y).sum(-1, keepdim=True).to(torch.float64) for x, y in ((high, high), (high, low), (low, low))]
    second = squares[0] * 2.0**32 + squares[1] * 2.0**17 + squares[2]
    first = steps.sum(-1, keepdim=True).to(torch.float64)
    return steps, first / count, ((second - first * first / count) / count).clamp(min=0.0)


def _affine(
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    eps: float,
    x_scale: float,
    out_scale: float,
) -> tuple[Tensor, Tensor]:
    """``(real - mean) / sqrt(var + eps) * weight + bias`` as a multiplier and an offset in steps of the output grid.

    Everything in float64, each result rounded to float32 once. ``mean`` and ``var`` are in real units.
    """
    spread = torch.sqrt(var.to(torch.float64) + eps)
    slope = 1.0 / spread if weight is None else weight.to(torch.float64) / spread
    shift = -(mean.to(torch.float64) * slope)
    if bias is not None:
        shift = bias.to(torch.float64) + shift
    return grid.multiplier(slope * x_scale, out_scale), grid.multiplier(shift, out_scale)


# --- functions over quantized tensors -----------------------------------------------------------------------------


def batch_norm(
    x: QTensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    eps: float,
    scale: float,
    zero_point: int,
    relu: bool = False,
    dtype: Any = None,
) -> QTensor:
    """Batch norm of codes with running statistics, on the given output grid.

    Args:
        x: per-tensor quantized tensor of shape (N, C, ...).
        weight, bias: float tensors of shape (C,), or None.
        mean, var: the running statistics, shape (C,), in real units.
        eps: added to the variance.
        scale, zero_point: the output's grid.
        relu: also clamp at real zero, in the same pass.
        dtype: the output's quantized dtype; None takes ``x``'s.

    Raises:
        TypeError: ``x`` is not quantized. RuntimeError: ``x`` has a per-channel grid.
        ValueError: ``x`` has fewer than two dimensions, or a parameter is not of shape (C,).
    """
    _check_input(x, "batch_norm", 2)
    channels = x._codes.shape[1]
    for name, value in (("weight", weight), ("bias", bias), ("mean", mean), ("var", var)):
        _check_shape("batch_norm", name, value, (channels,))
    qdtype = x.qdtype if dtype is None else as_qdtype(dtype)
    step = grid.check_scale(scale)
    zero = grid.check_zero_point(zero_point, qdtype.qmin, qdtype.qmax)
    low = zero if relu else qdtype.qmin
    codes = torch.ops.zeropoint.batch_norm.default(
        x._codes, x.scale, x.zero_point, weight, bias, mean, var, eps, step, zero, low, qdtype.qmax, qdtype.storage
    )
    return make_qtensor(codes, qdtype, step, zero)


def layer_norm(
    x: QTensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    scale: float,
    zero_point: int,
) -> QTensor:
    """Layer norm of codes over the last dimensions, on the given output grid; statistics are exact.

    Args:
        x: per-tensor quantized tensor whose shape ends in ``normalized_shape``.
        normalized_shape: the sizes of the dimensions that are normalized together.
        weight, bias: float tensors of shape ``normalized_shape``, or None.
        eps: added to the biased variance, in real units.
        scale, zero_point: the output's grid; the dtype stays ``x``'s.

    Raises:
        TypeError: ``x`` is not quantized. RuntimeError: ``x`` has a per-channel grid.
        ValueError: shapes that do not fit, or no grid.
    """
    sizes = tuple(normalized_shape)
    _check_input(x, "layer_norm", 1)
    if not sizes or tuple(x._codes.shape[-len(sizes) :]) != sizes:
        raise ValueError(
            f"layer_norm: a tensor of shape {tuple(x._codes.shape)} does not end in normalized_shape {sizes}"
        )
    _check_shape("layer_norm", "weight", weight, sizes)
    _check_shape("layer_norm", "bias", bias, sizes)
    step = grid.check_scale(scale)
    zero = grid.check_zero_point(zero_point, x.qdtype.qmin, x.qdtype.qmax)
    codes = torch.ops.zeropoint.layer_norm.default(
        x._codes,
        x.scale,
        x.zero_point,
        sizes,
        weight,
        bias,
        eps,
        step,
        zero,
        x.qdtype.qmin,
        x.qdtype.qmax,
        x.qdtype.storage,
    )
    return make_qtensor(codes, x.qdtype, step, zero)


def group_norm(
    x: QTensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    scale: float,
    zero_point: int,
) -> QTensor:
    """Group norm of codes on the given output grid; statistics are exact.

    Args:
        x: per-tensor quantized tensor of shape (N, C, ...), three or more dimensions.
        num_groups: how many groups the channels are split into; divides C.
        weight, bias: float tensors of shape (C,), or None.
        eps: added to the biased variance, in real units.
        scale, zero_point: the output's grid; the dtype stays ``x``'s.

    Raises:
        As :func:`layer_norm`.
    """
    _check_input(x, "group_norm", 3)
    channels = x._codes.shape[1]
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"group_norm: {channels} channels do not split into {num_groups} groups")
    _check_shape("group_norm", "weight", weight, (channels,))
    _check_shape("group_norm", "bias", bias, (channels,))
    step = grid.check_scale(scale)
    zero = grid.check_zero_point(zero_point, x.qdtype.qmin, x.qdtype.qmax)
    codes = torch.ops.zeropoint.group_norm.default(
        x._codes,
        x.scale,
        x.zero_point,
        num_groups,
        weight,
        bias,
        eps,
        step,
        zero,
        x.qdtype.qmin,
        x.qdtype.qmax,
        x.qdtype.storage,
    )
    return make_qtensor(codes, x.qdtype, step, zero)


def instance_norm(
    x: QTensor, weight: Tensor | None, bias: Tensor | None, eps: float, scale: float, zero_point: int
) -> QTensor:
    """Instance norm: :func:`group_norm` with every channel a group of its own."""
    _check_input(x, "instance_norm", 3)
    return group_norm(x, x._codes.shape[1], weight, bias, eps, scale, zero_point)


def _check_shape(operation: str, name: str, value: Tensor | None, shape: tuple[int, ...]) -> None:
    if value is not None and tuple(value.shape) != shape:
        raise ValueError(f"{operation}: {name} must have shape {shape}, got {tuple(value.shape)}")


def _check_input(x: Any, name: str, least: int) -> None:
    if not isinstance(x, QTensor):
        seen = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} takes a quantized tensor, got {seen}: quantize it first")
    x._require_per_tensor(name)
    if x._codes.dim() < least:
        raise ValueError(f"{name} takes {least} or more dimensions, got shape {tuple(x._codes.shape)}")
