"""Convolutions that simulate quantized weights while they train.

May import: what QAT modules share, ``ao.nn.quantized``.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from zeropoint.ao.nn import quantized as nnq
from zeropoint.ao.nn._registry import converts_to, qat_twin_of
from zeropoint.ao.nn._weight_norm import bake_weight
from zeropoint.ao.nn.qat._base import WeightSimulation, float_copy, share
from zeropoint.ao.nn.quantized._from_float import require_class

__all__ = ["Conv1d", "Conv2d", "Conv3d", "ConvTwin", "conv_arguments"]

_C = TypeVar("_C", bound="ConvTwin")


class ConvTwin(WeightSimulation):
    """What the QAT twins of convolutions share: how they come from a float layer and go back to one."""

    FLOAT_CLASS: ClassVar[type[nn.Module]]
    weight: Any
    bias: Any

    @staticmethod
    def _arguments(layer: Any) -> tuple[Any, ...]:
        """The constructor arguments that make a layer of the same sizes."""
        raise NotImplementedError

    @classmethod
    def from_float(cls: type[_C], mod: nn.Module, use_precomputed_fake_quant: bool = False) -> _C:
        """The QAT twin of a float module; it shares the parameter objects.

        Args:
            mod: the float class of the same rank or a subclass; its qconfig is taken over.
            use_precomputed_fake_quant: accepted as in ``torch.ao``; nothing is computed here.

        Raises:
            TypeError: another class.
        """
        require_class(mod, (cls.FLOAT_CLASS,), cls)
        return cls._from_layer(bake_weight(mod), getattr(mod, "qconfig", None))

    @classmethod
    def _from_layer(cls: type[_C], layer: Any, qconfig: Any) -> _C:
        make: Any = cls
        twin: _C = make(*cls._arguments(layer), qconfig, layer.weight.device, layer.weight.dtype)
        share(layer, twin)
        return twin

    def to_float(self) -> nn.Module:
        """A float copy with detached parameters, in the same mode."""
        return float_copy(self, self.FLOAT_CLASS(*self._arguments(self)))  # type: ignore[no-any-return]


class _QATConv(ConvTwin):
    """A convolution with simulated quantization of its weight: per output channel, unless the qconfig says otherwise.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode: as for the float
            class.
        qconfig: chooses the observers; None for averaged activations and one symmetric weight grid an output channel.
        device, dtype: of the parameters.

    Attributes:
        weight, bias: float parameters.
        weight_fake_quant: simulates the weight's grid in the forward pass.
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
        padding_mode: str = "zeros",
        qconfig: Any = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self._simulate(qconfig, self.weight.device)

    def forward(self, input: Tensor) -> Tensor:
        """The convolution with the fake-quantized weight, float."""
        y: Tensor = self._conv_forward(input, self.weight_fake_quant(self.weight), self.bias)  # type: ignore[operator]
        return y

    @staticmethod
    def _arguments(layer: Any) -> tuple[Any, ...]:
        return conv_arguments(layer)


def conv_arguments(layer: Any) -> tuple[Any, ...]:
    """The constructor arguments that make a convolution of the same sizes."""
    return (
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


@qat_twin_of(nn.Conv1d)
@converts_to(nnq.Conv1d)
class Conv1d(_QATConv, nn.Conv1d):
    __doc__ = "1d: " + (_QATConv.__doc__ or "")
    FLOAT_CLASS = nn.Conv1d


@qat_twin_of(nn.Conv2d)
@converts_to(nnq.Conv2d)
class Conv2d(_QATConv, nn.Conv2d):
    __doc__ = "2d: " + (_QATConv.__doc__ or "")
    FLOAT_CLASS = nn.Conv2d


@qat_twin_of(nn.Conv3d)
@converts_to(nnq.Conv3d)
class Conv3d(_QATConv, nn.Conv3d):
    __doc__ = "3d: " + (_QATConv.__doc__ or "")
    FLOAT_CLASS = nn.Conv3d
