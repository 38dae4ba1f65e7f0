"""Quantized models as safetensors: plain tensors, and the facts about them as JSON in the metadata.

A file holds codes as int8, uint8 or int32 tensors with their scales and zero points beside them, under the names that a
state dict of this package has; any reader of safetensors can read it. Nothing in it is ever executed.

May import: ``dtypes``, ``files``, ``tensor``, ``_records``.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from zeropoint.checkpoint._records import CheckpointError
from zeropoint.dtypes import as_qdtype
from zeropoint.files import write_bytes
from zeropoint.tensor import QTensor

__all__ = ["load_file", "read_facts", "read_metadata", "save_file"]

_KEY: Final = "zeropoint"
_FORMAT: Final = 1
_PLAIN_VALUES: Final = (bool, int, float, str, type(None))


def save_file(
    model: nn.Module | Mapping[str, Any],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a model's state, or a state dict, as safetensors.

    Quantized tensors are written as codes, with ``<name>_scale`` and ``<name>_zero_point`` beside them. Tensors that
    are one tensor under several names (tied weights) are written once, and are one tensor again after loading. The file
    is written whole or not at all.

    Args:
        model: module, or state dict: names → tensors, quantized tensors, numbers, texts.
        path: the file to write.
        metadata: texts to keep in the file as well.

    Raises:
        ImportError: the package ``safetensors`` is not installed.
        TypeError: a value of another kind, or metadata that is no text.
        ValueError: two entries that would have one name.
        OSError: the file cannot be written; nothing is left behind.

    Example:
        >>> import os, tempfile, torch, zeropoint as zp
        >>> path = os.path.join(tempfile.mkdtemp(), "weights.safetensors")
        >>> zp.checkpoint.save_file({"w": zp.quantize_per_tensor(torch.ones(2), 0.5, 3, zp.quint8)}, path)
        >>> zp.checkpoint.load_file(path)["w"].q_zero_point()
        3
    """
    from_torch = _library()
    state = model.state_dict() if isinstance(model, nn.Module) else model
    tensors, facts = _take_apart(state)
    if isinstance(model, nn.Module):
        facts["modules"] = _describe(model)
    texts = dict(metadata or {})
    if _KEY in texts or not all(isinstance(text, str) for pair in texts.items() for text in pair):
        raise TypeError(f"metadata maps texts to texts, and {_KEY!r} is taken")
    write_bytes(path, from_torch.save(tensors, {"format": "pt", **texts, _KEY: json.dumps(facts)}))


