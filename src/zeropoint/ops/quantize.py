"""Between float and codes: quantize, dequantize, requantize, and the accessors.

May import: ``dtypes``, ``grid``, ``tensor``, ``ops.registry``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from zeropoint import grid
from zeropoint.dtypes import QDtype, QScheme, as_qdtype, qint8, quint8
from zeropoint.ops.registry import operator
from zeropoint.tensor import QTensor, check_channel_grid, implements, make_qtensor

__all__ = [
    "dequantize",
    "int_repr",
    "is_quantized",
    "q_per_channel_axis",
    "q_per_channel_scales",
    "q_per_channel_zero_points",
    "q_scale",
    "q_zero_point",
    "qscheme",
    "quantize_per_channel",
    "quantize_per_tensor",
    "quantize_per_tensor_dynamic",
    "requantize",
]

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# --- operators over plain tensors ---------------------------------------------------------------------------------


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


@operator(
    "quantize_per_tensor(Tensor x, float scale, int zero_point, int quant_min, int quant_max, ScalarType dtype)"
    " -> Tensor",
    meta=lambda x, scale, zero_point, quant_min, quant_max, dtype: _like(x, dtype),
)
def quantize_per_tensor_reference(
    x: Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: torch.dtype
) -> Tensor:
    """Codes of a float tensor on one grid; memory format kept."""
    return _like(x, dtype).copy_(grid.quantize(x, scale, zero_point, quant_min, quant_max))


@operator(
    "quantize_per_channel(Tensor x, Tensor scales, Tensor zero_points, int axis, int quant_min, int quant_max,"
    " ScalarType dtype) -> Tensor",
    meta=lambda x, scales, zero_points, axis, quant_min, quant_max, dtype: _like(x, dtype),
)
def quantize_per_channel_reference(
    x: Tensor, scales: Tensor, zero_points: Tensor, axis: int, quant_min: int, quant_max: int, dtype: torch.dtype
) -> Tensor:
    """Codes of a float tensor on one grid a channel; zero points of a floating dtype are added before rounding."""
    shape = _channel_shape(x, axis)
    codes = grid.quantize(x, scales.reshape(shape), zero_points.reshape(shape), quant_min, quant_max)
    return _like(x, dtype).copy_(codes)


@operator(
    "dequantize_per_tensor(Tensor codes, float scale, int zero_point, ScalarType dtype) -> Tensor",
    meta=lambda codes, scale, zero_point, dtype: _like(codes, dtype),
)
def dequantize_per_tensor_reference(codes: Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> Tensor:
    """Real values of codes on one grid; memory format kept."""
    return _like(codes, dtype).copy_(grid.dequantize(codes, scale, zero_point, dtype))


@operator(
    "dequantize_per_channel(Tensor codes, Tensor scales, Tensor zero_points, int axis, ScalarType dtype) -> Tensor",
    meta=lambda codes, scales, zero_points, axis, dtype: _like(codes, dtype),
)
def dequantize_per_channel_reference(
    codes: Tensor, scales: Tensor, zero_points: Tensor, axis: int, dtype: torch.dtype
) -> Tensor:
    """Real values of codes on one grid a channel."""
    shape = _channel_shape(codes, axis)
    values = grid.dequantize(codes, scales.reshape(shape), zero_points.reshape(shape), dtype)
    return _like(codes, dtype).copy_(values)


@operator(
    "requantize(Tensor codes, float scale, int zero_point, float out_scale, int out_zero_point, int out_min,"
    " int out_max, ScalarType out_dtype) -> Tensor",
    meta=lambda codes, scale, zero_point, out_scale, out_zero_point, out_min, out_max, out_dtype: _like(
        codes, out_dtype
    ),
)
def requantize_reference(
    codes: Tensor,
    scale: float,
    zero_point: int,
    out_scale: float,
    out_zero_point: int,
    out_min: int,
    out_max: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """Codes on another grid, without real values in between: ``grid.requantize`` of ``code - zero_point``."""
    steps = codes.to(torch.int64) - zero_point
    factor = grid.multiplier(scale, out_scale).to(codes.device)
    return _like(codes, out_dtype).copy_(grid.requantize(steps, factor, None, out_zero_point, out_min, out_max))


@operator(
    "dynamic_range(Tensor x) -> (Tensor, Tensor)",
    meta=lambda x: (
        x.new_empty((), dtype=grid.compute_dtype(x.dtype)),
        x.new_empty((), dtype=grid.compute_dtype(x.dtype)),
    ),
)
def dynamic_range_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest *finite* value of a float tensor, float32 (float64 for float64); (0, 0) if there is none."""
    values = x.detach().to(grid.compute_dtype(x.dtype)).reshape(-1)
    if values.numel() == 0:
        return values.new_zeros(()), values.new_zeros(())
    finite = torch.isfinite(values)
    low = torch.where(finite, values, values.new_full((), float("inf"))).min()
    high = torch.where(finite, values, values.new_full((), float("-inf"))).max()
    empty = ~finite.any()
    return low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)


