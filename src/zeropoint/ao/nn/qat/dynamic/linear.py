"""Linear layer that trains for dynamic quantization. May import: ``ao.nn.quantized.dynamic``, ``qat.linear``."""

from __future__ import annotations

from zeropoint.ao.nn._registry import converts_to, dynamic_twin_of
from zeropoint.ao.nn.qat import linear
from zeropoint.ao.nn.quantized import dynamic as nnqd

__all__ = ["Linear"]


@converts_to(nnqd.Linear)
class Linear(linear.Linear):
    """A linear layer with simulated quantization of its weight, which becomes a dynamic ``Linear``.

    Arguments as ``qat.Linear``.
    """


dynamic_twin_of(Linear)(nnqd.Linear)
