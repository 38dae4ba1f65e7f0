"""Convolutions with batch norm and rectifier, for training. May import: ``ao.nn.qat``, ``intrinsic``."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from zeropoint.ao.nn import qat
from zeropoint.ao.nn import quantized as nnq
from zeropoint.ao.nn._registry import converts_to, qat_twin_of
from zeropoint.ao.nn.intrinsic import fused, quantized
from zeropoint.ao.nn.intrinsic.qat._batch_norm import BatchNormSimulation, freeze_bn_stats, update_bn_stats
from zeropoint.ao.nn.intrinsic.qat._rectify import RectifiedSimulation
from zeropoint.ao.nn.qat.conv import conv_arguments

__all__ = [
    "ConvBn1d",
    "ConvBn2d",
    "ConvBn3d",
    "ConvBnReLU1d",
    "ConvBnReLU2d",
    "ConvBnReLU3d",
    "ConvReLU1d",
    "ConvReLU2d",
    "ConvReLU3d",
    "ConvTransposeReLU1d",
    "ConvTransposeReLU2d",
    "ConvTransposeReLU3d",
    "freeze_bn_stats",
    "update_bn_stats",
]

_C = TypeVar("_C", bound="_ConvBn")


class _ConvBn(BatchNormSimulation):
    """A convolution and a batch norm that train together, with simulated quantization of the folded weight.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode: of the
            convolution.
        eps, momentum: of the batch norm.
        freeze_bn: start with frozen statistics.
        qconfig: chooses the observers; None for averaged activations and one symmetric weight grid an output channel.

    Attributes:
        weight, bias: float parameters of the convolution.
        bn: the batch norm.
        weight_fake_quant: simulates the grid of the folded weight.
    """

    BN_CLASS: ClassVar[type[_BatchNorm]]
    RELU_CLASS: ClassVar[type[nn.Module]]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: Any = None,
        padding_mode: str = "zeros",
        eps: float = 1e-05,
        momentum: float | None = 0.1,
        freeze_bn: bool = False,
        qconfig: Any = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bool(bias), padding_mode
        )
        self._keep(self.BN_CLASS(out_channels, eps, momentum), freeze_bn, qconfig)

    def _layer_output(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y: Tensor = self._conv_forward(input, weight, bias)  # type: ignore[operator]
        return y

    @classmethod
    def _like(cls: type[_C], layer: Any, qconfig: Any) -> _C:
        make: Any = cls
        twin: _C = make(*conv_arguments(layer), qconfig=qconfig)
        return twin

    def _float_layer(self) -> nn.Module:
        return self.LAYER_CLASS(*conv_arguments(self))

    def _rectified_class(self) -> type[nn.Module]:
        return self.RELU_CLASS


@qat_twin_of(fused.ConvBn1d)
@converts_to(nnq.Conv1d)
class ConvBn1d(_ConvBn, nn.Conv1d):
    __doc__ = "1d: " + (_ConvBn.__doc__ or "")
    FUSED_CLASS: ClassVar[type[nn.Module]] = fused.ConvBn1d
    LAYER_CLASS = nn.Conv1d
    BN_CLASS = nn.BatchNorm1d
    RELU_CLASS = fused.ConvReLU1d


@qat_twin_of(fused.ConvBn2d)
@converts_to(nnq.Conv2d)
class ConvBn2d(_ConvBn, nn.Conv2d):
    __doc__ = "2d: " + (_ConvBn.__doc__ or "")
    FUSED_CLASS: ClassVar[type[nn.Module]] = fused.ConvBn2d
    LAYER_CLASS = nn.Conv2d
    BN_CLASS = nn.BatchNorm2d
    RELU_CLASS = fused.ConvReLU2d


@qat_twin_of(fused.ConvBn3d)
@converts_to(nnq.Conv3d)
class ConvBn3d(_ConvBn, nn.Conv3d):
    __doc__ = "3d: " + (_ConvBn.__doc__ or "")
    FUSED_CLASS: ClassVar[type[nn.Module]] = fused.ConvBn3d
    LAYER_CLASS = nn.Conv3d
    BN_CLASS = nn.BatchNorm3d
    RELU_CLASS = fused.ConvReLU3d


@qat_twin_of(fused.ConvBnReLU1d)
@converts_to(quantized.ConvReLU1d)
class ConvBnReLU1d(ConvBn1d):
    """:class:`ConvBn1d` followed by a rectifier."""

    FUSED_CLASS = fused.ConvBnReLU1d
    rectifier = "relu"


@qat_twin_of(fused.ConvBnReLU2d)
@converts_to(quantized.ConvReLU2d)
class ConvBnReLU2d(ConvBn2d):
    """:class:`ConvBn2d` followed by a rectifier."""

    FUSED_CLASS = fused.ConvBnReLU2d
    rectifier = "relu"


@qat_twin_of(fused.ConvBnReLU3d)
@converts_to(quantized.ConvReLU3d)
class ConvBnReLU3d(ConvBn3d):
    """:class:`ConvBn3d` followed by a rectifier."""

    FUSED_CLASS = fused.ConvBnReLU3d
    rectifier = "relu"


@qat_twin_of(fused.ConvReLU1d)
@converts_to(quantized.ConvReLU1d)
class ConvReLU1d(RectifiedSimulation, qat.Conv1d):
    """A 1d convolution with simulated quantization, followed by a rectifier. Arguments as ``qat.Conv1d``."""

    FUSED_CLASS = fused.ConvReLU1d


@qat_twin_of(fused.ConvReLU2d)
@converts_to(quantized.ConvReLU2d)
class ConvReLU2d(RectifiedSimulation, qat.Conv2d):
    """A 2d convolution with simulated quantization, followed by a rectifier. Arguments as ``qat.Conv2d``."""

    FUSED_CLASS = fused.ConvReLU2d


@qat_twin_of(fused.ConvReLU3d)
@converts_to(quantized.ConvReLU3d)
class ConvReLU3d(RectifiedSimulation, qat.Conv3d):
    """A 3d convolution with simulated quantization, followed by a rectifier. Arguments as ``qat.Conv3d``."""

    FUSED_CLASS = fused.ConvReLU3d


@qat_twin_of(fused.ConvTransposeReLU1d)
@converts_to(quantized.ConvTransposeReLU1d)
class ConvTransposeReLU1d(RectifiedSimulation, qat.ConvTranspose1d):
    """A 1d transposed convolution with simulated quantization, then a rectifier; as ``qat.ConvTranspose1d``."""

    FUSED_CLASS = fused.ConvTransposeReLU1d


@qat_twin_of(fused.ConvTransposeReLU2d)
@converts_to(quantized.ConvTransposeReLU2d)
class ConvTransposeReLU2d(RectifiedSimulation, qat.ConvTranspose2d):
    """A 2d transposed convolution with simulated quantization, then a rectifier; as ``qat.ConvTranspose2d``."""

    FUSED_CLASS = fused.ConvTransposeReLU2d


@qat_twin_of(fused.ConvTransposeReLU3d)
@converts_to(quantized.ConvTransposeReLU3d)
class ConvTransposeReLU3d(RectifiedSimulation, qat.ConvTranspose3d):
    """A 3d transposed convolution with simulated quantization, then a rectifier; as ``qat.ConvTranspose3d``."""

    FUSED_CLASS = fused.ConvTransposeReLU3d
