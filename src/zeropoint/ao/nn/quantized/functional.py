"""Functions on quantized tensors, under ``torch.ao.nn.quantized.functional``'s names.

A function whose result needs another grid takes ``scale`` and ``zero_point``; pooling, padding, clamping and resizing
keep the input's. The input is a per-tensor quantized tensor, else a TypeError says so.

May import: ``ops``, ``tensor``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from zeropoint.dtypes import quint8
from zeropoint.ops import activation
from zeropoint.ops import conv as _conv
from zeropoint.ops import conv_transpose as _conv_transpose
from zeropoint.ops.interpolate import interpolate as _resize
from zeropoint.ops.linear import quantized_linear
from zeropoint.tensor import QTensor

__all__ = [
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "celu",
    "clamp",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "elu",
    "gelu",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "interpolate",
    "leaky_relu",
    "linear",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "mish",
    "pad",
    "prelu",
    "relu",
    "relu6",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "tanh",
    "threshold",
    "upsample",
    "upsample_bilinear",
    "upsample_nearest",
]

_F = TypeVar("_F", bound=Callable[..., Any])


def _check(x: Any, name: str) -> QTensor:
    if not isinstance(x, QTensor):
        seen = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"quantized {name} takes a quantized tensor, got {seen}: quantize it first")
    x._require_per_tensor(name)
    return x


# --- layers -------------------------------------------------------------------------------------------------------


def _grids_of(weight: Any, name: str) -> tuple[Tensor, Tensor, Tensor, int | None]:
    """Codes, scales, zero points and channel axis of a qint8 weight."""
    if not isinstance(weight, QTensor):
        seen = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        raise TypeError(f"quantized {name} takes a qint8 weight, got {seen}: quantize it with quantize_per_channel")
    codes = weight._codes
    if weight.axis is None:
        scale = torch.tensor([weight.scale], dtype=torch.float64, device=codes.device)
        return codes, scale, torch.tensor([weight.zero_point], dtype=torch.int32, device=codes.device), None
    return codes, weight.scale, weight.zero_point.to(torch.int32), weight.axis


def linear(
    input: QTensor,
    weight: QTensor,
    bias: Tensor | None = None,
    scale: float | None = None,
    zero_point: int | None = None,
) -> QTensor:
    """``input @ weight.T + bias``, on the grid of ``scale`` and ``zero_point``; without one, on the input's.

    Args:
        input: (..., K) qint8 or quint8.
        weight: (N, K) qint8, on one grid or one a row.
        bias: (N,) floats.
        scale, zero_point: the output's grid.

    Raises:
        TypeError: tensors of other dtypes. ValueError: shapes that do not fit, or a wrong weight axis.
    """
    x = _check(input, "linear")
    codes, scales, zero_points, axis = _grids_of(weight, "linear")
    if axis not in (None, 0):
        raise ValueError(f"quantized linear takes a weight with grids along axis 0, got axis {axis}")
    step, zero = x.scale if scale is None else scale, x.zero_point if zero_point is None else zero_point
    return quantized_linear(x, codes, x.scale, x.zero_point, scales, zero_points, bias, step, zero)


def _convolution(rank: int) -> Callable[..., QTensor]:
    name = f"conv{rank}d"

    def convolve(
        input: QTensor,
        weight: QTensor,
        bias: Tensor | None,
        stride: int | Sequence[int] = 1,
        padding: int | str | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        padding_mode: str = "zeros",
        scale: float = 1.0,
        zero_point: int = 0,
        dtype: Any = quint8,
    ) -> QTensor:
        x = _check(input, name)
        codes, scales, zero_points, axis = _grids_of(weight, name)
        if axis not in (None, 0) or codes.dim() != rank + 2:
            raise ValueError(f"quantized {name} takes a {rank + 2}-d weight with grids along axis 0, got axis {axis}")
        return _conv.conv(
            *(x, codes, scales, zero_points, bias, scale, zero_point),
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            padding_mode=padding_mode,
            out_dtype=dtype,
        )

    convolve.__doc__ = f"""{rank}d convolution, on the grid of ``scale`` and ``zero_point``.

    Args:
        input: (N, C, spatial) or (C, spatial), qint8 or quint8.
        weight: (out_channels, C / groups, kernel) qint8, on one grid or one an output channel.
        bias: (out_channels,) floats, or None.
        stride, padding, dilation, groups, padding_mode: as in the float module.
        scale, zero_point, dtype: the output's grid and quantized dtype.

    Raises:
        TypeError: tensors of other dtypes. ValueError, RuntimeError: sizes that do not fit.
    """
    return _named(convolve, name)


def _transposed(rank: int) -> Callable[..., QTensor]:
    name = f"conv_transpose{rank}d"

    def convolve(
        input: QTensor,
        weight: QTensor,
        bias: Tensor | None,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        output_padding: int | Sequence[int] = 0,
        groups: int = 1,
        dilation: int | Sequence[int] = 1,
        scale: float = 1.0,
        zero_point: int = 0,
        dtype: Any = quint8,
    ) -> QTensor:
        x = _check(input, name)
        codes, scales, zero_points, axis = _grids_of(weight, name)
        if axis not in (None, 1) or codes.dim() != rank + 2:
            raise ValueError(f"quantized {name} takes a {rank + 2}-d weight with grids along axis 1, got axis {axis}")
        if axis == 1:
            scales, zero_points = scales.repeat(groups), zero_points.repeat(groups)
        return _conv_transpose.conv_transpose(
            *(x, codes, scales, zero_points, bias, scale, zero_point),
            stride=stride,
            padding=padding,
            output_padding=output_padding,
            groups=groups,
            dilation=dilation,
            out_dtype=dtype,
        )

    convolve.__doc__ = f"""{rank}d transposed convolution, on the grid of ``scale`` and ``zero_point``.

    Args:
        input: (N, C, spatial) or (C, spatial), qint8 or quint8.
        weight: (C, out_channels / groups, kernel) qint8, on one grid or one an entry of dimension 1.
        bias: (out_channels,) floats, or None.
        stride, padding, output_padding, groups, dilation: as in the float function.
        scale, zero_point, dtype: the output's grid and quantized dtype.

    Raises:
        TypeError: tensors of other dtypes. ValueError, RuntimeError: sizes that do not fit.
    """
    return _named(convolve, name)


def _named(function: _F, name: str) -> _F:
    function.__name__ = function.__qualname__ = name
    function.__module__ = __name__
    return function


conv1d, conv2d, conv3d = (_convolution(rank) for rank in (1, 2, 3))
conv_transpose1d, conv_transpose2d, conv_transpose3d = (_transposed(rank) for rank in (1, 2, 3))


# --- on the input's grid: torch's own functions, for quantized tensors alone --------------------------------------


def _quantized_only(function: Callable[..., Any], keeps: str) -> Callable[..., QTensor]:
    name = function.__name__

    def call(input: QTensor, *args: Any, **kwargs: Any) -> QTensor:
        return cast(QTensor, function(_check(input, name), *args, **kwargs))

    call.__doc__ = f"``torch.nn.functional.{name}`` of a quantized tensor, {keeps}. Raises TypeError for a float one."
    return _named(call, name)


_KEEPS = "on the input's grid"
adaptive_avg_pool1d = _quantized_only(F.adaptive_avg_pool1d, _KEEPS)
adaptive_avg_pool2d = _quantized_only(F.adaptive_avg_pool2d, _KEEPS)
adaptive_avg_pool3d = _quantized_only(F.adaptive_avg_pool3d, _KEEPS)
avg_pool1d = _quantized_only(F.avg_pool1d, _KEEPS)
avg_pool2d = _quantized_only(F.avg_pool2d, _KEEPS)
avg_pool3d = _quantized_only(F.avg_pool3d, _KEEPS)
max_pool1d = _quantized_only(F.max_pool1d, _KEEPS)
max_pool2d = _quantized_only(F.max_pool2d, _KEEPS)
max_pool3d = _quantized_only(F.max_pool3d, _KEEPS)
pad = _quantized_only(F.pad, _KEEPS)
relu = _quantized_only(F.relu, _KEEPS)
relu6 = _quantized_only(F.relu6, _KEEPS)


def hardtanh(input: QTensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> QTensor:
    """``clamp(input, min_val, max_val)``, on the input's grid. Raises TypeError for a float tensor."""
    return cast(QTensor, F.hardtanh(_check(input, "hardtanh"), min_val, max_val, inplace))


