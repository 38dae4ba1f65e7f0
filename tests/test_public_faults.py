"""Faults of other quantization libraries that their users reported, as questions to this one: each restated small.

Operators, recurrent layers, attention, embeddings, and kernels; observers, training, conversion and files have such
tests beside their own. What cannot occur here by construction:

* More than 2**31 elements: every size, stride and index of the native code is an ``int64_t``, and the compiler warns
  where one is narrowed; a test would need gigabytes.
* Crashes on 64-bit ARM: the kernels' own tests run there too (``make native-test-arm``), empty batches among them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zeropoint as zp
from zeropoint.ao.nn import quantized as nnq
from zeropoint.ao.nn.quantized import dynamic as nnqd
from zeropoint.ao.nn.quantized import functional as qF
from zeropoint.ao.quantization import (
    DeQuantStub,
    QuantStub,
    convert,
    default_dynamic_qconfig,
    default_per_channel_qconfig,
    default_qconfig,
    get_default_qconfig,
    prepare,
    quantize_dynamic,
)


def sqnr(reference: Tensor, other: Tensor) -> float:
    reference, other = reference.detach(), other.detach()
    return float(20 * torch.log10(reference.norm() / (reference - other).norm()))


def static(layer: nn.Module, *inputs: Tensor, qconfig: Any = None) -> nn.Module:
    model = nn.Sequential(QuantStub(), layer, DeQuantStub()).eval()
    model.qconfig = get_default_qconfig() if qconfig is None else qconfig
    prepared = prepare(model)
    for x in inputs:
        prepared(x)
    return convert(prepared)


# --- quantize and dequantize --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [2.0**32, 2.0**31, 3e38, float("inf")])
def test_far_values_saturate_at_the_right_end(value: float) -> None:
    x = torch.ones(67) * value
    for qdtype in (zp.qint8, zp.quint8, zp.qint32):
        assert bool((zp.quantize_per_tensor(x, 0.5, 0, qdtype).int_repr() == qdtype.qmax).all())
        assert bool((zp.quantize_per_tensor(-x, 0.5, 0, qdtype).int_repr() == qdtype.qmin).all())


def test_nan_becomes_the_zero_point() -> None:
    x = torch.full((67,), float("nan"))
    assert bool((zp.quantize_per_tensor(x, 0.5, 3, zp.quint8).int_repr() == 3).all())
    q = zp.quantize_per_channel(x.reshape(1, -1), torch.tensor([0.5]), torch.tensor([3]), 0, zp.qint8)
    assert bool((q.int_repr() == 3).all())


def test_scales_of_another_type_are_no_crash() -> None:
    x = torch.randn(2, 3)
    for scales, zeros in ((torch.ones(2, dtype=torch.int64), torch.zeros(2)), (torch.zeros(2), torch.zeros(2))):
        with pytest.raises((TypeError, ValueError)):
            zp.quantize_per_channel(x, scales, zeros, 0, zp.qint8)
    assert zp.quantize_per_tensor(x, 1, 0, zp.qint8).q_scale() == 1.0


def test_layouts_are_kept_and_change_no_value() -> None:
    x = torch.randn(2, 5, 4, 3)
    last = x.contiguous(memory_format=torch.channels_last)
    scales, zeros = torch.rand(5) * 0.01 + 0.01, torch.arange(5)
    for make in (
        lambda t: zp.quantize_per_tensor(t, 0.02, 3, zp.quint8),
        lambda t: zp.quantize_per_channel(t, scales, zeros, 1, zp.qint8),
    ):
        q, q_last = make(x), make(last)
        assert q_last.is_contiguous(memory_format=torch.channels_last)
        assert q_last.dequantize().is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(q.int_repr(), q_last.int_repr())
        assert torch.equal(q.dequantize(), q_last.dequantize())
        for strided in (x.transpose(0, 1).contiguous().transpose(0, 1), torch.stack([x, x], -1)[..., 0]):
            assert torch.equal(make(strided).int_repr(), q.int_repr())


def test_half_inputs_with_large_values_stay_finite() -> None:
    layer = nn.Linear(64, 8).half()
    x = torch.full((4, 64), 6e4, dtype=torch.float16) * (torch.arange(64) % 2 * 2 - 1)
    y = quantize_dynamic(nn.Sequential(layer.float()))(x)
    assert y.dtype == torch.float16
    assert torch.isfinite(y).all()


def test_an_empty_tensor_has_a_scale() -> None:
    q = zp.quantize_per_tensor_dynamic(torch.empty(0), zp.quint8, False)
    assert q.q_scale() > 0
    assert q.dequantize().shape == (0,)


def test_one_output_channel_is_still_per_channel() -> None:
    quantized: Any = static(nn.Conv2d(8, 1, 3), torch.randn(2, 8, 5, 5), qconfig=default_per_channel_qconfig)
    assert quantized[1].state_dict()["weight_scale"].shape == (1,)
    assert quantized[1].weight().q_per_channel_scales().shape == (1,)


# --- recurrent layers, attention, embeddings ----------------------------------------------------------------------


def test_packed_sequences_of_several_lengths() -> None:
    layer = nn.LSTM(6, 8)
    packed = nn.utils.rnn.pack_sequence([torch.randn(n, 6) for n in (4, 3, 2)])
    known, made = layer(packed)[0].data, nnqd.LSTM.from_float(layer)(packed)[0].data
    assert sqnr(known, made) > 30


def test_a_weight_dtype_is_honoured_or_refused() -> None:
    with pytest.raises(ValueError, match="qint8"):
        quantize_dynamic(nn.Sequential(nn.LSTM(6, 8)), {nn.LSTM}, dtype=torch.float16)


class Inside(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)[0]
        return y


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_inside_modules_trace(kind: Any) -> None:
    quantized, x = quantize_dynamic(nn.Sequential(Inside(kind(6, 8)))), torch.randn(5, 2, 6)
    assert torch.equal(torch.export.export(quantized, (x,)).module()(x), quantized(x))


def test_a_static_lstm_converts() -> None:
    x = torch.randn(6, 3, 5)
    model = static(Inside(nn.LSTM(5, 8)).eval(), x)
    assert type(model[1].layer) is nnq.LSTM
    assert torch.isfinite(model(x)).all()


def test_attention_without_biases_is_as_exact_as_with() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.attention(x, x, x)[0]
            return y

    layer, x = Attending().eval(), torch.randn(7, 3, 32)
    known = layer(x)
    assert sqnr(known, static(layer, x)(x)) > 30


def test_embeddings_in_a_model_need_no_qconfig_of_their_own() -> None:
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 4)).eval()
    words = torch.tensor([1, 19, 0])
    for spec in (None, {nn.Linear: default_dynamic_qconfig}):
        assert sqnr(model(words), quantize_dynamic(model, spec)(words)) > 25


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("offsets", [[0, 0, 2, 2, 4], [0, 2, 4, 4, 4], [0, 0, 0, 0, 4]])
def test_empty_bags_are_zeros(mode: str, offsets: list[int]) -> None:
    bag = nn.EmbeddingBag(10, 8, mode=mode, include_last_offset=True)
    quantized = nnq.EmbeddingBag.from_float(bag)
    words, starts = torch.tensor([1, 2, 3, 4]), torch.tensor(offsets)
    known, made = bag(words, starts), quantized(words, starts)
    empty = starts[1:] == starts[:-1]
    assert bool((made[empty] == 0).all())
    assert sqnr(known[~empty], made[~empty]) > 30
    assert quantized(words[:0], torch.tensor([0])).shape == (0, 8)
    with pytest.raises((IndexError, RuntimeError)):
        quantized(torch.tensor([10]), torch.tensor([0, 1]))


def test_one_huge_value_leaves_a_dynamic_linear_finite() -> None:
    x = torch.randn(3, 16)
    x[0, 0] = 3e38
    assert torch.isfinite(quantize_dynamic(nn.Sequential(nn.Linear(16, 4)))(x)[1:]).all()


# --- convolutions and matrix products -----------------------------------------------------------------------------


def test_large_neighbours_of_one_sign_do_not_saturate() -> None:
    layer = nn.Linear(64, 4, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    x = torch.ones(2, 64)
    for module in (quantize_dynamic(nn.Sequential(layer)), static(layer, x)):
        assert float((module(x) - 64).detach().abs().max()) < 0.5


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions_have_a_grid_an_output_channel(groups: int) -> None:
    layer, x = nn.ConvTranspose2d(4, 6, 3, groups=groups), torch.randn(2, 4, 5, 5)
    quantized: Any = static(layer, x, qconfig=default_per_channel_qconfig)
    assert quantized[1].state_dict()["weight_scale"].shape == (6,)
    assert sqnr(layer(x), quantized(x)) > 30


@pytest.mark.parametrize("kind", [nnq.Conv2d, nnq.ConvTranspose3d, nnqd.Conv1d])
def test_no_output_channels_are_an_error(kind: Any) -> None:
    with pytest.raises(ValueError, match="channels"):
        kind(3, 0, 3)


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel lengths")
@pytest.mark.parametrize("padding", ["same", "valid", 1])
@pytest.mark.parametrize("kernel", [3, 4])
@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
def test_paddings_are_those_of_float(padding: Any, kernel: int, mode: str) -> None:
    layer = nn.Conv1d(2, 4, kernel, padding=padding, padding_mode=mode)
    x = torch.randn(3, 2, 11)
    known, made = layer(x), static(layer, x)(x)
    assert known.shape == made.shape
    assert sqnr(known, made) > 28


def test_padding_is_real_zero() -> None:
    x = torch.full((1, 1, 4, 4), 3.0)
    q = zp.quantize_per_tensor(x, 0.05, 60, zp.quint8)
    layer = nn.Conv2d(1, 1, 3, padding=1)
    assert sqnr(layer(x), static(layer, x, -x)(x)) > 30
    pooled = F.avg_pool2d(q, 3, 1, 1)
    exact = F.avg_pool2d(x.double(), 3, 1, 1)
    assert bool(((pooled.dequantize() - exact).abs() <= 0.0251).all())
    assert bool((F.pad(q, (1, 1)).dequantize()[..., 0] == 0).all())


def test_empty_batches() -> None:
    x = torch.randn(2, 4, 6, 6)
    for layer in (nn.Conv2d(4, 3, 3), nn.ConvTranspose2d(4, 3, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2)):
        assert static(layer.eval(), x)(x[:0]).shape == (0, *layer(x).shape[1:])
    for float_layer, y in ((nn.Linear(6, 3), x), (nn.Conv2d(4, 3, 3), x), (nn.LSTM(6, 3), x[0])):
        made = quantize_dynamic(nn.Sequential(float_layer), {type(float_layer)})(y[:, :0] if y.dim() == 3 else y[:0])
        assert 0 in (made[0] if isinstance(made, tuple) else made).shape


def test_channels_that_do_not_fit_are_an_error() -> None:
    q = zp.quantize_per_tensor(torch.randn(1, 3, 5, 5), 0.05, 60, zp.quint8)
    with pytest.raises((RuntimeError, ValueError)):
        nnq.Conv2d(4, 2, 3)(q)
    weight = zp.quantize_per_tensor(torch.randn(2, 4, 3, 3), 0.05, 0, zp.qint8)
    with pytest.raises((RuntimeError, ValueError)):
        qF.conv2d(q, weight, None, scale=1.0, zero_point=0)


def test_a_pool_wider_than_its_input_is_an_error_as_in_float() -> None:
    x = torch.randn(1, 2, 3)
    q = zp.quantize_per_tensor(x, 0.05, 60, zp.quint8)
    for arguments in ((5,), (0,), (3, 0), (3, 1, 2)):
        with pytest.raises((RuntimeError, ValueError)):
            F.max_pool1d(x, *arguments)
        with pytest.raises((RuntimeError, ValueError)):
            F.max_pool1d(q, *arguments)


def test_dynamic_convolutions_are_exact_on_the_first_layer_of_a_network() -> None:
    layer = nn.Conv2d(3, 16, 7, stride=2, padding=3)
    x = torch.rand(2, 3, 32, 32) * 4 - 2
    assert sqnr(layer(x), quantize_dynamic(nn.Sequential(layer), {nn.Conv2d})(x)) > 35


def test_depthwise_convolutions_are_per_channel_by_default() -> None:
    layer = nn.Conv2d(8, 8, 3, groups=8)
    with torch.no_grad():
        layer.weight.mul_(torch.logspace(-3, 0, 8).reshape(-1, 1, 1, 1))
    x = torch.randn(2, 8, 9, 9)
    quantized: Any = static(layer, x)
    assert quantized[1].state_dict()["weight_scale"].shape == (8,)
    coarse: Any = static(layer, x, qconfig=default_qconfig)
    weights = [m[1].weight().dequantize()[0] for m in (quantized, coarse)]
    assert sqnr(layer.weight[0], weights[0]) > 30 > sqnr(layer.weight[0], weights[1])
