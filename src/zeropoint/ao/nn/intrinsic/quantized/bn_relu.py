"""Batch norms with a rectifier in their epilogue. May import: ``ao.nn.quantized``, ``intrinsic.fused``."""

from __future__ import annotations

from zeropoint.ao.nn import quantized as nnq
from zeropoint.ao.nn._registry import static_twin_of
from zeropoint.ao.nn.intrinsic import fused
from zeropoint.ao.nn.intrinsic.quantized.rectified import Rectified

__all__ = ["BNReLU2d", "BNReLU3d"]


@static_twin_of(fused.BNReLU2d)
class BNReLU2d(Rectified, nnq.BatchNorm2d):
    """A 2d batch norm followed by a rectifier, in one kernel. Arguments as quantized ``BatchNorm2d``."""

    FUSED_CLASS = fused.BNReLU2d


@static_twin_of(fused.BNReLU3d)
class BNReLU3d(Rectified, nnq.BatchNorm3d):
    """A 3d batch norm followed by a rectifier, in one kernel. Arguments as quantized ``BatchNorm3d``."""

    FUSED_CLASS = fused.BNReLU3d