@operator(
    "dynamic_qparams(Tensor x, int quant_min, int quant_max) -> (Tensor, Tensor)",
    meta=lambda x, quant_min, quant_max: (
        x.new_empty((), dtype=torch.float64),
        x.new_empty((), dtype=torch.int64),
    ),
)
def dynamic_qparams_reference(x: Tensor, quant_min: int, quant_max: int) -> tuple[Tensor, Tensor]:
    """The grid of a float tensor's own finite range: float64 scale and int64 zero point."""
    return grid.choose_qparams(*dynamic_range_reference(x), quant_min, quant_max)


def _channel_shape(x: Tensor, axis: int) -> list[int]:
    shape = [1] * x.dim()
    shape[axis] = -1
    return shape


# --- functions over quantized tensors -----------------------------------------------------------------------------


def _check_float(x: Any, name: str) -> None:
    if not isinstance(x, Tensor) or isinstance(x, QTensor) or x.dtype not in FLOAT_DTYPES:
        seen = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} takes a float16, bfloat16, float32 or float64 tensor, got {seen}")


def _check_single(**values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"{name} must have one element, got shape {tuple(value.shape)}: use quantize_per_channel")


@overload
def quantize_per_tensor(x: Tensor, scale: float | Tensor, zero_point: int | Tensor, dtype: Any = ...) -> QTensor: ...
@overload
def quantize_per_tensor(
    x: Sequence[Tensor], scale: Tensor, zero_point: Tensor, dtype: Any = ...
) -> tuple[QTensor, ...]: ...
def quantize_per_tensor(x: Any, scale: Any, zero_point: Any, dtype: Any = qint8) -> Any:
    """Quantizes a tensor, or a list of tensors, on one grid each.

    ``code = clamp(rint(x * (1 / scale)) + zero_point)`` in float32 (float64 for a float64 input); ties round to
    even, before the zero point is added. ±inf saturates, NaN becomes the zero point.

    Args:
        x: float16, bfloat16, float32 or float64 tensor of any shape and strides, or a list of them.
        scale: above 0: a float, a one-element tensor, or for a list a 1-D tensor with one entry each.
        zero_point: the code of real 0: an int, a one-element tensor, or a 1-D tensor for a list.
        dtype: :data:`~zeropoint.qint8`, :data:`~zeropoint.quint8` or :data:`~zeropoint.qint32` (or torch's names).

    Returns:
        A :class:`~zeropoint.QTensor` of ``x``'s shape and memory format, or a tuple of them for a list.

    Raises:
        TypeError: ``x`` is not a float tensor, or ``dtype`` not a quantized dtype.
        ValueError: the scale or the zero point make no grid, or a list and its parameters differ in length.

    Example:
        >>> import torch, zeropoint as zp
        >>> zp.quantize_per_tensor(torch.tensor([-1.0, 0.25, 9.0]), 0.5, 3, zp.quint8).int_repr()
        tensor([ 1,  3, 21], dtype=torch.uint8)
    """
    qdtype = as_qdtype(dtype)
    if isinstance(x, (list, tuple)):
        scales, zero_points = torch.as_tensor(scale).reshape(-1), torch.as_tensor(zero_point).reshape(-1)
        if not len(x) == scales.numel() == zero_points.numel():
            raise ValueError(
                f"{len(x)} tensors need as many scales and zero points, got {scales.numel()} and {zero_points.numel()}"
            )
        return tuple(quantize_per_tensor(one, s, z, qdtype) for one, s, z in zip(x, scales, zero_points, strict=True))
    _check_float(x, "quantize_per_tensor")
    if isinstance(scale, Tensor) or isinstance(zero_point, Tensor):
        _check_single(scale=scale, zero_point=zero_point)
    step = grid.check_scale(scale)
    zero = grid.check_zero_point(zero_point, qdtype.qmin, qdtype.qmax)
    codes = torch.ops.zeropoint.quantize_per_tensor.default(x, step, zero, qdtype.qmin, qdtype.qmax, qdtype.storage)
    return make_qtensor(codes, qdtype, step, zero)


