"""Convolutions on quantized tensors.

May import: ``tensor``, ``ops.conv``, and what quantized modules share.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from zeropoint.ao.nn._registry import static_twin_of
from zeropoint.ao.nn.quantized._base import (
    REFUSALS,
    BoundModule,
    GridModule,
    OutputGrid,
    WeightedModule,
)
from zeropoint.ao.nn.quantized._from_float import calibrated_weight, output_grid, require_class
from zeropoint.ops.conv import check_steps, pad_codes, padding_pairs, to_tuple
from zeropoint.tensor import QTensor, make_qtensor

__all__ = ["Conv1d", "Conv2d", "Conv3d", "ConvWeights"]

_PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
Size = int | tuple[int, ...]


class ConvWeights(WeightedModule):
    """Weights, arguments and packing of a convolution, static or dynamic."""

    RANK: ClassVar[int]
    INPUT_SIZE = "in_channels"
    FLOAT_CLASS: ClassVar[type[nn.Module]]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if isinstance(self, GridModule):
            self._init_grid(1.0, 0)
        if out_channels < 1 or in_channels < 1:
            raise ValueError(f"{type(self).__name__} needs channels, got {in_channels} in and {out_channels} out")
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(
                f"{type(self).__name__}: groups={groups} does not divide {in_channels} input and {out_channels} output "
                "channels"
            )
        if padding_mode not in _PADDING_MODES:
            raise ValueError(
                f"{type(self).__name__}: padding_mode must be one of {_PADDING_MODES}, got {padding_mode!r}"
            )
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = to_tuple(kernel_size, self.RANK, "kernel_size")
        self.stride = to_tuple(stride, self.RANK, "stride")
        self.dilation = to_tuple(dilation, self.RANK, "dilation")
        self.padding = padding if isinstance(padding, str) else to_tuple(padding, self.RANK, "padding")
        check_steps(type(self).__name__, self.stride, self.dilation, self.padding)
        self._padding_pairs = padding_pairs(padding, self.kernel_size, self.stride, self.dilation)
        self.transposed = False
        self.output_padding = (0,) * self.RANK
        self.groups = groups
        self.padding_mode = padding_mode
        self._init_weight((out_channels, in_channels // groups, *self.kernel_size), bias, device)

    @property
    def _channels(self) -> int:
        return self.out_channels

    def _pack(self, weight: Tensor) -> Tensor:
        return cast(Tensor, torch.ops.zeropoint.conv_pack.default(weight, self.groups))

    def extra_repr(self) -> str:
        words = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"]
        if isinstance(self, GridModule):
            words.append(f"scale={self.scale}, zero_point={self.zero_point}")
        if isinstance(self.padding, str) or any(self.padding):
            words.append(f"padding={self.padding}")
        if math.prod(self.dilation) != 1:
            words.append(f"dilation={self.dilation}")
        if self.groups != 1:
            words.append(f"groups={self.groups}")
        if self._buffers["bias"] is None:
            words.append("bias=False")
        if self.padding_mode != "zeros":
            words.append(f"padding_mode={self.padding_mode}")
        return ", ".join(words)

    @classmethod
    def _like(cls, layer: Any) -> Any:
        return cls(
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,
            layer.stride,
            layer.padding,
            layer.dilation,
            layer.groups,
            layer.bias is not None,
            layer.padding_mode,
        )


class _ConvNd(ConvWeights, BoundModule):
    """Convolution from codes to codes: int8 weights, exact integer sums, one rounding at the end.

    The arguments are those of the float module. Padding with zeros pads with the code of real zero. The input is a
    per-tensor qint8 or quint8 tensor (N, C, spatial) or (C, spatial) on whatever grid it has; the output lies
    channels-last in memory and has the dtype that the activation observer declared, else the input's.

    Attributes:
        weight: qint8 tensor (out_channels, in_channels / groups, kernel), on one grid or one an output channel;
            callable.
        bias: float32 tensor (out_channels,) or None; callable.
        scale, zero_point: the output's grid; plain numbers may be assigned.

    Raises:
        ValueError: channels that ``groups`` does not divide, an unknown padding mode, no output channels, a stride or
            dilation below 1.
    """

    def _window(self) -> tuple[Any, ...]:
        """Other values than zeros are padded before the operator."""
        pairs = self._padding_pairs if self.padding_mode == "zeros" else [0] * len(self._padding_pairs)
        return self.stride, pairs, self.dilation, self.groups

    def _bind(self, x: QTensor, out: OutputGrid) -> Tensor:
        arguments = self._arguments(x, out, *self._window())
        return torch.ops.zeropoint.conv_bind.default(x._codes.dtype, *arguments)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """A quantized (N, out_channels, spatial) tensor.

        Raises:
            TypeError: ``x`` is not quantized to 8 bits. RuntimeError: a per-channel grid, or sizes that do not fit.
        """
        if not isinstance(x, QTensor) or x.axis is not None:
            self._refuse(x)
        codes = x._codes
        batched = codes.dim() != self.RANK + 1
        if not batched:
            codes = codes.unsqueeze(0)
        try:
            if self.padding_mode != "zeros":
                codes = pad_codes(codes, self._padding_pairs, self.padding_mode)
            bound = self._bound_call(x)
            if bound is not None:
                weight, packed, bytes_, grid = bound
                out = torch.ops.zeropoint.conv_bound.default(codes, weight, packed, bytes_)
                return make_qtensor(out if batched else out.squeeze(0), *grid)
            out_grid = self._output_grid(x.qdtype)
            arguments = self._arguments(x, out_grid, *self._window())
            out = torch.ops.zeropoint.conv.default(codes, *arguments, self._packed_weight())
        except REFUSALS as error:
            self._explain(error, x)
        return make_qtensor(out if batched else out.squeeze(0), out_grid[4], out_grid[0], out_grid[1])

    @classmethod
    def from_float(cls, mod: nn.Module, use_precomputed_fake_quant: bool = False) -> _ConvNd:
        """The quantized twin of a calibrated float or QAT module.

        Args:
            mod: the float class of the same rank or a subclass, with a qconfig and an ``activation_post_process``.
            use_precomputed_fake_quant: keep the weight grid that ``mod.weight_fake_quant`` trained.

        Raises:
            TypeError: another class. RuntimeError: no qconfig, or not prepared.
        """
        require_class(mod, (cls.FLOAT_CLASS,), cls)
        return cls._from_layer(mod, mod, use_precomputed_fake_quant)

    @classmethod
    def _from_layer(cls, mod: nn.Module, layer: nn.Module, use_precomputed_fake_quant: bool) -> _ConvNd:
        twin: _ConvNd = cls._like(layer)
        weight, bias = calibrated_weight(mod, layer, cls.CHANNEL_AXIS, use_precomputed_fake_quant)
        twin.set_weight_bias(weight, bias)
        twin._init_grid(*output_grid(mod))
        return twin

    @classmethod
    def from_reference(cls, ref_qconv: Any, output_scale: float, output_zero_point: int) -> _ConvNd:
        """From a reference module: a float convolution with a ``get_quantized_weight()``, and an output grid."""
        twin: _ConvNd = cls._like(ref_qconv)
        twin.set_weight_bias(ref_qconv.get_quantized_weight(), ref_qconv.bias)
        twin.scale, twin.zero_point = float(output_scale), int(output_zero_point)
        return twin


@static_twin_of(nn.Conv1d)
class Conv1d(_ConvNd):
    __doc__ = "1d " + (_ConvNd.__doc__ or "")
    RANK = 1
    FLOAT_CLASS = nn.Conv1d


@static_twin_of(nn.Conv2d)
class Conv2d(_ConvNd):
    __doc__ = "2d " + (_ConvNd.__doc__ or "")
    RANK = 2
    FLOAT_CLASS = nn.Conv2d


@static_twin_of(nn.Conv3d)
class Conv3d(_ConvNd):
    __doc__ = "3d " + (_ConvNd.__doc__ or "")
    RANK = 3
    FLOAT_CLASS = nn.Conv3d
