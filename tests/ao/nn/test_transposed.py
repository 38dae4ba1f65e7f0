"""Quantized transposed convolutions: from float, grids an output channel, fusing, saving."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zeropoint as zp
from zeropoint.ao.nn import intrinsic as nni
from zeropoint.ao.nn import quantized as nnq
from zeropoint.ao.quantization import (
    QuantStub,
    convert,
    default_per_channel_qconfig,
    default_qconfig,
    fuse_modules,
    prepare,
)
from zeropoint.tensor import QTensor

PAIRS = [
    (nn.ConvTranspose1d, nnq.ConvTranspose1d, F.conv_transpose1d),
    (nn.ConvTranspose2d, nnq.ConvTranspose2d, F.conv_transpose2d),
    (nn.ConvTranspose3d, nnq.ConvTranspose3d, F.conv_transpose3d),
]


def converted(layer: nn.Module, x: Tensor, qconfig: Any = default_per_channel_qconfig) -> tuple[Any, QTensor]:
    """The quantized twin after calibration on ``x``, and ``x`` as its stub quantizes it."""
    model = nn.Sequential(QuantStub(), layer).eval()
    model.qconfig = qconfig
    model = prepare(model)
    model(x)
    model = convert(model)
    return model[1], model[0](x)


def real_weight(module: Any) -> Tensor:
    """The float64 weight in the float module's layout, computed from the state alone."""
    state = module.state_dict()
    codes = state["weight"].double().unflatten(0, (module.groups, -1))
    scale = state["weight_scale"].double().expand(module.out_channels)
    scale = scale.reshape(module.groups, 1, -1, *[1] * module.RANK)
    return (codes * scale).flatten(0, 1)


@pytest.mark.parametrize(("float_class", "twin_class", "function"), PAIRS)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("qconfig", [default_qconfig, default_per_channel_qconfig], ids=["one grid", "per channel"])
def test_twin_computes_what_its_integers_say(
    float_class: Any, twin_class: Any, function: Any, groups: int, qconfig: Any
) -> None:
    torch.manual_seed(0)
    layer = float_class(4, 6, 3, stride=2, padding=1, output_padding=1, groups=groups)
    x = torch.randn(2, 4, *[5] * twin_class.RANK)
    module, codes = converted(layer, x, qconfig)
    assert type(module) is twin_class
    bias = module.state_dict()["bias"].double()
    real = function(codes.dequantize().double(), real_weight(module), bias, 2, 1, 1, groups)
    place = real / module.scale
    clear = (place - place.floor() - 0.5).abs() > 1e-4
    expected = (torch.round(place) + module.zero_point).clamp(0, 255)
    assert bool(clear.float().mean() > 0.99)
    assert torch.equal(module(codes).int_repr()[clear].double(), expected[clear])


@pytest.mark.parametrize("groups", [1, 3])
def test_every_output_channel_has_a_grid_of_its_own(groups: int) -> None:
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(6, 9, 3, groups=groups)
    spread = torch.logspace(-3, 0, 9)
    with torch.no_grad():
        layer.weight.copy_(
            (layer.weight.unflatten(0, (groups, -1)) * spread.reshape(groups, 1, -1, 1, 1)).flatten(0, 1)
        )
    module, _ = converted(layer, torch.randn(2, 6, 4, 4))
    assert module.state_dict()["weight"].shape == layer.weight.shape
    assert module.state_dict()["weight_scale"].shape == (9,)
    error = (real_weight(module) - layer.weight.detach().double()).abs().unflatten(0, (groups, -1)).amax((1, 3, 4))
    assert bool((error.reshape(-1) <= module.state_dict()["weight_scale"].double() / 2 * 1.001).all())


def test_weight_reads_in_the_layout_that_its_grids_allow() -> None:
    x = torch.randn(2, 4, 4, 4)
    plain, _ = converted(nn.ConvTranspose2d(4, 6, 3), x)
    assert (plain.weight.shape, plain.weight().q_per_channel_axis()) == ((4, 6, 3, 3), 1)
    grouped, _ = converted(nn.ConvTranspose2d(4, 6, 3, groups=2), x)
    assert (grouped.weight.shape, grouped.weight().q_per_channel_axis()) == ((6, 2, 3, 3), 0)
    for module in (plain, grouped):
        before = module.state_dict()
        module.set_weight_bias(module.weight(), module.bias())
        assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_weight_with_grids_along_dimension_one_counts_for_every_group() -> None:
    module = nnq.ConvTranspose1d(4, 6, 2, groups=2)
    weight = zp.quantize_per_channel(
        torch.randn(4, 3, 2), torch.tensor([0.1, 0.2, 0.3]), torch.zeros(3, dtype=torch.int64), 1, zp.qint8
    )
    module.set_weight_bias(weight, None)
    assert torch.equal(module.state_dict()["weight_scale"], torch.tensor([0.1, 0.2, 0.3]).repeat(2))