def quantize_per_channel(x: Tensor, scales: Tensor, zero_points: Tensor, axis: int, dtype: Any = qint8) -> QTensor:
    """Quantizes a tensor with one grid a channel.

    Args:
        x: float tensor; ``x.size(axis)`` is the number of channels.
        scales: 1-D float tensor, one a channel, above 0.
        zero_points: 1-D tensor, one a channel: integers in the dtype's range, or floats, in which case
            ``code = clamp(rint(x * (1 / scale) + zero_point))``.
        axis: the channel dimension; negative values count from the end.
        dtype: the quantized dtype.

    Raises:
        TypeError, ValueError: naming what does not fit.
        RuntimeError: parameters on another device than ``x``.
    """
    qdtype = as_qdtype(dtype)
    _check_float(x, "quantize_per_channel")
    scales, zero_points, axis = check_channel_grid(x, scales, zero_points, axis, qdtype)
    codes = torch.ops.zeropoint.quantize_per_channel.default(
        x, scales, zero_points, axis, qdtype.qmin, qdtype.qmax, qdtype.storage
    )
    return make_qtensor(codes, qdtype, scales, zero_points, axis)


def quantize_per_tensor_dynamic(x: Tensor, dtype: Any, reduce_range: bool = False) -> Tensor:
    """Quantizes a tensor on the grid of its own range (:func:`zeropoint.grid.choose_qparams`).

    Args:
        x: float tensor; non-finite values do not count towards the range.
        dtype: qint8, quint8, or ``torch.float16``, which only casts.
        reduce_range: choose the grid for seven bits, as kernels that saturate need; codes may use all eight.

    Raises:
        TypeError: another dtype, or ``x`` is not a float tensor.
    """
    _check_float(x, "quantize_per_tensor_dynamic")
    if dtype == torch.float16:
        return x.to(torch.float16)
    qdtype = as_qdtype(dtype)
    if qdtype not in (qint8, quint8):
        raise TypeError(f"quantize_per_tensor_dynamic takes qint8, quint8 or float16, got {qdtype}")
    scale, zero_point = torch.ops.zeropoint.dynamic_qparams.default(x, *reduced_range(qdtype, reduce_range))
    return quantize_per_tensor(x, scale.item(), zero_point.item(), qdtype)


def reduced_range(qdtype: QDtype, reduce_range: bool) -> tuple[int, int]:
    """The code range from which a grid is chosen: both ends halved towards zero for ``reduce_range``."""
    if reduce_range:
        return int(qdtype.qmin / 2), int(qdtype.qmax / 2)
    return qdtype.qmin, qdtype.qmax


