"""Recurrent layers and cells with int8 weights that quantize inputs and states at every step.

May import: ``tensor``, ``dtypes``, and what quantized modules share.
"""

from __future__ import annotations

import numbers
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from zeropoint.ao.nn._registry import dynamic_twin_of
from zeropoint.ao.nn.quantized._base import QuantizedModule, _version
from zeropoint.ao.nn.quantized._from_float import quantized_weight, require_class
from zeropoint.ao.nn.quantized._weights import join_weight, split_weight
from zeropoint.dtypes import as_qdtype, qint8
from zeropoint.ops.quantize import FLOAT_DTYPES
from zeropoint.ops.rnn import GATES
from zeropoint.tensor import QTensor

__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "RNNBase", "RNNCell", "RNNCellBase"]

_R = TypeVar("_R", bound="_Recurrent")


class _Recurrent(QuantizedModule):
    """Several int8 weights with a grid a row, and float biases, under the names that they have in the float module.

    The state is flat plain tensors: of every weight ``weight_ih_l0`` (int8 codes), ``weight_ih_l0_scale`` (float32, one
    a row), ``weight_ih_l0_zero_point`` (int32, one a row), and ``bias_ih_l0`` (float32). Scales and zero points without
    dimensions are one grid for all rows.

    Inputs of at most half the state's size are features, such as spectra, whose values may differ by orders of
    magnitude within a row, and weights with them. There inputs and weights have 16 bits, in two more products that
    cost little beside the state's: ``weight_ih_l0_rest`` is what ``weight_ih_l0`` leaves of the float weight.
    """

    KIND = "dynamic quantized"
    DERIVED: ClassVar[tuple[str, ...]] = ("_packed_seen",)

    mode: str
    input_size: int
    hidden_size: int
    bias: bool
    _packed_seen: dict[str, tuple[Tensor, int, Tensor | None]]

    def _check_dtype(self, dtype: Any) -> None:
        try:
            accepted = as_qdtype(dtype) == qint8
        except TypeError:
            accepted = False
        if not accepted:
            raise ValueError(f"dynamic quantized {type(self).__name__} takes qint8 weights, got dtype={dtype}")

    def _init_weight(self, suffix: str, rows: int, columns: int) -> None:
        name = f"weight_{suffix}"
        self._buffers[name] = torch.zeros(rows, columns, dtype=torch.int8)
        self._buffers[f"{name}_scale"] = torch.ones(rows)
        self._buffers[f"{name}_zero_point"] = torch.zeros(rows, dtype=torch.int32)
        self._buffers[f"_packed_{suffix}"] = None
        self._non_persistent_buffers_set.add(f"_packed_{suffix}")

    def _init_input_weight(self, suffix: str, rows: int, columns: int, state: int) -> None:
        self._init_weight(suffix, rows, columns)
        if columns * 2 <= state:
            self._init_weight(f"{suffix}_rest", rows, columns)

    def _init_bias(self, suffix: str, rows: int) -> None:
        self._buffers[f"bias_{suffix}"] = torch.zeros(rows) if self.bias else None

    def _suffixes(self) -> list[str]:
        return [name.removeprefix("_packed_") for name in self._buffers if name.startswith("_packed_")]

    def _get_name(self) -> str:
        return f"DynamicQuantized{type(self).__name__}"

    # --- weights as the user sees them ---

    def get_weight(self) -> dict[str, QTensor]:
        """The qint8 weights by name, sharing the module's codes; a weight with a ``_rest`` is the sum of the two."""
        return {f"weight_{suffix}": self._weight(f"weight_{suffix}") for suffix in self._suffixes()}

    def get_bias(self) -> dict[str, Tensor]:
        """The float32 biases by name."""
        return {name: value for name, value in self._buffers.items() if name.startswith("bias_") and value is not None}

    def _weight(self, name: str) -> QTensor:
        codes, scale, zero_point = (cast(Tensor, self._buffers[name + end]) for end in ("", "_scale", "_zero_point"))
        return join_weight(codes, scale, zero_point, 0)

    def set_weight_bias(self, weight_bias_dict: dict[str, Tensor]) -> None:
        """Takes new weights and biases by name; those that are not named stay. A new weight alone has no rest.

        Args:
            weight_bias_dict: qint8 tensors (``weight_…``) and float tensors (``bias_…``) of the module's shapes.

        Raises:
            TypeError: a weight is not qint8. ValueError: a name or a shape that does not fit; the module is unchanged.
        """
        changes: dict[str, Tensor] = {}
        for name, value in weight_bias_dict.items():
            buffer = self._buffers.get(name)
            if buffer is None or value.shape != buffer.shape or not name.startswith(("weight_", "bias_")):
                known = {key: tuple(b.shape) for key, b in {**self.get_weight(), **self.get_bias()}.items()}
                raise ValueError(f"{type(self).__name__} has no {name} of shape {tuple(value.shape)}: it has {known}")
            if name.startswith("bias_"):
                changes[name] = value.detach().to(buffer.device, torch.float32, copy=True)
            else:
                parts = split_weight(value, 0, f"{name} of {self._where()}")
                changes.update(zip((name, f"{name}_scale", f"{name}_zero_point"), parts, strict=True))
                rest = self._buffers.get(f"{name}_rest")
                if rest is not None and f"{name}_rest" not in weight_bias_dict:
                    changes[f"{name}_rest"] = torch.zeros_like(rest)
        self._buffers.update(changes)
        self._derive()

    def flatten_parameters(self) -> None:
        """Nothing to do: float models call it in their forward pass."""

    # --- what the kernels read ---

    def _derive(self) -> None:
        super()._derive()
        if "_packed_seen" not in vars(self):
            self._packed_seen = {}
        for suffix in self._suffixes():
            self._repack(suffix)

    def _repack(self, suffix: str) -> Tensor | None:
        weight = self._counted(f"weight_{suffix}")
        version = _version(weight)
        packed = None if weight.is_meta else torch.ops.zeropoint.linear_pack.default(weight)
        self._buffers[f"_packed_{suffix}"] = packed
        self._packed_seen[suffix] = weight, version, packed
        return packed

    def _packed(self, suffix: str) -> Tensor | None:
        """The packed weights, made anew if the weights are other ones or were written to."""
        if torch.compiler.is_compiling():
            return self._buffers[f"_packed_{suffix}"]
        if "_packed_seen" not in vars(self):
            self._derive()
        weight = cast(Tensor, self._buffers[f"weight_{suffix}"])
        seen = self._packed_seen.get(suffix)
        if seen is None or seen[0] is not weight or seen[1] != _version(weight):
            return self._repack(suffix)
        return seen[2]

    def _operands(self, suffix: str, has_bias: bool = True) -> list[Tensor | None]:
        """Weight, scale, zero point, bias and packed weights, as the operator takes them."""
        buffers, name = self._buffers, f"weight_{suffix}"
        bias = [buffers[f"bias_{suffix}"]] if has_bias else []
        return [buffers[name], buffers[f"{name}_scale"], buffers[f"{name}_zero_point"], *bias, self._packed(suffix)]

    def _run(
        self, x: Tensor, h: Tensor, c: Tensor | None, batch_sizes: Tensor | None, reverse: bool, end: str = ""
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One direction of one layer, whose weights' names end with ``end``."""
        projects, fine = f"weight_hr{end}" in self._buffers, f"weight_ih{end}_rest" in self._buffers
        return torch.ops.zeropoint.recurrent_dynamic.default(  # type: ignore[no-any-return]
            x,
            h,
            c,
            batch_sizes,
            self.mode,
            reverse,
            *self._operands(f"ih{end}"),
            *self._operands(f"hh{end}"),
            *(self._operands(f"hr{end}", has_bias=False) if projects else [None] * 4),
            *(self._operands(f"ih{end}_rest", has_bias=False) if fine else [None] * 4),
        )

    def _as_float(self, x: Any) -> Tensor:
        """The input in float; a quantized one is dequantized."""
        if isinstance(x, QTensor):
            x = x.dequantize()
        if not isinstance(x, Tensor) or x.dtype not in FLOAT_DTYPES:
            seen = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{self._where()} takes a float tensor, got {seen}: convert it with x.float()")
        return x

    def _state(self, state: Any, shape: tuple[int, ...], x: Tensor, name: str) -> Tensor:
        """A float32 initial state, zeros where none was given."""
        if state is None:
            return torch.zeros(shape, dtype=torch.float32, device=x.device)
        state = self._as_float(state)
        if tuple(state.shape) != shape:
            raise ValueError(f"{type(self).__name__} takes {name} of shape {shape}, got {tuple(state.shape)}")
        return cast(Tensor, state.to(torch.float32))

    # --- making, copying, loading ---

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for suffix in self._suffixes():
            self._buffers[f"_packed_{suffix}"] = None  # made for the old device
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        packed = {f"_packed_{suffix}": None for suffix in self._suffixes()}
        return {**super().__getstate__(), "_buffers": {**self._buffers, **packed}}

    def _adapt_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        super()._adapt_state(state_dict, prefix)
        self._rename_old_state(state_dict, prefix)
        for name in [f"weight_{suffix}" for suffix in self._suffixes()]:
            if name.endswith("_rest") and prefix + name.removesuffix("_rest") in state_dict:
                for end in ("", "_scale", "_zero_point"):  # torch.ao keeps none
                    kept = cast(Tensor, self._buffers[name + end])
                    none = torch.ones_like(kept) if end == "_scale" else torch.zeros_like(kept)
                    state_dict.setdefault(prefix + name + end, none)
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and (isinstance(value, QTensor) or value.is_quantized):
                parts = split_weight(value, 0, prefix + name)
                for end, part in zip(("", "_scale", "_zero_point"), parts, strict=True):
                    state_dict[prefix + name + end] = part
            for key in (f"{name}_scale", f"{name}_zero_point"):
                value, buffer = state_dict.get(prefix + key), cast(Tensor, self._buffers[key])
                rows = cast(Tensor, self._buffers[name]).shape[:1]
                if isinstance(value, Tensor) and value.shape in ((), rows) and value.shape != buffer.shape:
                    self._buffers[key] = buffer.new_empty(value.shape)
        if not self.bias:  # torch.ao keeps zeros
            for suffix in self._suffixes():
                state_dict.pop(f"{prefix}bias_{suffix}", None)

    def _rename_old_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Brings what ``torch.ao`` stores to the names of this module, in place."""
        raise NotImplementedError

    @classmethod
    def _sizes(cls, mod: Any) -> dict[str, Any]:
        """The constructor arguments that a float module has been made with."""
        raise NotImplementedError

    @classmethod
    def from_float(cls: type[_R], mod: nn.Module, use_precomputed_fake_quant: bool = False) -> _R:
        """The dynamic twin of a float module.

        Args:
            mod: the float module of the same name in ``torch.nn``, or a subclass. Its qconfig's weight observer chooses
                the grids of the weights; without a qconfig there is one symmetric grid a row.
            use_precomputed_fake_quant: as for other modules; recurrent layers have no training twin.

        Raises:
            TypeError: another class, or a qconfig whose weights are not qint8.
        """
        require_class(mod, (_FLOAT[cls],), cls)
        twin = cls(**cls._sizes(mod))
        qconfig = getattr(mod, "qconfig", None)
        values: dict[str, Tensor] = {}
        for suffix in twin._suffixes():
            if suffix.endswith("_rest"):
                continue
            weight = cast(Tensor, getattr(mod, f"weight_{suffix}"))
            observer = (_per_channel_observer() if qconfig is None else qconfig.weight()).to(weight.device)
            quantized = values[f"weight_{suffix}"] = quantized_weight(weight, observer, 0, module=mod)
            if f"_packed_{suffix}_rest" in twin._buffers:
                rest, observer = weight - quantized.dequantize(), _per_channel_observer().to(weight.device)
                values[f"weight_{suffix}_rest"] = quantized_weight(rest, observer, 0, module=mod)
        for name in twin.get_bias():
            values[name] = cast(Tensor, getattr(mod, name))
        twin.set_weight_bias(values)
        return twin


def _per_channel_observer() -> Any:
    # Imported late: that package imports this one for its mappings.
    from zeropoint.ao.quantization.observer import default_per_channel_weight_observer

    return default_per_channel_weight_observer()


# --- layers -------------------------------------------------------------------------------------------------------


class RNNBase(_Recurrent):
    """What :class:`LSTM`, :class:`GRU` and :class:`RNN` share: layers, directions, packed sequences.

    Args:
        mode: ``"LSTM"``, ``"GRU"``, ``"RNN_TANH"`` or ``"RNN_RELU"``.
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional: as for ``torch.nn.LSTM``;
            dropout acts in training mode only.
        dtype: of the weights, qint8.
        proj_size: of an LSTM whose state is projected to that size; 0: none.

    Raises:
        ValueError: sizes that make no layer, or another dtype.
    """

    def __init__(
        self,
        mode: str,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        dtype: Any = qint8,
        proj_size: int = 0,
    ) -> None:
        super().__init__()
        self._check_dtype(dtype)
        if not isinstance(dropout, numbers.Number) or isinstance(dropout, bool) or not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be a probability, got {dropout!r}")
        if min(hidden_size, num_layers) < 1 or input_size < 0 or not 0 <= proj_size < hidden_size:
            raise ValueError(
                f"{type(self).__name__} takes sizes above 0 and a proj_size below hidden_size, got input_size="
                f"{input_size}, hidden_size={hidden_size}, num_layers={num_layers}, proj_size={proj_size}"
            )
        if proj_size and mode != "LSTM":
            raise ValueError(f"proj_size is for LSTM only, got proj_size={proj_size} for {mode}")
        self.mode = mode
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.bias = bias
        self.batch_first = batch_first
        self.dropout = float(dropout)
        self.bidirectional = bidirectional
        self.proj_size = proj_size
        rows, state = GATES[mode] * hidden_size, proj_size or hidden_size
        for layer in range(num_layers):
            for end in self._ends(layer):
                self._init_input_weight(f"ih{end}", rows, input_size if layer == 0 else state * self._directions, state)
                self._init_weight(f"hh{end}", rows, state)
                self._init_bias(f"ih{end}", rows)
                self._init_bias(f"hh{end}", rows)
                if proj_size:
                    self._init_weight(f"hr{end}", proj_size, hidden_size)
        self._derive()

    @property
    def _directions(self) -> int:
        return 2 if self.bidirectional else 1

    def _ends(self, layer: int) -> list[str]:
        """How the names of a layer's weights end, forwards and backwards."""
        return [f"_l{layer}", f"_l{layer}_reverse"][: self._directions]

    def _forward(self, x: Any, hx: Any) -> tuple[Any, Tensor, Tensor]:
        """Outputs of the last layer, states and cell states after, in the forms and the dtype of the input."""
        packed = x if isinstance(x, PackedSequence) else None
        data = self._as_float(x if packed is None else packed.data)
        dtype, batch_sizes, batched = data.dtype, None, True
        y = data.to(torch.float32)
        if packed is not None:
            batch_sizes = packed.batch_sizes
            batch = int(batch_sizes[0])
        else:
            if y.dim() not in (2, 3):
                raise ValueError(
                    f"{type(self).__name__} takes an input of two or three dimensions, got shape {tuple(y.shape)}"
                )
            batched = y.dim() == 3
            if not batched:
                y = y.unsqueeze(1)
            elif self.batch_first:
                y = y.transpose(0, 1)
            batch = y.shape[1]
        if y.shape[-1] != self.input_size:
            raise ValueError(f"{type(self).__name__} takes inputs of size {self.input_size}, got {y.shape[-1]}")
        h, c = self._initial(hx, y, batch, batched, packed)
        states, cells = [], []
        for layer in range(self.num_layers):
            outputs = []
            for direction, end in enumerate(self._ends(layer)):
                at = layer * self._directions + direction
                out, state, cell = self._run(y, h[at], None if c is None else c[at], batch_sizes, direction == 1, end)
                outputs.append(out)
                states.append(state)
                cells.append(cell)
            y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
            if self.dropout and self.training and layer + 1 < self.num_layers:
                y = F.dropout(y, self.dropout)
        h_after, c_after = self._final(states, batched, packed, dtype), self._final(cells, batched, packed, dtype)
        y = y.to(dtype)
        if packed is not None:
            return (
                PackedSequence(y, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices),
                h_after,
                c_after,
            )
        if not batched:
            return y.squeeze(1), h_after, c_after
        return y.transpose(0, 1) if self.batch_first else y, h_after, c_after

    def _initial(
        self, hx: Any, x: Tensor, batch: int, batched: bool, packed: PackedSequence | None
    ) -> tuple[Tensor, Tensor | None]:
        """States and cell states before, ``(layers * directions, batch, size)``, in the order of the rows."""
        states = hx if self.mode == "LSTM" and hx is not None else (hx, None)
        if not isinstance(states, (tuple, list)) or len(states) != 2:
            raise TypeError(f"{type(self).__name__} takes a pair (h_0, c_0), got {type(states).__name__}")
        count = self.num_layers * self._directions
        made: list[Tensor] = []
        for name, given, size in (
            ("h_0", states[0], self.proj_size or self.hidden_size),
            ("c_0", states[1], self.hidden_size),
        ):
            if batched:
                state = self._state(given, (count, batch, size), x, name)
            else:
                state = self._state(given, (count, size), x, name).unsqueeze(1)
            if packed is not None and packed.sorted_indices is not None and given is not None:
                state = state.index_select(1, packed.sorted_indices)
            made.append(state)
        return made[0], made[1] if self.mode == "LSTM" else None

    def _final(self, states: list[Tensor], batched: bool, packed: PackedSequence | None, dtype: torch.dtype) -> Tensor:
        result = torch.stack(states)
        if result.dim() < 3:  # no cell states
            return result
        if packed is not None and packed.unsorted_indices is not None:
            result = result.index_select(1, packed.unsorted_indices)
        return (result if batched else result.squeeze(1)).to(dtype)

    def extra_repr(self) -> str:
        parts = [f"{self.input_size}, {self.hidden_size}"]
        defaults = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False}
        for name, default in {**defaults, "proj_size": 0}.items():
            value = getattr(self, name)
            if value != default:
                parts.append(f"{name}={value}")
        return ", ".join(parts)

    @classmethod
    def _sizes(cls, mod: Any) -> dict[str, Any]:
        names = ["input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional"]
        if mod.proj_size:
            names.append("proj_size")
        return {name: getattr(mod, name) for name in names}

    def _rename_old_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        ends = [end for layer in range(self.num_layers) for end in self._ends(layer)]
        for index, end in enumerate(ends):
            old = f"{prefix}_all_weight_values.{index}.param"
            record = state_dict.pop(old, None)
            parts = {} if record is None else record.cell()
            for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                value = parts.get(part, state_dict.pop(f"{old}.{part}", None))
                if value is not None:
                    state_dict[f"{prefix}{part}{end}"] = value


