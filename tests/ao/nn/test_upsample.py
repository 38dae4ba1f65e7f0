"""Interpolation of quantized tensors: the input's grid, torch's positions, float64 between codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zeropoint as zp
from zeropoint.ao.quantization import QuantStub, convert, default_qconfig, prepare

SHAPES = {1: (2, 3, 7), 2: (2, 3, 5, 7), 3: (1, 2, 3, 4, 5)}
TARGETS: list[dict[str, Any]] = [{"scale_factor": 2}, {"scale_factor": 1.7}, {"scale_factor": 0.6}, {"size": 6}]
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


def on_grid(*shape: int, dtype: zp.QDtype = zp.quint8) -> zp.QTensor:
    torch.manual_seed(0)
    return zp.quantize_per_tensor(torch.randn(*shape), 1 / 32, 100 if dtype is zp.quint8 else -20, dtype)


@pytest.mark.parametrize("rank", SHAPES)
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("dtype", [zp.quint8, zp.qint8, zp.qint32], ids=lambda d: d.name)
def test_nearest_copies_the_codes_that_torch_picks(
    rank: int, target: dict[str, Any], mode: str, dtype: zp.QDtype
) -> None:
    x = on_grid(*SHAPES[rank], dtype=dtype)
    y = F.interpolate(x, mode=mode, **target)
    assert (y.q_scale(), y.q_zero_point(), y.dtype) == (x.q_scale(), x.q_zero_point(), dtype)
    assert torch.equal(y.int_repr().double(), F.interpolate(x.int_repr().double(), mode=mode, **target))


@pytest.mark.parametrize("rank", SHAPES)
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("align_corners", [False, True])
def test_linear_rounds_the_float64_interpolation(rank: int, target: dict[str, Any], align_corners: bool) -> None:
    x = on_grid(*SHAPES[rank])
    options = {"mode": LINEAR[rank], "align_corners": align_corners, **target}
    exact = F.interpolate(x.int_repr().double() - 100, **options)
    clear = (exact - exact.floor() - 0.5).abs() > 1e-9
    codes = F.interpolate(x, **options).int_repr().double()
    assert torch.equal(codes[clear], (torch.round(exact) + 100)[clear])
    assert bool(((codes - exact - 100).abs() <= 0.5 + 1e-9).all())


def test_recomputed_scale_factor_follows_the_sizes() -> None:
    x = on_grid(1, 2, 5, 5)
    options = {"scale_factor": 1.7, "mode": "nearest", "recompute_scale_factor": True}
    assert torch.equal(F.interpolate(x, **options).int_repr().double(), F.interpolate(x.int_repr().double(), **options))


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "area"])
def test_layouts_and_empty_batches(mode: str) -> None:
    x = on_grid(2, 3, 5, 6)
    expected = F.interpolate(x, size=(4, 9), mode=mode).int_repr()
    last = F.interpolate(x.contiguous(memory_format=torch.channels_last), size=(4, 9), mode=mode)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(last.int_repr(), expected)
    turned = x.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(F.interpolate(turned, size=(4, 9), mode=mode).int_repr(), expected)
    assert F.interpolate(x[:0], size=(4, 9), mode=mode).shape == (0, 3, 4, 9)
    assert F.interpolate(x[:, :1], size=1, mode=mode).shape == (2, 1, 1, 1)


def test_area_is_the_adaptive_average() -> None:
    x = on_grid(2, 3, 5, 6)
    assert torch.equal(F.interpolate(x, size=(2, 3), mode="area"), F.adaptive_avg_pool2d(x, (2, 3)))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"size": 4, "scale_factor": 2}, ValueError),
        ({}, ValueError),
        ({"size": (1, 2, 3)}, ValueError),
        ({"size": 4, "mode": "linear"}, ValueError),
        ({"size": 4, "align_corners": True}, ValueError),
        ({"size": 4, "mode": "bicubic"}, NotImplementedError),
        ({"size": 4, "mode": "bilinear", "antialias": True}, NotImplementedError),
        ({"size": 0}, ValueError),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        F.interpolate(on_grid(1, 2, 4, 4), **options)


def test_shape_function_agrees() -> None:
    codes = on_grid(2, 3, 5, 6).int_repr()
    for x in (codes, codes.contiguous(memory_format=torch.channels_last)):
        for mode in ("nearest", "linear"):
            arguments = (100, [4, 9], [1.25, 0.7], mode, False)
            planned = torch.ops.zeropoint.interpolate(x.to("meta"), *arguments)
            result = torch.ops.zeropoint.interpolate(x, *arguments)
            assert (planned.shape, planned.stride()) == (result.shape, result.stride())


KEEPERS: list[nn.Module] = [
    *(nn.Upsample(scale_factor=2), nn.Upsample(size=5, mode="bilinear"), nn.UpsamplingNearest2d(scale_factor=2)),
    *(nn.UpsamplingBilinear2d(scale_factor=2), nn.PixelShuffle(2), nn.PixelUnshuffle(2), nn.ChannelShuffle(2)),
    *(nn.ZeroPad2d(1), nn.ConstantPad2d(1, 0.5), nn.ReflectionPad2d(1), nn.ReplicationPad2d(1), nn.CircularPad2d(1)),
    *(nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Hardtanh(-0.5, 0.5)),
]


@pytest.mark.parametrize("layer", KEEPERS, ids=lambda layer: type(layer).__name__)
def test_modules_without_a_twin_run_on_codes_and_the_summary_says_so(layer: nn.Module) -> None:
    model = nn.Sequential(QuantStub(), layer).eval()
    model.qconfig = default_qconfig
    model = prepare(model)
    x = torch.randn(2, 4, 4, 4)
    model(x)
    model = convert(model)
    codes = model[0](x)
    y = model(x)
    assert (y.q_scale(), y.q_zero_point()) == (codes.q_scale(), codes.q_zero_point())
    assert (y.dequantize() - layer(codes.dequantize())).abs().max() <= 0.501 * y.q_scale()
    assert model.quantization_summary.skipped == {}
    assert "runs on codes, keeps the input's grid" in str(model.quantization_summary)
