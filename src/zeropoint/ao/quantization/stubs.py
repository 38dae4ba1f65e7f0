"""Marks in a float model where the quantized region begins and ends.

May import: ``ao.nn``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from zeropoint.ao.nn import quantized as nnq
from zeropoint.ao.nn._registry import converts_to

__all__ = ["DeQuantStub", "QuantStub", "QuantWrapper"]


class _Stub(nn.Module):
    """The identity, until ``convert``.

    Args:
        qconfig: of this stub alone; None leaves it to the model around it.
    """

    def __init__(self, qconfig: Any = None) -> None:
        super().__init__()
        if qconfig:
            self.qconfig = qconfig

    def forward(self, x: Tensor) -> Tensor:
        """``x`` itself."""
        return x


@converts_to(nnq.Quantize)
class QuantStub(_Stub):
    """Where float activations enter the quantized region: observed in calibration, ``Quantize`` after ``convert``.

    Args:
        qconfig: of this stub alone; None leaves it to the model around it.
    """


@converts_to(nnq.DeQuantize)
class DeQuantStub(_Stub):
    """Where activations leave the quantized region: ``DeQuantize`` after ``convert``.

    Args:
        qconfig: of this stub alone; None leaves it to the model around it.
    """


class QuantWrapper(nn.Module):
    """A module between a QuantStub and a DeQuantStub.

    Args:
        module: takes and gives one tensor; its qconfig, if it has one, is that of the stubs too.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        qconfig = getattr(module, "qconfig", None)
        self.quant = QuantStub(qconfig)
        self.dequant = DeQuantStub(qconfig)
        self.module = module
        self.train(module.training)

    def forward(self, x: Tensor) -> Tensor:
        """``module(x)``, quantized in between once it is converted."""
        return self.dequant(self.module(self.quant(x)))  # type: ignore[no-any-return]
