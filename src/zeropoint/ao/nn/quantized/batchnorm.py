"""Batch norm on quantized tensors, with running statistics.

May import: ``tensor``, and what quantized modules share.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from zeropoint.ao.nn._registry import static_twin_of
from zeropoint.ao.nn.quantized._base import GridModule
from zeropoint.ao.nn.quantized._from_float import output_grid, require_class
from zeropoint.tensor import QTensor, make_qtensor

__all__ = ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d"]

_B = TypeVar("_B", bound="_QuantizedBatchNorm")


class _QuantizedBatchNorm(GridModule, _BatchNorm):
    """Batch norm from codes to codes: always with the running statistics, in training mode too.

    Args:
        num_features: channels (dimension 1 of the input).
        eps: added to the variance.
        momentum: kept for show.

    Attributes:
        weight, bias, running_mean, running_var: as in the float module, float32.
        scale, zero_point: the output's grid; plain numbers may be assigned.
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(num_features, eps, momentum, True, True, device, dtype)
        self._init_grid(1.0, 0)

    def forward(self, x: Tensor) -> Tensor:
        """A quantized tensor of ``x``'s shape.

        Raises:
            TypeError: ``x`` is not quantized. ValueError: another number of dimensions or channels.
        """
        if not isinstance(x, QTensor) or x.axis is not None:
            self._refuse(x)
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        if x.shape[1] != self.num_features:
            raise ValueError(
                f"{self._where()} takes {self.num_features} channels, got shape {tuple(x.shape)}: "
                f"permute the input, or make the layer with num_features={x.shape[1]}"
            )
        scale, zero_point, low, high, qdtype = self._output_grid(x.qdtype)
        codes = torch.ops.zeropoint.batch_norm.default(
            x._codes,
            x.scale,
            x.zero_point,
            self.weight,
            self.bias,
            self.running_mean,
            self.running_var,
            self.eps,
            scale,
            zero_point,
            low,
            high,
            qdtype.storage,
        )
        return make_qtensor(codes, qdtype, scale, zero_point)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, scale={self.scale}, zero_point={self.zero_point}"

    @classmethod
    def from_float(cls: type[_B], mod: nn.Module, use_precomputed_fake_quant: bool = False) -> _B:
        """The twin of a calibrated float module.

        Raises:
            TypeError: another class. RuntimeError: not prepared. ValueError: no running statistics.
        """
        require_class(mod, (_BatchNorm,), cls)
        return cls._from_layer(mod, cast(_BatchNorm, mod))

    @classmethod
    def _from_layer(cls: type[_B], mod: nn.Module, bn: _BatchNorm, use_precomputed_fake_quant: bool = False) -> _B:
        twin = cls._like(bn)
        twin._init_grid(*output_grid(mod))
        return twin

    @classmethod
    def _like(cls: type[_B], bn: _BatchNorm) -> _B:
        if bn.running_mean is None or bn.running_var is None:
            raise ValueError(
                f"{type(bn).__name__} has no running statistics, so it cannot be quantized: "
                "make it with track_running_stats=True"
            )
        twin = cls(bn.num_features, bn.eps)
        twin.momentum = bn.momentum
        for name in ("weight", "bias"):
            value = getattr(bn, name)
            if value is not None:
                value = nn.Parameter(value.detach().to(torch.float32, copy=True), requires_grad=False)
            setattr(twin, name, value)
        twin.running_mean = bn.running_mean.detach().to(torch.float32, copy=True)
        twin.running_var = bn.running_var.detach().to(torch.float32, copy=True)
        twin.num_batches_tracked = bn.num_batches_tracked
        return twin

    @classmethod
    def from_reference(cls: type[_B], bn: _BatchNorm, output_scale: float, output_zero_point: int) -> _B:
        """The twin of a float module on a given output grid."""
        twin = cls._like(bn)
        twin.scale, twin.zero_point = float(output_scale), int(output_zero_point)
        return twin


@static_twin_of(nn.BatchNorm1d)
class BatchNorm1d(_QuantizedBatchNorm, nn.BatchNorm1d):
    __doc__ = "1d (two or three dimensions) " + (_QuantizedBatchNorm.__doc__ or "")


@static_twin_of(nn.BatchNorm2d)
class BatchNorm2d(_QuantizedBatchNorm, nn.BatchNorm2d):
    __doc__ = "2d " + (_QuantizedBatchNorm.__doc__ or "")


@static_twin_of(nn.BatchNorm3d)
class BatchNorm3d(_QuantizedBatchNorm, nn.BatchNorm3d):
    __doc__ = "3d " + (_QuantizedBatchNorm.__doc__ or "")
