"""A ReLU6 whose upper limit differs from channel to channel: what a ReLU6 becomes when its channels are scaled.

May import: floors 1 to 4.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zeropoint.ao.nn._registry import static_twin_of
from zeropoint.ao.nn.intrinsic import FusedModule
from zeropoint.ao.nn.intrinsic import quantized as nniq
from zeropoint.ao.nn.quantized._base import QuantizedModule
from zeropoint.tensor import QTensor, make_qtensor

__all__ = ["ChannelClamp", "QuantizedChannelClamp", "clamp_class", "clamped_layer"]


class ChannelClamp(nn.Module):
    """``clamp(x, 0, limit)`` with a limit of its own for every channel.

    Args:
        limit: (channels,).
        axis: the channels' dimension: 1, or -1 behind a linear layer.
    """

    limit: Tensor

    def __init__(self, limit: Tensor, axis: int = 1) -> None:
        super().__init__()
        self.axis = axis
        self.register_buffer("limit", limit.detach().to(torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """A tensor of ``x``'s shape."""
        limit = _along(self.limit.to(x.dtype), x, self.axis)
        return torch.minimum(x.clamp(min=0), limit)

    def extra_repr(self) -> str:
        return f"{self.limit.numel()} channels, axis={self.axis}"


def _along(values: Tensor, x: Tensor, axis: int) -> Tensor:
    """One value a channel, to broadcast over ``x``."""
    shape = [1] * x.dim()
    shape[axis] = -1
    return values.reshape(shape)


def _clamp_codes(x: QTensor, limit: Tensor, axis: int) -> Tensor:
    """The clamp on codes, on the grid that they are on: the limits are rounded as values are."""
    low, high = x.qdtype.qmin, x.qdtype.qmax
    grid = float(x.scale), int(x.zero_point)
    limits = torch.ops.zeropoint.quantize_per_tensor.default(limit, *grid, low, high, x.qdtype.storage)
    codes = torch.minimum(x.codes().clamp(min=grid[1]), _along(limits, x.codes(), axis))
    return make_qtensor(codes, x.qdtype, *grid)


@static_twin_of(ChannelClamp)
class QuantizedChannelClamp(QuantizedModule):
    """The clamp on codes, on the input's grid. Arguments as :class:`ChannelClamp`."""

    def __init__(self, limit: Tensor, axis: int = 1) -> None:
        super().__init__()
        self.axis = axis
        self.register_buffer("limit", limit.detach().to(torch.float32))

    def _get_name(self) -> str:
        return type(self).__name__

    def forward(self, x: Tensor) -> Tensor:
        """A quantized tensor of ``x``'s shape and grid. Raises TypeError unless ``x`` is quantized."""
        if not isinstance(x, QTensor) or x.axis is not None:
            self._refuse(x)
        assert isinstance(self.limit, Tensor)
        return _clamp_codes(x, self.limit, self.axis)

    @classmethod
    def from_float(cls, mod: ChannelClamp, use_precomputed_fake_quant: bool = False) -> QuantizedChannelClamp:
        """The twin of a float clamp; it needs no calibration."""
        return cls(mod.limit, mod.axis)


# --- with the layer in front of it, so that the layer's grid covers what the clamp leaves -------------------------


class _Clamped(FusedModule):
    """Base of a layer and its clamp: observed and converted as one."""


class ConvClamp1d(_Clamped):
    """A 1d convolution followed by a :class:`ChannelClamp`."""

    PARTS = ((nn.Conv1d,), (ChannelClamp,))


class ConvClamp2d(_Clamped):
    """A 2d convolution followed by a :class:`ChannelClamp`."""

    PARTS = ((nn.Conv2d,), (ChannelClamp,))


class ConvClamp3d(_Clamped):
    """A 3d convolution followed by a :class:`ChannelClamp`."""

    PARTS = ((nn.Conv3d,), (ChannelClamp,))


class LinearClamp(_Clamped):
    """A linear layer followed by a :class:`ChannelClamp`."""

    PARTS = ((nn.Linear,), (ChannelClamp,))


def clamp_class(layer: nn.Module) -> type[_Clamped] | None:
    """The class that holds such a layer and its clamp; None: there is none."""
    for kind in (ConvClamp1d, ConvClamp2d, ConvClamp3d, LinearClamp):
        if isinstance(layer, kind.PARTS[0]):
            return kind
    return None


def clamped_layer(layer: nn.Module, limit: Tensor) -> nn.Module:
    """The layer with a clamp behind it, as one module."""
    kind = clamp_class(layer)
    assert kind is not None
    return kind(layer, ChannelClamp(limit, -1 if isinstance(layer, nn.Linear) else 1)).train(layer.training)


class _QuantizedClamped:
    """Mixin in front of a quantized layer with a rectifier: clamps each channel of what it gives."""

    AXIS: ClassVar[int] = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._buffers["limit"] = torch.full((self._channels,), 6.0)  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """As the layer, clamped."""
        y = super().forward(x)  # type: ignore[misc]
        return _clamp_codes(y, self._buffers["limit"], self.AXIS)  # type: ignore[attr-defined]

    @classmethod
    def from_float(cls, mod: nn.Module, use_precomputed_fake_quant: bool = False) -> Any:
        """The twin of a calibrated layer with a clamp."""
        twin = super().from_float(mod, use_precomputed_fake_quant)  # type: ignore[misc]
        assert isinstance(mod, _Clamped)
        clamp: Any = mod[1]
        twin._buffers["limit"] = clamp.limit.detach().clone()
        return twin


@static_twin_of(ConvClamp1d)
class QuantizedConvClamp1d(_QuantizedClamped, nniq.ConvReLU1d):
    """A quantized 1d convolution with a limit a channel."""

    FUSED_CLASS = ConvClamp1d  # type: ignore[assignment]


@static_twin_of(ConvClamp2d)
class QuantizedConvClamp2d(_QuantizedClamped, nniq.ConvReLU2d):
    """A quantized 2d convolution with a limit a channel."""

    FUSED_CLASS = ConvClamp2d  # type: ignore[assignment]


@static_twin_of(ConvClamp3d)
class QuantizedConvClamp3d(_QuantizedClamped, nniq.ConvReLU3d):
    """A quantized 3d convolution with a limit a channel."""

    FUSED_CLASS = ConvClamp3d  # type: ignore[assignment]


@static_twin_of(LinearClamp)
class QuantizedLinearClamp(_QuantizedClamped, nniq.LinearReLU):
    """A quantized linear layer with a limit an output."""

    AXIS = -1
    FUSED_CLASS = LinearClamp  # type: ignore[assignment]
