"""Recurrent layers: int8 weights, and inputs and states that are quantized row by row at every step.

Every row (one time step of one sequence) has a quint8 grid of its own. So loud and quiet inputs keep their precision
beside each other, and a sequence gives the same numbers alone, in a batch and packed.

May import: ``grid``, ``dtypes``, ``ops.registry``, ``ops.linear``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from zeropoint import grid
from zeropoint.dtypes import quint8
from zeropoint.ops.linear import exact_sums
from zeropoint.ops.registry import operator

__all__ = ["GATES"]

GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}
"""Kinds of layers, under torch's names, and how many rows of weights a hidden unit has in them."""


# --- gates: float32 arithmetic, step by step, so that every backend rounds alike ------------------------------------

_LOG2_E = float(torch.tensor(1.0 / math.log(2.0)))
_LN_2_HIGH = 0.693359375  # nine bits: its product with an exponent is exact
_LN_2_LOW = float(torch.tensor(math.log(2.0) - _LN_2_HIGH))
_TAYLOR = tuple(float(torch.tensor(1.0 / math.factorial(n))) for n in range(7, -1, -1))
_LARGEST = 87.0  # exp stays a normal float32 up to here


def _exp(x: Tensor) -> Tensor:
    """``e**x`` for float32 within two units in the last place; ``x`` saturates at ±87, NaN stays."""
    x = x.clamp(-_LARGEST, _LARGEST)
    exponent = torch.round(x * _LOG2_E)
    rest = (x - exponent * _LN_2_HIGH) - exponent * _LN_2_LOW
    series = torch.full_like(rest, _TAYLOR[0])
    for term in _TAYLOR[1:]:
        series = series * rest + term
    power = (torch.nan_to_num(exponent).to(torch.int32) + 127) << 23
    return series * power.view(torch.float32)


def _sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (_exp(-x) + 1.0)


def _tanh(x: Tensor) -> Tensor:
    return 2.0 / (_exp(x * -2.0) + 1.0) - 1.0


# --- operators over plain tensors ---------------------------------------------------------------------------------


