"""How far a quantized tensor is from the float one it stands for, in five numbers.

May import: floors 1 to 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from zeropoint.tensor import QTensor

__all__ = ["ErrorMeter", "TensorError", "tensor_error"]


@dataclass(frozen=True)
class TensorError:
    """What quantization did to a tensor.

    Attributes:
        sqnr: signal to quantization noise ratio in dB; inf where nothing changed.
        cosine: of the angle between both tensors; nan where one is all zero.
        max_error: the largest absolute difference.
        clipped: the share of float values that lie outside the grid; None where there is no grid.
        unused: the share of the grid's codes that no value has; None where there is no grid.
    """

    sqnr: float
    cosine: float
    max_error: float
    clipped: float | None = None
    unused: float | None = None


class ErrorMeter:
    """Sums up the differences of many pairs of tensors, such as the batches of one activation."""

    def __init__(self) -> None:
        self._signal = self._noise = self._other = self._dot = self._max = 0.0
        self._count = self._clipped = 0
        self._used: Tensor | None = None

    def update(self, reference: Tensor, quantized: Tensor) -> None:
        """Adds one pair.

        Args:
            reference: float tensor; a quantized one is dequantized.
            quantized: quantized tensor, or a float one that holds the values of one; of the same shape.

        Raises:
            ValueError: other shapes.
        """
        if reference.shape != quantized.shape:
            raise ValueError(
                f"the tensors must have one shape, got {tuple(reference.shape)} and {tuple(quantized.shape)}"
            )
        wanted = _values(reference)
        got = _values(quantized)
        difference = got - wanted
        self._signal += float(wanted.square().sum())
        self._noise += float(difference.square().sum())
        self._other += float(got.square().sum())
        self._dot += float((wanted * got).sum())
        if wanted.numel():
            self._max = max(self._max, float(difference.abs().max()))
        if isinstance(quantized, QTensor):
            self._look_at_codes(wanted, quantized)

    def _look_at_codes(self, wanted: Tensor, quantized: QTensor) -> None:
        qdtype, codes = quantized.qdtype, quantized.codes()
        scale, zero_point = quantized._broadcast_grid()
        # A value is clipped if it is more than half a step beyond the last code.
        steps = wanted / scale + zero_point
        self._count += codes.numel()
        self._clipped += int(((steps < qdtype.qmin - 0.5) | (steps > qdtype.qmax + 0.5)).sum())
        levels = qdtype.qmax - qdtype.qmin + 1
        if levels <= 256:
            counts = torch.bincount(codes.flatten().to(torch.int64) - qdtype.qmin, minlength=levels)
            self._used = counts if self._used is None else self._used + counts

    def result(self) -> TensorError:
        """The error over all pairs so far."""
        norms = math.sqrt(self._signal) * math.sqrt(self._other)
        return TensorError(
            sqnr=decibels(self._signal, self._noise),
            cosine=self._dot / norms if norms else math.nan,
            max_error=self._max,
            clipped=self._clipped / self._count if self._count else None,
            unused=None if self._used is None else float((self._used == 0).double().mean()),
        )


def _values(x: Tensor) -> Tensor:
    return (x.dequantize() if x.is_quantized else x).detach().to(torch.float64)


def decibels(signal: float, noise: float) -> float:
    """``10 log10(signal / noise)``; inf without noise, -inf where there is noise only."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def tensor_error(reference: Tensor, quantized: Tensor) -> TensorError:
    """What quantization did to one tensor.

    Args:
        reference: float tensor.
        quantized: quantized tensor of the same shape, or a float one that holds the values of one.

    Raises:
        ValueError: other shapes.

    Example:
        >>> import torch, zeropoint as zp
        >>> from zeropoint.analysis import tensor_error
        >>> x = torch.tensor([0.0, 1.0, 2.0, 100.0])
        >>> error = tensor_error(x, zp.quantize_per_tensor(x, 0.1, 0, zp.quint8))
        >>> error.max_error, error.clipped
        (74.5, 0.25)
    """
    meter = ErrorMeter()
    meter.update(reference, quantized)
    return meter.result()
