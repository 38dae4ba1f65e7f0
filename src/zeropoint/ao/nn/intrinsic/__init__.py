"""Float modules that count as one when a model is quantized, under torch.ao's names."""

from zeropoint.ao.nn.intrinsic.fused import (
    BNReLU2d,
    BNReLU3d,
    ConvBn1d,
    ConvBn2d,
    ConvBn3d,
    ConvBnReLU1d,
    ConvBnReLU2d,
    ConvBnReLU3d,
    ConvReLU1d,
    ConvReLU2d,
    ConvReLU3d,
    ConvTransposeReLU1d,
    ConvTransposeReLU2d,
    ConvTransposeReLU3d,
    FusedModule,
    LinearBn1d,
    LinearReLU,
)

from zeropoint.ao.nn.intrinsic import qat, quantized  # isort: skip  (they name the classes above as their float twins)

_FusedModule = FusedModule

__all__ = [
    "BNReLU2d",
    "BNReLU3d",
    "ConvBn1d",
    "ConvBn2d",
    "ConvBn3d",
    "ConvBnReLU1d",
    "ConvBnReLU2d",
    "ConvBnReLU3d",
    "ConvReLU1d",
    "ConvReLU2d",
    "ConvReLU3d",
    "ConvTransposeReLU1d",
    "ConvTransposeReLU2d",
    "ConvTransposeReLU3d",
    "FusedModule",
    "LinearBn1d",
    "LinearReLU",
    "qat",
    "quantized",
]
