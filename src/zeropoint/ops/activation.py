"""Functions of one quantized tensor, element by element: 8-bit codes go through a table of 256 results.

A table is made in float64 (dequantize, the function, quantize) and kept for its grids, so a function costs one look-up
an element whatever it is. 32-bit codes are computed in float64.

May import: ``dtypes``, ``grid``, ``tensor``, ``ops.registry``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from zeropoint import grid
from zeropoint.dtypes import as_qdtype
from zeropoint.ops.registry import operator
from zeropoint.tensor import QTensor, implements, make_qtensor

__all__ = [
    "FUNCTIONS",
    "celu",
    "elu",
    "gelu",
    "hardsigmoid",
    "hardswish",
    "leaky_relu",
    "mish",
    "prelu",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "tanh",
    "threshold",
]

FUNCTIONS: Final[dict[str, Callable[..., Tensor]]] = {  # what the operator ``activation`` knows, on real values
    "celu": F.celu,
    "elu": F.elu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "leaky_relu": F.leaky_relu,
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
    "tanh": torch.tanh,
    "threshold": F.threshold,
}


# --- operators over plain tensors ---------------------------------------------------------------------------------


@operator(
    "lookup(Tensor codes, Tensor table) -> Tensor", meta=lambda codes, table: torch.empty_like(codes, dtype=table.dtype)
)
def lookup_reference(codes: Tensor, table: Tensor) -> Tensor:
    """``table[code - smallest code]`` of int8 or uint8 codes; memory format kept, dtype the table's (256 entries)."""
    places = codes.to(torch.int64) - as_qdtype(codes.dtype).qmin
    return torch.empty_like(codes, dtype=table.dtype).copy_(table[places])


