"""Activation functions on quantized tensors.

ReLU and ReLU6 keep the input's grid; the others have a grid of their own and go through a table of 256 codes.

May import: ``tensor``, ``ops.activation``, and what quantized modules share.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeropoint.ao.nn._registry import static_twin_of
from zeropoint.ao.nn.quantized._base import GridModule, QuantizedModule
from zeropoint.ao.nn.quantized._from_float import output_grid, require_class
from zeropoint.ops.activation import prelu
from zeropoint.tensor import QTensor, make_qtensor

__all__ = [
    "ELU",
    "GELU",
    "Hardsigmoid",
    "Hardswish",
    "LeakyReLU",
    "Mish",
    "PReLU",
    "ReLU",
    "ReLU6",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Tanh",
]

_U = TypeVar("_U", bound="_Unary")


@static_twin_of(nn.ReLU)
class ReLU(QuantizedModule):
    """``max(x, 0)``, on the input's grid. A float tensor outside the quantized region is served too.

    Args:
        inplace: write into the input.
    """

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        """A tensor of ``x``'s kind. Raises RuntimeError for a per-channel grid."""
        return F.relu(x, self.inplace)

    def extra_repr(self) -> str:
        return "inplace=True" if self.inplace else ""

    @classmethod
    def from_float(cls, mod: nn.Module, use_precomputed_fake_quant: bool = False) -> ReLU:
        """The twin of a float module; it needs no calibration."""
        return cls(bool(getattr(mod, "inplace", False)))


@static_twin_of(nn.ReLU6)
class ReLU6(ReLU):
    """``clamp(x, 0, 6)``, on the input's grid. A float tensor outside the quantized region is served too.

    Args:
        inplace: write into the input.
    """

    def forward(self, x: Tensor) -> Tensor:
        """A tensor of ``x``'s kind. Raises RuntimeError for a per-channel grid."""
        return F.relu6(x, self.inplace)


class _Unary(GridModule):
    """A function of one value, from codes to codes, on an output grid of its own."""

    FUNCTION: ClassVar[str]
    FLOAT_CLASS: ClassVar[type[nn.Module]]

    def __init__(self, scale: float, zero_point: int) -> None:
        super().__init__()
        self._init_grid(scale, zero_point)

    def _function(self) -> str:
        return self.FUNCTION

    def _arguments(self) -> tuple[float, ...]:
        return ()

    def forward(self, x: Tensor) -> Tensor:
        """A quantized tensor of ``x``'s shape. Raises TypeError for a float one, RuntimeError per channel."""
        if not isinstance(x, QTensor) or x.axis is not None:
            self._refuse(x)
        scale, zero_point, _, _, qdtype = self._output_grid(x.qdtype)
        codes = torch.ops.zeropoint.activation.default(
            x._codes, self._function(), self._arguments(), x.scale, x.zero_point, scale, zero_point, qdtype.storage
        )
        return make_qtensor(codes, qdtype, scale, zero_point)

    def extra_repr(self) -> str:
        return f"scale={self.scale}, zero_point={self.zero_point}"

    @classmethod
    def from_float(cls: type[_U], mod: nn.Module, use_precomputed_fake_quant: bool = False) -> _U:
        """The twin of a calibrated float module. Raises TypeError for another class, RuntimeError if not prepared."""
        require_class(mod, (cls.FLOAT_CLASS,), cls)
        scale, zero_point, qdtype = output_grid(mod)
        twin = cls(scale, zero_point, **cls._options(mod))
        twin._init_grid(scale, zero_point, qdtype)
        return twin

    @classmethod
    def _options(cls, mod: Any) -> dict[str, Any]:
        return {}

    @classmethod
    def from_reference(cls: type[_U], mod: nn.Module, scale: float, zero_point: int) -> _U:
        """The twin of a float module on a given output grid."""
        return cls(float(scale), int(zero_point), **cls._options(mod))


@static_twin_of(nn.ELU)
class ELU(_Unary):
    """``x`` above zero, ``alpha * expm1(x)`` below.

    Args:
        scale, zero_point: the output's grid.
        alpha: the limit at minus infinity, negated.
    """

    FUNCTION = "elu"
    FLOAT_CLASS = nn.ELU

    def __init__(self, scale: float, zero_point: int, alpha: float = 1.0) -> None:
        super().__init__(scale, zero_point)
        self.alpha = alpha

    def _arguments(self) -> tuple[float, ...]:
        return (self.alpha,)

    @classmethod
    def _options(cls, mod: Any) -> dict[str, Any]:
        return {"alpha": mod.alpha}


