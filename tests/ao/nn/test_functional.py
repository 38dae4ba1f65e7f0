"""The functions of ``nn.quantized.functional``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import zeropoint as zp
from zeropoint.ao.nn.quantized import functional as qF

GRID = (0.05, 90)


def on_grid(*shape: int) -> zp.QTensor:
    torch.manual_seed(0)
    return zp.quantize_per_tensor(torch.randn(*shape), 1 / 32, 100, zp.quint8)


def weight(*shape: int, axis: int | None = None) -> zp.QTensor:
    torch.manual_seed(1)
    values = torch.randn(*shape) * 0.3
    if axis is None:
        return zp.quantize_per_tensor(values, 0.01, 0, zp.qint8)
    scales = torch.rand(shape[axis]) * 0.01 + 0.005
    return zp.quantize_per_channel(values, scales, torch.zeros(shape[axis], dtype=torch.int64), axis, zp.qint8)


def assert_rounds(y: zp.QTensor, real: Tensor) -> None:
    """``y`` is the float64 result rounded once to its grid."""
    assert y.shape == real.shape
    low, high = y.dtype.qmin - y.q_zero_point(), y.dtype.qmax - y.q_zero_point()
    place = (real.double() / y.q_scale()).clamp(low, high)
    assert float((y.int_repr().double() - y.q_zero_point() - place).abs().max()) <= 0.5 + 1e-3


@pytest.mark.parametrize("axis", [None, 0])
def test_linear(axis: int | None) -> None:
    x, w, b = on_grid(3, 8), weight(5, 8, axis=axis), torch.randn(5)
    real = F.linear(x.dequantize().double(), w.dequantize().double(), b.double())
    assert_rounds(qF.linear(x, w, b, *GRID), real)
    kept = qF.linear(x, w, b)
    assert (kept.q_scale(), kept.q_zero_point()) == (x.q_scale(), x.q_zero_point())
    assert_rounds(kept, real)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("per_channel", [False, True])
def test_convolutions(rank: int, per_channel: bool) -> None:
    x, b = on_grid(2, 4, *[6] * rank), torch.randn(6)
    w = weight(6, 2, *[3] * rank, axis=0 if per_channel else None)
    exact = getattr(F, f"conv{rank}d")(x.dequantize().double(), w.dequantize().double(), b.double(), 2, 1, 1, 2)
    assert_rounds(getattr(qF, f"conv{rank}d")(x, w, b, 2, 1, 1, 2, scale=0.1, zero_point=120), exact)
    w = weight(4, 3, *[3] * rank, axis=1 if per_channel else None)
    name = f"conv_transpose{rank}d"
    exact = getattr(F, name)(x.dequantize().double(), w.dequantize().double(), b.double(), 2, 1, 1, 2)
    y = getattr(qF, name)(x, w, b, 2, 1, 1, 2, scale=0.1, zero_point=0, dtype=zp.qint8)
    assert y.dtype == zp.qint8
    assert_rounds(y, exact)


ON_THE_INPUTS_GRID: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[int, ...]]] = {
    "relu": (qF.relu, F.relu, (3, 4)),
    "relu6": (qF.relu6, F.relu6, (3, 4)),
    "hardtanh": (lambda x: qF.hardtanh(x, -0.5, 0.75), lambda x: F.hardtanh(x, -0.5, 0.75), (3, 4)),
    "clamp": (lambda x: qF.clamp(x, -0.5, 0.75), lambda x: torch.clamp(x, -0.5, 0.75), (3, 4)),
    "threshold": (lambda x: qF.threshold(x, 0.3, -0.5), lambda x: F.threshold(x, 0.3, -0.5), (3, 4)),
    "leaky_relu": (lambda x: qF.leaky_relu(x, 0.2), lambda x: F.leaky_relu(x, 0.2), (3, 4)),
    "max_pool1d": (lambda x: qF.max_pool1d(x, 2), lambda x: F.max_pool1d(x, 2), (2, 3, 7)),
    "max_pool2d": (lambda x: qF.max_pool2d(x, 3, 2, 1), lambda x: F.max_pool2d(x, 3, 2, 1), (2, 3, 7, 6)),
    "max_pool3d": (lambda x: qF.max_pool3d(x, 2), lambda x: F.max_pool3d(x, 2), (2, 3, 4, 4, 4)),
    "avg_pool1d": (lambda x: qF.avg_pool1d(x, 2), lambda x: F.avg_pool1d(x, 2), (2, 3, 7)),
    "avg_pool2d": (lambda x: qF.avg_pool2d(x, 3, 2, 1), lambda x: F.avg_pool2d(x, 3, 2, 1), (2, 3, 7, 6)),
    "avg_pool3d": (lambda x: qF.avg_pool3d(x, 2), lambda x: F.avg_pool3d(x, 2), (2, 3, 4, 4, 4)),
    "adaptive_avg_pool1d": (lambda x: qF.adaptive_avg_pool1d(x, 3), lambda x: F.adaptive_avg_pool1d(x, 3), (2, 3, 7)),
    "adaptive_avg_pool2d": (
        lambda x: qF.adaptive_avg_pool2d(x, (2, 3)),
        lambda x: F.adaptive_avg_pool2d(x, (2, 3)),
        (2, 3, 5, 6),
    ),
    "adaptive_avg_pool3d": (
        lambda x: qF.adaptive_avg_pool3d(x, 2),
        lambda x: F.adaptive_avg_pool3d(x, 2),
        (2, 3, 5, 4, 4),
    ),
    "interpolate": (
        lambda x: qF.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        (2, 3, 5, 6),
    ),
    "pad": (lambda x: qF.pad(x, (1, 2)), lambda x: F.pad(x, (1, 2)), (2, 3)),
}


@pytest.mark.parametrize("name", ON_THE_INPUTS_GRID)
def test_functions_on_the_inputs_grid(name: str) -> None:
    ours, floating, shape = ON_THE_INPUTS_GRID[name]
    x = on_grid(*shape)
    y = ours(x)
    assert (y.q_scale(), y.q_zero_point(), y.dtype) == (x.q_scale(), x.q_zero_point(), x.dtype)
    assert_rounds(y, floating(x.dequantize().double()))
    with pytest.raises(TypeError, match="quantized tensor"):
        ours(x.dequantize())


CURVES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "elu": (lambda x: qF.elu(x, *GRID, 0.7), lambda x: F.elu(x, 0.7)),
    "celu": (lambda x: qF.celu(x, *GRID, 0.7), lambda x: F.celu(x, 0.7)),
    "gelu": (lambda x: qF.gelu(x, *GRID), F.gelu),
    "hardsigmoid": (qF.hardsigmoid, F.hardsigmoid),
    "hardswish": (lambda x: qF.hardswish(x, *GRID), F.hardswish),
    "leaky_relu": (lambda x: qF.leaky_relu(x, 0.3, False, *GRID), lambda x: F.leaky_relu(x, 0.3)),
    "sigmoid": (qF.sigmoid, torch.sigmoid),
    "silu": (lambda x: qF.silu(x, *GRID), F.silu),
    "mish": (lambda x: qF.mish(x, *GRID), F.mish),
    "softplus": (lambda x: qF.softplus(x, *GRID, 2.0, 5.0), lambda x: F.softplus(x, 2.0, 5.0)),
    "softmax": (lambda x: qF.softmax(x, 1), lambda x: torch.softmax(x, 1)),
    "tanh": (qF.tanh, torch.tanh),
}


@pytest.mark.parametrize("name", CURVES)
def test_curves_round_once(name: str) -> None:
    ours, floating = CURVES[name]
    x = on_grid(4, 16)
    assert_rounds(ours(x), floating(x.dequantize().double()))
    with pytest.raises(TypeError, match="quantize"):
        ours(x.dequantize())


def test_in_place_and_grids() -> None:
    x = on_grid(8)
    before = x.dequantize()
    assert qF.leaky_relu(x, 0.1, True) is x
    assert_rounds(x, F.leaky_relu(before.double(), 0.1))
    with pytest.raises(ValueError, match="in place"):
        qF.leaky_relu(x, 0.1, True, *GRID)


@pytest.mark.parametrize("name", ["upsample", "upsample_nearest", "upsample_bilinear"])
def test_old_names_warn(name: str) -> None:
    x = on_grid(1, 2, 3, 4)
    with pytest.warns(UserWarning, match="use interpolate"):
        y = getattr(qF, name)(x, scale_factor=2)
    options = {"mode": "bilinear", "align_corners": True} if name.endswith("bilinear") else {}
    assert torch.equal(y, qF.interpolate(x, scale_factor=2, **options))


def test_wrong_weights_are_refused() -> None:
    x = on_grid(1, 4, 5, 5)
    with pytest.raises(TypeError, match="qint8 weight"):
        qF.conv2d(x, torch.randn(2, 4, 3, 3), None)
    with pytest.raises(ValueError, match="axis 0"):
        qF.conv2d(x, weight(2, 4, 3, 3, axis=1), None)
    with pytest.raises(ValueError, match="axis 1"):
        qF.conv_transpose2d(x, weight(4, 2, 3, 3, axis=0), None)
    with pytest.raises(ValueError, match="axis 0"):
        qF.linear(on_grid(2, 4), weight(3, 4, axis=1))


def test_every_public_name_has_a_docstring() -> None:
    assert [name for name in qF.__all__ if not getattr(qF, name).__doc__] == []
    assert sorted(qF.__all__) == qF.__all__
