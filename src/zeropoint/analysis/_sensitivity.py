"""Which layers does quantization cost most at?

May import: floors 1 to 5.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zeropoint.analysis._data import as_batches, first_tensor, run, with_progress
from zeropoint.analysis._errors import decibels
from zeropoint.analysis._simulate import Simulation
from zeropoint.ao.quantization import QConfig, quantize_dynamic
from zeropoint.ao.quantization.utils import clone_model
from zeropoint.files import write_text

__all__ = ["LayerSensitivity", "Metric", "Sensitivity", "output_sqnr", "sensitivity"]

Metric = Callable[[Tensor, Tensor], float]
"""``metric(float output, quantized output)`` of one batch; the higher, the better."""


def output_sqnr(reference: Tensor, output: Tensor) -> float:
    """Signal to quantization noise ratio of a model's output, in dB."""
    wanted, got = reference.detach().to(torch.float64), output.detach().to(torch.float64)
    return decibels(float(wanted.square().sum()), float((got - wanted).square().sum()))


@dataclass(frozen=True)
class LayerSensitivity:
    """What one layer costs.

    Attributes:
        name: its path in the model.
        kind: the name of its class.
        alone: the metric with this layer quantized and all others in float: low for a layer that hurts.
        without: the metric with this layer in float and all others quantized: high for a layer that hurts.
    """

    name: str
    kind: str
    alone: float
    without: float


@dataclass(frozen=True)
class Sensitivity:
    """The layers of a model, the one that hurts most first; prints as a table.

    Attributes:
        layers: sorted by ``alone``, then by ``without``.
        everything: the metric with every layer quantized.
        skipped: ``(path, class)`` of modules with weights that are not quantized, and so not measured, such as GRU.
    """

    layers: tuple[LayerSensitivity, ...]
    everything: float
    skipped: tuple[tuple[str, str], ...] = ()

    def __iter__(self) -> Iterator[LayerSensitivity]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self.layers), default=0)
        kinds = max((len(layer.kind) for layer in self.layers), default=0)
        lines = [f"everything quantized: {self.everything:.2f}"]
        lines.append(f"{'layer'.ljust(width)}  {'kind'.ljust(kinds)}  {'alone':>8}  {'without':>8}")
        lines += [
            f"{layer.name.ljust(width)}  {layer.kind.ljust(kinds)}  {layer.alone:8.2f}  {layer.without:8.2f}"
            for layer in self.layers
        ]
        if self.skipped:
            lines.append("not quantized: " + ", ".join(f"{name or '(root)'} ({kind})" for name, kind in self.skipped))
        return "\n".join(lines)


