"""Fake quantizers: modules that observe a tensor and simulate its rounding, for quantization-aware training.

What they do is told by two flags, kept as buffers so that they are saved and replicated, not by train or eval mode.

May import: ``dtypes``, ``ops``, ``observer``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from zeropoint import ops
from zeropoint.ao.quantization.observer import (
    FixedQParamsObserver,
    HistogramObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    ObservingModule,
    default_fixed_qparams_range_0to1_observer,
    default_fixed_qparams_range_neg1to1_observer,
)
from zeropoint.ao.quantization.observers.base import observed_range
from zeropoint.ao.quantization.observers.minmax import on_host
from zeropoint.dtypes import (
    QScheme,
    per_channel_affine_float_qparams,
    per_channel_symmetric,
    per_tensor_affine,
    per_tensor_symmetric,
    qint8,
    quint8,
)

__all__ = [
    "FakeQuantize",
    "FakeQuantizeBase",
    "FixedQParamsFakeQuantize",
    "FusedMovingAvgObsFakeQuantize",
    "PerChannelFakeQuantize",
    "default_affine_fixed_qparams_fake_quant",
    "default_dynamic_fake_quant",
    "default_embedding_fake_quant",
    "default_embedding_fake_quant_4bit",
    "default_fake_quant",
    "default_fixed_qparams_range_0to1_fake_quant",
    "default_fixed_qparams_range_neg1to1_fake_quant",
    "default_fused_act_fake_quant",
    "default_fused_per_channel_wt_fake_quant",
    "default_fused_wt_fake_quant",
    "default_histogram_fake_quant",
    "default_per_channel_weight_fake_quant",
    "default_symmetric_fixed_qparams_fake_quant",
    "default_weight_fake_quant",
    "disable_fake_quant",
    "disable_observer",
    "enable_fake_quant",
    "enable_observer",
    "fused_per_channel_wt_fake_quant_range_neg_127_to_127",
    "fused_wt_fake_quant_range_neg_127_to_127",
]


class FakeQuantizeBase(ObservingModule, ABC):
    """Base of all fake quantizers: the two flags.

    Attributes:
        fake_quant_enabled: uint8 buffer of shape [1]: whether the rounding is simulated.
        observer_enabled: uint8 buffer of shape [1]: whether statistics are updated.
    """

    _LEARNS: ClassVar[tuple[str, ...]] = ("observer_enabled",)
    """The flags under which a call changes the grid."""

    fake_quant_enabled: Tensor
    observer_enabled: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._on = {"fake_quant_enabled": True, "observer_enabled": True}
        self._read_at: dict[str, tuple[Tensor, int]] = {}
        self.register_buffer("fake_quant_enabled", torch.ones(1, dtype=torch.uint8))
        self.register_buffer("observer_enabled", torch.ones(1, dtype=torch.uint8))

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Observes ``x`` and simulates its rounding, as the flags say."""

    @abstractmethod
    def calculate_qparams(self, **kwargs: Any) -> Any:
        """Scale and zero point for what was seen so far."""

    def enable_fake_quant(self, enabled: bool = True) -> None:
        """Simulates the rounding from now on."""
        self._set_flag("fake_quant_enabled", enabled)

    def disable_fake_quant(self) -> None:
        """Returns the float input from now on; statistics may still be updated."""
        self.enable_fake_quant(False)

    def enable_observer(self, enabled: bool = True) -> None:
        """Updates statistics, and with them the grid, from now on."""
        self._set_flag("observer_enabled", enabled)

    def disable_observer(self) -> None:
        """Freezes statistics and grid from now on; the rounding may still be simulated."""
        self.enable_observer(False)

    def _set_flag(self, name: str, enabled: bool) -> None:
        getattr(self, name).fill_(int(enabled))
        self._on[name] = enabled

    def _flag(self, name: str) -> bool:
        """The flag's value, read from its device only after something wrote to the buffer.

        A captured graph holds the value of the moment: capture again after changing a flag. An ONNX model has no
        statistics to update, so that it holds the grid of the moment whatever these flags say.
        """
        if name in self._LEARNS and ops.qdq.capturing():
            return False
        if torch.compiler.is_compiling():
            return self._on[name]
        flag: Tensor = getattr(self, name)
        if flag.is_meta:
            return self._on[name]
        if flag.is_inference():  # torch does not count writes to these
            return bool(flag)
        seen = self._read_at.get(name)
        if seen is None or seen[0] is not flag or seen[1] != flag._version:
            self._on[name] = bool(flag)
            self._read_at[name] = (flag, flag._version)
        return self._on[name]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_read_at": {}}


