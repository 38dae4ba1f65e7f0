"""Which layers hurt, and quantizing as much as accuracy allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zeropoint import analysis
from zeropoint.analysis import FloatIsland, output_sqnr, quantize_with_accuracy, sensitivity
from zeropoint.analysis._search import _Static
from zeropoint.analysis._simulate import Simulation
from zeropoint.ao.nn.quantized import Linear
from zeropoint.ao.quantization import (
    DeQuantStub,
    MinMaxObserver,
    QConfig,
    QuantStub,
    convert,
    default_per_channel_weight_observer,
    default_weight_observer,
    prepare,
)

PER_TENSOR = QConfig(MinMaxObserver, default_weight_observer)
PER_CHANNEL = QConfig(MinMaxObserver, default_per_channel_weight_observer)


class Chain(nn.Module):
    """Three linear layers; one row of the middle weight is huge, and what it makes is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.quant = QuantStub()
        self.first, self.middle, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.dequant = DeQuantStub()
        with torch.no_grad():
            self.middle.weight[0] *= 0
            self.middle.weight[0, 0] = 60.0
            self.first.weight[0] *= 0.01
            self.first.bias[0] = 0
            self.last.weight[:, 0] = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.last(self.middle(self.first(self.quant(x)))))


@pytest.fixture
def model() -> nn.Module:
    return Chain().eval()


@pytest.fixture
def data() -> list[Tensor]:
    return list(torch.randn(64, 16).split(32))


def test_the_layer_that_hurts_is_named_first(model: nn.Module, data: list[Tensor]) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = sensitivity(model, data, qconfig=PER_TENSOR, progress=False)
    assert next(iter(found)).name == "middle"
    assert {layer.name for layer in found} == {"quant", "first", "middle", "last"}
    assert max(found, key=lambda layer: layer.without).name == "middle"
    assert "everything quantized" in str(found)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not hasattr(model, "qconfig")


def test_the_simulation_is_what_the_integers_compute(model: nn.Module, data: list[Tensor]) -> None:
    simulation = Simulation(model, data, PER_CHANNEL)
    simulation.quantize(simulation.names)
    model.qconfig = PER_CHANNEL
    prepared = prepare(model)
    for batch in data:
        prepared(batch)
    quantized = convert(prepared)
    for batch, got in zip(data, simulation.outputs(data), strict=True):
        assert output_sqnr(quantized(batch), got) > 60
    simulation.quantize(())
    assert torch.equal(simulation.outputs(data)[0], model(data[0]))


def test_dynamic_sensitivity(model: nn.Module, data: list[Tensor]) -> None:
    found = sensitivity(model, data, method="dynamic", progress=False)
    assert {layer.name for layer in found} == {"first", "middle", "last"}


def test_a_metric_of_ones_own(model: nn.Module, data: list[Tensor]) -> None:
    found = sensitivity(model, data, lambda wanted, got: -float((wanted - got).abs().max()), progress=False)
    assert all(layer.alone <= 0 for layer in found)


def test_it_goes_on_where_it_stopped(model: nn.Module, data: list[Tensor], tmp_path: Path) -> None:
    calls = 0

    def metric(wanted: Tensor, got: Tensor) -> float:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt
        return output_sqnr(wanted, got)

    def again(metric: Any = None) -> analysis.Sensitivity:
        return sensitivity(model, data, metric, qconfig=PER_TENSOR, resume=tmp_path / "kept.json", progress=False)

    with pytest.raises(KeyboardInterrupt):
        again(metric)
    kept = json.loads((tmp_path / "kept.json").read_text())["values"]
    assert len(kept) == 2
    whole = again(metric)
    assert calls == 6 + 2 * (1 + 2 * 4 - 2)
    assert again(lambda wanted, got: 1 / 0) == whole == sensitivity(model, data, qconfig=PER_TENSOR, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]


def test_another_models_file_is_refused(model: nn.Module, data: list[Tensor], tmp_path: Path) -> None:
    sensitivity(model, data, resume=tmp_path / "kept.json", progress=False)
    with pytest.raises(ValueError, match="another model, qconfig or data"):
        sensitivity(model, [batch + 1 for batch in data], resume=tmp_path / "kept.json", progress=False)
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match="no file that sensitivity wrote"):
        sensitivity(model, data, resume=tmp_path / "other.json", progress=False)


