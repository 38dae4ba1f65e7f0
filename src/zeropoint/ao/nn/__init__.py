"""The modules that the workflow puts in place of float ones."""

from zeropoint.ao.nn import intrinsic, qat, quantizable, quantized

__all__ = ["intrinsic", "qat", "quantizable", "quantized"]
