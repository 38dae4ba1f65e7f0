"""Old checkpoints of ``torch.ao`` brought to this package's layout, and to safetensors.

May import: ``ao.nn`` (lazily), ``_archive``, ``_records``, ``_safetensors``.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from zeropoint.checkpoint._archive import load
from zeropoint.checkpoint._records import CheckpointError, PackedParams, SavedModule
from zeropoint.checkpoint._safetensors import save_file
from zeropoint.tensor import QTensor

__all__ = ["ConversionSummary", "convert_file", "convert_state_dict"]


@dataclass
class ConversionSummary:
    """What a conversion found.

    Attributes:
        tensors: names of plain tensors, taken over as they were.
        quantized: names of quantized tensors, with a word on their grid.
        modules: paths of ``torch.ao`` modules whose packed parameters were unpacked, with their kind. Recurrent
            layers become quantized tensors ``….weight_ih``, ``….weight_hh`` beside ``….bias_ih``, ``….bias_hh``.
        left: names of what was left out, with the reason.
    """

    tensors: list[str] = field(default_factory=list)
    quantized: dict[str, str] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [
            f"{_counted(self.modules, 'packed module')}, {_counted(self.quantized, 'quantized tensor')}, "
            f"{_counted(self.tensors, 'plain tensor')} converted; {_counted(self.left, 'entry', 'entries')} left"
        ]
        for title, entries in (("packed", self.modules), ("quantized", self.quantized), ("left", self.left)):
            lines += [f"  {title:<9}  {name}: {what}" for name, what in entries.items()]
        return "\n".join(lines)


def _counted(found: Collection[str], one: str, more: str | None = None) -> str:
    return f"{len(found)} {one if len(found) == 1 else more or one + 's'}"


def convert_state_dict(state_dict: Mapping[str, Any]) -> tuple[OrderedDict[str, Any], ConversionSummary]:
    """A state dict of ``torch.ao`` modules in the layout of this package's modules: flat plain tensors.

    Args:
        state_dict: what :func:`load` returned.

    Returns:
        The converted state dict, and what was found.
    """
    summary = ConversionSummary()
    state: OrderedDict[str, Any] = OrderedDict(state_dict)
    try:
        summary.modules = _flatten_modules(state)
    except (TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"the weights of a module are not what torch.ao saves: {error}") from error
    for name, value in list(state.items()):
        if isinstance(value, QTensor):
            summary.quantized[name] = f"{value.qdtype.name}, {value.qscheme().name}"
        elif isinstance(value, Tensor):
            summary.tensors.append(name)
        elif not isinstance(value, (bool, int, float, str)):
            summary.left[name] = (
                "packed parameters of an unknown kind"
                if isinstance(value, PackedParams)
                else (f"a {type(value).__name__}")
            )
            del state[name]
    versions = getattr(state_dict, "_metadata", None)
    if versions is not None:
        state._metadata = versions  # type: ignore[attr-defined]
    return state, summary


_LINEAR: Final = "_packed_params._packed_params"
_EMBEDDING: Final = "_packed_params._packed_weight"


def _flatten_modules(state: dict[str, Any]) -> dict[str, str]:
    """Unpacks what ``torch.ao``'s modules keep, in place.

    Returns:
        Paths of the modules that were found, with their kind.
    """
    # Imported late: reading a file needs no modules.
    from zeropoint.ao.nn.quantized._torch_layout import flatten_packed_params

    found: dict[str, str] = {}
    for name, value in list(state.items()):
        if name.endswith(_LINEAR):
            prefix = name.removesuffix(_LINEAR)
            flatten_packed_params(state, prefix, 0)
            found[prefix.removesuffix(".")] = f"Linear, {_grid_of(state, prefix)}"
        elif name.endswith(_EMBEDDING) and isinstance(value, QTensor):
            prefix = name.removesuffix(_EMBEDDING)
            state[f"{prefix}weight"] = state.pop(name)
            state.pop(f"{prefix}_packed_params.dtype", None)
            found[prefix.removesuffix(".")] = "Embedding, one grid a row"
        elif isinstance(value, PackedParams):
            _flatten_recurrent(state, name, value, found)
        elif isinstance(value, QTensor) and name.endswith("weight") and name.removesuffix("weight") + "scale" in state:
            prefix = name.removesuffix("weight")
            flatten_packed_params(state, prefix, value.axis or 0)
            found[prefix.removesuffix(".")] = f"convolution, {_grid_of(state, prefix)}"
    return found


def _grid_of(state: dict[str, Any], prefix: str) -> str:
    if state.get(f"{prefix}bias", False) is None:
        del state[f"{prefix}bias"]
    scale = state.get(f"{prefix}weight_scale")
    if scale is None:
        return "float16"
    return "per channel" if scale.dim() else "per tensor"


def _flatten_recurrent(state: dict[str, Any], name: str, value: PackedParams, found: dict[str, str]) -> None:
    """One direction of a layer of an LSTM or a GRU, or one half of a cell; other packed parameters stay."""
    path, _, leaf = name.rpartition(".")
    if value.kind == "CellParamsBase":
        parts = {f"{name}.{part}": tensor for part, tensor in value.cell().items()}
        found[path] = "a direction of an LSTM or GRU"
    elif leaf in ("_packed_weight_ih", "_packed_weight_hh"):
        prefix, side = name.removesuffix(leaf), leaf.removeprefix("_packed_weight_")
        weight, bias = value.weight_bias()
        parts = {f"{prefix}weight_{side}": weight, f"{prefix}bias_{side}": bias}
        found[path] = "a recurrent cell"
    else:
        return
    del state[name]
    state.update({part: tensor for part, tensor in parts.items() if tensor is not None})


def convert_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    key: str | None = None,
    allow: Iterable[str] = (),
) -> ConversionSummary:
    """Writes the quantized weights in an old file of ``torch.save`` as safetensors.

    Args:
        source: a ZIP or legacy file with a state dict, a dict that holds one, or a whole model.
        target: the safetensors file to write.
        key: where in the file the state dict is (``"state_dict"``, ``"model"`` …; dots lead further down). None finds
            it if there is one.
        allow: full names of classes to read as inert records.

    Raises:
        CheckpointError: the file cannot be read, or has no state dict there.
        ImportError: the package ``safetensors`` is not installed.
    """
    found = load(source, allow=allow)
    place, state_dict = _find_state_dict(found, key)
    state, summary = convert_state_dict(state_dict)
    if isinstance(found, Mapping) and place:
        top = place.split(".")[0]
        summary.left.update({str(name): "beside the state dict" for name in found if name != top})
    save_file(state, target, {"source": os.path.basename(os.fspath(source))})
    return summary


def _find_state_dict(found: Any, key: str | None) -> tuple[str, Mapping[str, Any]]:
    """The state dict in what a file holds, and where it is."""
    for part in key.split(".") if key else ():
        if not isinstance(found, Mapping) or part not in found:
            known = ", ".join(map(str, found)) if isinstance(found, Mapping) else f"a {type(found).__name__}"
            raise CheckpointError(f"the file has no {key!r}; at {part!r} it has: {known}")
        found = found[part]
    if isinstance(found, SavedModule):
        return key or "", found.state_dict()
    if _is_state_dict(found):
        return key or "", found
    if isinstance(found, Mapping):
        places = [name for name, value in found.items() if isinstance(value, SavedModule) or _is_state_dict(value)]
        if len(places) == 1:
            return _find_state_dict(found, str(places[0]))
        raise CheckpointError(
            f"the file holds {len(places)} state dicts ({', '.join(map(str, places)) or 'none'}) among: "
            f"{', '.join(map(str, found))}. Say which with key="
        )
    if isinstance(found, QTensor):
        return "", {"tensor": found}
    raise CheckpointError(f"the file holds a {type(found).__name__}, not a state dict")


def _is_state_dict(value: Any) -> bool:
    """A dict of names to tensors; nested dicts are what a training checkpoint has beside it."""
    return (
        isinstance(value, Mapping)
        and all(isinstance(name, str) for name in value)
        and any(isinstance(part, (Tensor, PackedParams)) for part in value.values())
        and not any(isinstance(part, (Mapping, list)) for part in value.values())
    )
