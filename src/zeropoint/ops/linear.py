"""Linear: exact integer sums of quantized rows and weights, then one rounding to the output's grid.

May import: ``dtypes``, ``grid``, ``tensor``, ``ops.registry``, ``ops.quantize``.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from zeropoint import grid
from zeropoint.dtypes import QDtype, as_qdtype, qint8, quint8
from zeropoint.ops.quantize import FLOAT_DTYPES, dynamic_range_reference, reduced_range
from zeropoint.ops.registry import native_operator, operator
from zeropoint.tensor import QTensor, make_qtensor

__all__ = ["quantized_linear", "quantized_linear_dynamic"]


# --- operators over plain tensors ---------------------------------------------------------------------------------


def _pack_meta(weight: Tensor) -> Tensor:
    """How many bytes there are depends on the instruction set and on the weights."""
    return weight.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.uint8)


@operator("linear_pack(Tensor weight) -> Tensor", meta=_pack_meta)
def linear_pack_reference(weight: Tensor) -> Tensor:
    """Weights in the kernel's order, as bytes; empty here, because the reference needs no other order."""
    return weight.new_empty(0, dtype=torch.uint8)


def exact_sums(x: Tensor, x_zero_point: Tensor | int, weight: Tensor, weight_zero_point: Tensor) -> Tensor:
    """``sum((x - x_zero_point) * (w - w_zero_point))`` over the last dimension, exact: float64 holds it up to 2**53."""
    steps = x.to(torch.float64) - x_zero_point
    weight_steps = weight.to(torch.float64) - weight_zero_point.to(torch.float64).reshape(-1, 1)
    return steps @ weight_steps.t()


@operator(
    "linear(Tensor x, float x_scale, int x_zero_point, Tensor weight, Tensor weight_scale, Tensor weight_zero_point,"
    " Tensor? bias, float out_scale, int out_zero_point, int out_min, int out_max, ScalarType out_dtype,"
    " Tensor? packed) -> Tensor",
    meta=lambda x, x_scale, x_zero_point, weight, *args: x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=args[-2]),
)
def linear_reference(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor,
    bias: Tensor | None,
    out_scale: float,
    out_zero_point: int,
    out_min: int,
    out_max: int,
    out_dtype: torch.dtype,
    packed: Tensor | None,
) -> Tensor:
    """Codes ``(..., N)`` from codes ``x`` ``(..., K)`` and int8 ``weight`` ``(N, K)``; ``packed`` is not needed here.

    ``weight_scale`` and ``weight_zero_point`` hold 1 or N numbers; ``bias`` holds N reals.
    """
    grid.check_operator_scales("linear", x_scale, out_scale)
    sums = exact_sums(x, x_zero_point, weight, weight_zero_point)
    factor = grid.multiplier(weight_scale.to(torch.float64) * x_scale, out_scale)
    offset = None if bias is None else grid.multiplier(bias, out_scale)
    return grid.requantize(sums, factor, offset, out_zero_point, out_min, out_max).to(out_dtype)


native_operator(
    "linear_bind(ScalarType x_dtype, float x_scale, int x_zero_point, Tensor weight, Tensor weight_scale,"
    " Tensor weight_zero_point, Tensor? bias, float out_scale, int out_zero_point, int out_min, int out_max,"
    " ScalarType out_dtype) -> Tensor"
)
native_operator("linear_bound(Tensor x, Tensor weight, Tensor packed, Tensor bound) -> Tensor")


