"""SmoothQuant: outliers move from activations, which have one grid, into weights.

May import: floors 1 to 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeropoint.analysis._data import as_batches, run, with_progress
from zeropoint.analysis._flow import Flow
from zeropoint.analysis._simulate import set_weight
from zeropoint.ao.quantization.utils import clone_model

__all__ = ["smooth"]


def smooth(
    model: nn.Module,
    data: Any,
    *,
    alpha: float = 0.5,
    groups: Mapping[str, Sequence[str]] | None = None,
    progress: bool = False,
) -> nn.Module:
    """Scales channels between a LayerNorm and the linear layers behind it, so that activations have no outliers.

    Input channel ``j`` is divided by ``s[j] = max|X[j]|^alpha / max|W[:, j]|^(1 - alpha)`` in the norm's weight and
    bias, and multiplied by it in the layers: the model computes what it did.

    G. Xiao, J. Lin, M. Seznec, H. Wu, J. Demouth, S. Han, "SmoothQuant: Accurate and Efficient Post-Training
    Quantization for Large Language Models", 2023, equation 4.

    Args:
        model: float model in evaluation mode; it is left as it is.
        data: calibration data: a tensor, or batches.
        alpha: how much of the difficulty the weights take, from 0 to 1.
        groups: the norm and all linear layers that read it, by path, instead of those that are found: norms whose
            output nothing but linear layers reads.
        progress: show a progress bar, if tqdm or rich is installed.

    Returns:
        The smoothed copy.

    Raises:
        ValueError: ``alpha`` out of range, nothing to smooth, or sizes that do not fit.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must lie from 0 to 1, got {alpha}")
    batches = as_batches(data)
    model = clone_model(model).eval()
    if groups is None:
        groups = Flow(model, batches[0], (nn.LayerNorm, nn.Linear)).fans((nn.LayerNorm,), (nn.Linear,))
    if not groups:
        raise ValueError("no LayerNorm was found whose output only linear layers read: name them in groups")
    largest: dict[str, Tensor] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            found = output.detach().to(torch.float64).abs().flatten(0, -2).amax(0)
            largest[name] = torch.maximum(largest[name], found) if name in largest else found

        return hook

    handles = [model.get_submodule(name).register_forward_hook(watch(name)) for name in groups]
    for batch in with_progress(batches, "activation ranges", progress):
        run(model, [batch])
    for handle in handles:
        handle.remove()
    for name, readers in groups.items():
        _move(name, model.get_submodule(name), {r: model.get_submodule(r) for r in readers}, largest[name], alpha)
    return model


def _move(name: str, norm: Any, layers: dict[str, Any], largest: Tensor, alpha: float) -> None:
    for reader, layer in layers.items():
        if layer.weight.shape[1] != largest.numel():
            raise ValueError(f"{reader!r} reads {layer.weight.shape[1]} channels, {name!r} makes {largest.numel()}")
    with torch.no_grad():
        weights = torch.stack([layer.weight.to(torch.float64).abs().amax(0) for layer in layers.values()]).amax(0)
        s = largest.pow(alpha) / weights.pow(1 - alpha)
        s = torch.where((largest > 0) & (weights > 0), s, 1.0)
        scale = torch.ones_like(s) if norm.weight is None else norm.weight.to(torch.float64)
        dtype = next(iter(layers.values())).weight.dtype
        norm.weight = nn.Parameter((scale / s).to(dtype), requires_grad=False)
        norm.elementwise_affine = True
        if norm.bias is not None:
            norm.bias = nn.Parameter((norm.bias.to(torch.float64) / s).to(dtype), requires_grad=False)
        for layer in layers.values():
            set_weight(layer, (layer.weight.to(torch.float64) * s).to(dtype))
