"""Checks of old files, run by ``test_old_files.py`` in a process of its own: here torch loses what it is going to lose.

Prints one line of JSON: the name of each check → the error that it ended with, or null.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

FIXTURES = Path(__file__).parent / "fixtures"


class _Blocked:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith(
            ("torch.ao", "torch.quantization", "torch.nn.quantized", "torch.nn.intrinsic", "torch.nn.qat")
        ):
            raise ImportError(f"{name} has been removed")


def remove_quantization() -> None:
    """Takes ``torch.ao``, the quantized dtypes and the rebuilding of quantized tensors out of torch."""
    for name in [name for name in sys.modules if name.startswith(("torch.ao", "torch.quantization"))]:
        del sys.modules[name]
    for name in (
        *("qint8", "quint8", "qint32", "quint4x2", "quint2x4", "QInt8Storage", "QUInt8Storage", "QInt32Storage"),
        *("QUInt4x2Storage", "QUInt2x4Storage", "per_tensor_affine", "per_channel_affine", "per_tensor_symmetric"),
        *("per_channel_symmetric", "per_channel_affine_float_qparams", "ScriptObject", "ao", "quantization"),
    ):
        if name in vars(torch):
            delattr(torch, name)
    del torch._utils._rebuild_qtensor
    sys.meta_path.insert(0, _Blocked())  # type: ignore[arg-type]


remove_quantization()

from torch import nn  # noqa: E402

import zeropoint as zp  # noqa: E402
from zeropoint.ao.nn import quantized as nnq  # noqa: E402
from zeropoint.ao.nn.intrinsic import quantized as nniq  # noqa: E402
from zeropoint.ao.nn.quantized import dynamic as nnqd  # noqa: E402

EXPECTED = zp.checkpoint.load(FIXTURES / "expected.pt")
CHECKS: dict[str, Callable[[], None]] = {}


def check(*endings: str) -> Callable[[Callable[[str], None]], Callable[[str], None]]:
    """Registers a check for the files with these endings."""

    def register(function: Callable[[str], None]) -> Callable[[str], None]:
        for ending in endings:
            CHECKS[f"{function.__name__}[{'stream' if ending else 'zip'}]"] = partial(function, ending)
        return function

    return register


both = check("", "_legacy")


def load(name: str, ending: str, **options: Any) -> Any:
    return zp.checkpoint.load(FIXTURES / f"{name}{ending}.pt", **options)


@both
def quantized_tensors(ending: str) -> None:
    found = load("tensors", ending)
    for name, known in EXPECTED["tensors"].items():
        q = found[name]
        assert isinstance(q, zp.QTensor), name
        assert torch.equal(q.dequantize(), known["values"]), name
        assert list(q.stride()) == known["stride"], name
        assert q.storage_offset() == known["offset"], name
        if "codes" in known:
            assert torch.equal(q.int_repr(), known["codes"]), name
    assert len({found[name].untyped_storage().data_ptr() for name in ("whole", "transposed", "part")}) == 1


@check("")
def mapped_tensors(ending: str) -> None:
    found = load("tensors", ending, mmap=True)
    for name, known in EXPECTED["tensors"].items():
        assert torch.equal(found[name].dequantize(), known["values"]), name


def static_network(state: dict[str, Any]) -> None:
    model = nn.Sequential(
        nnq.Quantize(1.0, 0, zp.quint8),
        nniq.ConvReLU2d(2, 4, 3, padding=1),
        nn.Identity(),
        nnq.Conv2d(4, 4, 3, groups=2, bias=False),
        nn.Flatten(),
        nnq.Linear(64, 5),
        nnq.DeQuantize(),
    )
    model.load_state_dict(state)
    known = EXPECTED["static"]
    steps = (model(known["input"]) - known["output"]) / known["step"]
    assert steps.abs().max() < 1.001, steps
    assert (steps.abs() > 0.001).float().mean() < 0.1, steps


@both
def static_state_dict(ending: str) -> None:
    static_network(load("static", ending))


@check("")
def static_whole_model(ending: str) -> None:
    static_network(load("static_whole", ending).state_dict())


@both
def converted_static_state_dict(ending: str) -> None:
    state, _ = zp.checkpoint.convert_state_dict(load("static", ending))
    assert not any(isinstance(value, zp.QTensor) for value in state.values())
    static_network(state)


def part(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def reduced(module: nn.Module) -> nn.Module:
    """``torch.ao``'s dynamic modules lay seven bits over their activations."""
    for child in module.modules():
        if hasattr(child, "reduce_range"):
            child.reduce_range = True
    return module


