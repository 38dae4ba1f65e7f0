"""Sums, products and joins of quantized tensors, from codes to codes.

May import: ``dtypes``, ``grid``, ``tensor``, ``ops.registry``, ``ops.quantize``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zeropoint import grid
from zeropoint.dtypes import QDtype, as_qdtype
from zeropoint.ops.quantize import requantize
from zeropoint.ops.registry import operator
from zeropoint.tensor import QTensor, make_qtensor

__all__ = ["add", "add_scalar", "cat", "div", "matmul", "mul", "mul_scalar", "sub"]

_BINARY = (
    "(Tensor a, float a_scale, int a_zero_point, Tensor b, float b_scale, int b_zero_point,"
    " float out_scale, int out_zero_point, int out_min, int out_max, ScalarType out_dtype) -> Tensor"
)


# --- operators over plain tensors ---------------------------------------------------------------------------------


def _broadcast_empty(
    a: Tensor,
    a_scale: float,
    a_zero_point: int,
    b: Tensor,
    b_scale: float,
    b_zero_point: int,
    out_scale: float,
    out_zero_point: int,
    out_min: int,
    out_max: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """Where a broadcast result goes: laid out as the first operand that already has its shape, else contiguous."""
    shape = torch.broadcast_tensors(a, b)[0].shape
    for operand in (a, b):
        if operand.shape == shape:
            return torch.empty_like(operand, dtype=out_dtype)
    return a.new_empty(shape, dtype=out_dtype)


@operator("add" + _BINARY, meta=_broadcast_empty)
def add_reference(
    a: Tensor,
    a_scale: float,
    a_zero_point: int,
    b: Tensor,
    b_scale: float,
    b_zero_point: int,
    out_scale: float,
    out_zero_point: int,
    out_min: int,
    out_max: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """Sum with broadcasting: both operands in steps of the output grid, added in float32, rounded once."""
    steps_a = _steps(a, a_zero_point).to(torch.float32) * grid.multiplier(a_scale, out_scale)
    steps_b = _steps(b, b_zero_point).to(torch.float32) * grid.multiplier(b_scale, out_scale)
    codes = grid.clamp_codes(torch.round(steps_a + steps_b), out_zero_point, out_min, out_max)
    return _broadcast_empty(a, 1.0, 0, b, 1.0, 0, 1.0, 0, 0, 0, out_dtype).copy_(codes)


@operator("mul" + _BINARY, meta=_broadcast_empty)
def mul_reference(
    a: Tensor,
    a_scale: float,
    a_zero_point: int,
    b: Tensor,
    b_scale: float,
    b_zero_point: int,
    out_scale: float,
    out_zero_point: int,
    out_min: int,
    out_max: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """Product with broadcasting; the product of the steps is exact for 8-bit codes, a float64 one for 32-bit codes."""
    product = _steps(a, a_zero_point).to(torch.float64) * _steps(b, b_zero_point).to(torch.float64)
    factor = grid.multiplier(a_scale * b_scale, out_scale)
    codes = grid.requantize(product, factor, None, out_zero_point, out_min, out_max)
    return _broadcast_empty(a, 1.0, 0, b, 1.0, 0, 1.0, 0, 0, 0, out_dtype).copy_(codes)


@operator("div" + _BINARY, meta=_broadcast_empty)
def div_reference(
    a: Tensor,
    a_scale: float,
    a_zero_point: int,
    b: Tensor,
    b_scale: float,
    b_zero_point: int,
    out_scale: float,
    out_zero_point: int,
    out_min: int,
    out_max: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """Quotient with broadcasting, in float64; x / 0 saturates at the end of its sign, 0 / 0 is the zero point."""
    quotient = _steps(a, a_zero_point).to(torch.float64) / _steps(b, b_zero_point).to(torch.float64)
    codes = grid.clamp_codes(torch.round(quotient * (a_scale / b_scale / out_scale)), out_zero_point, out_min, out_max)
    return _broadcast_empty(a, 1.0, 0, b, 1.0, 0, 1.0, 0, 0, 0, out_dtype).copy_(codes)


def _matmul_empty(a: Tensor, *arguments: Any) -> Tensor:
    b, out_dtype = arguments[2], arguments[-1]
    return torch.matmul(a.to(torch.float64), b.to(torch.float64)).to(out_dtype)


@operator("matmul" + _BINARY, meta=_matmul_empty)
def matmul_reference(
    a: Tensor,
    a_scale: float,
    a_zero_point: int,
    b: Tensor,
    b_scale: float,
    b_zero_point: int,
    out_scale: float,
    out_zero_point: int,
    out_min: int,
    out_max: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """``torch.matmul`` of two 8-bit activations; float64 holds the integer sums exactly (K below 2**37)."""
    total = torch.matmul(_steps(a, a_zero_point).to(torch.float64), _steps(b, b_zero_point).to(torch.float64))
    factor = grid.multiplier(a_scale * b_scale, out_scale)
    return grid.requantize(total, factor, None, out_zero_point, out_min, out_max).to(out_dtype)


def _steps(codes: Tensor, zero_point: int) -> Tensor:
    return codes.to(torch.int64) - zero_point


# --- functions over quantized tensors -----------------------------------------------------------------------------


def add(a: QTensor, b: QTensor, scale: float, zero_point: int, relu: bool = False, dtype: Any = None) -> QTensor:
    """``a + b`` on the given output grid, with broadcasting.

    Args:
        a, b: per-tensor quantized tensors; dtypes and grids may differ.
        scale, zero_point: the output's grid.
        relu: also clamp at real zero, in the same pass.
        dtype: the output's quantized dtype; None takes ``a``'s.

    Raises:
        TypeError: an operand is not quantized. RuntimeError: an operand has a per-channel grid.
        ValueError: the output grid is none.

    Example:
        >>> import torch, zeropoint as zp
        >>> from zeropoint.ops.arithmetic import add
        >>> q = zp.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.5, 0, zp.qint8)
        >>> add(q, q, scale=1.0, zero_point=0).int_repr()
        tensor([2, 4], dtype=torch.int8)
    """
    return _binary("add", a, b, scale, zero_point, relu, dtype)


def sub(a: QTensor, b: QTensor, scale: float, zero_point: int, relu: bool = False, dtype: Any = None) -> QTensor:
    """``a - b`` on the given output grid; arguments and errors as :func:`add`."""
    return _binary("sub", a, b, scale, zero_point, relu, dtype)


def mul(a: QTensor, b: QTensor, scale: float, zero_point: int, relu: bool = False, dtype: Any = None) -> QTensor:
    """``a * b`` on the given output grid; arguments and errors as :func:`add`."""
    return _binary("mul", a, b, scale, zero_point, relu, dtype)


def div(a: QTensor, b: QTensor, scale: float, zero_point: int, relu: bool = False, dtype: Any = None) -> QTensor:
    """``a / b`` on the given output grid; arguments and errors as :func:`add`.

    A division by real zero saturates at the end of its sign, and 0 / 0 gives real zero.
    """
    return _binary("div", a, b, scale, zero_point, relu, dtype)


def matmul(a: QTensor, b: QTensor, scale: float, zero_point: int, dtype: Any = None) -> QTensor:
    """``torch.matmul(a, b)`` on the given output grid, from exact integer sums.

    Raises:
        TypeError: an operand is not an 8-bit quantized tensor. Else as :func:`add`.
    """
    for operand in (a, b):
        if _per_tensor(operand, "matmul").qdtype.itemsize != 1:
            raise TypeError(f"matmul takes qint8 or quint8 tensors, got {operand.qdtype}: requantize first")
    return _binary("matmul", a, b, scale, zero_point, False, dtype)


def add_scalar(x: QTensor, value: float, relu: bool = False) -> QTensor:
    """``x + value`` by moving the grid: codes stay, the zero point moves by ``rint(value / scale)`` steps.

    As in ``torch.ao``, ``value`` counts as the nearest multiple of the scale. When the zero point would leave the
    dtype's range, it stops at the end and the scale widens so that every old code still has a place.

    Raises:
        TypeError: ``x`` is not quantized. RuntimeError: ``x`` has a per-channel grid.
        ValueError: ``value`` is not finite.
    """
    _per_tensor(x, "add_scalar")
    _check_scalar(value, "add_scalar")
    qmin, qmax = x.qdtype.qmin, x.qdtype.qmax
    wanted = x.zero_point - round(value / x.scale)
    zero_point = min(max(wanted, qmin), qmax)
    scale = x.scale
    codes = x._codes
    if zero_point != wanted:
        farthest = qmax if wanted < qmin else qmin
        scale = grid.check_scale(abs(farthest - wanted) / (qmax - qmin) * x.scale, "the scale that holds the sum")
        codes = torch.ops.zeropoint.requantize.default(
            codes, x.scale, wanted, scale, zero_point, zero_point if relu else qmin, qmax, x.qdtype.storage
        )
    elif relu:
        codes = codes.clamp(min=zero_point)
    return make_qtensor(codes if codes is not x._codes else codes.clone(), x.qdtype, scale, zero_point)


def mul_scalar(x: QTensor, value: float, relu: bool = False) -> QTensor:
    """``x * value``, exactly: the scale is multiplied; a negative ``value`` mirrors codes and zero point.

    As in ``torch.ao``; a product with 0 lies on the grid (scale 1, zero point 0).

    Raises:
        As :func:`add_scalar`; ValueError also when the product is no scale.
    """
    _per_tensor(x, "mul_scalar")
    _check_scalar(value, "mul_scalar")
    if value == 0:
        return make_qtensor(torch.zeros_like(x._codes), x.qdtype, 1.0, 0)
    scale = grid.check_scale(x.scale * abs(value), "the product of scale and scalar")
    codes, zero_point = x._codes, x.zero_point
    if value < 0:
        # ~code is -1 - code: the mirror of a signed code, and of an unsigned one
        codes, zero_point = torch.bitwise_not(codes), x.qdtype.qmin + x.qdtype.qmax - zero_point
    if relu:
        codes = codes.clamp(min=zero_point)
    return make_qtensor(codes if codes is not x._codes else codes.clone(), x.qdtype, scale, zero_point)


def cat(
    tensors: Sequence[QTensor],
    dim: int = 0,
    scale: float | None = None,
    zero_point: int | None = None,
    relu: bool = False,
    dtype: Any = None,
) -> QTensor:
    """Joins tensors along ``dim`` on one output grid: each is requantized, those already on it are copied.

    Args:
        tensors: one or more per-tensor quantized tensors.
        dim: the dimension to join along.
        scale, zero_point: the output's grid; None takes the first tensor's.
        relu: also clamp at real zero.
        dtype: the output's quantized dtype; None takes the first tensor's.

    Raises:
        TypeError: an element is not quantized. RuntimeError: an element has a per-channel grid.
        ValueError: no tensors, or their ranks or sizes do not fit.
    """
    parts = list(tensors)
    if not parts:
        raise ValueError("cat needs at least one tensor, got an empty list")
    first = _per_tensor(parts[0], "cat")
    _check_joinable(parts, dim)
    qdtype = first.qdtype if dtype is None else as_qdtype(dtype)
    step = first.scale if scale is None else grid.check_scale(scale)
    zero = grid.check_zero_point(first.zero_point if zero_point is None else zero_point, qdtype.qmin, qdtype.qmax)
    codes = torch.cat([requantize(part, step, zero, qdtype)._codes for part in parts], dim)
    return make_qtensor(codes.clamp_(min=zero) if relu else codes, qdtype, step, zero)


def _binary(name: str, a: QTensor, b: QTensor, scale: float, zero_point: int, relu: bool, dtype: Any) -> QTensor:
    _per_tensor(a, name)
    _per_tensor(b, name)
    qdtype: QDtype = a.qdtype if dtype is None else as_qdtype(dtype)
    step = grid.check_scale(scale)
    zero = grid.check_zero_point(zero_point, qdtype.qmin, qdtype.qmax)
    low = zero if relu else qdtype.qmin
    b_scale = b.scale
    if name == "sub":
        name, b_scale = "add", -b_scale
    operation = getattr(torch.ops.zeropoint, name).default
    codes = operation(
        a._codes, a.scale, a.zero_point, b._codes, b_scale, b.zero_point, step, zero, low, qdtype.qmax, qdtype.storage
    )
    return make_qtensor(codes, qdtype, step, zero)


def _per_tensor(x: Any, name: str) -> QTensor:
    if not isinstance(x, QTensor):
        seen = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} takes quantized tensors, got {seen}: quantize it first")
    x._require_per_tensor(name)
    return x


def _check_scalar(value: Any, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} takes a number, got {type(value).__name__}")
    if not abs(value) < float("inf"):
        raise ValueError(f"{name} takes a finite number, got {value}")


def _check_joinable(parts: Sequence[Any], dim: int) -> None:
    shapes = [tuple(_per_tensor(part, "cat")._codes.shape) for part in parts]
    rank = len(shapes[0])
    if any(len(shape) != rank for shape in shapes):
        raise ValueError(f"cat needs tensors of one rank, got shapes {shapes}")
    if not -rank <= dim < rank:
        raise ValueError(f"cat: dim {dim} is out of range for tensors of {rank} dimensions")
    others = [shape[: dim % rank] + shape[dim % rank + 1 :] for shape in shapes]
    if any(other != others[0] for other in others):  # sizes that an exported graph leaves open cannot be hashed
        raise ValueError(f"cat needs sizes that differ only in dim {dim}, got shapes {shapes}")