@dynamic_twin_of(nn.LSTM)
class LSTM(RNNBase):
    """A long short-term memory over float sequences, with int8 weights and exact integer sums.

    At every step each row of the input and of the state gets a full 8-bit grid of its own; gates and cell states are
    float32. So a sequence gives the same numbers alone, in a batch and packed.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size: as for
            ``torch.nn.LSTM``.
        dtype: of the weights, qint8.

    Raises:
        ValueError: sizes that make no layer, or another dtype.

    Example:
        >>> import torch
        >>> from zeropoint.ao.nn.quantized import dynamic as nnqd
        >>> lstm = nnqd.LSTM.from_float(torch.nn.LSTM(4, 8, bidirectional=True))
        >>> y, (h, c) = lstm(torch.zeros(5, 1, 4))
        >>> y.shape, h.shape
        (torch.Size([5, 1, 16]), torch.Size([2, 1, 8]))
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
        dtype: Any = qint8,
        proj_size: int = 0,
    ) -> None:
        super().__init__(
            *("LSTM", input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, dtype, proj_size)
        )

    def forward(self, input: Any, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Any, tuple[Tensor, Tensor]]:
        """As ``torch.nn.LSTM``: ``output, (h_n, c_n)``.

        Args:
            input: floats ``(steps, batch, input_size)``, ``(batch, steps, …)`` with ``batch_first``, ``(steps, …)``, or
                a ``PackedSequence``. A quantized tensor is dequantized.
            hx: ``(h_0, c_0)``, or None for zeros.

        Raises:
            TypeError: an input that is not float. ValueError: shapes that do not fit.
        """
        y, h, c = self._forward(input, hx)
        return y, (h, c)


@dynamic_twin_of(nn.GRU)
class GRU(RNNBase):
    """Gated recurrent units over float sequences, with int8 weights and exact integer sums.

    As :class:`LSTM`, with the arguments of ``torch.nn.GRU``.
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
        dtype: Any = qint8,
    ) -> None:
        super().__init__("GRU", input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, dtype)

    def forward(self, input: Any, hx: Tensor | None = None) -> tuple[Any, Tensor]:
        """As ``torch.nn.GRU``: ``output, h_n``; inputs as for :class:`LSTM`."""
        y, h, _ = self._forward(input, hx)
        return y, h


