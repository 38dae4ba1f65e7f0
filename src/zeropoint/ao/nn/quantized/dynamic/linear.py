"""Linear layer with int8 weights that quantizes its input on every call.

May import: ``tensor``, and what quantized modules share.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zeropoint.ao.nn._registry import dynamic_twin_of
from zeropoint.ao.nn.quantized._base import REFUSALS, DynamicModule
from zeropoint.ao.nn.quantized._from_float import calibrated_weight, require_class
from zeropoint.dtypes import as_qdtype, qint8

__all__ = ["Linear", "per_channel_observer"]


@dynamic_twin_of(nn.Linear)
class Linear(DynamicModule):
    """``y = x W^T + b`` for float tensors, with int8 weights and exact integer sums.

    Each call lays one full 8-bit grid over its complete input; the result is float again. There is nothing to
    calibrate.

    Args:
        in_features, out_features: sizes of the last dimension of input and output.
        bias_: whether there is a bias.
        dtype: of the weights, qint8.

    Attributes:
        weight: qint8 tensor (out_features, in_features), on one grid or one an output channel; callable.
        bias: float32 tensor (out_features,) or None; callable.

    Raises:
        ValueError: ``dtype`` is not qint8.

    Example:
        >>> import torch
        >>> from zeropoint.ao.nn.quantized import dynamic as nnqd
        >>> nnqd.Linear.from_float(torch.nn.Linear(4, 2)).out_features
        2
    """

    rectifier: str | None = None

    def __init__(self, in_features: int, out_features: int, bias_: bool = True, dtype: Any = qint8) -> None:
        super().__init__()
        if as_qdtype(dtype) != qint8:
            raise ValueError(f"dynamic quantized Linear takes qint8 weights, got dtype={dtype}")
        self.in_features = in_features
        self.out_features = out_features
        self._init_weight((out_features, in_features), bias_)

    @property
    def _channels(self) -> int:
        return self.out_features

    def _pack(self, weight: Tensor) -> Tensor:
        return torch.ops.zeropoint.linear_pack.default(weight)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """A float (..., out_features) tensor of ``x``'s dtype; a quantized ``x`` is dequantized first.

        Raises:
            TypeError: ``x`` is no float tensor. RuntimeError: sizes that do not fit.
        """
        if type(x) is not Tensor:
            x = self._as_float(x)
        buffers = self._buffers
        try:
            result: Tensor = torch.ops.zeropoint.linear_dynamic.default(
                x,
                buffers["weight"],
                buffers["weight_scale"],
                buffers["weight_zero_point"],
                buffers["bias"],
                self.reduce_range,
                self.rectifier is not None,
                self._packed_weight(),
            )
        except REFUSALS as error:
            self._explain(error, x)
        return result

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, qscheme={self.weight.qscheme()}"

    @classmethod
    def from_float(cls, mod: nn.Module, use_precomputed_fake_quant: bool = False) -> Linear:
        """The dynamic twin of a float module.

        Args:
            mod: ``nn.Linear`` or a subclass. Its qconfig's weight observer chooses the weight grid; without a qconfig
                there is one symmetric grid an output channel.
            use_precomputed_fake_quant: keep the weight grid that ``mod.weight_fake_quant`` trained.

        Raises:
            TypeError: another class.
        """
        require_class(mod, (nn.Linear,), cls)
        return cls._from_layer(mod, mod, use_precomputed_fake_quant)

    @classmethod
    def _from_layer(cls, mod: nn.Module, layer: nn.Module, use_precomputed_fake_quant: bool) -> Linear:
        assert isinstance(layer, nn.Linear)
        twin = cls(layer.in_features, layer.out_features, layer.bias is not None)
        weight, bias = calibrated_weight(
            mod, layer, cls.CHANNEL_AXIS, use_precomputed_fake_quant, default=per_channel_observer
        )
        twin.set_weight_bias(weight, bias)
        return twin

    @classmethod
    def from_reference(cls, ref_qlinear: Any) -> Linear:
        """From a reference module: a float Linear with a ``get_quantized_weight()``."""
        twin = cls(ref_qlinear.in_features, ref_qlinear.out_features, ref_qlinear.bias is not None)
        twin.set_weight_bias(ref_qlinear.get_quantized_weight(), ref_qlinear.bias)
        return twin


def per_channel_observer() -> Any:
    """The weight observer of dynamic layers without a qconfig: one symmetric grid an output channel."""
    # Imported late: that package imports this one for its mappings.
    from zeropoint.ao.quantization.observer import default_per_channel_weight_observer

    return default_per_channel_weight_observer()
