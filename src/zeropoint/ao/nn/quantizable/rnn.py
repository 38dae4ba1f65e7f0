"""An LSTM made of linear layers, curves and sums: float, observed and quantized by the same code.

May import: ``tensor``, ``dtypes``, ``ops``, and quantized modules.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeropoint.ao.nn._registry import observed_twin_of
from zeropoint.ao.nn.quantized._from_float import require_class
from zeropoint.ao.nn.quantized.functional_modules import FloatFunctional
from zeropoint.dtypes import quint8
from zeropoint.ops.quantize import quantize_per_tensor
from zeropoint.tensor import QTensor

__all__ = ["LSTM", "LSTMCell"]

_State = tuple[Tensor, Tensor]


class LSTMCell(nn.Module):
    """One step of a long short-term memory, in parts that ``prepare`` observes and ``convert`` quantizes.

    Args:
        input_dim, hidden_dim: sizes of input and state.
        bias: whether the linear parts have one.
        device, dtype: of the parameters.
        split_gates: the four gates have linear parts, and so grids, of their own.
    """

    def __init__(
        self,
        input_dim: int,
        hidden_dim: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        split_gates: bool = False,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.input_size = input_dim
        self.hidden_size = hidden_dim
        self.split_gates = split_gates
        if split_gates:
            self.igates: nn.Module = nn.ModuleDict({g: nn.Linear(input_dim, hidden_dim, **options) for g in _GATES})
            self.hgates: nn.Module = nn.ModuleDict({g: nn.Linear(hidden_dim, hidden_dim, **options) for g in _GATES})
            self.gates: nn.Module = nn.ModuleDict({g: FloatFunctional() for g in _GATES})
        else:
            self.igates = nn.Linear(input_dim, 4 * hidden_dim, **options)
            self.hgates = nn.Linear(hidden_dim, 4 * hidden_dim, **options)
            self.gates = FloatFunctional()
        self.input_gate = nn.Sigmoid()
        self.forget_gate = nn.Sigmoid()
        self.cell_gate = nn.Tanh()
        self.output_gate = nn.Sigmoid()
        self.fgate_cx = FloatFunctional()
        self.igate_cgate = FloatFunctional()
        self.fgate_cx_igate_cgate = FloatFunctional()
        self.cell_state = nn.Tanh()
        self.ogate_cy = FloatFunctional()
        for part in self.modules():
            if isinstance(part, FloatFunctional):
                part.shares_grid = True  # over all steps

    def forward(self, x: Tensor, hidden: _State | None = None) -> _State:
        """State and cell state after, ``(batch, hidden_dim)``, from ``x`` ``(batch, input_dim)``."""
        h, c = self.initialize_hidden(x) if hidden is None else hidden
        i, f, g, o = self._gates(x, h)
        kept = self.fgate_cx.mul(self.forget_gate(f), c)
        added = self.igate_cgate.mul(self.input_gate(i), self.cell_gate(g))
        c = self.fgate_cx_igate_cgate.add(kept, added)
        return self.ogate_cy.mul(self.output_gate(o), self.cell_state(c)), c

    def _gates(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        """What goes into the curves of the gates, in the order of ``_GATES``."""
        igates, hgates, gates = (cast(Any, part) for part in (self.igates, self.hgates, self.gates))
        if self.split_gates:
            return tuple(gates[gate].add(igates[gate](x), hgates[gate](h)) for gate in _GATES)
        return cast(tuple[Tensor, ...], gates.add(igates(x), hgates(h)).chunk(4, 1))

    def initialize_hidden(self, x: Tensor) -> _State:
        """Zeros for an input; quantized ones for a quantized input."""
        if isinstance(x, QTensor):
            real = torch.zeros(x.shape[0], self.hidden_size, device=x.device)
            zeros: Tensor = quantize_per_tensor(real, 1.0, 0, quint8)
        else:
            zeros = x.new_zeros(x.shape[0], self.hidden_size)
        return zeros, zeros

    @classmethod
    def from_params(
        cls, wi: Tensor, wh: Tensor, bi: Tensor | None = None, bh: Tensor | None = None, *, split_gates: bool = False
    ) -> LSTMCell:
        """A cell of these weights and biases, in torch's layout; parameters are shared unless gates are split."""
        cell = cls(wi.shape[1], wh.shape[1], bi is not None, wi.device, wi.dtype, split_gates=split_gates)
        for part, weight, bias in ((cell.igates, wi, bi), (cell.hgates, wh, bh)):
            if not split_gates:
                _set_parameters(part, weight, bias)
                continue
            biases = [None] * len(_GATES) if bias is None else bias.detach().chunk(4)
            for gate, rows, shift in zip(_GATES, weight.detach().chunk(4), biases, strict=True):
                _set_parameters(cast(nn.ModuleDict, part)[gate], rows.clone(), None if shift is None else shift.clone())
        return cell


_GATES = ("input", "forget", "cell", "output")


def _set_parameters(linear: Any, weight: Tensor, bias: Tensor | None) -> None:
    linear.weight = _parameter(weight)
    linear.bias = None if bias is None else _parameter(bias)


def _parameter(value: Tensor) -> nn.Parameter:
    return value if isinstance(value, nn.Parameter) else nn.Parameter(value)


class _Direction(nn.Module):
    """One direction of one layer: its cell, over all steps."""

    def __init__(self, input_size: int, hidden_size: int, **options: Any) -> None:
        super().__init__()
        self.cell = LSTMCell(input_size, hidden_size, **options)

    def forward(self, x: Tensor, hidden: _State | None, reverse: bool) -> tuple[Tensor, _State]:
        steps = list(x)
        state = self.cell.initialize_hidden(steps[0]) if hidden is None else hidden
        outputs = []
        for step in reversed(steps) if reverse else steps:
            state = self.cell(step, state)
            outputs.append(state[0])
        return torch.stack(outputs[::-1] if reverse else outputs), state


