"""Folding a batch norm into the weight and the bias in front of it.

May import: torch only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["fold_batch_norm"]


def fold_batch_norm(
    weight: Tensor, bias: Tensor | None, bn: _BatchNorm, axis: int = 0, groups: int = 1
) -> tuple[Tensor, Tensor]:
    """Weight and bias of the layer that computes ``bn(layer(x))`` with the running statistics.

    ``W' = W * g / sqrt(v + eps)`` along the output channels and ``b' = (b - m) * g / sqrt(v + eps) + beta``, in
    float64, each rounded once to the weight's dtype.

    Args:
        weight: the layer's weight.
        bias: one an output channel, or None for zeros.
        bn: a batch norm with running statistics.
        axis: the output channels' dimension of the weight: 0, or 1 for transposed convolutions.
        groups: of a transposed convolution, whose dimension 1 holds the output channels of one group.

    Raises:
        ValueError: no running statistics, or another number of channels.
    """
    channels = weight.shape[axis] * (groups if axis == 1 else 1)
    if bn.running_mean is None or bn.running_var is None:
        raise ValueError(f"{type(bn).__name__} has no running statistics: make it with track_running_stats=True")
    if bn.num_features != channels:
        raise ValueError(f"{type(bn).__name__} of {bn.num_features} channels behind a layer of {channels} channels")
    wide = weight.detach().to(torch.float64)
    factor = 1.0 / torch.sqrt(bn.running_var.detach().to(torch.float64) + bn.eps)
    if bn.weight is not None:
        factor = factor * bn.weight.detach().to(torch.float64)
    start = -bn.running_mean.detach().to(torch.float64)
    if bias is not None:
        start = start + bias.detach().to(torch.float64)
    shift = start * factor
    if bn.bias is not None:
        shift = shift + bn.bias.detach().to(torch.float64)
    if axis == 0:
        folded = wide * factor.reshape(-1, *[1] * (weight.dim() - 1))
    else:  # (in_channels, out_channels / groups, kernel): the g-th block of rows belongs to the g-th group of factors
        blocks = wide.reshape(groups, -1, *weight.shape[1:])
        folded = (blocks * factor.reshape(groups, 1, -1, *[1] * (weight.dim() - 2))).reshape(weight.shape)
    return folded.to(weight.dtype), shift.to(weight.dtype)
