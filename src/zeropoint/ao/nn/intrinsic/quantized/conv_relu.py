"""Convolutions, transposed ones too, with a rectifier in their epilogue.

May import: ``ao.nn.quantized``, ``intrinsic.fused``.
"""

from __future__ import annotations

from zeropoint.ao.nn import quantized as nnq
from zeropoint.ao.nn._registry import static_twin_of
from zeropoint.ao.nn.intrinsic import fused
from zeropoint.ao.nn.intrinsic.quantized.rectified import Rectified

__all__ = [
    "ConvReLU1d",
    "ConvReLU2d",
    "ConvReLU3d",
    "ConvTransposeReLU1d",
    "ConvTransposeReLU2d",
    "ConvTransposeReLU3d",
]


@static_twin_of(fused.ConvReLU1d)
class ConvReLU1d(Rectified, nnq.Conv1d):
    """A 1d convolution followed by a rectifier, in one kernel. Arguments as quantized ``Conv1d``."""

    FUSED_CLASS = fused.ConvReLU1d


@static_twin_of(fused.ConvReLU2d)
class ConvReLU2d(Rectified, nnq.Conv2d):
    """A 2d convolution followed by a rectifier, in one kernel. Arguments as quantized ``Conv2d``."""

    FUSED_CLASS = fused.ConvReLU2d


@static_twin_of(fused.ConvReLU3d)
class ConvReLU3d(Rectified, nnq.Conv3d):
    """A 3d convolution followed by a rectifier, in one kernel. Arguments as quantized ``Conv3d``."""

    FUSED_CLASS = fused.ConvReLU3d


@static_twin_of(fused.ConvTransposeReLU1d)
class ConvTransposeReLU1d(Rectified, nnq.ConvTranspose1d):
    """A 1d transposed convolution followed by a rectifier, in one kernel. Arguments as ``ConvTranspose1d``."""

    FUSED_CLASS = fused.ConvTransposeReLU1d


@static_twin_of(fused.ConvTransposeReLU2d)
class ConvTransposeReLU2d(Rectified, nnq.ConvTranspose2d):
    """A 2d transposed convolution followed by a rectifier, in one kernel. Arguments as ``ConvTranspose2d``."""

    FUSED_CLASS = fused.ConvTransposeReLU2d


@static_twin_of(fused.ConvTransposeReLU3d)
class ConvTransposeReLU3d(Rectified, nnq.ConvTranspose3d):
    """A 3d transposed convolution followed by a rectifier, in one kernel. Arguments as ``ConvTranspose3d``."""

    FUSED_CLASS = fused.ConvTransposeReLU3d
