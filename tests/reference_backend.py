"""Runs the reference of every operator, whatever is registered for the device."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from zeropoint import ops


class ReferenceBackend(TorchDispatchMode):
    """Inside this context, operators of this package compute by their reference."""

    def __init__(self) -> None:
        super().__init__()
        families = [value for value in vars(ops).values() if isinstance(value, ModuleType)]
        self.references = {
            name.removesuffix("_reference"): function
            for family in families
            for name, function in vars(family).items()
            if name.endswith("_reference")
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "zeropoint":
            return self.references[func._schema.name.removeprefix("zeropoint::")](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