def clamp(input: QTensor, min_: float, max_: float) -> QTensor:
    """The input between two real values, on its grid. Raises TypeError for a float tensor."""
    return cast(QTensor, torch.clamp(_check(input, "clamp"), min_, max_))


def threshold(input: QTensor, threshold: float, value: float) -> QTensor:
    """``input`` where it is above ``threshold``, else ``value``, on the input's grid.

    Raises:
        TypeError: a float tensor. ValueError: no threshold or no value.
    """
    if threshold is None or value is None:
        raise ValueError("quantized threshold takes a threshold and a value")
    return activation.threshold(_check(input, "threshold"), threshold, value)


def interpolate(
    input: QTensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
) -> QTensor:
    """Resizes the spatial dimensions, on the input's grid: see :func:`zeropoint.ops.interpolate.interpolate`."""
    return _resize(_check(input, "interpolate"), size, scale_factor, mode, align_corners)


def upsample(
    input: QTensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
) -> QTensor:
    """:func:`interpolate` under its old name, which warns."""
    warnings.warn("nn.quantized.functional.upsample is deprecated: use interpolate", UserWarning, stacklevel=2)
    return interpolate(input, size, scale_factor, mode, align_corners)


def upsample_bilinear(
    input: QTensor, size: int | Sequence[int] | None = None, scale_factor: float | Sequence[float] | None = None
) -> QTensor:
    """Bilinear :func:`interpolate` with aligned corners under its old name, which warns."""
    warnings.warn("nn.quantized.functional.upsample_bilinear is deprecated: use interpolate", UserWarning, stacklevel=2)
    return interpolate(input, size, scale_factor, "bilinear", True)


