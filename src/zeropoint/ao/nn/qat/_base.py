"""What modules for quantization-aware training share: the fake quantize of their weight.

May import: torch; the fake quantizers when a module is made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["WeightSimulation", "float_copy", "make_weight_fake_quant", "share"]


def make_weight_fake_quant(qconfig: Any) -> nn.Module:
    """The module that simulates the weight's grid.

    ``qconfig.weight()`` if that is a fake quantize. A plain observer only looks, so training would not see the grid
    that conversion uses: it is wrapped in the fake quantize that goes with it.
    """
    # Imported late: that package imports this one for its mappings.
    from zeropoint.ao.quantization.fake_quantize import FakeQuantize, PerChannelFakeQuantize
    from zeropoint.ao.quantization.observer import UniformQuantizationObserverBase

    made: nn.Module = qconfig.weight()
    if not isinstance(made, UniformQuantizationObserverBase):
        return made
    if made.qscheme.is_per_channel:
        axis = int(made.ch_axis)  # type: ignore[arg-type]
        return PerChannelFakeQuantize(qconfig.weight, ch_axis=axis, dtype=made.dtype, qscheme=made.qscheme)
    return FakeQuantize(qconfig.weight)


class WeightSimulation(nn.Module):
    """Mixin in front of a float layer: a qconfig, and the fake quantize of the weight.

    Attributes:
        qconfig: chooses the observers. Without one: averaged activations, one symmetric weight grid an output channel.
        weight_fake_quant: simulates the weight's grid in the forward pass; the parameters stay float.
    """

    weight_fake_quant: nn.Module

    def _simulate(self, qconfig: Any, device: torch.device) -> None:
        if qconfig is None:
            from zeropoint.ao.quantization.qconfig import default_per_channel_qat_qconfig

            qconfig = default_per_channel_qat_qconfig
        self.qconfig = qconfig
        self.weight_fake_quant = make_weight_fake_quant(qconfig).to(device)


def share(source: Any, target: Any) -> Any:
    """``target`` with the weight and bias *objects* of ``source``, so that optimizers find them, and its mode."""
    target.weight = source.weight
    target.bias = source.bias
    target.train(source.training)
    return target


def float_copy(source: Any, target: Any) -> Any:
    """``target`` with detached copies of the weight and bias of ``source``, and its mode."""
    target.weight = nn.Parameter(source.weight.detach().clone())
    if source.bias is not None:
        target.bias = nn.Parameter(source.bias.detach().clone())
    target.train(source.training)
    return target
