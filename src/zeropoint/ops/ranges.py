"""Ranges of tensors: smallest and largest finite values, and their averages over batches.

Nothing here looks at a value on the host. May import: torch only.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["channels_first", "finite_extremes", "moving_average", "narrow"]

_FLOAT32_MAX = torch.finfo(torch.float32).max


def channels_first(x: Tensor, axis: int | None) -> Tensor:
    """``x`` as rows: one row in all, or one for each slice along ``axis``."""
    return x.reshape(1, -1) if axis is None else x.movedim(axis, 0).reshape(x.shape[axis], -1)


def finite_extremes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest finite value along the last dimension; (+inf, -inf) where there is none."""
    finite = torch.isfinite(rows)
    return torch.where(finite, rows, float("inf")).amin(-1), torch.where(finite, rows, float("-inf")).amax(-1)


def narrow(ends: Tensor) -> Tensor:
    """Ends of a range as float32: finite float64 values beyond it become its largest, infinities stay."""
    if ends.dtype == torch.float64:
        ends = torch.where(torch.isfinite(ends), ends.clamp(-_FLOAT32_MAX, _FLOAT32_MAX), ends)
    return ends.to(torch.float32)


def moving_average(old: Tensor, new: Tensor, constant: float) -> Tensor:
    """``old + constant * (new - old)``; an infinite ``old`` is "nothing yet", an infinite ``new`` "nothing now"."""
    moved = old + constant * (new - old)
    # new - old may leave float32 where the average itself does not
    moved = torch.where(torch.isfinite(moved), moved, (1.0 - constant) * old + constant * new)
    return torch.where(torch.isinf(old), new, torch.where(torch.isinf(new), old, moved))
