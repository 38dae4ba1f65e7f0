"""Arithmetic as modules: the same model code adds, multiplies and joins float tensors and quantized ones.

A quantized result needs a grid that only calibration knows, so ``a + b`` in a model is written
``self.add = FloatFunctional()`` and ``self.add.add(a, b)``.

May import: ``ops.arithmetic``, ``tensor``, and what quantized modules share.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeropoint.ao.nn._registry import static_twin_of
from zeropoint.ao.nn.quantized._base import GridModule
from zeropoint.ao.nn.quantized._from_float import output_grid
from zeropoint.ops import arithmetic
from zeropoint.tensor import QTensor

__all__ = ["FXFloatFunctional", "FloatFunctional", "QFunctional"]


class _FloatOps(nn.Module):
    """The operations on float tensors; each result that needs a grid passes through :meth:`_result`."""

    def _result(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        """Not for calling: call one of the operations."""
        raise RuntimeError(f"{type(self).__name__} is not called itself: call .add, .mul, .cat or another operation")

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """``x + y``."""
        return self._result(torch.add(x, y))

    def add_scalar(self, x: Tensor, y: float) -> Tensor:
        """``x + y`` with a number; the quantized twin moves the grid and needs no observer."""
        return torch.add(x, y)

    def sub(self, x: Tensor, y: Tensor) -> Tensor:
        """``x - y``."""
        return self._result(torch.sub(x, y))

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        """``x * y``."""
        return self._result(torch.mul(x, y))

    def mul_scalar(self, x: Tensor, y: float) -> Tensor:
        """``x * y`` with a number; the quantized twin scales the grid and needs no observer."""
        return torch.mul(x, y)

    def div(self, x: Tensor, y: Tensor) -> Tensor:
        """``x / y``."""
        return self._result(torch.div(x, y))

    def cat(self, x: Sequence[Tensor], dim: int = 0) -> Tensor:
        """The tensors joined along ``dim``."""
        return self._result(torch.cat(tuple(x), dim))

    def add_relu(self, x: Tensor, y: Tensor) -> Tensor:
        """``max(x + y, 0)``."""
        return self._result(torch.relu(torch.add(x, y)))

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        """The matrix product."""
        return self._result(torch.matmul(x, y))


class FloatFunctional(_FloatOps):
    """Float arithmetic that ``prepare`` can observe and ``convert`` swaps for :class:`QFunctional`.

    One object observes all operations it is used for and gives them one output grid: use one object for each. A
    prepared model warns, with the object's name, of one that is used twice in a forward pass.

    Example:
        >>> import torch
        >>> from zeropoint.ao.nn.quantized import FloatFunctional
        >>> FloatFunctional().add(torch.tensor(1.0), torch.tensor(2.0))
        tensor(3.)
    """

    module_path: str = ""
    """Where ``prepare`` found the object in the model, for the warning."""

    shares_grid: bool = False
    """Whether its uses are steps of one loop, which share a grid on purpose: no warning then."""

    uses_in_pass: int | None = None
    """How often it was used in the forward pass of a prepared model that runs now; None outside of one."""

    def __init__(self) -> None:
        super().__init__()
        self.activation_post_process: nn.Module = nn.Identity()

    def _result(self, x: Tensor) -> Tensor:
        if self.uses_in_pass is not None and not self.shares_grid:
            self.uses_in_pass += 1
            if self.uses_in_pass == 2:
                warnings.warn(
                    f"FloatFunctional {self.module_path!r} is used more than once in a forward pass, so its operations "
                    "share one output grid: give each operation an object of its own",
                    UserWarning,
                    stacklevel=3,
                )
        return self.activation_post_process(x)  # type: ignore[no-any-return]


class FXFloatFunctional(_FloatOps):
    """Float arithmetic for graph capture: the operations alone, with nothing to observe them."""


@static_twin_of(FloatFunctional)
class QFunctional(GridModule):
    """Arithmetic on quantized tensors, onto one fixed output grid.

    Args:
        scale, zero_point: the output's grid; also attributes, to which plain numbers may be assigned.

    The output has the dtype that the observer declared, else the first operand's.
    """

    def __init__(self, scale: float = 1.0, zero_point: int = 0) -> None:
        super().__init__()
        self._init_grid(scale, zero_point)
        self.activation_post_process: nn.Module = nn.Identity()

    def _get_name(self) -> str:
        return "QFunctional"

    def extra_repr(self) -> str:
        return f"scale={self.scale}, zero_point={self.zero_point}"

    def forward(self, x: Tensor) -> Tensor:
        """Not for calling: call one of the operations."""
        raise RuntimeError("QFunctional is not called itself: call .add, .mul, .cat or another operation")

    def _operand(self, x: Any) -> QTensor:
        if not isinstance(x, QTensor) or x.axis is not None:
            self._refuse(x)
        return x

    def _binary(self, operation: Any, x: Tensor, y: Tensor, **options: Any) -> Tensor:
        first = self._operand(x)
        scale, zero_point, _, _, qdtype = self._output_grid(first.qdtype)
        result = operation(first, self._operand(y), scale, zero_point, dtype=qdtype, **options)
        return self.activation_post_process(result)  # type: ignore[no-any-return]

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """``x + y``, with broadcasting."""
        return self._binary(arithmetic.add, x, y)

    def add_scalar(self, x: Tensor, y: float) -> Tensor:
        """``x + y`` with a number: the grid moves (:func:`zeropoint.ops.arithmetic.add_scalar`)."""
        return arithmetic.add_scalar(self._operand(x), y)

    def sub(self, x: Tensor, y: Tensor) -> Tensor:
        """``x - y``, with broadcasting."""
        return self._binary(arithmetic.sub, x, y)

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        """``x * y``, with broadcasting."""
        return self._binary(arithmetic.mul, x, y)

    def mul_scalar(self, x: Tensor, y: float) -> Tensor:
        """``x * y`` with a number: the grid scales (:func:`zeropoint.ops.arithmetic.mul_scalar`)."""
        return arithmetic.mul_scalar(self._operand(x), y)

    def div(self, x: Tensor, y: Tensor) -> Tensor:
        """``x / y``, with broadcasting."""
        return self._binary(arithmetic.div, x, y)

    def add_relu(self, x: Tensor, y: Tensor) -> Tensor:
        """``max(x + y, 0)``, in one pass."""
        return self._binary(arithmetic.add, x, y, relu=True)

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        """The matrix product, from exact integer sums."""
        return self._binary(arithmetic.matmul, x, y)

    def cat(self, x: Sequence[Tensor], dim: int = 0) -> Tensor:
        """The tensors joined along ``dim``, each brought to the output's grid."""
        return self.activation_post_process(self._join(x, dim, relu=False))  # type: ignore[no-any-return]

    def cat_relu(self, x: Sequence[Tensor], dim: int = 0) -> Tensor:
        """The tensors joined along ``dim``, clamped at real zero."""
        return self.activation_post_process(self._join(x, dim, relu=True))  # type: ignore[no-any-return]

    def _join(self, x: Sequence[Tensor], dim: int, relu: bool) -> Tensor:
        parts = [self._operand(part) for part in x]
        if not parts:
            raise ValueError("cat needs at least one tensor, got an empty list")
        scale, zero_point, _, _, qdtype = self._output_grid(parts[0].qdtype)
        return arithmetic.cat(parts, dim, scale, zero_point, relu, qdtype)

    @classmethod
    def from_float(cls, mod: nn.Module, use_precomputed_fake_quant: bool = False) -> QFunctional:
        """The twin of a calibrated FloatFunctional.

        Raises:
            TypeError: another class. RuntimeError: not prepared.
        """
        if not isinstance(mod, FloatFunctional):
            raise TypeError(f"QFunctional.from_float takes a FloatFunctional, got {type(mod).__name__}")
        twin = cls()
        twin._init_grid(*output_grid(mod))
        return twin
