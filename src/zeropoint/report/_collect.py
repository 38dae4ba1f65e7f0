"""Gathers what a report shows, as plain numbers.

May import: floors 1 to 5.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import zeropoint
from zeropoint.analysis import Sensitivity, TensorError, layer_errors, output_sqnr
from zeropoint.analysis._data import as_batches, call, first_tensor, run
from zeropoint.analysis._layers import NamedArguments
from zeropoint.ao.nn.quantized._base import QuantizedModule
from zeropoint.ao.ns import compare_model_outputs, compare_weights
from zeropoint.tensor import QTensor

__all__ = ["Histogram", "LayerReport", "Report", "collect"]

BINS = 80

ROUNDS, SECONDS, CALLS = 3, 0.15, 200
"""A model's best time is that of these rounds, each of so many seconds and calls at the most."""


@dataclass(frozen=True)
class Histogram:
    """How the float values of a tensor lie on the grid that it was given.

    Attributes:
        counts: values a bin; the bins divide ``low`` … ``high`` evenly.
        low, high: the ends, which hold both all values and the grid.
        grid_low, grid_high: the real values of the grid's first and last code.
        step: the grid's scale; of a per-channel grid, all of this is of the widest one.
        per_channel: whether there is one grid a channel.
    """

    counts: tuple[int, ...]
    low: float
    high: float
    grid_low: float
    grid_high: float
    step: float
    per_channel: bool


@dataclass(frozen=True)
class LayerReport:
    """One quantized layer.

    Attributes:
        name, kind: its path and its class.
        weight, own, activation: errors, as in :class:`zeropoint.analysis.LayerError`.
        size: bytes of its parameters and buffers.
        milliseconds: the best time of one call, on the first batch; None where it is never called.
        weight_histogram, activation_histogram: of the float values; None where there are none.
    """

    name: str
    kind: str
    weight: TensorError | None
    own: TensorError | None
    activation: TensorError | None
    size: int
    milliseconds: float | None
    weight_histogram: Histogram | None
    activation_histogram: Histogram | None