def sensitivity(
    model: nn.Module,
    data: Any,
    metric: Metric | None = None,
    *,
    qconfig: QConfig | None = None,
    method: Literal["static", "dynamic"] = "static",
    calibration: Any = None,
    resume: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Sensitivity:
    """Quantizes each layer alone, and leaves each layer alone in float, and ranks the layers by what that does.

    A static layer is its weight and its output, or all parts of an LSTM or an attention together; its rounding is
    simulated, which gives the values that the integer kernels give. The model itself is left as it is, and needs
    neither stubs nor a qconfig. Modules with weights that are not quantized, such as GRU, are named in ``skipped``.

    Args:
        model: float model, fused.
        data: a tensor, or batches: tensors, tuples of arguments, or dicts of named ones.
        metric: ``metric(float output, quantized output)`` of one batch, the higher, the better; its mean over the
            batches counts. None: SQNR in dB.
        qconfig: how to quantize; None takes the model's own, or the default one.
        method: "static", or "dynamic" for what ``quantize_dynamic`` does.
        calibration: data for the observers; None takes ``data``.
        resume: a file that keeps what was measured: a second call with the same model and data goes on from there.
        progress: show a progress bar, if tqdm or rich is installed.

    Raises:
        TypeError, ValueError: data that is none, a model without layers to quantize, another method, or a ``resume``
            file of another model, qconfig or data.

    Example:
        >>> import torch
        >>> from zeropoint.analysis import sensitivity
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> sorted(layer.name for layer in sensitivity(model, torch.randn(16, 8), progress=False))
        ['0', '2']
    """
    if method not in ("static", "dynamic"):
        raise ValueError(f"method must be 'static' or 'dynamic', got {method!r}")
    batches = as_batches(data)
    metric = metric or output_sqnr
    subject: Simulation | _Dynamic
    if method == "static":
        subject = Simulation(model, batches if calibration is None else as_batches(calibration), qconfig)
    else:
        subject = _Dynamic(model, qconfig)
    names = subject.names
    subject.quantize(())
    reference = [first_tensor(output) for output in subject.outputs(batches)]

    def measure(quantized: Any) -> float:
        subject.quantize(quantized)
        outputs = [first_tensor(output) for output in subject.outputs(batches)]
        return sum(metric(wanted, got) for wanted, got in zip(reference, outputs, strict=True)) / len(outputs)

    journal = _Journal(resume, lambda: _fingerprint(model, names, reference, qconfig, method))
    everything = journal.get("everything", lambda: measure(names))
    layers = []
    for name in with_progress(names, "sensitivity", progress):
        alone = journal.get(f"alone:{name}", lambda name=name: measure([name]))  # type: ignore[misc]
        without = journal.get(
            f"without:{name}",
            lambda name=name: measure([other for other in names if other != name]),  # type: ignore[misc]
        )
        layers.append(LayerSensitivity(name, type(model.get_submodule(name)).__name__, alone, without))
    layers.sort(key=lambda layer: (layer.alone, -layer.without))
    return Sensitivity(tuple(layers), everything, _skipped(model, names))


def _skipped(model: nn.Module, names: list[str]) -> tuple[tuple[str, str], ...]:
    """Modules with weights of their own and no parts, that are in none of the layers."""
    return tuple(
        (name, type(module).__name__)
        for name, module in model.named_modules()
        if module._parameters
        and not module._modules
        and not any(not layer or f"{name}.".startswith(f"{layer}.") for layer in names)
    )


class _Dynamic:
    """A model whose layers can be quantized dynamically one by one."""

    def __init__(self, model: nn.Module, qconfig: QConfig | None) -> None:
        self.original = clone_model(model).eval()
        self.qconfig = qconfig
        summary: Any = quantize_dynamic(self.original).quantization_summary
        self.names = list(summary.swapped)
        if not self.names:
            raise ValueError("the model has no layer that quantize_dynamic swaps")
        self.model: nn.Module = self.original

    def quantize(self, names: Any) -> None:
        spec: Any = dict.fromkeys(names, self.qconfig) if self.qconfig is not None else set(names)
        self.model = quantize_dynamic(self.original, spec) if spec else self.original

    def outputs(self, batches: Any) -> list[Any]:
        return run(self.model, batches)


def _fingerprint(model: nn.Module, names: list[str], reference: list[Tensor], qconfig: Any, method: str) -> str:
    """Tells models, data and settings apart: what the float model returns for the data, and what is quantized."""
    digest = hashlib.sha256(json.dumps([names, repr(qconfig), repr(getattr(model, "qconfig", None)), method]).encode())
    for output in reference:
        digest.update(output.detach().cpu().contiguous().to(torch.float64).numpy().tobytes())
    return digest.hexdigest()


class _Journal:
    """Numbers that were measured, kept in a file from one run to the next."""

    def __init__(self, path: str | os.PathLike[str] | None, fingerprint: Callable[[], str]) -> None:
        self.path = None if path is None else Path(path)
        self.values: dict[str, float] = {}
        if self.path is None:
            return
        self.fingerprint = fingerprint()
        if self.path.exists():
            try:
                kept = json.loads(self.path.read_text(encoding="utf-8"))
                same = kept["fingerprint"] == self.fingerprint
                self.values = {str(key): float(value) for key, value in kept["values"].items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{self.path} is no file that sensitivity wrote: name another one") from error
            if not same:
                raise ValueError(f"{self.path} was measured with another model, qconfig or data: name another file")

    def get(self, key: str, measure: Callable[[], float]) -> float:
        """The kept number, or a new one, which is kept before anything else is done."""
        if key not in self.values:
            self.values[key] = measure()
            self._write()
        return self.values[key]

    def _write(self) -> None:
        if self.path is None:
            return
        text = json.dumps({"fingerprint": self.fingerprint, "values": self.values})
        write_text(self.path, text)
