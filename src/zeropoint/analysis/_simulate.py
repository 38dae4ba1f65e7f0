"""A float model whose layers can be quantized one by one: their rounding is simulated, and can be switched.

The integers of this package are exact, so a float computation on fake-quantized weights and activations gives the
same values, up to the last bits of its sums; and switching a layer costs nothing.

May import: floors 1 to 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeropoint.analysis._data import run
from zeropoint.ao.nn._registry import OBSERVED
from zeropoint.ao.nn.intrinsic import FusedModule
from zeropoint.ao.nn.quantized import FloatFunctional
from zeropoint.ao.nn.quantized._base import WeightedModule
from zeropoint.ao.nn.quantized._from_float import calibrated_weight, output_grid
from zeropoint.ao.quantization import DeQuantStub, QConfig, QuantStub, get_default_qconfig, prepare
from zeropoint.ao.quantization.observers.base import ObservingModule
from zeropoint.ao.quantization.quantization_mappings import DEFAULT_STATIC_QUANT_MODULE_MAPPINGS, twin_of
from zeropoint.ao.quantization.utils import clone_model, set_module

__all__ = [
    "Simulation",
    "calibrated",
    "layer_of",
    "observed_layers",
    "observed_modules",
    "parts_to_keep",
    "set_weight",
    "weight_axis",
    "with_qconfig",
]


def with_qconfig(model: nn.Module, qconfig: QConfig | None) -> nn.Module:
    """A copy of a float model in evaluation mode, with ``qconfig``; None: with its own, or the default one."""
    model = clone_model(model).eval()
    if qconfig is not None:
        for module in model.modules():
            vars(module).pop("qconfig", None)
    if qconfig is not None or not any(getattr(module, "qconfig", None) for module in model.modules()):
        model.qconfig = qconfig or get_default_qconfig()  # type: ignore[assignment]
    return model


def calibrated(model: nn.Module, batches: Iterable[Any], qconfig: QConfig | None = None) -> nn.Module:
    """A prepared copy of a float model that has seen the batches."""
    prepared = prepare(with_qconfig(model, qconfig), inplace=True)
    run(prepared, batches)
    return prepared


def observed_modules(prepared: nn.Module) -> dict[str, nn.Module]:
    """The modules of a prepared model that will be quantized and have a grid, by path."""
    return {
        name: module
        for name, module in prepared.named_modules()
        if isinstance(getattr(module, "activation_post_process", None), ObservingModule)
        and not isinstance(module, ObservingModule)
    }


def observed_layers(prepared: nn.Module) -> dict[str, tuple[str, ...]]:
    """The layers of a prepared model, and the observed modules that each consists of: most often itself.

    A layer that ``prepare`` takes apart, such as an LSTM, is one layer under the path that it has in the float model.
    """
    composed = [name for name, module in prepared.named_modules() if isinstance(module, tuple(OBSERVED.values()))]
    layers: dict[str, tuple[str, ...]] = {}
    for name in observed_modules(prepared):
        owner = next((path for path in composed if not path or f"{name}.".startswith(f"{path}.")), name)
        layers[owner] = (*layers.get(owner, ()), name)
    return layers


def parts_to_keep(prepared: nn.Module, layers: Mapping[str, tuple[str, ...]], name: str) -> list[str]:
    """The modules that become islands where a layer stays float; none for one that cannot.

    Stubs and arithmetic have no weights: all that they cost is the rounding that an island has as well. Of a layer that
    is taken apart, only parts with weights become islands, for the same reason.
    """
    if layers[name] == (name,):
        whole = prepared.get_submodule(name)
        return [] if isinstance(whole, (QuantStub, DeQuantStub, FloatFunctional)) else [name]
    return [part for part in layers[name] if layer_of(prepared.get_submodule(part)) is not None]


def layer_of(module: nn.Module) -> nn.Module | None:
    """What holds the weight: the module, or the first part of a fused one; None if there is no weight."""
    layer = module[0] if isinstance(module, FusedModule) else module
    return layer if isinstance(getattr(layer, "weight", None), Tensor) else None


def set_weight(layer: nn.Module, weight: Tensor) -> None:
    """Puts another weight into a float layer, in place, without touching tensors that others hold."""
    layer.weight = nn.Parameter(weight, requires_grad=False)


class _Rounding(ObservingModule):
    """Stands where an observer stood: rounds to the grid it found, or does nothing."""

    def __init__(self, scale: float, zero_point: int, quant_min: int, quant_max: int) -> None:
        super().__init__()
        self.grid = scale, zero_point, quant_min, quant_max
        self.enabled = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.enabled:
            return x
        scale, zero_point, low, high = self.grid
        grid = torch.tensor([scale]), torch.tensor([zero_point], dtype=torch.int32)
        rounded: Tensor = torch.ops.zeropoint.fake_quantize_per_tensor.default(x, *grid, low, high)[0]
        return rounded


class Simulation:
    """A copy of a float model whose layers can be quantized one by one.

    Args:
        model: float model, fused.
        batches: calibration data.
        qconfig: how to quantize; None takes the model's own, or ``get_default_qconfig()``.

    Attributes:
        model: the copy; call it.
        names: the paths of the layers that can be quantized, in the order of the model. One that is taken apart, such
            as an LSTM, is one layer.

    Raises:
        ValueError: there is nothing to quantize.
    """

    def __init__(self, model: nn.Module, batches: Iterable[Any], qconfig: QConfig | None = None) -> None:
        self.model = calibrated(model, batches, qconfig)
        self._weights: dict[str, tuple[nn.Module, Tensor, Tensor]] = {}
        self._roundings: dict[str, _Rounding] = {}
        layers = observed_layers(self.model)
        for name, module in observed_modules(self.model).items():
            observer: Any = module.activation_post_process
            if not hasattr(observer, "quant_min"):
                continue
            scale, zero_point, _ = output_grid(module)
            rounding = _Rounding(scale, zero_point, int(observer.quant_min), int(observer.quant_max))
            layer = layer_of(module)
            axis = weight_axis(module)
            if layer is not None and axis is not None:
                weight = calibrated_weight(module, layer, axis, False)[0].dequantize()
                self._weights[name] = layer, layer.weight, weight  # type: ignore[assignment]
            set_module(self.model, f"{name}.activation_post_process" if name else "activation_post_process", rounding)
            self._roundings[name] = rounding
        if not self._roundings:
            raise ValueError("the model has no layer to quantize: give it a qconfig, and fuse it before")
        self._layers = layers
        self.names = [name for name, parts in layers.items() if any(part in self._roundings for part in parts)]

    def quantize(self, names: Iterable[str]) -> None:
        """Makes these layers quantized and all others float."""
        wanted = {part for name in names for part in self._layers[name]}
        for name, rounding in self._roundings.items():
            rounding.enabled = name in wanted
            if name in self._weights:
                layer, floating, rounded = self._weights[name]
                if name in wanted:
                    set_weight(layer, rounded.to(floating.dtype))
                else:
                    layer.weight = floating

    def outputs(self, batches: Iterable[Any]) -> list[Any]:
        """What the model returns for each batch."""
        return run(self.model, batches)


def weight_axis(module: nn.Module) -> int | None:
    """The output channels' dimension of a weight that will be int8; None where there is none, as in norms."""
    found = twin_of(type(module), DEFAULT_STATIC_QUANT_MODULE_MAPPINGS)
    return found[1].CHANNEL_AXIS if found is not None and issubclass(found[1], WeightedModule) else None
