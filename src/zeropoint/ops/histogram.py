"""Histograms of calibration: counting into them, laying them over a wider range, and searching a clipping range.

The two operators hide what depends on values (is the range wider now? does the error still fall?) from graph capture,
so that a model with histogram observers can be exported and compiled.

May import: ``ops.registry``.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zeropoint.ops.registry import operator

__all__ = ["clipping_error", "count", "redistribute", "search_clipping_range"]

_PARTS = 16  # pieces of an old bin, each of which moves to a new bin as a whole
_QUANTILES = np.add.accumulate(np.full(100_000, 1e-5))
_UPPER_QUANTILES = 1.0 - _QUANTILES
_RISING = -_UPPER_QUANTILES
_FLOAT32_MAX = torch.finfo(torch.float32).max


def count(x: Tensor, bins: int, low: float, high: float) -> Tensor:
    """How many values of ``x`` fall in each of ``bins`` equal bins over ``[low, high]``, as float64.

    A range of one value gets bins of its own around it.
    """
    values = x.reshape(-1).to(torch.float32).clamp(-_FLOAT32_MAX, _FLOAT32_MAX)
    span = high - low
    if 0.0 < span < 1e-30 or span > 1e38:  # bin widths that float32 cannot hold
        values = values.to(torch.float64)
    if span == 0.0:
        counts = torch.zeros(bins, dtype=torch.float64, device=x.device)
        counts[bins // 2] = values.numel()
        return counts
    return torch.histc(values, bins, min=low, max=high).to(torch.float64)


def redistribute(counts: Tensor, low: float, high: float, new_low: float, new_high: float) -> Tensor:
    """The same counts over the wider range ``[new_low, new_high]``.

    Each bin is cut in 16 pieces that move by their midpoints, so the memory needed is 16 numbers a bin, however
    much wider the new range is. The total stays the same.
    """
    bins = counts.numel()
    if (low, high) == (new_low, new_high):
        return counts
    index = torch.arange(bins * _PARTS, dtype=torch.float64, device=counts.device)
    middle = low + (index + 0.5) * ((high - low) / (bins * _PARTS))
    place = torch.floor((middle - new_low) / (new_high - new_low) * bins).clamp_(0, bins - 1).to(torch.int64)
    pieces = (counts / _PARTS).repeat_interleave(_PARTS)
    return torch.zeros_like(counts).scatter_add_(0, place, pieces)


@operator(
    "histogram_observe(Tensor x, Tensor(a!) histogram, Tensor(b!) min_val, Tensor(c!) max_val) -> Tensor",
    meta=lambda x, histogram, min_val, max_val: histogram.new_empty((), dtype=torch.int64),
)
def histogram_observe_reference(x: Tensor, histogram: Tensor, min_val: Tensor, max_val: Tensor) -> Tensor:
    """Counts the finite values of ``x`` into ``histogram``, which is laid over a wider range first if need be.

    Returns:
        How many values were not finite, as a 0-d int64 tensor.
    """
    values = x.reshape(-1)
    low, high = _range(values)
    if not (math.isfinite(low) and math.isfinite(high)):
        values = values[torch.isfinite(values)]
        low, high = _range(values)
    ignored = histogram.new_tensor(x.numel() - values.numel(), dtype=torch.int64)
    if values.numel() == 0:
        return ignored
    old_low, old_high = float(min_val), float(max_val)
    if old_low > old_high:  # nothing seen yet
        old_low, old_high = low, high
    new_low, new_high = min(low, old_low), max(high, old_high)
    old = redistribute(histogram, old_low, old_high, new_low, new_high)
    histogram.copy_(old + count(values, histogram.numel(), new_low, new_high).to(histogram.device))
    min_val.fill_(new_low)
    max_val.fill_(new_high)
    return ignored


def _range(values: Tensor) -> tuple[float, float]:
    """Smallest and largest value as float32 numbers; float64 values beyond float32 count as its ends."""
    if values.numel() == 0:
        return 0.0, 0.0
    ends = [float(end) for end in torch.aminmax(values)]
    low, high = (float(np.float32(np.clip(v, -_FLOAT32_MAX, _FLOAT32_MAX))) if math.isfinite(v) else v for v in ends)
    return low, high


def clipping_error(counts: NDArray[np.float64], start: float, stop: float, cells: int) -> float:
    """The squared error, in squared bin widths, of quantizing to ``cells`` cells over the bins ``start`` … ``stop``.

    Values are spread evenly in their bin and go to the centre of the nearest cell; those outside go to the edge cells.
    The squared distance is integrated in closed form at each bin's two edges.
    """
    width = (stop - start + 1) / cells
    edges = (np.arange(counts.size + 1) - start) / width
    cell = np.clip(np.floor(edges), 0, cells - 1)
    offset = edges - cell - 0.5
    integral = cell / 12.0 + offset * offset * offset / 3.0
    return float(np.dot(np.diff(integral), counts) * width**3)


def search_clipping_range(counts: NDArray[np.float64], cells: int) -> tuple[int, int]:
    """The first and last bin of the range that quantizes the counts with a small squared error.

    From both ends, the range shrinks by quantile steps of 1e-5, each time at the end that would drop more bins, until
    the error grows: the search of Caffe2's "norm minimization", of which only the steps that drop a bin are made.
    """
    cumulative = np.cumsum(counts)
    total = cumulative[-1]
    start, stop, low_step, high_step = 0, counts.size - 1, 0, 0
    best = math.inf
    while total > 0.0 and start < stop and low_step + high_step < _QUANTILES.size:
        left = int(np.searchsorted(cumulative, _QUANTILES[low_step] * total, side="left"))
        right = int(np.searchsorted(cumulative, _UPPER_QUANTILES[high_step] * total, side="right")) - 1
        left, right = min(max(left, start), stop), max(min(right, stop), start)
        if left - start > stop - right:
            candidate, low_step = (left, stop), low_step + 1
        else:
            candidate, high_step = (start, right), high_step + 1
        if candidate == (start, stop):
            # The left end waits until the right end has moved: on to the step at which that happens.
            ahead = np.searchsorted(_RISING, -cumulative[stop] / total, side="right")
            high_step = max(high_step, int(ahead))
            continue
        error = clipping_error(counts, *candidate, cells)
        if error > best:
            break
        best = error
        start, stop = candidate
    return start, stop


@operator(
    "histogram_clip(Tensor histogram, Tensor min_val, Tensor max_val, int cells) -> (Tensor, Tensor)",
    meta=lambda histogram, min_val, max_val, cells: (torch.empty_like(min_val), torch.empty_like(max_val)),
)
def histogram_clip_reference(histogram: Tensor, min_val: Tensor, max_val: Tensor, cells: int) -> tuple[Tensor, Tensor]:
    """The clipping range that :func:`search_clipping_range` finds, as real values."""
    low, high = float(min_val), float(max_val)
    if not low < high:  # one value, or nothing seen
        return min_val.clone(), max_val.clone()
    start, stop = search_clipping_range(histogram.detach().to("cpu", torch.float64).numpy(), cells)
    width = (high - low) / histogram.numel()
    return torch.full_like(min_val, low + width * start), torch.full_like(max_val, low + width * (stop + 1))
