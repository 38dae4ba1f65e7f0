"""What helps: each method on a case that it was made for, and what it must leave alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from zeropoint.analysis import (
    ChannelClamp,
    adaround,
    correct_bias,
    equalize,
    output_sqnr,
    reestimate_batch_norm,
    smooth,
)
from zeropoint.ao.nn.quantized import FloatFunctional
from zeropoint.ao.quantization import (
    DeQuantStub,
    FakeQuantize,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    QConfig,
    QuantStub,
    QuantWrapper,
    convert,
    default_observer,
    fuse_modules,
    fuse_modules_qat,
    prepare,
    prepare_qat,
)
from zeropoint.dtypes import per_tensor_symmetric, qint8, quint8

PER_TENSOR = QConfig(
    MinMaxObserver.with_args(dtype=quint8), MinMaxObserver.with_args(dtype=qint8, qscheme=per_tensor_symmetric)
)
FOUR_BITS = QConfig(
    MinMaxObserver.with_args(dtype=quint8),
    MinMaxObserver.with_args(dtype=qint8, qscheme=per_tensor_symmetric, quant_min=-8, quant_max=7),
)


def quantized(model: nn.Module, data: Tensor, qconfig: QConfig = PER_TENSOR) -> nn.Module:
    model = copy.deepcopy(model)
    model.qconfig = qconfig
    prepared = prepare(model)
    prepared(data)
    return convert(prepared)


class Separable(nn.Module):
    """Pointwise, depthwise, pointwise, with channels of very different ranges, and a residual around them."""

    def __init__(self, relu: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.quant = QuantStub()
        self.expand, self.relu1 = nn.Conv2d(8, 16, 1), relu()
        self.depthwise, self.relu2 = nn.Conv2d(16, 16, 3, padding=1, groups=16), relu()
        self.project = nn.Conv2d(16, 8, 1)
        self.add = FloatFunctional()
        self.pool, self.flatten, self.fc = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
        self.dequant = DeQuantStub()
        with torch.no_grad():
            spread = torch.logspace(-1.5, 1.5, 16)
            self.depthwise.weight *= spread.flip(0).reshape(-1, 1, 1, 1)
            self.depthwise.bias *= spread.flip(0)
            self.project.weight /= spread.flip(0).reshape(1, -1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        y = self.project(self.relu2(self.depthwise(self.relu1(self.expand(x)))))
        return self.dequant(self.fc(self.flatten(self.pool(self.add.add(x, y)))))


FUSED = [["expand", "relu1"], ["depthwise", "relu2"]]


# --- cross-layer equalization -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
def test_equalization_keeps_the_function_and_helps(fused: bool) -> None:
    model, x = Separable().eval(), torch.randn(16, 8, 6, 6)
    if fused:
        model = fuse_modules(model, FUSED)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    equal = equalize(model, x)
    assert output_sqnr(model(x), equal(x)) > 90
    gain = output_sqnr(model(x), quantized(equal, x)(x)) - output_sqnr(model(x), quantized(model, x)(x))
    assert gain > 6
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for name in ("fc",):  # an addition stands before it
        assert torch.equal(getattr(equal, name).weight, getattr(model, name).weight)


def test_both_sides_of_a_pair_get_one_range() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    with torch.no_grad():
        model[0].weight[2] *= 100
        model[0].weight[4] = 0
    equal = equalize(model, torch.randn(2, 4))
    first, second = equal[0].weight.abs().amax(1), equal[2].weight.abs().amax(0)
    alive = [0, 1, 2, 3, 5]
    assert torch.allclose(first[alive], second[alive], rtol=1e-5)
    assert output_sqnr(model(torch.eye(4)), equal(torch.eye(4))) > 90


def test_a_second_reader_forbids_equalization() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.b(y) + y

    model = Branch().eval()
    equal = equalize(model, torch.randn(2, 4))
    assert torch.equal(equal.a.weight, model.a.weight)


def test_a_channel_that_reaches_the_clamp_of_relu6_is_left_alone() -> None:
    model, x = fuse_modules(Separable(nn.ReLU6).eval(), FUSED), torch.randn(64, 8, 6, 6)
    with torch.no_grad():
        model.expand[0].bias[5] = 7.0
    equal = equalize(model, x, relu6="keep")
    assert isinstance(equal.expand[1], nn.ReLU6)
    assert output_sqnr(model(x), equal(x)) > 90
    assert torch.equal(equal.expand[0].weight[5], model.expand[0].weight[5])
    assert not torch.equal(equal.expand[0].weight[4], model.expand[0].weight[4])
    replaced = equalize(model, x, relu6="relu")
    assert isinstance(replaced.expand[1], nn.ReLU)


@pytest.mark.parametrize("fused", [True, False])
def test_the_clamp_of_relu6_is_scaled_with_its_channel(fused: bool) -> None:
    model, x = Separable(nn.ReLU6).eval(), torch.randn(16, 8, 6, 6)
    if fused:
        model = fuse_modules(model, FUSED)
    equal = equalize(model, x)
    for unseen in (x, 5 * torch.randn(16, 8, 6, 6)):  # which reaches the clamp in most channels
        assert output_sqnr(model(unseen), equal(unseen)) > 90
    clamp = next(module for module in equal.modules() if isinstance(module, ChannelClamp))
    assert float(clamp.limit.min()) >= 6 / 4
    assert float(clamp.limit.max()) <= 6 * 4
    assert float(clamp.limit.std()) > 0
    plain, better = quantized(model, x), quantized(equal, x)
    assert output_sqnr(model(x), better(x)) > output_sqnr(model(x), plain(x)) + 3
    again = quantized(equal, torch.randn(16, 8, 6, 6))
    again.load_state_dict(better.state_dict())
    assert torch.equal(again(x), better(x))
    again = equalize(equal, x)  # what is settled stays
    assert output_sqnr(model(x), again(x)) > 90


@pytest.mark.parametrize(
    ("layer", "second", "shape"),
    [
        (nn.Linear(4, 6), nn.Linear(6, 3), (512, 4)),
        (nn.Conv1d(4, 6, 1), nn.Conv1d(6, 3, 1), (64, 4, 9)),
        (nn.Conv3d(4, 6, 1), nn.Conv3d(6, 3, 1), (32, 4, 2, 3, 2)),
    ],
    ids=lambda x: type(x).__name__,
)
def test_clamped_layers_compute_what_a_clamp_on_codes_computes(
    layer: nn.Module, second: nn.Module, shape: tuple[int, ...]
) -> None:
    model = nn.Sequential(QuantStub(), layer, nn.ReLU6(), second, DeQuantStub()).eval()
    with torch.no_grad():
        layer.weight *= torch.logspace(-1, 1, 6).reshape(-1, *[1] * (layer.weight.dim() - 1))
    x = 4 * torch.randn(shape)
    equal = equalize(fuse_modules(model, [["1", "2"]]), x)
    converted = quantized(equal, x)
    codes = converted[1](converted[0](x))
    axis = -1 if isinstance(layer, nn.Linear) else 1
    limit = equal[1][1].limit
    largest = codes.int_repr().movedim(axis, 0).flatten(1).amax(1)
    allowed = (limit / codes.q_scale()).round().clamp(max=255)
    assert bool((largest <= allowed).all())
    assert int((largest == allowed).sum()) >= 2
    assert output_sqnr(equal(x), converted(x)) > 25


def test_what_keeps_a_channel_above_zero_moves_into_the_next_bias() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    with torch.no_grad():
        model[0].bias[2] = 50.0
    x = torch.randn(64, 4)
    moved, kept = equalize(model, x, absorb=True), equalize(model, x)
    assert float(moved[0].bias[2]) < float(kept[0].bias[2]) / 2
    assert output_sqnr(model(x), moved(x)) > 90
    padded = nn.Sequential(nn.Conv1d(4, 6, 1), nn.ReLU(), nn.Conv1d(6, 3, 3, padding=1)).eval()
    padded[0].bias.data += 50  # zeros beside the signal would have to move too
    y = torch.randn(8, 4, 5)
    assert output_sqnr(padded(y), equalize(padded, y, absorb=True)(y)) > 90


@pytest.mark.parametrize(("arguments", "text"), [({"relu6": "drop"}, "relu6"), ({"most": 0.5}, "most")])
def test_settings_of_equalization(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        equalize(Separable().eval(), torch.randn(2, 8, 6, 6), **arguments)


def test_pairs_that_do_not_fit() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    with pytest.raises(ValueError, match="'2' and '0' are no neighbouring layers"):
        equalize(model, torch.randn(2, 4), pairs=[("2", "0")])


# --- bias correction ----------------------------------------------------------------------------------------------


def test_bias_correction_restores_the_means() -> None:
    model, x = fuse_modules(Separable().eval(), FUSED), torch.randn(32, 8, 6, 6)
    with torch.no_grad():  # every weight a little above a grid point: rounding shifts all means one way
        model.expand[0].weight.copy_((model.expand[0].weight * 40).round() / 40 + 0.012)
    corrected = correct_bias(model, x, qconfig=FOUR_BITS)
    wanted = model(x).detach()
    plain, better = quantized(model, x, FOUR_BITS)(x), quantized(corrected, x, FOUR_BITS)(x)
    assert float((better.mean(0) - wanted.mean(0)).abs().max()) < 0.35 * float(
        (plain.mean(0) - wanted.mean(0)).abs().max()
    )
    assert output_sqnr(wanted, better) > output_sqnr(wanted, plain) + 3


def test_bias_correction_makes_a_bias_and_joins_batches() -> None:
    model = QuantWrapper(nn.Linear(8, 4, bias=False)).eval()
    x = torch.rand(64, 8) + 1
    corrected = correct_bias(model, list(x.split(16)), qconfig=FOUR_BITS)
    assert corrected.module.bias is not None
    assert model.module.bias is None
    wanted = model(x)
    assert output_sqnr(wanted, quantized(corrected, x, FOUR_BITS)(x)) > output_sqnr(
        wanted, quantized(model, x, FOUR_BITS)(x)
    )


# --- batch norm ---------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant = QuantStub()
        self.conv, self.bn, self.relu = nn.Conv2d(4, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        self.dequant = DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.relu(self.bn(self.conv(self.quant(x)))))


def test_batch_norm_statistics_follow_the_weights() -> None:
    data = [torch.rand(16, 4, 8, 8) + 0.5 for _ in range(8)]
    model = reestimate_batch_norm(Normed(), data)
    values = model.conv(torch.cat(data)).transpose(0, 1).flatten(1)
    assert torch.allclose(model.bn.running_mean, values.mean(1), rtol=1e-4)
    assert torch.allclose(model.bn.running_var, values.var(1), rtol=0.05)
    weight = FakeQuantize.with_args(
        observer=MovingAverageMinMaxObserver,
        quant_min=-128,
        quant_max=127,
        dtype=qint8,
        qscheme=per_tensor_symmetric,
        averaging_constant=1.0,
    )
    training = fuse_modules_qat(copy.deepcopy(model), [["conv", "bn", "relu"]])
    training.qconfig = QConfig(FakeQuantize.with_args(observer=MovingAverageMinMaxObserver), weight)
    prepared = prepare_qat(training)
    for batch in data:
        prepared(batch)
    prepared.conv.bn.running_mean += 0.5 * prepared.conv.bn.running_var.sqrt()  # statistics that lag behind
    prepared.conv.bn.running_var *= 1.5
    prepared.eval()
    x, wanted = data[1], model.eval()(data[1])
    again = reestimate_batch_norm(prepared, data)
    assert torch.equal(again.conv.activation_post_process.scale, prepared.conv.activation_post_process.scale)
    assert output_sqnr(wanted, again(x)) > output_sqnr(wanted, prepared(x)) + 10
    assert again.conv.bn.momentum == prepared.conv.bn.momentum
    assert not again.conv.bn.training


def test_no_batch_norm() -> None:
    with pytest.raises(ValueError, match="no batch norm"):
        reestimate_batch_norm(nn.Linear(2, 2), torch.ones(2, 2))


# --- SmoothQuant --------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Normalized, then two linear layers, with outlier channels in the norm, as in large language models."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.quant = nn.LayerNorm(32), QuantStub()
        self.up, self.gate = nn.Linear(32, 16), nn.Linear(32, 16)
        self.dequant = DeQuantStub()
        with torch.no_grad():
            self.norm.weight[[3, 17]] = 60.0
            self.up.weight[:, [3, 17]] *= 0.02
            self.gate.weight[:, [3, 17]] *= 0.02

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.quant(x))
        return self.dequant(self.up(y)) * self.dequant(self.gate(y))


def test_smoothing_keeps_the_function_and_helps() -> None:
    model, x = Block().eval(), torch.randn(64, 32)
    smoothed = smooth(model, list(x.split(16)), groups={"norm": ["up", "gate"]})
    assert output_sqnr(model(x), smoothed(x)) > 90
    plain, better = (output_sqnr(model(x), quantized(m, x)(x)) for m in (model, smoothed))
    assert better > plain + 6


def test_smoothing_finds_norms_that_only_linear_layers_read() -> None:
    class PreNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.after = nn.LayerNorm(8), nn.LayerNorm(8)
            self.q, self.k, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            z = self.after(self.q(y) * self.k(y))
            return self.out(z) + z  # read by an addition too

    model, x = PreNorm().eval(), torch.randn(4, 8)
    smoothed = smooth(model, x)
    assert not torch.equal(smoothed.norm.weight, model.norm.weight)
    assert torch.equal(smoothed.after.weight, model.after.weight)
    assert output_sqnr(model(x), smoothed(x)) > 90


@pytest.mark.parametrize(("arguments", "text"), [({"alpha": 2.0}, "alpha"), ({}, "no LayerNorm")])
def test_nothing_to_smooth(arguments: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        smooth(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2), **arguments)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- AdaRound -----------------------------------------------------------------------------------------------------


def test_adaround_beats_rounding_to_nearest(one_thread: None) -> None:
    model = nn.Sequential(QuantStub(), nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10), DeQuantStub())
    model = fuse_modules(model.eval(), [["1", "2"]])
    model.qconfig = FOUR_BITS
    basis = torch.randn(6, 4 * 36)  # inputs that lie in few directions, as real ones do
    data = (torch.randn(128, 6) @ basis).reshape(-1, 4, 6, 6)
    prepared = prepare(model)
    prepared(data)
    rounded = convert(adaround(prepared, data, iterations=200, progress=False))
    x = (torch.randn(64, 6) @ basis).reshape(-1, 4, 6, 6)
    nearest = convert(prepared)
    assert output_sqnr(model(x), rounded(x)) > output_sqnr(model(x), nearest(x)) + 2
    for name in ("1", "4"):
        moved = rounded.get_submodule(name).weight.int_repr() - nearest.get_submodule(name).weight.int_repr()
        assert int(moved.abs().max()) == 1
        assert rounded.get_submodule(name).weight.q_scale() == nearest.get_submodule(name).weight.q_scale()
    assert type(rounded.get_submodule("1").weight.int_repr()) is Tensor


def test_adaround_refuses_what_it_cannot_round() -> None:
    model = QuantWrapper(nn.Linear(2, 2))
    model.qconfig = QConfig(default_observer, PER_TENSOR.weight)
    prepared = prepare(model.eval())
    prepared(torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"\['quant'\]"):
        adaround(prepared, torch.ones(1, 2), names=["quant"])
    with pytest.raises(ValueError, match="iterations"):
        adaround(prepared, torch.ones(1, 2), iterations=0)
