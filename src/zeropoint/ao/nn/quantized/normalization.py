"""Layer, group and instance norm on quantized tensors: exact statistics of integer codes, one rounding at the end.

May import: ``ops.norm``, ``tensor``, and what quantized modules share.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from zeropoint.ao.nn._registry import static_twin_of
from zeropoint.ao.nn.quantized._base import GridModule
from zeropoint.ao.nn.quantized._from_float import output_grid, require_class
from zeropoint.ops import norm
from zeropoint.tensor import QTensor

__all__ = ["GroupNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d", "LayerNorm"]

_N = TypeVar("_N", bound="_Norm")


class _Norm(GridModule):
    """What the norms share: optional float32 weight and bias, an output grid, and the input's dtype."""

    FLOAT_CLASS: ClassVar[type[nn.Module]]
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def _set(
        self, weight: Tensor | None, bias: Tensor | None, scale: float | Tensor, zero_point: int | Tensor, device: Any
    ) -> None:
        for name, value in (("weight", weight), ("bias", bias)):
            if value is not None:
                value = nn.Parameter(value.detach().to(device, torch.float32, copy=True), requires_grad=False)
            self.register_parameter(name, value)
        self._init_grid(scale, zero_point)

    def _checked(self, x: Any, dims: int, exact: bool) -> QTensor:
        if not isinstance(x, QTensor) or x.axis is not None:
            self._refuse(x)
        if x.dim() != dims if exact else x.dim() < dims:
            wanted = f"{dims} dimensions" if exact else f"{dims} dimensions or more"
            raise ValueError(f"quantized {type(self).__name__} takes {wanted} (batched), got shape {tuple(x.shape)}")
        return x

    @classmethod
    def from_float(cls: type[_N], mod: nn.Module, use_precomputed_fake_quant: bool = False) -> _N:
        """The twin of a calibrated float module. Raises TypeError for another class, RuntimeError if not prepared."""
        require_class(mod, (cls.FLOAT_CLASS,), cls)
        scale, zero_point, _ = output_grid(mod)
        return cls.from_reference(mod, scale, zero_point)

    @classmethod
    def from_reference(cls: type[_N], mod: Any, scale: float, zero_point: int) -> _N:
        """The twin of a float module on a given output grid."""
        raise NotImplementedError


@static_twin_of(nn.LayerNorm)
class LayerNorm(_Norm):
    """Normalizes trailing dimensions and requantizes onto the output grid; the input's dtype is kept.

    Args:
        normalized_shape: the sizes of the trailing dimensions.
        weight, bias: float tensors of that shape, or None.
        scale, zero_point: the output's grid; buffers, to which plain numbers may be assigned.
        eps: added to the variance, in real units.
        elementwise_affine: kept as in the float module.
        device: where the tensors are. dtype: accepted as in ``torch.ao``; weight and bias are float32.
    """

    FLOAT_CLASS = nn.LayerNorm

    def __init__(
        self,
        normalized_shape: Any,
        weight: Tensor | None,
        bias: Tensor | None,
        scale: float,
        zero_point: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self._set(weight, bias, scale, zero_point, device)

    def forward(self, x: Tensor) -> Tensor:
        """A quantized tensor of ``x``'s shape and dtype.

        Raises:
            TypeError: ``x`` is not quantized. ValueError: its shape does not end in ``normalized_shape``.
        """
        x = self._checked(x, len(self.normalized_shape), exact=False)
        scale, zero_point, _, _, _ = self._output_grid(x.qdtype)
        return norm.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps, scale, zero_point)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, scale={self.scale}, zero_point={self.zero_point}"

    @classmethod
    def from_reference(cls, mod: Any, scale: float, zero_point: int) -> LayerNorm:
        """The twin of a float module on a given output grid."""
        return cls(mod.normalized_shape, mod.weight, mod.bias, scale, zero_point, mod.eps, mod.elementwise_affine)


