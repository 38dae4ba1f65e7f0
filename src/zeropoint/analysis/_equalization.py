"""Cross-layer equalization: channels of neighbouring layers get ranges that one grid serves well.

May import: floors 1 to 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zeropoint.analysis._channel_clamp import ChannelClamp, clamped_layer
from zeropoint.analysis._data import as_batches, run
from zeropoint.analysis._flow import Flow, layer_channels
from zeropoint.analysis._simulate import layer_of, set_weight
from zeropoint.ao.nn.intrinsic import FusedModule
from zeropoint.ao.quantization.utils import clone_model, set_module

__all__ = ["equalize"]

Relu6 = Literal["clamp", "keep", "relu"]

_HOMOGENEOUS: tuple[type[nn.Module], ...] = (
    *(nn.ReLU, nn.LeakyReLU, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Flatten),
    *(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)
"""What may stand between two layers: ``f(s x) = s f(x)`` for ``s > 0``, channel by channel."""

_CLAMPS = (nn.ReLU6, ChannelClamp)
"""What may stand there as well: its upper limit is scaled with the channel."""

_CLAMP = 6.0
_CLEAR = 0.5  # values that calibration did not see may be larger,
_QUIET = 1.5  # above all in channels that were quiet


def equalize(
    model: nn.Module,
    data: Any,
    *,
    pairs: Sequence[tuple[str, str]] | None = None,
    relu6: Relu6 = "clamp",
    most: float = 4.0,
    absorb: bool = False,
    iterations: int = 20,
) -> nn.Module:
    """Scales channels between neighbouring layers, so that one weight grid serves all channels of each.

    Where nothing but positively homogeneous functions stands between two layers, ``W1`` and ``W2`` may be divided and
    multiplied by ``s > 0`` in each channel: the model computes what it did. ``s = sqrt(max|W1| / max|W2|)`` gives both
    the same range; this goes round all pairs until it settles. With ``absorb``, biases that keep a channel above zero
    in all of the data move into the next layer, so that the activations' grid need not reach up to them.

    M. Nagel, M. van Baalen, T. Blankevoort, M. Welling, "Data-Free Quantization Through Weight Equalization and Bias
    Correction", 2019, sections 4.1 and 5.1.1. There, a ReLU6 in between becomes a ReLU, which networks that live by the
    clamp do not survive. Here its limit is scaled with the channel, unless something else is asked for.

    Args:
        model: float model in evaluation mode, with batch norms fused; it is left as it is.
        data: a tensor, or batches: to see which layer feeds which, and what reaches the clamp of a ReLU6.
        pairs: the names of neighbouring layers, instead of those that are found.
        relu6: what becomes of a ReLU6 between two layers. "clamp": a limit a channel, which takes one more pass over
            the layer's codes, and which ``zeropoint.compile`` does not know. "keep": it stays, and a channel is scaled
            only as far as its values in ``data`` stay clear of it. "relu": a ReLU, as in the paper.
        most: how far a channel with a limit may be scaled, either way. Activations share one grid: what serves the
            weights costs them codes, and a ReLU6 has brought its channels to one range already.
        absorb: move biases into the next layer. That is exact for what the data show: a channel that falls below what
            was taken from it changes what the model computes.
        iterations: the most rounds.

    Returns:
        The equalized copy.

    Raises:
        ValueError: a pair whose channels do not fit, or another ``relu6``.
    """
    if not most >= 1:
        raise ValueError(f"most must be 1 or more, got {most}")
    if relu6 not in ("clamp", "keep", "relu"):
        raise ValueError(f"relu6 must be 'clamp', 'keep' or 'relu', got {relu6!r}")
    model = clone_model(model).eval()
    batches = as_batches(data)
    found = list(_pairs(model, batches[0])) if pairs is None else [(first, [], second) for first, second in pairs]
    layers: list[_Pair] = []
    for first, between, second in found:
        a, b = layer_of(model.get_submodule(first)), layer_of(model.get_submodule(second))
        ends = (layer_channels(a) if a else None), (layer_channels(b) if b else None)
        if a is None or b is None or ends[0] is None or ends[1] is None or ends[0][1] != ends[1][0]:
            raise ValueError(f"{first!r} and {second!r} are no neighbouring layers: their channels are {ends}")
        for name in [first, *between]:
            if relu6 != "keep":
                _replace_relu6(model, name, a, relu6)
        standing = [m for name in [first, *between] for m in model.get_submodule(name).modules()]
        layers.append(
            _Pair(
                a,
                b,
                any(isinstance(module, nn.ReLU6) for module in standing),
                [module for module in standing if isinstance(module, ChannelClamp)],
                absorb and _may_absorb(a, b, standing),
                most,
            )
        )
    _watch([pair for pair in layers if pair.clamped], model, batches)
    for _ in range(iterations):
        if not [True for pair in layers if pair.balance() > 1e-3]:
            break
    able = [pair for pair in layers if pair.absorbs]
    _watch(able, model, batches)
    for pair in able:
        pair.absorb()
    return model


def _pairs(model: nn.Module, example: Any) -> Any:
    seen: set[str] = set()
    for first, between, second in Flow(model, example, (FusedModule,)).pairs((*_HOMOGENEOUS, *_CLAMPS)):
        a, b = model.get_submodule(first), model.get_submodule(second)
        ends = [layer_channels(layer) if layer is not None else None for layer in (layer_of(a), layer_of(b))]
        if ends[0] is None or ends[1] is None or ends[0][1] != ends[1][0] or second in seen:
            continue
        middle = [*(a.children() if isinstance(a, FusedModule) else ()), *(model.get_submodule(n) for n in between)]
        if not all(isinstance(module, (*_HOMOGENEOUS, *_CLAMPS)) or module is layer_of(a) for module in middle):
            continue
        seen.add(second)
        yield first, between, second


def _replace_relu6(model: nn.Module, name: str, layer: nn.Module, relu6: Relu6) -> None:
    """Puts a rectifier without a limit, or a limit a channel, in a ReLU6's place."""
    module = model.get_submodule(name)
    limit = torch.full((layer_channels(layer) or (0, 0))[1:], _CLAMP)
    if isinstance(module, nn.ReLU6):
        axis = -1 if isinstance(layer, nn.Linear) else 1
        set_module(model, name, nn.ReLU() if relu6 == "relu" else ChannelClamp(limit, axis))
    elif isinstance(module, FusedModule):
        rectifiers = [index for index, part in module.named_children() if isinstance(part, nn.ReLU6)]
        if rectifiers and relu6 == "clamp":
            clamped = clamped_layer(layer, limit)
            if hasattr(module, "qconfig"):
                clamped.qconfig = module.qconfig
            set_module(model, name, clamped)
        for index in rectifiers:
            module._modules[index] = nn.ReLU()


