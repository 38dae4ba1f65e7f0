"""Fused modules with int8 weights that take and give float tensors."""

from zeropoint.ao.nn.intrinsic.quantized.dynamic.linear_relu import LinearReLU

__all__ = ["LinearReLU"]
