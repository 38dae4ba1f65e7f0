"""Observers that clip the range by another rule than :class:`HistogramObserver`: percentile, entropy, squared error.

They count into the same histogram, which streams: memory does not grow with the data, and any shapes may follow
each other.

May import: ``grid``, ``dtypes``, ``ops.histogram``, ``observers.histogram``.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zeropoint.ao.quantization.observers.histogram import HistogramObserver
from zeropoint.ops.histogram import clipping_error

__all__ = ["EntropyObserver", "MSEObserver", "PercentileObserver"]


class _Clipping(HistogramObserver):
    """A histogram observer whose range is ``_edges`` of its histogram. Its grid is made on the host."""

    def clipping_range(self) -> tuple[Tensor, Tensor]:
        """The range that the grid covers: 0-d float32 tensors inside ``[min_val, max_val]``."""
        low, high = float(self.min_val), float(self.max_val)
        counts = self.histogram.to("cpu", torch.float64).numpy()
        if not low < high or not counts.sum() > 0:
            return self.min_val, self.max_val
        clipped_low, clipped_high = self._edges(counts, low, high)
        ends = (max(low, clipped_low), min(high, clipped_high))
        return torch.full_like(self.min_val, ends[0]), torch.full_like(self.max_val, ends[1])

    @abstractmethod
    def _edges(self, counts: NDArray[np.float64], low: float, high: float) -> tuple[float, float]: ...

    @property
    def levels(self) -> int:
        """How many codes the grid has."""
        return self.quant_max - self.quant_min + 1


class PercentileObserver(_Clipping):
    """Clips the rarest values at both ends.

    Args:
        percentile: in (50, 100]: the range reaches from the ``100 - percentile``-th to the ``percentile``-th
            percentile, interpolated inside a bin; 100 clips nothing.
        kwargs: as :class:`HistogramObserver`.

    Raises:
        ValueError: another percentile.
    """

    def __init__(self, percentile: float = 99.99, **kwargs: Any) -> None:
        if not 50.0 < percentile <= 100.0:
            raise ValueError(f"{type(self).__name__}: percentile must lie in (50, 100], got {percentile}")
        super().__init__(**kwargs)
        self.percentile = percentile

    def _edges(self, counts: NDArray[np.float64], low: float, high: float) -> tuple[float, float]:
        cumulative = np.concatenate([[0.0], np.cumsum(counts)]) / counts.sum()
        # np.interp wants rising positions: an empty bin's edge keeps the side that lies inside the data
        edges = np.linspace(low, high, counts.size + 1)
        below, first = np.unique(cumulative[::-1], return_index=True)
        above, last = np.unique(cumulative, return_index=True)
        tail = 1.0 - self.percentile / 100.0
        return float(np.interp(tail, below, edges[::-1][first])), float(np.interp(1.0 - tail, above, edges[last]))


class EntropyObserver(_Clipping):
    """Clips where the quantized distribution tells least apart from the observed one (Kullback-Leibler divergence).

    The candidates are symmetric thresholds ``[-t, t]``, cut to what was seen, as in S. Migacz, "8-bit inference with
    TensorRT" (GTC 2017): values beyond the threshold are counted at its edge in the reference, and the counts inside
    are pooled into as many groups as there are codes and spread evenly over their non-empty bins again.

    Args:
        candidates: how many thresholds are tried.
        kwargs: as :class:`HistogramObserver`.
    """

    def __init__(self, candidates: int = 128, **kwargs: Any) -> None:
        if candidates < 1:
            raise ValueError(f"{type(self).__name__}: candidates must be at least 1, got {candidates}")
        super().__init__(**kwargs)
        self.candidates = candidates

    def _edges(self, counts: NDArray[np.float64], low: float, high: float) -> tuple[float, float]:
        bins = counts.size
        width = (high - low) / bins
        best, best_range = np.inf, (low, high)
        reach = max(-low, high)
        for threshold in np.linspace(reach, 0.0, self.candidates, endpoint=False):
            start = max(0, int(np.floor((-threshold - low) / width)))
            stop = min(bins, int(np.ceil((threshold - low) / width)))
            if stop - start < min(self.levels, bins):
                break
            divergence = _divergence(counts, start, stop, self.levels)
            if divergence < best:
                best, best_range = divergence, (low + start * width, low + stop * width)
        return best_range


def _divergence(counts: NDArray[np.float64], start: int, stop: int, levels: int) -> float:
    """KL(reference || quantized) of the bins ``start`` … ``stop - 1``, in nats; an empty bin counts half."""
    inside = counts[start:stop]
    reference = inside.copy()
    reference[0] += counts[:start].sum()
    reference[-1] += counts[stop:].sum()
    group = np.arange(inside.size) * min(levels, inside.size) // inside.size
    filled = reference > 0
    mass = np.bincount(group, weights=inside)
    share = np.bincount(group, weights=filled.astype(np.float64))
    quantized = np.maximum(mass[group] / np.maximum(share[group], 1.0), 0.5)[filled]
    p, q = reference[filled] / reference.sum(), quantized / quantized.sum()
    return float(np.sum(p * np.log(p / q)))


class MSEObserver(_Clipping):
    """Clips where the mean squared error over the histogram is smallest.

    Starting from the whole range, it moves one end at a time to the best of ``candidates`` places between 0 and where
    the end was, until neither end gains. The error is that of the grid that results, zero included.

    Args:
        candidates: places tried for an end in each round.
        kwargs: as :class:`HistogramObserver`.
    """

    def __init__(self, candidates: int = 64, **kwargs: Any) -> None:
        if candidates < 1:
            raise ValueError(f"{type(self).__name__}: candidates must be at least 1, got {candidates}")
        super().__init__(**kwargs)
        self.candidates = candidates

    def _edges(self, counts: NDArray[np.float64], low: float, high: float) -> tuple[float, float]:
        bins = counts.size
        width = (high - low) / bins
        ends = [min(low, 0.0), max(high, 0.0)]
        if self.qscheme.is_symmetric:
            reach = max(-ends[0], ends[1])
            ends = [-reach, reach]

        def error(ends: list[float]) -> float:
            return clipping_error(counts, (ends[0] - low) / width, (ends[1] - low) / width - 1.0, self.levels)

        fractions = np.arange(self.candidates, 0, -1) / self.candidates
        best = error(ends)
        for _ in range(8):
            before = best
            for side in (None,) if self.qscheme.is_symmetric else (0, 1):
                trials = [[e * f if side in (None, i) else e for i, e in enumerate(ends)] for f in fractions]
                errors = [error(trial) if trial[0] < trial[1] else np.inf for trial in trials]
                chosen = int(np.argmin(errors))
                if errors[chosen] < best:
                    best, ends = errors[chosen], trials[chosen]
            if best == before:
                break
        return ends[0], ends[1]
