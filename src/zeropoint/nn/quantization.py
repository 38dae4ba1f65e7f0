"""OneFlow-style quantization modules: observers that return a grid, and modules that are given one.

May import: ``nn.formula``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zeropoint.nn.formula import Formula, StraightThrough

__all__ = ["FakeQuantization", "MinMaxObserver", "MovingAverageMinMaxObserver", "Quantization"]

_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _Quantizing(nn.Module):
    """Keeps the three settings and checks inputs."""

    def __init__(self, quantization_formula: str, quantization_bit: int, quantization_scheme: str) -> None:
        super().__init__()
        self.formula = Formula(quantization_formula, quantization_bit, quantization_scheme)
        self.quantization_formula = quantization_formula
        self.quantization_bit = quantization_bit
        self.quantization_scheme = quantization_scheme

    def _compute(self, x: Tensor) -> Tensor:
        """The input in the dtype of the arithmetic: float64 for float64, else float32."""
        if x.dtype not in _FLOAT_DTYPES:
            raise TypeError(f"{type(self).__name__} takes a float tensor, got {x.dtype}")
        return x.detach().to(torch.float64 if x.dtype == torch.float64 else torch.float32)

    def _broadcast(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero point against ``x``: one for all, or one for each slice along the first dimension."""
        channels = scale.numel()
        if zero_point.numel() != channels or (channels != 1 and (x.dim() == 0 or channels != x.shape[0])):
            raise ValueError(
                f"{type(self).__name__} takes one scale and zero point, or one for each of the "
                f"{tuple(x.shape[:1])} slices along the first dimension, got {channels} and {zero_point.numel()}"
            )
        shape = [-1] + [1] * (x.dim() - 1) if channels != 1 else [1] * x.dim()
        return scale.detach().to(x).reshape(shape), zero_point.detach().to(x).reshape(shape)

    def extra_repr(self) -> str:
        """The settings, for ``print``."""
        return f"{self.quantization_formula}, bit={self.quantization_bit}, {self.quantization_scheme}"


