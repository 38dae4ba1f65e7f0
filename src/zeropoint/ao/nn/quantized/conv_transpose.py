"""Transposed convolutions on quantized tensors.

May import: ``dtypes``, ``tensor``, ``ops.conv_transpose``, and what quantized modules share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from zeropoint.ao.nn._registry import static_twin_of
from zeropoint.ao.nn._weight_norm import effective_weight
from zeropoint.ao.nn.quantized._base import REFUSALS, CodesModule, GridModule, WeightedModule
from zeropoint.ao.nn.quantized._from_float import calibrated_weight, output_grid, require_class
from zeropoint.ao.nn.quantized._weights import join_weight
from zeropoint.dtypes import as_qdtype
from zeropoint.ops.conv import check_steps, to_tuple
from zeropoint.ops.conv_transpose import output_padding_for
from zeropoint.tensor import QTensor, make_qtensor

__all__ = ["ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "TransposedWeights"]

Size = int | tuple[int, ...]


def exchange_channels(weight: Tensor, groups: int) -> Tensor:
    """(in_channels, out_channels / groups, kernel) as (out_channels, in_channels / groups, kernel), and back."""
    blocks: Tensor = weight.unflatten(0, (groups, -1))
    return blocks.transpose(1, 2).flatten(0, 1)


class _ByOutputChannel(nn.Module):
    """A transposed layer's weight as observers see that of any layer: output channels along axis 0."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.of = (exchange_channels(effective_weight(layer), layer.groups), layer.bias)

    def folded_weight_bias(self) -> tuple[Tensor, Tensor | None]:
        return self.of


