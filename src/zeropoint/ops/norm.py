"""Normalization of codes: batch norm with running statistics; layer, group and instance norm with the input's own.

May import: ``dtypes``, ``grid``, ``tensor``, ``ops.registry``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeropoint import grid
from zeropoint.dtypes import as_qdtype
from zeropoint.ops.registry import operator
from zeropoint.tensor import QTensor, make_qtensor

__all__ = ["batch_norm"]

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
        if value is not None and tuple(value.shape) != (channels,):
            raise ValueError(f"batch_norm: {name} must have shape ({channels},), got {tuple(value.shape)}")
    qdtype = x.qdtype if dtype is None else as_qdtype(dtype)
    step = grid.check_scale(scale)
    zero = grid.check_zero_point(zero_point, qdtype.qmin, qdtype.qmax)
    low = zero if relu else qdtype.qmin
    codes = torch.ops.zeropoint.batch_norm.default(
        x._codes, x.scale, x.zero_point, weight, bias, mean, var, eps, step, zero, low, qdtype.qmax, qdtype.storage
    )
    return make_qtensor(codes, qdtype, step, zero)


def _check_input(x: Any, name: str, least: int) -> None:
    if not isinstance(x, QTensor):
        seen = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} takes a quantized tensor, got {seen}: quantize it first")
    x._require_per_tensor(name)
    if x.dim() < least:
        raise ValueError(f"{name} takes {least} or more dimensions, got shape {tuple(x.shape)}")
