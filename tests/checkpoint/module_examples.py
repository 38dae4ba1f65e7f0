"""One example of every module that a quantized, fused, dynamic or QAT model is made of."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zeropoint as zp
from zeropoint.ao.quantization import default_per_channel_qat_qconfig

PACKAGES = (
    *("quantized", "quantized.dynamic", "intrinsic", "intrinsic.quantized", "intrinsic.quantized.dynamic"),
    *("intrinsic.qat", "qat", "qat.dynamic"),
)
BASES = {"FusedModule", "QuantizedLinear", "RNNBase", "RNNCellBase"}  # base classes, and another name of Linear


@dataclass(frozen=True)
class Example:
    """How a module is made and called.

    Attributes:
        name: package and class.
        make: an instance with fresh parameters.
        inputs: what it is called with.
        call: how, where that is not ``module(*inputs)``.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    call: Callable[..., Any] = lambda module, *inputs: module(*inputs)


def codes(*shape: int) -> Tensor:
    return zp.quantize_per_tensor(torch.randn(*shape), 0.04, 120, zp.quint8)


def spatial(rank: int, channels: int = 4) -> tuple[int, ...]:
    return (2, channels, *([4, 3, 3][:rank]))


def rank_of(name: str) -> int:
    found = re.search(r"([123])d", name)
    return int(found.group(1)) if found else 0


FLOAT_PARTS: dict[str, Callable[[int], nn.Module]] = {
    "ConvTranspose": lambda rank: getattr(nn, f"ConvTranspose{rank}d")(4, 6, 3),
    "Conv": lambda rank: getattr(nn, f"Conv{rank}d")(4, 6, 3),
    "Linear": lambda rank: nn.Linear(5, 6),
    "Bn": lambda rank: getattr(nn, f"BatchNorm{rank}d")(6),
    "BN": lambda rank: getattr(nn, f"BatchNorm{rank}d")(4),
    "ReLU": lambda rank: nn.ReLU(),
}


def _quantized(name: str, cls: Any) -> tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]] | None:
    rank = rank_of(name)
    table: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
        "Linear": (lambda: cls(5, 6), lambda: (codes(3, 5),)),
        "Conv": (lambda: cls(4, 6, 3, groups=2, padding=1), lambda: (codes(*spatial(rank)),)),
        "BatchNorm": (lambda: cls(4), lambda: (codes(*(spatial(rank))),)),
        "BNReLU": (lambda: cls(4), lambda: (codes(*spatial(rank)),)),
        "MaxPool": (lambda: cls(2), lambda: (codes(*spatial(rank)),)),
        "Quantize": (lambda: cls(0.1, 3, zp.quint8), lambda: (torch.randn(3, 4),)),
        "PReLU": (lambda: cls(0.1, 3, 4), lambda: (codes(2, 4),)),
        "Softmax": (lambda: cls(1, 1 / 256, 0), lambda: (codes(3, 4),)),
        "LayerNorm": (lambda: cls(4, torch.ones(4), torch.zeros(4), 0.1, 3), lambda: (codes(3, 4),)),
        "GroupNorm": (lambda: cls(2, 4, torch.ones(4), torch.zeros(4), 0.1, 3), lambda: (codes(2, 4, 5),)),
        "InstanceNorm": (
            lambda: cls(4, torch.ones(4), torch.zeros(4), 0.1, 3, affine=True),
            lambda: (codes(*spatial(rank)),),
        ),
        "EmbeddingBag": (lambda: cls(10, 4), lambda: (torch.tensor([1, 9, 3]), torch.tensor([0, 2]))),
        "Embedding": (lambda: cls(10, 4), lambda: (torch.tensor([1, 9, 3]),)),
        "LSTM": (lambda: cls(4, 5, num_layers=2, bidirectional=True), lambda: (torch.randn(3, 2, 4),)),
        "GRU": (lambda: cls(4, 9), lambda: (torch.randn(3, 2, 4),)),
        "RNN": (lambda: cls(4, 5, nonlinearity="relu"), lambda: (torch.randn(3, 2, 4),)),
        "LSTMCell": (lambda: cls(4, 5), lambda: (torch.randn(3, 4),)),
        "GRUCell": (lambda: cls(4, 5), lambda: (torch.randn(3, 4),)),
        "RNNCell": (lambda: cls(4, 5), lambda: (torch.randn(3, 4),)),
        **{
            plain: (lambda: cls(), lambda: (codes(3, 4),))
            for plain in ("DeQuantize", "Dropout", "ReLU", "ReLU6", "QFunctional", "FloatFunctional")
        },
        **{
            curve: (lambda: cls(0.02, 30), lambda: (codes(3, 4),))
            for curve in (
                "ELU",
                "GELU",
                "Hardsigmoid",
                "Hardswish",
                "LeakyReLU",
                "Mish",
                "SiLU",
                "Sigmoid",
                "Softplus",
                "Tanh",
            )
        },
    }
    if name in table:
        return table[name]
    starts = [start for start in table if name.startswith(start)]
    return table[max(starts, key=len)] if starts else None


