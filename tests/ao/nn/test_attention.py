"""Quantizable LSTM and MultiheadAttention: equal to torch's in float, close to it after prepare and convert."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropoint as zp
from zeropoint.ao.nn import quantizable
from zeropoint.ao.nn import quantized as nnq
from zeropoint.ao.quantization import (
    DeQuantStub,
    QConfig,
    QuantStub,
    convert,
    default_per_channel_weight_observer,
    prepare,
)
from zeropoint.ao.quantization.observer import MinMaxObserver

QCONFIG = QConfig(MinMaxObserver.with_args(quant_min=0, quant_max=255), default_per_channel_weight_observer)


def sqnr(reference: Tensor, other: Tensor) -> float:
    reference, other = reference.detach(), other.detach()
    return float(20 * torch.log10(reference.norm() / (reference - other).norm()))


# --- LSTM ---------------------------------------------------------------------------------------------------------

LAYERS = [
    pytest.param({}, id="plain"),
    pytest.param({"batch_first": True, "bias": False}, id="batch-first-no-bias"),
    pytest.param({"num_layers": 2, "bidirectional": True}, id="deep-both-ways"),
]


class Reader(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.quant, self.lstm, self.dequant = QuantStub(), nn.LSTM(12, 16, **options), DeQuantStub()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, (h, c) = self.lstm(self.quant(x))
        return self.dequant(y), self.dequant(h), self.dequant(c)


@pytest.mark.parametrize("options", LAYERS)
def test_lstm_in_float_is_torchs(options: dict[str, Any]) -> None:
    lstm = nn.LSTM(12, 16, **options)
    twin, x = quantizable.LSTM.from_float(lstm), torch.randn(5, 4, 12)
    y, (h, c) = lstm(x)
    for known, made in zip((y, h, c), (twin(x)[0], *twin(x)[1]), strict=True):
        assert torch.allclose(known, made, atol=1e-6)
    batch = 5 if options.get("batch_first") else 4
    start = (torch.randn(h.shape[0], batch, 16), torch.randn(h.shape[0], batch, 16))
    assert torch.allclose(lstm(x, start)[0], twin(x, start)[0], atol=1e-6)


@pytest.mark.parametrize("options", LAYERS)
def test_lstm_through_prepare_and_convert(options: dict[str, Any]) -> None:
    model = Reader(**options).eval()
    model.qconfig = QCONFIG
    prepared = prepare(model)
    assert type(prepared.lstm) is quantizable.LSTM
    x = torch.randn(8, 6, 12)
    known = model(x)
    for made, value in zip(prepared(x), known, strict=True):
        assert torch.allclose(made, value, atol=1e-6)
    quantized = convert(prepared)
    assert type(quantized.lstm) is nnq.LSTM
    swapped = {entry.name for entry in quantized.quantization_summary if entry.after is not None}
    assert {"lstm", "lstm.layers.0.layer_fw.cell.igates"} <= swapped
    cell = quantized.lstm.layers[0].layer_fw.cell
    assert (type(cell.igates), type(cell.gates), type(cell.cell_gate)) == (nnq.Linear, nnq.QFunctional, nnq.Tanh)
    assert isinstance(quantized.lstm(zp.quantize_per_tensor(x, 0.03, 128, zp.quint8))[0], zp.QTensor)
    for made, value in zip(quantized(x), known, strict=True):
        assert made.shape == value.shape
        assert sqnr(value, made) > 25
    fresh = copy.deepcopy(quantized)
    fresh.lstm = nnq.LSTM(12, 16, **options)
    fresh.load_state_dict(quantized.state_dict())
    assert torch.equal(fresh(x)[0], quantized(x)[0])


def test_lstm_with_quantized_initial_states() -> None:
    model = Reader().eval()
    model.qconfig = QCONFIG
    x = torch.randn(8, 6, 12)
    prepared = prepare(model)
    prepared(x)
    lstm, codes = convert(prepared).lstm, zp.quantize_per_tensor(x, 0.03, 128, zp.quint8)
    middle = lstm(codes[:4])
    assert torch.equal(lstm(codes[4:], middle[1])[0].int_repr(), lstm(codes)[0][4:].int_repr())


def test_gates_with_grids_of_their_own() -> None:
    lstm, x = nn.LSTM(12, 16, 2, bidirectional=True).eval(), torch.randn(5, 4, 12)
    twin = quantizable.LSTM.from_float(lstm, QCONFIG, split_gates=True)
    assert torch.allclose(twin(x)[0], lstm(x)[0], atol=1e-6)
    quantized = nnq.LSTM.from_observed(twin)
    gates = quantized.layers[0].layer_fw.cell.gates
    assert len({gates[gate].scale for gate in ("input", "forget", "cell", "output")}) == 4
    codes = zp.quantize_per_tensor(x, 0.03, 128, zp.quint8)
    assert sqnr(lstm(x)[0], quantized(codes)[0].dequantize()) > 25
    empty = nnq.LSTM(12, 16, 2, bidirectional=True, split_gates=True)
    empty.load_state_dict(quantized.state_dict())
    assert torch.equal(empty(codes)[0].int_repr(), quantized(codes)[0].int_repr())


def test_quantized_layers_come_from_observed_ones() -> None:
    lstm, attention = quantizable.LSTM(12, 16).eval(), quantizable.MultiheadAttention(16, 4).eval()
    x, y = torch.randn(5, 3, 12), torch.randn(5, 3, 16)
    for layer, twin, given in ((lstm, nnq.LSTM, (x,)), (attention, nnq.MultiheadAttention, (y, y, y))):
        layer.qconfig = QCONFIG
        observed = prepare(layer)
        assert type(observed) is type(layer)
        known = observed(*given)[0]
        quantized = twin.from_observed(observed)
        assert type(quantized) is type(convert(observed)) is twin
        assert type(observed) is type(layer)
        assert f"Quantized{type(layer).__name__}" in repr(quantized)
        codes = [zp.quantize_per_tensor(t, 0.03, 128, zp.quint8) for t in given]
        assert sqnr(known, quantized(*codes)[0].dequantize()) > 25
        with pytest.raises(TypeError, match=r"call prepare\(\)"):
            twin.from_float(layer)
        with pytest.raises(TypeError, match="got Linear"):
            twin.from_observed(nn.Linear(2, 3))


def test_lstm_refusals() -> None:
    with pytest.raises(ValueError, match="no projections"):
        quantizable.LSTM.from_float(nn.LSTM(4, 5, proj_size=2))
    with pytest.raises(TypeError, match="got GRU"):
        quantizable.LSTM.from_float(nn.GRU(4, 5))
    with pytest.raises(ValueError, match="three dimensions"):
        quantizable.LSTM(4, 5)(torch.randn(3, 4))
    with pytest.raises(ValueError, match="at least one step"):
        quantizable.LSTM(4, 5)(torch.randn(0, 3, 4))


# --- attention ----------------------------------------------------------------------------------------------------

HEADS = [
    pytest.param({}, id="plain"),
    pytest.param({"batch_first": True}, id="batch-first"),
    pytest.param({"bias": False}, id="no-bias"),
    pytest.param({"kdim": 10, "vdim": 12}, id="other-sizes"),
    pytest.param({"add_bias_kv": True, "add_zero_attn": True}, id="extra-keys"),
]
MASKS = ["none", "bool", "float", "per-head", "padding", "both"]


def inputs(options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (16, options.get("kdim", 16), options.get("vdim", 16))
    shapes = ((5, 3, sizes[0]), (7, 3, sizes[1]), (7, 3, sizes[2]))
    made = [torch.randn(shape) for shape in shapes]
    return tuple(x.transpose(0, 1) for x in made) if options.get("batch_first") else tuple(made)  # type: ignore[return-value]


def masks(kind: str) -> dict[str, Tensor]:
    causal = torch.ones(5, 7, dtype=torch.bool).triu(3)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[0, 4:] = padding[2, 0] = True
    return {
        "none": {},
        "bool": {"attn_mask": causal},
        "float": {"attn_mask": torch.randn(5, 7)},
        "per-head": {"attn_mask": torch.randn(12, 5, 7)},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": causal, "key_padding_mask": padding},
    }[kind]


@pytest.mark.parametrize("options", HEADS)
@pytest.mark.parametrize("kind", MASKS)
def test_attention_in_float_is_torchs(options: dict[str, Any], kind: str) -> None:
    attention = nn.MultiheadAttention(16, 4, **options)
    twin, given = quantizable.MultiheadAttention.from_float(attention), inputs(options)
    left_out = masks(kind)
    for average in (True, False):
        known = attention(*given, **left_out, average_attn_weights=average)
        made = twin(*given, **left_out, average_attn_weights=average)
        for a, b in zip(known, made, strict=True):
            assert torch.allclose(a, b, atol=1e-5)
    assert twin(*given, need_weights=False)[1] is None


def test_attention_without_a_batch() -> None:
    attention = nn.MultiheadAttention(16, 4)
    x = torch.randn(5, 16)
    mask = torch.tensor([False, False, True, False, True])
    for a, b in zip(
        attention(x, x, x, key_padding_mask=mask),
        quantizable.MultiheadAttention.from_float(attention)(x, x, x, key_padding_mask=mask),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-5)


class Attending(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.stubs = nn.ModuleList(QuantStub() for _ in range(3))
        self.attention, self.dequant = nn.MultiheadAttention(16, 4, **options), DeQuantStub()

    def forward(self, *given: Tensor) -> Tensor:
        codes = [stub(x) for stub, x in zip(self.stubs, given, strict=True)]
        return self.dequant(self.attention(*codes)[0])


@pytest.mark.parametrize("options", HEADS)
def test_attention_through_prepare_and_convert(options: dict[str, Any]) -> None:
    model, given = Attending(**options).eval(), inputs(options)
    model.qconfig = QCONFIG
    prepared = prepare(model)
    assert type(prepared.attention) is quantizable.MultiheadAttention
    known = model(*given)
    assert torch.allclose(prepared(*given), known, atol=1e-5)
    quantized = convert(prepared)
    assert type(quantized.attention) is nnq.MultiheadAttention
    assert type(quantized.attention.linear_Q) is nnq.Linear
    assert type(quantized.attention.out_proj) is nnq.Linear
    assert sqnr(known, quantized(*given)) > 30
    again = copy.deepcopy(quantized)
    again.attention = nnq.MultiheadAttention(16, 4, **options)
    again.load_state_dict(quantized.state_dict())
    assert torch.equal(again(*given), quantized(*given))


def test_attention_refusals() -> None:
    attention, x = quantizable.MultiheadAttention(16, 4), torch.randn(5, 3, 16)
    with pytest.raises(ValueError, match="attn_mask must have shape"):
        attention(x, x, x, attn_mask=torch.zeros(4, 5))
    with pytest.raises(ValueError, match="key_padding_mask must have shape"):
        attention(x, x, x, key_padding_mask=torch.zeros(3, 4))
    with pytest.raises(ValueError, match="pass the mask too"):
        attention(x, x, x, is_causal=True)
    with pytest.raises(ValueError, match="two or three dimensions alike"):
        attention(x, x[0], x)
    with pytest.raises(ValueError, match="multiple of num_heads"):
        quantizable.MultiheadAttention(16, 5)
