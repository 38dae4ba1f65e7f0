"""Quantized gradients for FSDP2.

``fully_shard`` modules have one public place for it: ``FSDPModule.set_custom_reduce_scatter``.

May import: ``distributed.collectives``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeropoint.distributed.collectives import BlockFormat, quantized_reduce_scatter

__all__ = ["QuantizedReduceScatter"]


class QuantizedReduceScatter:
    """A reduce-scatter for ``FSDPModule.set_custom_reduce_scatter`` that sends codes: ``N * bits / 8`` bytes a rank.

    Parameters are gathered as they are; only gradients are rounded, once. The call takes sums and averages, which is
    what ``fully_shard`` asks for unless ``set_gradient_divide_factor`` was called.

    Args:
        bits: 8 or 4.
        block: elements that share a scale, a multiple of 32.

    Raises:
        TypeError, ValueError: naming the argument that does not fit.

    Example:
        ``for module in model.modules():``
        ``    if isinstance(module, FSDPModule): module.set_custom_reduce_scatter(QuantizedReduceScatter())``
    """

    def __init__(self, bits: int = 8, block: int = 256) -> None:
        self.form = BlockFormat(bits, block)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a message, as FSDP asks for it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Leaves each rank its share of the sum or the mean in ``output_tensor``.

        Raises:
            ValueError: another reduction, or ``async_op``, which FSDP does not use.
        """
        if async_op:
            raise ValueError("QuantizedReduceScatter has no asynchronous form")
        quantized_reduce_scatter(output_tensor, input_tensor, op, group, bits=self.form.bits, block=self.form.block)
