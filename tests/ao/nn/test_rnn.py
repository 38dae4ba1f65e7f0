"""Dynamic recurrent layers and cells: accuracy, forms of input, state, and equal numbers on every backend."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import zeropoint as zp
from zeropoint.ao.nn.quantized import dynamic as nnqd
from zeropoint.ao.quantization import default_dynamic_qconfig, quantize_dynamic
from zeropoint.backends import cpu
from zeropoint.ops.rnn import GATES, recurrent_dynamic_reference

# torch's own float layer says so at every call that projects.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

LAYERS = [
    pytest.param(nn.LSTM, {}, id="lstm"),
    pytest.param(nn.LSTM, {"num_layers": 2, "bidirectional": True}, id="lstm-deep-both-ways"),
    pytest.param(nn.LSTM, {"batch_first": True, "bias": False}, id="lstm-batch-first-no-bias"),
    pytest.param(nn.LSTM, {"proj_size": 7, "bidirectional": True, "num_layers": 2}, id="lstm-projected"),
    pytest.param(nn.GRU, {}, id="gru"),
    pytest.param(nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": True}, id="gru-deep-both-ways"),
    pytest.param(nn.GRU, {"bias": False}, id="gru-no-bias"),
    pytest.param(nn.RNN, {"num_layers": 2, "bidirectional": True}, id="tanh-deep-both-ways"),
    pytest.param(nn.RNN, {"nonlinearity": "relu", "batch_first": True, "bias": False}, id="relu-no-bias"),
]
CELLS = [
    pytest.param(nn.LSTMCell, {}, id="lstm"),
    pytest.param(nn.GRUCell, {}, id="gru"),
    pytest.param(nn.GRUCell, {"bias": False}, id="gru-no-bias"),
    pytest.param(nn.RNNCell, {}, id="tanh"),
    pytest.param(nn.RNNCell, {"nonlinearity": "relu"}, id="relu"),
]


def sqnr(reference: Tensor, other: Tensor) -> float:
    reference, other = reference.detach(), other.detach()
    return float(20 * torch.log10(reference.norm() / (reference - other).norm()))


def twin(module: nn.Module) -> Any:
    return getattr(nnqd, type(module).__name__).from_float(module)


def flat(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, PackedSequence):
        return [result.data]
    return [tensor for part in result for tensor in flat(part)]


def equal(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(flat(a), flat(b), strict=True))


# --- what it computes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "options"), LAYERS)
def test_layers_follow_their_float_twin(kind: Any, options: dict[str, Any]) -> None:
    layer = kind(24, 32, **options).eval()
    x = torch.randn(6, 5, 24)
    for given, made in zip(flat(layer(x)), flat(twin(layer)(x)), strict=True):
        assert given.shape == made.shape
        assert sqnr(given, made) > 30


@pytest.mark.parametrize(("kind", "options"), LAYERS)
def test_initial_states_and_unbatched_inputs(kind: Any, options: dict[str, Any]) -> None:
    layer = kind(24, 32, **options).eval()
    quantized, x = twin(layer), torch.randn(6, 24)
    y, state = layer(x)
    assert [t.shape for t in flat(quantized(x))] == [t.shape for t in flat((y, state))]
    again = flat(quantized(x, state))
    for given, made in zip(flat(layer(x, state)), again, strict=True):
        assert given.shape == made.shape
        assert sqnr(given, made) > 30
    with pytest.raises(ValueError, match="h_0 of shape"):
        quantized(x, tuple(s[:, :3] for s in state) if isinstance(state, tuple) else state[:, :3])


@pytest.mark.parametrize(("kind", "options"), LAYERS)
@pytest.mark.parametrize("sort", [True, False], ids=["sorted", "unsorted"])
def test_packed_sequences_give_what_single_ones_give(kind: Any, options: dict[str, Any], sort: bool) -> None:
    quantized = twin(kind(24, 32, **options).eval())
    lengths = [4, 3, 2] if sort else [2, 4, 3]
    sequences = [torch.randn(length, 24) for length in lengths]
    packed, state = quantized(pack_sequence(sequences, enforce_sorted=sort))
    assert isinstance(packed, PackedSequence)
    padded, _ = pad_packed_sequence(packed)
    for i, sequence in enumerate(sequences):
        y, single = quantized(sequence)
        assert torch.equal(padded[: lengths[i], i], y)
        for a, b in zip(flat(state), flat(single), strict=True):
            assert torch.equal(a[:, i], b)


def test_packed_sequences_with_initial_states_follow_float() -> None:
    layer = nn.LSTM(24, 32, bidirectional=True).eval()
    packed = pack_padded_sequence(torch.randn(5, 3, 24), torch.tensor([2, 5, 3]), enforce_sorted=False)
    start = (torch.randn(2, 3, 32), torch.randn(2, 3, 32))
    for given, made in zip(flat(layer(packed, start)), flat(twin(layer)(packed, start)), strict=True):
        assert sqnr(given, made) > 30


@pytest.mark.parametrize(("kind", "options"), CELLS)
def test_cells_follow_their_float_twin(kind: Any, options: dict[str, Any]) -> None:
    cell = kind(24, 32, **options)
    quantized = twin(cell)
    for shape in ((5, 24), (24,)):
        x = torch.randn(shape)
        first = cell(x)
        for given, made in zip(flat(cell(x, first)), flat(quantized(x, first)), strict=True):
            assert given.shape == made.shape
            assert sqnr(given, made) > 30


def test_a_layer_is_its_cell_step_by_step() -> None:
    layer = nn.LSTM(24, 32).eval()
    cell = nn.LSTMCell(24, 32)
    cell.load_state_dict({name.removesuffix("_l0"): value for name, value in layer.state_dict().items()})
    x, state = torch.randn(4, 3, 24), None
    quantized = twin(cell)
    for step in x:
        state = quantized(step, state)
    assert equal(state, [s[0] for s in twin(layer)(x)[1]])


def test_sequences_of_any_loudness_keep_their_precision() -> None:
    layer = nn.LSTM(24, 32, num_layers=2).eval()
    x = torch.randn(10, 8, 24).abs() * torch.logspace(-5, 0.5, 8).unsqueeze(1)
    quantized = twin(layer)
    y, made = layer(x)[0], quantized(x)[0]
    for i in range(8):
        assert sqnr(y[:, i], made[:, i]) > 25
        assert torch.equal(made[:, i : i + 1], quantized(x[:, i : i + 1])[0])


def spectra(rows: int, columns: int) -> Tensor:
    """Columns whose values differ by orders of magnitude."""
    return torch.randn(rows, 2, columns).square() * torch.logspace(1, -5, columns)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_narrow_inputs_of_wide_range_have_16_bits(kind: Any) -> None:
    layer = kind(16, 32).eval()
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            if name.startswith("weight_ih"):
                weight.copy_(torch.randn(weight.shape) / torch.logspace(1, -1, 16))
    quantized = twin(layer)
    x = spectra(6, 16)[0] if kind.__name__.endswith("Cell") else spectra(6, 16)
    given, made = (flat(m(x))[0] for m in (layer, quantized))
    weights = quantized.get_weight()
    names = [name for name in weights if name.startswith("weight_ih")]
    assert len(names) == 2
    assert sqnr(getattr(layer, names[0]), sum(weights[name].dequantize() for name in names)) > 85
    assert sqnr(given, made) > 35
    alone = twin(layer)
    alone.set_weight_bias({names[0]: weights[names[0]]})  # a weight alone has no rest
    loaded = twin(kind(16, 32))
    loaded.load_state_dict({name: value for name, value in quantized.state_dict().items() if "_rest" not in name})
    assert equal(alone(x), loaded(x))
    assert sqnr(given, flat(alone(x))[0]) < sqnr(given, made) - 3
    with pytest.raises(RuntimeError, match="Missing key"):
        loaded.load_state_dict({})


def test_a_narrow_layers_state_goes_round() -> None:
    def made() -> Any:
        return twin(nn.LSTM(8, 32, num_layers=2, bidirectional=True))

    quantized, fresh, x = made(), made(), torch.randn(4, 3, 8)
    rests = {name for name in quantized.state_dict() if name.endswith("_rest")}
    assert rests == {"weight_ih_l0_rest", "weight_ih_l0_reverse_rest"}
    fresh.load_state_dict(quantized.state_dict())
    stream = io.BytesIO()
    torch.save(quantized, stream)
    stream.seek(0)
    for other in (fresh, copy.deepcopy(quantized), torch.load(stream, weights_only=False)):
        assert equal(other(x), quantized(x))
    before = quantized(x)
    quantized.weight_ih_l0_rest.zero_()
    assert not equal(before, quantized(x))


def test_one_huge_value_leaves_everything_finite() -> None:
    x = torch.randn(3, 2, 24)
    x[0, 0, 0], x[1, 1, 1], x[2, 0, 5] = 3e38, float("inf"), float("nan")
    for kind in (nn.LSTM, nn.GRU):
        assert all(torch.isfinite(t).all() for t in flat(twin(kind(24, 32).eval())(x)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_outputs_have_the_inputs_dtype(dtype: torch.dtype) -> None:
    quantized = twin(nn.LSTM(24, 32).eval())
    x = torch.randn(4, 2, 24).to(dtype)
    for made, wide in zip(flat(quantized(x)), flat(quantized(x.float())), strict=True):
        assert torch.equal(made, wide.to(dtype))
    assert quantized(zp.quantize_per_tensor(x.float(), 0.05, 128, zp.quint8))[0].dtype == torch.float32


def test_non_contiguous_and_empty_inputs() -> None:
    quantized = twin(nn.GRU(24, 32).eval())
    x = torch.randn(4, 24, 3)
    assert equal(quantized(x.transpose(1, 2)), quantized(x.transpose(1, 2).contiguous()))
    y, h = quantized(torch.randn(4, 0, 24))
    assert y.shape == (4, 0, 32)
    assert h.shape == (1, 0, 32)


def test_dropout_acts_in_training_only() -> None:
    quantized = nnqd.LSTM.from_float(nn.LSTM(24, 32, num_layers=2, dropout=1.0).eval())
    x = torch.randn(4, 2, 24)
    assert equal(quantized.eval()(x), quantized(x))
    assert not equal(quantized.train()(x), quantized.eval()(x))


# --- state --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "options"), LAYERS + CELLS)
def test_state_is_flat_and_goes_round(kind: Any, options: dict[str, Any]) -> None:
    module = kind(24, 32, **options)
    quantized = twin(module)
    state = quantized.state_dict()
    assert all(type(value) is Tensor for value in state.values())
    assert {name for name in state if not name.endswith(("_scale", "_zero_point"))} == set(module.state_dict())
    assert {
        value.dtype for name, value in state.items() if name.startswith("weight") and name in module.state_dict()
    } == {torch.int8}
    fresh = twin(kind(24, 32, **options))
    fresh.load_state_dict(state)
    x = torch.randn(3, 24)
    stream = io.BytesIO()
    torch.save(quantized, stream)
    stream.seek(0)
    others = [fresh, copy.deepcopy(quantized), torch.load(stream, weights_only=False)]
    assert all(equal(other(x), quantized(x)) for other in others)
    assert "24, 32" in repr(quantized)


def test_one_grid_for_all_rows_is_obeyed_and_loads() -> None:
    layer = nn.LSTM(24, 32)
    model = quantize_dynamic(nn.ModuleDict({"lstm": layer}), {nn.LSTM: default_dynamic_qconfig})
    assert model["lstm"].weight_ih_l0_scale.shape == ()
    fresh = twin(nn.LSTM(24, 32))
    fresh.load_state_dict(model["lstm"].state_dict())
    x = torch.randn(3, 2, 24)
    assert equal(fresh(x), model["lstm"](x))
    assert sqnr(layer(x)[0], fresh(x)[0]) > 25


def test_writing_to_weights_is_seen() -> None:
    quantized = twin(nn.GRU(24, 32))
    x = torch.randn(3, 2, 24)
    before = quantized(x)
    quantized.weight_hh_l0.zero_()
    assert not equal(before, quantized(x))


def test_weights_and_biases_by_name() -> None:
    layer = nn.LSTM(24, 32)
    quantized = twin(layer)
    weights, biases = quantized.get_weight(), quantized.get_bias()
    assert set(weights) == {"weight_ih_l0", "weight_hh_l0"}
    assert sqnr(layer.weight_ih_l0, weights["weight_ih_l0"].dequantize()) > 35
    assert torch.equal(biases["bias_ih_l0"], layer.bias_ih_l0)
    other = nnqd.LSTM(24, 32)
    other.set_weight_bias({**weights, **biases})
    x = torch.randn(3, 2, 24)
    assert equal(other(x), quantized(x))
    with pytest.raises(ValueError, match="has no weight_ih_l1"):
        other.set_weight_bias({"weight_ih_l1": weights["weight_ih_l0"]})


# --- the workflow -------------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """Recurrent layers inside modules inside a module."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"lstm": nn.LSTM(24, 32), "gru": nn.GRU(32, 16)})
        self.cell = nn.LSTMCell(16, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(self.parts["gru"](self.parts["lstm"](x)[0])[0][-1])[0])


