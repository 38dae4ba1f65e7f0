"""What a checkpoint holds besides tensors, as inert objects: nothing here ever runs code from a file.

May import: ``tensor``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["CheckpointError", "PackedParams", "Record", "SavedModule", "module_state"]


class CheckpointError(ValueError):
    """A file that cannot be read: damaged, inconsistent, or holding what this reader refuses. The text says which.

    Attributes:
        unknown_class: the class that the file refers to and ``allow`` does not name, where that is the reason.
    """

    unknown_class: str | None = None


@dataclass(eq=False)
class Record:
    """An object of a class that the reader knows by name only.

    Attributes:
        name: module and class, as the file spells them.
        args: what the file would have called the class with.
        state: what the file would have set as the object's state, or None.
    """

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


@dataclass(eq=False, repr=False)
class PackedParams(Record):
    """The packed parameters of a ``torch.ao`` module, as the file stores them: unpacked.

    ``state`` is a pair of the parameters and the name of torch's class.
    """

    @property
    def kind(self) -> str:
        """``LinearPackedParamsBase``, ``CellParamsBase``, ``EmbeddingPackedParamsBase`` …, or "" if there is none."""
        return self.state[1].rpartition(".")[2] if self._is_whole() else ""

    @property
    def contents(self) -> tuple[Any, ...]:
        """The parameters in torch's order.

        Raises:
            CheckpointError: the file gave the object no parameters.
        """
        if not self._is_whole():
            raise CheckpointError("packed parameters without contents: the file is damaged")
        return cast("tuple[Any, ...]", self.state[0])

    def _is_whole(self) -> bool:
        return (
            isinstance(self.state, tuple)
            and len(self.state) == 2
            and isinstance(self.state[0], tuple)
            and isinstance(self.state[1], str)
        )

    def weight_bias(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a Linear or an Embedding (which has no bias)."""
        contents = self.contents
        if self.kind == "LinearPackedParamsBase" and len(contents) == 2 and isinstance(contents[0], Tensor):
            bias = contents[1]
            if bias is None or isinstance(bias, Tensor):
                return contents[0], bias
        if self.kind == "EmbeddingPackedParamsBase" and len(contents) == 5:
            tensors = contents[1]
            if isinstance(tensors, list) and len(tensors) == 1 and isinstance(tensors[0], Tensor):
                return tensors[0], None
        raise CheckpointError(
            f"packed parameters {self.kind or '(unnamed)'!r} hold no weight and bias in a known layout"
        )

    def cell(self) -> dict[str, Any]:
        """The parameters of one direction of one LSTM or GRU layer.

        Returns:
            ``weight_ih`` and ``weight_hh`` (quantized, or float16 where the module was made with that dtype),
            ``bias_ih`` and ``bias_hh``.
        """
        contents = self.contents
        if (
            self.kind == "CellParamsBase"
            and len(contents) == 5
            and isinstance(contents[0], str)
            and contents[0] in ("quantized_dynamic", "quantized_fp16")
        ):
            tensors, packed = contents[1], contents[4]
            if isinstance(packed, list) and len(packed) == 2 and all(isinstance(part, PackedParams) for part in packed):
                (weight_ih, bias_ih), (weight_hh, bias_hh) = (part.weight_bias() for part in packed)
                if isinstance(tensors, list) and len(tensors) == 2:
                    bias_ih, bias_hh = tensors
                biases = {"bias_ih": bias_ih, "bias_hh": bias_hh}
                return {"weight_ih": weight_ih, "weight_hh": weight_hh, **biases}
        raise CheckpointError(
            f"packed parameters {self.kind or '(unnamed)'!r} hold no recurrent layer in a known layout"
        )


@dataclass(eq=False, repr=False)
class SavedModule(Record):
    """A module of a file that holds a whole model, read without making the model.

    Example:
        ``record.state_dict()`` is what ``model.state_dict()`` was where the file was written; load it into a model
        of this package that has the same layers.
    """

    _extra: dict[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the saved model, in ``torch.ao``'s layout for its quantized modules."""
        return dict(module_state(self, ""))


_CONV_STATE = 15  # in_channels, out_channels, …, weight, bias, scale, zero_point, training
_ATTRIBUTES = ("scale", "zero_point", "param", "_packed_weight_ih", "_packed_weight_hh")
"""What ``torch.ao``'s modules keep as plain attributes and write to their state dicts."""


def _as_saved(value: Any) -> Any:
    """Scales and zero points are numbers in a module and tensors in its state dict."""
    return torch.tensor(value) if type(value) in (int, float) and abs(value) < 2**62 else value


def module_state(record: Record, prefix: str, _depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The entries of a saved module's state dict, as (name, value) pairs."""
    if _depth > 100:
        raise CheckpointError("modules nested more than 100 deep")
    state = record.state
    if isinstance(state, tuple) and len(state) == _CONV_STATE and "conv" in record.name.lower():
        for name, value in zip(("weight", "bias", "scale", "zero_point"), state[10:14], strict=True):
            if value is not None:
                yield f"{prefix}{name}", _as_saved(value)
        return
    if not isinstance(state, dict):
        return
    transient = state.get("_non_persistent_buffers_set")
    transient = transient if isinstance(transient, set) else set()
    for group in ("_parameters", "_buffers"):
        entries = state.get(group)
        for name, value in entries.items() if isinstance(entries, dict) else ():
            if value is not None and name not in transient:
                yield f"{prefix}{name}", value
    for name in _ATTRIBUTES:
        if name in state and ".quantized." in record.name:
            yield f"{prefix}{name}", _as_saved(state[name])
    for name in ("_packed_params", "_packed_weight"):
        packed = state.get(name)
        if isinstance(packed, PackedParams):
            weight, bias = packed.weight_bias()
            yield f"{prefix}dtype", state.get("dtype")
            yield f"{prefix}{name}", (weight, bias) if name == "_packed_params" else weight
    children = state.get("_modules")
    for name, child in children.items() if isinstance(children, dict) else ():
        if isinstance(child, Record):
            yield from module_state(child, f"{prefix}{name}.", _depth + 1)
