"""The arithmetic of the OneFlow-style classes: true division, and bounds that the documentation of OneFlow gives.

"google" grids have a real step; "cambricon" grids have a power of two, and keep its exponent as their scale.

May import: torch only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Formula", "StraightThrough"]

FORMULAS = ("google", "cambricon")
SCHEMES = ("symmetric", "affine")


@dataclass(frozen=True)
class Formula:
    """The three settings that every class here takes.

    Attributes:
        name: "google" or "cambricon".
        bit: width of the codes, from 2 to 8.
        scheme: "symmetric" or "affine"; "cambricon" is symmetric whatever it says.

    Raises:
        ValueError: another value.
    """

    name: str
    bit: int
    scheme: str

    def __post_init__(self) -> None:
        if self.name not in FORMULAS:
            raise ValueError(f"quantization_formula must be one of {FORMULAS}, got {self.name!r}")
        if isinstance(self.bit, bool) or not isinstance(self.bit, int) or not 2 <= self.bit <= 8:
            raise ValueError(f"quantization_bit must be a whole number from 2 to 8, got {self.bit!r}")
        if self.scheme not in SCHEMES:
            raise ValueError(f"quantization_scheme must be one of {SCHEMES}, got {self.scheme!r}")

    @property
    def is_affine(self) -> bool:
        """Whether zero may lie anywhere in the codes."""
        return self.name == "google" and self.scheme == "affine"

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest code."""
        if self.is_affine:
            return 0, 2**self.bit - 1
        high = 2 ** (self.bit - 1) - 1
        return (-high - 1 if self.name == "cambricon" else -high), high

    # -- from a range to a grid

    def grid(self, low: Tensor, high: Tensor, *, half_away: bool = False) -> tuple[Tensor, Tensor]:
        """Scale and zero point of a range, of its shape and dtype.

        A range of the single value ``c`` gets the affine scale ``abs(c)``, which holds it exactly, and the range of
        zero alone the step 1: so no scale is 0.

        Args:
            low, high: the ends of the range; for symmetric grids only the larger magnitude counts.
            half_away: round the zero point half away from zero instead of to even.
        """
        peak = torch.maximum(low.abs(), high.abs())
        if self.name == "cambricon":
            # frexp: peak = m * 2**e with m in [0.5, 1), so floor(log2(peak)) = e - 1
            exponent = torch.frexp(peak)[1] - 1 - (self.bit - 2)
            return torch.where(peak > 0, exponent, 0).to(low.dtype), torch.zeros_like(low)
        if not self.is_affine:
            scale = peak / self.bounds[1]
            return torch.where(scale > 0, scale, 1.0), torch.zeros_like(low)
        scale = (high - low) / self.bounds[1]
        scale = torch.where(scale > 0, scale, torch.where(peak > 0, peak, 1.0))
        place = low / scale
        rounded = place.sign() * torch.floor(place.abs() + 0.5) if half_away else torch.round(place)
        return scale, 0.0 - rounded

    # -- from values to codes and back

    def codes(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """``clamp(rint(x / step + zero_point))`` as floats; a step of 0 gives the code of 0."""
        step = self.step(scale)
        place = torch.where(step > 0, x / torch.where(step > 0, step, 1.0), 0.0)
        if self.is_affine:
            place = place + zero_point
        return torch.round(place).clamp(*self.bounds)

    def values(self, codes: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """``(codes - zero_point) * step``."""
        return ((codes - zero_point) if self.is_affine else codes) * self.step(scale)

    def step(self, scale: Tensor) -> Tensor:
        """The distance of neighbouring codes."""
        return torch.exp2(torch.trunc(scale)) if self.name == "cambricon" else scale


class StraightThrough(torch.autograd.Function):
    """Values of the codes of ``x``, in the dtype of ``x``, with the whole gradient for ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, formula: Formula) -> Tensor:
        codes = formula.codes(x.to(scale.dtype), scale, zero_point)
        return formula.values(codes, scale, zero_point).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0], None, None, None
