"""A model quantized in one call, written to a file together with how, and brought back from the file.

A state dict does not say which modules were fused, wrapped or left in float; a :class:`Recipe` does, in JSON. So a
quantized checkpoint needs nothing but the float model's code:

    quantized = quantize_static(model, batches)
    save(quantized, "model.safetensors")
    again = load(make_model(), "model.safetensors")

May import: floors 1 to 5.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from zeropoint.analysis import FloatIsland, find_fusable
from zeropoint.analysis._data import as_batches, call, with_progress
from zeropoint.analysis._flow import Flow
from zeropoint.analysis._island import convert_with_islands, find_islands, keep_in_float, place_island
from zeropoint.analysis._simulate import calibrated, observed_layers, observed_modules, parts_to_keep, with_qconfig
from zeropoint.ao.nn._registry import OBSERVED
from zeropoint.ao.nn.intrinsic import FusedModule
from zeropoint.ao.nn.quantized import FloatFunctional
from zeropoint.ao.quantization import (
    QConfig,
    QuantStub,
    QuantWrapper,
    fuse_modules,
    get_default_qconfig,
    prepare,
)
from zeropoint.ao.quantization import quantize_dynamic as swap_dynamically
from zeropoint.ao.quantization.observers.base import ObservingModule
from zeropoint.ao.quantization.utils import clone_model, set_module
from zeropoint.checkpoint import CheckpointError, load_file, read_metadata, save_file
from zeropoint.checkpoint import load as load_archive
from zeropoint.files import write_bytes

__all__ = [
    "Quantized",
    "Recipe",
    "apply",
    "check_data",
    "describe",
    "load",
    "prepare_float",
    "quantize_dynamic",
    "quantize_static",
    "read_recipe",
    "save",
]

_KEY: Final = "zeropoint_recipe"
_STATE: Final = "state_dict"


@dataclass(frozen=True)
class Recipe:
    """How a float model became a quantized one: what its state dict does not say.

    Attributes:
        method: ``"static"`` or ``"dynamic"``.
        fuse: the rows of modules that were fused.
        wrap: whether the whole model was put between stubs.
        islands: modules left in float between quantized ones, and whether their results are quantized.
        layers: dynamic: the modules that were swapped.
        settings: words for people, such as the observer; nothing depends on them.
    """

    method: str
    fuse: tuple[tuple[str, ...], ...] = ()
    wrap: bool = False
    islands: Mapping[str, bool] = field(default_factory=dict)
    layers: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The recipe as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Raises CheckpointError where the text is no recipe."""
        try:
            read = json.loads(text)
            recipe = cls(
                read["method"],
                tuple(tuple(row) for row in read["fuse"]),
                read["wrap"],
                dict(read["islands"]),
                tuple(read["layers"]),
                dict(read["settings"]),
            )
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointError(f"the file's recipe is damaged: {error}") from error
        names = [*(name for row in recipe.fuse for name in row), *recipe.islands, *recipe.layers]
        if recipe.method not in ("static", "dynamic") or not all(isinstance(name, str) for name in names):
            raise CheckpointError("the file's recipe is damaged, or of a later version of zeropoint")
        return recipe


@dataclass
class Quantized:
    """A quantized model, its float twin, and how one became the other.

    Attributes:
        model: the quantized model.
        reference: the float model, fused and wrapped as the quantized one, to compare with.
        recipe: how.
    """

    model: nn.Module
    reference: nn.Module
    recipe: Recipe


