"""Quantized modules with a rectifier in their kernel's epilogue, under torch.ao's names."""

from zeropoint.ao.nn.intrinsic.quantized import dynamic
from zeropoint.ao.nn.intrinsic.quantized.bn_relu import BNReLU2d, BNReLU3d
from zeropoint.ao.nn.intrinsic.quantized.conv_relu import (
    ConvReLU1d,
    ConvReLU2d,
    ConvReLU3d,
    ConvTransposeReLU1d,
    ConvTransposeReLU2d,
    ConvTransposeReLU3d,
)
from zeropoint.ao.nn.intrinsic.quantized.linear_relu import LinearReLU

__all__ = [
    "BNReLU2d",
    "BNReLU3d",
    "ConvReLU1d",
    "ConvReLU2d",
    "ConvReLU3d",
    "ConvTransposeReLU1d",
    "ConvTransposeReLU2d",
    "ConvTransposeReLU3d",
    "LinearReLU",
    "dynamic",
]