@operator(
    "linear_dynamic(Tensor x, Tensor weight, Tensor weight_scale, Tensor weight_zero_point, Tensor? bias,"
    " bool reduce_range, bool relu, Tensor? packed) -> Tensor",
    meta=lambda x, weight, *args: x.new_empty((*x.shape[:-1], weight.shape[0])),
)
def linear_dynamic_reference(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor,
    bias: Tensor | None,
    reduce_range: bool,
    relu: bool,
    packed: Tensor | None,
) -> Tensor:
    """Floats ``(..., N)`` from floats ``x`` ``(..., K)`` on the quint8 grid of their own range, and int8 weights.

    Arithmetic is float32 for every input dtype, float64 too: quantized to 8 bits, the input has no more to give.
    """
    values = x.to(torch.float32)
    quant_min, quant_max = reduced_range(quint8, reduce_range)
    scale, zero_point = grid.choose_qparams(*dynamic_range_reference(values), quant_min, quant_max)
    codes = grid.quantize(values, scale, zero_point, quint8.qmin, quint8.qmax)
    sums = exact_sums(codes, zero_point, weight, weight_zero_point)
    y = sums.to(torch.float32) * (scale * weight_scale.to(torch.float64)).to(torch.float32)
    if bias is not None:
        y = y + bias.to(torch.float32)
    return (torch.relu(y) if relu else y).to(x.dtype)


# --- functions over quantized tensors -----------------------------------------------------------------------------


def quantized_linear(
    input: Tensor,
    weight: Tensor,
    input_scale: float,
    input_zero_point: int,
    weight_scales: Tensor,
    weight_zero_points: Tensor,
    bias: Tensor | None = None,
    out_scale: float = 1.0,
    out_zero_point: int = 0,
) -> QTensor:
    """``input @ weight.T + bias`` on codes: exact integer sums, rounded once to the output's grid.

    The grids are the arguments: those that ``input`` and ``weight`` may carry themselves do not count.

    Args:
        input: ``(..., K)``, a qint8 or quint8 tensor, or plain int8 or uint8 codes.
        weight: ``(N, K)``, a qint8 tensor or plain int8 codes.
        input_scale, input_zero_point: the grid of ``input``.
        weight_scales, weight_zero_points: the grids of the rows of ``weight``: 1-D, N numbers, or one for all rows.
        bias: real values, 1-D, N floats.
        out_scale, out_zero_point: the grid of the result.

    Returns:
        ``(..., N)``, of the input's quantized dtype.

    Raises:
        TypeError: tensors of other dtypes.
        ValueError: shapes that do not fit each other, or numbers that make no grid.

    Example:
        >>> import torch, zeropoint as zp
        >>> x = torch.tensor([[10, 20]], dtype=torch.uint8)
        >>> w = torch.tensor([[1, 2], [-3, 4]], dtype=torch.int8)
        >>> zp.quantized_linear(x, w, 0.5, 10, torch.tensor([0.1]), torch.tensor([0]), out_scale=0.5).int_repr()
        tensor([[2, 4]], dtype=torch.uint8)
    """
    name = "quantized_linear"
    codes, qdtype = _codes_of(input, name, "input", (qint8, quint8))
    weight_codes, scales, zero_points = _check_weight(codes, weight, weight_scales, weight_zero_points, bias, name)
    x_scale = grid.check_scale(input_scale, "input_scale")
    x_zero = grid.check_zero_point(input_zero_point, qdtype.qmin, qdtype.qmax, "input_zero_point")
    step = grid.check_scale(out_scale, "out_scale")
    zero = grid.check_zero_point(out_zero_point, qdtype.qmin, qdtype.qmax, "out_zero_point")
    out = torch.ops.zeropoint.linear.default(
        codes,
        x_scale,
        x_zero,
        weight_codes,
        scales,
        zero_points,
        bias,
        step,
        zero,
        qdtype.qmin,
        qdtype.qmax,
        qdtype.storage,
        None,
    )
    return make_qtensor(out, qdtype, step, zero)


