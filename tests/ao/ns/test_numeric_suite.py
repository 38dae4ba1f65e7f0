"""The numeric suite: float and quantized models side by side."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropoint
import zeropoint.ns
from zeropoint import QTensor, quantize_per_channel, quantize_per_tensor
from zeropoint.ao import ns
from zeropoint.ao.nn import intrinsic as nni
from zeropoint.ao.nn.quantized import FloatFunctional
from zeropoint.ao.ns import _numeric_suite as suite
from zeropoint.ao.quantization import (
    DeQuantStub,
    QuantStub,
    convert,
    fuse_modules,
    fuse_modules_qat,
    get_default_qat_qconfig,
    get_default_qconfig,
    prepare,
    prepare_qat,
    quantize_dynamic,
)


class ConvLinear(nn.Module):
    """A small static network: fused convolution, an addition, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.quant = QuantStub()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.relu = nn.ReLU()
        self.add = FloatFunctional()
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(8 * 36, 10)
        self.dequant = DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn(self.conv(self.quant(x))))
        return self.dequant(self.fc(self.flatten(self.add.add(y, y))))


UNIT = ["conv", "bn", "relu"]


def sqnr(wanted: Tensor, got: Tensor) -> float:
    wanted, got = wanted.double(), (got.dequantize() if got.is_quantized else got).double()
    return float(10 * torch.log10(wanted.square().sum() / (got - wanted).square().sum()))


def pictures() -> Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def static() -> tuple[nn.Module, nn.Module]:
    """A fused float network and its quantized twin."""
    network = fuse_modules(ConvLinear().eval(), [UNIT])
    network.qconfig = get_default_qconfig()
    prepared = prepare(network)
    prepared(pictures())
    return network, convert(prepared)


