"""The histogram observer: counts values, and clips the range where that lowers the squared error.

May import: ``dtypes``, ``grid``, ``ops.histogram``, ``observers.base``, ``observers.minmax``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeropoint import grid
from zeropoint.ao.quantization.observers.minmax import MinMaxObserver
from zeropoint.dtypes import per_tensor_affine, quint8

__all__ = ["HistogramObserver"]


class HistogramObserver(MinMaxObserver):
    """A histogram of everything seen; its grid covers the part of the range that costs the least squared error.

    When a tensor widens the range, each old bin's count moves to the new bins in sixteen pieces. The search shrinks
    the range from both ends by small quantiles until the error, integrated over the source bins, grows.

    Args:
        bins: how many bins.
        dtype, qscheme, reduce_range, quant_min, quant_max, factory_kwargs, eps: see :class:`MinMaxObserver`.
        is_dynamic: must be False.

    Attributes:
        histogram: float64 buffer of shape [bins], so that counts beyond 2**24 still grow by one.
        min_val, max_val: float32 buffers, the ends of the histogram.
    """

    histogram: Tensor

    def __init__(
        self,
        bins: int = 2048,
        dtype: Any = quint8,
        qscheme: Any = per_tensor_affine,
        reduce_range: bool = False,
        quant_min: int | None = None,
        quant_max: int | None = None,
        factory_kwargs: dict[str, Any] | None = None,
        eps: float = grid.DEFAULT_EPS,
        is_dynamic: bool = False,
    ) -> None:
        name = type(self).__name__
        if is_dynamic:
            raise ValueError(f"{name} collects data over many calls, which a dynamic grid would not use")
        if bins < 1:
            raise ValueError(f"{name}: bins must be at least 1, got {bins}")
        super().__init__(dtype, qscheme, reduce_range, quant_min, quant_max, factory_kwargs, eps, is_dynamic)
        self.bins = bins
        self.dst_nbins = 2 ** (8 * self.qdtype.itemsize)
        self.register_buffer("histogram", torch.zeros(bins, dtype=torch.float64, device=self._device))

    def forward(self, x: Tensor) -> Tensor:
        """Counts the finite values of ``x``; an empty ``x`` changes nothing. Returns ``x``."""
        self._refuse_capture()
        if x.numel() > 0:
            values = x.detach() if x.is_floating_point() else x.detach().to(torch.float32)
            ignored = torch.ops.zeropoint.histogram_observe.default(values, self.histogram, self.min_val, self.max_val)
            if not torch.compiler.is_compiling() and bool(ignored):
                self._warn_non_finite()
        return x

    def clipping_range(self) -> tuple[Tensor, Tensor]:
        """The range that the grid covers: 0-d float32 tensors inside ``[min_val, max_val]``."""
        clip = torch.ops.zeropoint.histogram_clip.default
        low, high = clip(self.histogram, self.min_val, self.max_val, self.dst_nbins)
        return low, high

    def _current_qparams(self) -> tuple[Tensor, Tensor]:
        return self._calculate_qparams(*self.clipping_range())

    def reset(self) -> None:
        """Forgets the range and the counts."""
        super().reset()
        self.histogram.zero_()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        counts = state_dict.get(prefix + "histogram")
        if counts is not None and counts.shape != self.histogram.shape and counts.dim() == 1 and counts.numel() > 0:
            self.histogram = self.histogram.new_empty(counts.shape)
            self.bins = counts.numel()
        super()._load_from_state_dict(state_dict, prefix, *args)