@operator(
    "activation(Tensor codes, str name, float[] args, float scale, int zero_point, float out_scale,"
    " int out_zero_point, ScalarType out_dtype) -> Tensor",
    meta=lambda codes, name, args, scale, zero_point, out_scale, out_zero_point, out_dtype: torch.empty_like(
        codes, dtype=out_dtype
    ),
)
def activation_reference(
    codes: Tensor,
    name: str,
    args: Sequence[float],
    scale: float,
    zero_point: int,
    out_scale: float,
    out_zero_point: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """The function ``name`` of real values, from codes to codes. One operator, so that traces hold no tables."""
    if codes.dtype == torch.int32:
        out = _apply(codes, name, args, scale, zero_point, out_scale, out_zero_point, out_dtype)
        return torch.empty_like(codes, dtype=out_dtype).copy_(out)
    grids = (scale, zero_point, out_scale, out_zero_point, out_dtype)
    if codes.device.type == "cpu":
        table = _table(codes.dtype, name, tuple(args), *grids)
    else:
        table = _table_on(codes.device, codes.dtype, name, tuple(args), *grids)
    result: Tensor = torch.ops.zeropoint.lookup.default(codes, table)
    return result


@lru_cache(maxsize=1024)
def _table(codes_dtype: torch.dtype, *arguments: Any) -> Tensor:
    """What :func:`_apply` gives for every code, in rising order; made on the CPU so that all devices share it."""
    qdtype = as_qdtype(codes_dtype)
    return _apply(torch.arange(qdtype.qmin, qdtype.qmax + 1), *arguments)


@lru_cache(maxsize=1024)
def _table_on(device: torch.device, *arguments: Any) -> Tensor:
    """The table on another device, copied there once: a copy at every call would make the host wait for it."""
    return _table(*arguments).to(device)


def _apply(
    codes: Tensor,
    name: str,
    args: Sequence[float],
    scale: float,
    zero_point: int,
    out_scale: float,
    out_zero_point: int,
    out_dtype: torch.dtype,
) -> Tensor:
    out = as_qdtype(out_dtype)
    real = FUNCTIONS[name](grid.dequantize(codes, scale, zero_point, torch.float64), *args)
    return grid.quantize(real, out_scale, out_zero_point, out.qmin, out.qmax).to(out_dtype)


@operator(
    "prelu(Tensor x, float x_scale, int x_zero_point, Tensor slope, float out_scale, int out_zero_point, int out_min,"
    " int out_max, ScalarType out_dtype) -> Tensor",
    meta=lambda x, *arguments: torch.empty_like(x, dtype=arguments[-1]),
)
def prelu_reference(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    slope: Tensor,
    out_scale: float,
    out_zero_point: int,
    out_min: int,
    out_max: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """A slope below zero for every channel (dimension 1), or one for all: two multipliers, chosen by the sign."""
    steps = x.to(torch.int64) - x_zero_point
    above = grid.multiplier(x_scale, out_scale).to(x.device)
    below = grid.multiplier(slope.to(torch.float64) * x_scale, out_scale)
    if x.dim() > 1 and slope.numel() > 1:
        below = below.reshape([1, -1] + [1] * (x.dim() - 2))
    factor = torch.where(steps < 0, below, above)
    codes = grid.requantize(steps, factor, None, out_zero_point, out_min, out_max)
    return torch.empty_like(x, dtype=out_dtype).copy_(codes)


@operator(
    "softmax(Tensor x, float x_scale, int dim, float out_scale, int out_zero_point, ScalarType out_dtype) -> Tensor",
    meta=lambda x, x_scale, dim, out_scale, out_zero_point, out_dtype: torch.empty_like(x, dtype=out_dtype),
)
def softmax_reference(
    x: Tensor, x_scale: float, dim: int, out_scale: float, out_zero_point: int, out_dtype: torch.dtype
) -> Tensor:
    """Softmax along ``dim`` in float64; differences of codes are differences of values, so no zero point is needed.

    ``e = exp(-(largest - code) * scale)``, then ``e * (1 / out_scale / total)``. The total is summed in eight lanes,
    element ``i`` in lane ``i % 8``; then lanes four apart are added, two apart, and the last two.
    """
    out = as_qdtype(out_dtype)
    if x.numel() == 0:
        return torch.empty_like(x, dtype=out_dtype)
    rows = (x.unsqueeze(0) if x.dim() == 0 else x).movedim(dim, -1).to(torch.int64)
    below = rows.amax(-1, keepdim=True) - rows
    if x.dtype == torch.int32:
        exps = _exps(below.flatten().tolist(), x_scale).to(x.device).reshape(below.shape)
    else:
        exps = _exps(range(256), x_scale).to(x.device)[below]
    parts = F.pad(exps, (0, -exps.shape[-1] % 8)).unflatten(-1, (-1, 8))
    total = torch.zeros_like(parts[..., 0, :])
    for i in range(parts.shape[-2]):
        total = total + parts[..., i, :]
    for lanes in (4, 2, 1):
        total = total[..., :lanes] + total[..., lanes:]
    codes = grid.clamp_codes(torch.round(exps * (1.0 / out_scale / total)), out_zero_point, out.qmin, out.qmax)
    return torch.empty_like(x, dtype=out_dtype).copy_(codes.movedim(-1, dim).reshape(x.shape))


def _exps(below: Iterable[int], scale: float) -> Tensor:
    """``exp(-difference * scale)``, by the C library as native code calls it."""
    return torch.tensor([math.exp(-difference * scale) for difference in below], dtype=torch.float64)


# --- functions over quantized tensors -----------------------------------------------------------------------------


def sigmoid(x: QTensor, scale: float | None = None, zero_point: int | None = None) -> QTensor:
    """``1 / (1 + exp(-x))``. Without a grid: scale 1/256 and real zero at the smallest code, which fits its range.

    Args:
        x: per-tensor quantized tensor.
        scale, zero_point: the output's grid; the dtype stays ``x``'s.

    Raises:
        TypeError: ``x`` is not quantized. RuntimeError: ``x`` has a per-channel grid.
        ValueError: the output grid is none.
    """
    return _unary("sigmoid", x, (), scale, zero_point, _unit_grid)


def hardsigmoid(x: QTensor, scale: float | None = None, zero_point: int | None = None) -> QTensor:
    """``clamp(x / 6 + 0.5, 0, 1)``; grid and errors as :func:`sigmoid`."""
    return _unary("hardsigmoid", x, (), scale, zero_point, _unit_grid)


def tanh(x: QTensor, scale: float | None = None, zero_point: int | None = None) -> QTensor:
    """Hyperbolic tangent. Without a grid: scale 1/128 and real zero in the middle of the codes."""
    return _unary("tanh", x, (), scale, zero_point, _tanh_grid)


def hardswish(x: QTensor, scale: float | None = None, zero_point: int | None = None) -> QTensor:
    """``x * clamp(x + 3, 0, 6) / 6``. Without a grid, on the input's; errors as :func:`sigmoid`."""
    return _unary("hardswish", x, (), scale, zero_point, _input_grid)


def silu(x: QTensor, scale: float | None = None, zero_point: int | None = None) -> QTensor:
    """``x * sigmoid(x)``. Without a grid, on the input's; errors as :func:`sigmoid`."""
    return _unary("silu", x, (), scale, zero_point, _input_grid)


def mish(x: QTensor, scale: float | None = None, zero_point: int | None = None) -> QTensor:
    """``x * tanh(log(1 + exp(x)))``. Without a grid, on the input's; errors as :func:`sigmoid`."""
    return _unary("mish", x, (), scale, zero_point, _input_grid)


def softplus(
    x: QTensor, scale: float | None = None, zero_point: int | None = None, beta: float = 1.0, threshold: float = 20.0
) -> QTensor:
    """``log(1 + exp(beta * x)) / beta``; ``x`` itself where ``beta * x > threshold``. Without a grid, on the input's.

    Raises:
        As :func:`sigmoid`; ValueError also for a ``beta`` of 0.
    """
    if beta == 0:
        raise ValueError("softplus needs a beta other than 0")
    return _unary("softplus", x, (float(beta), float(threshold)), scale, zero_point, _input_grid)


def elu(x: QTensor, scale: float | None = None, zero_point: int | None = None, alpha: float = 1.0) -> QTensor:
    """``x`` above zero, ``alpha * expm1(x)`` below. Without a grid, on the input's; errors as :func:`sigmoid`."""
    return _unary("elu", x, (float(alpha),), scale, zero_point, _input_grid)


def celu(x: QTensor, scale: float | None = None, zero_point: int | None = None, alpha: float = 1.0) -> QTensor:
    """``x`` above zero, ``alpha * expm1(x / alpha)`` below. Without a grid, on the input's.

    Raises:
        As :func:`sigmoid`; ValueError also for an ``alpha`` of 0.
    """
    if alpha == 0:
        raise ValueError("celu needs an alpha other than 0")
    return _unary("celu", x, (float(alpha),), scale, zero_point, _input_grid)


def threshold(
    x: QTensor, threshold: float, value: float, scale: float | None = None, zero_point: int | None = None
) -> QTensor:
    """``x`` where it is above ``threshold``, else ``value``. Without a grid, on the input's; errors as there."""
    return _unary("threshold", x, (float(threshold), float(value)), scale, zero_point, _input_grid)


def leaky_relu(
    x: QTensor, scale: float | None = None, zero_point: int | None = None, negative_slope: float = 0.01
) -> QTensor:
    """``x`` above zero, ``negative_slope * x`` below. Without a grid, on the input's; errors as :func:`sigmoid`."""
    return _unary("leaky_relu", x, (float(negative_slope),), scale, zero_point, _input_grid)


def gelu(x: QTensor, scale: float | None = None, zero_point: int | None = None, approximate: str = "none") -> QTensor:
    """``x * Phi(x)``. Without a grid, on the input's.

    Args:
        x: per-tensor quantized tensor.
        scale, zero_point: the output's grid; the dtype stays ``x``'s.
        approximate: ``"none"`` for the normal distribution's Phi, ``"tanh"`` for its usual approximation.

    Raises:
        As :func:`sigmoid`; ValueError also for another ``approximate``.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu: approximate must be 'none' or 'tanh', got {approximate!r}")
    name = "gelu_tanh" if approximate == "tanh" else "gelu"
    return _unary(name, x, (), scale, zero_point, _input_grid)


def prelu(x: QTensor, weight: Tensor, scale: float | None = None, zero_point: int | None = None) -> QTensor:
    """``x`` above zero, ``weight[c] * x`` below. Without a grid, on the input's.

    Args:
        x: per-tensor quantized tensor; channels are dimension 1.
        weight: float tensor of one slope, or one a channel; a quantized one is dequantized.
        scale, zero_point: the output's grid; the dtype stays ``x``'s.

    Raises:
        As :func:`sigmoid`; ValueError also when the number of slopes does not fit.
    """
    _check_input(x, "prelu")
    slope = weight.dequantize() if isinstance(weight, QTensor) else weight
    shape = tuple(x._codes.shape)
    channels = shape[1] if len(shape) > 1 else 1
    if slope.numel() not in (1, channels):
        raise ValueError(f"prelu needs 1 or {channels} slopes for shape {shape}, got {slope.numel()}")
    step, zero = _output_grid("prelu", x, scale, zero_point, _input_grid)
    codes = torch.ops.zeropoint.prelu.default(
        x._codes,
        x.scale,
        x.zero_point,
        slope.reshape(-1),
        step,
        zero,
        x.qdtype.qmin,
        x.qdtype.qmax,
        x.qdtype.storage,
    )
    return make_qtensor(codes, x.qdtype, step, zero)


def softmax(x: QTensor, dim: int, scale: float | None = None, zero_point: int | None = None) -> QTensor:
    """Softmax along ``dim``; without a grid on the one of :func:`sigmoid`, which fits [0, 1]. Errors as there."""
    _check_input(x, "softmax")
    rank = x._codes.dim()
    if not -rank <= dim < max(rank, 1):
        raise ValueError(f"softmax: dim {dim} is out of range for a tensor of {rank} dimensions")
    step, zero = _output_grid("softmax", x, scale, zero_point, _unit_grid)
    codes = torch.ops.zeropoint.softmax.default(x._codes, x.scale, dim, step, zero, x.qdtype.storage)
    return make_qtensor(codes, x.qdtype, step, zero)


def _unary(
    name: str,
    x: QTensor,
    args: tuple[float, ...],
    scale: float | None,
    zero_point: int | None,
    default: Callable[[QTensor], tuple[float, int]],
) -> QTensor:
    _check_input(x, name)
    step, zero = _output_grid(name, x, scale, zero_point, default)
    # An operator in traces, which must not hold the table; a plain call in eager code, which spares the dispatcher.
    plain = type(x._codes) is Tensor and not torch.compiler.is_compiling()
    function = activation_reference if plain else torch.ops.zeropoint.activation.default
    codes = function(x._codes, name, args, x.scale, x.zero_point, step, zero, x.qdtype.storage)
    return make_qtensor(codes, x.qdtype, step, zero)


def _output_grid(
    name: str,
    x: QTensor,
    scale: float | None,
    zero_point: int | None,
    default: Callable[[QTensor], tuple[float, int]],
) -> tuple[float, int]:
    if scale is None and zero_point is None:
        return default(x)
    if scale is None or zero_point is None:
        raise ValueError(f"{name} needs both scale and zero_point, or neither, got {scale} and {zero_point}")
    return grid.check_scale(scale), grid.check_zero_point(zero_point, x.qdtype.qmin, x.qdtype.qmax)


def _input_grid(x: QTensor) -> tuple[float, int]:
    return x.scale, x.zero_point


def _unit_grid(x: QTensor) -> tuple[float, int]:
    """[0, 1): every code one step of 2**-bits, the smallest one real zero."""
    return 1.0 / (x.qdtype.qmax - x.qdtype.qmin + 1), x.qdtype.qmin


def _tanh_grid(x: QTensor) -> tuple[float, int]:
    """[-1, 1): steps twice as wide, real zero in the middle."""
    return 2.0 / (x.qdtype.qmax - x.qdtype.qmin + 1), (x.qdtype.qmin + x.qdtype.qmax + 1) // 2


def _check_input(x: Any, name: str) -> None:
    if not isinstance(x, QTensor):
        seen = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} takes a quantized tensor, got {seen}: quantize it first")
    x._require_per_tensor(name)


# --- torch's own entry points on quantized tensors ----------------------------------------------------------------


def _written(x: QTensor, result: QTensor, inplace: bool) -> QTensor:
    """The result, or for ``inplace`` the input after it took the result's codes and grid."""
    return x.copy_(result) if inplace else result  # type: ignore[return-value]


@implements(torch.sigmoid, Tensor.sigmoid, F.sigmoid)
def _torch_sigmoid(func: Any, x: QTensor) -> QTensor:
    return sigmoid(x)


@implements(torch.tanh, Tensor.tanh, F.tanh)
def _torch_tanh(func: Any, x: QTensor) -> QTensor:
    return tanh(x)


# torch.compile looks past a subclass in F.hardsigmoid and F.hardswish; compiled code calls the functions above.
@implements(F.hardsigmoid)
def _torch_hardsigmoid(func: Any, x: QTensor, inplace: bool = False) -> QTensor:
    return _written(x, hardsigmoid(x), inplace)


@implements(F.hardswish)
def _torch_hardswish(func: Any, x: QTensor, inplace: bool = False) -> QTensor:
    return _written(x, hardswish(x), inplace)


@implements(F.silu)
def _torch_silu(func: Any, x: QTensor, inplace: bool = False) -> QTensor:
    return _written(x, silu(x), inplace)


@implements(F.mish)
def _torch_mish(func: Any, x: QTensor, inplace: bool = False) -> QTensor:
    return _written(x, mish(x), inplace)


@implements(F.softplus)
def _torch_softplus(func: Any, x: QTensor, beta: float = 1.0, threshold: float = 20.0) -> QTensor:
    return softplus(x, beta=beta, threshold=threshold)


@implements(F.gelu)
def _torch_gelu(func: Any, x: QTensor, *, approximate: str = "none") -> QTensor:
    return gelu(x, approximate=approximate)


@implements(F.elu)
def _torch_elu(func: Any, x: QTensor, alpha: float = 1.0, inplace: bool = False) -> QTensor:
    return _written(x, elu(x, alpha=alpha), inplace)


@implements(F.celu, torch.celu)
def _torch_celu(func: Any, x: QTensor, alpha: float = 1.0, inplace: bool = False) -> QTensor:
    return _written(x, celu(x, alpha=alpha), inplace)


@implements(F.threshold, torch.threshold)
def _torch_threshold(func: Any, x: QTensor, threshold_: float, value: float, inplace: bool = False) -> QTensor:
    return _written(x, threshold(x, threshold_, value), inplace)


@implements(F.leaky_relu)
def _torch_leaky_relu(func: Any, x: QTensor, negative_slope: float = 0.01, inplace: bool = False) -> QTensor:
    return _written(x, leaky_relu(x, negative_slope=negative_slope), inplace)


@implements(torch.prelu, Tensor.prelu, F.prelu)
def _torch_prelu(func: Any, x: QTensor, weight: Tensor) -> QTensor:
    return prelu(x, weight)
