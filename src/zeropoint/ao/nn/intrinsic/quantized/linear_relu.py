"""Linear with a rectifier in its epilogue. May import: ``ao.nn.quantized``, ``intrinsic.fused``."""

from __future__ import annotations

from zeropoint.ao.nn import quantized as nnq
from zeropoint.ao.nn._registry import static_twin_of
from zeropoint.ao.nn.intrinsic import fused
from zeropoint.ao.nn.intrinsic.quantized.rectified import Rectified

__all__ = ["LinearReLU"]


@static_twin_of(fused.LinearReLU)
class LinearReLU(Rectified, nnq.Linear):
    """A linear transformation followed by a rectifier, in one kernel. Arguments as quantized ``Linear``."""

    FUSED_CLASS = fused.LinearReLU