class FakeQuantize(FakeQuantizeBase):
    """Observes a tensor, makes a grid of what was seen, and returns the tensor rounded to that grid.

    With the observer on, every call updates the statistics and the grid, in train and in eval mode. The gradient
    passes where the rounded code was inside the grid before it was saturated.

    Args:
        observer: the observer's class or factory.
        quant_min, quant_max: the codes; None leaves them to the observer.
        is_dynamic: stands for a grid that is chosen at each call.
        observer_kwargs: further arguments of the observer.

    Attributes:
        activation_post_process: the observer.
        scale: float32 buffer, [1] or [channels].
        zero_point: int32 buffer of that shape; float32 for a scheme with floating zero points.

    Raises:
        ValueError: the code range makes no grid for the observer's dtype.
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(
        self,
        observer: Any = MovingAverageMinMaxObserver,
        quant_min: int | None = None,
        quant_max: int | None = None,
        is_dynamic: bool = False,
        **observer_kwargs: Any,
    ) -> None:
        super().__init__()
        given = {"quant_min": quant_min, "quant_max": quant_max, "is_dynamic": is_dynamic or None}
        observer_kwargs.update({name: value for name, value in given.items() if value is not None})
        if isinstance(observer, nn.Module):
            raise ValueError(
                f"{type(self).__name__} takes an observer class or factory, got an instance of "
                f"{type(observer).__name__}: pass the class, or {type(observer).__name__}.with_args(...)"
            )
        self.activation_post_process = observer(**observer_kwargs)
        if not hasattr(self.activation_post_process, "qscheme"):
            raise ValueError(f"{type(self.activation_post_process).__name__} makes no grid to simulate")
        floating = self.qscheme is per_channel_affine_float_qparams
        device = next((buffer.device for buffer in self.activation_post_process.buffers()), None)
        self.register_buffer("scale", torch.ones(1, device=device))
        self.register_buffer(
            "zero_point", torch.zeros(1, dtype=torch.float32 if floating else torch.int32, device=device)
        )
        if device is not None:
            self.fake_quant_enabled = self.fake_quant_enabled.to(device)
            self.observer_enabled = self.observer_enabled.to(device)

    # -- what the observer says

    @property
    def quant_min(self) -> int:
        """The smallest code."""
        return int(self.activation_post_process.quant_min)

    @property
    def quant_max(self) -> int:
        """The largest code."""
        return int(self.activation_post_process.quant_max)

    @property
    def dtype(self) -> Any:
        """The quantized dtype that is simulated."""
        return self.activation_post_process.dtype

    @property
    def qscheme(self) -> QScheme:
        """How the grid is laid."""
        scheme: QScheme = self.activation_post_process.qscheme
        return scheme

    @property
    def is_dynamic(self) -> bool:
        """Whether this stands for a grid that is chosen at each call."""
        return bool(self.activation_post_process.is_dynamic)

    @property
    def ch_axis(self) -> int:
        """The channel dimension, -1 for one grid a tensor."""
        axis = getattr(self.activation_post_process, "ch_axis", None)
        return -1 if axis is None else int(axis)

    @property
    def is_per_channel(self) -> bool:
        """Whether each channel has a grid of its own."""
        return self.qscheme.is_per_channel

    # -- work

    def calculate_qparams(self, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The observer's scale and zero point for what was seen so far."""
        scale, zero_point = self.activation_post_process.calculate_qparams()
        return scale, zero_point

    def forward(self, x: Tensor) -> Tensor:
        """Observes ``x`` if the observer is on; returns it rounded to the grid if fake quantize is on."""
        if self._flag("observer_enabled"):
            self._observe(x.detach())
        if self._flag("fake_quant_enabled"):
            return self._simulate(x)
        return x

    def _observe(self, x: Tensor) -> None:
        self.activation_post_process(x)
        self.refresh_grid()

    def refresh_grid(self) -> None:
        """Makes ``scale`` and ``zero_point`` anew from the observer's statistics."""
        observer = self.activation_post_process
        self._store_grid(*getattr(observer, "_current_qparams", observer.calculate_qparams)())

    def _store_grid(self, scale: Tensor, zero_point: Tensor) -> None:
        if self.scale.shape != scale.shape:
            with torch.inference_mode(False):  # what a run under inference_mode began, training goes on with
                self.scale = self.scale.new_empty(scale.shape)
                self.zero_point = self.zero_point.new_empty(zero_point.shape)
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)

    def _simulate(self, x: Tensor) -> Tensor:
        axis = self.ch_axis % x.dim() if self.is_per_channel else None
        return ops.fake_quantize.simulate(x, self.scale, self.zero_point, axis, self.quant_min, self.quant_max)

    def extra_repr(self) -> str:
        """Flags and grid, for ``print``."""
        return (
            f"fake_quant_enabled={self.fake_quant_enabled.tolist()}, "
            f"observer_enabled={self.observer_enabled.tolist()}, quant_min={self.quant_min}, "
            f"quant_max={self.quant_max}, dtype={self.dtype}, qscheme={self.qscheme}, ch_axis={self.ch_axis}, "
            f"scale={self.scale.tolist()}, zero_point={self.zero_point.tolist()}"
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("scale", "zero_point"):
            value, own = state_dict.get(prefix + name), getattr(self, name)
            if value is not None and value.shape != own.shape:
                setattr(self, name, own.new_empty(value.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)


class PerChannelFakeQuantize(FakeQuantize):
    """A fake quantizer with one grid a channel: the default for weights in quantization-aware training.

    Args:
        observer: a per-channel observer's class or factory.
        ch_axis: the channel dimension; 0 is a weight's output channel.
        quant_min, quant_max: the codes.
        dtype, qscheme: as the observer takes them.
        observer_kwargs: further arguments of the observer.
    """

    def __init__(
        self,
        observer: Any = MovingAveragePerChannelMinMaxObserver,
        quant_min: int | None = None,
        quant_max: int | None = None,
        ch_axis: int = 0,
        dtype: Any = qint8,
        qscheme: Any = per_channel_symmetric,
        **observer_kwargs: Any,
    ) -> None:
        super().__init__(
            observer, quant_min, quant_max, ch_axis=ch_axis, dtype=dtype, qscheme=qscheme, **observer_kwargs
        )


class FixedQParamsFakeQuantize(FakeQuantize):
    """Simulates a grid that is known beforehand.

    Args:
        observer: a factory of :class:`FixedQParamsObserver`.

    Raises:
        ValueError: the factory makes another observer.
    """

    def __init__(self, observer: Any = default_fixed_qparams_range_0to1_observer) -> None:
        super().__init__(observer)
        fixed = self.activation_post_process
        if not isinstance(fixed, FixedQParamsObserver):
            raise ValueError(f"{type(self).__name__} takes a FixedQParamsObserver, got {type(fixed).__name__}")
        self._store_grid(fixed.scale, fixed.zero_point)

    def calculate_qparams(self, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The fixed scale and zero point."""
        return self.scale, self.zero_point

    def refresh_grid(self) -> None:
        """Does nothing: the grid is fixed."""


class FusedMovingAvgObsFakeQuantize(FakeQuantize):
    """Moving-average statistics, grid and rounding in one step, for faster training.

    The grid is that of dynamic quantization (``grid.choose_qparams``), so it differs a little from
    ``FakeQuantize(MovingAverageMinMaxObserver)``: all-zero data give the scale 0.1, and a symmetric qint8 grid maps
    the largest value to 127. With fake quantize off the statistics move and the grid stays.

    Args:
        observer: a moving-average observer's class or factory.
        quant_min, quant_max: the codes.
        observer_kwargs: further arguments of the observer.

    Raises:
        ValueError: another observer, or floating zero points.
    """

    def __init__(
        self,
        observer: Any = MovingAverageMinMaxObserver,
        quant_min: int | None = 0,
        quant_max: int | None = 255,
        **observer_kwargs: Any,
    ) -> None:
        super().__init__(observer, quant_min, quant_max, **observer_kwargs)
        allowed = (MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver)
        if not isinstance(self.activation_post_process, allowed):
            raise ValueError(
                f"{type(self).__name__} takes a moving-average observer, got "
                f"{type(self.activation_post_process).__name__}: use FakeQuantize"
            )
        if self.qscheme is per_channel_affine_float_qparams:
            raise ValueError(f"{type(self).__name__} has whole zero points only: use FakeQuantize")

    @property
    def is_symmetric_quant(self) -> bool:
        """Whether real zero sits in the middle of the codes."""
        return self.qscheme.is_symmetric

    def calculate_qparams(self, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The grid of the statistics, by the same formula that ``forward`` uses. Warns if nothing was seen."""
        observer = self.activation_post_process
        if not bool((observer.min_val <= observer.max_val).any()):
            scale, zero_point = observer.calculate_qparams()
            return scale, zero_point
        return self._grid()

    def _grid(self) -> tuple[Tensor, Tensor]:
        """The grid of the statistics; a channel that saw nothing keeps (1.0, 0)."""
        observer = self.activation_post_process
        low, high, seen = observed_range(observer.min_val, observer.max_val)
        scale, zero = ops.fake_quantize.moving_average_qparams(
            low,
            high,
            self.quant_min,
            self.quant_max,
            symmetric=self.is_symmetric_quant,
            zero_point=observer.symmetric_zero_point(),
            eps=observer.eps,
        )
        return torch.where(seen, scale, 1.0), torch.where(seen, zero, 0).to(torch.int32)

    def forward(self, x: Tensor) -> Tensor:
        """Updates the statistics if the observer is on; updates the grid and rounds if fake quantize is on."""
        rounding = self._flag("fake_quant_enabled")
        if self._flag("observer_enabled") and x.numel() > 0:
            self._update(x.detach(), rounding)
        return self._simulate(x) if rounding else x

    def _update(self, x: Tensor, update_grid: bool) -> None:
        observer = self.activation_post_process
        if self.is_per_channel:
            observer._check_axis(x)
            observer.expect_channels(x.shape[observer.ch_axis])
        if self.scale.numel() != max(observer.min_val.numel(), 1):
            self._store_grid(torch.ones_like(observer.min_val), torch.zeros_like(observer.min_val))
        ignored = torch.ops.zeropoint.moving_average_observe.default(
            x,
            observer.min_val,
            observer.max_val,
            self.scale,
            self.zero_point,
            observer.eps,
            observer.averaging_constant,
            self.quant_min,
            self.quant_max,
            observer.ch_axis,
            self.is_symmetric_quant,
            observer.symmetric_zero_point(),
            update_grid,
        )
        if on_host(x) and bool(ignored):
            observer._warn_non_finite()

    def refresh_grid(self) -> None:
        """Makes ``scale`` and ``zero_point`` anew from the observer's statistics."""
        self._store_grid(*self._grid())


# --- common settings ----------------------------------------------------------------------------------------------

_QNNPACK_EPS = 2.0**-12

default_fake_quant: Final = FakeQuantize.with_args(
    observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=quint8, qscheme=per_tensor_affine
)
"""Activations: averaged range, quint8 over all codes."""

default_weight_fake_quant: Final = FakeQuantize.with_args(
    observer=MovingAverageMinMaxObserver, quant_min=-128, quant_max=127, dtype=qint8, qscheme=per_tensor_symmetric
)
"""Weights: one symmetric qint8 grid."""

default_dynamic_fake_quant: Final = FakeQuantize.with_args(
    observer=MovingAverageMinMaxObserver,
    quant_min=0,
    quant_max=255,
    is_dynamic=True,
    dtype=quint8,
    averaging_constant=1,
)
"""Activations whose grid is chosen at each call."""

default_fixed_qparams_range_neg1to1_fake_quant: Final = FixedQParamsFakeQuantize.with_args(
    observer=default_fixed_qparams_range_neg1to1_observer
)
"""Outputs of tanh."""

default_fixed_qparams_range_0to1_fake_quant: Final = FixedQParamsFakeQuantize.with_args(
    observer=default_fixed_qparams_range_0to1_observer
)
"""Outputs of sigmoid, hardsigmoid and softmax."""

default_symmetric_fixed_qparams_fake_quant: Final = default_fixed_qparams_range_neg1to1_fake_quant
default_affine_fixed_qparams_fake_quant: Final = default_fixed_qparams_range_0to1_fake_quant

default_per_channel_weight_fake_quant: Final = PerChannelFakeQuantize.with_args(
    observer=MovingAveragePerChannelMinMaxObserver,
    quant_min=-128,
    quant_max=127,
    dtype=qint8,
    qscheme=per_channel_symmetric,
    ch_axis=0,
)
"""Weights: one symmetric qint8 grid an output channel."""

default_embedding_fake_quant: Final = FakeQuantize.with_args(
    observer=MovingAveragePerChannelMinMaxObserver,
    qscheme=per_channel_affine_float_qparams,
    dtype=quint8,
    quant_min=0,
    quant_max=255,
    ch_axis=0,
    averaging_constant=1,
)
"""Embedding rows: quint8 with floating zero points, of the newest weight."""

default_embedding_fake_quant_4bit: Final = FakeQuantize.with_args(
    observer=MovingAveragePerChannelMinMaxObserver,
    qscheme=per_channel_affine_float_qparams,
    dtype=quint8,
    quant_min=0,
    quant_max=15,
    ch_axis=0,
    averaging_constant=1,
)
"""Embedding rows: codes 0 … 15 with floating zero points, of the newest weight."""

default_histogram_fake_quant: Final = FakeQuantize.with_args(
    observer=HistogramObserver, quant_min=0, quant_max=255, dtype=quint8, qscheme=per_tensor_affine
)
"""Activations: clipped range, quint8 over all codes."""

default_fused_act_fake_quant: Final = FusedMovingAvgObsFakeQuantize.with_args(
    observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=quint8
)
"""Fused twin of :data:`default_fake_quant`."""

default_fused_wt_fake_quant: Final = FusedMovingAvgObsFakeQuantize.with_args(
    observer=MovingAverageMinMaxObserver, quant_min=-128, quant_max=127, dtype=qint8, qscheme=per_tensor_symmetric
)
"""Fused twin of :data:`default_weight_fake_quant`."""

default_fused_per_channel_wt_fake_quant: Final = FusedMovingAvgObsFakeQuantize.with_args(
    observer=MovingAveragePerChannelMinMaxObserver,
    quant_min=-128,
    quant_max=127,
    dtype=qint8,
    qscheme=per_channel_symmetric,
)
"""Fused twin of :data:`default_per_channel_weight_fake_quant`."""

fused_wt_fake_quant_range_neg_127_to_127: Final = default_fused_wt_fake_quant.with_args(
    quant_min=-127, quant_max=127, eps=_QNNPACK_EPS
)
"""As :data:`default_fused_wt_fake_quant`, without the code -128."""

fused_per_channel_wt_fake_quant_range_neg_127_to_127: Final = default_fused_per_channel_wt_fake_quant.with_args(
    quant_min=-127, quant_max=127, eps=_QNNPACK_EPS
)
"""As :data:`default_fused_per_channel_wt_fake_quant`, without the code -128."""


# --- for Module.apply ---------------------------------------------------------------------------------------------


def disable_fake_quant(module: nn.Module) -> None:
    """``model.apply(disable_fake_quant)``: every fake quantizer returns its float input from now on."""
    if isinstance(module, FakeQuantizeBase):
        module.disable_fake_quant()


def enable_fake_quant(module: nn.Module) -> None:
    """``model.apply(enable_fake_quant)``: every fake quantizer simulates its rounding from now on."""
    if isinstance(module, FakeQuantizeBase):
        module.enable_fake_quant()


def disable_observer(module: nn.Module) -> None:
    """``model.apply(disable_observer)``: every fake quantizer keeps its statistics and grid from now on."""
    if isinstance(module, FakeQuantizeBase):
        module.disable_observer()


def enable_observer(module: nn.Module) -> None:
    """``model.apply(enable_observer)``: every fake quantizer updates its statistics from now on."""
    if isinstance(module, FakeQuantizeBase):
        module.enable_observer()
