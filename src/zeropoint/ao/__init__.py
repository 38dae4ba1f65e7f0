"""Model optimization: quantization, its modules and what it costs, at torch.ao's paths."""

from zeropoint.ao import nn, ns, quantization

__all__ = ["nn", "ns", "quantization"]
