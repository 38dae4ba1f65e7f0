"""Errors of tensors and layers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import zeropoint
from zeropoint import analysis, quantize_per_channel, quantize_per_tensor, report
from zeropoint.analysis import layer_errors, output_sqnr, weight_errors
from zeropoint.ao.nn.quantized import FloatFunctional
from zeropoint.ao.quantization import (
    DeQuantStub,
    QuantStub,
    convert,
    fuse_modules,
    get_default_qconfig,
    prepare,
    quantize_dynamic,
)
from zeropoint.ns import compare_weights
from zeropoint.recipe import quantize_static


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant = QuantStub()
        self.conv = nn.Conv2d(3, 8, 3)
        self.relu = nn.ReLU()
        self.add = FloatFunctional()
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(8 * 16, 5)
        self.dequant = DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.conv(self.quant(x)))
        return self.dequant(self.fc(self.flatten(self.add.add(y, y))))


@pytest.fixture
def pair() -> tuple[nn.Module, nn.Module, Tensor]:
    floating = fuse_modules(Net().eval(), [["conv", "relu"]])
    floating.qconfig = get_default_qconfig()
    prepared, x = prepare(floating), torch.randn(8, 3, 6, 6)
    prepared(x)
    return floating, convert(prepared), x


def test_a_tensor_on_its_grid_has_no_error() -> None:
    x = torch.arange(256.0)
    error = analysis.tensor_error(x, quantize_per_tensor(x, 1.0, 0, zeropoint.quint8))
    assert error == analysis.TensorError(math.inf, pytest.approx(1.0), 0.0, 0.0, 0.0)


def test_clipped_and_unused() -> None:
    x = torch.tensor([0.0, 1.0, 300.0, -4.0])
    error = analysis.tensor_error(x, quantize_per_tensor(x, 1.0, 0, zeropoint.quint8))
    assert error.clipped == 0.5
    assert error.unused == (256 - 3) / 256
    assert error.max_error == 45.0


def test_half_a_step_beyond_the_last_code_is_not_clipped() -> None:
    x = torch.tensor([255.4, 255.6])
    assert analysis.tensor_error(x, quantize_per_tensor(x, 1.0, 0, zeropoint.quint8)).clipped == 0.5


def test_channels_have_their_own_grids() -> None:
    x = torch.tensor([[1.0, 100.0], [1.0, 100.0]])
    scales = torch.tensor([0.01, 1.0])
    q = quantize_per_channel(x, scales, torch.zeros(2, dtype=torch.int64), 0, zeropoint.qint8)
    assert analysis.tensor_error(x, q).clipped == 0.25


def test_values_without_a_grid() -> None:
    x = torch.tensor([3.0, 4.0])
    error = analysis.tensor_error(x, torch.tensor([3.0, 4.5]))
    assert error.sqnr == pytest.approx(10 * math.log10(25 / 0.25))
    assert (error.clipped, error.unused, error.max_error) == (None, None, 0.5)


def test_zeros_and_other_shapes() -> None:
    assert math.isnan(analysis.tensor_error(torch.zeros(2), torch.zeros(2)).cosine)
    assert analysis.tensor_error(torch.zeros(2), torch.ones(2)).sqnr == -math.inf
    with pytest.raises(ValueError, match=r"one shape, got \(2,\) and \(3,\)"):
        analysis.tensor_error(torch.zeros(2), torch.zeros(3))


def test_layers_of_a_static_network(pair: tuple[nn.Module, nn.Module, Tensor]) -> None:
    floating, quantized, x = pair
    layers = {layer.name: layer for layer in analysis.layer_errors(floating, quantized, x)}
    assert set(layers) == {"quant", "conv", "add", "fc", "dequant"}
    assert layers["conv"].kind == "QuantizedConvReLU2d"
    assert layers["add"].weight is None
    for name in ("conv", "fc"):
        layer = layers[name]
        assert layer.weight is not None
        assert layer.weight.sqnr > 35
        assert layer.own is not None
        assert layer.activation is not None
        assert layer.own.sqnr >= layer.activation.sqnr - 3


def test_batches_add_up(pair: tuple[nn.Module, nn.Module, Tensor]) -> None:
    floating, quantized, x = pair
    whole = analysis.activation_errors(floating, quantized, x)
    parts = analysis.activation_errors(floating, quantized, list(x.split(3)))
    assert list(whole) == list(parts)
    for name, error in whole.items():
        assert parts[name].sqnr == pytest.approx(error.sqnr, rel=1e-6)
        assert parts[name].unused == error.unused


def test_a_broken_weight_comes_first(pair: tuple[nn.Module, nn.Module, Tensor]) -> None:
    floating, quantized, _ = pair
    weight = quantized.fc.weight.dequantize()
    quantized.fc.set_weight_bias(quantize_per_tensor(weight, 0.05, 0, zeropoint.qint8), quantized.fc.bias)
    assert next(iter(analysis.weight_errors(floating, quantized))) == "fc"


def test_dynamic_models_and_named_arguments() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return self.fc(x + shift)

    model = Two().eval()
    quantized = quantize_dynamic(model)
    x, shift = torch.randn(8, 4), torch.ones(4)
    for batch in ((x, shift), {"x": x, "shift": shift}):
        assert set(analysis.activation_errors(model, quantized, [batch])) == {"fc"}
        assert analysis.own_errors(model, quantized, [batch])["fc"].sqnr > 25


@pytest.mark.parametrize(("data", "error"), [(3, TypeError), ([], ValueError), ("x", TypeError)])
def test_data_that_is_none(data: object, error: type[Exception]) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(error, match="data"):
        analysis.activation_errors(model, quantize_dynamic(model), data)


def test_a_recurrent_layer_is_one_row() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.fc = nn.LSTM(24, 16, num_layers=2, bidirectional=True), nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.lstm(x)[0])

    model = Recurrent().eval()
    rows = {row.name: row for row in layer_errors(model, quantize_dynamic(model), torch.randn(5, 3, 24))}
    assert list(rows) == ["lstm", "fc"]
    for error in (rows["lstm"].weight, rows["lstm"].own, rows["lstm"].activation):
        assert error is not None
        assert error.sqnr > 30


def test_a_layer_left_in_float_is_named_as_it_was() -> None:
    model = nn.Sequential(QuantStub(), nn.Linear(8, 8), nn.Linear(8, 4), DeQuantStub()).eval()
    x = torch.randn(32, 8)
    quantized = quantize_static(model, x, keep_float=["1"])
    rows = {row.name: row for row in layer_errors(quantized.reference, quantized.model, x)}
    assert rows["1"].kind == "FloatIsland"
    assert rows["1"].weight is None
    assert rows["1"].own is not None
    assert rows["1"].own.sqnr > 30  # its result is rounded, nothing else
    assert not any("module" in name for name in rows)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("channels", [4, 6], ids=["square", "wider"])
def test_weights_of_transposed_convolutions_are_matched_by_output_channel(groups: int, channels: int) -> None:
    model = nn.Sequential(QuantStub(), nn.ConvTranspose2d(4, channels, 3, groups=groups), DeQuantStub()).eval()
    with torch.no_grad():  # output channels of very different range: along another axis the grids would not fit
        spread = torch.logspace(-2, 2, channels // groups)
        model[1].weight *= spread.reshape(1, -1, 1, 1)
    x = torch.randn(8, 4, 5, 5)
    quantized = quantize_static(model, x).model
    assert weight_errors(model, quantized)["1"].sqnr > 38
    pair = compare_weights(model.state_dict(), quantized.state_dict())["1.weight"]
    assert pair["float"].shape == pair["quantized"].shape
    assert pair["quantized"].q_per_channel_scales().numel() == channels


def test_named_arguments_are_data_everywhere() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return self.dequant(self.second(self.first(self.quant(x + shift))))

    model, batch = Two().eval(), {"x": torch.randn(16, 8), "shift": torch.ones(8)}
    for data in (batch, [batch, batch]):
        quantized = quantize_static(model, data).model
        assert [row.name for row in layer_errors(model, quantized, data)][:2] == ["quant", "dequant"]
        assert len(analysis.sensitivity(model, data, progress=False)) == 3
        assert analysis.equalize(model, data).first.weight.shape == (8, 8)
        found = report.collect(quantized, model, data)
        assert sum(layer.activation_histogram is not None for layer in found.layers) == 3
    assert output_sqnr(model(**batch), analysis.correct_bias(model, batch)(**batch)) > 20
    result = analysis.quantize_with_accuracy(model, batch, lambda candidate: 1.0, 0.0, progress=False)
    assert result.accuracy == 1.0
