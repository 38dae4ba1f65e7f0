"""OneFlow-style quantization modules: observers that return a grid, and modules that are given one."""

from zeropoint.nn.qat_conv import QatConv1d, QatConv2d, QatConv3d
from zeropoint.nn.quantization import FakeQuantization, MinMaxObserver, MovingAverageMinMaxObserver, Quantization

__all__ = [
    "FakeQuantization",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "QatConv1d",
    "QatConv2d",
    "QatConv3d",
    "Quantization",
]
