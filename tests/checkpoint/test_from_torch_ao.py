"""Models of ``torch.ao`` in memory, made over: the same codes within one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropoint as zp
import zeropoint.ao.quantization as zq
from zeropoint import from_torch_ao

tq: Any = pytest.importorskip("torch.ao.quantization")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch.ao announces its removal at every call

ENGINE = "x86" if "x86" in torch.backends.quantized.supported_engines else "qnnpack"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant = tq.QuantStub()
        self.conv = nn.Conv2d(2, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU()
        self.point = nn.Conv2d(4, 4, 1, groups=2)
        self.norm = nn.BatchNorm2d(4)
        self.skip = torch.ao.nn.quantized.FloatFunctional()
        self.curves = nn.Sequential(nn.Hardswish(), nn.ELU(), nn.LeakyReLU(), nn.Sigmoid())
        self.head = nn.Linear(4, 3)
        self.dequant = tq.DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.conv(self.quant(x))))
        x = self.curves(self.skip.add(self.norm(self.point(x)), x))
        return self.dequant(self.head(x.mean((2, 3))))


def data() -> Tensor:
    return torch.randn(4, 2, 8, 8)


def prepared() -> nn.Module:
    model = Net().eval()
    tq.fuse_modules(model, [["conv", "bn", "relu"]], inplace=True)
    model.qconfig = tq.get_default_qconfig(ENGINE)
    tq.prepare(model, inplace=True)
    for _ in range(3):
        model(data())
    return model


def trained() -> nn.Module:
    model = Net().train()
    tq.fuse_modules_qat(model, [["conv", "bn", "relu"]], inplace=True)
    model.qconfig = tq.get_default_qat_qconfig(ENGINE)
    tq.prepare_qat(model, inplace=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(3):
        model(data()).square().sum().backward()
        optimizer.step()
    return model.eval().apply(tq.disable_observer)


def assert_ours(model: nn.Module) -> None:
    for name, part in model.named_modules():
        assert "torch.ao" not in type(part).__module__, name
        for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values()):
            assert "torch.ao" not in hook.__module__


def assert_within_one_code(ours: nn.Module, theirs: nn.Module, x: Tensor) -> None:
    steps = (ours(x) - theirs(x)) / theirs.head.scale
    assert steps.abs().max() < 1.001


def test_a_converted_model() -> None:
    theirs = tq.convert(prepared())
    before = copy.deepcopy(theirs.state_dict())
    ours = from_torch_ao(theirs)
    assert_ours(ours)
    assert_within_one_code(ours, theirs, data())
    assert theirs.state_dict().keys() == before.keys()
    assert "torch.ao" in type(theirs.conv).__module__


def test_a_calibrated_model_converts_to_the_same_codes() -> None:
    theirs = prepared()
    ours = from_torch_ao(theirs)
    assert_ours(ours)
    x = data()
    assert torch.equal(ours(x), theirs(x))
    assert_within_one_code(zq.convert(ours), tq.convert(theirs), data())


def test_a_trained_model_keeps_its_grids() -> None:
    theirs = trained()
    ours = from_torch_ao(theirs)
    assert_ours(ours)
    x = data()
    assert torch.allclose(ours(x), theirs(x), atol=1e-6)
    assert_within_one_code(zq.convert(ours), tq.convert(theirs), data())


def test_a_trained_model_goes_on_training() -> None:
    ours = from_torch_ao(trained()).train().apply(zq.enable_observer)
    before = ours.conv.weight_fake_quant.activation_post_process.max_val.clone()  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(ours.parameters(), 0.5)
    for _ in range(2):
        ours(data()).square().sum().backward()
        optimizer.step()
    assert not torch.equal(ours.conv.weight_fake_quant.activation_post_process.max_val, before)  # type: ignore[union-attr]


@pytest.mark.parametrize("fake", [tq.FakeQuantize, tq.FusedMovingAvgObsFakeQuantize], ids=lambda c: c.__name__)
def test_observers_and_fake_quantizers_by_themselves(fake: Any) -> None:
    options = {"quant_min": -100, "quant_max": 100, "dtype": torch.qint8, "qscheme": torch.per_channel_symmetric}
    theirs = fake(observer=tq.MovingAveragePerChannelMinMaxObserver, ch_axis=0, averaging_constant=0.25, **options)
    theirs(torch.randn(4, 3))
    ours = from_torch_ao(theirs)
    for _ in range(2):
        x = torch.randn(4, 3)
        assert torch.equal(ours(x), theirs(x))


def test_dynamic_linear_layers() -> None:
    theirs = tq.quantize_dynamic(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2, bias=False)).eval())
    ours = from_torch_ao(theirs)
    assert_ours(ours)
    x = torch.randn(7, 6)
    assert torch.allclose(ours(x), theirs(x), atol=1e-6)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_dynamic_recurrent_layers(kind: str) -> None:
    layer = getattr(nn, kind)(4, 6, num_layers=2, bidirectional=True, batch_first=True)
    theirs = tq.quantize_dynamic(nn.Sequential(layer).eval())
    ours = from_torch_ao(theirs)
    assert_ours(ours)
    x = torch.randn(2, 5, 4)
    assert (ours(x)[0] - theirs(x)[0]).abs().max() < 1 / 128


def test_normalizations() -> None:
    layers = [nn.LayerNorm([4, 5]), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True), nn.InstanceNorm1d(4)]
    model = nn.Sequential(tq.QuantStub(), *layers, tq.DeQuantStub()).eval()
    model.qconfig = tq.get_default_qconfig(ENGINE)
    tq.prepare(model, inplace=True)
    model(torch.randn(8, 4, 5))
    theirs = tq.convert(model)
    ours = from_torch_ao(theirs)
    assert_ours(ours)
    x = theirs[0](torch.randn(3, 4, 5))
    for i in range(1, 5):
        mine = ours[i](from_codes(x))  # type: ignore[index]
        x = theirs[i](x)
        assert (mine.int_repr().int() - x.int_repr().int()).abs().max() <= 1


def from_codes(x: Tensor) -> zp.QTensor:
    return zp.QTensor.from_codes(x.int_repr(), x.q_scale(), x.q_zero_point())


def test_a_module_that_stands_twice_in_a_model_does_so_afterwards() -> None:
    layer = tq.quantize_dynamic(nn.Sequential(nn.Linear(3, 3)))[0]
    ours = from_torch_ao(nn.ModuleDict({"a": layer, "b": nn.Sequential(layer)}))
    assert ours["a"] is ours["b"][0]  # type: ignore[index]


def test_hooks_of_the_user_stay() -> None:
    model = prepared()
    calls = []
    model.head.register_forward_hook(lambda module, args, output: calls.append(output.shape))
    ours = from_torch_ao(model)
    ours(data())
    assert calls == [(4, 3)]


def test_models_without_torch_ao_are_copied() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    ours = from_torch_ao(model)
    assert torch.equal(ours[0].weight, model[0].weight)  # type: ignore[index]
    assert ours is not model


def test_what_has_no_counterpart_is_named() -> None:
    model = nn.Sequential(torch.ao.nn.quantized.reference.Linear(2, 2))
    with pytest.raises(
        TypeError, match=r"^0 is a torch\.ao\.nn\.quantized\.reference.*Linear, which has no counterpart"
    ):
        from_torch_ao(model)
    with pytest.raises(TypeError, match="takes a module"):
        from_torch_ao(3)  # type: ignore[arg-type]


def test_state_dicts_of_torch_ao_load_as_they_are() -> None:
    theirs = tq.convert(prepared())
    ours = from_torch_ao(theirs)
    fresh = copy.deepcopy(ours)
    for part in fresh.modules():
        if isinstance(part, zp.ao.nn.quantized.Linear):
            part.set_weight_bias(zp.quantize_per_tensor(torch.zeros(3, 4), 1.0, 0, zp.qint8), torch.zeros(3))
    with torch.no_grad():
        missing = fresh.load_state_dict(theirs.state_dict(), strict=False)
    assert not missing.unexpected_keys
    x = data()
    assert torch.equal(fresh(x), ours(x))
