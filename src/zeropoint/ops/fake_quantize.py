"""Fake quantize: the rounding of a grid without leaving float, with straight-through gradients.

Forward and gradients (the rounded code ``r`` is the one *before* saturation)::

    r = rint(x * (1 / scale)) + zero_point          y = (clamp(r, quant_min, quant_max) - zero_point) * scale
    dx = dy  where quant_min <= r <= quant_max, else 0

Scale and zero point are tensors throughout, so nothing waits for the device.

May import: ``grid``, ``ops.qdq``, ``ops.quantize``, ``ops.ranges``, ``ops.registry``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zeropoint import grid
from zeropoint.ops import qdq
from zeropoint.ops.quantize import _check_float
from zeropoint.ops.ranges import channels_first, finite_extremes, moving_average, narrow
from zeropoint.ops.registry import _LIBRARY, operator

__all__ = [
    "fake_quantize_learnable",
    "fake_quantize_per_channel",
    "fake_quantize_per_tensor",
    "moving_average_qparams",
    "onnx_form",
    "simulate",
]


# --- operators over plain tensors ---------------------------------------------------------------------------------


def _value_and_mask(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


@operator(
    "fake_quantize_per_tensor(Tensor x, Tensor scale, Tensor zero_point, int quant_min, int quant_max)"
    " -> (Tensor, Tensor)",
    meta=_value_and_mask,
    differentiable=True,
)
def fake_quantize_per_tensor_reference(
    x: Tensor, scale: Tensor, zero_point: Tensor, quant_min: int, quant_max: int
) -> tuple[Tensor, Tensor]:
    """Values on one grid (NaN stays NaN), and whether each code was inside before saturation."""
    if scale.numel() != 1 or zero_point.numel() != 1:
        raise RuntimeError(
            "fake_quantize_per_tensor takes one scale and one zero point, got shapes "
            f"{tuple(scale.shape)} and {tuple(zero_point.shape)}"
        )
    return grid.fake_quantize(x, scale.reshape(()), zero_point.reshape(()).to(x.device), quant_min, quant_max)


@operator(
    "fake_quantize_per_channel(Tensor x, Tensor scales, Tensor zero_points, int axis, int quant_min, int quant_max)"
    " -> (Tensor, Tensor)",
    meta=_value_and_mask,
    differentiable=True,
)
def fake_quantize_per_channel_reference(
    x: Tensor, scales: Tensor, zero_points: Tensor, axis: int, quant_min: int, quant_max: int
) -> tuple[Tensor, Tensor]:
    """Values on one grid a channel, and whether each code was inside before saturation."""
    if not -x.dim() <= axis < x.dim():
        raise RuntimeError(f"fake_quantize_per_channel: axis {axis} is not a dimension of shape {tuple(x.shape)}")
    if not scales.numel() == zero_points.numel() == x.shape[axis]:
        raise RuntimeError(
            f"fake_quantize_per_channel: {x.shape[axis]} channels along axis {axis} need as many scales and zero "
            f"points, got {scales.numel()} and {zero_points.numel()}"
        )
    shape = [1] * x.dim()
    shape[axis] = -1
    return grid.fake_quantize(x, scales.reshape(shape), zero_points.reshape(shape).to(x.device), quant_min, quant_max)


@operator(
    "fake_quantize_backward(Tensor grad, Tensor mask) -> Tensor",
    meta=lambda grad, mask: torch.empty_like(grad),
    differentiable=True,
)
def fake_quantize_backward_reference(grad: Tensor, mask: Tensor) -> Tensor:
    """The gradient where the mask is set, 0 elsewhere."""
    return grad * mask


def _save_mask(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    mask = output[1] if isinstance(output, tuple) else inputs[1]
    ctx.save_for_backward(mask)
    ctx.inputs = len(inputs)
    ctx.set_materialize_grads(False)


def _through_mask(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    (mask,) = ctx.saved_tensors
    rest = [None] * (ctx.inputs - 1)
    return None if grad is None else torch.ops.zeropoint.fake_quantize_backward.default(grad, mask), *rest


for _name in ("fake_quantize_per_tensor", "fake_quantize_per_channel", "fake_quantize_backward"):
    torch.library.register_autograd(f"zeropoint::{_name}", _through_mask, setup_context=_save_mask, lib=_LIBRARY)


def _grid_gradients(grad: Tensor, x: Tensor, scale: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x, dtype=grad.dtype), scale.new_empty(scale.shape), scale.new_empty(scale.shape)


@operator(
    "fake_quantize_learnable_backward(Tensor grad, Tensor x, Tensor scale, Tensor zero_point, int? axis, int quant_min,"
    " int quant_max, float factor) -> (Tensor, Tensor, Tensor)",
    meta=_grid_gradients,
)
def fake_quantize_learnable_backward_reference(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    axis: int | None,
    quant_min: int,
    quant_max: int,
    factor: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``x``, scale and zero point (S. Esser et al., "Learned step size quantization", 2020).

    With ``r`` the rounded code before saturation, ``y`` the value and ``dy`` the gradient::

        r inside:    dx = dy    dscale = dy * (y - x) / scale              dzero = 0
        r outside:   dx = 0     dscale = dy * (end - zero_point)           dzero = -dy * scale

    ``end`` is ``quant_min`` or ``quant_max``. The last two are summed in float64 over what shares a scale, times
    ``factor``, and rounded to the scale's dtype.
    """
    channels = 1 if axis is None else x.shape[axis]
    if grad.shape != x.shape:
        raise RuntimeError(f"a gradient of shape {tuple(grad.shape)} does not fit values of {tuple(x.shape)}")
    if not scale.numel() == zero_point.numel() == channels:
        raise RuntimeError(
            f"fake_quantize_learnable_backward: {channels} grids need as many scales and zero points, got "
            f"{scale.numel()} and {zero_point.numel()}"
        )
    shape = [1] * x.dim()
    if axis is not None:
        shape[axis] = -1
    # the error of rounding is lost in half precision
    wide = x.to(grid.compute_dtype(torch.promote_types(x.dtype, scale.dtype)))
    step, zero = scale.reshape(shape).to(wide.dtype), zero_point.reshape(shape).to(torch.int64)
    y, inside = grid.fake_quantize(wide, step, zero, quant_min, quant_max)
    end = torch.where(wide > y, (quant_max - zero).to(wide.dtype), (quant_min - zero).to(wide.dtype))
    by_scale = torch.where(inside, (y - wide) / step, end) * grad
    by_zero = (-step * grad).masked_fill(inside, 0.0)
    by_scale, by_zero = (
        (part.to(torch.float64).sum_to_size(step.shape) * factor).to(scale.dtype).reshape(scale.shape)
        for part in (by_scale, by_zero)
    )
    return inside * grad, by_scale, by_zero  # the mask first: it has the layout of x


