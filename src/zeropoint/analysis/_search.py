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
from zeropoint.analysis._simulate import calibrated, observed_modules, with_qconfig
from zeropoint.ao.nn.intrinsic import FusedModule
from zeropoint.ao.nn.quantized import FloatFunctional
from zeropoint.ao.quantization import DeQuantStub, QConfig, QuantStub, get_default_qconfig, quantize_dynamic
from zeropoint.ao.quantization.utils import clone_model

__all__ = ["AccuracyResult", "Step", "quantize_with_accuracy"]

Evaluate = Callable[[nn.Module], float]


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
        other_observer: layers that were given the better qconfig instead.
        not_quantizable: modules that cannot compute on quantized tensors and were left in float from the start.
        steps: every trial in turn.
    """

    model: nn.Module
    float_accuracy: float
    quantized_accuracy: float
    accuracy: float
    kept_in_float: tuple[str, ...] = ()
    other_observer: tuple[str, ...] = ()
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
                f"another observer: {named(self.other_observer)}",
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
    better_qconfig: QConfig | None = None,
    method: Literal["static", "dynamic"] = "static",
    resume: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> AccuracyResult:
    """Quantizes a model, leaving no more layers in float than accuracy asks for.

    First everything is quantized. If that costs too much, layers get a better qconfig, the most sensitive first; if
    that does not do, layers are left in float, the most sensitive first: as few as meet the target, and then each is
    tried without, in turn. Between quantized layers, a layer in float is a :class:`~zeropoint.analysis.FloatIsland`.
    Modules that cannot compute on quantized tensors, such as a spectrogram or a square root, are found by trying and
    become islands from the start. If nothing else meets the target, the float model is returned.

    Args:
        model: float model, fused; for "static", with stubs. It is left as it is.
        data: calibration data: a tensor, or batches: tensors, tuples of arguments, or dicts of named ones.
        evaluate: the accuracy of a model, a number: the higher, the better.
        max_drop: how far the accuracy may lie below that of the float model.
        qconfig: how to quantize; None takes the model's own, or the default one.
        better_qconfig: what to try before float; None: histogram observers and one weight grid a channel.
        method: "static", or "dynamic" for what ``quantize_dynamic`` does.
        resume: a file that keeps the layers' sensitivities, as for :func:`~zeropoint.analysis.sensitivity`.
        progress: show a progress bar, if tqdm is installed.

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
        candidates = _Static(floating, batches, qconfig, better_qconfig or get_default_qconfig())
    else:
        candidates = _Dynamic(floating, qconfig)
    search = _Search(candidates, evaluate, float(evaluate(floating)), max_drop)

    def ranking() -> list[str]:
        found = sensitivity(floating, batches, qconfig=qconfig, method=method, resume=resume, progress=progress)
        return [layer.name for layer in found]

    result = search.run(floating, ranking)
    result.not_quantizable = candidates.not_quantizable
    return result


class _Static:
    """Builds statically quantized models."""

    def __init__(self, model: nn.Module, batches: list[Any], qconfig: QConfig | None, better: QConfig) -> None:
        if not any(isinstance(module, QuantStub) for module in model.modules()):
            raise ValueError(
                "the model has no QuantStub, so nothing would reach the quantized layers as integers: wrap it in a "
                "QuantWrapper, or place stubs"
            )
        prepared_float, self.not_quantizable = find_islands(with_qconfig(model, qconfig), batches[0])
        self.prepared = calibrated(prepared_float, batches)
        self.batches, self.float_model = batches, model
        self.readers = Flow(model, batches[0], (FusedModule,)).fans((nn.Module,), (nn.Module,))
        self.better_qconfig = better
        self._better: nn.Module | None = None
        self.names = set(observed_modules(self.prepared))

    @property
    def has_better(self) -> bool:
        """Whether the better qconfig is another one."""
        return any(module.qconfig != self.better_qconfig for module in observed_modules(self.prepared).values())

    def better(self) -> nn.Module:
        """The model calibrated with the better qconfig, made once."""
        if self._better is None:
            floating, _ = find_islands(with_qconfig(self.float_model, self.better_qconfig), self.batches[0])
            self._better = calibrated(floating, self.batches)
        return self._better

    def can_stay_float(self, name: str) -> bool:
        """Stubs and arithmetic have no weights: all that they cost is the rounding that an island has as well."""
        return not isinstance(self.prepared.get_submodule(name), (QuantStub, DeQuantStub, FloatFunctional))

    def build(self, kept: Sequence[str], other: Sequence[str]) -> nn.Module:
        """A quantized model with ``kept`` in float, and the better qconfig for ``other``."""
        prepared = clone_model(self.prepared)
        for name in other:
            module, source = prepared.get_submodule(name), self.better().get_submodule(name)
            module.qconfig = source.qconfig
            module.activation_post_process = copy.deepcopy(source.activation_post_process)
        return convert_with_islands(keep_in_float(prepared, kept, self.readers))


class _Dynamic:
    """Builds dynamically quantized models."""

    has_better = False
    not_quantizable: tuple[str, ...] = ()

    def __init__(self, model: nn.Module, qconfig: QConfig | None) -> None:
        self.model, self.qconfig = model, qconfig
        summary: Any = quantize_dynamic(model).quantization_summary
        self.names = set(summary.swapped)

    def can_stay_float(self, name: str) -> bool:
        return True

    def build(self, kept: Sequence[str], other: Sequence[str]) -> nn.Module:
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
        self.tried: dict[tuple[tuple[str, ...], tuple[str, ...]], float] = {}

    def accuracy(self, kept: Sequence[str], other: Sequence[str]) -> float:
        """Of the model with this change; each is tried once."""
        key = tuple(kept), tuple(other)
        if key not in self.tried:
            self.tried[key] = float(self.evaluate(self.candidates.build(kept, other)))
            self.steps.append(Step(f"{len(kept)} in float, {len(other)} with another observer", self.tried[key]))
        return self.tried[key]

    def run(self, floating: nn.Module, ranking: Callable[[], list[str]]) -> AccuracyResult:
        everything = self.accuracy((), ())
        if everything >= self.target:
            return self.result((), (), everything)
        ranked = [name for name in ranking() if name in self.candidates.names]
        other: tuple[str, ...] = ()
        if self.candidates.has_better:
            if self.accuracy((), ranked) >= self.target:
                fewest = self.smallest(ranked, lambda names: self.accuracy((), names))
                return self.result((), tuple(fewest), everything)
            if self.accuracy((), ranked) > everything:
                other = tuple(ranked)
        able = [name for name in ranked if self.candidates.can_stay_float(name)]
        if able and self.accuracy(able, other) >= self.target:
            kept = tuple(self.smallest(able, lambda names: self.accuracy(names, other)))
            return self.result(kept, tuple(name for name in other if name not in kept), everything)
        self.steps.append(Step("the float model", self.float_accuracy))
        return AccuracyResult(
            floating, self.float_accuracy, everything, self.float_accuracy, tuple(able), (), (), self.steps
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

    def result(self, kept: tuple[str, ...], other: tuple[str, ...], everything: float) -> AccuracyResult:
        model = self.candidates.build(kept, other)
        found = self.tried.get((kept, other))
        accuracy = float(self.evaluate(model)) if found is None else found
        return AccuracyResult(model, self.float_accuracy, everything, accuracy, kept, other, (), self.steps)