@overload
def dequantize(x: Tensor, dtype: torch.dtype = ...) -> Tensor: ...
@overload
def dequantize(x: Sequence[Tensor], dtype: torch.dtype = ...) -> tuple[Tensor, ...]: ...
def dequantize(x: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Real values, ``(code - zero_point) * scale``, of a quantized tensor or of a list of them.

    Args:
        x: a :class:`~zeropoint.QTensor`, a list of them, or a plain tensor, which is only cast.
        dtype: the result's floating dtype.
    """
    if isinstance(x, (list, tuple)):
        return tuple(dequantize(one, dtype) for one in x)
    if not isinstance(x, QTensor):
        if not isinstance(x, Tensor):
            raise TypeError(f"dequantize takes a tensor or a list of them, got {type(x).__name__}")
        return x.to(dtype)
    if x.axis is None:
        return torch.ops.zeropoint.dequantize_per_tensor.default(x._codes, x.scale, x.zero_point, dtype)
    return torch.ops.zeropoint.dequantize_per_channel.default(x._codes, x.scale, x.zero_point, x.axis, dtype)


QTensor.dequantize = dequantize  # type: ignore[assignment, method-assign]


def requantize(x: QTensor, scale: float, zero_point: int, dtype: Any = None) -> QTensor:
    """The same values on another per-tensor grid, from codes to codes.

    Args:
        x: per-tensor quantized tensor.
        scale, zero_point: the new grid.
        dtype: the new quantized dtype; None keeps ``x``'s.

    Raises:
        TypeError: ``x`` is not quantized. RuntimeError: ``x`` has a per-channel grid.
    """
    _require_qtensor(x, "requantize")
    x._require_per_tensor("requantize")
    qdtype = x.qdtype if dtype is None else as_qdtype(dtype)
    step = grid.check_scale(scale)
    zero = grid.check_zero_point(zero_point, qdtype.qmin, qdtype.qmax)
    if qdtype == x.qdtype and step == x.scale and zero == x.zero_point:
        return x
    codes = torch.ops.zeropoint.requantize.default(
        x._codes, x.scale, x.zero_point, step, zero, qdtype.qmin, qdtype.qmax, qdtype.storage
    )
    return make_qtensor(codes, qdtype, step, zero)


# --- accessors as functions ---------------------------------------------------------------------------------------


def _require_qtensor(x: Any, name: str) -> QTensor:
    if not isinstance(x, QTensor):
        seen = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} takes a quantized tensor, got {seen}")
    return x


def is_quantized(x: Tensor) -> bool:
    """Whether ``x`` is a quantized tensor of this package."""
    return isinstance(x, QTensor)


def int_repr(x: Tensor) -> Tensor:
    """A copy of the codes as a plain int8, uint8 or int32 tensor. Raises TypeError on a plain tensor."""
    return _require_qtensor(x, "int_repr").int_repr()


def q_scale(x: Tensor) -> float:
    """The scale of a per-tensor grid. Raises TypeError on a plain tensor, RuntimeError on a per-channel one."""
    return _require_qtensor(x, "q_scale").q_scale()


def q_zero_point(x: Tensor) -> int:
    """The zero point of a per-tensor grid. Raises as :func:`q_scale`."""
    return _require_qtensor(x, "q_zero_point").q_zero_point()


def q_per_channel_scales(x: Tensor) -> Tensor:
    """The scales of a per-channel grid. Raises TypeError on a plain tensor, RuntimeError on a per-tensor one."""
    return _require_qtensor(x, "q_per_channel_scales").q_per_channel_scales()


def q_per_channel_zero_points(x: Tensor) -> Tensor:
    """The zero points of a per-channel grid. Raises as :func:`q_per_channel_scales`."""
    return _require_qtensor(x, "q_per_channel_zero_points").q_per_channel_zero_points()


def q_per_channel_axis(x: Tensor) -> int:
    """The channel dimension of a per-channel grid. Raises as :func:`q_per_channel_scales`."""
    return _require_qtensor(x, "q_per_channel_axis").q_per_channel_axis()


def qscheme(x: Tensor) -> QScheme:
    """The scheme of a quantized tensor's grid, an int that prints as a name. Raises TypeError on a plain tensor."""
    return _require_qtensor(x, "qscheme").qscheme()


# --- torch's own entry points on quantized tensors ----------------------------------------------------------------


@implements(torch.relu, Tensor.relu, torch.nn.functional.relu)
def _relu(func: Any, x: QTensor, inplace: bool = False) -> QTensor:
    x._require_per_tensor("relu")
    if inplace:
        x._codes.clamp_(min=x.zero_point)
        return x
    return x._with_codes(torch.clamp(x._codes, min=x.zero_point))
