"""Which quantized class takes the place of which float class.

Every quantized class says so itself, with a decorator above it; the mappings of ``zeropoint.ao.quantization`` are
built from these tables.

May import: torch only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

__all__ = [
    "DYNAMIC",
    "OBSERVED",
    "QAT",
    "STATIC",
    "converts_to",
    "dynamic_twin_of",
    "observed_twin_of",
    "qat_twin_of",
    "static_twin_of",
]

Twins = dict[type[nn.Module], type[nn.Module]]
_C = TypeVar("_C", bound=type[nn.Module])

STATIC: Twins = {}
"""Float or QAT class → class that computes on quantized tensors."""

DYNAMIC: Twins = {}
"""Float class → class that quantizes its input on every call."""

QAT: Twins = {}
"""Float class → class that simulates quantized weights while it trains."""

OBSERVED: Twins = {}
"""Float class → float class in parts that can be observed, which ``prepare`` puts in its place."""


def _registrar(table: Twins, sources: tuple[type[nn.Module], ...]) -> Callable[[_C], _C]:
    def register(twin: _C) -> _C:
        for source in sources:
            table[source] = twin
        return twin

    return register


def static_twin_of(*sources: type[nn.Module]) -> Callable[[_C], _C]:
    """Class decorator: ``convert`` swaps modules of these classes for the decorated class."""
    return _registrar(STATIC, sources)


def dynamic_twin_of(*sources: type[nn.Module]) -> Callable[[_C], _C]:
    """Class decorator: ``quantize_dynamic`` swaps modules of these classes for the decorated class."""
    return _registrar(DYNAMIC, sources)


def qat_twin_of(*sources: type[nn.Module]) -> Callable[[_C], _C]:
    """Class decorator: ``prepare_qat`` swaps modules of these classes for the decorated class."""
    return _registrar(QAT, sources)


def observed_twin_of(*sources: type[nn.Module]) -> Callable[[_C], _C]:
    """Class decorator: ``prepare`` swaps modules of these classes for the decorated class, and observes its parts."""
    return _registrar(OBSERVED, sources)


def converts_to(twin: type[nn.Module]) -> Callable[[_C], _C]:
    """Class decorator, for classes that know their quantized twin: ``convert`` swaps the decorated class for it."""

    def register(source: _C) -> _C:
        STATIC[source] = twin
        return source

    return register
