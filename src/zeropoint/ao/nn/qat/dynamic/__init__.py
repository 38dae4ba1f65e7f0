"""Modules that train for dynamic quantization, under torch.ao's names."""

from zeropoint.ao.nn.qat.dynamic.linear import Linear

__all__ = ["Linear"]
