"""Linear layer on quantized tensors.

May import: ``tensor``, and what quantized modules share.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zeropoint.ao.nn._registry import static_twin_of
from zeropoint.ao.nn.quantized._base import REFUSALS, BoundModule, OutputGrid
from zeropoint.ao.nn.quantized._from_float import calibrated_weight, output_grid, require_class
from zeropoint.dtypes import as_qdtype, qint8
from zeropoint.tensor import QTensor, make_qtensor

__all__ = ["Linear", "QuantizedLinear"]


@static_twin_of(nn.Linear)
class Linear(BoundModule):
    """``y = x W^T + b`` from codes to codes: int8 weights, exact integer sums, one rounding at the end.

    Args:
        in_features, out_features: sizes of the last dimension of input and output.
        bias_: whether there is a bias.
        dtype: of the weights, qint8.

    Attributes:
        weight: qint8 tensor (out_features, in_features), on one grid or one an output channel; callable.
        bias: float32 tensor (out_features,) or None; callable.
        scale, zero_point: the output's grid; plain numbers may be assigned.

    The input is a per-tensor qint8 or quint8 tensor (..., in_features) on whatever grid it has. The output has the
    dtype that the activation observer declared, else the input's.

    Raises:
        ValueError: ``dtype`` is not qint8.

    Example:
        >>> import torch, zeropoint as zp
        >>> from zeropoint.ao.nn import quantized as nnq
        >>> layer = nnq.Linear(2, 1, bias_=False)
        >>> layer.set_weight_bias(zp.quantize_per_tensor(torch.tensor([[1.0, 2.0]]), 1.0, 0, zp.qint8), None)
        >>> layer(zp.quantize_per_tensor(torch.tensor([[3.0, 4.0]]), 1.0, 0, zp.quint8)).dequantize()
        tensor([[11.]])
    """

    def __init__(self, in_features: int, out_features: int, bias_: bool = True, dtype: Any = qint8) -> None:
        super().__init__()
        if as_qdtype(dtype) != qint8:
            raise ValueError(f"quantized Linear takes qint8 weights, got dtype={dtype}")
        self.in_features = in_features
        self.out_features = out_features
        self._init_grid(1.0, 0)
        self._init_weight((out_features, in_features), bias_)

    @property
    def _channels(self) -> int:
        return self.out_features

    def _pack(self, weight: Tensor) -> Tensor:
        return torch.ops.zeropoint.linear_pack.default(weight)  # type: ignore[no-any-return]

    def _bind(self, x: QTensor, out: OutputGrid) -> Tensor:
        arguments = self._arguments(x, out)
        return torch.ops.zeropoint.linear_bind.default(x._codes.dtype, *arguments)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """A quantized (..., out_features) tensor.

        Raises:
            TypeError: ``x`` is not quantized to 8 bits. RuntimeError: a per-channel grid, or sizes that do not fit.
        """
        if not isinstance(x, QTensor) or x.axis is not None:
            self._refuse(x)
        try:
            bound = self._bound_call(x)
            if bound is not None:
                weight, packed, bytes_, grid = bound
                return make_qtensor(torch.ops.zeropoint.linear_bound.default(x._codes, weight, packed, bytes_), *grid)
            out = self._output_grid(x.qdtype)
            codes = torch.ops.zeropoint.linear.default(x._codes, *self._arguments(x, out), self._packed_weight())
        except REFUSALS as error:
            self._explain(error, x)
        return make_qtensor(codes, out[4], out[0], out[1])

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, scale={self.scale}, "
            f"zero_point={self.zero_point}, qscheme={self.weight.qscheme()}"
        )

    @classmethod
    def from_float(cls, mod: nn.Module, use_precomputed_fake_quant: bool = False) -> Linear:
        """The quantized twin of a calibrated float or QAT module.

        Args:
            mod: ``nn.Linear`` or a subclass, with a qconfig and an ``activation_post_process``.
            use_precomputed_fake_quant: keep the weight grid that ``mod.weight_fake_quant`` trained.

        Raises:
            TypeError: another class. RuntimeError: no qconfig, or not prepared.
        """
        require_class(mod, (nn.Linear,), cls)
        return cls._from_layer(mod, mod, use_precomputed_fake_quant)

    @classmethod
    def _from_layer(cls, mod: nn.Module, layer: nn.Module, use_precomputed_fake_quant: bool) -> Linear:
        assert isinstance(layer, nn.Linear)
        twin = cls(layer.in_features, layer.out_features, layer.bias is not None)
        weight, bias = calibrated_weight(mod, layer, cls.CHANNEL_AXIS, use_precomputed_fake_quant)
        twin.set_weight_bias(weight, bias)
        twin._init_grid(*output_grid(mod))
        return twin

    @classmethod
    def from_reference(cls, ref_qlinear: Any, output_scale: float, output_zero_point: int) -> Linear:
        """From a reference module: a float Linear with a ``get_quantized_weight()``, and an output grid."""
        twin = cls(ref_qlinear.in_features, ref_qlinear.out_features, ref_qlinear.bias is not None)
        twin.set_weight_bias(ref_qlinear.get_quantized_weight(), ref_qlinear.bias)
        twin.scale, twin.zero_point = float(output_scale), int(output_zero_point)
        return twin


QuantizedLinear = Linear
