"""Calibration data as batches, and a progress bar where one can be had.

May import: torch only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["as_batches", "call", "first_tensor", "run", "with_progress"]

_T = TypeVar("_T")


def as_batches(data: Any) -> list[Any]:
    """The batches of ``data``: a tensor or a dict is one batch; anything else is gone through once and kept.

    Raises:
        TypeError: data that cannot be gone through. ValueError: no batch.
    """
    if isinstance(data, (Tensor, Mapping)):
        batches: list[Any] = [data]
    elif isinstance(data, Iterable) and not isinstance(data, (str, bytes)):
        batches = list(data)
    else:
        raise TypeError(
            f"data must be a tensor, a dict of named arguments or an iterable of batches, got {type(data).__name__}"
        )
    if not batches:
        raise ValueError("data has no batch: calibration and comparison need at least one")
    return batches


def call(model: Any, batch: Any) -> Any:
    """The model on one batch: a tensor, a tuple or list of arguments, or a dict of named ones."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def run(model: nn.Module, batches: Iterable[Any]) -> list[Any]:
    """What the model returns for each batch, without gradients."""
    with torch.no_grad():
        return [call(model, batch) for batch in batches]


def first_tensor(output: Any) -> Tensor:
    """The first tensor in what a model returned, dequantized.

    Raises:
        TypeError: there is none.
    """
    if isinstance(output, Tensor):
        return output.dequantize() if output.is_quantized else output
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    for part in parts:
        if isinstance(part, (Tensor, tuple, list, Mapping)):
            return first_tensor(part)
    raise TypeError(f"the model must return a tensor, or a tuple or dict that holds one, got {type(output).__name__}")


def with_progress(items: Sequence[_T], what: str, shown: bool) -> Iterator[_T]:
    """Goes through ``items`` behind a progress bar, if it is wanted and tqdm or rich is installed."""
    bar = _bar(items, what) if shown else None
    yield from items if bar is None else bar


def _bar(items: Sequence[_T], what: str) -> Iterable[_T] | None:
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped]
    except ImportError:
        pass
    else:
        return tqdm(items, desc=what, leave=False)  # type: ignore[no-any-return]
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return None
    return track(items, what, console=Console(stderr=True), transient=True)