@static_twin_of(nn.GroupNorm)
class GroupNorm(_Norm):
    """Normalizes groups of channels and requantizes onto the output grid; the input's dtype is kept.

    Args:
        num_groups, num_channels: how many groups the channels (dimension 1) are split into.
        weight, bias: float tensors of shape (num_channels,), or None.
        scale, zero_point: the output's grid; buffers, to which plain numbers may be assigned.
        eps: added to the variance, in real units.
        affine: kept as in the float module.
        device: where the tensors are. dtype: accepted as in ``torch.ao``; weight and bias are float32.

    The input is batched, (N, C, ...), with three dimensions or more; a channels-last one gives a channels-last output.

    Raises:
        ValueError: ``num_groups`` does not divide ``num_channels``.
    """

    FLOAT_CLASS = nn.GroupNorm

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        weight: Tensor | None,
        bias: Tensor | None,
        scale: float,
        zero_point: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if num_channels % num_groups:
            raise ValueError(f"num_groups={num_groups} does not divide num_channels={num_channels}")
        self.num_groups = num_groups
        self.num_channels = num_channels
        self.eps = eps
        self.affine = affine
        self._set(weight, bias, scale, zero_point, device)

    def forward(self, x: Tensor) -> Tensor:
        """A quantized tensor of ``x``'s shape and dtype.

        Raises:
            TypeError: ``x`` is not quantized. ValueError: fewer than three dimensions, or other channels.
        """
        x = self._checked(x, 3, exact=False)
        scale, zero_point, _, _, _ = self._output_grid(x.qdtype)
        return norm.group_norm(x, self.num_groups, self.weight, self.bias, self.eps, scale, zero_point)

    def extra_repr(self) -> str:
        return (
            f"{self.num_groups}, {self.num_channels}, eps={self.eps}, scale={self.scale}, zero_point={self.zero_point}"
        )

    @classmethod
    def from_reference(cls, mod: Any, scale: float, zero_point: int) -> GroupNorm:
        """The twin of a float module on a given output grid."""
        return cls(mod.num_groups, mod.num_channels, mod.weight, mod.bias, scale, zero_point, mod.eps, mod.affine)


class _InstanceNorm(_Norm):
    """Normalizes each channel of each sample and requantizes onto the output grid; the input's dtype is kept.

    The statistics are always those of the input, in eval mode and with ``track_running_stats`` too.

    Args:
        num_features: channels (dimension 1).
        weight, bias: float tensors of shape (num_features,), or None.
        scale, zero_point: the output's grid; buffers, to which plain numbers may be assigned.
        eps: added to the variance, in real units.
        momentum, affine, track_running_stats: kept as in the float module.
        device: where the tensors are. dtype: accepted as in ``torch.ao``; weight and bias are float32.
    """

    RANK: ClassVar[int]

    def __init__(
        self,
        num_features: int,
        weight: Tensor | None,
        bias: Tensor | None,
        scale: float,
        zero_point: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.momentum = momentum
        self.affine = affine
        self.track_running_stats = track_running_stats
        self._set(weight, bias, scale, zero_point, device)

    def forward(self, x: Tensor) -> Tensor:
        """A quantized tensor of ``x``'s shape and dtype.

        Raises:
            TypeError: ``x`` is not quantized. ValueError: another number of dimensions or channels.
        """
        x = self._checked(x, self.RANK + 2, exact=True)
        if x.shape[1] != self.num_features:
            raise ValueError(f"{type(self).__name__} takes {self.num_features} channels, got shape {tuple(x.shape)}")
        scale, zero_point, _, _, _ = self._output_grid(x.qdtype)
        return norm.instance_norm(x, self.weight, self.bias, self.eps, scale, zero_point)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, scale={self.scale}, zero_point={self.zero_point}"

    @classmethod
    def from_reference(cls, mod: Any, scale: float, zero_point: int) -> _InstanceNorm:
        """The twin of a float module on a given output grid."""
        return cls(
            mod.num_features,
            mod.weight,
            mod.bias,
            scale,
            zero_point,
            mod.eps,
            mod.momentum,
            mod.affine,
            mod.track_running_stats,
        )


@static_twin_of(nn.InstanceNorm1d)
class InstanceNorm1d(_InstanceNorm):
    __doc__ = "1d: " + (_InstanceNorm.__doc__ or "")
    RANK = 1
    FLOAT_CLASS = nn.InstanceNorm1d


@static_twin_of(nn.InstanceNorm2d)
class InstanceNorm2d(_InstanceNorm):
    __doc__ = "2d: " + (_InstanceNorm.__doc__ or "")
    RANK = 2
    FLOAT_CLASS = nn.InstanceNorm2d


@static_twin_of(nn.InstanceNorm3d)
class InstanceNorm3d(_InstanceNorm):
    __doc__ = "3d: " + (_InstanceNorm.__doc__ or "")
    RANK = 3
    FLOAT_CLASS = nn.InstanceNorm3d
