"""Modules with int8 weights that take and give float tensors."""

from zeropoint.ao.nn.quantized.dynamic.linear import Linear

__all__ = ["Linear"]