class _Learnable(torch.autograd.Function):
    """Fake quantize whose scale and zero point get gradients as well."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        zero_point: Tensor,
        axis: int | None,
        quant_min: int,
        quant_max: int,
        factor: float,
    ) -> Tensor:
        codes = zero_point.round().clamp(quant_min, quant_max).to(torch.int32)
        ctx.save_for_backward(x, scale, codes)
        ctx.settings = (axis, quant_min, quant_max, factor)
        return simulate(x, scale, codes, axis, quant_min, quant_max)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        run: Callable[..., tuple[Tensor, ...]] = torch.ops.zeropoint.fake_quantize_learnable_backward.default
        if torch.is_grad_enabled():  # a graph of the gradients is wanted, which the reference builds
            run = fake_quantize_learnable_backward_reference
        return *run(grads[0], *ctx.saved_tensors, *ctx.settings), None, None, None, None


def fake_quantize_learnable(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    axis: int | None,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> Tensor:
    """Fake quantize with gradients for scale and zero point as well.

    The zero point is rounded to the nearest code, ties to even, in the forward and in the backward pass.

    Args:
        x: float tensor.
        scale, zero_point: float tensors of shape [1], or [channels] with an ``axis``.
        axis: the channel dimension; None for one grid.
        quant_min, quant_max: the codes; they must contain 0.
        grad_factor: what the gradients of scale and zero point are multiplied by.

    Returns:
        A tensor of ``x``'s shape and dtype.
    """
    # one scale is one grid; the parameter is written to before the next call, which this backward pass must not see
    axis = None if axis is None or scale.numel() == 1 else axis % x.dim()
    y: Tensor = _Learnable.apply(  # type: ignore[no-untyped-call]
        x, scale.clone(), zero_point, axis, quant_min, quant_max, grad_factor
    )
    return y


def moving_average_qparams(
    min_val: Tensor, max_val: Tensor, quant_min: int, quant_max: int, *, symmetric: bool, zero_point: int, eps: Tensor
) -> tuple[Tensor, Tensor]:
    """The grid of the fused moving-average fake quantizer: ``grid.choose_qparams``, and never a scale below ``eps``.

    Args:
        min_val, max_val: finite float32 ranges of one shape.
        symmetric: real zero sits at ``zero_point`` even where a range touches one side of zero only.

    Returns:
        float32 scale and int32 zero point of that shape.
    """
    low, high = torch.clamp(min_val, max=0.0), torch.clamp(max_val, min=0.0)
    if symmetric:
        # A one-sided range is mirrored by half: that makes it span zero and never decides the step.
        low, high = torch.where(low == 0, -high / 2, low), torch.where(high == 0, -low / 2, high)
    scale, zero = grid.choose_qparams(low, high, quant_min, quant_max, symmetric=symmetric)
    small = scale < eps
    floored = (quant_min - torch.round(low / eps)).clamp(quant_min, quant_max).to(zero.dtype)
    scale, zero = torch.where(small, eps.to(scale.dtype), scale), torch.where(small, floored, zero)
    if symmetric:
        zero = torch.full_like(zero, zero_point)
    return scale.to(torch.float32), zero.to(torch.int32)


@operator(
    "moving_average_observe(Tensor x, Tensor(a!) min_val, Tensor(b!) max_val, Tensor(c!) scale,"
    " Tensor(d!) zero_point, Tensor eps, float averaging_constant, int quant_min, int quant_max, int? axis,"
    " bool symmetric, int middle, bool update_grid) -> Tensor",
    meta=lambda x, *_: x.new_empty((), dtype=torch.bool),
)
def moving_average_observe_reference(
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
    """Takes ``x`` into the averaged range, and makes the grid of it anew: the statistics of the fused fake quantizer.

    Returns:
        Whether ``x`` held values that are not finite, as a 0-d bool tensor.
    """
    rows = channels_first(x, axis)
    if rows.numel() > 0:
        for moving, end in zip((min_val, max_val), finite_extremes(rows), strict=True):
            moving.copy_(moving_average(moving, narrow(end).reshape(moving.shape), averaging_constant))
    if update_grid:
        seen = (min_val <= max_val).reshape(-1)
        low = torch.where(seen, min_val.reshape(-1), 0.0)
        high = torch.where(seen, max_val.reshape(-1), 0.0)
        grids = moving_average_qparams(low, high, quant_min, quant_max, symmetric=symmetric, zero_point=middle, eps=eps)
        scale.copy_(torch.where(seen, grids[0], 1.0))
        zero_point.copy_(torch.where(seen, grids[1], 0))
    return ~torch.isfinite(x).all()


# --- functions ----------------------------------------------------------------------------------------------------


def simulate(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None, quant_min: int, quant_max: int) -> Tensor:
    """``x`` rounded to a grid, with unchecked arguments: the operator, or its ONNX form while torch.onnx captures.

    Args:
        x: float tensor.
        scale, zero_point: tensors of one element, or of [channels] with an ``axis``.
        axis: the channel dimension, from zero up; None for one grid.
        quant_min, quant_max: the codes.
    """
    if qdq.capturing():
        return onnx_form(x, scale, zero_point, axis, quant_min, quant_max)
    call = torch.ops.zeropoint
    y: Tensor
    if axis is None:
        y = call.fake_quantize_per_tensor.default(x, scale, zero_point, quant_min, quant_max)[0]
    else:
        y = call.fake_quantize_per_channel.default(x, scale, zero_point, axis, quant_min, quant_max)[0]
    return y


def onnx_form(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None, quant_min: int, quant_max: int) -> Tensor:
    """A pair of ONNX nodes, or float operators where ONNX has no such grid: wide codes and floating zero points."""
    if qdq.storage_of(quant_min, quant_max) is not None and not zero_point.is_floating_point():
        return qdq.quantize_dequantize(x, scale, zero_point, axis, quant_min, quant_max)
    shape = [1] * x.dim()
    if axis is not None:
        shape[axis] = -1
    return grid.fake_quantize(x, scale.reshape(shape), zero_point.reshape(shape), quant_min, quant_max)[0]


def _as_qparam(value: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    return value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype, device=x.device)


def _check_range(quant_min: int, quant_max: int) -> None:
    if quant_min > quant_max:
        raise ValueError(f"quant_min must not exceed quant_max, got {quant_min} and {quant_max}")


def _check_grid(scale: Tensor, zero_point: Tensor, quant_min: int, quant_max: int, name: str) -> None:
    """Checks what the host can see without waiting for a device."""
    if not scale.is_floating_point():
        raise TypeError(f"{name} takes a floating scale, got {scale.dtype}")
    if torch.compiler.is_compiling() or scale.device.type != "cpu" or zero_point.device.type != "cpu":
        return
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise ValueError(f"{name}: every scale must be finite and above 0, got {scale.tolist()}")
    if zero_point.is_floating_point():
        if not bool(torch.isfinite(zero_point).all()):
            raise ValueError(f"{name}: every zero point must be finite, got {zero_point.tolist()}")
    elif not bool(((zero_point >= quant_min) & (zero_point <= quant_max)).all()):
        raise ValueError(f"{name}: every zero point must lie in [{quant_min}, {quant_max}], got {zero_point.tolist()}")


def fake_quantize_per_tensor(
    x: Tensor, scale: float | Tensor, zero_point: int | Tensor, quant_min: int = -128, quant_max: int = 127
) -> Tensor:
    """The values that ``x`` has after it was quantized on one grid and dequantized.

    Equal to ``dequantize(quantize(x))`` bit for bit, but NaN stays NaN. The gradient passes where the rounded code
    was inside ``[quant_min, quant_max]`` before it was saturated; scale and zero point get none.

    Args:
        x: float16, bfloat16, float32 or float64 tensor of any shape and strides.
        scale: above 0: a number or a one-element tensor of any float dtype.
        zero_point: the code of real 0: a whole number or a one-element tensor; a floating tensor is added before
            rounding.
        quant_min, quant_max: the smallest and the largest code.

    Returns:
        A tensor of ``x``'s shape, dtype and memory format.

    Raises:
        TypeError: ``x`` or ``scale`` is not floating.
        ValueError: an empty code range, a scale not above 0, or a zero point outside the codes; scale and zero point
            on another device than the CPU are not looked at, which would wait for it.

    Example:
        >>> import torch, zeropoint as zp
        >>> zp.ops.fake_quantize.fake_quantize_per_tensor(torch.tensor([0.24, 0.26, 99.0]), 0.5, 0)
        tensor([ 0.0000,  0.5000, 63.5000])
    """
    name = "fake_quantize_per_tensor"
    _check_float(x, name)
    _check_range(quant_min, quant_max)
    if not isinstance(zero_point, Tensor):
        zero_point = grid.check_zero_point(zero_point, quant_min, quant_max)
    scales, zeros = _as_qparam(scale, x, torch.float64), _as_qparam(zero_point, x, torch.int64)
    if scales.numel() != 1 or zeros.numel() != 1:
        raise ValueError(
            f"{name} takes one scale and one zero point, got shapes {tuple(scales.shape)} and {tuple(zeros.shape)}: "
            "use fake_quantize_per_channel"
        )
    _check_grid(scales, zeros, quant_min, quant_max, name)
    return simulate(x, scales, zeros, None, quant_min, quant_max)


def fake_quantize_per_channel(
    x: Tensor, scales: Tensor, zero_points: Tensor, axis: int = 0, quant_min: int = -128, quant_max: int = 127
) -> Tensor:
    """The values that ``x`` has after it was quantized with one grid a channel and dequantized.

    Args:
        x: float16, bfloat16, float32 or float64 tensor of any shape and strides.
        scales: 1-D float tensor, one entry a channel, above 0.
        zero_points: 1-D tensor of the same length; a floating one is added before rounding.
        axis: the channel dimension; may count from the end.
        quant_min, quant_max: the smallest and the largest code.

    Returns:
        A tensor of ``x``'s shape, dtype and memory format; gradients as in :func:`fake_quantize_per_tensor`.

    Raises:
        TypeError: ``x`` or ``scales`` is not floating.
        ValueError: an axis that ``x`` does not have, lengths that differ, or as :func:`fake_quantize_per_tensor`.
    """
    name = "fake_quantize_per_channel"
    _check_float(x, name)
    _check_range(quant_min, quant_max)
    if not -x.dim() <= axis < x.dim():
        raise ValueError(f"{name}: axis {axis} is not a dimension of shape {tuple(x.shape)}")
    scales, zeros = _as_qparam(scales, x, torch.float64), _as_qparam(zero_points, x, torch.int64)
    if not (scales.dim() == zeros.dim() == 1 and scales.numel() == zeros.numel() == x.shape[axis]):
        raise ValueError(
            f"{name}: {x.shape[axis]} channels along axis {axis} need 1-D scales and zero points of that length, got "
            f"shapes {tuple(scales.shape)} and {tuple(zeros.shape)}"
        )
    _check_grid(scales, zeros, quant_min, quant_max, name)
    return simulate(x, scales, zeros, axis % x.dim(), quant_min, quant_max)