def test_quantize_dynamic_swaps_them_wherever_they_are() -> None:
    model = Tagger().eval()
    quantized = quantize_dynamic(model)
    kinds = [type(m) for m in (quantized.parts["lstm"], quantized.parts["gru"], quantized.cell, quantized.head)]
    assert kinds == [nnqd.LSTM, nnqd.GRU, nnqd.LSTMCell, nnqd.Linear]
    x = torch.randn(6, 5, 24)
    assert sqnr(model(x), quantized(x)) > 25
    only = quantize_dynamic(model, {nn.GRU})
    assert type(only.parts["lstm"]) is nn.LSTM
    assert type(only.parts["gru"]) is nnqd.GRU


def test_an_lstm_inside_a_module_exports() -> None:
    quantized = quantize_dynamic(Tagger().eval())
    x = torch.randn(6, 5, 24)
    exported = torch.export.export(quantized, (x,))
    assert torch.equal(exported.module()(x), quantized(x))


@pytest.mark.parametrize("make", [nnqd.LSTM, nnqd.GRU, nnqd.RNN, nnqd.LSTMCell, nnqd.GRUCell, nnqd.RNNCell])
def test_other_weight_dtypes_are_refused_not_ignored(make: Any) -> None:
    with pytest.raises(ValueError, match=r"takes qint8 weights, got dtype=torch\.float16"):
        make(4, 5, dtype=torch.float16)


