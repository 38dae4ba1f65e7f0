"""Quantization-aware training: what is simulated, what is learned, what conversion keeps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zeropoint as zp
from zeropoint.ao.nn import intrinsic as nni
from zeropoint.ao.nn import qat
from zeropoint.ao.nn import quantized as nnq
from zeropoint.ao.quantization import (
    DeQuantStub,
    FakeQuantize,
    MinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelFakeQuantize,
    QConfig,
    QuantStub,
    convert,
    default_embedding_qat_qconfig,
    default_fake_quant,
    default_per_channel_qat_qconfig,
    default_per_channel_qconfig,
    default_qat_qconfig,
    default_qconfig,
    disable_fake_quant,
    disable_observer,
    fuse_modules,
    fuse_modules_qat,
    get_default_qat_module_mappings,
    get_default_qat_qconfig,
    prepare,
    prepare_qat,
    quantize_qat,
)

iqat = nni.qat
QCONFIGS = {
    "per tensor": default_qat_qconfig,
    "per channel": default_per_channel_qat_qconfig,
    "fused observers": get_default_qat_qconfig(),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant = QuantStub()
        self.conv1 = nn.Conv2d(2, 6, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.bn2 = nn.BatchNorm2d(6)
        self.add = nnq.FloatFunctional()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Linear(6, 8)
        self.relu2 = nn.ReLU6()
        self.fc2 = nn.Linear(8, 3)
        self.dequant = DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu1(self.bn1(self.conv1(self.quant(x))))
        x = self.add.add(x, self.bn2(self.conv2(x)))
        x = torch.flatten(self.pool(x), 1)
        return self.dequant(self.fc2(self.relu2(self.fc1(x))))


ROWS = [["conv1", "bn1", "relu1"], ["conv2", "bn2"], ["fc1", "relu2"]]


def data(n: int = 32) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 2, 6, 6)
    return x, (x.mean((1, 2, 3)) * 9).clamp(-1, 1).round().long() + 1


def train(model: nn.Module, steps: int = 12, lr: float = 0.1) -> list[float]:
    x, y = data()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def prepared_net(qconfig: QConfig = default_per_channel_qat_qconfig) -> nn.Module:
    model = fuse_modules_qat(Net().train(), ROWS)
    model.qconfig = qconfig
    return prepare_qat(model)


@pytest.mark.parametrize("name", list(QCONFIGS))
def test_training_converges_and_conversion_keeps_what_was_learned(name: str) -> None:
    model = prepared_net(QCONFIGS[name])
    losses = train(model)
    assert losses[-1] < losses[0]
    model.apply(disable_observer)
    model.eval()
    quantized = convert(model, use_precomputed_fake_quant=True)
    x, _ = data()
    expected, y = model(x), quantized(x)
    assert type(quantized.conv1) is nni.quantized.ConvReLU2d
    assert type(quantized.conv2) is nnq.Conv2d
    assert type(quantized.fc1) is nni.quantized.LinearReLU
    assert type(quantized.fc2) is nnq.Linear
    # pooling rounds its mean to a code, which training does not simulate
    assert (y - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("name", list(QCONFIGS))
def test_what_training_simulates_is_what_conversion_computes(name: str) -> None:
    conv = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()]
    model = nn.Sequential(QuantStub(), *conv, nn.Flatten(), nn.Linear(64, 3), DeQuantStub()).train()
    model = fuse_modules_qat(model, ["1", "2", "3"])
    model.qconfig = QCONFIGS[name]
    model = prepare_qat(model)
    train(model, 5)
    model.apply(disable_observer)
    model.eval()
    quantized = convert(model, use_precomputed_fake_quant=True)
    x, _ = data()
    # sums are added up in another order, so that a value on the edge between two codes may take the other one
    assert (quantized(x) - model(x)).abs().max() <= 1.01 * quantized[5].scale


@pytest.mark.parametrize("precomputed", [True, False])
@pytest.mark.parametrize("name", list(QCONFIGS))
def test_conversion_keeps_the_trained_weight_grid_to_the_bit(name: str, precomputed: bool) -> None:
    model = prepared_net(QCONFIGS[name])
    train(model, 5)
    quantized = convert(model.eval(), use_precomputed_fake_quant=precomputed)
    for layer in ("conv1", "conv2", "fc1", "fc2"):
        fake = getattr(model, layer).weight_fake_quant
        state = getattr(quantized, layer).state_dict()
        assert torch.equal(state["weight_scale"].reshape(-1), fake.scale)
        assert torch.equal(state["weight_zero_point"].reshape(-1), fake.zero_point)


def test_conversion_keeps_the_weight_codes_and_the_code_bounds() -> None:
    weight = PerChannelFakeQuantize.with_args(quant_min=-7, quant_max=7)
    model = prepared_net(QConfig(default_fake_quant, weight))
    train(model, 5)
    model.apply(disable_observer)
    with torch.no_grad():
        model.fc2.weight.mul_(3)  # beyond the frozen grid
    quantized = convert(model.eval(), use_precomputed_fake_quant=True)
    assert quantized.fc2.weight.int_repr().abs().max() == 7
    simulated = model.fc2.weight_fake_quant(model.fc2.weight)
    torch.testing.assert_close(quantized.fc2.weight().dequantize(), simulated, rtol=1e-6, atol=0)
    folded = model.conv1.weight_fake_quant(model.conv1.folded_weight_bias()[0])
    torch.testing.assert_close(quantized.conv1.weight().dequantize(), folded, rtol=1e-6, atol=0)


def test_activation_grids_are_the_trained_ones() -> None:
    model = prepared_net()
    train(model, 5)
    quantized = convert(model.eval())
    for name in ("quant", "conv1", "add", "fc2"):
        fake = getattr(model, name).activation_post_process
        module = getattr(quantized, name)
        assert module.scale == float(fake.scale)
        assert module.zero_point == int(fake.zero_point)


def test_prepare_qat_needs_training_mode() -> None:
    with pytest.raises(ValueError, match=r"model.train\(\)"):
        prepare_qat(Net().eval())


def test_parameters_stay_the_same_objects_in_place() -> None:
    model = fuse_modules_qat(Net().train(), ROWS)
    model.qconfig = default_qat_qconfig
    before = {id(p) for p in model.parameters()}
    prepared = prepare_qat(model, inplace=True)
    assert {id(p) for p in prepared.parameters()} == before


def test_the_mapping_holds_every_pair() -> None:
    mapping = get_default_qat_module_mappings()
    assert mapping == {
        nn.Linear: qat.Linear,
        nn.Conv1d: qat.Conv1d,
        nn.Conv2d: qat.Conv2d,
        nn.Conv3d: qat.Conv3d,
        nn.ConvTranspose1d: qat.ConvTranspose1d,
        nn.ConvTranspose2d: qat.ConvTranspose2d,
        nn.ConvTranspose3d: qat.ConvTranspose3d,
        nni.LinearReLU: iqat.LinearReLU,
        nni.LinearBn1d: iqat.LinearBn1d,
        **{getattr(nni, f"Conv{kind}{n}d"): getattr(iqat, f"Conv{kind}{n}d") for kind in KINDS for n in (1, 2, 3)},
    }


KINDS = ("ReLU", "Bn", "BnReLU", "TransposeReLU")


@pytest.mark.parametrize("precomputed", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_transposed_convolution_trains_on_the_grids_that_conversion_uses(groups: int, precomputed: bool) -> None:
    layer = nn.ConvTranspose2d(4, 6, 3, stride=2, groups=groups)
    model = nn.Sequential(QuantStub(), layer, nn.ReLU(), DeQuantStub()).train()
    model.qconfig = default_per_channel_qat_qconfig
    prepared = prepare_qat(model)
    x = torch.randn(4, 4, 6, 6)
    optimizer = torch.optim.SGD(prepared.parameters(), 0.05)
    for _ in range(3):
        optimizer.zero_grad()
        prepared(x).square().mean().backward()
        optimizer.step()
    prepared.eval().apply(disable_observer)
    simulated = prepared(x).detach()
    quantized = convert(prepared, use_precomputed_fake_quant=precomputed)
    assert type(quantized[1]) is nnq.ConvTranspose2d
    assert torch.equal(quantized[1].weight_scale, prepared[1].weight_fake_quant.scale)
    assert float((quantized(x) - simulated).abs().max()) <= quantized[1].scale * 1.001


# --- the modules --------------------------------------------------------------------------------------------------

PLAIN: dict[str, tuple[Any, type[nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(4, 3), qat.Linear, (5, 4)),
    "Conv1d": (lambda: nn.Conv1d(4, 3, 3, padding=1), qat.Conv1d, (2, 4, 6)),
    "Conv2d": (lambda: nn.Conv2d(4, 4, 3, padding="same", groups=2), qat.Conv2d, (2, 4, 6, 6)),
    "Conv2d circular": (
        lambda: nn.Conv2d(4, 2, 3, padding=1, padding_mode="circular", bias=False),
        qat.Conv2d,
        (2, 4, 6, 6),
    ),
    "Conv3d": (lambda: nn.Conv3d(4, 3, 2), qat.Conv3d, (2, 4, 3, 4, 5)),
    "LinearReLU": (lambda: nni.LinearReLU(nn.Linear(4, 3), nn.ReLU()), iqat.LinearReLU, (5, 4)),
    "ConvReLU1d": (lambda: nni.ConvReLU1d(nn.Conv1d(4, 3, 3), nn.ReLU6()), iqat.ConvReLU1d, (2, 4, 6)),
    "ConvReLU2d": (lambda: nni.ConvReLU2d(nn.Conv2d(4, 3, 3), nn.ReLU()), iqat.ConvReLU2d, (2, 4, 6, 6)),
    "ConvReLU3d": (lambda: nni.ConvReLU3d(nn.Conv3d(4, 3, 2), nn.ReLU()), iqat.ConvReLU3d, (2, 4, 3, 4, 5)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 3, 3, stride=2), qat.ConvTranspose1d, (2, 4, 6)),
    "ConvTranspose2d": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, bias=False),
        qat.ConvTranspose2d,
        (2, 4, 5, 6),
    ),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(4, 3, 2, dilation=2), qat.ConvTranspose3d, (2, 4, 3, 4, 5)),
    "ConvTransposeReLU1d": (
        lambda: nni.ConvTransposeReLU1d(nn.ConvTranspose1d(4, 3, 3), nn.ReLU6()),
        iqat.ConvTransposeReLU1d,
        (2, 4, 6),
    ),
    "ConvTransposeReLU2d": (
        lambda: nni.ConvTransposeReLU2d(nn.ConvTranspose2d(4, 4, 3, groups=2), nn.ReLU()),
        iqat.ConvTransposeReLU2d,
        (2, 4, 6, 6),
    ),
    "ConvTransposeReLU3d": (
        lambda: nni.ConvTransposeReLU3d(nn.ConvTranspose3d(4, 3, 2), nn.ReLU()),
        iqat.ConvTransposeReLU3d,
        (2, 4, 3, 4, 5),
    ),
}
WITH_BN: dict[str, tuple[Any, type[nn.Module], tuple[int, ...]]] = {
    "ConvBn1d": (lambda: nni.ConvBn1d(nn.Conv1d(4, 3, 3), nn.BatchNorm1d(3)), iqat.ConvBn1d, (8, 4, 6)),
    "ConvBn2d": (lambda: nni.ConvBn2d(nn.Conv2d(4, 3, 3, bias=False), nn.BatchNorm2d(3)), iqat.ConvBn2d, (8, 4, 6, 6)),
    "ConvBn3d": (lambda: nni.ConvBn3d(nn.Conv3d(4, 3, 2), nn.BatchNorm3d(3)), iqat.ConvBn3d, (8, 4, 3, 4, 5)),
    "ConvBnReLU1d": (
        lambda: nni.ConvBnReLU1d(nn.Conv1d(4, 3, 3), nn.BatchNorm1d(3), nn.ReLU()),
        iqat.ConvBnReLU1d,
        (8, 4, 6),
    ),
    "ConvBnReLU2d": (
        lambda: nni.ConvBnReLU2d(nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3, momentum=None), nn.ReLU6()),
        iqat.ConvBnReLU2d,
        (8, 4, 6, 6),
    ),
    "ConvBnReLU3d": (
        lambda: nni.ConvBnReLU3d(nn.Conv3d(4, 3, 2), nn.BatchNorm3d(3), nn.ReLU()),
        iqat.ConvBnReLU3d,
        (8, 4, 3, 4, 5),
    ),
    "LinearBn1d": (lambda: nni.LinearBn1d(nn.Linear(4, 3), nn.BatchNorm1d(3)), iqat.LinearBn1d, (8, 4)),
}


def twin_of(make: Any, kind: type[nn.Module], qconfig: QConfig = default_per_channel_qat_qconfig) -> tuple[Any, Any]:
    """A float module and its QAT twin with parameters of its own."""
    layer = make()
    for module in layer.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            with torch.no_grad():
                module.weight.uniform_(-1.5, 1.5)
                module.bias.uniform_(-1, 1)
                module.running_mean.uniform_(-0.5, 0.5)
                module.running_var.uniform_(0.3, 2)
    source = copy.deepcopy(layer)
    source.qconfig = qconfig
    twin = kind.from_float(source)
    return layer, twin


@pytest.mark.parametrize("name", [*PLAIN, *WITH_BN])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_with_the_simulation_off_it_is_the_float_module(name: str, mode: str) -> None:
    make, kind, shape = {**PLAIN, **WITH_BN}[name]
    layer, twin = twin_of(make, kind)
    for module in (layer, twin):
        module.train(mode == "train")
    twin.apply(disable_fake_quant)
    x = torch.randn(shape)
    expected, y = layer(x), twin(x)
    assert type(twin) is kind
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    expected.square().sum().backward()
    y.square().sum().backward()
    ours = dict(twin.named_parameters())
    for theirs in layer.named_parameters():
        key = theirs[0].replace("0.", "").replace("1.", "bn.")
        torch.testing.assert_close(ours[key].grad, theirs[1].grad, rtol=1e-3, atol=1e-4)
    theirs_stats = [b for n, b in layer.named_buffers() if "running" in n]
    ours_stats = [b for n, b in twin.named_buffers() if "running" in n]
    for a, b in zip(ours_stats, theirs_stats, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*PLAIN, *WITH_BN])
def test_the_weight_is_rounded_and_still_trains(name: str) -> None:
    make, kind, shape = {**PLAIN, **WITH_BN}[name]
    layer, twin = twin_of(
        make, kind, QConfig(default_fake_quant, PerChannelFakeQuantize.with_args(quant_max=3, quant_min=-3))
    )
    x = torch.randn(shape)
    assert not torch.allclose(layer.eval()(x), twin.eval()(x))
    twin.train()(x).sum().backward()
    assert twin.weight.grad is not None
    assert torch.isfinite(twin.weight.grad).all()


@pytest.mark.parametrize("name", [*PLAIN, *WITH_BN])
def test_to_float_gives_the_float_module_back(name: str) -> None:
    make, kind, shape = {**PLAIN, **WITH_BN}[name]
    layer, twin = twin_of(make, kind)
    twin.eval()
    back = twin.to_float()
    x = torch.randn(shape)
    assert not back.training
    assert not hasattr(back, "weight_fake_quant")
    torch.testing.assert_close(back(x), layer.eval()(x), rtol=1e-4, atol=1e-5)
    assert not {id(p) for p in back.parameters()} & {id(p) for p in twin.parameters()}


@pytest.mark.parametrize("name", list(WITH_BN))
def test_eval_is_what_conversion_computes(name: str) -> None:
    make, kind, shape = WITH_BN[name]
    _, twin = twin_of(make, kind)
    twin.eval()
    x = torch.randn(shape)
    weight, bias = twin.folded_weight_bias()
    folded = twin.to_float()
    layer = folded[0] if isinstance(folded, nn.Sequential) else folded
    twin(x)
    layer.weight = nn.Parameter(twin.weight_fake_quant(weight).detach())
    layer.bias = nn.Parameter(bias)
    torch.testing.assert_close(folded(x), twin(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", list(WITH_BN))
def test_zero_batch_norm_weights_are_safe(name: str) -> None:
    make, kind, shape = WITH_BN[name]
    layer, twin = twin_of(make, kind)
    with torch.no_grad():
        for bn in [m for m in (*layer.modules(), *twin.modules()) if isinstance(m, nn.modules.batchnorm._BatchNorm)]:
            bn.weight[1] = 0.0
    twin.apply(disable_fake_quant)
    x = torch.randn(shape)
    for mode in (True, False):
        torch.testing.assert_close(twin.train(mode)(x), layer.train(mode)(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(twin.bn.running_var, layer[1].running_var, rtol=1e-4, atol=1e-5)
    twin.train()(x).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in twin.parameters())


def test_no_gradient_flows_through_the_rescale_factor() -> None:
    """A tiny batch norm weight must not blow the gradient up."""
    _, twin = twin_of(WITH_BN["ConvBn2d"][0], iqat.ConvBn2d)
    with torch.no_grad():
        twin.bn.weight.fill_(1e-6)
    twin.train()(torch.randn(8, 4, 6, 6)).square().sum().backward()
    assert twin.bn.weight.grad.abs().max() < 1e4
    assert twin.weight.grad.abs().max() < 1e4


def test_frozen_statistics_stay_frozen_through_train() -> None:
    _, twin = twin_of(WITH_BN["ConvBnReLU2d"][0], iqat.ConvBnReLU2d)
    x = torch.randn(8, 4, 6, 6)
    model = nn.Sequential(twin)
    model.apply(iqat.freeze_bn_stats)
    before = twin.bn.running_mean.clone()
    model.train()
    assert (twin.training, twin.bn.training) == (True, False)
    model(x)
    assert torch.equal(twin.bn.running_mean, before)
    observed = twin.weight_fake_quant.activation_post_process.min_val
    assert observed.numel()  # freezing statistics does not freeze the observers
    model.apply(iqat.update_bn_stats)
    model(x)
    assert not torch.equal(twin.bn.running_mean, before)
    assert not model.eval()[0].bn.training
    assert model.train()[0].bn.training


def test_frozen_observers_do_not_freeze_statistics() -> None:
    model = prepared_net()
    train(model, 2)
    model.apply(disable_observer)
    scale, mean = model.conv1.weight_fake_quant.scale.clone(), model.conv1.bn.running_mean.clone()
    train(model, 2)
    assert torch.equal(model.conv1.weight_fake_quant.scale, scale)
    assert not torch.equal(model.conv1.bn.running_mean, mean)


def test_constructors_take_torch_aos_arguments() -> None:
    conv = iqat.ConvBn2d(2, 4, 3, 1, 1, 1, 1, None, "zeros", 1e-3, 0.2, True, default_qat_qconfig)
    assert conv.bias is None
    assert (conv.bn.eps, conv.bn.momentum, conv.freeze_bn, conv.bn.training) == (1e-3, 0.2, True, False)
    assert iqat.LinearBn1d(2, 3, eps=1e-3).bn.eps == 1e-3
    assert iqat.ConvReLU1d(2, 3, 1, qconfig=default_qat_qconfig)(torch.randn(1, 2, 3)).shape == (1, 3, 3)
    conv.reset_bn_parameters()
    conv.reset_running_stats()


def test_without_a_qconfig_weights_get_a_grid_a_channel() -> None:
    fake = qat.Linear(2, 3).weight_fake_quant
    assert isinstance(fake, FakeQuantize)
    assert fake.is_per_channel
    assert fake.ch_axis == 0


@pytest.mark.parametrize(
    ("qconfig", "kind", "per_channel"),
    [
        (default_per_channel_qconfig, PerChannelFakeQuantize, True),
        (default_qconfig, FakeQuantize, False),
        (
            QConfig(
                default_fake_quant,
                MovingAveragePerChannelMinMaxObserver.with_args(
                    dtype=zp.qint8, qscheme=zp.per_channel_affine, quant_min=-100, quant_max=100
                ),
            ),
            PerChannelFakeQuantize,
            True,
        ),
    ],
)
def test_a_plain_weight_observer_is_wrapped_so_that_training_sees_the_grid(
    qconfig: QConfig, kind: type[nn.Module], per_channel: bool
) -> None:
    fake = qat.Linear(4, 3, qconfig=qconfig).weight_fake_quant
    observer = qconfig.weight()
    assert type(fake) is kind
    assert fake.is_per_channel is per_channel
    assert type(fake.activation_post_process) is type(observer)
    assert (fake.quant_min, fake.quant_max, fake.qscheme) == (observer.quant_min, observer.quant_max, observer.qscheme)
    weight = torch.randn(3, 4)
    assert not torch.equal(fake(weight), weight)


def test_a_round_trip_of_one_bare_module() -> None:
    """Swap one float layer, prepare, train, convert: the root is observed and swapped."""
    linear = nn.Linear(6, 4)
    linear.qconfig = default_per_channel_qconfig
    twin = qat.Linear.from_float(linear)
    twin.qconfig = default_per_channel_qconfig
    assert twin.weight is linear.weight
    twin = prepare(twin)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    x, y = torch.randn(32, 6), torch.randn(32, 4)
    for _ in range(5):
        loss = F.mse_loss(twin(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    quantized = convert(twin)
    assert type(quantized) is nnq.QuantizedLinear
    assert torch.equal(quantized.weight().q_per_channel_scales().float(), twin.weight_fake_quant.scale)
    q = zp.quantize_per_tensor(x, 0.03, 128, zp.quint8)
    assert (quantized(q).dequantize() - twin(q.dequantize())).abs().max() <= quantized.scale


def test_quantize_qat_does_all_steps() -> None:
    model = Net()
    model.qconfig = default_qat_qconfig
    quantized = quantize_qat(model, lambda m, steps: train(m, steps), (3,))
    assert type(quantized.conv1) is nnq.Conv2d
    assert type(quantized.bn1) is nnq.BatchNorm2d


def test_unfused_batch_norms_train_and_are_used_with_running_statistics() -> None:
    model = Net().train()
    model.qconfig = default_qat_qconfig
    prepared = prepare_qat(model)
    before = prepared.bn1.running_mean.clone()
    train(prepared, 10)
    assert not torch.equal(prepared.bn1.running_mean, before)
    prepared.eval()
    x, _ = data()
    expected = prepared(x)
    assert (convert(prepared)(x) - expected).abs().max() < 0.2 * expected.abs().max()


def test_sync_batch_norm_is_kept() -> None:
    prepared = nn.SyncBatchNorm.convert_sync_batchnorm(prepared_net())
    assert type(prepared.conv1.bn) is nn.SyncBatchNorm
    assert type(prepared.conv1) is iqat.ConvBnReLU2d
    prepared.eval()
    x, _ = data()
    assert torch.isfinite(prepared(x)).all()
    assert torch.isfinite(convert(prepared)(x)).all()


def test_a_transformer_layer_trains() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).train()
    layer.qconfig = default_qat_qconfig
    prepared = prepare_qat(layer)
    assert type(prepared.linear1) is type(prepared.self_attn.out_proj) is qat.Linear
    prepared(torch.randn(2, 3, 8)).sum().backward()
    assert prepared.self_attn.linear_Q.weight.grad is not None
    assert type(convert(prepared.eval()).self_attn) is nnq.MultiheadAttention


def test_attention_without_a_qconfig_stays_float_and_says_why() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).train()
    layer.qconfig, layer.self_attn.qconfig = default_qat_qconfig, None
    layer.self_attn.out_proj.qconfig = default_qat_qconfig
    prepared = prepare_qat(layer)
    assert type(prepared.self_attn) is nn.MultiheadAttention
    prepared(torch.randn(2, 3, 8)).sum().backward()
    quantized = convert(prepared.eval())
    assert "reads its weight" in quantized.quantization_summary.skipped["self_attn.out_proj"].reason


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.quant, self.layer, self.dequant = QuantStub(), layer, DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dequant(self.layer(self.quant(x))[0])
        return y


def test_an_lstm_trains_in_parts() -> None:
    layer = nn.LSTM(6, 8, bidirectional=True)
    model = Recurrent(layer).train()
    model.qconfig = default_per_channel_qat_qconfig
    calls = []
    model.layer.register_forward_hook(lambda *_: calls.append(1))
    prepared = prepare_qat(model, inplace=True)
    cell = prepared.layer.layers[0].layer_fw.cell
    assert type(cell.igates) is type(cell.hgates) is qat.Linear
    assert cell.igates.weight is layer.weight_ih_l0
    x = torch.randn(3, 4, 6)
    optimizer = torch.optim.SGD(prepared.parameters(), 2.0)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = (prepared(x) - 0.3).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    assert len(calls) == 8
    prepared.eval().apply(disable_observer)
    simulated = prepared(x).detach()
    quantized = convert(prepared)
    assert type(quantized.layer) is nnq.LSTM
    assert float((quantized(x) - simulated).abs().max()) < 0.05


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTMCell])
def test_other_recurrent_layers_stay_float_and_the_summary_says_what_to_do(kind: Any) -> None:
    model = Recurrent(kind(6, 8)).train()
    model.qconfig = default_qat_qconfig
    prepared = prepare_qat(model)
    prepared(torch.randn(4, 3, 6) if kind is not nn.LSTMCell else torch.randn(3, 6))
    quantized = convert(prepared.eval())
    assert type(quantized.layer) is kind
    assert "DeQuantStub" in quantized.quantization_summary.skipped["layer"].reason


def test_an_lstm_with_projections_is_refused_and_unchanged() -> None:
    model = Recurrent(nn.LSTM(6, 8, proj_size=3)).train()
    model.qconfig = default_qat_qconfig
    with pytest.raises(ValueError, match="no projections"):
        prepare_qat(model)
    assert type(model.layer) is nn.LSTM


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("form", ["hook", "parametrization"])
def test_weight_norm_is_baked_in_before_training(form: str) -> None:
    norm = nn.utils.weight_norm if form == "hook" else nn.utils.parametrizations.weight_norm
    model = nn.Sequential(norm(nn.Linear(4, 3)))
    expected = model(torch.eye(4))
    model.qconfig = default_qat_qconfig
    prepared = prepare_qat(model.train())
    prepared.apply(disable_fake_quant)
    torch.testing.assert_close(prepared(torch.eye(4)), expected)
    assert type(prepared[0].weight) is nn.Parameter
    assert not prepared[0]._forward_pre_hooks


def test_states_save_and_load() -> None:
    model = prepared_net()
    train(model, 3)
    other = prepared_net()
    other.load_state_dict(model.state_dict())
    x, _ = data()
    assert torch.equal(other.eval()(x), model.eval()(x))
    assert torch.equal(convert(other)(x), convert(copy.deepcopy(model))(x))


def test_autocast_trains() -> None:
    model = prepared_net()
    x, y = data()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


# --- embeddings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_embeddings_round_their_rows(kind: str) -> None:
    layer = getattr(nn, kind)(10, 4)
    layer.qconfig = default_embedding_qat_qconfig
    twin = getattr(qat, kind).from_float(layer)
    assert twin.weight is layer.weight
    index = torch.tensor([[1, 2, 3]])
    expected, y = layer(index), twin(index)
    assert 0 < (y - expected).abs().max() < 0.02
    y.sum().backward()
    assert twin.weight.grad is not None
    torch.testing.assert_close(twin.to_float()(index), expected)


def test_embeddings_need_floating_zero_points() -> None:
    layer = nn.Embedding(4, 2)
    layer.qconfig = default_qat_qconfig
    with pytest.raises(ValueError, match="floating zero points"):
        qat.Embedding.from_float(layer)


def test_fused_in_eval_or_in_training_gives_nearly_the_same_weights() -> None:
    """Folding before and keeping the batch norm until conversion meet."""
    model = Net()
    with torch.no_grad():
        model.train()(data()[0])
    folded = fuse_modules(model.eval(), ROWS)
    kept = fuse_modules_qat(copy.deepcopy(model).train(), ROWS)
    kept.qconfig = default_per_channel_qat_qconfig
    prepared = prepare_qat(kept)
    weight, bias = prepared.conv1.folded_weight_bias()
    torch.testing.assert_close(weight, folded.conv1[0].weight)
    torch.testing.assert_close(bias, folded.conv1[0].bias)


def test_activation_observers_of_a_calibration_work_in_training_modules() -> None:
    linear = qat.Linear(2, 2, qconfig=QConfig(MinMaxObserver, MinMaxObserver.with_args(dtype=zp.qint8)))
    prepared = prepare(linear)
    prepared(torch.randn(4, 2))
    assert type(convert(prepared)) is nnq.Linear