def quantized_linear_dynamic(
    input: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    weight_zero_points: Tensor,
    bias: Tensor | None = None,
    reduce_range: bool = False,
) -> Tensor:
    """``input @ weight.T + bias`` of a float input that is quantized on the way, on the grid of its complete range.

    Args:
        input: ``(..., K)`` floats. Non-finite values do not count towards the range.
        weight: ``(N, K)``, a qint8 tensor or plain int8 codes; a grid that it carries itself does not count.
        weight_scales, weight_zero_points: the grids of the rows of ``weight``: 1-D, N numbers, or one for all rows.
        bias: 1-D, N floats.
        reduce_range: choose the input's grid for seven bits.

    Returns:
        ``(..., N)`` floats, of the input's dtype; computed in float32.

    Raises:
        TypeError, ValueError: as :func:`quantized_linear`.
    """
    name = "quantized_linear_dynamic"
    if not isinstance(input, Tensor) or isinstance(input, QTensor) or input.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} takes a float input, got {_seen(input)}")
    codes, scales, zero_points = _check_weight(input, weight, weight_scales, weight_zero_points, bias, name)
    return cast(
        Tensor,
        torch.ops.zeropoint.linear_dynamic.default(
            input, codes, scales, zero_points, bias, bool(reduce_range), False, None
        ),
    )


def _seen(x: Any) -> str:
    return str(x.dtype) if isinstance(x, Tensor) else type(x).__name__


def _codes_of(x: Any, name: str, argument: str, allowed: tuple[QDtype, ...]) -> tuple[Tensor, QDtype]:
    """The plain codes of a quantized or an integer tensor, and the quantized dtype that they have."""
    codes = x._codes if isinstance(x, QTensor) else x
    storages = [qdtype.storage for qdtype in allowed]
    if not isinstance(codes, Tensor) or codes.dtype not in storages:
        names = " or ".join(qdtype.name for qdtype in allowed)
        raise TypeError(f"{name} takes a {names} {argument}, or its codes as {storages}, got {_seen(x)}")
    return codes, as_qdtype(codes.dtype)


def _check_weight(
    x: Tensor, weight: Tensor, scales: Any, zero_points: Any, bias: Tensor | None, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Checks everything that must fit the weight, and returns its codes, scales and zero points."""
    codes, _ = _codes_of(weight, name, "weight", (qint8,))
    if x.dim() < 1 or codes.dim() != 2 or x.shape[-1] != codes.shape[1]:
        raise ValueError(
            f"{name} takes an input (..., K) and a weight (N, K), got {tuple(x.shape)} and {tuple(codes.shape)}"
        )
    rows = codes.shape[0]
    for argument, value in (("weight_scales", scales), ("weight_zero_points", zero_points)):
        if not isinstance(value, Tensor) or isinstance(value, QTensor):
            raise TypeError(f"{name} takes {argument} as a tensor, got {_seen(value)}")
        if value.dim() != 1 or value.numel() not in (1, rows):
            raise ValueError(f"{argument} must have shape ({rows},) or (1,), got {tuple(value.shape)}")
    if not scales.is_floating_point():
        raise TypeError(f"weight_scales must be floating, got {scales.dtype}")
    if zero_points.is_floating_point() or zero_points.is_complex() or zero_points.dtype == torch.bool:
        raise TypeError(f"weight_zero_points must be integers, got {zero_points.dtype}")
    if scales.numel():
        if not bool(torch.isfinite(scales).all()):
            raise ValueError("every weight scale must be finite and above 0")
        grid.check_scale(scales.min().item(), "every weight scale")
        for extreme in (zero_points.min(), zero_points.max()):
            grid.check_zero_point(int(extreme), qint8.qmin, qint8.qmax, "every weight zero point")
    if bias is not None:
        if not isinstance(bias, Tensor) or isinstance(bias, QTensor) or not bias.is_floating_point():
            raise TypeError(f"{name} takes a float bias, got {_seen(bias)}")
        if bias.shape != (rows,):
            raise ValueError(f"bias must have shape ({rows},), got {tuple(bias.shape)}")
    return codes, scales.to(torch.float64), zero_points.to(torch.int32)