def test_what_is_refused_is_told() -> None:
    with pytest.raises(ValueError, match="proj_size below hidden_size"):
        nnqd.LSTM(4, 5, proj_size=5)
    with pytest.raises(ValueError, match="proj_size is for LSTM only"):
        nnqd.RNNBase("GRU", 4, 5, proj_size=2)
    with pytest.raises(ValueError, match="dropout must be a probability"):
        nnqd.GRU(4, 5, dropout=2.0)
    with pytest.raises(ValueError, match="nonlinearity must be"):
        nnqd.RNNCell(4, 5, nonlinearity="sin")
    with pytest.raises(ValueError, match="nonlinearity must be"):
        nnqd.RNN(4, 5, nonlinearity="sin")
    with pytest.raises(TypeError, match=r"takes torch\.nn\.modules\.rnn\.LSTM, got GRU"):
        nnqd.LSTM.from_float(nn.GRU(4, 5))
    layer = nnqd.LSTM(4, 5)
    with pytest.raises(ValueError, match="inputs of size 4"):
        layer(torch.randn(2, 1, 3))
    with pytest.raises(TypeError, match="takes a float tensor, got"):
        layer(torch.ones(2, 1, 4, dtype=torch.int64))
    with pytest.raises(TypeError, match="a pair"):
        layer(torch.randn(2, 1, 4), torch.zeros(1, 1, 5))
    with pytest.raises(ValueError, match=r"takes \(batch, 4\)"):
        nnqd.GRUCell(4, 5)(torch.randn(2, 1, 4))