def upsample_nearest(
    input: QTensor, size: int | Sequence[int] | None = None, scale_factor: float | Sequence[float] | None = None
) -> QTensor:
    """Nearest :func:`interpolate` under its old name, which warns."""
    warnings.warn("nn.quantized.functional.upsample_nearest is deprecated: use interpolate", UserWarning, stacklevel=2)
    return interpolate(input, size, scale_factor, "nearest")


# --- functions of one value ---------------------------------------------------------------------------------------


def leaky_relu(
    input: QTensor,
    negative_slope: float,
    inplace: bool = False,
    scale: float | None = None,
    zero_point: int | None = None,
) -> QTensor:
    """``x`` above zero, ``negative_slope * x`` below, on the given grid or the input's.

    Raises:
        TypeError: a float tensor. ValueError: half a grid, or ``inplace`` together with a grid.
    """
    x = _check(input, "leaky_relu")
    if inplace and scale is not None:
        raise ValueError("quantized leaky_relu with an output grid of its own cannot work in place")
    result = activation.leaky_relu(x, scale, zero_point, negative_slope)
    return cast(QTensor, x.copy_(result)) if inplace else result


def hardsigmoid(input: QTensor, inplace: bool = False) -> QTensor:
    """``clamp(x / 6 + 0.5, 0, 1)``, on the grid that fits its range. Raises TypeError for a float tensor."""
    return cast(QTensor, F.hardsigmoid(_check(input, "hardsigmoid"), inplace))


def elu(input: QTensor, scale: float, zero_point: int, alpha: float = 1.0) -> QTensor:
    """``x`` above zero, ``alpha * expm1(x)`` below, on the given grid. Raises TypeError for a float tensor."""
    return activation.elu(_check(input, "elu"), scale, zero_point, alpha)


def celu(input: QTensor, scale: float, zero_point: int, alpha: float = 1.0) -> QTensor:
    """``x`` above zero, ``alpha * expm1(x / alpha)`` below, on the given grid. Raises TypeError for a float tensor."""
    return activation.celu(_check(input, "celu"), scale, zero_point, alpha)


hardswish = activation.hardswish
sigmoid = activation.sigmoid
tanh = activation.tanh
silu = activation.silu
mish = activation.mish
softplus = activation.softplus
gelu = activation.gelu
prelu = activation.prelu
softmax = activation.softmax
