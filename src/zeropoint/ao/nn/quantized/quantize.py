"""The borders of a quantized region, as modules.

May import: ``ops.quantize``, ``tensor``, and what quantized modules share.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zeropoint.ao.nn.quantized._base import GridModule, QuantizedModule
from zeropoint.ao.nn.quantized._from_float import output_grid
from zeropoint.dtypes import QDtype, as_qdtype
from zeropoint.ops.quantize import dequantize
from zeropoint.tensor import QTensor, make_qtensor

__all__ = ["DeQuantize", "Quantize"]


class Quantize(GridModule):
    """Quantizes a float tensor on a fixed grid.

    Args:
        scale, zero_point: the grid: numbers or one-element tensors.
        dtype: quint8, qint8 or qint32.
        factory_kwargs: ``{"device": ...}``: where the buffers are made.

    Example:
        >>> import torch, zeropoint as zp
        >>> from zeropoint.ao.nn import quantized as nnq
        >>> nnq.Quantize(0.5, 10, zp.quint8)(torch.tensor([0.0, 1.0])).int_repr()
        tensor([10, 12], dtype=torch.uint8)
    """

    def __init__(
        self,
        scale: float | Tensor,
        zero_point: int | Tensor,
        dtype: Any,
        factory_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.dtype: QDtype = as_qdtype(dtype)
        self._init_grid(scale, zero_point, self.dtype)
        device = (factory_kwargs or {}).get("device")
        if device is not None:
            self.to(device)

    def _get_name(self) -> str:
        return "Quantize"

    def forward(self, x: Tensor) -> Tensor:
        """A quantized tensor of ``x``'s shape and memory format. Raises TypeError unless ``x`` is a float tensor."""
        if isinstance(x, QTensor) or not isinstance(x, Tensor) or not x.is_floating_point():
            seen = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{type(self).__name__} takes a float tensor, got {seen}: is there a second QuantStub?")
        scale, zero_point, low, high, qdtype = self._output_grid(self.dtype)
        codes = torch.ops.zeropoint.quantize_per_tensor.default(x, scale, zero_point, low, high, qdtype.storage)
        return make_qtensor(codes, qdtype, scale, zero_point)

    def extra_repr(self) -> str:
        return f"scale={self.scale}, zero_point={self.zero_point}, dtype={self.dtype}"

    @classmethod
    def from_float(cls, mod: nn.Module, use_precomputed_fake_quant: bool = False) -> Quantize:
        """The twin of a calibrated QuantStub. Raises RuntimeError if it was not prepared."""
        return cls(*output_grid(mod))


class DeQuantize(QuantizedModule):
    """Dequantizes a tensor on its own grid. A float tensor passes through.

    Attributes:
        dtype: of the result: float32, or what passed through the stub in calibration.
    """

    dtype: torch.dtype = torch.float32

    def _get_name(self) -> str:
        return "DeQuantize"

    def forward(self, x: Tensor) -> Tensor:
        """A float tensor of ``x``'s shape. Raises TypeError unless ``x`` is a tensor."""
        if isinstance(x, QTensor):
            return dequantize(x, self.dtype)
        if not isinstance(x, Tensor):
            raise TypeError(f"DeQuantize takes one tensor, got {type(x).__name__}: dequantize the parts one by one")
        return x

    def extra_repr(self) -> str:
        return "" if self.dtype == torch.float32 else f"dtype={self.dtype}"

    @classmethod
    def from_float(cls, mod: nn.Module, use_precomputed_fake_quant: bool = False) -> DeQuantize:
        """The twin of a DeQuantStub, with the dtype that passed through it in calibration."""
        twin = cls()
        twin.dtype = getattr(mod, "dtype", torch.float32)
        return twin