def prepare_float(model: nn.Module, data: Any, *, fuse: bool = True) -> tuple[nn.Module, Recipe]:
    """A float copy that is ready for static quantization: fused, and between stubs.

    Args:
        model: float model.
        data: a tensor, or batches, of which the first is run.
        fuse: fuse what can be fused; see :func:`zeropoint.analysis.find_fusable`.

    Returns:
        The copy in evaluation mode, and what was done to it. A model without a QuantStub is wrapped: then the paths of
        its modules begin with ``module.``.

    Raises:
        ValueError: the data does not fit the model; or the model has several inputs and no stubs.
    """
    batches = as_batches(data)
    floating = clone_model(model).eval()
    check_data(floating, batches)
    rows = find_fusable(floating, batches) if fuse else []
    if rows:
        floating = fuse_modules(floating, rows)
    wrap = not any(isinstance(module, QuantStub) for module in floating.modules())
    if wrap:
        if not isinstance(batches[0], Tensor):
            raise ValueError(
                f"{type(model).__name__} has no QuantStub, and a batch is no single tensor, so it cannot be wrapped: "
                "place a QuantStub at each input and a DeQuantStub at the output, or quantize it dynamically"
            )
        if not batches[0].is_floating_point():
            raise ValueError(
                f"{type(model).__name__} has no QuantStub, and its input is {batches[0].dtype}, no float: "
                "place a QuantStub where the floats begin, or quantize it dynamically"
            )
        floating = QuantWrapper(floating)
    return floating, Recipe("static", tuple(map(tuple, rows)), wrap)


def quantize_static(
    model: nn.Module,
    data: Any,
    *,
    qconfig: QConfig | None = None,
    keep_float: Collection[str] = (),
    fuse: bool = True,
    settings: Mapping[str, str] | None = None,
    progress: bool = False,
) -> Quantized:
    """Fuses, wraps if need be, calibrates and converts a model.

    Modules that cannot compute on quantized tensors are found by trying and stay float.

    Args:
        model: float model; it is left as it is.
        data: calibration data: a tensor, or batches: tensors, tuples of arguments, or dicts of named ones.
        qconfig: how to quantize; None takes the model's own, or ``get_default_qconfig()``.
        keep_float: modules to leave in float, by their paths in ``model``; of one with parts, all layers in it; of an
            LSTM or an attention, which are taken apart, the parts with weights.
        fuse: fuse what can be fused.
        settings: words to keep in the recipe.
        progress: show a progress bar, if tqdm or rich is installed.

    Raises:
        ValueError: data that does not fit the model, or a name that is no layer of it.
        TypeError: the model's own forward computes on quantized tensors what they do not define.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from zeropoint.recipe import quantize_static
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> quantize_static(model, torch.randn(4, 3, 8, 8)).recipe.fuse
        (('0', '1', '2'),)
    """
    batches = as_batches(data)
    reference, recipe = prepare_float(model, batches, fuse=fuse)
    configured = with_qconfig(reference, qconfig)
    islands, _ = find_islands(configured, batches[0])
    prepared = calibrated(islands, _checked(reference, with_progress(batches, "calibrating", progress)))
    kept = _kept(keep_float, recipe, list(observed_modules(prepared)), model)
    layers = observed_layers(prepared)
    idle = {part for name, parts in layers.items() for part in parts if part != name}
    idle -= {part for name in layers for part in parts_to_keep(prepared, layers, name)}
    kept = [name for name in kept if name not in idle]
    for name in kept:
        if isinstance(prepared.get_submodule(name), FloatFunctional):
            raise ValueError(f"{name!r} is arithmetic, which has no float form among quantized layers: do not keep it")
    readers = Flow(reference, batches[0], (FusedModule,)).fans((nn.Module,), (nn.Module,)) if kept else {}
    quantized = convert_with_islands(keep_in_float(prepared, kept, readers))
    return Quantized(quantized, reference, describe(quantized, recipe, settings))


def quantize_dynamic(
    model: nn.Module,
    *,
    qconfig: QConfig | None = None,
    keep_float: Collection[str] = (),
    settings: Mapping[str, str] | None = None,
) -> Quantized:
    """Swaps layers for dynamic ones: as ``zeropoint.ao.quantization.quantize_dynamic``, with a recipe.

    Args:
        model: float model; it is left as it is.
        qconfig: how to quantize weights; None: one grid an output channel.
        keep_float: modules to leave in float, by path; of one with parts, all layers in it.
        settings: words to keep in the recipe.

    Raises:
        ValueError: a name that is no layer of the model, or nothing to quantize.
    """
    reference = clone_model(model).eval()
    summary: Any = swap_dynamically(reference).quantization_summary
    names = list(summary.swapped)
    kept = _kept(keep_float, Recipe("dynamic"), names, model)
    layers = [name for name in names if name not in kept]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layer to quantize dynamically: Linear, LSTM and the like")
    spec: Any = set(layers) if qconfig is None else dict.fromkeys(layers, qconfig)
    quantized = swap_dynamically(reference, spec)
    return Quantized(quantized, reference, Recipe("dynamic", layers=tuple(layers), settings=dict(settings or {})))


