"""The operators, one file a family: schema, reference, output shape, and the function over quantized tensors."""

from zeropoint.ops import conv, pool, quantize

__all__ = ["conv", "pool", "quantize"]
