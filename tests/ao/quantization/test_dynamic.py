"""quantize_dynamic: what is swapped, what is left, how exact it is."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

import zeropoint as zp
from zeropoint.ao.nn import intrinsic as nni
from zeropoint.ao.nn import quantized as nnq
from zeropoint.ao.nn.quantized import dynamic as nnqd
from zeropoint.ao.quantization import (
    QConfigMapping,
    default_dynamic_qconfig,
    per_channel_dynamic_qconfig,
    quantize_dynamic,
)


def sqnr(reference: Tensor, other: Tensor) -> float:
    reference, other = reference.detach(), other.detach()
    return float(20 * torch.log10(reference.norm() / (reference - other).norm()))


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)).eval()


def test_linear_weights_go_to_int8_and_biases_stay_float(model: nn.Module) -> None:
    x = torch.randn(16, 128)
    quantized = quantize_dynamic(model)
    assert [type(m) for m in quantized] == [nnqd.Linear, nn.ReLU, nnqd.Linear]
    assert quantized[0].state_dict()["weight"].dtype == torch.int8
    assert torch.equal(quantized[0].bias(), model[0].bias)
    assert sqnr(model(x), quantized(x)) > 35
    assert type(model[0]) is nn.Linear
    assert quantize_dynamic(model, inplace=True) is model


def test_weights_have_a_grid_a_channel_unless_told_otherwise(model: nn.Module) -> None:
    assert quantize_dynamic(model)[0].weight.qscheme() == zp.per_channel_affine
    assert quantize_dynamic(model, {nn.Linear})[0].weight.qscheme() == zp.per_channel_affine
    per_tensor = quantize_dynamic(model, {nn.Linear: default_dynamic_qconfig})
    assert per_tensor[0].weight.qscheme() == zp.per_tensor_affine


@pytest.mark.parametrize(
    ("spec", "swapped"),
    [
        (None, {"0", "2"}),
        ({nn.Linear}, {"0", "2"}),
        ({"2"}, {"2"}),
        ([nn.Linear], {"0", "2"}),
        ({"0": per_channel_dynamic_qconfig}, {"0"}),
        ({nn.Linear: per_channel_dynamic_qconfig, "0": None}, {"2"}),
        (QConfigMapping().set_global(per_channel_dynamic_qconfig).set_module_name("2", None), {"0"}),
        ({nn.Conv2d}, set()),
    ],
)
def test_the_spec_says_what_is_swapped(model: nn.Module, spec: object, swapped: set[str]) -> None:
    quantized = quantize_dynamic(model, spec)
    assert set(quantized.quantization_summary.swapped) == swapped
    assert {n for n, m in quantized.named_modules() if isinstance(m, nnqd.Linear)} == swapped


def test_the_spec_and_the_dtype_are_checked(model: nn.Module) -> None:
    with pytest.raises(TypeError, match="qconfig_spec must be"):
        quantize_dynamic(model, nn.Linear)
    with pytest.raises(ValueError, match="takes dtype=qint8"):
        quantize_dynamic(model, dtype=torch.float32)
    for dtype in (zp.qint8, torch.int8, "qint8"):
        assert type(quantize_dynamic(model, dtype=dtype)[0]) is nnqd.Linear


def test_a_bare_linear_is_swapped() -> None:
    linear = nn.Linear(4, 3)
    assert type(quantize_dynamic(linear)) is nnqd.Linear


def test_the_linear_that_attention_reads_is_never_swapped() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).eval()
    quantized = quantize_dynamic(layer)
    assert type(quantized.self_attn.out_proj) is NonDynamicallyQuantizableLinear
    assert "reads its weight" in quantized.quantization_summary.skipped["self_attn.out_proj"].reason
    assert set(quantized.quantization_summary.swapped) == {"linear1", "linear2"}
    x = torch.randn(3, 5, 16)
    with torch.no_grad():
        assert sqnr(layer(x), quantized(x)) > 30


def test_layers_without_a_dynamic_twin_are_reported() -> None:
    model = nn.Sequential(nn.Embedding(4, 4), nn.LSTM(4, 4), nn.LayerNorm(4))
    summary = quantize_dynamic(model).quantization_summary
    assert "LayerNorm" in str(summary)
    assert summary.skipped["2"].reason == "no dynamic twin"


class WhisperLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_subclasses_are_swapped_if_they_compute_the_same() -> None:
    quantized = quantize_dynamic(nn.Sequential(WhisperLinear(4, 4), Doubling(4, 4)))
    assert [type(m) for m in quantized] == [nnqd.Linear, Doubling]
    assert "name its class" in quantized.quantization_summary.skipped["1"].reason
    named = quantize_dynamic(nn.Sequential(Doubling(4, 4)), {Doubling})
    assert type(named[0]) is nnqd.Linear


def test_fused_modules_have_a_dynamic_twin() -> None:
    fused = nni.LinearReLU(nn.Linear(8, 4), nn.ReLU()).eval()
    x = torch.randn(6, 8)
    quantized = quantize_dynamic(fused)
    assert type(quantized) is nni.quantized.dynamic.LinearReLU
    assert (quantized(x) >= 0).all()
    assert sqnr(fused(x), quantized(x)) > 30
    six = quantize_dynamic(nni.LinearReLU(nn.Linear(8, 4), nn.ReLU6()))
    assert float(six(x * 1000).max()) <= 6.0


def test_one_grid_over_the_complete_input() -> None:
    """A row's result depends on the largest value of any row."""
    layer = quantize_dynamic(nn.Linear(4, 4))
    small = torch.full((1, 4), 0.001)
    alone = layer(small)
    beside = layer(torch.cat([small, torch.full((1, 4), 1000.0)]))[:1]
    assert not torch.equal(alone, beside)