def describe(model: nn.Module, recipe: Recipe, settings: Mapping[str, str] | None = None) -> Recipe:
    """``recipe`` with the islands that a converted model has, and these settings."""
    islands = {
        name: module.quantize is not None for name, module in model.named_modules() if isinstance(module, FloatIsland)
    }
    return Recipe(recipe.method, recipe.fuse, recipe.wrap, islands, recipe.layers, dict(settings or {}))


def apply(model: nn.Module, recipe: Recipe) -> Quantized:
    """Gives a float model the modules that a recipe describes, with grids that mean nothing yet.

    Args:
        model: float model; it is left as it is.
        recipe: how a model of the same structure was quantized.

    Raises:
        ValueError: the recipe names modules that the model does not have.
    """
    floating = clone_model(model).eval()
    if recipe.method == "dynamic":
        for name in recipe.layers:
            _existing(floating, name)
        return Quantized(swap_dynamically(floating, set(recipe.layers)), floating, recipe)
    if recipe.fuse:
        floating = fuse_modules(floating, [list(row) for row in recipe.fuse])
    reference = QuantWrapper(floating) if recipe.wrap else floating
    configured = with_qconfig(reference, get_default_qconfig())
    composed = [f"{name}." for name, module in configured.named_modules() if type(module) in OBSERVED]
    parts = [name for name in recipe.islands if any(name.startswith(path) for path in composed)]
    for name in recipe.islands.keys() - set(parts):
        observer = get_default_qconfig().activation() if recipe.islands[name] else None
        set_module(configured, name, FloatIsland(_existing(configured, name), observer))
    prepared = prepare(configured, inplace=True)
    for name in parts:  # they are there now that prepare has taken their layers apart
        _existing(prepared, name)
        place_island(prepared, name, recipe.islands[name])
    for observer in [module for module in prepared.modules() if isinstance(module, ObservingModule)]:
        observer(torch.tensor([-1.0, 1.0]))  # any grid: the file has the right one
    return Quantized(convert_with_islands(prepared), reference, recipe)


# --- files --------------------------------------------------------------------------------------------------------


def save(quantized: Quantized, path: str | os.PathLike[str]) -> None:
    """Writes the quantized model's state and its recipe, whole or not at all.

    Args:
        quantized: the model.
        path: ends in ``.safetensors`` (needs that package) or in ``.pt`` or ``.pth``, a file of ``torch.save`` that
            holds plain tensors only.

    Raises:
        ValueError: another ending. OSError: the file cannot be written; nothing is left behind.
    """
    text = quantized.recipe.to_json()
    if _suffix(path) == ".safetensors":
        save_file(quantized.model, path, {_KEY: text})
        return
    file = io.BytesIO()
    torch.save({_KEY: text, _STATE: quantized.model.state_dict()}, file)
    write_bytes(path, file.getbuffer())


def load(model: nn.Module, path: str | os.PathLike[str]) -> Quantized:
    """Brings a quantized model back from a file that :func:`save` wrote. Nothing in the file is executed.

    Args:
        model: the float model, as it was before it was quantized; its weights do not matter, and it is left as it is.
        path: the file.

    Returns:
        The quantized model; ``reference`` has the float weights of ``model``.

    Raises:
        CheckpointError: the file is damaged, or has no recipe.
        ValueError: the file belongs to another model.
    """
    recipe, state = _read(path)
    quantized = apply(model, recipe)
    try:
        quantized.model.load_state_dict(state)
    except RuntimeError as error:
        first = str(error).splitlines()[1:2]
        raise ValueError(f"{os.fspath(path)} belongs to another model: {''.join(first).strip()}") from error
    return quantized


def read_recipe(path: str | os.PathLike[str]) -> Recipe:
    """How the model in a file was quantized. Raises CheckpointError where the file does not say."""
    if _suffix(path) == ".safetensors":
        return _recipe_in(read_metadata(path), path)
    return _read(path)[0]