class FakeQuantization(_Quantizing):
    """Simulates quantization on a given grid.

    For "symmetric", with ``quant_max = 2 ** (bit - 1) - 1`` and ``quant_min = -quant_max``::

        clamp(round(x / scale), quant_min, quant_max) * scale

    For "affine", with ``quant_max = 2 ** bit - 1`` and ``quant_min = 0``::

        (clamp(round(x / scale + zero_point), quant_min, quant_max) - zero_point) * scale

    Ties round to even. The gradient passes to the input unchanged, also where codes saturate.

    Args:
        quantization_formula: "google", or "cambricon", whose scale is the exponent of a power of two and whose codes
            reach from ``-quant_max - 1`` to ``quant_max`` whatever the scheme.
        quantization_bit: from 2 to 8.
        quantization_scheme: "symmetric" or "affine".

    Raises:
        ValueError: a setting out of range.

    Example:
        >>> import torch
        >>> from zeropoint.nn import FakeQuantization, MinMaxObserver
        >>> x = torch.tensor([-1.0, 0.3, 2.54])
        >>> FakeQuantization()(x, *MinMaxObserver()(x))
        tensor([-1.0000,  0.3000,  2.5400])
    """

    def __init__(
        self,
        quantization_formula: str = "google",
        quantization_bit: int = 8,
        quantization_scheme: str = "symmetric",
    ) -> None:
        super().__init__(quantization_formula, quantization_bit, quantization_scheme)

    def forward(self, input: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """The rounded input.

        Args:
            input: float tensor.
            scale, zero_point: one element, or one for each slice along the input's first dimension.

        Returns:
            A tensor of the input's shape and dtype; an all-zero input gives zeros.

        Raises:
            TypeError: the input is not floating. ValueError: scale and zero point do not fit it.
        """
        scale, zero_point = self._broadcast(self._compute(input), scale, zero_point)
        out: Tensor = StraightThrough.apply(input, scale, zero_point, self.formula)  # type: ignore[no-untyped-call]
        return out


class Quantization(_Quantizing):
    """Codes on a given grid, as floats of the input's dtype; not differentiable.

    ``clamp(round(x / scale))`` for "symmetric", ``clamp(round(x / scale + zero_point))`` for "affine", with the bounds
    of :class:`FakeQuantization`.

    Args:
        quantization_formula, quantization_bit, quantization_scheme: as :class:`FakeQuantization`.
    """

    def __init__(
        self,
        quantization_formula: str = "google",
        quantization_bit: int = 8,
        quantization_scheme: str = "symmetric",
    ) -> None:
        super().__init__(quantization_formula, quantization_bit, quantization_scheme)

    def forward(self, input: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """The codes of the input. Arguments and errors as :meth:`FakeQuantization.forward`."""
        x = self._compute(input)
        return self.formula.codes(x, *self._broadcast(x, scale, zero_point)).to(input.dtype)


def _finite_range(x: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest finite value of each row; (0, 0) where there is none."""
    finite = torch.isfinite(x)
    if x.shape[-1] == 0:
        return x.new_zeros(x.shape[:-1]), x.new_zeros(x.shape[:-1])
    low = torch.where(finite, x, float("inf")).amin(-1)
    high = torch.where(finite, x, float("-inf")).amax(-1)
    seen = low <= high
    return torch.where(seen, low, 0.0), torch.where(seen, high, 0.0)


class MinMaxObserver(_Quantizing):
    """The grid of one tensor, without memory.

    "symmetric": ``scale = max(abs(x)) / (2 ** (bit - 1) - 1)``, zero point 0. "affine":
    ``scale = (max - min) / (2 ** bit - 1)``, ``zero_point = -round(min / scale)``. "cambricon": the exponent
    ``floor(log2(max(abs(x)))) - (bit - 2)``. NaN and infinite values are left out.

    Args:
        quantization_formula, quantization_bit, quantization_scheme: as :class:`FakeQuantization`.
        per_layer_quantization: one grid; False gives one for each slice along the first dimension.
    """

    def __init__(
        self,
        quantization_formula: str = "google",
        quantization_bit: int = 8,
        quantization_scheme: str = "symmetric",
        per_layer_quantization: bool = True,
    ) -> None:
        super().__init__(quantization_formula, quantization_bit, quantization_scheme)
        self.per_layer_quantization = per_layer_quantization

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero point of shape [1], or [input.shape[0]], of the input's dtype, without gradient.

        Raises:
            TypeError: the input is not floating. ValueError: a 0-d input cannot be cut in slices.
        """
        x = self._compute(input)
        if not self.per_layer_quantization and x.dim() == 0:
            raise ValueError("MinMaxObserver: a 0-d tensor has no slices for per_layer_quantization=False")
        rows = x.reshape(1, -1) if self.per_layer_quantization else x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)
        scale, zero_point = self.formula.grid(*_finite_range(rows))
        return scale.to(input.dtype), zero_point.to(input.dtype)


class MovingAverageMinMaxObserver(_Quantizing):
    """The grid of an averaged range: ``m = m * momentum + batch * (1 - momentum)``.

    The range is updated in training while ``current_train_step <= stop_update_after_iters``; otherwise the stored one
    is used. A stored end of exactly 0 counts as "not set yet" and takes the batch's.

    Args:
        stop_update_after_iters: the last step that updates, above 0.
        quantization_formula, quantization_bit, quantization_scheme: as :class:`FakeQuantization`.
        momentum: the weight of the past, in [0, 1].

    Attributes:
        moving_max, moving_min: float32 buffers of shape [1]; both hold the largest magnitude for symmetric grids.

    Raises:
        ValueError: a setting out of range.
    """

    moving_max: Tensor
    moving_min: Tensor

    def __init__(
        self,
        stop_update_after_iters: int = 1,
        quantization_formula: str = "google",
        quantization_bit: int = 8,
        quantization_scheme: str = "symmetric",
        momentum: float = 0.95,
    ) -> None:
        super().__init__(quantization_formula, quantization_bit, quantization_scheme)
        if stop_update_after_iters <= 0:
            raise ValueError(f"stop_update_after_iters must be above 0, got {stop_update_after_iters}")
        if not 0.0 <= momentum <= 1.0:
            raise ValueError(f"momentum must lie in [0, 1], got {momentum}")
        self.stop_update_after_iters = stop_update_after_iters
        self.momentum = momentum
        self.register_buffer("moving_max", torch.zeros(1))
        self.register_buffer("moving_min", torch.zeros(1))

    def reset_running_stats(self) -> None:
        """Forgets the range."""
        self.moving_max.zero_()
        self.moving_min.zero_()

    def forward(self, input: Tensor, current_train_step: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero point of shape [1] and the input's dtype, without gradient.

        Args:
            input: float tensor.
            current_train_step: int64 tensor of shape [1], counted by the caller.

        Raises:
            TypeError: the input is not floating, or the step not a tensor of whole numbers.
            ValueError: the step has more than one element.
        """
        x = self._compute(input)
        if not isinstance(current_train_step, Tensor) or current_train_step.is_floating_point():
            raise TypeError(f"current_train_step must be an int64 tensor of shape [1], got {current_train_step!r}")
        if current_train_step.numel() != 1:
            raise ValueError(f"current_train_step must have one element, got shape {tuple(current_train_step.shape)}")
        if self.training:
            self._update(x, current_train_step.reshape(1))
        low, high = self.moving_min.to(x.dtype), self.moving_max.to(x.dtype)
        scale, zero_point = self.formula.grid(low, high, half_away=True)
        return scale.to(input.dtype), zero_point.to(input.dtype)

    def _update(self, x: Tensor, step: Tensor) -> None:
        low, high = (end.to(self.moving_max) for end in _finite_range(x.reshape(1, -1)))
        if not self.formula.is_affine:
            low = high = torch.maximum(low.abs(), high.abs())
        still = (step <= self.stop_update_after_iters).to(self.moving_max.device)
        for moving, batch in ((self.moving_max, high), (self.moving_min, low)):
            averaged = moving * self.momentum + batch * (1.0 - self.momentum)
            moving.copy_(torch.where(still, torch.where(moving == 0, batch, averaged), moving))

    def extra_repr(self) -> str:
        """The settings, for ``print``."""
        return f"{super().extra_repr()}, until={self.stop_update_after_iters}, momentum={self.momentum}"
