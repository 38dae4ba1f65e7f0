"""Bias correction: what rounding shifts on average is taken back by the bias.

May import: floors 1 to 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeropoint.analysis._data import as_batches, run
from zeropoint.analysis._flow import layer_channels
from zeropoint.analysis._simulate import Simulation, layer_of
from zeropoint.ao.quantization import QConfig
from zeropoint.ao.quantization.utils import clone_model

__all__ = ["correct_bias"]


def correct_bias(model: nn.Module, data: Any, *, qconfig: QConfig | None = None) -> nn.Module:
    """Moves biases so that every quantized layer gives the mean that the float one gives, channel by channel.

    Rounded weights and clipped activations shift the mean of what a layer computes. With the rounding simulated, the
    layers are corrected in the order in which they run, each with the earlier ones corrected.

    M. Nagel, M. van Baalen, T. Blankevoort, M. Welling, "Data-Free Quantization Through Weight Equalization and Bias
    Correction", 2019, section 4.2 and appendix D (empirical correction).

    Args:
        model: float model in evaluation mode, fused; it is left as it is.
        data: a tensor, or batches; all batches together go through the model at once.
        qconfig: how it is going to be quantized; None takes the model's own, or the default one.

    Returns:
        A float copy with corrected biases, to quantize with the same qconfig.

    Raises:
        TypeError, ValueError: data that is none, or batches that cannot be joined.
    """
    batch = _joined(as_batches(data))
    simulation = Simulation(model, [batch], qconfig)
    layers = {}
    for name in simulation.names:
        layer = layer_of(simulation.model.get_submodule(name))
        if layer is not None and layer_channels(layer) is not None:
            layers[name] = layer
    wanted: dict[str, Tensor] = {}
    shifts: dict[str, Tensor] = {}

    def record(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            wanted.setdefault(name, _mean(module, output))

        return hook

    def correct(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            if name not in shifts:  # a layer that runs twice is corrected at its first run
                shifts[name] = wanted[name] - _mean(module, output)
            shape = [-1, *[1] * (output.dim() - 2)] if not isinstance(module, nn.Linear) else [-1]
            return output + shifts[name].reshape(shape).to(output.dtype)

        return hook

    for make, quantized in ((record, ()), (correct, tuple(simulation.names))):
        handles = [layer.register_forward_hook(make(name), prepend=True) for name, layer in layers.items()]
        simulation.quantize(quantized)
        run(simulation.model, [batch])
        for handle in handles:
            handle.remove()
    corrected = clone_model(model).eval()
    for name, shift in shifts.items():
        target: Any = layer_of(corrected.get_submodule(name))
        old = torch.zeros_like(shift) if target.bias is None else target.bias.detach().to(torch.float64)
        target.bias = nn.Parameter((old + shift).to(target.weight.dtype), requires_grad=False)
    return corrected


def _mean(layer: nn.Module, output: Tensor) -> Tensor:
    """The mean of every output channel, float64."""
    axis = output.dim() - 1 if isinstance(layer, nn.Linear) else 1
    return output.detach().to(torch.float64).movedim(axis, 0).flatten(1).mean(1)


def _joined(batches: list[Any]) -> Any:
    """All batches as one."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(batches)
    if isinstance(first, Mapping):
        return {key: _joined([batch[key] for batch in batches]) for key in first}
    if isinstance(first, (tuple, list)):
        return tuple(_joined(list(parts)) for parts in zip(*batches, strict=True))
    raise TypeError(f"batches of {type(first).__name__} cannot be joined: pass one batch")
