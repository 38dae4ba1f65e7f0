"""Which modules can be fused: found by running a model once.

May import: floors 1 to 4.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from zeropoint.analysis._data import as_batches
from zeropoint.analysis._flow import Flow
from zeropoint.ao.nn.intrinsic import FusedModule
from zeropoint.ao.quantization import get_fuser_method
from zeropoint.ao.quantization.utils import clone_model

__all__ = ["find_fusable"]


def find_fusable(model: nn.Module, data: Any) -> list[list[str]]:
    """Rows of modules to give to ``fuse_modules``: layer and batch norm, with or without rectifier, and the like.

    A row is found where all that a module makes goes into the next one and nowhere else, in one run of the model, and
    each is called once. Rows are as long as they can be.

    Args:
        model: float model in evaluation mode.
        data: a tensor, or batches, of which the first is run.

    Returns:
        ``[["conv", "bn", "relu"], …]``, in the order in which they run; none where the model is fused already.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from zeropoint.analysis import find_fusable
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()).eval()
        >>> find_fusable(model, torch.randn(1, 3, 8, 8))
        [['0', '1', '2']]
    """
    model = clone_model(model)
    for module in model.modules():
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]  # what is written into its input has no maker
    followers: dict[str, str] = {}
    order: list[str] = []
    for first, _, second in Flow(model, as_batches(data)[0], (FusedModule,)).pairs(()):
        followers[first] = second
        order.append(first)
    rows: list[list[str]] = []
    taken: set[str] = set()
    for name in order:
        row = _longest([name, *_chain(followers, name)][:3], model)
        if len(row) > 1 and taken.isdisjoint(row):
            taken.update(row)
            rows.append(row)
    return rows


def _chain(followers: dict[str, str], name: str) -> list[str]:
    chain: list[str] = []
    while len(chain) < 2 and name in followers:
        name = followers[name]
        chain.append(name)
    return chain


def _longest(row: list[str], model: nn.Module) -> list[str]:
    """The longest beginning that something fuses."""
    for length in range(len(row), 1, -1):
        modules = [model.get_submodule(name) for name in row[:length]]
        try:
            get_fuser_method([type(module) for module in modules])(False, *modules)
        except (NotImplementedError, ValueError, TypeError, AttributeError):
            continue
        return row[:length]
    return []
