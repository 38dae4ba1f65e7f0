"""Linear layer that simulates quantized weights while it trains.

May import: what QAT modules share, ``ao.nn.quantized``.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from zeropoint.ao.nn import quantized as nnq
from zeropoint.ao.nn._registry import converts_to, qat_twin_of
from zeropoint.ao.nn._weight_norm import bake_weight
from zeropoint.ao.nn.qat._base import WeightSimulation, float_copy, share
from zeropoint.ao.nn.quantized._from_float import require_class

__all__ = ["Linear"]


@qat_twin_of(nn.Linear)
@converts_to(nnq.Linear)
class Linear(WeightSimulation, nn.Linear):
    """A linear layer with simulated quantization of its weight: per output channel, unless the qconfig says otherwise.

    Args:
        in_features, out_features, bias: as for ``nn.Linear``.
        qconfig: chooses the observers; None for averaged activations and one symmetric weight grid an output channel.
        device, dtype: of the parameters.

    Attributes:
        weight, bias: float parameters.
        weight_fake_quant: simulates the weight's grid in the forward pass.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        qconfig: Any = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._simulate(qconfig, self.weight.device)

    def forward(self, input: Tensor) -> Tensor:
        """``input @ fake_quantize(weight).T + bias``, float (..., out_features)."""
        return F.linear(input, self.weight_fake_quant(self.weight), self.bias)

    @classmethod
    def from_float(cls, mod: nn.Module, use_precomputed_fake_quant: bool = False) -> Linear:
        """The QAT twin of a float module; it shares the parameter objects.

        Args:
            mod: ``nn.Linear`` or a subclass; its qconfig is taken over.
            use_precomputed_fake_quant: accepted as in ``torch.ao``; nothing is computed here.

        Raises:
            TypeError: another class.
        """
        require_class(mod, (nn.Linear,), cls)
        return cls._from_layer(bake_weight(mod), getattr(mod, "qconfig", None))

    @classmethod
    def _from_layer(cls, layer: Any, qconfig: Any) -> Linear:
        has_bias, device = layer.bias is not None, layer.weight.device
        twin = cls(layer.in_features, layer.out_features, has_bias, qconfig, device, layer.weight.dtype)
        share(layer, twin)
        return twin

    def to_float(self) -> nn.Module:
        """A float copy with detached parameters, in the same mode."""
        layer = nn.Linear(self.in_features, self.out_features, self.bias is not None)
        return float_copy(self, layer)  # type: ignore[no-any-return]
