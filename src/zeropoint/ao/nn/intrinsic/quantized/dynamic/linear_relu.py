"""Dynamic Linear with a rectifier in its epilogue. May import: ``ao.nn.quantized``, ``intrinsic.fused``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from zeropoint.ao.nn._registry import dynamic_twin_of
from zeropoint.ao.nn.intrinsic import fused
from zeropoint.ao.nn.quantized import dynamic as nnqd
from zeropoint.ao.nn.quantized._from_float import require_class
from zeropoint.dtypes import qint8

__all__ = ["LinearReLU"]


@dynamic_twin_of(fused.LinearReLU)
class LinearReLU(nnqd.Linear):
    """A linear transformation followed by a rectifier, on float tensors, with int8 weights.

    Args:
        in_features, out_features, bias: as for the float layer.
        dtype: of the weights, qint8.
    """

    rectifier = "relu"

    def __init__(self, in_features: int, out_features: int, bias: bool = True, dtype: Any = qint8) -> None:
        super().__init__(in_features, out_features, bias, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """A float (..., out_features) tensor of ``x``'s dtype, not below 0."""
        y = super().forward(x)
        return y.clamp(max=6.0) if self.rectifier == "relu6" else y

    @classmethod
    def from_float(cls, mod: nn.Module, use_precomputed_fake_quant: bool = False) -> LinearReLU:
        """The dynamic twin of a fused float module. Raises TypeError for another class."""
        require_class(mod, (fused.LinearReLU,), cls)
        assert isinstance(mod, nn.Sequential)
        twin = cls._from_layer(mod, mod[0], use_precomputed_fake_quant)
        assert isinstance(twin, LinearReLU)
        if isinstance(mod[1], nn.ReLU6):
            twin.rectifier = "relu6"
        return twin
