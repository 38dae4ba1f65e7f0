"""Convolutions and transposed convolutions with int8 weights that quantize their input on every call.

May import: ``tensor``, ``ops.conv``, and what quantized modules share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from zeropoint.ao.nn._registry import dynamic_twin_of
from zeropoint.ao.nn.quantized._base import REFUSALS, DynamicModule
from zeropoint.ao.nn.quantized._from_float import calibrated_weight, require_class
from zeropoint.ao.nn.quantized.conv import ConvWeights
from zeropoint.ao.nn.quantized.conv_transpose import TransposedWeights
from zeropoint.ao.nn.quantized.dynamic.linear import per_channel_observer
from zeropoint.ops.conv import pad_codes

__all__ = ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]


class _Dynamic(DynamicModule):
    """A layer that takes and gives float tensors.

    Each call lays one full 8-bit grid over its complete input; sums of integers are exact; the result is float again,
    channels-last in memory. There is nothing to calibrate.
    """

    ON_REQUEST = True


class _ConvNd(_Dynamic, ConvWeights):
    """Convolution of float tensors with int8 weights. The arguments are those of the float module.

    Each call lays one full 8-bit grid over its complete input, (N, C, spatial) or (C, spatial); sums of integers are
    exact; the result is float again, of the input's dtype, channels-last in memory. There is nothing to calibrate.

    Attributes:
        weight: qint8 tensor (out_channels, in_channels / groups, kernel), on one grid or one an output channel;
            callable.
        bias: float32 tensor (out_channels,) or None; callable.

    Raises:
        ValueError: channels that ``groups`` does not divide, an unknown padding mode, no output channels, a stride or
            dilation below 1.
    """

    def forward(self, x: Tensor) -> Tensor:
        """A float (N, out_channels, spatial) tensor; a quantized ``x`` is dequantized first.

        Raises:
            TypeError: ``x`` is no float tensor. RuntimeError: sizes that do not fit.
        """
        if type(x) is not Tensor:
            x = self._as_float(x)
        values, pairs = x, self._padding_pairs
        batched = values.dim() != self.RANK + 1
        if not batched:
            values = values.unsqueeze(0)
        buffers = self._buffers
        try:
            if self.padding_mode != "zeros":
                values, pairs = pad_codes(values, pairs, self.padding_mode), [0] * len(pairs)
            out: Tensor = torch.ops.zeropoint.conv_dynamic.default(
                values,
                buffers["weight"],
                buffers["weight_scale"],
                buffers["weight_zero_point"],
                buffers["bias"],
                self.stride,
                pairs,
                self.dilation,
                self.groups,
                self.reduce_range,
                False,
                self._packed_weight(),
            )
        except REFUSALS as error:
            self._explain(error, x)
        return out if batched else out.squeeze(0)

    @classmethod
    def from_float(cls, mod: nn.Module, use_precomputed_fake_quant: bool = False) -> _ConvNd:
        """The dynamic twin of a float module.

        Args:
            mod: the float class of the same rank or a subclass. Its qconfig's weight observer chooses the weight grid;
                without a qconfig there is one symmetric grid an output channel.
            use_precomputed_fake_quant: keep the weight grid that ``mod.weight_fake_quant`` trained.

        Raises:
            TypeError: another class.
        """
        require_class(mod, (cls.FLOAT_CLASS,), cls)
        twin = cast(_ConvNd, cls._like(mod))
        twin.set_weight_bias(*calibrated_weight(mod, mod, 0, use_precomputed_fake_quant, per_channel_observer))
        return twin


class _ConvTransposeNd(_Dynamic, TransposedWeights):
    """Transposed convolution of float tensors with int8 weights. The arguments are those of the float module.

    Each call lays one full 8-bit grid over its complete input, (N, C, spatial) or (C, spatial); sums of integers are
    exact; the result is float again, of the input's dtype, channels-last in memory. There is nothing to calibrate.

    Attributes:
        weight: qint8 tensor as in the quantized module of the same name; callable.
        bias: float32 tensor (out_channels,) or None; callable.

    Raises:
        ValueError: channels that ``groups`` does not divide, a padding mode but zeros, no channels, a stride or
            dilation below 1, negative padding.
    """

    def forward(self, x: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """A float (N, out_channels, spatial) tensor; a quantized ``x`` is dequantized first.

        Args:
            x: the input.
            output_size: the output's spatial sizes, of those that the stride leaves open; instead of output_padding.

        Raises:
            TypeError: ``x`` is no float tensor. RuntimeError: sizes that do not fit.
            ValueError: an ``output_size`` that cannot be reached.
        """
        if type(x) is not Tensor:
            x = self._as_float(x)
        values, batched = x, x.dim() != self.RANK + 1
        if not batched:
            values = values.unsqueeze(0)
        buffers = self._buffers
        try:
            out: Tensor = torch.ops.zeropoint.conv_transpose_dynamic.default(
                values,
                buffers["weight"],
                buffers["weight_scale"],
                buffers["weight_zero_point"],
                buffers["bias"],
                self.stride,
                self.padding,
                self._output_padding(output_size, values),
                self.dilation,
                self.groups,
                self.reduce_range,
                False,
                self._packed_weight(),
            )
        except REFUSALS as error:
            self._explain(error, x)
        return out if batched else out.squeeze(0)

    @classmethod
    def from_float(cls, mod: nn.Module, use_precomputed_fake_quant: bool = False) -> _ConvTransposeNd:
        """The dynamic twin of a float module; arguments and errors as for the convolutions."""
        require_class(mod, (cls.FLOAT_CLASS,), cls)
        twin = cast(_ConvTransposeNd, cls._like(mod))
        twin._take_weight(mod, mod, use_precomputed_fake_quant, per_channel_observer)
        return twin


@dynamic_twin_of(nn.Conv1d)
class Conv1d(_ConvNd):
    __doc__ = "1d " + (_ConvNd.__doc__ or "")
    RANK = 1
    FLOAT_CLASS = nn.Conv1d


@dynamic_twin_of(nn.Conv2d)
class Conv2d(_ConvNd):
    __doc__ = "2d " + (_ConvNd.__doc__ or "")
    RANK = 2
    FLOAT_CLASS = nn.Conv2d


@dynamic_twin_of(nn.Conv3d)
class Conv3d(_ConvNd):
    __doc__ = "3d " + (_ConvNd.__doc__ or "")
    RANK = 3
    FLOAT_CLASS = nn.Conv3d


@dynamic_twin_of(nn.ConvTranspose1d)
class ConvTranspose1d(_ConvTransposeNd):
    __doc__ = "1d " + (_ConvTransposeNd.__doc__ or "")
    RANK = 1
    FLOAT_CLASS = nn.ConvTranspose1d


@dynamic_twin_of(nn.ConvTranspose2d)
class ConvTranspose2d(_ConvTransposeNd):
    __doc__ = "2d " + (_ConvTransposeNd.__doc__ or "")
    RANK = 2
    FLOAT_CLASS = nn.ConvTranspose2d


@dynamic_twin_of(nn.ConvTranspose3d)
class ConvTranspose3d(_ConvTransposeNd):
    __doc__ = "3d " + (_ConvTransposeNd.__doc__ or "")
    RANK = 3
    FLOAT_CLASS = nn.ConvTranspose3d
