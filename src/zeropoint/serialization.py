"""Whole quantized modules under ``torch.load(..., weights_only=True)``.

A state dict needs nothing of this: it holds plain tensors. A whole module is an object of its class, and torch's
restricted loader makes only objects of classes that it was told of.

May import: every module of the package that defines what a model may hold.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from zeropoint import dtypes

__all__ = ["add_safe_globals", "package_globals", "safe_globals"]

_PACKAGES: Final = ("zeropoint.ao.nn", "zeropoint.ao.quantization", "zeropoint.nn", "zeropoint.analysis")
_HOMES: Final = ("zeropoint.", "torch.nn.modules.")
_PARTS: Final = (
    "zeropoint.ao.quantization.observers.base._PartialWrapper",
    "zeropoint.ao.quantization.qconfig.QConfig",
    "zeropoint.ao.quantization._checks.refuse_codes_in_float",
    "zeropoint.ao.quantization.quantize._begin_pass",
    "zeropoint.ao.quantization.quantize._end_pass",
    "zeropoint.ao.quantization.quantize._note_dtype",
    "zeropoint.ao.quantization.quantize._observe_input",
    "zeropoint.ao.quantization.quantize._observe_output",
    "zeropoint.ao.quantization.summary.ModuleRecord",
    "zeropoint.ao.quantization.summary.QuantizationSummary",
)
"""What a model holds besides modules: qconfigs, hooks, the summary of a conversion."""


@contextmanager
def safe_globals(extra: Iterable[Callable[..., Any]] = ()) -> Iterator[None]:
    """While it lasts, ``torch.load(..., weights_only=True)`` reads whole models of this package's modules.

    Args:
        extra: further classes, such as the model's own.

    Example:
        >>> import io, torch, zeropoint as zp
        >>> from zeropoint.ao.quantization import quantize_dynamic
        >>> model = quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(4, 2)))
        >>> file = io.BytesIO()
        >>> torch.save(model, file)
        >>> with zp.serialization.safe_globals():
        ...     loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        >>> torch.equal(loaded(torch.ones(1, 4)), model(torch.ones(1, 4)))
        True
    """
    with torch.serialization.safe_globals([*package_globals(), *extra]):
        yield


def add_safe_globals(extra: Iterable[Callable[..., Any]] = ()) -> None:
    """As :func:`safe_globals`, from now on.

    Args:
        extra: further classes, such as the model's own.
    """
    torch.serialization.add_safe_globals([*package_globals(), *extra])


@functools.cache
def package_globals() -> tuple[Any, ...]:
    """What files of whole models refer to: module classes of this package and of ``torch.nn``, dtypes, qconfigs."""
    found: dict[str, Any] = {}
    for module in (nn, *_modules()):
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__.startswith(_HOMES):
                found[f"{value.__module__}.{value.__qualname__}"] = value
    for name in _PARTS:
        module_name, _, attribute = name.rpartition(".")
        found[name] = getattr(importlib.import_module(module_name), attribute)
    named = [(qdtype, f"zeropoint.dtypes.{qdtype.name}") for qdtype in (dtypes.qint8, dtypes.quint8, dtypes.qint32)]
    return (*found.values(), dtypes.QScheme, functools.partial, set, *named)


def _modules() -> Iterator[Any]:
    """Every module of the packages that define what a model is made of."""
    for package in _PACKAGES:
        root = importlib.import_module(package)
        yield root
        for module in pkgutil.walk_packages(root.__path__, f"{package}."):
            yield importlib.import_module(module.name)