def test_wrong_weights_leave_the_module_unchanged() -> None:
    module = nnq.ConvTranspose2d(4, 6, 3, groups=2)
    before = copy.deepcopy(module.state_dict())
    one_grid = zp.quantize_per_tensor(torch.randn(6, 2, 3, 3), 0.1, 0, zp.qint8)
    by_row = zp.quantize_per_channel(
        torch.randn(4, 3, 3, 3), torch.ones(4), torch.zeros(4, dtype=torch.int64), 0, zp.qint8
    )
    by_kernel = zp.quantize_per_channel(
        torch.randn(4, 3, 3, 3), torch.ones(3), torch.zeros(3, dtype=torch.int64), 2, zp.qint8
    )
    for weight in (one_grid, by_row, by_kernel):
        with pytest.raises(ValueError):
            module.set_weight_bias(weight, None)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_output_size_chooses_among_the_sizes_that_a_stride_leaves_open() -> None:
    layer = nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1)
    module, codes = converted(layer, torch.randn(1, 3, 5, 5))
    assert module(codes).shape == (1, 4, 9, 9)
    assert module(codes, output_size=[10, 9]).shape == (1, 4, 10, 9)
    assert module(codes, output_size=[1, 4, 10, 10]).shape == (1, 4, 10, 10)
    for size in ([11, 9], [9]):
        with pytest.raises(ValueError, match="output_size"):
            module(codes, output_size=size)


@pytest.mark.parametrize(
    ("float_class", "norm"), [(nn.ConvTranspose1d, nn.BatchNorm1d), (nn.ConvTranspose2d, nn.BatchNorm2d)]
)
@pytest.mark.parametrize("groups", [1, 2])
def test_batch_norm_is_folded(float_class: Any, norm: Any, groups: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(QuantStub(), float_class(4, 6, 3, stride=2, groups=groups), norm(6), nn.ReLU())
    x = torch.randn(8, 4, *[6] * (len(model[1].kernel_size)))
    model(x)
    model.eval()
    wanted = model(x).detach()
    fused = fuse_modules(model, [["1", "2"]])
    assert torch.allclose(fused(x), wanted, atol=1e-5)
    whole = fuse_modules(model, [["1", "2", "3"]])
    assert isinstance(whole[1], (nni.ConvTransposeReLU1d, nni.ConvTransposeReLU2d))
    whole.qconfig = default_per_channel_qconfig
    prepared = prepare(whole)
    prepared(x)
    quantized = convert(prepared)
    assert quantized[1]._get_name() == f"Quantized{type(whole[1]).__name__}"
    out = quantized(x).dequantize()
    assert float((out - wanted).pow(2).mean().sqrt()) < 0.02 * float(wanted.abs().max())


@pytest.mark.parametrize(
    "arguments",
    [(0, 4, 3), (4, 0, 3), (4, 6, 3, 1, 0, 0, 4), (4, 6, 3, 1, 0, 0, 1, True, 1, "reflect"), (4, 6, (3, 3, 3))],
)
def test_arguments_that_make_no_layer_are_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError):
        nnq.ConvTranspose2d(*arguments)


def test_float_input_is_refused_with_the_cure() -> None:
    with pytest.raises(TypeError, match="QuantStub"):
        nnq.ConvTranspose2d(3, 3, 3)(torch.zeros(1, 3, 4, 4))


def test_uncalibrated_and_foreign_modules_are_refused() -> None:
    with pytest.raises(RuntimeError):
        nnq.ConvTranspose2d.from_float(nn.ConvTranspose2d(3, 3, 3))
    with pytest.raises(TypeError):
        nnq.ConvTranspose2d.from_float(nn.Conv2d(3, 3, 3))
