"""LSTM and GRU with int8 weights over sequences: one after another, as speech comes, and many at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.harness import SETTINGS, Suite, threads
from zeropoint.ao.nn.quantized import dynamic as nnqd
from zeropoint.ops.rnn import recurrent_dynamic_reference

STEPS = 32
HIDDEN = (128, 256, 512, 1024)
BATCHES = (1, 16)


def run(quick: bool = False) -> Suite:
    suite = Suite("recurrent", f"Recurrent layers over {STEPS} steps, inputs as wide as the state")
    for kind in (nn.LSTM, nn.GRU):
        for hidden in HIDDEN[: 1 if quick else None]:
            layer = kind(hidden, hidden).eval().to(SETTINGS.device)
            ours = getattr(nnqd, kind.__name__).from_float(layer)
            calls: dict[str, Callable[[Tensor], Any]] = {"zeropoint": ours, "float32": layer}
            try:
                calls["torch.ao"] = _of_torch_ao(layer)
            except peers.Absent as error:
                suite.missing("torch.ao", error)
            for batch in BATCHES:
                x = torch.randn(STEPS, batch, hidden).to(SETTINGS.device)
                facts = {"batch": batch, "hidden": hidden, **_checked(ours, calls, x)}
                for count in SETTINGS.threads:
                    with threads(count):
                        timed = {name: _call(module, x) for name, module in calls.items()}
                        case = f"{kind.__name__} {hidden}, batch {batch}, {SETTINGS.label(count)}"
                        suite.add(case, timed, {**facts, "threads": count})
    return suite


def _call(module: Callable[[Tensor], Any], x: Tensor) -> Callable[[], object]:
    return lambda: module(x)


def _of_torch_ao(layer: nn.Module) -> nn.Module:
    quantization = peers.torch_ao().quantization
    if SETTINGS.on_gpu:
        raise peers.Absent("torch.ao has no quantized recurrent layers on CUDA")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = quantization.quantize_dynamic(nn.Sequential(layer), {type(layer)})
    quantized: nn.Module = model[0]
    return quantized


@torch.no_grad()
def _checked(ours: Any, calls: dict[str, Callable[[Tensor], Any]], x: Tensor) -> dict[str, float]:
    """How far the int8 layers are from the float one, in dB, once ours equals its reference on some steps."""
    h = torch.zeros(x.shape[1], ours.hidden_size, device=x.device)
    operands = [*ours._operands("ih_l0"), *ours._operands("hh_l0"), *[None] * 8]
    known = recurrent_dynamic_reference(
        x[:4], h, h if ours.mode == "LSTM" else None, None, ours.mode, False, *operands
    )[0]
    if not torch.equal(ours(x[:4])[0], known):
        raise AssertionError(f"{ours} differs from the reference")
    exact = calls["float32"](x)[0]
    return {
        f"sqnr_db_{name}": round(float(20 * torch.log10(exact.norm() / (exact - call(x)[0]).norm())), 1)
        for name, call in calls.items()
        if name != "float32"
    }
