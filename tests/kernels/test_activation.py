"""Functions of one quantized tensor: the nearest code of the float64 result, for every code and grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import zeropoint as zp
from zeropoint import grid
from zeropoint.ops import activation

FUNCTIONS: dict[str, tuple[Callable[..., zp.QTensor], Callable[[Tensor], Tensor]]] = {
    "sigmoid": (activation.sigmoid, torch.sigmoid),
    "hardsigmoid": (activation.hardsigmoid, F.hardsigmoid),
    "tanh": (activation.tanh, torch.tanh),
    "hardswish": (activation.hardswish, F.hardswish),
    "silu": (activation.silu, F.silu),
    "mish": (activation.mish, F.mish),
    "softplus": (
        lambda x, *g: activation.softplus(x, *g, beta=1.5, threshold=6.0),
        lambda x: F.softplus(x, 1.5, 6.0),
    ),
    "gelu": (activation.gelu, F.gelu),
    "gelu_tanh": (
        lambda x, *g: activation.gelu(x, *g, approximate="tanh"),
        lambda x: F.gelu(x, approximate="tanh"),
    ),
    "elu": (lambda x, *g: activation.elu(x, *g, alpha=0.7), lambda x: F.elu(x, 0.7)),
    "leaky_relu": (lambda x, *g: activation.leaky_relu(x, *g, negative_slope=0.2), lambda x: F.leaky_relu(x, 0.2)),
}
QDTYPES = (zp.qint8, zp.quint8, zp.qint32)

functions = pytest.mark.parametrize("name", FUNCTIONS)
qdtypes = pytest.mark.parametrize("qdtype", QDTYPES, ids=str)


def every_code(qdtype: zp.QDtype, scale: float, zero_point: int) -> zp.QTensor:
    """All 256 codes, or a stretch of 32-bit ones around the zero point."""
    if qdtype == zp.qint32:
        codes = (zero_point + torch.arange(-3000, 3000, 7)).to(torch.int32)
    else:
        codes = torch.arange(qdtype.qmin, qdtype.qmax + 1).to(qdtype.storage)
    return zp.QTensor.from_codes(codes, scale, zero_point)


def nearest_codes(real: Tensor, like: zp.QTensor) -> Tensor:
    codes = grid.quantize(real, like.scale, like.zero_point, like.qdtype.qmin, like.qdtype.qmax)
    return codes.to(like.qdtype.storage)


@functions
@qdtypes
def test_every_code(name: str, qdtype: zp.QDtype) -> None:
    ours, real = FUNCTIONS[name]
    for scale, zero_point in ((0.05, 0), (0.3, 100), (1e-3, 127)):
        q = every_code(qdtype, scale, zero_point)
        for out_grid in ((), (0.02, 50), (1e-9 if qdtype == zp.qint32 else 0.1, 3)):
            out = ours(q, *out_grid)
            assert out.qdtype == qdtype
            assert torch.equal(out.int_repr(), nearest_codes(real(q.dequantize(torch.float64)), out))


@pytest.mark.parametrize(
    ("name", "qdtype", "expected"),
    [
        ("sigmoid", zp.quint8, (1 / 256, 0)),
        ("sigmoid", zp.qint8, (1 / 256, -128)),
        ("hardsigmoid", zp.quint8, (1 / 256, 0)),
        ("hardsigmoid", zp.qint8, (1 / 256, -128)),
        ("tanh", zp.quint8, (1 / 128, 128)),
        ("tanh", zp.qint8, (1 / 128, 0)),
        ("sigmoid", zp.qint32, (2.0**-32, -(2**31))),
        ("tanh", zp.qint32, (2.0**-31, 0)),
        ("hardswish", zp.quint8, (0.05, 9)),
        ("gelu", zp.qint8, (0.05, 9)),
    ],
)
def test_grids_that_are_not_asked_for(name: str, qdtype: zp.QDtype, expected: tuple[float, int]) -> None:
    out = FUNCTIONS[name][0](every_code(qdtype, 0.05, 9))
    assert (out.q_scale(), out.q_zero_point()) == expected


@pytest.mark.parametrize(
    "call",
    [
        torch.sigmoid,
        torch.tanh,
        F.sigmoid,
        F.tanh,
        F.hardswish,
        F.hardsigmoid,
        F.gelu,
        F.silu,
        F.mish,
        F.softplus,
        F.elu,
        F.leaky_relu,
        torch.nn.Sigmoid(),
        torch.nn.Tanh(),
        torch.nn.Hardswish(),
        torch.nn.Hardsigmoid(),
        torch.nn.GELU("tanh"),
        torch.nn.SiLU(),
        torch.nn.Mish(),
        torch.nn.Softplus(0.5, 3),
        torch.nn.ELU(0.5),
        torch.nn.LeakyReLU(0.3),
    ],
    ids=lambda f: getattr(f, "__name__", str(f)),
)
@pytest.mark.filterwarnings("ignore:nn.functional.*is deprecated")
def test_torch_functions_and_modules(call: Callable[[Any], Any]) -> None:
    q = every_code(zp.quint8, 0.05, 100)
    out = call(q)
    assert torch.equal(out.int_repr(), nearest_codes(call(q.dequantize(torch.float64)), out))


@pytest.mark.parametrize("call", [F.hardswish, F.silu, F.mish, F.elu, F.leaky_relu, F.hardsigmoid])
def test_in_place(call: Callable[..., Any]) -> None:
    q = every_code(zp.quint8, 0.05, 100)
    expected = call(q.clone())
    assert call(q, inplace=True) is q
    assert torch.equal(q, expected)


@functions
def test_layout_is_kept(name: str) -> None:
    ours, _ = FUNCTIONS[name]
    codes = torch.randint(0, 256, (2, 3, 4, 5)).to(torch.uint8)
    plain = ours(zp.QTensor.from_codes(codes, 0.05, 100))
    last = ours(zp.QTensor.from_codes(codes.to(memory_format=torch.channels_last), 0.05, 100))
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(plain.int_repr(), last.int_repr())


@qdtypes
def test_prelu(qdtype: zp.QDtype) -> None:
    codes = every_code(qdtype, 1.0, 0).int_repr()[:252].reshape(2, 3, 6, -1)
    q = zp.QTensor.from_codes(codes, 0.05, 50)
    for slopes in (torch.tensor([0.25]), torch.tensor([0.1, -0.4, 3.0])):
        out = activation.prelu(q, slopes, 0.1, 60)
        real = F.prelu(q.dequantize(torch.float64), slopes.double())
        low, high = ((end - 60) * 0.1 for end in (qdtype.qmin, qdtype.qmax))
        assert (out.dequantize() - real.clamp(low, high)).abs().max() <= 0.0501
        assert torch.equal(F.prelu(q, slopes), activation.prelu(q, slopes))
    assert torch.equal(torch.nn.PReLU(3)(q).int_repr(), activation.prelu(q, torch.full((3,), 0.25)).int_repr())


@qdtypes
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax(qdtype: zp.QDtype, dim: int) -> None:
    q = zp.quantize_per_tensor(torch.randn(4, 5, 6) * 2, 0.05, 100, qdtype)
    out = activation.softmax(q, dim)
    assert torch.equal(out.int_repr(), nearest_codes(q.dequantize(torch.float64).softmax(dim), out))


@given(
    name=st.sampled_from(sorted(FUNCTIONS)),
    scale=st.floats(min_value=1e-6, max_value=1e6),
    zero_point=st.integers(0, 255),
    out_scale=st.floats(min_value=1e-6, max_value=1e6),
    out_zero_point=st.integers(0, 255),
)
def test_any_grid(name: str, scale: float, zero_point: int, out_scale: float, out_zero_point: int) -> None:
    ours, real = FUNCTIONS[name]
    q = every_code(zp.quint8, scale, zero_point)
    out = ours(q, out_scale, out_zero_point)
    assert torch.equal(out.int_repr(), nearest_codes(real(q.dequantize(torch.float64)), out))


def test_compiles_and_exports_without_tables() -> None:
    class Model(torch.nn.Module):
        def forward(self, codes: Tensor) -> Tensor:
            x = F.leaky_relu(zp.QTensor.from_codes(codes, 0.05, 100))
            return torch.sigmoid(activation.gelu(x, 0.03, 20)).int_repr()

    codes = torch.arange(256).to(torch.uint8).reshape(4, 64)
    expected = Model()(codes)
    assert torch.equal(torch.compile(Model(), fullgraph=True, backend="aot_eager")(codes), expected)
    program = torch.export.export(Model(), (codes,))
    assert torch.equal(program.module()(codes), expected)
    assert not program.constants


def test_errors_say_what_was_seen() -> None:
    q = every_code(zp.quint8, 0.05, 100)
    with pytest.raises(TypeError, match=r"sigmoid takes a quantized tensor, got torch\.float32"):
        activation.sigmoid(torch.ones(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs both scale and zero_point"):
        activation.tanh(q, 0.1)
    with pytest.raises(ValueError, match="scale must be finite and above 0"):
        activation.tanh(q, 0.0, 0)
    with pytest.raises(ValueError, match=r"zero_point must lie in \[0, 255\]"):
        activation.tanh(q, 0.1, -1)
    with pytest.raises(ValueError, match="approximate must be 'none' or 'tanh'"):
        activation.gelu(q, approximate="other")
    with pytest.raises(ValueError, match="a beta other than 0"):
        activation.softplus(q, beta=0)
    with pytest.raises(ValueError, match="needs 1 or 1 slopes"):
        activation.prelu(q, torch.ones(3))
    with pytest.raises(ValueError, match="dim 1 is out of range"):
        activation.softmax(q, 1)
    per_channel = zp.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2, dtype=torch.int64), 0)
    with pytest.raises(RuntimeError, match="per-tensor grids"):
        activation.sigmoid(per_channel)
