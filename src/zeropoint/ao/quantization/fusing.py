"""Folding a batch norm into the layer in front of it.

May import: ``ao.nn``.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvTransposeNd

from zeropoint.ao.nn._folding import fold_batch_norm

__all__ = ["fold_batch_norm", "folded_layer"]


def folded_layer(layer: nn.Module, bn: _BatchNorm) -> nn.Module:
    """A linear layer or (transposed) convolution with the batch norm folded into its parameters, in place."""
    transposed = isinstance(layer, _ConvTransposeNd)
    groups = int(layer.groups) if transposed else 1  # type: ignore[arg-type]
    assert isinstance(layer.weight, Tensor)
    assert layer.bias is None or isinstance(layer.bias, Tensor)
    weight, bias = fold_batch_norm(layer.weight, layer.bias, bn, int(transposed), groups)
    layer.weight = nn.Parameter(weight, layer.weight.requires_grad)
    layer.bias = nn.Parameter(bias, layer.weight.requires_grad)
    return layer