# --- as much as accuracy allows -----------------------------------------------------------------------------------


def accuracy_against(model: nn.Module, data: list[Tensor]) -> Any:
    wanted = [model(batch).detach() for batch in data]

    def evaluate(candidate: nn.Module) -> float:
        with torch.no_grad():
            noise = sum(float((candidate(x) - y).square().sum()) for x, y in zip(data, wanted, strict=True))
        return 1 - (noise / sum(float(y.square().sum()) for y in wanted)) ** 0.5

    return evaluate


def test_nothing_is_kept_where_nothing_hurts(model: nn.Module, data: list[Tensor]) -> None:
    result = quantize_with_accuracy(
        model, data, accuracy_against(model, data), 0.2, qconfig=PER_CHANNEL, progress=False
    )
    assert (result.kept_in_float, result.other_observer, len(result.steps)) == ((), (), 1)
    assert isinstance(result.model.middle, Linear)


def test_a_better_observer_goes_before_float(model: nn.Module, data: list[Tensor]) -> None:
    result = quantize_with_accuracy(
        model, data, accuracy_against(model, data), 0.1, qconfig=PER_TENSOR, better_qconfig=PER_CHANNEL, progress=False
    )
    assert result.quantized_accuracy < 0.9 <= result.accuracy
    assert result.other_observer == ("middle",)
    assert result.kept_in_float == ()
    assert "another observer: middle" in str(result)


def test_cheap_changes_are_tried_in_turn(model: nn.Module, data: list[Tensor]) -> None:
    evaluate = accuracy_against(model, data)
    result = quantize_with_accuracy(model, data, evaluate, 0.1, qconfig=PER_TENSOR, progress=False)
    assert result.other_observer == ("middle",)
    assert result.other_qconfig == PER_CHANNEL  # the activations' observer did not have to change
    useless = QConfig(MinMaxObserver.with_args(quant_max=15), default_weight_observer)
    result = quantize_with_accuracy(
        model, data, evaluate, 0.1, qconfig=PER_TENSOR, better_qconfig=[useless, PER_CHANNEL], progress=False
    )
    assert (result.other_qconfig, result.kept_in_float) == (PER_CHANNEL, ())


def test_the_layer_that_hurts_stays_float(model: nn.Module, data: list[Tensor]) -> None:
    result = quantize_with_accuracy(
        model, data, accuracy_against(model, data), 0.1, qconfig=PER_TENSOR, better_qconfig=PER_TENSOR, progress=False
    )
    assert result.kept_in_float == ("middle",)
    assert isinstance(result.model.middle, FloatIsland)
    assert isinstance(result.model.first, Linear)
    assert result.accuracy >= 0.9


def test_the_float_model_where_nothing_else_does(model: nn.Module, data: list[Tensor]) -> None:
    result = quantize_with_accuracy(model, data, accuracy_against(model, data), 0.0, progress=False)
    assert result.accuracy == result.float_accuracy == 1.0
    assert torch.equal(result.model(data[0]), model(data[0]))


def test_dynamic(model: nn.Module, data: list[Tensor]) -> None:
    result = quantize_with_accuracy(model, data, accuracy_against(model, data), 0.004, method="dynamic", progress=False)
    assert result.accuracy >= 0.996


