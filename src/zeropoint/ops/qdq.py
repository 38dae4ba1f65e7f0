"""The ONNX form of grids: ``QuantizeLinear`` and ``DequantizeLinear`` nodes, while torch.onnx captures a model.

ONNX knows grids of all 256 codes of int8 or uint8. A narrower one is clipped in float *before* it is quantized, where
its ends are multiples of the scale: so the two nodes stay neighbours, which is what runtimes look for when they turn
the float operators around them into integer ones.

``QuantizeLinear`` divides by the scale and zeropoint multiplies by its reciprocal, so a value that lies within a
rounding of the middle between two codes may get the other one.

The nodes are torch's own (``torch.onnx.ops.symbolic``), so nothing here imports onnx.

May import: torch only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["captures", "capturing", "clip", "dequantize", "quantize", "quantize_dequantize", "storage_of"]

_ENDS = {torch.int8: (-128, 127), torch.uint8: (0, 255)}
_forced = False


def capturing() -> bool:
    """Whether a model is traced for ONNX, by ``torch.onnx.export`` or by :mod:`zeropoint.onnx`.

    Every fake quantize asks, so that the common answer, that nothing is traced, comes first.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting() and (_forced or torch.onnx.is_in_onnx_export())
    return torch._C._is_tracing() and torch.onnx.is_in_onnx_export()


@contextlib.contextmanager
def captures() -> Iterator[None]:
    """Says that what ``torch.export`` traces inside becomes an ONNX model."""
    global _forced
    before, _forced = _forced, True
    try:
        yield
    finally:
        _forced = before


def storage_of(quant_min: int, quant_max: int) -> torch.dtype | None:
    """The 8-bit dtype that holds the codes; None if none does."""
    if quant_min >= 0 and quant_max <= 255:
        return torch.uint8
    return torch.int8 if quant_min >= -128 and quant_max <= 127 else None


class _TorchScriptPair(torch.autograd.Function):
    """The two nodes for the exporter that traces TorchScript, which takes them from ``symbolic``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None) -> Tensor:
        return x.clone()  # the values do not matter: the graph is made by symbolic()

    @staticmethod
    def symbolic(g: Any, x: Any, scale: Any, zero_point: Any, axis: int | None) -> Any:
        along = {} if axis is None else {"axis_i": axis}
        codes = g.op("QuantizeLinear", x, scale, zero_point, **along)
        return g.op("DequantizeLinear", codes, scale, zero_point, **along).setType(x.type())


def _cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``x.to(dtype)``; the tracer of TorchScript would keep casts that change nothing."""
    return x if x.dtype == dtype else x.to(dtype)


def _along(axis: int | None) -> dict[str, Any]:
    return {} if axis is None else {"axis": axis}


def clip(x: Tensor, low: Tensor | None, high: Tensor | None) -> Tensor:
    """``x`` between two 0-d tensors of its dtype as a ``Clip`` node; None leaves an end open."""
    return torch.onnx.ops.symbolic("Clip", (x, low, high), dtype=x.dtype, shape=x.shape)


def _clipped(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None, ends: tuple[int, int]) -> Tensor:
    """``x`` inside the real values of the codes ``ends``, where the dtype's own ends would not do that."""
    low, high = _ENDS[zero_point.dtype]
    if axis is not None:
        shape = [1] * x.dim()
        shape[axis] = -1
        scale, zero_point = scale.reshape(shape), zero_point.reshape(shape)
    zero = zero_point.to(torch.float32)
    least = (ends[0] - zero) * scale if ends[0] > low else None
    most = (ends[1] - zero) * scale if ends[1] < high else None
    if axis is None and (least is not None or most is not None) and not torch._C._is_tracing():
        return clip(x, least, most)  # what the optimizer of torch.onnx makes of maximum and minimum fails at second use
    if least is not None:
        x = torch.maximum(x, least)
    return x if most is None else torch.minimum(x, most)


def quantize(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None, quant_min: int, quant_max: int) -> Tensor:
    """Codes of a float tensor as a ``QuantizeLinear`` node.

    Args:
        x: float tensor; it is quantized as float32.
        scale: float32, 0-d, or [channels] with an ``axis``.
        zero_point: int8 or uint8 of that shape; its dtype is that of the codes.
        axis: the channel dimension, from zero up; None for one grid.
        quant_min, quant_max: the codes.
    """
    x = _clipped(_cast(x, torch.float32), scale, zero_point, axis, (quant_min, quant_max))
    inputs = (x, scale, zero_point)
    return torch.onnx.ops.symbolic("QuantizeLinear", inputs, _along(axis), dtype=zero_point.dtype, shape=x.shape)


def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None) -> Tensor:
    """Real values, float32, of codes as a ``DequantizeLinear`` node; arguments as for :func:`quantize`."""
    inputs = (codes, scale, zero_point)
    return torch.onnx.ops.symbolic("DequantizeLinear", inputs, _along(axis), dtype=torch.float32, shape=codes.shape)


def quantize_dequantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None, quant_min: int, quant_max: int
) -> Tensor:
    """Fake quantize as a pair of nodes, in ``x``'s dtype. The codes must fit :func:`storage_of` their ends.

    Args:
        x: float tensor.
        scale, zero_point: one element, or [channels] with an ``axis``; any float and any integer dtype.
        axis, quant_min, quant_max: as for :func:`quantize`.
    """
    storage = storage_of(quant_min, quant_max)
    shape = () if axis is None else (-1,)
    scale = _cast(scale.detach(), torch.float32).reshape(shape)
    zero_point = _cast(zero_point.detach(), storage).reshape(shape)
    if torch._C._is_tracing():
        clipped = _clipped(_cast(x, torch.float32), scale, zero_point, axis, (quant_min, quant_max))
        y: Tensor = _TorchScriptPair.apply(clipped, scale, zero_point, axis)  # type: ignore[no-untyped-call]
    else:
        y = dequantize(quantize(x, scale, zero_point, axis, quant_min, quant_max), scale, zero_point, axis)
    return _cast(y, x.dtype)