# --- backends -----------------------------------------------------------------------------------------------------

SHAPES = [
    pytest.param((5, 3, 7, 9), None, id="odd"),
    pytest.param((4, 1, 33, 64), None, id="one-sequence"),
    pytest.param((3, 40, 16, 128), None, id="many-sequences"),
    pytest.param((6, 4, 100, 256), None, id="wide"),
    pytest.param((4, 3, 6, 10), 5, id="projected"),
    pytest.param((2, 3, 0, 5), None, id="no-input"),
    pytest.param((0, 3, 6, 10), None, id="no-step"),
    pytest.param((3, 0, 6, 10), None, id="no-sequence"),
]


def operands(rows: int, columns: int, shifted: bool, bias: bool = True) -> list[Any]:
    weight = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    zero_point = torch.randint(-20, 20, (rows,), dtype=torch.int32) if shifted else torch.zeros(rows, dtype=torch.int32)
    scale = torch.rand(rows) * 0.02 / max(columns, 1) ** 0.5
    return [weight, scale, zero_point, *([torch.randn(rows)] if bias else []), None]


@pytest.mark.skipif(not cpu.is_native(), reason="runs on the reference backend")
@pytest.mark.parametrize("isa", cpu.available_isas())
@pytest.mark.parametrize("mode", GATES)
@pytest.mark.parametrize(("sizes", "projected"), SHAPES)
def test_native_equals_reference(isa: str, mode: str, sizes: tuple[int, int, int, int], projected: int | None) -> None:
    steps, batch, columns, hidden = sizes
    if projected and mode != "LSTM":
        pytest.skip("only LSTM projects its state")
    state, before, threads = projected or hidden, cpu.active_isa(), torch.get_num_threads()
    x = torch.randn(steps, batch, columns) * torch.logspace(-3, 3, max(batch, 1))[:batch].unsqueeze(1)
    h = torch.randn(batch, state)
    c = torch.randn(batch, hidden) if mode == "LSTM" else None
    try:
        cpu.set_isa(isa)
        for count, shifted, reverse, fine in ((1, True, False, True), (2, False, True, True), (2, False, False, False)):
            torch.set_num_threads(count)
            given = operands(GATES[mode] * hidden, columns, shifted)
            recurrent = operands(GATES[mode] * hidden, state, shifted)
            recurrent[-1] = torch.ops.zeropoint.linear_pack.default(recurrent[0])
            output = operands(state, hidden, shifted, bias=False) if projected else [None] * 4
            rest = operands(GATES[mode] * hidden, columns, not shifted, bias=False) if fine else [None] * 4
            forms: list[tuple[Tensor, Tensor | None]] = [(x, None)]
            if steps and batch:
                falling = torch.randint(1, batch + 1, (steps,)).sort(descending=True).values
                forms.append((torch.randn(int(falling.sum()), columns), falling))
            for rows, batch_sizes in forms:
                arguments = (rows, h, c, batch_sizes, mode, reverse, *given, *recurrent, *output, *rest)
                assert equal(
                    torch.ops.zeropoint.recurrent_dynamic.default(*arguments), recurrent_dynamic_reference(*arguments)
                )
    finally:
        cpu.set_isa(before)
        torch.set_num_threads(threads)