class _Layer(nn.Module):
    """One layer: one direction, or both side by side."""

    def __init__(self, input_size: int, hidden_size: int, two_ways: bool, **options: Any) -> None:
        super().__init__()
        self.layer_fw = _Direction(input_size, hidden_size, **options)
        if two_ways:
            self.layer_bw = _Direction(input_size, hidden_size, **options)
            self.join = FloatFunctional()

    def forward(self, x: Tensor, hidden: list[_State | None]) -> tuple[Tensor, list[_State]]:
        y, state = self.layer_fw(x, hidden[0], False)
        if len(hidden) == 1:
            return y, [state]
        back, back_state = self.layer_bw(x, hidden[1], True)
        return self.join.cat([y, back], 2), [state, back_state]


@observed_twin_of(nn.LSTM)
class LSTM(nn.Module):
    """``torch.nn.LSTM`` in parts that can be observed: what ``prepare`` puts in place of ``nn.LSTM``.

    In float it computes what ``nn.LSTM`` computes. Calibrated and converted, it takes and gives quantized tensors.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype: as for
            ``torch.nn.LSTM``; dropout acts in training mode, on float only.
        split_gates: the four gates have linear parts, and so grids, of their own.

    Example:
        >>> import torch
        >>> from zeropoint.ao.nn import quantizable
        >>> lstm = torch.nn.LSTM(4, 8)
        >>> x = torch.randn(5, 1, 4)
        >>> torch.allclose(quantizable.LSTM.from_float(lstm)(x)[0], lstm(x)[0], atol=1e-6)
        True
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        split_gates: bool = False,
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.bias = bias
        self.batch_first = batch_first
        self.dropout = float(dropout)
        self.bidirectional = bidirectional
        self.num_directions = 2 if bidirectional else 1
        sizes = [input_size, *([hidden_size * self.num_directions] * (num_layers - 1))]
        self.split_gates = split_gates
        options = {"bias": bias, "device": device, "dtype": dtype, "split_gates": split_gates}
        self.layers = nn.ModuleList(_Layer(size, hidden_size, bidirectional, **options) for size in sizes)
        if num_layers * self.num_directions > 1:  # states of several grids become one tensor
            self.hidden = FloatFunctional()
            self.cells = FloatFunctional()

    def forward(self, x: Tensor, hidden: _State | None = None) -> tuple[Tensor, _State]:
        """As ``torch.nn.LSTM``: ``output, (h_n, c_n)``.

        Args:
            x: ``(steps, batch, input_size)``, or ``(batch, steps, input_size)`` with ``batch_first``.
            hidden: ``(h_0, c_0)``, both ``(layers * directions, batch, hidden_size)``, quantized if ``x`` is; None for
                zeros.

        Raises:
            ValueError: another shape, or no step.
        """
        if x.dim() != 3:
            raise ValueError(f"quantizable LSTM takes an input of three dimensions, got shape {tuple(x.shape)}")
        if self.batch_first:
            x = x.transpose(0, 1)
        if x.shape[0] == 0:
            raise ValueError("quantizable LSTM takes at least one step")
        states: list[_State] = []
        for index, layer in enumerate(self.layers):
            places = range(index * self.num_directions, (index + 1) * self.num_directions)
            given = [None if hidden is None else (hidden[0][at], hidden[1][at]) for at in places]
            x, after = layer(x, given)
            states += after
            if self.dropout and self.training and index + 1 < self.num_layers:
                x = F.dropout(x, self.dropout)
        h, c = ([state[part].unsqueeze(0) for state in states] for part in (0, 1))
        state = (self.hidden.cat(h), self.cells.cat(c)) if len(states) > 1 else (h[0], c[0])
        return (x.transpose(0, 1) if self.batch_first else x), state

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}, batch_first={self.batch_first}"

    @classmethod
    def from_float(cls, other: nn.Module, qconfig: Any = None, split_gates: bool = False) -> LSTM:
        """The twin of a float LSTM, with the same parameters; prepared for calibration if there is a qconfig.

        Args:
            other: ``nn.LSTM``.
            qconfig: instead of ``other.qconfig``.
            split_gates: the gates have grids of their own; then parameters are copies.

        Raises:
            TypeError: another class. ValueError: an LSTM that projects its state.
        """
        require_class(other, (nn.LSTM,), cls)
        source = cast(nn.LSTM, other)
        if source.proj_size:
            raise ValueError(f"quantizable LSTM has no projections, got proj_size={source.proj_size}")
        names = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")
        twin = cls(**{name: getattr(source, name) for name in names}, split_gates=split_gates)
        for index, layer in enumerate(twin.layers):
            for way, end in (("layer_fw", ""), ("layer_bw", "_reverse"))[: twin.num_directions]:
                parts = [getattr(source, f"{part}_l{index}{end}", None) for part in _PARTS]
                cast(Any, getattr(layer, way)).cell = LSTMCell.from_params(*cast(Any, parts), split_gates=split_gates)
        twin.train(source.training)
        return cast(LSTM, prepared(twin, getattr(source, "qconfig", None) if qconfig is None else qconfig))


_PARTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def prepared(twin: Any, qconfig: Any) -> Any:
    """The twin with observers inside, if it has a qconfig."""
    if qconfig is not None:
        from zeropoint.ao.quantization.quantize import prepare  # imports this package

        twin.qconfig = qconfig
        prepare(twin, inplace=True)
    return twin
