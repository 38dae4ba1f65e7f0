"""Real networks: found in ``examples/networks``, with weights from installed packages, or skipped."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from zeropoint import ops

EXAMPLES = Path(__file__).parents[2] / "examples"
CURE = "pip install --no-deps -r examples/requirements.txt"


@pytest.fixture(scope="session", autouse=True)
def _examples_on_the_path() -> Iterator[None]:
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="session")
def example(_examples_on_the_path: None) -> Callable[..., Any]:
    """``example(module, function, *arguments)`` of ``examples``; a missing package skips the test, by name."""

    def call(module: str, function: str, *arguments: Any, **named: Any) -> Any:
        try:
            return getattr(importlib.import_module(module), function)(*arguments, **named)
        except ModuleNotFoundError as error:
            pytest.skip(f"{error}: {CURE}")

    return call


class ReferenceBackend(TorchDispatchMode):
    """Runs the reference of every zeropoint operator, whatever is registered for the device."""

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


@pytest.fixture
def reference_backend() -> ReferenceBackend:
    return ReferenceBackend()