def test_large_neighbouring_weights_do_not_saturate() -> None:
    linear = nn.Linear(64, 2, bias=False)
    with torch.no_grad():
        linear.weight.fill_(1.0)
    x = torch.ones(1, 64)
    torch.testing.assert_close(quantize_dynamic(linear)(x), linear(x), rtol=5e-3, atol=0)


def test_one_huge_value_gives_finite_results() -> None:
    y = quantize_dynamic(nn.Linear(4, 4))(torch.tensor([[1.0, 3e38, -1.0, 2.0]]))
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("shape", [(4,), (0, 4), (2, 3, 4), (2, 0, 4)], ids=str)
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    assert quantize_dynamic(nn.Linear(4, 3))(torch.randn(shape)).shape == (*shape[:-1], 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_output_has_the_dtype_of_the_input(dtype: torch.dtype) -> None:
    layer = quantize_dynamic(nn.Linear(4, 3)).to(dtype)
    assert layer(torch.randn(2, 4, dtype=dtype)).dtype == dtype
    assert layer.bias.dtype == torch.float32


def test_a_quantized_input_is_dequantized() -> None:
    layer = quantize_dynamic(nn.Linear(4, 3))
    x = torch.randn(5, 4)
    q = zp.quantize_per_tensor(x, 0.05, 100, zp.quint8)
    assert torch.equal(layer(q), layer(q.dequantize()))


def test_state_loads_into_a_new_module_with_the_restricted_reader(model: nn.Module) -> None:
    quantized, x = quantize_dynamic(model), torch.randn(3, 128)
    file = io.BytesIO()
    torch.save(quantized.state_dict(), file)
    file.seek(0)
    other = quantize_dynamic(nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)))
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), quantized(x))
    assert torch.equal(copy.deepcopy(quantized)(x), quantized(x))


def test_hooks_and_mode_move_along(model: nn.Module) -> None:
    calls: list[str] = []
    model[0].register_forward_hook(lambda *_: calls.append("out"))
    model[0].register_forward_pre_hook(lambda *_: calls.append("in"))
    quantize_dynamic(model)(torch.randn(1, 128))
    assert calls == ["in", "out"]


def test_no_qconfig_is_left_behind(model: nn.Module) -> None:
    assert not any(hasattr(m, "qconfig") for m in quantize_dynamic(model).modules())


def test_compiles_and_exports(model: nn.Module) -> None:
    quantized, x = quantize_dynamic(model), torch.randn(3, 128)
    assert torch.equal(torch.compile(quantized, fullgraph=True, backend="aot_eager")(x), quantized(x))
    assert torch.equal(torch.export.export(quantized, (x,)).module()(x), quantized(x))


def test_static_modules_are_left_alone() -> None:
    quantized = quantize_dynamic(nn.Sequential(nnq.Linear(2, 2)))
    assert type(quantized[0]) is nnq.Linear
