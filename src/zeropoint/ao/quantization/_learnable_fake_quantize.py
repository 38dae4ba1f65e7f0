"""A fake quantizer that trains its scale and zero point.

May import: ``fake_quantize``, ``ops``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zeropoint import grid
from zeropoint.ao.quantization.fake_quantize import FakeQuantizeBase
from zeropoint.dtypes import QScheme, as_qdtype, per_channel_affine_float_qparams
from zeropoint.ops import qdq
from zeropoint.ops.fake_quantize import fake_quantize_learnable, simulate

__all__ = ["_LearnableFakeQuantize"]


class _LearnableFakeQuantize(FakeQuantizeBase):
    """Fake quantize whose scale and zero point are parameters.

    It starts with static estimates: an observer sets the parameters. After :meth:`enable_param_learning` the observer
    rests and the optimizer moves them. Symmetric schemes keep their zero point.

    Args:
        observer: the observer's class or factory.
        quant_min, quant_max: the codes.
        scale, zero_point: the first values.
        channel_len: how many channels; -1 for one grid.
        use_grad_scaling: multiply the gradients of scale and zero point by ``(numel * quant_max) ** -0.5``, with the
            elements of the input, as LSQ does.
        observer_kwargs: further arguments of the observer.

    Attributes:
        activation_post_process: the observer.
        scale, zero_point: float32 parameters of shape [1] or [channel_len].
        static_enabled, learning_enabled: uint8 buffers of shape [1].
        eps: float32 buffer of shape [1], the smallest scale.

    Raises:
        ValueError: codes or a channel count that make no grid.
    """

    static_enabled: Tensor
    learning_enabled: Tensor
    eps: Tensor

    def __init__(
        self,
        observer: Any,
        quant_min: int = 0,
        quant_max: int = 255,
        scale: float = 1.0,
        zero_point: float = 0.0,
        channel_len: int = -1,
        use_grad_scaling: bool = False,
        **observer_kwargs: Any,
    ) -> None:
        super().__init__()
        if channel_len != -1 and channel_len < 1:
            raise ValueError(
                f"channel_len must be a positive number of channels, or -1 for one grid, got {channel_len}"
            )
        self.activation_post_process = observer(quant_min=quant_min, quant_max=quant_max, **observer_kwargs)
        self.quant_min, self.quant_max = quant_min, quant_max
        self.use_grad_scaling = use_grad_scaling
        self.dtype = as_qdtype(self.activation_post_process.dtype)
        self.qscheme: QScheme = self.activation_post_process.qscheme
        if self.qscheme is per_channel_affine_float_qparams:
            raise ValueError("_LearnableFakeQuantize rounds its zero points: use an affine or symmetric scheme")
        axis = getattr(self.activation_post_process, "ch_axis", None)
        self.ch_axis = -1 if axis is None else axis
        self.bitwidth = (quant_max - quant_min).bit_length()
        channels = 1 if channel_len == -1 else channel_len
        self.scale = nn.Parameter(torch.full((channels,), float(scale)))
        self.zero_point = nn.Parameter(torch.full((channels,), float(zero_point)))
        self.register_buffer("static_enabled", torch.ones(1, dtype=torch.uint8))
        self.register_buffer("learning_enabled", torch.zeros(1, dtype=torch.uint8))
        self._on.update(static_enabled=True, learning_enabled=False)
        self.register_buffer("eps", torch.tensor([grid.DEFAULT_EPS]))

    _LEARNS = ("observer_enabled", "static_enabled")

    @property
    def is_per_channel(self) -> bool:
        """Whether each channel has a grid of its own."""
        return self.qscheme.is_per_channel

    # -- modes

    def enable_param_learning(self) -> _LearnableFakeQuantize:
        """Trains scale and zero point, rounds, and lets the observer rest."""
        return self.toggle_qparam_learning(True).toggle_fake_quant(True).toggle_observer_update(False)

    def enable_static_estimate(self) -> _LearnableFakeQuantize:
        """Takes scale and zero point from the observer, and rounds."""
        return self.toggle_qparam_learning(False).toggle_fake_quant(True).toggle_observer_update(True)

    def enable_static_observation(self) -> _LearnableFakeQuantize:
        """Takes scale and zero point from the observer, and returns the float input."""
        return self.toggle_qparam_learning(False).toggle_fake_quant(False).toggle_observer_update(True)

    def toggle_observer_update(self, enabled: bool = True) -> _LearnableFakeQuantize:
        """Whether the observer sets scale and zero point."""
        self._set_flag("static_enabled", enabled)
        return self

    def toggle_qparam_learning(self, enabled: bool = True) -> _LearnableFakeQuantize:
        """Whether scale and zero point get gradients."""
        self._set_flag("learning_enabled", enabled)
        self.scale.requires_grad_(enabled)
        self.zero_point.requires_grad_(enabled)
        return self

    def toggle_fake_quant(self, enabled: bool = True) -> _LearnableFakeQuantize:
        """Whether the rounding is simulated."""
        self._set_flag("fake_quant_enabled", enabled)
        return self

    def enable_observer(self, enabled: bool = True) -> None:
        """The same as :meth:`toggle_observer_update`."""
        super().enable_observer(enabled)
        self.toggle_observer_update(enabled)

    # -- work

    def calculate_qparams(self, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The trained grid: float32 scale, at least ``eps``, and int32 zero point, rounded into the codes."""
        zero_point = self.zero_point.detach().round().clamp(self.quant_min, self.quant_max)
        return torch.maximum(self.scale.detach(), self.eps), zero_point.to(torch.int32)

    def forward(self, x: Tensor) -> Tensor:
        """Updates the parameters from the observer in static mode; rounds ``x`` if fake quantize is on."""
        if self._flag("static_enabled"):
            self.activation_post_process(x.detach())
            self.refresh_grid()
        if not self._flag("fake_quant_enabled"):
            return x
        axis = self.ch_axis if self.is_per_channel else None
        if qdq.capturing():  # a captured graph writes to no parameter
            return simulate(x, *self.calculate_qparams(), axis, self.quant_min, self.quant_max)
        with torch.no_grad():
            self.scale.clamp_(min=grid.DEFAULT_EPS)
            if self.qscheme.is_symmetric:
                self.zero_point.fill_(getattr(self.activation_post_process, "symmetric_zero_point", int)())
        factor = (max(x.numel(), 1) * max(self.quant_max, 1)) ** -0.5 if self.use_grad_scaling else 1.0
        return fake_quantize_learnable(x, self.scale, self.zero_point, axis, self.quant_min, self.quant_max, factor)

    @torch.no_grad()
    def refresh_grid(self) -> None:
        """Sets ``scale`` and ``zero_point`` from the observer's statistics, in static mode."""
        if not self._flag("static_enabled"):
            return
        observer = self.activation_post_process
        scale, zero_point = getattr(observer, "_current_qparams", observer.calculate_qparams)()
        if scale.shape != self.scale.shape:
            if self.scale.numel() != 1:
                raise ValueError(
                    f"_LearnableFakeQuantize was made for {self.scale.numel()} channels and sees {scale.numel()}"
                )
            self.scale.data, self.zero_point.data = self.scale.new_empty(scale.shape), self.scale.new_empty(scale.shape)
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)

    def extra_repr(self) -> str:
        """Flags and grid, for ``print``."""
        return (
            f"fake_quant_enabled={self.fake_quant_enabled.tolist()}, static_enabled={self.static_enabled.tolist()}, "
            f"learning_enabled={self.learning_enabled.tolist()}, quant_min={self.quant_min}, "
            f"quant_max={self.quant_max}, qscheme={self.qscheme}, scale={self.scale.tolist()}, "
            f"zero_point={self.zero_point.tolist()}"
        )
