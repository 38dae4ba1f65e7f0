"""Cross-layer equalization: channels of neighbouring layers get ranges that one grid serves well.

May import: floors 1 to 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeropoint.analysis._data import as_batches
from zeropoint.analysis._flow import Flow, layer_channels
from zeropoint.analysis._simulate import layer_of, set_weight
from zeropoint.ao.nn.intrinsic import FusedModule
from zeropoint.ao.quantization.utils import clone_model, set_module

__all__ = ["equalize"]

_HOMOGENEOUS: tuple[type[nn.Module], ...] = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Flatten),
    *(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)
"""What may stand between two layers: ``f(s x) = s f(x)`` for ``s > 0``, channel by channel. ReLU6 once it is ReLU."""


def equalize(
    model: nn.Module,
    example: Any,
    *,
    pairs: Sequence[tuple[str, str]] | None = None,
    replace_relu6: bool = True,
    iterations: int = 20,
) -> nn.Module:
    """Scales channels between neighbouring layers, so that one weight grid serves all channels of each.

    Where nothing but positively homogeneous functions stands between two layers, ``W1`` and ``W2`` may be divided and
    multiplied by ``s > 0`` in each channel: the model computes what it did. ``s = sqrt(max|W1| / max|W2|)`` gives both
    the same range; this goes round all pairs until it settles.

    M. Nagel, M. van Baalen, T. Blankevoort, M. Welling, "Data-Free Quantization Through Weight Equalization and Bias
    Correction", 2019, section 4.1. As there, a ReLU6 in between becomes a ReLU: the one change to what is computed.

    Args:
        model: float model in evaluation mode, with batch norms fused; it is left as it is.
        example: one batch, to see which layer feeds which. No values of it are used.
        pairs: the names of neighbouring layers, instead of those that are found.
        replace_relu6: make a ReLU6 between two layers a ReLU; otherwise such layers are left alone.
        iterations: the most rounds.

    Returns:
        The equalized copy.

    Raises:
        ValueError: a pair whose channels do not fit.
    """
    model = clone_model(model)
    if pairs is None:
        found = list(_pairs(model, as_batches([example])[0], replace_relu6))
    else:
        found = [(first, [], second) for first, second in pairs]
    layers: list[tuple[nn.Module, nn.Module]] = []
    for first, between, second in found:
        for name in [first, *between]:
            _without_relu6(model, name)
        a, b = layer_of(model.get_submodule(first)), layer_of(model.get_submodule(second))
        ends = (layer_channels(a) if a else None), (layer_channels(b) if b else None)
        if a is None or b is None or ends[0] is None or ends[1] is None or ends[0][1] != ends[1][0]:
            raise ValueError(f"{first!r} and {second!r} are no neighbouring layers: their channels are {ends}")
        layers.append((a, b))
    for _ in range(iterations):
        if not [True for a, b in layers if _balance(a, b) > 1e-3]:
            break
    return model


def _pairs(model: nn.Module, example: Any, replace_relu6: bool) -> Any:
    seen: set[str] = set()
    for first, between, second in Flow(model, example, (FusedModule,)).pairs(_HOMOGENEOUS):
        a, b = model.get_submodule(first), model.get_submodule(second)
        ends = [layer_channels(layer) if layer is not None else None for layer in (layer_of(a), layer_of(b))]
        if ends[0] is None or ends[1] is None or ends[0][1] != ends[1][0] or second in seen:
            continue
        middle = [*(a.children() if isinstance(a, FusedModule) else ()), *(model.get_submodule(n) for n in between)]
        if not all(isinstance(module, _HOMOGENEOUS) or module is layer_of(a) for module in middle):
            continue
        if not replace_relu6 and any(isinstance(module, nn.ReLU6) for module in middle):
            continue
        seen.add(second)
        yield first, between, second


def _without_relu6(model: nn.Module, name: str) -> None:
    module = model.get_submodule(name)
    if isinstance(module, nn.ReLU6):
        set_module(model, name, nn.ReLU())
    elif isinstance(module, FusedModule):
        for index, part in module.named_children():
            if isinstance(part, nn.ReLU6):
                module._modules[index] = nn.ReLU()


def _input_view(layer: Any, weight: Tensor) -> Tensor:
    """The weight as (input channel, everything that reads it)."""
    groups = getattr(layer, "groups", 1)
    blocks = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
    return blocks.transpose(1, 2).reshape(groups * weight.shape[1], -1)


def _scale_inputs(layer: Any, weight: Tensor, scale: Tensor) -> Tensor:
    groups = getattr(layer, "groups", 1)
    blocks = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
    return (blocks * scale.reshape(groups, 1, -1, 1)).reshape(weight.shape)


def _balance(first: Any, second: Any) -> float:
    """Gives each channel between two layers one range on both sides; returns the largest change."""
    with torch.no_grad():
        w1, w2 = first.weight.to(torch.float64), second.weight.to(torch.float64)
        r1, r2 = w1.flatten(1).abs().amax(1), _input_view(second, w2).abs().amax(1)
        alive = (r1 > 0) & (r2 > 0)
        s = torch.where(alive, torch.sqrt(r1 / torch.where(alive, r2, 1.0)), 1.0)
        set_weight(first, (w1 / s.reshape(-1, *[1] * (w1.dim() - 1))).to(first.weight.dtype))
        if first.bias is not None:
            first.bias = nn.Parameter((first.bias.to(torch.float64) / s).to(first.bias.dtype), requires_grad=False)
        set_weight(second, _scale_inputs(second, w2, s).to(second.weight.dtype))
        return float((s - 1).abs().max())