class TransposedWeights(WeightedModule):
    """Weights, arguments and packing of a transposed convolution, static or dynamic.

    The codes are stored as in the float module, (in_channels, out_channels / groups, kernel), with one grid, or one an
    output channel. With groups such grids lie along no dimension of that layout: then ``weight`` reads as
    (out_channels, in_channels / groups, kernel), and :meth:`set_weight_bias` takes that layout too, along axis 0.
    """

    CHANNEL_AXIS = 1
    RANK: ClassVar[int]
    INPUT_SIZE = "in_channels"
    FLOAT_CLASS: ClassVar[type[nn.Module]]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Size = 1,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if isinstance(self, GridModule):
            self._init_grid(1.0, 0)
        name = type(self).__name__
        if out_channels < 1 or in_channels < 1:
            raise ValueError(f"{name} needs channels, got {in_channels} in and {out_channels} out")
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(
                f"{name}: groups={groups} does not divide {in_channels} input and {out_channels} output channels"
            )
        if padding_mode != "zeros":
            raise ValueError(f"{name} takes padding_mode='zeros', got {padding_mode!r}")
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = to_tuple(kernel_size, self.RANK, "kernel_size")
        self.stride = to_tuple(stride, self.RANK, "stride")
        self.padding = to_tuple(padding, self.RANK, "padding")
        self.output_padding = to_tuple(output_padding, self.RANK, "output_padding")
        self.dilation = to_tuple(dilation, self.RANK, "dilation")
        check_steps(name, self.stride, self.dilation, self.padding)
        self.groups = groups
        self.padding_mode = padding_mode
        self.transposed = True
        self._init_weight((in_channels, out_channels // groups, *self.kernel_size), bias, device)

    @property
    def _channels(self) -> int:
        return self.out_channels

    def _pack(self, weight: Tensor) -> Tensor:
        return cast(
            Tensor,
            torch.ops.zeropoint.conv_transpose_pack.default(weight, self.stride, self.dilation, self.groups),
        )

    @property
    def weight(self) -> QTensor:
        """The qint8 weight, in the float module's layout where its grids allow it; callable."""
        codes = cast(Tensor, self._buffers["weight"])
        scale, zero_point = (
            cast(Tensor, self._buffers["weight_scale"]),
            cast(Tensor, self._buffers["weight_zero_point"]),
        )
        if scale.dim() and self.groups > 1:
            return join_weight(exchange_channels(codes, self.groups), scale, zero_point, 0)
        return join_weight(codes, scale, zero_point, self.CHANNEL_AXIS)

    def set_weight_bias(self, w: Tensor, b: Tensor | None) -> None:
        """Takes new weights and a new bias, and packs the weights anew.

        Args:
            w: qint8 tensor in the float module's layout, on one grid or one an entry of dimension 1 (which all groups
                share); or (out_channels, in_channels / groups, kernel) with one grid an output channel, along axis 0.
            b: float tensor with one entry an output channel, or None.

        Raises:
            TypeError: ``w`` is not qint8. ValueError: shapes that do not fit; the module is then unchanged.
        """
        quantized = isinstance(w, QTensor) or (isinstance(w, Tensor) and w.is_quantized)
        if not quantized or "per_channel" not in str(w.qscheme()):
            super().set_weight_bias(w, b)
            return
        axis = w.q_per_channel_axis()
        codes = w.int_repr()
        scales, zero_points = w.q_per_channel_scales(), w.q_per_channel_zero_points()
        if axis == 0:
            expected = (self.out_channels, self.in_channels // self.groups, *self.kernel_size)
            if tuple(codes.shape) != expected:
                raise ValueError(
                    f"{self._where()} takes a weight with grids along axis 0 in shape {expected}, "
                    f"got {tuple(codes.shape)}"
                )
            codes = exchange_channels(codes, self.groups).contiguous()
        elif axis == 1:
            scales, zero_points = scales.repeat(self.groups), zero_points.repeat(self.groups)
        else:
            raise ValueError(f"{self._where()} takes grids along axis 0 or 1 of its weight, got axis {axis}")
        # One grid first, which checks codes and bias against the module; then the grids of the channels.
        super().set_weight_bias(make_qtensor(codes, as_qdtype(w.dtype), 1.0, 0), b)
        self._buffers["weight_scale"] = scales.to(torch.float32)
        self._buffers["weight_zero_point"] = zero_points.to(torch.int32)

    def _output_padding(self, output_size: Sequence[int] | None, x: Tensor) -> tuple[int, ...]:
        return output_padding_for(
            *(output_size, x.shape[2:], self.output_padding),
            *(self.kernel_size, self.stride, self.padding, self.dilation),
        )

    def extra_repr(self) -> str:
        words = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"]
        if isinstance(self, GridModule):
            words.append(f"scale={self.scale}, zero_point={self.zero_point}")
        for name in ("padding", "output_padding"):
            if any(getattr(self, name)):
                words.append(f"{name}={getattr(self, name)}")
        if math.prod(self.dilation) != 1:
            words.append(f"dilation={self.dilation}")
        if self.groups != 1:
            words.append(f"groups={self.groups}")
        if self._buffers["bias"] is None:
            words.append("bias=False")
        return ", ".join(words)

    @classmethod
    def _like(cls, layer: Any) -> Any:
        return cls(
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,
            layer.stride,
            layer.padding,
            layer.output_padding,
            layer.groups,
            layer.bias is not None,
            layer.dilation,
            layer.padding_mode,
        )

    def _take_weight(self, mod: nn.Module, layer: nn.Module, use_precomputed: bool, default: Any = None) -> None:
        weight, bias = calibrated_weight(mod, _ByOutputChannel(layer), 0, use_precomputed, default)
        if weight.axis is None:
            codes = exchange_channels(weight._codes, self.groups).contiguous()
            weight = make_qtensor(codes, weight.qdtype, weight.scale, weight.zero_point)
        self.set_weight_bias(weight, bias)


class _ConvTransposeNd(TransposedWeights, CodesModule):
    """Transposed convolution from codes to codes: int8 weights, exact integer sums, one rounding at the end.

    The arguments are those of the float module. The input is a per-tensor qint8 or quint8 tensor (N, C, spatial) or
    (C, spatial) on whatever grid it has; the output lies channels-last in memory and has the dtype that the activation
    observer declared, else the input's.

    Attributes:
        weight: qint8 tensor (in_channels, out_channels / groups, kernel), on one grid or one an output channel;
            callable. With groups and a grid an output channel, (out_channels, in_channels / groups, kernel).
        bias: float32 tensor (out_channels,) or None; callable.
        scale, zero_point: the output's grid; plain numbers may be assigned.

    Raises:
        ValueError: channels that ``groups`` does not divide, a padding mode but zeros, no channels, a stride or
            dilation below 1, negative padding.
    """

    def forward(self, x: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """A quantized (N, out_channels, spatial) tensor.

        Args:
            x: the input.
            output_size: the output's spatial sizes, of those that the stride leaves open; instead of output_padding.

        Raises:
            TypeError: ``x`` is not quantized to 8 bits. RuntimeError: a per-channel grid, or sizes that do not fit.
            ValueError: an ``output_size`` that cannot be reached.
        """
        if not isinstance(x, QTensor) or x.axis is not None:
            self._refuse(x)
        codes = x._codes
        batched = codes.dim() != self.RANK + 1
        if not batched:
            codes = codes.unsqueeze(0)
        grid = self._output_grid(x.qdtype)
        try:
            output_padding = self._output_padding(output_size, codes)
            window = (self.stride, self.padding, output_padding, self.dilation, self.groups)
            arguments = self._arguments(x, grid, *window)
            out = torch.ops.zeropoint.conv_transpose.default(codes, *arguments, self._packed_weight())
        except REFUSALS as error:
            self._explain(error, x)
        return make_qtensor(out if batched else out.squeeze(0), grid[4], grid[0], grid[1])

    @classmethod
    def from_float(cls, mod: nn.Module, use_precomputed_fake_quant: bool = False) -> _ConvTransposeNd:
        """The quantized twin of a calibrated float module.

        Args:
            mod: the float class of the same rank or a subclass, with a qconfig and an ``activation_post_process``. A
                per-channel weight observer sees the output channels along axis 0, whatever the layout of the weight.
            use_precomputed_fake_quant: keep the weight grid that ``mod.weight_fake_quant`` trained.

        Raises:
            TypeError: another class. RuntimeError: no qconfig, or not prepared.
        """
        require_class(mod, (cls.FLOAT_CLASS,), cls)
        return cls._from_layer(mod, mod, use_precomputed_fake_quant)

    @classmethod
    def _from_layer(cls, mod: nn.Module, layer: nn.Module, use_precomputed_fake_quant: bool) -> _ConvTransposeNd:
        twin: _ConvTransposeNd = cls._like(layer)
        twin._take_weight(mod, layer, use_precomputed_fake_quant)
        twin._init_grid(*output_grid(mod))
        return twin

    @classmethod
    def from_reference(cls, ref_qconvt: Any, output_scale: float, output_zero_point: int) -> _ConvTransposeNd:
        """From a reference module: a float layer with a ``get_quantized_weight()``, and an output grid."""
        twin: _ConvTransposeNd = cls._like(ref_qconvt)
        twin.set_weight_bias(ref_qconvt.get_quantized_weight(), ref_qconvt.bias)
        twin.scale, twin.zero_point = float(output_scale), int(output_zero_point)
        return twin


@static_twin_of(nn.ConvTranspose1d)
class ConvTranspose1d(_ConvTransposeNd):
    __doc__ = "1d " + (_ConvTransposeNd.__doc__ or "")
    RANK = 1
    FLOAT_CLASS = nn.ConvTranspose1d


@static_twin_of(nn.ConvTranspose2d)
class ConvTranspose2d(_ConvTransposeNd):
    __doc__ = "2d " + (_ConvTransposeNd.__doc__ or "")
    RANK = 2
    FLOAT_CLASS = nn.ConvTranspose2d


@static_twin_of(nn.ConvTranspose3d)
class ConvTranspose3d(_ConvTransposeNd):
    __doc__ = "3d " + (_ConvTransposeNd.__doc__ or "")
    RANK = 3
    FLOAT_CLASS = nn.ConvTranspose3d
