"""Linear with a batch norm, for training. May import: ``ao.nn.quantized``, ``intrinsic``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from zeropoint.ao.nn import quantized as nnq
from zeropoint.ao.nn._registry import converts_to, qat_twin_of
from zeropoint.ao.nn.intrinsic import fused
from zeropoint.ao.nn.intrinsic.qat._batch_norm import BatchNormSimulation

__all__ = ["LinearBn1d"]


@qat_twin_of(fused.LinearBn1d)
@converts_to(nnq.Linear)
class LinearBn1d(BatchNormSimulation, nn.Linear):
    """A linear layer and a batch norm that train together, with simulated quantization of the folded weight.

    Args:
        in_features, out_features, bias: of the linear layer.
        eps, momentum: of the batch norm.
        freeze_bn: start with frozen statistics.
        qconfig: chooses the observers; None for averaged activations and one symmetric weight grid an output channel.

    Attributes:
        weight, bias: float parameters of the linear layer.
        bn: the batch norm.
        weight_fake_quant: simulates the grid of the folded weight.
    """

    FUSED_CLASS = fused.LinearBn1d
    LAYER_CLASS = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        eps: float = 1e-05,
        momentum: float | None = 0.1,
        freeze_bn: bool = False,
        qconfig: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self._keep(nn.BatchNorm1d(out_features, eps, momentum), freeze_bn, qconfig)

    def _layer_output(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(input, weight, bias)

    @classmethod
    def _like(cls, layer: Any, qconfig: Any) -> LinearBn1d:
        return cls(layer.in_features, layer.out_features, layer.bias is not None, qconfig=qconfig)

    def _float_layer(self) -> nn.Module:
        return nn.Linear(self.in_features, self.out_features)