@dataclass
class Report:
    """What a report shows.

    Attributes:
        title: of the page.
        output: SQNR of the model's output, in dB.
        float_size, size: bytes of the saved state dicts.
        float_milliseconds, milliseconds: the best time of one call on the first batch, measured in turn.
        layers: every quantized layer, in the order of the model.
        skipped: ``(path, class, reason)`` of what was left in float.
        sensitivity: the ranking, if one was given.
        environment: versions, processor features, threads.
    """

    title: str
    output: float
    float_size: int
    size: int
    float_milliseconds: float
    milliseconds: float
    layers: list[LayerReport]
    skipped: list[tuple[str, str, str]] = field(default_factory=list)
    sensitivity: Sensitivity | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def worst(self, part: str = "own") -> list[LayerReport]:
        """The layers that have this error (``"weight"``, ``"own"`` or ``"activation"``), lowest SQNR first."""
        having = [layer for layer in self.layers if getattr(layer, part) is not None]
        return sorted(having, key=lambda layer: float(getattr(layer, part).sqnr))

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts, lists, strings and numbers; what is not finite is None."""
        return _finite(asdict(self))  # type: ignore[no-any-return]


def _finite(x: Any) -> Any:
    if isinstance(x, float):
        return x if math.isfinite(x) else None
    if isinstance(x, dict):
        return {key: _finite(value) for key, value in x.items()}
    return [_finite(value) for value in x] if isinstance(x, (list, tuple)) else x


def collect(
    model: nn.Module,
    reference: nn.Module,
    data: Any,
    *,
    sensitivity: Sensitivity | None = None,
    title: str | None = None,
    progress: bool = False,
) -> Report:
    """Measures what a report shows.

    Args:
        model: the quantized model.
        reference: the float model, fused as the quantized one was.
        data: a tensor, or batches: tensors, tuples of arguments, or dicts of named ones.
        sensitivity: what :func:`zeropoint.analysis.sensitivity` found, to show.
        title: None: the model's class.
        progress: show progress bars, if tqdm or rich is installed.

    Raises:
        TypeError, ValueError: data that is none, or a model without quantized layers.
    """
    batches = as_batches(data)
    reference, was_training = reference, [m for m in (model, reference) if m.training]
    for part in was_training:
        part.eval()
    try:
        return _collect(model, reference, batches, sensitivity, title, progress)
    finally:
        for part in was_training:
            part.train()


def _collect(
    model: nn.Module,
    reference: nn.Module,
    batches: list[Any],
    sensitivity: Sensitivity | None,
    title: str | None,
    progress: bool,
) -> Report:
    errors = [
        error
        for error in layer_errors(reference, model, batches, progress=progress)
        if isinstance(model.get_submodule(error.name), QuantizedModule)
    ]
    if not errors:
        raise ValueError(
            "no quantized layer of the model has a float twin of the same path: pass the quantized model first, and a "
            "reference that was fused as it was"
        )
    wanted, got = ([first_tensor(y).flatten() for y in run(m, batches)] for m in (reference, model))
    times = _layer_times(model, batches[0])
    weights = _weights(reference, model)
    activations = _activations(reference, model, batches[0])
    layers = []
    for error in errors:
        module = model.get_submodule(error.name)
        layers.append(
            LayerReport(
                **vars(error),
                size=sum(t.numel() * t.element_size() for t in [*module.parameters(), *_saved_buffers(module)]),
                milliseconds=times.get(error.name),
                weight_histogram=weights.get(error.name),
                activation_histogram=activations.get(error.name),
            )
        )
    summary: Any = getattr(model, "quantization_summary", None)
    float_time, time_ = _times((reference, model), batches[0])
    return Report(
        title=title or type(reference).__name__,
        output=output_sqnr(torch.cat(wanted), torch.cat(got)),
        float_size=_saved_size(reference),
        size=_saved_size(model),
        float_milliseconds=float_time,
        milliseconds=time_,
        layers=layers,
        skipped=[] if summary is None else [(r.name, r.before, r.reason) for r in summary.skipped.values()],
        sensitivity=sensitivity,
        environment={
            "zeropoint": zeropoint.__version__,
            "torch": torch.__version__,
            "kernels": zeropoint.backends.active_isa() or "reference",
            "threads": str(torch.get_num_threads()),
        },
    )


def _saved_buffers(module: nn.Module) -> list[Tensor]:
    """The buffers that are saved: packed weights are made anew from them."""
    return [value for value in module.state_dict().values() if isinstance(value, Tensor)]


def _saved_size(model: nn.Module) -> int:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell()


def _times(models: tuple[nn.Module, ...], batch: Any) -> list[float]:
    """The best milliseconds of one call of each model: many of one, then of the next, round after round.

    In turn, so that all meet the same noise; many at once, because the first calls after another model's are slower,
    most of all where torch's threads and those of the kernels take the processors from each other.
    """
    best = [math.inf] * len(models)
    with torch.no_grad():
        for _ in range(ROUNDS):
            for index, model in enumerate(models):
                for start, end in _stretch(lambda model=model: call(model, batch)):  # type: ignore[misc]
                    best[index] = min(best[index], (end - start) * 1e3)
    return best


def _stretch(once: Callable[[], Any]) -> list[tuple[float, float]]:
    """When each of many calls within a small budget began and ended, in seconds; there are two at the least."""
    times: list[tuple[float, float]] = []
    while len(times) < 2 or (times[-1][1] - times[0][0] < SECONDS and len(times) < CALLS):
        start = time.perf_counter()
        once()
        times.append((start, time.perf_counter()))
    return times


def _layer_times(model: nn.Module, batch: Any) -> dict[str, float]:
    """The best milliseconds of one call of each module."""
    best: dict[str, float] = {}
    starts: dict[str, float] = {}
    handles = []

    def enter(name: str) -> Any:
        return lambda module, args: starts.__setitem__(name, time.perf_counter())

    def leave(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            best[name] = min(best.get(name, math.inf), (time.perf_counter() - starts[name]) * 1e3)

        return hook

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name)))
        handles.append(module.register_forward_hook(leave(name), prepend=True))
    try:
        with torch.no_grad():
            for _ in range(ROUNDS):
                _stretch(lambda: call(model, batch))
    finally:
        for handle in handles:
            handle.remove()
    return best


def _weights(reference: nn.Module, model: nn.Module) -> dict[str, Histogram]:
    pairs = compare_weights(reference.state_dict(), model.state_dict())
    return {
        key.rpartition(".")[0]: _histogram(pair["float"], pair["quantized"])
        for key, pair in pairs.items()
        if isinstance(pair["quantized"], QTensor) and key.rpartition(".")[2] == "weight"
    }


def _activations(reference: nn.Module, model: nn.Module, batch: Any) -> dict[str, Histogram]:
    arguments, prefix = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), ""
    if isinstance(batch, Mapping):  # the numeric suite passes arguments by place
        reference, model, prefix = NamedArguments(reference), NamedArguments(model), "model."
    return {
        key.removesuffix("stats").removesuffix(".").removeprefix(prefix): _histogram(
            pair["float"][0], pair["quantized"][0]
        )
        for key, pair in compare_model_outputs(reference, model, *arguments).items()
        if isinstance(pair["quantized"][0], QTensor) and isinstance(pair["float"][0], Tensor)
    }


def _histogram(values: Tensor, quantized: QTensor) -> Histogram:
    values = (values.dequantize() if values.is_quantized else values).detach().float().flatten()
    values = values[torch.isfinite(values)]
    scales, zeros = torch.as_tensor(quantized.scale).double(), torch.as_tensor(quantized.zero_point).double()
    widest = int(scales.argmax())
    step, zero = float(scales.flatten()[widest]), float(zeros.flatten()[widest])
    grid_low, grid_high = (quantized.qdtype.qmin - zero) * step, (quantized.qdtype.qmax - zero) * step
    low, high = min(grid_low, *_ends(values, min)), max(grid_high, *_ends(values, max))
    counts = torch.histc(values, BINS, low, high) if high > low else torch.zeros(BINS)
    return Histogram(
        tuple(int(count) for count in counts), low, high, grid_low, grid_high, step, quantized.axis is not None
    )


def _ends(values: Tensor, end: Any) -> tuple[float, ...]:
    return (end(float(values.min()), float(values.max())),) if values.numel() else (0.0,)
