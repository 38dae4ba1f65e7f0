"""Cross-layer equalization: channels of neighbouring layers get ranges that one grid serves well.

May import: floors 1 to 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeropoint.analysis._data import as_batches, run
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
"""What may stand between two layers: ``f(s x) = s f(x)`` for ``s > 0``, channel by channel; ReLU6 below its clamp."""

_CLAMP = 6.0
_CLEAR = 0.5  # values that calibration did not see may be larger,
_QUIET = 1.5  # above all in channels that were quiet


def equalize(
    model: nn.Module,
    data: Any,
    *,
    pairs: Sequence[tuple[str, str]] | None = None,
    replace_relu6: bool = False,
    iterations: int = 20,
) -> nn.Module:
    """Scales channels between neighbouring layers, so that one weight grid serves all channels of each.

    Where nothing but positively homogeneous functions stands between two layers, ``W1`` and ``W2`` may be divided and
    multiplied by ``s > 0`` in each channel: the model computes what it did. ``s = sqrt(max|W1| / max|W2|)`` gives both
    the same range; this goes round all pairs until it settles.

    M. Nagel, M. van Baalen, T. Blankevoort, M. Welling, "Data-Free Quantization Through Weight Equalization and Bias
    Correction", 2019, section 4.1. There, a ReLU6 in between becomes a ReLU, which networks that live by the clamp do
    not survive. So here it stays unless asked for, and a channel is scaled only as far as its values in ``data`` stay
    clear of the clamp: a channel that reaches 6 is left alone.

    Args:
        model: float model in evaluation mode, with batch norms fused; it is left as it is.
        data: a tensor, or batches: to see which layer feeds which, and which channels reach the clamp of a ReLU6.
        pairs: the names of neighbouring layers, instead of those that are found.
        replace_relu6: make a ReLU6 between two layers a ReLU, as the paper does, and scale all channels.
        iterations: the most rounds.

    Returns:
        The equalized copy.

    Raises:
        ValueError: a pair whose channels do not fit.
    """
    model = clone_model(model).eval()
    batches = as_batches(data)
    found = list(_pairs(model, batches[0])) if pairs is None else [(first, [], second) for first, second in pairs]
    layers: list[_Pair] = []
    for first, between, second in found:
        if replace_relu6:
            for name in [first, *between]:
                _without_relu6(model, name)
        a, b = layer_of(model.get_submodule(first)), layer_of(model.get_submodule(second))
        ends = (layer_channels(a) if a else None), (layer_channels(b) if b else None)
        if a is None or b is None or ends[0] is None or ends[1] is None or ends[0][1] != ends[1][0]:
            raise ValueError(f"{first!r} and {second!r} are no neighbouring layers: their channels are {ends}")
        clamped = any(
            isinstance(m, nn.ReLU6) for name in [first, *between] for m in model.get_submodule(name).modules()
        )
        layers.append(_Pair(a, b, clamped))
    _find_headroom([pair for pair in layers if pair.clamped], model, batches)
    for _ in range(iterations):
        if not [True for pair in layers if pair.balance() > 1e-3]:
            break
    return model


def _pairs(model: nn.Module, example: Any) -> Any:
    seen: set[str] = set()
    for first, between, second in Flow(model, example, (FusedModule,)).pairs(_HOMOGENEOUS):
        a, b = model.get_submodule(first), model.get_submodule(second)
        ends = [layer_channels(layer) if layer is not None else None for layer in (layer_of(a), layer_of(b))]
        if ends[0] is None or ends[1] is None or ends[0][1] != ends[1][0] or second in seen:
            continue
        middle = [*(a.children() if isinstance(a, FusedModule) else ()), *(model.get_submodule(n) for n in between)]
        if not all(isinstance(module, _HOMOGENEOUS) or module is layer_of(a) for module in middle):
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


class _Pair:
    """Two layers with one set of channels between them."""

    def __init__(self, first: Any, second: Any, clamped: bool) -> None:
        self.first, self.second, self.clamped = first, second, clamped
        self.largest: Tensor | None = None  # of every channel in front of the ReLU6

    def watch(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """A hook of the first layer: how near does each channel come to the clamp?"""
        axis = output.dim() - 1 if isinstance(module, nn.Linear) else 1
        seen = output.detach().to(torch.float64).movedim(axis, 0).flatten(1).amax(1)
        self.largest = seen if self.largest is None else torch.maximum(self.largest, seen)

    def balance(self) -> float:
        """Gives each channel one range on both sides, as far as it may; returns the largest relative change."""
        first, second = self.first, self.second
        with torch.no_grad():
            w1, w2 = first.weight.to(torch.float64), second.weight.to(torch.float64)
            r1, r2 = w1.flatten(1).abs().amax(1), _input_view(second, w2).abs().amax(1)
            alive = (r1 > 0) & (r2 > 0)
            s = torch.where(alive, torch.sqrt(r1 / torch.where(alive, r2, 1.0)), 1.0)
            if self.largest is not None:
                clear = _CLAMP * _CLEAR
                s = torch.where(self.largest < clear, torch.maximum(s, self.largest.clamp(min=_QUIET) / clear), 1.0)
                self.largest = self.largest / s
            set_weight(first, (w1 / s.reshape(-1, *[1] * (w1.dim() - 1))).to(first.weight.dtype))
            if first.bias is not None:
                first.bias = nn.Parameter((first.bias.to(torch.float64) / s).to(first.bias.dtype), requires_grad=False)
            set_weight(second, _scale_inputs(second, w2, s).to(second.weight.dtype))
            return float((s - 1).abs().max())


def _find_headroom(pairs: list[_Pair], model: nn.Module, batches: list[Any]) -> None:
    handles = [pair.first.register_forward_hook(pair.watch, prepend=True) for pair in pairs]
    if handles:
        run(model, batches)
    for handle in handles:
        handle.remove()