@pytest.fixture
def transformer() -> tuple[nn.Module, nn.Module]:
    """A float transformer layer and its dynamically quantized twin."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    return layer, quantize_dynamic(layer, {nn.Linear})


def tokens() -> Tensor:
    return torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(2))


# --- weights ------------------------------------------------------------------------------------------------------


def test_weights_of_a_static_network(static: tuple[nn.Module, nn.Module]) -> None:
    floating, quantized = static
    pairs = ns.compare_weights(floating.state_dict(), quantized.state_dict())
    assert set(pairs) == {"conv.weight", "fc.weight"}
    for pair in pairs.values():
        assert isinstance(pair["quantized"], QTensor)
        assert pair["float"].shape == pair["quantized"].shape
        assert sqnr(pair["float"], pair["quantized"]) > 35
    assert torch.equal(pairs["fc.weight"]["quantized"].int_repr(), quantized.fc.weight.int_repr())
    assert torch.equal(pairs["fc.weight"]["quantized"].dequantize(), quantized.fc.weight.dequantize())


def test_weights_of_a_dynamic_transformer_layer(transformer: tuple[nn.Module, nn.Module]) -> None:
    floating, quantized = transformer
    pairs = ns.compare_weights(floating.state_dict(), quantized.state_dict())
    assert {"linear1.weight", "linear2.weight"} <= set(pairs)
    for name in ("linear1", "linear2"):
        assert sqnr(pairs[f"{name}.weight"]["float"], pairs[f"{name}.weight"]["quantized"]) > 35


def test_weights_of_a_network_prepared_for_training() -> None:
    network = fuse_modules_qat(ConvLinear().train(), [UNIT])
    network.qconfig = get_default_qat_qconfig()
    pairs = ns.compare_weights(network.state_dict(), prepare_qat(network).state_dict())
    assert torch.equal(pairs["conv.weight"]["float"], pairs["conv.weight"]["quantized"])
    assert "fc.weight" in pairs


def test_names_match_exactly() -> None:
    weight = torch.ones(2, 2)
    assert ns.compare_weights({"ab.c.weight": weight}, {"a.bc.weight": weight, "abc.weight": weight}) == {}
    pairs = ns.compare_weights(
        {"a.bc.weight": weight, "ab.c.weight": weight + 1}, {"ab.c.weight": weight, "a.bc.weight": weight}
    )
    assert torch.equal(pairs["ab.c.weight"]["float"], weight + 1)
    assert torch.equal(pairs["a.bc.weight"]["float"], weight)


@pytest.mark.parametrize("key", ["fc._packed_params", "fc._packed_params._packed_params"])
@pytest.mark.parametrize("wrap", [lambda w: w, lambda w: (w, None)], ids=["tensor", "pair"])
def test_packed_params_are_matched_to_the_weight(key: str, wrap: Callable[[Tensor], Any]) -> None:
    weight = torch.randn(3, 4)
    packed = quantize_per_channel(weight, torch.full((3,), 0.02), torch.zeros(3, dtype=torch.int64), 0, zeropoint.qint8)
    pairs = ns.compare_weights({"fc.weight": weight}, {key: wrap(packed), "fc.scale": torch.ones(())})
    assert set(pairs) == {key}
    assert pairs[key]["quantized"] is packed
    assert pairs[key]["float"] is weight


def test_weights_of_the_root() -> None:
    layer = nn.Linear(4, 2)
    assert set(ns.compare_weights(layer.state_dict(), quantize_dynamic(layer).state_dict())) == {"weight"}


# --- layers -------------------------------------------------------------------------------------------------------


def test_shadows_of_a_static_network(static: tuple[nn.Module, nn.Module]) -> None:
    floating, quantized = static
    swap = [nni.ConvReLU2d, nn.Linear, FloatFunctional]
    stats = ns.compare_model_stub(floating, quantized, swap, pictures())
    assert set(stats) == {"conv.stats", "fc.stats", "add.stats"}
    for entry in stats.values():
        assert len(entry["float"]) == len(entry["quantized"]) == 1
        assert entry["float"][0].shape == entry["quantized"][0].shape
        assert entry["float"][0].shape[0] == 4  # whole tensors, not the first row
        assert sqnr(entry["float"][0], entry["quantized"][0]) > 25


def test_models_come_back_as_they_were(static: tuple[nn.Module, nn.Module]) -> None:
    floating, quantized = static
    before = [str(floating), str(quantized)]
    first = ns.compare_model_stub(floating, quantized, [nn.Linear], pictures())
    ns.compare_model_outputs(floating, quantized, pictures())
    assert [str(floating), str(quantized)] == before
    assert not any(module._forward_hooks for model in static for module in model.modules())
    second = ns.compare_model_stub(floating, quantized, [nn.Linear], pictures())
    assert torch.equal(first["fc.stats"]["float"][0], second["fc.stats"]["float"][0])


def test_a_failing_call_leaves_the_models_as_they_were(static: tuple[nn.Module, nn.Module]) -> None:
    floating, quantized = static
    before = str(quantized)
    for compare in (ns.compare_model_outputs, lambda *args: ns.compare_model_stub(*args[:2], [nn.Linear], args[2])):
        with pytest.raises(RuntimeError):
            compare(floating, quantized, torch.ones(1, 5, 6, 6))
    assert str(quantized) == before


def test_shadows_of_a_dynamic_transformer_layer(transformer: tuple[nn.Module, nn.Module]) -> None:
    floating, quantized = transformer
    stats = ns.compare_model_stub(floating, quantized, {nn.Linear}, tokens())
    assert set(stats) == {"linear1.stats", "linear2.stats"}
    for entry in stats.values():
        assert entry["float"][0].shape == entry["quantized"][0].shape
        assert sqnr(entry["float"][0], entry["quantized"][0]) > 25


def test_a_root_of_a_listed_class_is_shadowed() -> None:
    layer = nn.Linear(4, 2).eval()
    stats = ns.compare_model_stub(layer, quantize_dynamic(layer), [nn.Linear], torch.randn(3, 4))
    assert set(stats) == {"stats"}
    assert stats["stats"]["float"][0].shape == (3, 2)


def test_stubs_are_placed_where_classes_differ(static: tuple[nn.Module, nn.Module]) -> None:
    floating, quantized = static
    plain = quantized(pictures())
    suite.prepare_model_with_stubs(floating, quantized, {nni.ConvReLU2d, nn.Flatten}, suite.ShadowLogger)
    assert isinstance(quantized.conv, suite.Shadow)
    assert isinstance(quantized.flatten, nn.Flatten)  # the same class in both
    for calls in (1, 2):
        assert torch.equal(quantized(pictures()), plain)
        assert len(suite.get_logger_dict(quantized)["conv.stats"]["quantized"]) == calls
    assert set(suite.get_logger_dict(quantized, "part")) == {"part.conv.stats"}


def test_a_shadow_stands_in_for_its_module(static: tuple[nn.Module, nn.Module]) -> None:
    floating, quantized = static
    shadow = suite.Shadow(quantized.fc, floating.fc, suite.ShadowLogger)
    assert torch.equal(shadow.weight.int_repr(), quantized.fc.weight.int_repr())
    assert copy.deepcopy(shadow).scale == pickle.loads(pickle.dumps(shadow)).scale == quantized.fc.scale
    with pytest.raises(AttributeError, match="nonsense"):
        _ = shadow.nonsense


@pytest.mark.parametrize("name", ["add", "mul", "sub", "add_relu", "cat", "matmul", "div", "add_scalar", "mul_scalar"])
def test_shadows_of_functional_modules(name: str) -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    q = quantize_per_tensor(x, 0.1, 0, zeropoint.quint8)
    twin = zeropoint.ao.nn.quantized.QFunctional(0.2, 0)
    shadow = suite.Shadow(twin, FloatFunctional(), suite.ShadowLogger)
    args = ([q, q],) if name == "cat" else (q, 2.0) if name.endswith("scalar") else (q, q)
    result = getattr(shadow, name)(*args)
    assert torch.equal(shadow.logger.stats["quantized"][0].int_repr(), result.int_repr())
    assert shadow.logger.stats["float"][0].shape == result.shape
    assert not shadow.logger.stats["float"][0].is_quantized


def test_a_list_of_something_else_is_refused(static: tuple[nn.Module, nn.Module]) -> None:
    with pytest.raises(TypeError, match="module_swap_list must hold module classes, got 'fc'"):
        ns.compare_model_stub(*static, ["fc"], pictures())
    with pytest.raises(TypeError, match="allow_list must hold module classes, got 3"):
        ns.compare_model_outputs(*static, pictures(), allow_list=[3])


# --- activations --------------------------------------------------------------------------------------------------


def test_outputs_of_a_static_network(static: tuple[nn.Module, nn.Module]) -> None:
    floating, quantized = static
    stats = ns.compare_model_outputs(floating, quantized, pictures())
    assert set(stats) == {"quant.stats", "conv.stats", "add.stats", "fc.stats"}
    for entry in stats.values():
        assert entry["float"][0].shape == entry["quantized"][0].shape
        assert entry["quantized"][0].is_quantized
        assert sqnr(entry["float"][0], entry["quantized"][0]) > 25


def test_outputs_of_a_dynamic_transformer_layer(transformer: tuple[nn.Module, nn.Module]) -> None:
    floating, quantized = transformer
    stats = ns.compare_model_outputs(floating, quantized, tokens())
    assert {"linear1.stats", "linear2.stats"} <= set(stats)
    for entry in stats.values():
        assert sqnr(entry["float"][0], entry["quantized"][0]) > 25


def test_outputs_of_a_network_in_training() -> None:
    network = fuse_modules_qat(ConvLinear().train(), [UNIT])
    network.qconfig = get_default_qat_qconfig()
    prepared = prepare_qat(network)
    prepared(pictures())
    stats = ns.compare_model_outputs(network.eval(), prepared.eval(), pictures())
    assert {"conv.stats", "add.stats", "fc.stats"} <= set(stats)
    converted = ns.compare_model_outputs(prepared, convert(prepared), pictures())
    assert sqnr(converted["fc.stats"]["float"][0], converted["fc.stats"]["quantized"][0]) > 25


def test_loggers_count_calls_and_can_be_laid_anew(static: tuple[nn.Module, nn.Module]) -> None:
    floating, quantized = static
    for _ in range(2):
        suite.prepare_model_outputs(floating, quantized)
        for model in static:
            model(pictures())
            model(pictures())
        stats = suite.get_matching_activations(floating, quantized)
        assert [len(entry["float"]) for entry in stats.values()] == [2] * len(stats)


def test_what_was_logged_is_not_changed_later() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)).eval()
    stats = ns.compare_model_outputs(network, quantize_dynamic(network), torch.randn(8, 4))
    assert bool((stats["0.stats"]["float"][0] < 0).any())


def test_only_listed_classes_are_logged(static: tuple[nn.Module, nn.Module]) -> None:
    floating, quantized = static
    stats = ns.compare_model_outputs(floating, quantized, pictures(), allow_list=[nn.Linear, type(quantized.fc)])
    assert set(stats) == {"fc.stats"}


def test_a_module_used_twice_is_logged_twice() -> None:
    layer = nn.Linear(4, 4)
    network = nn.Sequential(layer, layer).eval()
    stats = ns.compare_model_outputs(network, quantize_dynamic(network), torch.randn(2, 4))
    assert {key: len(entry["quantized"]) for key, entry in stats.items()} == {"0.stats": 2}


@pytest.mark.skipif(
    nn.LSTM not in zeropoint.ao.quantization.get_default_dynamic_quant_module_mappings(), reason="no dynamic LSTM"
)
def test_a_dynamic_lstm() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0]

    floating = Recurrent().eval()
    quantized = quantize_dynamic(floating, {nn.LSTM})
    x = torch.randn(5, 3, 8)
    weights = ns.compare_weights(floating.state_dict(), quantized.state_dict())
    assert {key.rpartition(".")[2] for key in weights} == {"weight_ih_l0", "weight_hh_l0"}
    assert all(sqnr(pair["float"], pair["quantized"]) > 35 for pair in weights.values())
    outputs = ns.compare_model_outputs(floating, quantized, x)
    assert set(outputs) == {"lstm.stats"}
    wanted, got = outputs["lstm.stats"]["float"][0], outputs["lstm.stats"]["quantized"][0]
    assert [wanted[0].shape, wanted[1][0].shape] == [got[0].shape, got[1][0].shape]
    assert sqnr(wanted[0], got[0]) > 25
    shadows = ns.compare_model_stub(floating, quantized, [nn.LSTM], x)
    assert shadows["lstm.stats"]["float"][0].shape == (5, 3, 16)
    assert sqnr(shadows["lstm.stats"]["float"][0], shadows["lstm.stats"]["quantized"][0]) > 25


# --- names --------------------------------------------------------------------------------------------------------


def test_public_names() -> None:
    for name in suite.__all__:
        assert getattr(zeropoint.ns, name) is getattr(ns, name) is getattr(suite, name)
    assert set(zeropoint.ns.__all__) == set(suite.__all__)


def test_a_logger_without_forward_says_so() -> None:
    with pytest.raises(NotImplementedError, match="define forward"):
        suite.Logger()(torch.ones(1))
