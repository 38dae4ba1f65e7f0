"""Weights of quantized modules: taken apart into plain tensors, and shown as tensors again.

Float modules have ``weight`` as a tensor, ``torch.ao``'s quantized modules have ``weight()`` as a method, and code in
the world relies on either. So the attribute is a tensor that can be called.

May import: ``dtypes``, ``tensor``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeropoint.dtypes import QDtype, as_qdtype, qint8
from zeropoint.tensor import QTensor, make_qtensor

__all__ = ["BiasView", "WeightView", "join_weight", "split_weight"]


class _WeightDtype(QDtype):
    """``qint8`` that also equals ``torch.int8``: code for float models tests ``weight.dtype`` for it before a cast."""

    __slots__ = ()
    __hash__ = QDtype.__hash__

    def __eq__(self, other: object) -> bool:
        return other is self.storage or QDtype.__eq__(self, other)


_WEIGHT_DTYPE = _WeightDtype("qint8", torch.int8)


class WeightView(QTensor):
    """The weight of a quantized module: a quantized tensor that shares the module's codes, and that can be called."""

    @property
    def dtype(self) -> QDtype:  # type: ignore[override]
        """``qint8``; equal to ``torch.int8`` as well."""
        return _WEIGHT_DTYPE

    def __call__(self) -> QTensor:
        """The same weight as an ordinary quantized tensor, as ``torch.ao``'s ``module.weight()`` gives it."""
        return make_qtensor(self._codes, self.qdtype, self.scale, self.zero_point, self.axis)


class BiasView(Tensor):
    """The bias of a quantized module: a float tensor that shares the module's storage, and that can be called."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __call__(self) -> Tensor:
        """The same bias as an ordinary tensor, as ``torch.ao``'s ``module.bias()`` gives it."""
        return self.as_subclass(Tensor)


def join_weight(codes: Tensor, scale: Tensor, zero_point: Tensor, axis: int) -> QTensor:
    """The weight view over a module's buffers.

    Args:
        codes: int8.
        scale, zero_point: float32 and int32, without dimensions for one grid, else one entry a channel of ``axis``.
    """
    if type(codes) is not Tensor or codes.is_meta:  # traced by torch.export, or not loaded yet
        return make_qtensor(codes, qint8, scale.to(torch.float64), zero_point.to(torch.int64), axis)
    view = Tensor._make_subclass(WeightView, codes)
    view.qdtype = qint8
    view._codes = codes
    if scale.dim() == 0:
        view.scale, view.zero_point, view.axis = float(scale), int(zero_point), None
    else:
        view.scale, view.zero_point, view.axis = scale.to(torch.float64), zero_point.to(torch.int64), axis
    return view


def split_weight(weight: Any, axis: int, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """A quantized weight as the plain tensors that a module keeps.

    Args:
        weight: a qint8 tensor of this package, or torch's own; per tensor, or per channel along ``axis``.
        axis: the channel dimension.
        name: whose weights they are, for error messages.

    Returns:
        int8 codes, float32 scale and int32 zero point (without dimensions for one grid).

    Raises:
        TypeError: not a qint8 tensor. ValueError: channels along another axis, or floating zero points.
    """
    cure = f"quantize with quantize_per_channel(weight, scales, zero_points, {axis}, zeropoint.qint8)"
    if not isinstance(weight, Tensor) or not (isinstance(weight, QTensor) or weight.is_quantized):
        seen = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        raise TypeError(f"{name} must be a quantized tensor, got {seen}: {cure}")
    if as_qdtype(weight.dtype) != qint8:
        raise TypeError(f"{name} must be qint8, got {weight.dtype}: {cure}")
    scheme = str(weight.qscheme())
    codes = weight.int_repr().contiguous()
    if "per_channel" not in scheme:
        scale = torch.tensor(weight.q_scale(), dtype=torch.float32, device=codes.device)
        return codes, scale, torch.tensor(weight.q_zero_point(), dtype=torch.int32, device=codes.device)
    zero_points = weight.q_per_channel_zero_points()
    if weight.q_per_channel_axis() != axis or zero_points.is_floating_point():
        raise ValueError(
            f"{name} must have integer zero points along axis {axis}, got {scheme} along axis "
            f"{weight.q_per_channel_axis()}: {cure}"
        )
    return codes, weight.q_per_channel_scales().to(torch.float32), zero_points.to(torch.int32)
