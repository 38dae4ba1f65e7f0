"""fuse_modules: what fuses, what it computes, what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zeropoint.ao.nn import intrinsic as nni
from zeropoint.ao.quantization import fuse_modules, fuse_modules_qat, get_fuser_method
from zeropoint.ao.quantization.fusing import fold_batch_norm


def with_statistics(model: nn.Module, x: Tensor) -> nn.Module:
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.weight.uniform_(-1.5, 1.5)
                module.bias.uniform_(-1, 1)
                module.running_mean.uniform_(-1, 1)
                module.running_var.uniform_(0.1, 3)
    return model.eval()


EVAL: dict[str, tuple[Any, tuple[int, ...], type[nn.Module]]] = {
    "conv1d bn": (lambda: (nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)), (2, 3, 8), nn.Conv1d),
    "conv2d bn": (lambda: (nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)), (2, 3, 8, 8), nn.Conv2d),
    "conv3d bn": (lambda: (nn.Conv3d(3, 4, 3), nn.BatchNorm3d(4)), (2, 3, 5, 5, 5), nn.Conv3d),
    "conv1d bn relu": (lambda: (nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU()), (2, 3, 8), nni.ConvReLU1d),
    "conv2d bn relu": (lambda: (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), (2, 3, 8, 8), nni.ConvReLU2d),
    "conv2d bn relu6": (lambda: (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU6()), (2, 3, 8, 8), nni.ConvReLU2d),
    "conv3d bn relu": (lambda: (nn.Conv3d(3, 4, 3), nn.BatchNorm3d(4), nn.ReLU()), (2, 3, 5, 5, 5), nni.ConvReLU3d),
    "conv2d syncbn": (lambda: (nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4)), (2, 3, 8, 8), nn.Conv2d),
    "conv2d relu": (lambda: (nn.Conv2d(3, 4, 3), nn.ReLU()), (2, 3, 8, 8), nni.ConvReLU2d),
    "linear bn": (lambda: (nn.Linear(3, 4), nn.BatchNorm1d(4)), (5, 3), nn.Linear),
    "linear relu": (lambda: (nn.Linear(3, 4), nn.ReLU()), (5, 3), nni.LinearReLU),
    "linear bn relu": (lambda: (nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU()), (5, 3), nni.LinearReLU),
    "bn2d relu": (lambda: (nn.BatchNorm2d(3), nn.ReLU()), (2, 3, 8, 8), nni.BNReLU2d),
    "bn3d relu": (lambda: (nn.BatchNorm3d(3), nn.ReLU()), (2, 3, 4, 4, 4), nni.BNReLU3d),
    "convt1d bn": (lambda: (nn.ConvTranspose1d(3, 4, 3), nn.BatchNorm1d(4)), (2, 3, 8), nn.ConvTranspose1d),
    "convt2d bn grouped": (
        lambda: (nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)),
        (2, 4, 5, 5),
        nn.ConvTranspose2d,
    ),
    "convt3d bn": (lambda: (nn.ConvTranspose3d(3, 4, 2), nn.BatchNorm3d(4)), (2, 3, 3, 3, 3), nn.ConvTranspose3d),
}


@pytest.mark.parametrize("name", list(EVAL))
def test_the_fused_model_computes_the_same(name: str) -> None:
    make, shape, kind = EVAL[name]
    x = torch.randn(shape)
    model = with_statistics(nn.Sequential(*make()), x)
    names = [str(i) for i in range(len(model))]
    fused = fuse_modules(model, names)
    torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-4)
    assert type(fused[0]) is kind
    assert all(type(fused[i]) is nn.Identity for i in range(1, len(names)))
    assert not any(module.training for module in fused.modules())


TRAIN: dict[str, tuple[Any, type[nn.Module]]] = {
    "conv1d bn": (lambda: (nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)), nni.ConvBn1d),
    "conv2d bn": (lambda: (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), nni.ConvBn2d),
    "conv3d bn": (lambda: (nn.Conv3d(3, 4, 3), nn.BatchNorm3d(4)), nni.ConvBn3d),
    "conv1d bn relu": (lambda: (nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU()), nni.ConvBnReLU1d),
    "conv2d bn relu": (lambda: (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU6()), nni.ConvBnReLU2d),
    "conv3d bn relu": (lambda: (nn.Conv3d(3, 4, 3), nn.BatchNorm3d(4), nn.ReLU()), nni.ConvBnReLU3d),
    "conv2d relu": (lambda: (nn.Conv2d(3, 4, 3), nn.ReLU()), nni.ConvReLU2d),
    "linear bn": (lambda: (nn.Linear(3, 4), nn.BatchNorm1d(4)), nni.LinearBn1d),
    "linear bn relu": (lambda: (nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU()), nn.Sequential),
    "linear relu": (lambda: (nn.Linear(3, 4), nn.ReLU()), nni.LinearReLU),
    "bn2d relu": (lambda: (nn.BatchNorm2d(3), nn.ReLU()), nni.BNReLU2d),
}


@pytest.mark.parametrize("name", list(TRAIN))
def test_training_keeps_the_batch_norm(name: str) -> None:
    make, kind = TRAIN[name]
    model = nn.Sequential(*make())
    fused = fuse_modules_qat(model, [str(i) for i in range(len(model))])
    assert type(fused[0]) is kind
    kinds = {type(m) for m in model} - {nn.Identity}
    assert kinds <= {type(m) for m in fused.modules()}
    assert all(module.training for module in fused.modules())


def test_parameters_stay_the_same_objects_when_fused_in_place() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    conv, bn = model
    fuse_modules_qat(model, ["0", "1"], inplace=True)
    assert model[0][0] is conv
    assert model[0][1] is bn


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.relu = nn.ReLU()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.relu(self.stem(x)))


def test_dotted_names_and_lists_of_rows() -> None:
    x = torch.randn(2, 3, 5, 5)
    model = with_statistics(Nested(), x)
    fused = fuse_modules(model, [["stem.0", "stem.1", "relu"]])
    assert type(fused.stem[0]) is nni.ConvReLU2d
    torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-4)
    assert type(model.relu) is nn.ReLU


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (["stem.0", "nothing"], ValueError, "no module 'nothing'"),
        (["stem.0", "conv"], NotImplementedError, r"cannot fuse \['stem.0', 'conv'\].*\(Conv2d, Conv2d\)"),
        (["stem.0"], ValueError, "two modules or more"),
        (["relu", "relu"], ValueError, "appears twice"),
    ],
)
def test_what_does_not_fuse_is_named_and_nothing_changes(rows: list[str], error: type[Exception], message: str) -> None:
    model = Nested().eval()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        fuse_modules(model, [["stem.0", "stem.1"], rows], inplace=True)
    assert model.state_dict().keys() == before.keys()
    assert type(model.stem[1]) is nn.BatchNorm2d


def test_the_mode_must_fit() -> None:
    with pytest.raises(ValueError, match=r"\['stem.0', 'stem.1'\].*model.eval\(\)"):
        fuse_modules(Nested(), ["stem.0", "stem.1"])
    with pytest.raises(ValueError, match=r"\['stem.0', 'stem.1'\].*model.train\(\)"):
        fuse_modules_qat(Nested().eval(), ["stem.0", "stem.1"])


def test_channels_and_statistics_must_fit() -> None:
    with pytest.raises(ValueError, match="5 channels behind a layer of 4"):
        fuse_modules(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(5)).eval(), ["0", "1"])
    with pytest.raises(ValueError, match="no running statistics"):
        fuse_modules(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)).eval(), ["0", "1"])
    with pytest.raises(ValueError, match="affine=True"):
        fuse_modules_qat(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False)), ["0", "1"])


def test_a_batch_norm_without_parameters_folds() -> None:
    x = torch.randn(2, 3, 5, 5)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False)).eval()
    torch.testing.assert_close(fuse_modules(model, ["0", "1"])(x), model(x), rtol=1e-4, atol=1e-4)


def test_zero_batch_norm_weights_fold_to_zero() -> None:
    bn = nn.BatchNorm1d(2)
    nn.init.zeros_(bn.weight)
    weight, bias = fold_batch_norm(torch.ones(2, 3), None, bn)
    assert torch.equal(weight, torch.zeros(2, 3))
    assert torch.equal(bias, torch.zeros(2))


def test_subclasses_fuse_and_own_fusers_are_asked() -> None:
    class MyConv(nn.Conv2d):
        pass

    model = nn.Sequential(MyConv(3, 4, 3), nn.ReLU()).eval()
    assert type(fuse_modules(model, ["0", "1"])[0]) is nni.ConvReLU2d
    table = {(nn.Linear, nn.GELU): lambda is_qat, linear, gelu: nn.Sequential(linear, gelu)}
    own = fuse_modules(
        nn.Sequential(nn.Linear(2, 2), nn.GELU()).eval(),
        ["0", "1"],
        fuse_custom_config_dict={"additional_fuser_method_mapping": table},
    )
    assert type(own[0]) is nn.Sequential
    assert get_fuser_method((nn.Linear, nn.GELU), table) is table[(nn.Linear, nn.GELU)]


def test_a_rectifier_shared_by_two_convolutions_stays_for_the_other() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu_a = self.relu_b = nn.ReLU()
            self.a, self.b = nn.Conv1d(2, 2, 1), nn.Conv1d(2, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.relu_b(self.b(self.relu_a(self.a(x))))

    model, x = Shared().eval(), torch.randn(2, 2, 5)
    fused = fuse_modules(model, ["a", "relu_a"])
    assert type(fused.relu_b) is nn.ReLU
    torch.testing.assert_close(fused(x), model(x))


def test_a_qconfig_stays_with_the_fused_module() -> None:
    model = Nested().eval()
    model.stem[0].qconfig = "marker"
    assert fuse_modules(model, ["stem.0", "stem.1"]).stem[0].qconfig == "marker"
