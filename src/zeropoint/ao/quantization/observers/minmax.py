"""Observers of the smallest and largest value: running or averaged, over the tensor or over each channel.

Nothing here branches on a value while a graph is captured, so a prepared module can be exported and compiled.

May import: ``dtypes``, ``grid``, ``ops.ranges``, ``observers.base``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeropoint import grid
from zeropoint.ao.quantization.observers.base import UniformQuantizationObserverBase
from zeropoint.dtypes import (
    per_channel_affine,
    per_channel_affine_float_qparams,
    per_channel_symmetric,
    per_tensor_affine,
    per_tensor_symmetric,
    quint8,
)
from zeropoint.ops.ranges import channels_first, finite_extremes, moving_average, narrow

__all__ = [
    "AveragingObserver",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "PerChannelMinMaxObserver",
    "RangeObserver",
    "on_host",
]


def check_averaging_constant(value: float, is_dynamic: bool, owner: str) -> float:
    """The weight of the newest batch, in (0, 1].

    Raises:
        ValueError: outside of it, or other than 1 on a grid that is chosen anew at each call.
    """
    if not 0.0 < value <= 1.0:
        raise ValueError(f"{owner}: averaging_constant must lie in (0, 1], got {value}")
    if is_dynamic and value != 1:
        raise ValueError(f"{owner}: a dynamic grid has no memory, so averaging_constant must be 1, got {value}")
    return value


class RangeObserver(UniformQuantizationObserverBase):
    """Base of the observers whose state is ``min_val`` and ``max_val``: what to reduce, and how to combine, vary.

    Attributes:
        min_val, max_val: float32 buffers, (+inf, -inf) where nothing was seen.
    """

    min_val: Tensor
    max_val: Tensor
    ch_axis: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Takes the finite values of ``x`` into the range; an empty ``x`` changes nothing. Returns ``x``."""
        self._refuse_capture()
        if x.numel() > 0:
            low, high = self._extremes(x.detach())
            self._combine(low, high)
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Scale (float32) and zero point (int32) of shape [1], or [channels].

        Zero always lies inside the grid's range. With nothing seen it warns and returns (1.0, 0).
        """
        if not torch.compiler.is_compiling():
            if not bool((self.min_val <= self.max_val).any()):
                self._warn_unobserved()
            elif bool(torch.isnan(self.min_val).any() | torch.isnan(self.max_val).any()):
                raise ValueError(
                    f"{type(self).__name__}: min_val or max_val is NaN: load a sound state or call reset()"
                )
        return self._current_qparams()

    def _current_qparams(self) -> tuple[Tensor, Tensor]:
        return self._calculate_qparams(self.min_val, self.max_val)

    def reset(self) -> None:
        """Forgets the range."""
        self.min_val.fill_(float("inf"))
        self.max_val.fill_(float("-inf"))

    def extra_repr(self) -> str:
        """The range, for ``print``."""
        return f"min_val={self.min_val.tolist()}, max_val={self.max_val.tolist()}"

    # -- reduce

    def _extremes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """float32 minimum and maximum of the finite values: 0-d, or [channels]; (+inf, -inf) where there is none."""
        values = x if x.is_floating_point() else x.to(torch.float32)
        self._check_axis(x)
        rows = channels_first(values, self.ch_axis)
        if on_host(rows):
            low, high = torch.aminmax(rows[0]) if self.ch_axis is None else torch.aminmax(rows, dim=1)
            if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
                self._warn_non_finite()
                low, high = finite_extremes(rows)
        else:
            low, high = finite_extremes(rows)
        shape, device = self._shape_of(rows), self.min_val.device
        return narrow(low).to(device).reshape(shape), narrow(high).to(device).reshape(shape)

    def _shape_of(self, rows: Tensor) -> tuple[int, ...]:
        return () if self.ch_axis is None else (rows.shape[0],)

    def _check_axis(self, x: Tensor) -> None:
        axis = self.ch_axis
        if axis is not None and not -x.dim() <= axis < x.dim():
            raise ValueError(
                f"{type(self).__name__} looks along ch_axis={axis}, got a tensor of shape {tuple(x.shape)}"
            )

    # -- combine

    def _combine(self, low: Tensor, high: Tensor) -> None:
        self.min_val.copy_(self._lower(self.min_val, low))
        self.max_val.copy_(self._upper(self.max_val, high))

    def _lower(self, old: Tensor, new: Tensor) -> Tensor:
        return torch.minimum(old, new)

    def _upper(self, old: Tensor, new: Tensor) -> Tensor:
        return torch.maximum(old, new)


def on_host(values: Tensor) -> bool:
    """Whether looking at a value costs nothing: no device has to finish first, and no graph is being captured."""
    return values.device.type == "cpu" and not torch.compiler.is_compiling()


class AveragingObserver(RangeObserver):
    """Combines by ``v + c * (batch - v)``; the first batch sets the range."""

    averaging_constant: float

    def _lower(self, old: Tensor, new: Tensor) -> Tensor:
        return self._average(old, new)

    def _upper(self, old: Tensor, new: Tensor) -> Tensor:
        return self._average(old, new)

    def _average(self, old: Tensor, new: Tensor) -> Tensor:
        return moving_average(old, new, self.averaging_constant)


class MinMaxObserver(RangeObserver):
    """The running minimum and maximum of everything seen.

    Args:
        dtype, qscheme, reduce_range, quant_min, quant_max, factory_kwargs, eps, is_dynamic: see
            :class:`UniformQuantizationObserverBase`; the scheme is a per-tensor one.

    Example:
        >>> import torch
        >>> from zeropoint.ao.quantization import MinMaxObserver
        >>> observer = MinMaxObserver()
        >>> _ = observer(torch.tensor([-1.0, 4.1]))
        >>> observer.calculate_qparams()
        (tensor([0.0200]), tensor([50], dtype=torch.int32))
    """

    _schemes = (per_tensor_affine, per_tensor_symmetric)

    def __init__(
        self,
        dtype: Any = quint8,
        qscheme: Any = per_tensor_affine,
        reduce_range: bool = False,
        quant_min: int | None = None,
        quant_max: int | None = None,
        factory_kwargs: dict[str, Any] | None = None,
        eps: float = grid.DEFAULT_EPS,
        is_dynamic: bool = False,
    ) -> None:
        super().__init__(dtype, qscheme, reduce_range, quant_min, quant_max, factory_kwargs, eps, is_dynamic)
        self.register_buffer("min_val", torch.tensor(float("inf"), device=self._device))
        self.register_buffer("max_val", torch.tensor(float("-inf"), device=self._device))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, nothing in (("min_val", float("inf")), ("max_val", float("-inf"))):
            value = state_dict.get(prefix + name)
            if value is not None and value.dim() > 0:  # older checkpoints: [0] for "nothing seen", or [1]
                state_dict[prefix + name] = value.reshape(()) if value.numel() == 1 else value.new_tensor(nothing)
        super()._load_from_state_dict(state_dict, prefix, *args)


class MovingAverageMinMaxObserver(AveragingObserver, MinMaxObserver):
    """The averaged minimum and maximum of the batches: ``v = v + averaging_constant * (batch - v)``.

    Args:
        averaging_constant: the weight of the newest batch, in (0, 1]; 1 remembers the newest batch only.
        dtype, qscheme, reduce_range, quant_min, quant_max, eps, is_dynamic, factory_kwargs: see
            :class:`MinMaxObserver`.
    """

    def __init__(
        self,
        averaging_constant: float = 0.01,
        dtype: Any = quint8,
        qscheme: Any = per_tensor_affine,
        reduce_range: bool = False,
        quant_min: int | None = None,
        quant_max: int | None = None,
        eps: float = grid.DEFAULT_EPS,
        is_dynamic: bool = False,
        factory_kwargs: dict[str, Any] | None = None,
    ) -> None:
        check_averaging_constant(averaging_constant, is_dynamic, type(self).__name__)
        super().__init__(dtype, qscheme, reduce_range, quant_min, quant_max, factory_kwargs, eps, is_dynamic)
        self.averaging_constant = averaging_constant


class PerChannelMinMaxObserver(RangeObserver):
    """The running minimum and maximum of each channel.

    The statistics have shape [0] until the first tensor, or a loaded state, tells how many channels there are.
    Loaders that compare shapes before they load can be served by :meth:`allocate`.

    Args:
        ch_axis: the channel dimension of what is observed; may count from the end.
        dtype, qscheme, reduce_range, quant_min, quant_max, factory_kwargs, eps, is_dynamic: see
            :class:`UniformQuantizationObserverBase`; the scheme is a per-channel one.

    Raises:
        ValueError: a tensor has no such dimension, or another number of channels than before.
    """

    _schemes = (per_channel_affine, per_channel_symmetric, per_channel_affine_float_qparams)
    ch_axis: int

    def __init__(
        self,
        ch_axis: int = 0,
        dtype: Any = quint8,
        qscheme: Any = per_channel_affine,
        reduce_range: bool = False,
        quant_min: int | None = None,
        quant_max: int | None = None,
        factory_kwargs: dict[str, Any] | None = None,
        eps: float = grid.DEFAULT_EPS,
        is_dynamic: bool = False,
    ) -> None:
        if is_dynamic:
            raise ValueError(f"{type(self).__name__}: dynamic quantization has one grid a tensor, not one a channel")
        super().__init__(dtype, qscheme, reduce_range, quant_min, quant_max, factory_kwargs, eps, is_dynamic)
        self.ch_axis = ch_axis
        self.register_buffer("min_val", torch.empty(0, device=self._device))
        self.register_buffer("max_val", torch.empty(0, device=self._device))

    def allocate(self, channels: int) -> None:
        """Gives the statistics their shape [channels] before anything was seen."""
        with torch.inference_mode(False):  # what a run under inference_mode began, training goes on with
            self.min_val = self.min_val.new_full((channels,), float("inf"))
            self.max_val = self.max_val.new_full((channels,), float("-inf"))

    def reset(self) -> None:
        """Forgets the ranges and the number of channels."""
        self.allocate(0)

    def expect_channels(self, channels: int) -> None:
        """Gives the statistics their shape at the first tensor, and holds later ones to it.

        Raises:
            ValueError: another number of channels than before.
        """
        if self.min_val.numel() == 0:
            self.allocate(channels)
        elif self.min_val.numel() != channels:
            raise ValueError(
                f"{type(self).__name__} has seen {self.min_val.numel()} channels along ch_axis={self.ch_axis}, "
                f"now {channels}: one observer serves one tensor"
            )

    def _combine(self, low: Tensor, high: Tensor) -> None:
        self.expect_channels(low.numel())
        super()._combine(low, high)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("min_val", "max_val"):
            old_name = f"{prefix}{name}s"  # torch.ao's before its version 3
            if old_name in state_dict:
                state_dict[prefix + name] = state_dict.pop(old_name)
            value, own = state_dict.get(prefix + name), getattr(self, name)
            if value is not None and value.shape != own.shape:
                setattr(self, name, own.new_empty(value.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)


class MovingAveragePerChannelMinMaxObserver(AveragingObserver, PerChannelMinMaxObserver):
    """The averaged minimum and maximum of each channel: ``v = v + averaging_constant * (batch - v)``.

    Args:
        averaging_constant: the weight of the newest batch, in (0, 1].
        ch_axis, dtype, qscheme, reduce_range, quant_min, quant_max, eps, is_dynamic, factory_kwargs: see
            :class:`PerChannelMinMaxObserver`.
    """

    def __init__(
        self,
        averaging_constant: float = 0.01,
        ch_axis: int = 0,
        dtype: Any = quint8,
        qscheme: Any = per_channel_affine,
        reduce_range: bool = False,
        quant_min: int | None = None,
        quant_max: int | None = None,
        eps: float = grid.DEFAULT_EPS,
        is_dynamic: bool = False,
        factory_kwargs: dict[str, Any] | None = None,
    ) -> None:
        check_averaging_constant(averaging_constant, False, type(self).__name__)
        super().__init__(ch_axis, dtype, qscheme, reduce_range, quant_min, quant_max, factory_kwargs, eps, is_dynamic)
        self.averaging_constant = averaging_constant
