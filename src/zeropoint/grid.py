"""The affine grid: every rounding rule, and every formula that makes a scale and a zero point, once.

A grid maps a real value ``x`` to an integer code::

    code = clamp(rint(x * (1 / scale)) + zero_point, quant_min, quant_max)      real = (code - zero_point) * scale

``rint`` rounds ties to even and acts *before* the zero point is added. All arithmetic is float32 (float64 for a
float64 input), one operation after the other, each rounded by itself: a backend that fuses a multiplication and an
addition into one rounding would give other integers. Every backend is tested for equality with this file.

Pure functions on tensors. May import: torch only.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "DEFAULT_EPS",
    "affine_qparams",
    "check_operator_scales",
    "check_scale",
    "check_zero_point",
    "choose_qparams",
    "clamp_codes",
    "code_of",
    "compute_dtype",
    "dequantize",
    "fake_quantize",
    "float_qparams",
    "multiplier",
    "position",
    "quantize",
    "quantize_stochastic",
    "requantize",
    "round_mean",
    "symmetric_qparams",
]

DEFAULT_EPS = torch.finfo(torch.float32).eps
"""The floor of every observed scale, 2**-23."""

_FAR = 2.0**62  # beyond every code, exact in every float dtype, and safe to add a zero point to in int64
_EXACT_IN_FLOAT32 = 2**23  # grids up to this width have float32 ends without rounding
_SMALL_SCALE = 6.1e-5  # below it a dynamic grid is stretched: see choose_qparams
_SMALLEST_SCALE = 1.0 / torch.finfo(torch.float32).max  # 1 / scale stays finite in float32


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a float input of ``dtype`` is quantized: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- checks -------------------------------------------------------------------------------------------------------


def _number(value: Any, name: str) -> Any:
    """``value`` if it can be one number."""
    if value is None or isinstance(value, str):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return value


def check_scale(scale: float, name: str = "scale") -> float:
    """``scale`` as a float.

    Raises:
        ValueError: unless it is finite, above zero, and its reciprocal fits float32.
    """
    if torch.compiler.is_compiling() and not isinstance(scale, Tensor):
        return scale  # a module's grid, checked when it was set; it may be a symbol here
    value = float(_number(scale, name))
    if not (math.isfinite(value) and value > 0.0):
        raise ValueError(f"{name} must be finite and above 0, got {value}")
    if value < _SMALLEST_SCALE or value > torch.finfo(torch.float32).max:
        raise ValueError(f"{name} must lie in float32's range, and its reciprocal too, got {value}")
    return value


def check_operator_scales(name: str, x_scale: float, out_scale: float) -> None:
    """What operators over plain tensors that requantize sums ask of the grids of their input and output.

    Raises:
        RuntimeError: a scale that is not finite and above 0.
    """
    if not all(math.isfinite(scale) and scale > 0 for scale in (x_scale, out_scale)):
        raise RuntimeError(
            f"{name} takes an x_scale and an out_scale that are finite and above 0, got {x_scale} and {out_scale}"
        )


def check_zero_point(zero_point: int, quant_min: int, quant_max: int, name: str = "zero_point") -> int:
    """``zero_point`` as an int.

    Raises:
        ValueError: unless it is a whole number in ``[quant_min, quant_max]``.
    """
    if torch.compiler.is_compiling() and not isinstance(zero_point, Tensor):
        return zero_point
    value = int(_number(zero_point, name))
    if value != zero_point:
        raise ValueError(f"{name} must be a whole number, got {zero_point}")
    if not quant_min <= value <= quant_max:
        raise ValueError(f"{name} must lie in [{quant_min}, {quant_max}], got {value}")
    return value


# --- codes and values ---------------------------------------------------------------------------------------------


def position(x: Tensor, scale: Tensor | float) -> Tensor:
    """The rounded place of ``x`` on the grid counted from real zero: ``rint(x * (1 / scale))``, not yet saturated.

    Returns:
        A float tensor of the compute dtype; NaN stays NaN, an overflow is ±inf.
    """
    dtype = compute_dtype(x.dtype)
    inverse = 1.0 / torch.as_tensor(scale, dtype=dtype, device=x.device)
    return torch.round(x.to(dtype) * inverse)


def clamp_codes(codes: Tensor, zero_point: Tensor | int, quant_min: int, quant_max: int) -> Tensor:
    """Saturates float positions at the ends of the grid and adds the zero point; NaN becomes the zero point.

    Returns:
        int64 codes in ``[quant_min, quant_max]``.
    """
    zero = torch.as_tensor(zero_point, dtype=torch.int64, device=codes.device)
    steps = torch.nan_to_num(codes, nan=0.0).clamp(-_FAR, _FAR)
    return (steps.to(torch.int64) + zero).clamp_(quant_min, quant_max)


def quantize(x: Tensor, scale: Tensor | float, zero_point: Tensor | int, quant_min: int, quant_max: int) -> Tensor:
    """Codes of ``x``, as int64.

    Args:
        x: float tensor.
        scale, zero_point: numbers, or tensors that broadcast against ``x``. A floating ``zero_point`` tensor is
            a grid whose zero need not be a code: there the sum ``x * (1 / scale) + zero_point`` is rounded.
    """
    if isinstance(zero_point, Tensor) and zero_point.is_floating_point():
        dtype = compute_dtype(x.dtype)
        inverse = 1.0 / torch.as_tensor(scale, dtype=dtype, device=x.device)
        shift = zero_point.to(dtype)
        place = x.to(dtype) * inverse + shift
        place = torch.where(torch.isnan(place), shift.expand_as(place), place)
        return torch.round(place).clamp(quant_min, quant_max).to(torch.int64).clamp_(quant_min, quant_max)
    return clamp_codes(position(x, scale), zero_point, quant_min, quant_max)


def quantize_stochastic(x: Tensor, scale: Tensor | float, noise: Tensor, quant_min: int, quant_max: int) -> Tensor:
    """Codes of ``x`` on a grid around zero, rounded up as often as the remainder is large: the error has no bias.

    ``code = clamp(floor(x * (1 / scale) + noise))``, a product and a sum, each rounded by itself.

    Args:
        x: float tensor.
        scale: number or tensor that broadcasts against ``x``.
        noise: uniform numbers in [0, 1), of ``x``'s shape and the compute dtype.

    Returns:
        int64 codes in ``[quant_min, quant_max]``.
    """
    dtype = compute_dtype(x.dtype)
    inverse = 1.0 / torch.as_tensor(scale, dtype=dtype, device=x.device)
    zero = torch.zeros((), dtype=torch.int64, device=x.device)
    return clamp_codes(torch.floor(x.to(dtype) * inverse + noise), zero, quant_min, quant_max)


def code_of(value: float, scale: float, zero_point: int, quant_min: int, quant_max: int) -> int:
    """The code of one real number on a per-tensor grid: what a bound such as 6.0, or a padding value, is there."""
    return _code_of(value, scale, zero_point, quant_min, quant_max)


# What torch.compiler.assume_constant_result sets; to call that here would import all of torch.compile.
code_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=4096)
def _code_of(value: float, scale: float, zero_point: int, quant_min: int, quant_max: int) -> int:
    with torch.utils._python_dispatch._disable_current_modes():
        return int(quantize(torch.tensor(value, dtype=torch.float32), scale, zero_point, quant_min, quant_max))


def dequantize(codes: Tensor, scale: Tensor | float, zero_point: Tensor | int, dtype: torch.dtype) -> Tensor:
    """Real values of ``codes``: ``(code - zero_point) * scale`` in float32 (float64 for float64), cast to ``dtype``."""
    compute = compute_dtype(dtype)
    if isinstance(zero_point, Tensor) and zero_point.is_floating_point():
        steps = codes.to(compute) - zero_point.to(compute)
    else:
        steps = (codes.to(torch.int64) - torch.as_tensor(zero_point, dtype=torch.int64, device=codes.device)).to(
            compute
        )
    return (steps * torch.as_tensor(scale, dtype=compute, device=codes.device)).to(dtype)


def fake_quantize(
    x: Tensor, scale: Tensor | float, zero_point: Tensor | int, quant_min: int, quant_max: int
) -> tuple[Tensor, Tensor]:
    """``dequantize(quantize(x))`` without leaving float, and the mask of what was not saturated.

    Returns:
        The values in ``x``'s dtype (NaN stays NaN), and a bool tensor: whether the *rounded* code lay in
        ``[quant_min, quant_max]`` before it was clamped (False for NaN).
    """
    if isinstance(zero_point, Tensor) and zero_point.is_floating_point():
        dtype = compute_dtype(x.dtype)
        step = torch.as_tensor(scale, dtype=dtype, device=x.device)
        shift = zero_point.to(dtype)
        place = torch.round(x.to(dtype) * (1.0 / step) + shift)
        mask = (place >= quant_min) & (place <= quant_max)
        return ((place.clamp(quant_min, quant_max) - shift) * step).to(x.dtype), mask
    place = position(x, scale)
    zero = torch.as_tensor(zero_point, dtype=torch.int64, device=x.device)
    low, high = (quant_min - zero).to(place.dtype), (quant_max - zero).to(place.dtype)
    mask = (place >= low) & (place <= high)
    step = torch.as_tensor(scale, dtype=place.dtype, device=x.device)
    if quant_max - quant_min > _EXACT_IN_FLOAT32:
        steps = (clamp_codes(place, zero, quant_min, quant_max) - zero).to(place.dtype)
        steps = torch.where(torch.isnan(place), place, steps)
    else:
        # + 0.0 turns -0.0 into the +0.0 that an integer code would give
        steps = torch.minimum(torch.maximum(place, low), high) + 0.0
    return (steps * step).to(x.dtype), mask


# --- from one grid to another -------------------------------------------------------------------------------------


def multiplier(in_scale: Tensor | float, out_scale: Tensor | float) -> Tensor:
    """How many steps of the output grid one step of the input grid is: the quotient in float64, rounded to float32."""
    quotient = torch.as_tensor(in_scale, dtype=torch.float64) / torch.as_tensor(out_scale, dtype=torch.float64)
    return quotient.to(torch.float32)


def requantize(
    accumulator: Tensor,
    multiplier: Tensor,
    offset: Tensor | None,
    zero_point: int,
    quant_min: int,
    quant_max: int,
) -> Tensor:
    """The last step of every integer kernel: from an exact integer sum to a code of the output grid.

    ``y = float32(accumulator) * multiplier``, then, if there is an offset, ``y = y + offset`` (a second rounding),
    then ``clamp(rint(y) + zero_point)``.

    Args:
        accumulator: exact integers (int64, or float64 that holds integers).
        multiplier: float32, broadcastable: input scale over output scale (:func:`multiplier`).
        offset: float32, broadcastable, in steps of the output grid (bias over output scale), or None.

    Returns:
        int64 codes in ``[quant_min, quant_max]``; a fused ReLU is a ``quant_min`` at the zero point.
    """
    y = accumulator.to(torch.float32) * multiplier
    if offset is not None:
        y = y + offset
    return clamp_codes(torch.round(y), zero_point, quant_min, quant_max)


def round_mean(total: Tensor, count: Tensor | int) -> Tensor:
    """``rint(total / count)`` of exact integers in float64: averages of codes counted from the zero point."""
    return torch.round(total.to(torch.float64) / count).to(torch.int64)


# --- qparams from a range -----------------------------------------------------------------------------------------


def affine_qparams(
    min_val: Tensor, max_val: Tensor, quant_min: int, quant_max: int, eps: Tensor | float = DEFAULT_EPS
) -> tuple[Tensor, Tensor]:
    """Scale and zero point of the grid that covers ``[min_val, max_val]`` and 0, as torch.ao's observers make them.

    Returns:
        float32 scale and int32 zero point, of the inputs' shape.
    """
    low = torch.clamp(min_val.to(torch.float32), max=0.0)
    high = torch.clamp(max_val.to(torch.float32), min=0.0)
    scale = _span(low, high, quant_max - quant_min)
    scale = torch.maximum(scale, torch.as_tensor(eps, dtype=torch.float32, device=scale.device))
    zero_point = quant_min - torch.round(low / scale).to(torch.int32)
    return scale, zero_point.clamp(quant_min, quant_max).to(torch.int32)


def symmetric_qparams(
    min_val: Tensor,
    max_val: Tensor,
    quant_min: int,
    quant_max: int,
    zero_point: int,
    eps: Tensor | float = DEFAULT_EPS,
) -> tuple[Tensor, Tensor]:
    """Scale and zero point of the grid around ``zero_point`` that covers ``±max(-min_val, max_val)``."""
    low = torch.clamp(min_val.to(torch.float32), max=0.0)
    high = torch.clamp(max_val.to(torch.float32), min=0.0)
    scale = torch.maximum(-low, high) / ((quant_max - quant_min) / 2)
    scale = torch.maximum(scale, torch.as_tensor(eps, dtype=torch.float32, device=scale.device))
    return scale, torch.full_like(scale, zero_point, dtype=torch.int32)


def float_qparams(
    min_val: Tensor, max_val: Tensor, quant_min: int, quant_max: int, eps: Tensor | float = DEFAULT_EPS
) -> tuple[Tensor, Tensor]:
    """Scale and *floating* zero point: the range is not widened to hold 0, and the zero point is not rounded."""
    low, high = min_val.to(torch.float32), max_val.to(torch.float32)
    scale = _span(low, high, quant_max - quant_min)
    scale = torch.where(
        scale > torch.as_tensor(eps, dtype=torch.float32, device=scale.device), scale, torch.ones_like(scale)
    )
    return scale, -low / scale


def _span(low: Tensor, high: Tensor, steps: int) -> Tensor:
    """``(high - low) / steps`` in float32, where ``high - low`` itself may overflow float32."""
    scale = (high - low) / float(steps)
    wide = (high.to(torch.float64) - low.to(torch.float64)) / float(steps)
    return torch.where(torch.isinf(scale), wide.to(torch.float32), scale)


def choose_qparams(
    min_val: Tensor, max_val: Tensor, quant_min: int, quant_max: int, *, symmetric: bool = False
) -> tuple[Tensor, Tensor]:
    """The grid of dynamic quantization: of the two ends, the one whose rounding moves zero less decides the zero point.

    Args:
        min_val, max_val: finite floats of one shape.
        symmetric: centre the grid when the range spans zero.

    Returns:
        float64 scale and int64 zero point, of the inputs' shape. An empty range (0, 0) gives scale 0.1.
    """
    low = torch.clamp(min_val.to(torch.float64), max=0.0)
    high = torch.clamp(max_val.to(torch.float64), min=0.0)
    spans = (low < 0) & (high > 0)
    if symmetric:
        half = (quant_max - quant_min) // 2
        step = torch.maximum((low / -(half + 1)).abs(), (high / half).abs())
        low = torch.where(spans, -(half + 1) * step, low)
        high = torch.where(spans, half * step, high)
    scale = (high - low) / float(quant_max - quant_min)
    narrow = scale.to(torch.float32)
    scale = torch.where((narrow == 0) | torch.isinf(1.0 / narrow), torch.full_like(scale, 0.1), scale)

    small = scale < _SMALL_SCALE
    stretch = _SMALL_SCALE / scale
    one_sided = _SMALL_SCALE * (quant_max - quant_min)
    stretched_low = torch.where(low == 0, low, torch.where(high == 0, torch.full_like(low, -one_sided), low * stretch))
    stretched_high = torch.where(
        low == 0, torch.full_like(high, one_sided), torch.where(high == 0, high, high * stretch)
    )
    low = torch.where(small, stretched_low, low)
    high = torch.where(small, stretched_high, high)
    scale = torch.where(small, torch.full_like(scale, _SMALL_SCALE), scale)

    from_low, from_high = quant_min - low / scale, quant_max - high / scale
    error_low = abs(quant_min) - (low / scale).abs()
    error_high = abs(quant_max) - (high / scale).abs()
    zero = torch.where(error_low < error_high, from_low, from_high)
    if symmetric:
        zero = torch.where(spans, torch.full_like(zero, (quant_min + quant_max) / 2), zero)
    return scale, torch.round(zero.clamp(quant_min, quant_max)).to(torch.int64)
