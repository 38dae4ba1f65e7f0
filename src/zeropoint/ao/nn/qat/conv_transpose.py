"""Transposed convolutions that simulate quantized weights while they train.

May import: what QAT modules share, ``ao.nn.quantized``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from zeropoint.ao.nn import quantized as nnq
from zeropoint.ao.nn._registry import converts_to, qat_twin_of
from zeropoint.ao.nn.qat.conv import ConvTwin
from zeropoint.ao.nn.quantized.conv_transpose import exchange_channels

__all__ = ["ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]


class _QATConvTranspose(ConvTwin):
    """A transposed convolution with simulated quantization of its weight: per output channel, unless told otherwise.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation, padding_mode:
            as for the float class.
        qconfig: chooses the observers; None for averaged activations and one symmetric weight grid an output channel.
        device, dtype: of the parameters.

    Attributes:
        weight, bias: float parameters.
        weight_fake_quant: simulates the weight's grid in the forward pass; it sees (out_channels,
            in_channels / groups, kernel), whose first dimension is that of the grids.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Any = 1,
        padding_mode: str = "zeros",
        qconfig: Any = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            *(in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation),
            *(padding_mode, device, dtype),
        )
        self._simulate(qconfig, self.weight.device)

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """The transposed convolution with the fake-quantized weight, float; ``output_size`` as in the float class."""
        layer: Any = self
        rank = len(layer.kernel_size)
        output_padding = layer._output_padding(
            input, output_size, layer.stride, layer.padding, layer.kernel_size, rank, layer.dilation
        )
        rounded = self.weight_fake_quant(exchange_channels(self.weight, layer.groups))
        weight = exchange_channels(rounded, layer.groups)
        function: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
        y: Tensor = function(
            input, weight, self.bias, layer.stride, layer.padding, output_padding, layer.groups, layer.dilation
        )
        return y

    @staticmethod
    def _arguments(layer: Any) -> tuple[Any, ...]:
        sizes = (layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding)
        has_bias = layer.bias is not None
        return (*sizes, layer.output_padding, layer.groups, has_bias, layer.dilation, layer.padding_mode)


@qat_twin_of(nn.ConvTranspose1d)
@converts_to(nnq.ConvTranspose1d)
class ConvTranspose1d(_QATConvTranspose, nn.ConvTranspose1d):
    __doc__ = "1d: " + (_QATConvTranspose.__doc__ or "")
    FLOAT_CLASS = nn.ConvTranspose1d


@qat_twin_of(nn.ConvTranspose2d)
@converts_to(nnq.ConvTranspose2d)
class ConvTranspose2d(_QATConvTranspose, nn.ConvTranspose2d):
    __doc__ = "2d: " + (_QATConvTranspose.__doc__ or "")
    FLOAT_CLASS = nn.ConvTranspose2d


@qat_twin_of(nn.ConvTranspose3d)
@converts_to(nnq.ConvTranspose3d)
class ConvTranspose3d(_QATConvTranspose, nn.ConvTranspose3d):
    __doc__ = "3d: " + (_QATConvTranspose.__doc__ or "")
    FLOAT_CLASS = nn.ConvTranspose3d
