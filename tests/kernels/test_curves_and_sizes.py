"""Native PReLU, softmax, interpolation, division and matrix products: the reference's integers, codes and layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zeropoint import backends
from zeropoint.ops import activation, arithmetic, interpolate

pytestmark = pytest.mark.skipif(not backends.is_native(), reason="the native library is not built")
OPS = torch.ops.zeropoint
STORAGE = (torch.int8, torch.uint8, torch.int32)
REFERENCES: dict[str, Any] = {
    "prelu": activation.prelu_reference,
    "softmax": activation.softmax_reference,
    "interpolate": interpolate.interpolate_reference,
    "div": arithmetic.div_reference,
    "matmul": arithmetic.matmul_reference,
}
dtypes = pytest.mark.parametrize("dtype", STORAGE, ids=str)


def codes(dtype: torch.dtype, *shape: int) -> Tensor:
    limits = torch.iinfo(dtype) if dtype != torch.int32 else torch.iinfo(torch.int16)
    return torch.randint(limits.min, limits.max + 1, shape).to(dtype)


def ends(dtype: torch.dtype) -> tuple[int, int]:
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def layouts(x: Tensor) -> list[Tensor]:
    made = [x, x.transpose(-1, 0).contiguous().transpose(-1, 0), torch.stack([x, x], -1)[..., 0]]
    if x.dim() >= 3:
        made.append(x.movedim(1, -1).contiguous().movedim(-1, 1))
    return made


def assert_native(name: str, *arguments: Any) -> Tensor:
    native: Tensor = getattr(OPS, name).default(*arguments)
    known = REFERENCES[name](*arguments)
    assert native.dtype == known.dtype
    assert native.shape == known.shape
    assert native.stride() == known.stride()
    assert torch.equal(native, known)
    return native


@dtypes
def test_prelu(dtype: torch.dtype, isa: str, threads: int) -> None:
    low, high = ends(dtype)
    for shape in ((2, 3, 5, 7), (1, 3, 40, 33), (4, 3), (7,), (0, 3, 2), (2, 3, 0)):
        slopes = [torch.tensor([0.25]), *([torch.tensor([0.1, -0.4, 30.0])] if len(shape) > 1 else [])]
        for x in layouts(codes(dtype, *shape)):
            for slope in slopes:
                assert_native("prelu", x, 0.05, 7, slope, 0.02, -3 if low < 0 else 9, low, high, dtype)


@dtypes
def test_softmax(dtype: torch.dtype, threads: int) -> None:
    for shape in ((4, 5, 6), (2, 300), (), (3, 0), (0, 3), (40, 3, 65)):
        for x in layouts(codes(dtype, *shape)) if shape else [codes(dtype)]:
            for dim in sorted({0, -1, len(shape) // 2} if shape else {0, -1}):
                for scale, out_scale in ((0.05, 1 / 256), (1e-6, 1e-30), (1e3, 1e-310)):
                    assert_native("softmax", x, scale, dim, out_scale, 0, dtype)


@dtypes
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear"])
@pytest.mark.parametrize("align", [False, True])
def test_interpolate(dtype: torch.dtype, mode: str, align: bool, threads: int) -> None:
    if align and mode != "linear":
        pytest.skip("only linear modes align corners")
    cases: list[tuple[tuple[int, ...], list[int], list[float]]] = [
        ((2, 3, 7), [15], [7 / 15]),
        ((2, 3, 5, 7), [10, 3], [0.5, 7 / 3]),
        ((1, 1, 5, 1), [1, 4], [5.0, 0.25]),
        ((1, 2, 3, 4, 5), [5, 4, 11], [0.6, 1.0, 5 / 11]),
        ((0, 3, 4, 4), [8, 8], [0.5, 0.5]),
        ((1, 17, 40, 40), [80, 80], [0.5, 0.5]),
    ]
    for shape, size, ratio in cases:
        for x in layouts(codes(dtype, *shape)):
            assert_native("interpolate", x, 11, size, ratio, mode, align)


@dtypes
def test_div(dtype: torch.dtype, threads: int) -> None:
    low, high = ends(dtype)
    a, b = codes(dtype, 3, 5, 65), codes(dtype, 5, 1)
    for left, right in ((a, b), (b, a), (a, a.transpose(0, 1).contiguous().transpose(0, 1)), (a[:0], b)):
        for scale in (0.03, 1e-20, 1e20):
            assert_native("div", left, 0.05, 7, right, scale, 3, 0.02, 9, low, high, dtype)


SHAPES = [
    ((5, 7), (7, 3)),
    ((2, 3, 40, 33), (2, 3, 33, 18)),
    ((4, 1, 5, 6), (3, 6, 7)),
    ((6,), (2, 6, 4)),
    ((3, 5, 6), (6,)),
    ((6,), (6,)),
    ((2, 0, 6), (6, 3)),
    ((2, 3, 0), (2, 0, 4)),
    ((0, 3, 4), (4, 2)),
]


@pytest.mark.parametrize("a_dtype", STORAGE[:2], ids=str)
@pytest.mark.parametrize("b_dtype", STORAGE[:2], ids=str)
@dtypes
def test_matmul(a_dtype: torch.dtype, b_dtype: torch.dtype, dtype: torch.dtype, isa: str, threads: int) -> None:
    low, high = ends(dtype)
    for left, right in SHAPES:
        a, b = codes(a_dtype, *left), codes(b_dtype, *right)
        pairs = [(a, b)]
        if a.dim() > 1 and b.dim() > 1:
            pairs.append((a.transpose(-1, -2).contiguous().transpose(-1, -2), b.mT.contiguous().mT))
        for x, y in pairs:
            arguments = (x, 0.05, 7, y, 0.03, 3, 0.2, 9, low, high, dtype)
            native = OPS.matmul.default(*arguments)
            known = arithmetic.matmul_reference(*arguments)
            assert native.dtype == known.dtype
            assert torch.equal(native, known)


def test_matmul_of_long_sums_is_exact() -> None:
    a = torch.full((2, 40_000), 255, dtype=torch.uint8)
    b = torch.full((40_000, 3), -128, dtype=torch.int8)
    out = OPS.matmul.default(a, 1.0, 0, b, 1.0, 0, 1.0, 0, -(2**31), 2**31 - 1, torch.int32)
    known = arithmetic.matmul_reference(a, 1.0, 0, b, 1.0, 0, 1.0, 0, -(2**31), 2**31 - 1, torch.int32)
    assert torch.equal(out, known)
    out = OPS.matmul.default(a, 1.0, 0, b, 1.0, 0, 2.0**24, 100, 0, 255, torch.uint8)
    assert torch.equal(out, arithmetic.matmul_reference(a, 1.0, 0, b, 1.0, 0, 2.0**24, 100, 0, 255, torch.uint8))


def test_native_code_checks_every_size() -> None:
    x = torch.zeros(2, 3, 4, dtype=torch.uint8)
    grid = (1.0, 0, 0, 255, torch.uint8)
    for call, text in (
        (lambda: OPS.prelu(x, 1.0, 0, torch.ones(2), *grid), "one slope"),
        (lambda: OPS.prelu(x.float(), 1.0, 0, torch.ones(1), *grid), "codes"),
        (lambda: OPS.prelu(x, 1.0, 0, torch.ones(1), 1.0, 0, 0, 256, torch.uint8), "do not fit"),
        (lambda: OPS.softmax(x, 1.0, 3, 1.0, 0, torch.uint8), "out of range"),
        (lambda: OPS.softmax(x, 1.0, 1, 1.0, 300, torch.uint8), "does not fit"),
        (lambda: OPS.interpolate(x, 0, [2, 2], [1.0, 1.0], "nearest", False), "takes an input"),
        (lambda: OPS.interpolate(x, 0, [0], [1.0], "nearest", False), "above 0"),
        (lambda: OPS.interpolate(x, 0, [2], [1.0], "cubic", False), "modes"),
        (lambda: OPS.matmul(x, 1.0, 0, x, 1.0, 0, *grid), "do not meet"),
        (lambda: OPS.matmul(x, 1.0, 300, x.mT, 1.0, 0, *grid), "no code"),
        (lambda: OPS.matmul(x, 1.0, 0, x[:1].expand(3, 3, 4).mT, 1.0, 0, *grid), "do not broadcast"),
        (lambda: OPS.matmul(x.int(), 1.0, 0, x.mT, 1.0, 0, *grid), "int8 or uint8"),
    ):
        with pytest.raises(RuntimeError, match=text):
            call()