def load_file(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> OrderedDict[str, Any]:
    """Reads a state dict that :func:`save_file` wrote, or any other safetensors file.

    Args:
        path: the file.
        device: where the tensors go.

    Returns:
        A state dict for ``load_state_dict``.

    Raises:
        ImportError: the package ``safetensors`` is not installed.
        CheckpointError: the file is damaged.
    """
    tensors, facts = _read(path, str(device))
    return _put_together(tensors, facts)


def read_facts(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a file says of itself, without its tensors.

    Returns:
        ``tensors``: the grids of quantized tensors; ``modules``: class and arguments of every quantized module;
        ``aliases``: names of tensors that are written under another name. Empty for a file of another program.

    Raises:
        CheckpointError: the file is damaged.
    """
    with _opened(path, "cpu") as file:
        return _facts(file.metadata())


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The texts that a file has beside its tensors, :func:`save_file`'s ``metadata`` among them.

    Raises:
        CheckpointError: the file is damaged.
    """
    with _opened(path, "cpu") as file:
        return dict(file.metadata() or {})


# --- writing ------------------------------------------------------------------------------------------------------


def _library() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("this needs the package safetensors: pip install safetensors") from error
    return safetensors.torch


def _take_apart(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Plain contiguous tensors of storages of their own, and the facts that bring them back."""
    tensors: dict[str, Tensor] = {}
    grids: dict[str, Any] = {}
    values: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    written: dict[Any, str] = {}

    def write(name: str, tensor: Tensor) -> None:
        if name in tensors:
            raise ValueError(f"{name!r} is both an entry and a part of a quantized one: rename one of them")
        tensors[name] = tensor.detach().contiguous()

    for name, value in state.items():
        if not isinstance(name, str):
            raise TypeError(f"a state dict's names are texts, got {name!r}")
        if isinstance(value, Tensor):
            codes = value.codes() if isinstance(value, QTensor) else value
            first = written.setdefault(_identity(value, codes), name)
            if first != name:
                aliases[name] = first
            elif isinstance(value, QTensor):
                write(name, codes)
                write(
                    f"{name}_scale",
                    torch.as_tensor(value.scale, dtype=None if value.axis is not None else torch.float64),
                )
                write(f"{name}_zero_point", torch.as_tensor(value.zero_point))
                grids[name] = {"dtype": value.qdtype.name, "axis": value.axis}
            else:
                write(name, codes)
        elif isinstance(value, _PLAIN_VALUES):
            values[name] = value
        else:
            raise TypeError(f"{name!r} is a {type(value).__name__}: safetensors hold tensors, numbers and texts")
    versions = getattr(state, "_metadata", None)
    facts = {"format": _FORMAT, "tensors": grids, "values": values, "aliases": aliases, "versions": versions}
    return _apart(tensors), {key: fact for key, fact in facts.items() if fact}


def _identity(value: Tensor, codes: Tensor) -> Any:
    """Equal for names of one tensor. Tensors without elements or data have no address that could tell."""
    if codes.numel() == 0 or codes.is_meta:
        return id(value)
    grid = (str(value.scale), str(value.zero_point), value.axis) if isinstance(value, QTensor) else None
    return codes.data_ptr(), tuple(codes.shape), codes.stride(), codes.dtype, codes.device, grid


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies what lies in a storage that another tensor lies in too: the format knows no overlaps."""
    owners: dict[int, str] = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        if address and (owners.setdefault(address, name) != name or not whole):
            tensors[name] = tensor.clone()
    return tensors


def _describe(model: nn.Module) -> dict[str, Any]:
    """Class and arguments of the quantized modules: what somebody needs who has the file and not the program."""
    return {
        path: {"class": f"{type(module).__module__}.{type(module).__qualname__}", "arguments": module.extra_repr()}
        for path, module in model.named_modules()
        if type(module).__module__.startswith("zeropoint.")
    }


# --- reading ------------------------------------------------------------------------------------------------------


def _opened(path: str | os.PathLike[str], device: str) -> Any:
    _library()
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(os.fspath(path), framework="pt", device=device)
    except SafetensorError as error:
        raise CheckpointError(f"{os.fspath(path)} is no safetensors file, or is damaged: {error}") from error


def _read(path: str | os.PathLike[str], device: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with _opened(path, device) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, _facts(file.metadata())  # noqa: SIM118


def _facts(metadata: Mapping[str, str] | None) -> dict[str, Any]:
    text = (metadata or {}).get(_KEY)
    if text is None:
        return {}
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the file's facts are damaged: {error}") from error
    if not isinstance(facts, dict) or facts.get("format") != _FORMAT:
        raise CheckpointError("the file was written by a later version of zeropoint, or is damaged")
    for part in ("tensors", "values", "aliases"):
        if not isinstance(facts.get(part, {}), dict):
            raise CheckpointError(f"the file's facts are damaged: {part!r} is no table")
    return facts


def _put_together(tensors: dict[str, Tensor], facts: dict[str, Any]) -> OrderedDict[str, Any]:
    state: OrderedDict[str, Any] = OrderedDict(tensors)
    for name, grid in facts.get("tensors", {}).items():
        state[name] = _join(name, grid, state)
    for name, first in facts.get("aliases", {}).items():
        if not isinstance(first, str) or first not in state:
            raise CheckpointError(f"{name!r} should be the same tensor as {first!r}, which is not in the file")
        state[name] = state[first]
    state.update(facts.get("values", {}))
    versions = facts.get("versions")
    if isinstance(versions, dict):
        state._metadata = versions  # type: ignore[attr-defined]  # where nn.Module looks for its modules' versions
    return state


def _join(name: str, grid: Any, state: dict[str, Any]) -> QTensor:
    parts = [state.pop(key, None) for key in (name, f"{name}_scale", f"{name}_zero_point")]
    if not isinstance(grid, dict) or not all(isinstance(part, Tensor) for part in parts):
        raise CheckpointError(f"quantized tensor {name!r} is not whole")
    codes, scale, zero_point = parts
    axis = grid.get("axis")
    try:
        if codes.dtype != as_qdtype(grid.get("dtype")).storage or not (axis is None or type(axis) is int):
            raise CheckpointError(f"quantized tensor {name!r} does not fit its description")
        return QTensor.from_codes(codes, scale, zero_point, axis=axis)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"quantized tensor {name!r}: {error}") from error
