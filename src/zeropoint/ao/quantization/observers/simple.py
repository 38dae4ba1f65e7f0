"""Observers that measure nothing: placeholders, fixed grids, and a recorder for debugging.

May import: ``dtypes``, ``grid``, ``observers.base``.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from zeropoint import grid
from zeropoint.ao.quantization.observers.base import ObserverBase, code_range
from zeropoint.dtypes import as_qdtype, as_qscheme, per_tensor_affine, per_tensor_symmetric, quint8

__all__ = [
    "FixedQParamsObserver",
    "NoopObserver",
    "PlaceholderObserver",
    "RecordingObserver",
    "ReuseInputObserver",
]


class _Unmeasured(ObserverBase):
    """An observer from which no grid can be had."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x``."""
        return x

    def calculate_qparams(self, **kwargs: Any) -> NoReturn:
        """Raises RuntimeError: this observer measures nothing."""
        name = type(self).__name__
        raise RuntimeError(f"{name} measures nothing, so it has no scale and zero point: use an observer that does")


class PlaceholderObserver(_Unmeasured):
    """Measures nothing; carries its settings to the converted module.

    Dynamic and float16 modules use it, which need no calibrated activation grid.

    Args:
        dtype: a quantized dtype, or a float dtype.
        custom_op_name: kept as the attribute ``custom_op``.
        compute_dtype: the old way to say ``is_dynamic=True``.
        quant_min, quant_max: codes of the grid that is chosen at each call.
        qscheme: its scheme.
        eps: the smallest scale.
        is_dynamic: the grid is chosen anew at each call.
    """

    def __init__(
        self,
        dtype: Any = torch.float32,
        custom_op_name: str = "",
        compute_dtype: Any = None,
        quant_min: int | None = None,
        quant_max: int | None = None,
        qscheme: Any = None,
        eps: float | None = None,
        is_dynamic: bool = False,
    ) -> None:
        super().__init__(dtype, is_dynamic or compute_dtype is not None)
        self.qscheme = per_tensor_affine if qscheme is None else as_qscheme(qscheme)
        self.quant_min = quant_min
        self.quant_max = quant_max
        self.eps = grid.DEFAULT_EPS if eps is None else eps
        self.custom_op = custom_op_name

    def extra_repr(self) -> str:
        """dtype and kind, for ``print``."""
        return f"dtype={self.dtype}, is_dynamic={self.is_dynamic}"


class NoopObserver(_Unmeasured):
    """Measures nothing and carries only a dtype.

    Args:
        dtype: a quantized dtype, or a float dtype.
        custom_op_name: kept as the attribute ``custom_op``.
    """

    def __init__(self, dtype: Any = torch.float16, custom_op_name: str = "") -> None:
        super().__init__(dtype)
        self.custom_op = custom_op_name


class ReuseInputObserver(_Unmeasured):
    """Says that an operator's output keeps the grid of its input, as a reshape does."""

    def __init__(self) -> None:
        super().__init__(quint8)


class RecordingObserver(_Unmeasured):
    """Keeps a copy of every tensor it sees: for debugging.

    Args:
        dtype: a quantized dtype.

    Attributes:
        tensor_val: the copies, detached, in order.
    """

    def __init__(self, dtype: Any = quint8) -> None:
        super().__init__(dtype)
        self.tensor_val: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Appends a copy of ``x`` to ``tensor_val`` and returns ``x``."""
        self.tensor_val.append(x.detach().clone())
        return x

    def get_tensor_value(self) -> list[Tensor]:
        """The copies, in order."""
        return self.tensor_val

    def reset(self) -> None:
        """Drops the copies."""
        self.tensor_val = []


class FixedQParamsObserver(ObserverBase):
    """A grid that is known beforehand, such as [0, 1] after a sigmoid.

    Args:
        scale: above 0.
        zero_point: the code of real 0.
        dtype: a quantized dtype.
        qscheme: a per-tensor scheme.
        quant_min, quant_max: the codes of the grid; None takes the dtype's.
        is_dynamic: must be False: a fixed grid is not chosen at each call.

    Attributes:
        scale: float32 buffer of shape [1].
        zero_point: int32 buffer of shape [1].

    Raises:
        ValueError: the numbers make no grid.
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(
        self,
        scale: float,
        zero_point: int,
        dtype: Any = quint8,
        qscheme: Any = per_tensor_affine,
        quant_min: int | None = None,
        quant_max: int | None = None,
        is_dynamic: bool = False,
    ) -> None:
        super().__init__(as_qdtype(dtype), is_dynamic)
        name = type(self).__name__
        if is_dynamic:
            raise ValueError(f"{name} has a fixed grid, which a dynamic module would not use")
        self.qscheme = as_qscheme(qscheme)
        if self.qscheme not in (per_tensor_affine, per_tensor_symmetric):
            raise ValueError(f"{name} takes a per-tensor scheme, got {self.qscheme.name}")
        self.quant_min, self.quant_max = code_range(as_qdtype(dtype), quant_min, quant_max)
        step = grid.check_scale(scale)
        zero = grid.check_zero_point(zero_point, self.quant_min, self.quant_max)
        self.register_buffer("scale", torch.tensor([step], dtype=torch.float32))
        self.register_buffer("zero_point", torch.tensor([zero], dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x``."""
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """The fixed scale and zero point, each of shape [1]."""
        return self.scale, self.zero_point

    def reset(self) -> None:
        """Does nothing: the grid is fixed."""