def _read(path: str | os.PathLike[str]) -> tuple[Recipe, Any]:
    if _suffix(path) == ".safetensors":
        return read_recipe(path), load_file(path)
    found = load_archive(path)
    recipe = _recipe_in(found, path)
    if not isinstance(found.get(_STATE), Mapping):
        raise CheckpointError(f"{os.fspath(path)} has a recipe and no state dict: it is damaged")
    return recipe, found[_STATE]


def _recipe_in(found: Any, path: str | os.PathLike[str]) -> Recipe:
    text = found.get(_KEY) if isinstance(found, Mapping) else None
    if not isinstance(text, str):
        raise CheckpointError(
            f"{os.fspath(path)} does not say how its model was quantized: it was not written by zeropoint.recipe.save"
        )
    return Recipe.from_json(text)


def _suffix(path: str | os.PathLike[str]) -> str:
    suffix = Path(path).suffix
    if suffix not in (".safetensors", ".pt", ".pth"):
        raise ValueError(f"a checkpoint's name must end in .safetensors, .pt or .pth, got {Path(path).name!r}")
    return suffix


# --- checks -------------------------------------------------------------------------------------------------------


def check_data(model: nn.Module, data: Any) -> None:
    """Looks for numbers that are none, and runs a float model on the first batch.

    Infinities below zero are taken where a batch is several tensors: masks hold them.

    Raises:
        ValueError: the batch and its shapes, where it holds NaN or infinities or does not fit the model.
    """
    batches = as_batches(data)
    for index, batch in enumerate(batches):
        _check_finite(batch, index, _shapes(batch), isinstance(batch, (tuple, list, Mapping)))
    _try(model, batches[0], 0)


def _check_finite(part: Any, index: int, shapes: str, masks: bool) -> None:
    if isinstance(part, (tuple, list, Mapping)):
        for inner in part.values() if isinstance(part, Mapping) else part:
            _check_finite(inner, index, shapes, masks)
    if not isinstance(part, Tensor) or not part.is_floating_point() or not part.numel():
        return
    finite = torch.isfinite(part)
    count = int(finite.sum())
    if count == part.numel() or (masks and count and bool((finite | torch.isneginf(part)).all())):
        return
    nan = int(torch.isnan(part).sum())
    raise ValueError(
        f"batch {index} of the data, {shapes}, holds {nan} NaN and {part.numel() - count - nan} infinities among "
        f"{part.numel()} values: no grid can be found from them, so leave such samples out or mend them"
    )


def _checked(model: nn.Module, batches: Iterable[Any]) -> Iterator[Any]:
    """The batches; the one that does not fit the model is named."""
    first: Any = None
    for index, batch in enumerate(batches):
        if first is None:
            first = _shapes(batch)
        elif _shapes(batch) != first:
            _try(model, batch, index)
        yield batch


def _try(model: nn.Module, batch: Any, index: int) -> None:
    try:
        with torch.no_grad():
            call(model, batch)
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"batch {index} of the data, {_shapes(batch)}, does not fit {type(model).__name__}: "
            f"{type(error).__name__}: {text}"
        ) from error


def _shapes(batch: Any) -> str:
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return ", ".join(f"{name}: {_shapes(part)}" for name, part in batch.items())
    if isinstance(batch, (tuple, list)):
        return ", ".join(map(_shapes, batch))
    return type(batch).__name__


def _existing(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise ValueError(f"the file belongs to another model: {type(model).__name__} has no module {name!r}") from error


def _kept(names: Collection[str], recipe: Recipe, able: list[str], model: nn.Module) -> list[str]:
    """The layers that are meant by the names a user gives: paths in the model as it was."""
    heads = {name: row[0] for row in recipe.fuse for name in row}
    prefix = "module." if recipe.wrap else ""
    kept: list[str] = []
    for name in names:
        path = prefix + heads.get(name, name)
        found = [layer for layer in able if layer == path or layer.startswith(f"{path}.")]
        if not found:
            known = ", ".join(layer.removeprefix(prefix) for layer in able[:8])
            raise ValueError(
                f"{type(model).__name__} has no layer {name!r} that would be quantized; it has: {known}"
                f"{', …' if len(able) > 8 else ''}"
            )
        kept += [layer for layer in found if layer not in kept]
    return kept
