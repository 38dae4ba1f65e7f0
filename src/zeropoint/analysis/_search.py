"""Quantize as much as accuracy allows.

May import: floors 1 to 5.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from zeropoint.analysis._data import as_batches
from zeropoint.analysis._flow import Flow
from zeropoint.analysis._island import convert_with_islands, find_islands, keep_in_float
from zeropoint.analysis._sensitivity import sensitivity
from zeropoint.analysis._simulate import (
    calibrated,
    observed_layers,
    observed_modules,
    parts_to_keep,
    with_qconfig,
)
from zeropoint.ao.nn.intrinsic import FusedModule
from zeropoint.ao.quantization import (
    HistogramObserver,
    MSEObserver,
    QConfig,
    QuantStub,
    default_per_channel_weight_observer,
    quantize_dynamic,
)
from zeropoint.ao.quantization.utils import clone_model

__all__ = ["AccuracyResult", "Step", "quantize_with_accuracy"]

Evaluate = Callable[[nn.Module], float]
Better = QConfig | Sequence[QConfig] | None


@dataclass(frozen=True)
class Step:
    """One trial: what was tried, and the accuracy that it had."""

    what: str
    accuracy: float


@dataclass
class AccuracyResult:
    """A quantized model and how it was found; prints as a report.

    Attributes:
        model: the model.
        float_accuracy: of the float model.
        quantized_accuracy: with everything quantized.
        accuracy: of ``model``.
        kept_in_float: layers that were left in float for accuracy.
        other_observer: layers that were given another qconfig instead.
        other_qconfig: which one; None where there are no such layers.
        not_quantizable: modules that cannot compute on quantized tensors and were left in float from the start.
        steps: every trial in turn.
    """

    model: nn.Module
    float_accuracy: float
    quantized_accuracy: float
    accuracy: float
    kept_in_float: tuple[str, ...] = ()
    other_observer: tuple[str, ...] = ()
    other_qconfig: QConfig | None = None
    not_quantizable: tuple[str, ...] = ()
    steps: list[Step] = field(default_factory=list)

    def __str__(self) -> str:
        def named(names: Sequence[str]) -> str:
            return ", ".join(names) if names else "none"

        return "\n".join(
            [
                f"accuracy: float {self.float_accuracy:.4f}, everything quantized {self.quantized_accuracy:.4f}, "
                f"this model {self.accuracy:.4f}",
                f"kept in float: {named(self.kept_in_float)}",
                f"another observer: {named(self.other_observer)}"
                + (f": {self.other_qconfig}" if self.other_observer else ""),
                f"cannot be quantized: {named(self.not_quantizable)}",
                *(f"  {step.accuracy:.4f}  {step.what}" for step in self.steps),
            ]
        )


def quantize_with_accuracy(
    model: nn.Module,
    data: Any,
    evaluate: Evaluate,
    max_drop: float,
    *,
    qconfig: QConfig | None = None,
    better_qconfig: QConfig | Sequence[QConfig] | None = None,
    method: Literal["static", "dynamic"] = "static",
    resume: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> AccuracyResult:
    """Quantizes a model, leaving no more layers in float than accuracy asks for.

    First everything is quantized. If that costs too much, layers get another qconfig, the most sensitive first: the
    cheap changes, since a layer stays quantized. If none of those does, the best of them stays, and layers are left in
    float, the most sensitive first: as few as meet the target, and then each is tried without, in turn. Between
    quantized layers, a layer in float is a :class:`~zeropoint.analysis.FloatIsland`; of an LSTM or an attention, which
    are taken apart, the parts with weights are. Modules that cannot compute on
    quantized tensors, such as a spectrogram or a square root, are found by trying and become islands from the start. If
    nothing else meets the target, the float model is returned.

    Args:
        model: float model, fused; for "static", with stubs. It is left as it is.
        data: calibration data: a tensor, or batches: tensors, tuples of arguments, or dicts of named ones.
        evaluate: the accuracy of a model, a number: the higher, the better.
        max_drop: how far the accuracy may lie below that of the float model.
        qconfig: how to quantize; None takes the model's own, or the default one.
        better_qconfig: what to try before float, one or several in turn; None: one weight grid a channel with the
            activations' observer as it is, then with MSE and with histogram observers.
        method: "static", or "dynamic" for what ``quantize_dynamic`` does.
        resume: a file that keeps the layers' sensitivities, as for :func:`~zeropoint.analysis.sensitivity`.
        progress: show a progress bar, if tqdm or rich is installed.

    Raises:
        ValueError: a negative ``max_drop``, another method, no data, or a static model without stubs.
        TypeError: the model's own forward computes on quantized tensors what they do not define.
    """
    if not max_drop >= 0:
        raise ValueError(f"max_drop must be 0 or more, got {max_drop}")
    if method not in ("static", "dynamic"):
        raise ValueError(f"method must be 'static' or 'dynamic', got {method!r}")
    batches = as_batches(data)
    floating = clone_model(model).eval()
    candidates: _Static | _Dynamic
    if method == "static":
        candidates = _Static(floating, batches, qconfig, better_qconfig)
    else:
        candidates = _Dynamic(floating, qconfig)
    search = _Search(candidates, evaluate, float(evaluate(floating)), max_drop)

    def ranking() -> list[str]:
        found = sensitivity(floating, batches, qconfig=qconfig, method=method, resume=resume, progress=progress)
        return [layer.name for layer in found]

    result = search.run(floating, ranking)
    result.not_quantizable = candidates.not_quantizable
    return result


def _others(in_use: Sequence[Any], given: Better) -> list[QConfig]:
    """What to try instead of the qconfigs in use, from the smallest change to the largest."""
    if isinstance(given, QConfig):
        return [given]
    if given is not None:
        return list(given)
    activation = next((qconfig.activation for qconfig in in_use if qconfig), HistogramObserver)
    return list(
        dict.fromkeys(
            QConfig(observer, default_per_channel_weight_observer)
            for observer in (activation, MSEObserver, HistogramObserver)
        )
    )


class _Static:
    """Builds statically quantized models."""

    def __init__(self, model: nn.Module, batches: list[Any], qconfig: QConfig | None, better: Better) -> None:
        if not any(isinstance(module, QuantStub) for module in model.modules()):
            raise ValueError(
                "the model has no QuantStub, so nothing would reach the quantized layers as integers: wrap it in a "
                "QuantWrapper, or place stubs"
            )
        prepared_float, self.not_quantizable = find_islands(with_qconfig(model, qconfig), batches[0])
        self.prepared = calibrated(prepared_float, batches)
        self.batches, self.float_model = batches, model
        self.readers = Flow(model, batches[0], (FusedModule,)).fans((nn.Module,), (nn.Module,))
        observed = observed_modules(self.prepared)
        self.layers = observed_layers(self.prepared)
        self.names = set(self.layers)
        in_use = [module.qconfig for module in observed.values()]
        self.better_qconfigs = [found for found in _others(in_use, better) if any(found != used for used in in_use)]
        self._better: dict[int, nn.Module] = {}

    def better(self, which: int) -> nn.Module:
        """The model calibrated with another qconfig, made once."""
        if which not in self._better:
            floating, _ = find_islands(with_qconfig(self.float_model, self.better_qconfigs[which]), self.batches[0])
            self._better[which] = calibrated(floating, self.batches)
        return self._better[which]

    def can_stay_float(self, name: str) -> bool:
        """Whether something in it can be an island."""
        return bool(parts_to_keep(self.prepared, self.layers, name))

    def build(self, kept: Sequence[str], other: Sequence[str], which: int) -> nn.Module:
        """A quantized model with ``kept`` in float, and another qconfig for ``other``."""
        prepared = clone_model(self.prepared)
        for name in (part for layer in other for part in self.layers[layer]):
            module, source = prepared.get_submodule(name), self.better(which).get_submodule(name)
            module.qconfig = source.qconfig
            module.activation_post_process = copy.deepcopy(source.activation_post_process)
        islands = [part for name in kept for part in parts_to_keep(self.prepared, self.layers, name)]
        return convert_with_islands(keep_in_float(prepared, islands, self.readers))


class _Dynamic:
    """Builds dynamically quantized models."""

    better_qconfigs: tuple[QConfig, ...] = ()
    not_quantizable: tuple[str, ...] = ()

    def __init__(self, model: nn.Module, qconfig: QConfig | None) -> None:
        self.model, self.qconfig = model, qconfig
        summary: Any = quantize_dynamic(model).quantization_summary
        self.names = set(summary.swapped)

    def can_stay_float(self, name: str) -> bool:
        return True

    def build(self, kept: Sequence[str], other: Sequence[str], which: int) -> nn.Module:
        names = self.names - set(kept)
        if not names:
            return clone_model(self.model)
        return quantize_dynamic(self.model, names if self.qconfig is None else dict.fromkeys(names, self.qconfig))


class _Search:
    """Looks for the smallest change that meets the target."""

    def __init__(self, candidates: _Static | _Dynamic, evaluate: Evaluate, float_accuracy: float, drop: float) -> None:
        self.candidates = candidates
        self.evaluate = evaluate
        self.float_accuracy = float_accuracy
        self.target = float_accuracy - drop
        self.steps: list[Step] = []
        self.tried: dict[tuple[tuple[str, ...], tuple[str, ...], int], float] = {}

    def accuracy(self, kept: Sequence[str], other: Sequence[str], which: int = 0) -> float:
        """Of the model with this change; each is tried once."""
        key = tuple(kept), tuple(other), which
        if key not in self.tried:
            self.tried[key] = float(self.evaluate(self.candidates.build(kept, other, which)))
            observer = f" ({self.candidates.better_qconfigs[which]})" if other else ""
            what = f"{len(kept)} in float, {len(other)} with another observer{observer}"
            self.steps.append(Step(what, self.tried[key]))
        return self.tried[key]

    def run(self, floating: nn.Module, ranking: Callable[[], list[str]]) -> AccuracyResult:
        everything = self.accuracy((), ())
        if everything >= self.target:
            return self.result((), (), 0, everything)
        ranked = [name for name in ranking() if name in self.candidates.names]
        other: tuple[str, ...] = ()
        best, kind = everything, 0
        for which in range(len(self.candidates.better_qconfigs)):
            found = self.accuracy((), ranked, which)
            if found >= self.target:
                fewest = self.smallest(ranked, lambda names, which=which: self.accuracy((), names, which))  # type: ignore[misc]
                return self.result((), tuple(fewest), which, everything)
            if found > best:
                best, kind, other = found, which, tuple(ranked)
        able = [name for name in ranked if self.candidates.can_stay_float(name)]
        if able and self.accuracy(able, other, kind) >= self.target:
            kept = tuple(self.smallest(able, lambda names: self.accuracy(names, other, kind)))
            return self.result(kept, tuple(name for name in other if name not in kept), kind, everything)
        self.steps.append(Step("the float model", self.float_accuracy))
        return AccuracyResult(
            floating,
            self.float_accuracy,
            everything,
            self.float_accuracy,
            kept_in_float=tuple(able),
            steps=self.steps,
        )

    def smallest(self, ranked: Sequence[str], accuracy: Callable[[Sequence[str]], float]) -> list[str]:
        """The shortest beginning of ``ranked``, all of which meets the target; then without what is not needed."""
        fails, meets = 0, 1
        while meets < len(ranked) and accuracy(ranked[:meets]) < self.target:
            fails, meets = meets, min(2 * meets, len(ranked))
        while meets - fails > 1:
            middle = (fails + meets) // 2
            fails, meets = (fails, middle) if accuracy(ranked[:middle]) >= self.target else (middle, meets)
        names = list(ranked[:meets])
        for name in list(names[:-1]):
            fewer = [other for other in names if other != name]
            if accuracy(fewer) >= self.target:
                names = fewer
        return names

    def result(self, kept: tuple[str, ...], other: tuple[str, ...], which: int, everything: float) -> AccuracyResult:
        model = self.candidates.build(kept, other, which)
        found = self.tried.get((kept, other, which))
        return AccuracyResult(
            model,
            self.float_accuracy,
            everything,
            float(self.evaluate(model)) if found is None else found,
            kept_in_float=kept,
            other_observer=other,
            other_qconfig=self.candidates.better_qconfigs[which] if other else None,
            steps=self.steps,
        )