@dynamic_twin_of(nn.RNN)
class RNN(RNNBase):
    """An Elman network over float sequences, with int8 weights and exact integer sums.

    As :class:`LSTM`, with the arguments of ``torch.nn.RNN``.

    Raises:
        ValueError: another nonlinearity than ``"tanh"`` and ``"relu"``, sizes that make no layer, or another dtype.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        dtype: Any = qint8,
    ) -> None:
        mode = _mode_of(nonlinearity)
        super().__init__(mode, input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, dtype)
        self.nonlinearity = nonlinearity

    def forward(self, input: Any, hx: Tensor | None = None) -> tuple[Any, Tensor]:
        """As ``torch.nn.RNN``: ``output, h_n``; inputs as for :class:`LSTM`."""
        y, h, _ = self._forward(input, hx)
        return y, h

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.nonlinearity == "tanh" else f", nonlinearity={self.nonlinearity}")

    @classmethod
    def _sizes(cls, mod: Any) -> dict[str, Any]:
        return {**super()._sizes(mod), "nonlinearity": mod.nonlinearity}


def _mode_of(nonlinearity: str) -> str:
    if nonlinearity not in ("tanh", "relu"):
        raise ValueError(f"nonlinearity must be 'tanh' or 'relu', got {nonlinearity!r}")
    return f"RNN_{nonlinearity.upper()}"


# --- cells --------------------------------------------------------------------------------------------------------


class RNNCellBase(_Recurrent):
    """What the cells share: one step, with one weight for the input and one for the state.

    Args:
        input_size, hidden_size, bias: as for ``torch.nn.LSTMCell``.
        num_chunks: how many gates there are; the cells know it, and pass it.
        dtype: of the weights, qint8.

    Raises:
        ValueError: another dtype.
    """

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, num_chunks: int = 4, dtype: Any = qint8
    ) -> None:
        super().__init__()
        self._check_dtype(dtype)
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.bias = bias
        rows = num_chunks * hidden_size
        self._init_input_weight("ih", rows, input_size, hidden_size)
        self._init_weight("hh", rows, hidden_size)
        for suffix in ("ih", "hh"):
            self._init_bias(suffix, rows)
        self._derive()

    @property
    def weight_ih(self) -> QTensor:
        """The qint8 weight of the input, (gates * hidden_size, input_size)."""
        return self._weight("weight_ih")

    @property
    def weight_hh(self) -> QTensor:
        """The qint8 weight of the state, (gates * hidden_size, hidden_size)."""
        return self._weight("weight_hh")

    def _step(self, input: Any, h: Any, c: Any = None) -> tuple[Tensor, Tensor]:
        """State and cell state after one step of ``(batch, input_size)`` or ``(input_size,)``."""
        x = self._as_float(input)
        if x.dim() not in (1, 2) or x.shape[-1] != self.input_size:
            raise ValueError(
                f"{type(self).__name__} takes (batch, {self.input_size}) or ({self.input_size},), got {tuple(x.shape)}"
            )
        rows = x.to(torch.float32).reshape(1, 1 if x.dim() == 1 else x.shape[0], self.input_size)
        shape = (*x.shape[:-1], self.hidden_size)
        h, c = (self._state(s, shape, x, "a state").reshape(-1, self.hidden_size) for s in (h, c))
        _, h, c = self._run(rows, h, c if self.mode == "LSTM" else None, None, False)
        return h.reshape(shape).to(x.dtype), c.reshape(shape).to(x.dtype) if self.mode == "LSTM" else c

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}" + ("" if self.bias else ", bias=False")

    @classmethod
    def _sizes(cls, mod: Any) -> dict[str, Any]:
        return {name: getattr(mod, name) for name in ("input_size", "hidden_size", "bias")}

    def _rename_old_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        for side in ("ih", "hh"):
            record = state_dict.pop(f"{prefix}_packed_weight_{side}", None)
            if record is None:
                continue
            weight, bias = record.weight_bias()
            state_dict[f"{prefix}weight_{side}"] = weight
            if bias is not None:
                state_dict[f"{prefix}bias_{side}"] = bias


@dynamic_twin_of(nn.RNNCell)
class RNNCell(RNNCellBase):
    """One step of an Elman network on floats, with int8 weights.

    Args:
        input_size, hidden_size, bias: as for ``torch.nn.RNNCell``.
        nonlinearity: ``"tanh"`` or ``"relu"``.
        dtype: of the weights, qint8.

    Raises:
        ValueError: another nonlinearity or dtype.
    """

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, nonlinearity: str = "tanh", dtype: Any = qint8
    ) -> None:
        mode = _mode_of(nonlinearity)
        super().__init__(input_size, hidden_size, bias, num_chunks=1, dtype=dtype)
        self.mode = mode
        self.nonlinearity = nonlinearity

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """The state after: floats ``(batch, hidden_size)``, or ``(hidden_size,)`` for an input of one dimension."""
        return self._step(input, hx)[0]

    @classmethod
    def _sizes(cls, mod: Any) -> dict[str, Any]:
        return {**super()._sizes(mod), "nonlinearity": mod.nonlinearity}


@dynamic_twin_of(nn.LSTMCell)
class LSTMCell(RNNCellBase):
    """One step of a long short-term memory on floats, with int8 weights.

    Args:
        input_size, hidden_size, bias: as for ``torch.nn.LSTMCell``.
        dtype: of the weights, qint8.
    """

    mode = "LSTM"

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True, dtype: Any = qint8) -> None:
        super().__init__(input_size, hidden_size, bias, num_chunks=4, dtype=dtype)

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """States and cell states after, as ``torch.nn.LSTMCell`` gives them."""
        h, c = (None, None) if hx is None else hx
        return self._step(input, h, c)


@dynamic_twin_of(nn.GRUCell)
class GRUCell(RNNCellBase):
    """One step of gated recurrent units on floats, with int8 weights.

    Args:
        input_size, hidden_size, bias: as for ``torch.nn.GRUCell``.
        dtype: of the weights, qint8.
    """

    mode = "GRU"

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True, dtype: Any = qint8) -> None:
        super().__init__(input_size, hidden_size, bias, num_chunks=3, dtype=dtype)

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """The state after: floats ``(batch, hidden_size)``, or ``(hidden_size,)`` for an input of one dimension."""
        return self._step(input, hx)[0]


_FLOAT: dict[type[_Recurrent], type[nn.Module]] = {
    LSTM: nn.LSTM,
    GRU: nn.GRU,
    RNN: nn.RNN,
    RNNCell: nn.RNNCell,
    LSTMCell: nn.LSTMCell,
    GRUCell: nn.GRUCell,
}
