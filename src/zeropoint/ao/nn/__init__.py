"""The modules that the workflow puts in place of float ones."""

from zeropoint.ao.nn import intrinsic, qat, quantized

__all__ = ["intrinsic", "qat", "quantized"]