@both
def dynamic_linear(ending: str) -> None:
    layer = nnqd.Linear(3, 2)
    layer.load_state_dict(part(load("dynamic", ending)["state_dict"], "head."))
    known = EXPECTED["dynamic"]
    assert (reduced(layer)(known["linear_input"]) - known["linear"]).abs().max() < 1e-6
    converted, _ = zp.checkpoint.convert_state_dict(load("dynamic", ending)["state_dict"])
    again = nnqd.Linear(3, 2)
    again.load_state_dict(part(converted, "head."))
    assert torch.equal(reduced(again)(known["linear_input"]), layer(known["linear_input"]))


def signal_to_noise(found: torch.Tensor, known: torch.Tensor) -> float:
    return float(10 * torch.log10(known.square().sum() / (found - known).square().sum()))


@both
def recurrent_weights(ending: str) -> None:
    """A float LSTM and a float GRU with the weights in the file compute what torch.ao's did with codes."""
    state, known = load("dynamic", ending)["state_dict"], EXPECTED["dynamic"]
    lstm, gru = nn.LSTM(6, 5, num_layers=2, bidirectional=True), nn.GRU(10, 4)
    for name, layer, suffixes in (("lstm", lstm, ("l0", "l0_reverse", "l1", "l1_reverse")), ("gru", gru, ("l0",))):
        for number, suffix in enumerate(suffixes):
            cell = state[f"{name}._all_weight_values.{number}.param"].cell()
            for part, value in cell.items():
                real = value.dequantize() if isinstance(value, zp.QTensor) else value.detach()
                assert isinstance(value, zp.QTensor) == part.startswith("weight"), part
                getattr(layer, f"{part}_{suffix}").data.copy_(real)
    with torch.no_grad():
        assert signal_to_noise(lstm(known["input"])[0], known["lstm"]) > 30
        assert signal_to_noise(gru(known["lstm"])[0], known["gru"]) > 30


@both
def recurrent_layers(ending: str) -> None:
    """As they were saved, and converted: within one of the 128 steps that torch.ao lays over activations in [-1, 1]."""
    saved, known = load("dynamic", ending)["state_dict"], EXPECTED["dynamic"]
    for state in (saved, zp.checkpoint.convert_state_dict(saved)[0]):
        lstm, gru = nnqd.LSTM(6, 5, num_layers=2, bidirectional=True), nnqd.GRU(10, 4)
        cell, head = nnqd.LSTMCell(4, 3), nnqd.Linear(3, 2)
        for name, layer in (("lstm", lstm), ("gru", gru), ("cell", cell), ("head", head)):
            reduced(layer).load_state_dict(part(state, f"{name}."))
        assert (lstm(known["input"])[0] - known["lstm"]).abs().max() < 1 / 128
        assert (gru(known["lstm"])[0] - known["gru"]).abs().max() < 1 / 128
        assert (head(cell(known["gru"][-1])[0]) - known["output"]).abs().max() < 1e-3


@both
def embedding_rows(ending: str) -> None:
    state, known = load("embedding", ending), EXPECTED["embedding"]
    rows = state["one"]["_packed_params._packed_weight"].dequantize()
    assert (rows[known["index"]] - known["one"]).abs().max() < 1e-5  # torch.ao rounds the products otherwise
    rows = state["bag"]["_packed_params._packed_weight"].dequantize()
    sums = torch.stack([rows[known["index"][:2]].sum(0), rows[known["index"][2:]].sum(0)])
    assert (sums - known["bag"]).abs().max() < 0.01  # torch.ao keeps scales of 4-bit rows in float16


def main() -> None:
    outcomes = {}
    for name, function in CHECKS.items():
        try:
            function()
        except Exception:
            outcomes[name] = traceback.format_exc()
        else:
            outcomes[name] = ""
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
