"""Linear with a rectifier, for training. May import: ``ao.nn.qat``, ``intrinsic``."""

from __future__ import annotations

from zeropoint.ao.nn import qat
from zeropoint.ao.nn._registry import converts_to, qat_twin_of
from zeropoint.ao.nn.intrinsic import fused, quantized
from zeropoint.ao.nn.intrinsic.qat._rectify import RectifiedSimulation

__all__ = ["LinearReLU"]


@qat_twin_of(fused.LinearReLU)
@converts_to(quantized.LinearReLU)
class LinearReLU(RectifiedSimulation, qat.Linear):
    """A linear layer with simulated quantization, followed by a rectifier. Arguments as ``qat.Linear``."""

    FUSED_CLASS = fused.LinearReLU