def _may_absorb(first: Any, second: Any, standing: Sequence[nn.Module]) -> bool:
    """A constant passes through rectifiers and clamps, if no zeros are put beside it."""
    rectified = any(isinstance(module, (nn.ReLU, ChannelClamp)) for module in standing)
    plain = all(
        isinstance(module, (nn.ReLU, ChannelClamp, FusedModule, nn.Identity)) or module is first for module in standing
    )
    padding = getattr(second, "padding", ())
    pads = padding == "same" if isinstance(padding, str) else any(padding)
    return rectified and plain and first.bias is not None and not pads


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

    def __init__(
        self, first: Any, second: Any, clamped: bool, clamps: Sequence[ChannelClamp], absorbs: bool, most: float
    ) -> None:
        self.first, self.second, self.clamped, self.clamps, self.absorbs = first, second, clamped, clamps, absorbs
        self.most = most
        self.scaled: Tensor | None = None  # how far each channel with a limit has been scaled so far
        self.largest: Tensor | None = None  # of every channel in front of the rectifier
        self.smallest: Tensor | None = None

    def watch(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """A hook of the first layer: between which values does each channel lie?"""
        axis = output.dim() - 1 if isinstance(module, nn.Linear) else 1
        values = output.detach().to(torch.float64).movedim(axis, 0).flatten(1)
        low, high = values.amin(1), values.amax(1)
        self.smallest = low if self.smallest is None else torch.minimum(self.smallest, low)
        self.largest = high if self.largest is None else torch.maximum(self.largest, high)

    def absorb(self) -> None:
        """Takes from each channel what it is always above, and gives it to the second layer's bias."""
        assert self.smallest is not None
        with torch.no_grad():
            below = self.smallest.clamp(min=0)
            for clamp in self.clamps:
                below = torch.minimum(below, clamp.limit.to(torch.float64) / 2)
            if not bool((below > 0).any()):
                return
            first, second = self.first, self.second
            weight = second.weight.to(torch.float64)
            columns = _input_view(second, _scale_inputs(second, weight, below))
            groups = getattr(second, "groups", 1)
            blocks = columns.reshape(groups, columns.shape[0] // groups, second.weight.shape[0] // groups, -1)
            given = blocks.sum((1, 3)).flatten()
            old = torch.zeros_like(given) if second.bias is None else second.bias.to(torch.float64)
            second.bias = nn.Parameter((old + given).to(weight.dtype).to(second.weight.dtype), requires_grad=False)
            bias = first.bias.to(torch.float64) - below
            first.bias = nn.Parameter(bias.to(first.bias.dtype), requires_grad=False)
            for clamp in self.clamps:
                clamp.limit = (clamp.limit.to(torch.float64) - below).to(clamp.limit.dtype)

    def balance(self) -> float:
        """Gives each channel one range on both sides, as far as it may; returns the largest relative change."""
        first, second = self.first, self.second
        with torch.no_grad():
            w1, w2 = first.weight.to(torch.float64), second.weight.to(torch.float64)
            r1, r2 = w1.flatten(1).abs().amax(1), _input_view(second, w2).abs().amax(1)
            alive = (r1 > 0) & (r2 > 0)
            s = torch.where(alive, torch.sqrt(r1 / torch.where(alive, r2, 1.0)), 1.0)
            if self.clamped and self.largest is not None:
                clear = _CLAMP * _CLEAR
                s = torch.where(self.largest < clear, torch.maximum(s, self.largest.clamp(min=_QUIET) / clear), 1.0)
                self.largest = self.largest / s
            if self.clamps:
                before = torch.ones_like(s) if self.scaled is None else self.scaled
                self.scaled = (before * s).clamp(1 / self.most, self.most)
                s = self.scaled / before
            set_weight(first, (w1 / s.reshape(-1, *[1] * (w1.dim() - 1))).to(first.weight.dtype))
            if first.bias is not None:
                first.bias = nn.Parameter((first.bias.to(torch.float64) / s).to(first.bias.dtype), requires_grad=False)
            set_weight(second, _scale_inputs(second, w2, s).to(second.weight.dtype))
            for clamp in self.clamps:
                clamp.limit = (clamp.limit.to(torch.float64) / s).to(clamp.limit.dtype)
            return float((s - 1).abs().max())


def _watch(pairs: list[_Pair], model: nn.Module, batches: list[Any]) -> None:
    handles = [pair.first.register_forward_hook(pair.watch, prepend=True) for pair in pairs]
    for pair in pairs:
        pair.largest = pair.smallest = None
    if handles:
        run(model, batches)
    for handle in handles:
        handle.remove()
