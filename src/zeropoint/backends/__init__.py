"""What executes the operators: native code on the CPU, Triton kernels on CUDA, plain torch everywhere."""

from zeropoint.backends import triton
from zeropoint.backends.cpu import active_isa, available_isas, describe, is_native, load, set_isa

__all__ = ["active_isa", "available_isas", "describe", "is_native", "load", "set_isa", "triton"]
