"""Max pooling and dropout on quantized tensors: both keep the input's grid.

May import: what quantized modules share.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.modules.pooling import _MaxPoolNd

from zeropoint.ao.nn._registry import static_twin_of
from zeropoint.ao.nn.quantized._base import QuantizedModule
from zeropoint.ops.conv import to_tuple

__all__ = ["Dropout", "MaxPool1d", "MaxPool2d", "MaxPool3d"]

_M = TypeVar("_M", bound="_MaxPool")


class _MaxPool(QuantizedModule, _MaxPoolNd):
    """Max pooling of codes, on the input's grid. A float tensor outside the quantized region is served too.

    Args:
        kernel_size, stride, padding, dilation, ceil_mode: as in the float module.
        return_indices: must be False.

    Raises:
        ValueError: ``return_indices``, or a tuple of the wrong length.
    """

    RANK: int

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        return_indices: bool = False,
        ceil_mode: bool = False,
    ) -> None:
        if return_indices:
            raise ValueError(f"quantized {type(self).__name__} does not return indices: dequantize() first")
        super().__init__(kernel_size, stride, padding, dilation, False, ceil_mode)
        for name in ("kernel_size", "stride", "padding", "dilation"):
            to_tuple(getattr(self, name), self.RANK, name)

    @classmethod
    def from_float(cls: type[_M], mod: Any, use_precomputed_fake_quant: bool = False) -> _M:
        """The twin of a float module; it needs no calibration."""
        return cls(mod.kernel_size, mod.stride, mod.padding, mod.dilation, mod.return_indices, mod.ceil_mode)


@static_twin_of(nn.MaxPool1d)
class MaxPool1d(_MaxPool, nn.MaxPool1d):
    __doc__ = "1d " + (_MaxPool.__doc__ or "")
    RANK = 1


@static_twin_of(nn.MaxPool2d)
class MaxPool2d(_MaxPool, nn.MaxPool2d):
    __doc__ = "2d " + (_MaxPool.__doc__ or "")
    RANK = 2


@static_twin_of(nn.MaxPool3d)
class MaxPool3d(_MaxPool, nn.MaxPool3d):
    __doc__ = "3d " + (_MaxPool.__doc__ or "")
    RANK = 3


@static_twin_of(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
class Dropout(QuantizedModule):
    """Dropout for inference: the identity, on quantized and float tensors.

    Args:
        p: the float module's probability, kept for show.
        inplace: accepted as in the float module.
    """

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """``x`` itself."""
        return x

    def extra_repr(self) -> str:
        return f"p={self.p}"

    @classmethod
    def from_float(cls, mod: Any, use_precomputed_fake_quant: bool = False) -> Dropout:
        """The twin of a float module; it needs no calibration."""
        return cls(mod.p)

    @classmethod
    def from_reference(cls, mod: Any, scale: float, zero_point: int) -> Dropout:
        """As :meth:`from_float`: dropout has no grid."""
        return cls(mod.p)