@pytest.mark.skipif(not cpu.is_native(), reason="runs on the reference backend")
def test_native_code_checks_every_size() -> None:
    def call(**changes: Any) -> None:
        given = changes.pop("given", operands(20, 6, False))
        rest = changes.pop("rest", operands(20, 6, True, bias=False))
        states = {"x": torch.randn(3, 2, 6), "h": torch.zeros(2, 5), "c": torch.zeros(2, 5)}
        named = {**states, "batch_sizes": None, "mode": "LSTM", **changes}
        recurrent = operands(20, 5, False)
        torch.ops.zeropoint.recurrent_dynamic.default(*named.values(), False, *given, *recurrent, *[None] * 4, *rest)

    call()
    for changes, text in (
        ({"x": torch.randn(3, 1, 6)}, "x must be"),
        ({"x": torch.randn(3, 2, 6).double()}, "float32"),
        ({"h": torch.zeros(2, 4)}, "hidden units do not fit"),
        ({"c": None}, "needs cell states"),
        ({"c": torch.zeros(2, 4)}, "c must be"),
        ({"mode": "GRU"}, "hidden"),
        ({"mode": "no"}, "mode must be"),
        ({"x": torch.randn(6, 6), "batch_sizes": torch.tensor([2, 3, 1])}, "must not rise"),
        ({"x": torch.randn(6, 6), "batch_sizes": torch.tensor([2, 1])}, "for these batch_sizes"),
        ({"given": operands(20, 7, False)}, "weight_ih must be"),
        ({"rest": operands(20, 7, False, bias=False)}, "rest_ih must be"),
        ({"rest": [*operands(20, 6, False, bias=False)[:1], None, None, None]}, "rest_ih needs its grids"),
    ):
        with pytest.raises(RuntimeError, match=text):
            call(**changes)