class Magnitude(nn.Module):
    """As in a network for speech: arithmetic that quantized tensors do not define, and no weight."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x[..., ::2] ** 2 + x[..., 1::2] ** 2 + 1e-6)


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant = QuantStub()
        self.basis = nn.Conv1d(1, 16, 8, stride=4)
        self.magnitude = Magnitude()
        self.encoder = nn.Conv1d(16, 8, 3)
        self.dequant = DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.encoder(self.magnitude(self.basis(self.quant(x)))))


def test_what_cannot_be_quantized_stays_float_by_itself() -> None:
    model, data = Speech().eval(), [torch.randn(4, 1, 132)]
    result = quantize_with_accuracy(model, data, accuracy_against(model, data), 0.1, progress=False)
    assert result.not_quantizable == ("magnitude",)
    assert isinstance(result.model.magnitude, FloatIsland)
    assert result.model.encoder._get_name() == "QuantizedConv1d"
    assert result.accuracy >= 0.9


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"max_drop": -1.0}, "max_drop"), ({"max_drop": 0.1, "method": "weird"}, "method"), ({"max_drop": 0.1}, "stubs")],
)
def test_arguments_are_checked(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        quantize_with_accuracy(nn.Linear(2, 2), torch.ones(1, 2), lambda m: 0.0, **arguments)


def test_between_layers_in_float_nothing_is_rounded(model: nn.Module, data: list[Tensor]) -> None:
    mixed = _Static(model, data, PER_CHANNEL, PER_CHANNEL).build(["first", "middle"], (), 0)
    assert mixed.first.quantize is None  # only an island reads it
    assert mixed.middle.quantize is not None
    assert isinstance(mixed.last, Linear)
    assert output_sqnr(model(data[0]), mixed(data[0])) > 30


# --- layers that prepare takes apart ------------------------------------------------------------------------------


class Composed(nn.Module):
    """An LSTM and an attention between linear layers, and a GRU that static quantization leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.lstm, self.attention = nn.LSTM(8, 8), nn.MultiheadAttention(8, 2)
        self.gru = nn.GRU(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lstm(self.first(self.quant(x)))[0]
        return self.gru(self.dequant(self.last(self.attention(x, x, x)[0])))[0]


def test_a_layer_that_is_taken_apart_is_one_layer() -> None:
    data = [torch.randn(6, 4, 8)]
    found = sensitivity(Composed().eval(), data, progress=False)
    kinds = {layer.name: layer.kind for layer in found}
    assert kinds == {
        "quant": "QuantStub",
        "first": "Linear",
        "lstm": "LSTM",
        "attention": "MultiheadAttention",
        "last": "Linear",
    }
    assert all(layer.alone > 10 for layer in found)
    assert found.skipped == (("gru", "GRU"),)
    assert str(found).endswith("not quantized: gru (GRU)")
    (alone,) = sensitivity(nn.LSTM(8, 8).eval(), data, progress=False)
    assert (alone.name, alone.kind, alone.without) == ("", "LSTM", float("inf"))


def test_bias_correction_leaves_the_parts_of_a_composed_layer() -> None:
    model = Composed().eval()
    corrected = analysis.correct_bias(model, torch.randn(6, 4, 8))
    changed = {
        name for name, value in corrected.state_dict().items() if not torch.equal(value, model.state_dict()[name])
    }
    assert changed <= {"first.bias", "last.bias"}
    assert "last.bias" in changed


@pytest.mark.parametrize("name", ["lstm", "attention"])
def test_a_composed_layer_gets_another_observer_or_stays_float(name: str) -> None:
    model, data = Composed().eval(), [torch.randn(6, 4, 8)]
    search = _Static(model, data, PER_TENSOR, PER_CHANNEL)
    assert search.names == {"quant", "first", "lstm", "attention", "last"}
    assert search.can_stay_float(name)
    assert not search.can_stay_float("quant")
    kept = search.build([name], (), 0)
    assert any(path.startswith(f"{name}.") for path, part in kept.named_modules() if isinstance(part, FloatIsland))
    for candidate in (kept, search.build((), [name], 0)):
        assert output_sqnr(model(data[0]), candidate(data[0])) > 10


def test_the_search_goes_through_composed_layers() -> None:
    model, data = Composed().eval(), [torch.randn(6, 4, 8)]

    def evaluate(candidate: nn.Module) -> float:
        islands = {path for path, part in candidate.named_modules() if isinstance(part, FloatIsland)}
        return 1.0 if candidate is model or any(path.startswith("lstm") for path in islands) else 0.0

    floats = iter([1.0])
    result = quantize_with_accuracy(
        model,
        data,
        lambda candidate: next(floats, None) or evaluate(candidate),
        0.5,
        qconfig=PER_CHANNEL,
        better_qconfig=PER_CHANNEL,
        progress=False,
    )
    assert (result.accuracy, result.kept_in_float) == (1.0, ("lstm",))
