"""Model optimization: quantization and its modules, at torch.ao's paths."""

from zeropoint.ao import nn, quantization

__all__ = ["nn", "quantization"]
