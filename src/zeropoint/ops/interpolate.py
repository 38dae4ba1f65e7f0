"""Resizing of quantized pictures, on the input's grid: ``torch.nn.functional.interpolate`` on quantized tensors.

A channels-last input gives a channels-last output.

May import: ``tensor``, ``ops.conv`` (tuples), ``ops.registry``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zeropoint.ops.registry import operator
from zeropoint.tensor import QTensor, implements

__all__ = ["interpolate"]

_LINEAR = {"linear": 1, "bilinear": 2, "trilinear": 3}
_MODES = ("nearest", "nearest-exact", *_LINEAR, "area")


# --- operator over plain tensors ----------------------------------------------------------------------------------


def _check(x: Tensor, size: Sequence[int], ratio: Sequence[float], mode: str) -> None:
    if mode not in ("nearest", "nearest-exact", "linear"):
        raise RuntimeError(f"interpolate takes the modes nearest, nearest-exact and linear, got {mode!r}")
    if len(size) not in (1, 2, 3) or len(ratio) != len(size) or x.dim() != len(size) + 2:
        raise RuntimeError(
            f"interpolate to {list(size)} takes an input (N, C, spatial) and a ratio a dimension, got shape "
            f"{tuple(x.shape)} and {list(ratio)}"
        )
    if min(size) < 1 or min(x.shape[1:]) < 1:
        raise RuntimeError(f"interpolate takes sizes above 0, got {tuple(x.shape)} to {list(size)}")


def _empty(x: Tensor, size: Sequence[int]) -> Tensor:
    if x.movedim(1, -1).is_contiguous():
        return x.new_empty((x.shape[0], *size, x.shape[1])).movedim(-1, 1)
    return x.new_empty((x.shape[0], x.shape[1], *size))


def _meta(
    x: Tensor, zero_point: int, size: Sequence[int], ratio: Sequence[float], mode: str, align_corners: bool
) -> Tensor:
    _check(x, size, ratio, mode)
    return _empty(x, size)


@operator(
    "interpolate(Tensor x, int zero_point, int[] size, float[] ratio, str mode, bool align_corners) -> Tensor",
    meta=_meta,
)
def interpolate_reference(
    x: Tensor, zero_point: int, size: Sequence[int], ratio: Sequence[float], mode: str, align_corners: bool
) -> Tensor:
    """Codes (N, C, spatial) resized to ``size``; ``ratio`` is how many input positions one output position is.

    ``nearest`` reads position ``floor(o * ratio)``, ``nearest-exact`` ``floor((o + 0.5) * ratio)``, in float32 as
    torch does. ``linear`` reads at ``p = max((o + 0.5) * ratio - 0.5, 0)``, or ``o * ratio`` with aligned corners:
    ``d[i] * (1 - t) + d[i + 1] * t`` for ``i = floor(p)``, ``t = p - i`` and ``d = code - zero_point``, one dimension
    after the other from the last, each product and sum in float64; then ``rint`` and the zero point.
    """
    _check(x, size, ratio, mode)
    result = _empty(x, size)
    if mode != "linear":
        for d, out in enumerate(size):
            place = torch.arange(out, dtype=torch.float32, device=x.device)
            half = 0.5 if mode == "nearest-exact" else 0.0
            index = ((place + half) * ratio[d]).floor().to(torch.int64).clamp(max=x.shape[2 + d] - 1)
            x = _select(x, 2 + d, index)
        return result.copy_(x)
    steps = x.to(torch.float64) - zero_point
    for d in reversed(range(len(size))):
        place = torch.arange(size[d], dtype=torch.float64, device=x.device)
        place = place * ratio[d] if align_corners else ((place + 0.5) * ratio[d] - 0.5).clamp(min=0)
        last = x.shape[2 + d] - 1
        low = place.floor().clamp(max=last)
        share = (place - low).clamp(max=1.0).reshape([-1] + [1] * (len(size) - 1 - d))
        index = low.to(torch.int64)
        steps = _select(steps, 2 + d, index) * (1 - share) + _select(steps, 2 + d, (index + 1).clamp(max=last)) * share
    limits = torch.iinfo(x.dtype)
    return result.copy_((torch.round(steps) + zero_point).clamp(limits.min, limits.max))


def _select(x: Tensor, axis: int, index: Tensor) -> Tensor:
    """``index_select`` in memory order, so that channels-last stays so."""
    last = x.movedim(1, -1)
    return last.index_select(axis - 1, index).movedim(-1, 1) if last.is_contiguous() else x.index_select(axis, index)


# --- torch's function on quantized tensors ------------------------------------------------------------------------


def interpolate(
    x: QTensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> QTensor:
    """Resizes the spatial dimensions of (N, C, spatial) codes; the output keeps the input's grid.

    Args:
        x: per-tensor quantized tensor with one to three spatial dimensions.
        size: the output's spatial sizes; or
        scale_factor: how many times larger they are.
        mode: ``"nearest"``, ``"nearest-exact"``, ``"linear"``, ``"bilinear"`` or ``"trilinear"`` (by the number of
            spatial dimensions), or ``"area"``.
        align_corners: whether the corner positions of input and output coincide (linear modes).
        recompute_scale_factor: derive positions from the sizes, not from ``scale_factor``.
        antialias: must be False.

    Raises:
        ValueError: both or neither of size and scale_factor, a wrong number of them, or options that do not go with
            the mode. NotImplementedError: another mode, or ``antialias``. RuntimeError: a per-channel grid.
    """
    x._require_per_tensor("interpolate")
    codes = x._codes
    rank = codes.dim() - 2
    if mode not in _MODES or antialias:
        what = "antialias" if antialias else f"mode {mode!r}"
        raise NotImplementedError(f"interpolate with {what} is not defined on quantized tensors: dequantize() first")
    if rank not in (1, 2, 3) or _LINEAR.get(mode, rank) != rank:
        raise ValueError(f"interpolate in mode {mode!r} does not take an input of shape {tuple(codes.shape)}")
    if align_corners is not None and mode not in _LINEAR:
        raise ValueError(f"align_corners goes with the linear modes, not with {mode!r}")
    if (size is None) == (scale_factor is None):
        raise ValueError("interpolate takes either size or scale_factor")
    sizes, factors = _sizes_and_factors(codes, size, scale_factor, rank)
    if min(sizes) < 1:
        raise ValueError(f"interpolate gives sizes above 0, got {sizes} from shape {tuple(codes.shape)}")
    if mode == "area":
        pooled = torch.ops.zeropoint.adaptive_avg_pool.default(codes, x.zero_point, sizes)
        return x._with_codes(pooled)
    if recompute_scale_factor:
        factors = None
    align = bool(align_corners)
    ratio = [_ratio(codes.shape[2 + d], sizes[d], None if factors is None else factors[d], align) for d in range(rank)]
    kind = "linear" if mode in _LINEAR else mode
    return x._with_codes(torch.ops.zeropoint.interpolate.default(codes, x.zero_point, sizes, ratio, kind, align))


def _sizes_and_factors(codes: Tensor, size: Any, scale_factor: Any, rank: int) -> tuple[list[int], list[float] | None]:
    given = size if size is not None else scale_factor
    numbers = list(given) if isinstance(given, (tuple, list, torch.Size)) else [given] * rank
    if len(numbers) != rank:
        raise ValueError(f"interpolate of shape {tuple(codes.shape)} takes {rank} sizes or factors, got {numbers}")
    if size is not None:
        return numbers, None
    factors = [float(number) for number in numbers]
    return [math.floor(codes.shape[2 + d] * factors[d]) for d in range(rank)], factors


def _ratio(size: int, out: int, factor: float | None, align_corners: bool) -> float:
    if align_corners:
        return (size - 1) / (out - 1) if out > 1 else 0.0
    return size / out if factor is None else 1.0 / factor


@implements(F.interpolate)
def _interpolate(func: Any, input: QTensor, *args: Any, **kwargs: Any) -> QTensor:
    return interpolate(input, *args, **kwargs)
