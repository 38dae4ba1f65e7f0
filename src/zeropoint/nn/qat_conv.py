"""OneFlow-style convolutions that simulate the quantization of their input and weight.

May import: ``nn.quantization``.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from zeropoint.nn.quantization import FakeQuantization, MinMaxObserver, MovingAverageMinMaxObserver

__all__ = ["QatConv1d", "QatConv2d", "QatConv3d"]

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


class _QatConv(nn.modules.conv._ConvNd):
    """What the three ranks share: two observers, one fake quantizer, and the step that the input's observer reads.

    The step stays 0 unless the caller counts it, so in training the input's range is averaged all along.
    """

    current_train_step: Tensor

    def _attach(self, formula: str, bit: int, scheme: str, weight_quant_per_layer: bool, momentum: float) -> None:
        self.register_buffer("current_train_step", torch.zeros(1, dtype=torch.int64, device=self.weight.device))
        self.input_min_max_observer = MovingAverageMinMaxObserver(1, formula, bit, scheme, momentum).to(
            self.weight.device
        )
        self.weight_min_max_observer = MinMaxObserver(formula, bit, scheme, weight_quant_per_layer)
        self.fake_quantizer = FakeQuantization(formula, bit, scheme)

    def forward(self, x: Tensor) -> Tensor:
        """The convolution of the rounded input with the rounded weight; the bias stays as it is."""
        scale, zero_point = self.input_min_max_observer(x, self.current_train_step)
        rounded = self.fake_quantizer(x, scale, zero_point)
        weight = self.fake_quantizer(self.weight, *self.weight_min_max_observer(self.weight))
        out: Tensor = self._conv_forward(rounded, weight, self.bias)
        return out


class QatConv1d(_QatConv, nn.Conv1d):
    """A 1d convolution that simulates the quantization of its input and weight.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype: as
            :class:`torch.nn.Conv1d`.
        quantization_formula, quantization_bit, quantization_scheme: as :class:`~zeropoint.nn.FakeQuantization`.
        weight_quant_per_layer: one weight grid; False gives one an output channel.
        input_quant_momentum: as :class:`~zeropoint.nn.MovingAverageMinMaxObserver`.

    Attributes:
        input_min_max_observer, weight_min_max_observer, fake_quantizer: the parts.
        current_train_step: int64 buffer of shape [1], which the caller may count up to freeze the input's range.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        quantization_formula: str = "google",
        quantization_bit: int = 8,
        quantization_scheme: str = "symmetric",
        weight_quant_per_layer: bool = True,
        input_quant_momentum: float = 0.95,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self._attach(
            quantization_formula, quantization_bit, quantization_scheme, weight_quant_per_layer, input_quant_momentum
        )


class QatConv2d(_QatConv, nn.Conv2d):
    """A 2d convolution that simulates the quantization of its input and weight.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype: as
            :class:`torch.nn.Conv2d`.
        quantization_formula, quantization_bit, quantization_scheme: as :class:`~zeropoint.nn.FakeQuantization`.
        weight_quant_per_layer: one weight grid; False gives one an output channel.
        input_quant_momentum: as :class:`~zeropoint.nn.MovingAverageMinMaxObserver`.

    Attributes:
        input_min_max_observer, weight_min_max_observer, fake_quantizer: the parts.
        current_train_step: int64 buffer of shape [1], which the caller may count up to freeze the input's range.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        quantization_formula: str = "google",
        quantization_bit: int = 8,
        quantization_scheme: str = "symmetric",
        weight_quant_per_layer: bool = True,
        input_quant_momentum: float = 0.95,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self._attach(
            quantization_formula, quantization_bit, quantization_scheme, weight_quant_per_layer, input_quant_momentum
        )


class QatConv3d(_QatConv, nn.Conv3d):
    """A 3d convolution that simulates the quantization of its input and weight.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype: as
            :class:`torch.nn.Conv3d`.
        quantization_formula, quantization_bit, quantization_scheme: as :class:`~zeropoint.nn.FakeQuantization`.
        weight_quant_per_layer: one weight grid; False gives one an output channel.
        input_quant_momentum: as :class:`~zeropoint.nn.MovingAverageMinMaxObserver`.

    Attributes:
        input_min_max_observer, weight_min_max_observer, fake_quantizer: the parts.
        current_train_step: int64 buffer of shape [1], which the caller may count up to freeze the input's range.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        quantization_formula: str = "google",
        quantization_bit: int = 8,
        quantization_scheme: str = "symmetric",
        weight_quant_per_layer: bool = True,
        input_quant_momentum: float = 0.95,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self._attach(
            quantization_formula, quantization_bit, quantization_scheme, weight_quant_per_layer, input_quant_momentum
        )
