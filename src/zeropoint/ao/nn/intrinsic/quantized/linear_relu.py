"""Linear with a rectifier in its epilogue. May import: ``ao.nn.quantized``, ``intrinsic.fused``."""

from __future__ import annotations

from typing import Any

from zeropoint.ao.nn import quantized as nnq
from zeropoint.ao.nn._registry import static_twin_of
from zeropoint.ao.nn.intrinsic import fused
from zeropoint.ao.nn.intrinsic.quantized.rectified import Rectified
from zeropoint.dtypes import qint8

__all__ = ["LinearReLU"]


@static_twin_of(fused.LinearReLU)
class LinearReLU(Rectified, nnq.Linear):
    """A linear transformation followed by a rectifier, in one kernel.

    Args:
        in_features, out_features, bias: as for the float layer.
        dtype: of the weights, qint8.
    """

    FUSED_CLASS = fused.LinearReLU

    def __init__(self, in_features: int, out_features: int, bias: bool = True, dtype: Any = qint8) -> None:
        super().__init__(in_features, out_features, bias, dtype)