@static_twin_of(nn.LeakyReLU)
class LeakyReLU(_Unary):
    """``x`` above zero, ``negative_slope * x`` below.

    Args:
        scale, zero_point: the output's grid.
        negative_slope: the slope below zero.
        inplace: accepted as in the float module; the output has a grid of its own, so it is always a new tensor.
        device: where the buffers are. dtype: accepted as in ``torch.ao``.
    """

    FUNCTION = "leaky_relu"
    FLOAT_CLASS = nn.LeakyReLU

    def __init__(
        self,
        scale: float,
        zero_point: int,
        negative_slope: float = 1e-2,
        inplace: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(scale, zero_point)
        self.negative_slope = negative_slope
        self.to(device)

    def _arguments(self) -> tuple[float, ...]:
        return (self.negative_slope,)

    @classmethod
    def _options(cls, mod: Any) -> dict[str, Any]:
        return {"negative_slope": mod.negative_slope}


@static_twin_of(nn.Hardswish)
class Hardswish(_Unary):
    """``x * clamp(x + 3, 0, 6) / 6``.

    Args:
        scale, zero_point: the output's grid.
        device: where the buffers are. dtype: accepted as in ``torch.ao``.
    """

    FUNCTION = "hardswish"
    FLOAT_CLASS = nn.Hardswish

    def __init__(self, scale: float, zero_point: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__(scale, zero_point)
        self.to(device)


@static_twin_of(nn.Hardsigmoid)
class Hardsigmoid(_Unary):
    """``clamp(x / 6 + 0.5, 0, 1)``.

    Args:
        scale, zero_point: the output's grid.
    """

    FUNCTION = "hardsigmoid"
    FLOAT_CLASS = nn.Hardsigmoid


@static_twin_of(nn.GELU)
class GELU(_Unary):
    """``x * Phi(x)``, Phi the distribution function of the normal distribution.

    Args:
        scale, zero_point: the output's grid.
        approximate: ``"none"``, or ``"tanh"`` for the usual approximation of Phi.

    Raises:
        ValueError: another ``approximate``.
    """

    FLOAT_CLASS = nn.GELU

    def __init__(self, scale: float, zero_point: int, approximate: str = "none") -> None:
        super().__init__(scale, zero_point)
        if approximate not in ("none", "tanh"):
            raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
        self.approximate = approximate

    def _function(self) -> str:
        return "gelu_tanh" if self.approximate == "tanh" else "gelu"

    @classmethod
    def _options(cls, mod: Any) -> dict[str, Any]:
        return {"approximate": mod.approximate}


@static_twin_of(nn.SiLU)
class SiLU(_Unary):
    """``x * sigmoid(x)``.

    Args:
        scale, zero_point: the output's grid.
    """

    FUNCTION = "silu"
    FLOAT_CLASS = nn.SiLU


@static_twin_of(nn.Mish)
class Mish(_Unary):
    """``x * tanh(log(1 + exp(x)))``.

    Args:
        scale, zero_point: the output's grid.
    """

    FUNCTION = "mish"
    FLOAT_CLASS = nn.Mish


@static_twin_of(nn.Softplus)
class Softplus(_Unary):
    """``log(1 + exp(beta * x)) / beta``, and ``x`` itself where ``beta * x > threshold``.

    Args:
        scale, zero_point: the output's grid.
        beta, threshold: as for ``torch.nn.Softplus``.

    Raises:
        ValueError: a ``beta`` of 0.
    """

    FUNCTION = "softplus"
    FLOAT_CLASS = nn.Softplus

    def __init__(self, scale: float, zero_point: int, beta: float = 1.0, threshold: float = 20.0) -> None:
        super().__init__(scale, zero_point)
        if beta == 0:
            raise ValueError("quantized Softplus needs a beta other than 0")
        self.beta = beta
        self.threshold = threshold

    def _arguments(self) -> tuple[float, ...]:
        return (self.beta, self.threshold)

    @classmethod
    def _options(cls, mod: Any) -> dict[str, Any]:
        return {"beta": mod.beta, "threshold": mod.threshold}


@static_twin_of(nn.Sigmoid)
class Sigmoid(_Unary):
    """``1 / (1 + exp(-x))``.

    Args:
        output_scale, output_zero_point: the output's grid.
    """

    FUNCTION = "sigmoid"
    FLOAT_CLASS = nn.Sigmoid

    def __init__(self, output_scale: float, output_zero_point: int) -> None:
        super().__init__(output_scale, output_zero_point)


@static_twin_of(nn.Tanh)
class Tanh(_Unary):
    """Hyperbolic tangent.

    Args:
        scale, zero_point: the output's grid.
    """

    FUNCTION = "tanh"
    FLOAT_CLASS = nn.Tanh


@static_twin_of(nn.PReLU)
class PReLU(GridModule):
    """``x`` above zero, ``weight[c] * x`` below: two multipliers, chosen by the sign.

    Args:
        output_scale, output_zero_point: the output's grid.
        num_parameters: 1, or one slope a channel (dimension 1).

    Attributes:
        weight: float32 slopes, as in the float module.
    """

    weight: Tensor

    def __init__(self, output_scale: float, output_zero_point: int, num_parameters: int = 1) -> None:
        super().__init__()
        self.num_parameters = num_parameters
        self.register_buffer("weight", torch.full((num_parameters,), 0.25))
        self._init_grid(output_scale, output_zero_point)

    def set_weight(self, w: Tensor) -> None:
        """Takes new slopes: a float or quantized tensor of ``num_parameters`` elements.

        Raises:
            ValueError: another number of them.
        """
        if w.numel() != self.num_parameters:
            raise ValueError(f"PReLU takes {self.num_parameters} slopes, got shape {tuple(w.shape)}")
        values = w.dequantize() if w.is_quantized else w
        self.weight = values.detach().reshape(-1).to(self.weight.device, torch.float32, copy=True)

    def forward(self, x: Tensor) -> Tensor:
        """A quantized tensor of ``x``'s shape and dtype. Raises TypeError for a float one, RuntimeError per channel."""
        if not isinstance(x, QTensor) or x.axis is not None:
            self._refuse(x)
        scale, zero_point, _, _, _ = self._output_grid(x.qdtype)
        return prelu(x, self.weight, scale, zero_point)

    def extra_repr(self) -> str:
        return f"num_parameters={self.num_parameters}, scale={self.scale}, zero_point={self.zero_point}"

    @classmethod
    def from_float(cls, mod: nn.Module, use_precomputed_fake_quant: bool = False) -> PReLU:
        """The twin of a calibrated float module. Raises TypeError for another class, RuntimeError if not prepared."""
        require_class(mod, (nn.PReLU,), cls)
        scale, zero_point, _ = output_grid(mod)
        return cls.from_reference(mod, scale, zero_point)

    @classmethod
    def from_reference(cls, mod: Any, scale: float, zero_point: int) -> PReLU:
        """The twin of a float module on a given output grid."""
        twin = cls(scale, zero_point, mod.num_parameters)
        twin.set_weight(mod.weight)
        return twin


@static_twin_of(nn.Softmax)
class Softmax(GridModule):
    """Softmax along one dimension.

    Args:
        dim: the dimension.
        scale, zero_point: the output's grid.
    """

    def __init__(self, dim: int | None = None, scale: float = 1.0 / 256, zero_point: int = 0) -> None:
        super().__init__()
        self.dim = dim
        self._init_grid(scale, zero_point)

    def forward(self, x: Tensor) -> Tensor:
        """A quantized tensor of ``x``'s shape.

        Raises:
            TypeError: ``x`` is not quantized. ValueError: no dimension was given.
        """
        if not isinstance(x, QTensor) or x.axis is not None:
            self._refuse(x)
        if self.dim is None:
            raise ValueError("quantized Softmax needs a dim")
        scale, zero_point, _, _, qdtype = self._output_grid(x.qdtype)
        codes = torch.ops.zeropoint.softmax.default(x._codes, x.scale, self.dim, scale, zero_point, qdtype.storage)
        return make_qtensor(codes, qdtype, scale, zero_point)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, scale={self.scale}, zero_point={self.zero_point}"

    @classmethod
    def from_float(cls, mod: nn.Module, use_precomputed_fake_quant: bool = False) -> Softmax:
        """The twin of a calibrated float module. Raises TypeError for another class, RuntimeError if not prepared."""
        require_class(mod, (nn.Softmax,), cls)
        assert isinstance(mod, nn.Softmax)
        scale, zero_point, qdtype = output_grid(mod)
        twin = cls(mod.dim, scale, zero_point)
        twin._init_grid(scale, zero_point, qdtype)
        return twin

    @classmethod
    def from_reference(cls, mod: Any, scale: float, zero_point: int) -> Softmax:
        """The twin of a float module on a given output grid."""
        return cls(mod.dim, float(scale), int(zero_point))