class _Projection(NamedTuple):
    weight: Tensor
    scale: Tensor
    zero_point: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor, rest: _Projection | None = None) -> Tensor:
        """Floats ``(rows, N)`` of float32 ``(rows, K)``: exact integer sums, every row of ``x`` on its own grid.

        With ``rest``, what the int8 weight leaves of the real one, there are 16 bits of both: to the product come that
        of what the first grid leaves of ``x``, on a second grid, and that of ``rest``.
        """
        codes, scale, zero_point = _rows_on_grids(x)
        y = self._of_codes(codes, scale, zero_point)
        if self.bias is not None:
            y = y + self.bias
        if rest is not None:
            left = x - (codes - zero_point).to(torch.float32) * scale
            y = y + self._of_codes(*_rows_on_grids(left))
            y = y + rest._of_codes(codes, scale, zero_point)
        return y

    def _of_codes(self, codes: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        return exact_sums(codes, zero_point, self.weight, self.zero_point).to(torch.float32) * (scale * self.scale)


def _rows_on_grids(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, and every row's float32 scale and zero point."""
    scale, zero_point = (grid_part.unsqueeze(1) for grid_part in _row_grids(x))
    return grid.quantize(x, scale, zero_point, quint8.qmin, quint8.qmax), scale.to(torch.float32), zero_point


def _row_grids(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and zero points of the finite ranges of the rows."""
    if x.shape[1] == 0:
        low = high = x.new_zeros(x.shape[0])
    else:
        finite = torch.isfinite(x)
        empty = ~finite.any(1)
        low = torch.where(finite, x, x.new_full((), float("inf"))).amin(1).masked_fill(empty, 0.0)
        high = torch.where(finite, x, x.new_full((), float("-inf"))).amax(1).masked_fill(empty, 0.0)
    return grid.choose_qparams(low, high, quint8.qmin, quint8.qmax)


def _step(mode: str, given: Tensor, recurrent: Tensor, h: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """State and cell state after one step, from the projections of the input and of the last state."""
    if mode == "LSTM":
        assert c is not None
        gates = given + recurrent
        i, f, g, o = gates.chunk(4, 1)
        c = _sigmoid(f) * c + _sigmoid(i) * _tanh(g)
        return _sigmoid(o) * _tanh(c), c
    if mode == "GRU":
        (given_r, given_z, given_n), (r, z, n) = given.chunk(3, 1), recurrent.chunk(3, 1)
        new = _tanh(given_n + _sigmoid(given_r + r) * n)
        return (h - new) * _sigmoid(given_z + z) + new, None
    gates = given + recurrent
    return (_tanh(gates) if mode == "RNN_TANH" else torch.relu(gates)), None


@operator(
    "recurrent_dynamic(Tensor x, Tensor h, Tensor? c, Tensor? batch_sizes, str mode, bool reverse,"
    " Tensor weight_ih, Tensor scale_ih, Tensor zero_point_ih, Tensor? bias_ih, Tensor? packed_ih,"
    " Tensor weight_hh, Tensor scale_hh, Tensor zero_point_hh, Tensor? bias_hh, Tensor? packed_hh,"
    " Tensor? weight_hr, Tensor? scale_hr, Tensor? zero_point_hr, Tensor? packed_hr,"
    " Tensor? rest_ih, Tensor? scale_rest, Tensor? zero_point_rest, Tensor? packed_rest) -> (Tensor, Tensor, Tensor)",
    meta=lambda x, h, c, *args: (
        x.new_empty((*x.shape[:-1], h.shape[-1])),
        h.new_empty(h.shape),
        h.new_empty(0) if c is None else c.new_empty(c.shape),
    ),
)
def recurrent_dynamic_reference(
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    batch_sizes: Tensor | None,
    mode: str,
    reverse: bool,
    weight_ih: Tensor,
    scale_ih: Tensor,
    zero_point_ih: Tensor,
    bias_ih: Tensor | None,
    packed_ih: Tensor | None,
    weight_hh: Tensor,
    scale_hh: Tensor,
    zero_point_hh: Tensor,
    bias_hh: Tensor | None,
    packed_hh: Tensor | None,
    weight_hr: Tensor | None,
    scale_hr: Tensor | None,
    zero_point_hr: Tensor | None,
    packed_hr: Tensor | None,
    rest_ih: Tensor | None = None,
    scale_rest: Tensor | None = None,
    zero_point_rest: Tensor | None = None,
    packed_rest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One direction of one layer over all steps; everything that is real is float32.

    Args:
        x: ``(steps, batch, K)``, or the rows of a packed sequence ``(rows, K)`` with its ``batch_sizes``.
        h, c: the states before, ``(batch, size)``; ``c`` for LSTM only.
        mode: one of :data:`GATES`.
        reverse: from the last step to the first.
        weight_ih, weight_hh: int8 ``(gates * hidden, …)``, gates in torch's order; scales and zero points of their
            rows, one or one a row.
        weight_hr: of an LSTM that projects its state, int8 ``(projected, hidden)``.
        rest_ih: int8 like ``weight_ih``, on a grid of its own: what ``weight_ih`` leaves of the real weight. With it,
            inputs and their weights have 16 bits.
        packed_ih, packed_hh, packed_hr, packed_rest: of ``linear_pack``; not needed here.

    Returns:
        The states of all steps, in the form of ``x``; the states after; the cell states after (empty if there are
        none).
    """
    given = _Projection(weight_ih, scale_ih, zero_point_ih, bias_ih)
    recurrent = _Projection(weight_hh, scale_hh, zero_point_hh, bias_hh)
    projected = None
    if weight_hr is not None:
        assert scale_hr is not None
        assert zero_point_hr is not None
        projected = _Projection(weight_hr, scale_hr, zero_point_hr, None)
    rest = None
    if rest_ih is not None:
        assert scale_rest is not None
        assert zero_point_rest is not None
        rest = _Projection(rest_ih, scale_rest, zero_point_rest, None)
    sizes = [x.shape[1]] * x.shape[0] if batch_sizes is None else batch_sizes.tolist()
    inputs = given(x.flatten(0, -2), rest).split(sizes)
    outputs: list[Tensor] = [h[:0]] * len(sizes)
    h, c = h.clone(), None if c is None else c.clone()
    for t in reversed(range(len(sizes))) if reverse else range(len(sizes)):
        rows = sizes[t]
        state, cell = _step(mode, inputs[t], recurrent(h[:rows]), h[:rows], None if c is None else c[:rows])
        outputs[t] = state if projected is None else projected(state)
        h[:rows] = outputs[t]
        if c is not None:
            c[:rows] = cell  # type: ignore[assignment]
    y = torch.cat(outputs) if outputs else h[:0]
    return y.reshape(*x.shape[:-1], h.shape[-1]), h, h.new_empty(0) if c is None else c