def _in_training(name: str, cls: Any) -> tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]] | None:
    rank, qconfig = rank_of(name), default_per_channel_qat_qconfig
    if name.startswith("Conv"):
        return lambda: cls(4, 6, 3, qconfig=qconfig), lambda: (torch.randn(*spatial(rank)),)
    if name.startswith("Linear"):
        return lambda: cls(5, 6, qconfig=qconfig), lambda: (torch.randn(3, 5),)
    if name == "Embedding":
        return lambda: cls(10, 4), lambda: (torch.tensor([1, 9, 3]),)
    if name == "EmbeddingBag":
        return lambda: cls(10, 4), lambda: (torch.tensor([1, 9, 3]), torch.tensor([0, 2]))
    return None


def _fused(name: str, cls: Any) -> tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]:
    rank = rank_of(name)
    parts = re.findall("ConvTranspose|Conv|Linear|Bn|BN|ReLU", name)
    shape = (3, 5) if parts[0] == "Linear" else spatial(rank)
    return lambda: cls(*(FLOAT_PARTS[part](rank) for part in parts)), lambda: (torch.randn(*shape),)


def _add(module: Any, x: Tensor) -> Any:
    return module.add(x, x)


def classes() -> Iterator[tuple[str, str, Any]]:
    """Package, name and class of every module that is public."""
    for package in PACKAGES:
        module = importlib.import_module(f"zeropoint.ao.nn.{package}")
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, type) and issubclass(value, nn.Module) and name not in BASES:
                yield package, name, value


def examples() -> dict[str, Example]:
    """The examples by name; a class that is not known here has none."""
    found = {}
    for package, name, cls in classes():
        if package == "intrinsic":
            recipe: Any = _fused(name, cls)
        elif "qat" in package:
            recipe = _in_training(name, cls)
        elif name == "FXFloatFunctional":
            recipe = (cls, lambda: (torch.randn(3, 4),))
        elif package == "quantized" and name == "LSTM":
            recipe = (lambda cls=cls: cls(4, 5, bidirectional=True), lambda: (codes(3, 2, 4),))
        elif package == "quantized" and name == "MultiheadAttention":
            recipe = (lambda cls=cls: cls(4, 2), lambda: (codes(3, 2, 4),) * 3)
        elif "dynamic" in package and name.startswith("Linear"):
            recipe = (lambda cls=cls: cls(5, 6), lambda: (torch.randn(3, 5),))
        elif "dynamic" in package and name.startswith("Conv"):
            shape = spatial(rank_of(name))
            recipe = (lambda cls=cls: cls(4, 6, 3, groups=2, padding=1), lambda shape=shape: (torch.randn(*shape),))
        else:
            recipe = _quantized(name, cls)
        if name == "FloatFunctional":
            recipe = (cls, lambda: (torch.randn(3, 4),))
        if recipe is not None:
            extra = {"call": _add} if name.endswith("Functional") else {}
            found[f"{package}.{name}"] = Example(f"{package}.{name}", *recipe, **extra)
    return found


def used(example: Example) -> nn.Module:
    """An instance with parameters that are not those of a fresh one, ready for inference."""
    module: Any = example.make()
    with torch.no_grad():
        for part in module.modules():
            for name, value in part.named_parameters(recurse=False):
                value.copy_(torch.randn_like(value))
                if "running_var" in name:
                    value.abs_()
            for name, value in part.named_buffers(recurse=False):
                if name in ("running_mean", "running_var") or (
                    name in ("weight", "bias") and value.is_floating_point()
                ):
                    value.copy_(torch.rand_like(value) + 0.5)
    for part in module.modules():
        _set_weights(part)
        if hasattr(part, "_init_grid"):
            part.scale = 0.07
            part.zero_point = 101
    if any(hasattr(part, "weight_fake_quant") for part in module.modules()):
        example.call(module.train(), *example.inputs())
        module.apply(zp.ao.quantization.disable_observer)
    return module.eval()


def _filled(name: str, value: Tensor) -> Tensor:
    """Another value for an entry of a recurrent layer's state."""
    if name.endswith("_scale"):
        return torch.rand_like(value) * 0.01 + 0.01
    if value.is_floating_point():
        return torch.randn_like(value)
    return torch.randint_like(value, -60, 60) if value.dtype == torch.int8 else torch.randint_like(value, -3, 3)


def _set_weights(module: Any) -> None:
    buffers = getattr(module, "_buffers", {})
    weight = buffers.get("weight")
    if "quantized.dynamic" in type(module).__module__ and weight is None:
        module.load_state_dict({name: _filled(name, value) for name, value in module.state_dict().items()})
    if not hasattr(module, "set_weight_bias") or not isinstance(weight, Tensor) or weight.is_floating_point():
        return
    axis = module.CHANNEL_AXIS
    channels = weight.shape[axis] if axis == 0 else module.out_channels
    if axis == 0:
        scales, zeros = torch.rand(channels) * 0.02 + 0.01, torch.arange(channels) - 2
        quantized = zp.quantize_per_channel(torch.randn(weight.shape), scales, zeros, axis, zp.qint8)
    else:
        quantized = zp.quantize_per_tensor(torch.randn(weight.shape), 0.02, 3, zp.qint8)
    bias = None if buffers.get("bias") is None else torch.randn(channels)
    module.set_weight_bias(quantized, bias)
