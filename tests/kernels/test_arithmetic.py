"""Sums and products of codes: the same integers as the reference on every instruction set, however they broadcast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zeropoint import backends
from zeropoint.ops import arithmetic

pytestmark = pytest.mark.skipif(not backends.is_native(), reason="the native library is not built")

OPS = torch.ops.zeropoint
CODES = (torch.int8, torch.uint8, torch.int32)
PAIRS = (
    ((33,), (33,)),
    ((1025,), (1,)),
    ((0,), (0,)),
    ((0, 3), (1, 3)),
    ((), ()),
    ((2, 5, 4, 7), ()),
    ((2, 5, 4, 7), (5, 1, 1)),
    ((2, 5, 4, 7), (2, 5, 1, 1)),
    ((2, 5, 4, 7), (7,)),
    ((2, 5, 1, 7), (1, 5, 4, 1)),
    ((3, 1, 70), (4, 1)),
    ((1, 1, 1), (2, 3, 1)),
)


def codes(shape: tuple[int, ...], storage: torch.dtype) -> Tensor:
    info = torch.iinfo(storage)
    return torch.randint(info.min, info.max + 1, shape, dtype=torch.int64).to(storage)


def both(name: str, *args: Any) -> None:
    """Calls the kernel and the reference, and compares integers, dtypes and strides."""
    native, reference = getattr(OPS, name)(*args), getattr(arithmetic, f"{name}_reference")(*args)
    assert native.dtype == reference.dtype
    assert native.stride() == reference.stride()
    assert torch.equal(native, reference)


def arguments(a: Tensor, b: Tensor, out: torch.dtype, a_zero: int = 3, b_zero: int = 120) -> tuple[Any, ...]:
    info = torch.iinfo(out)
    wide = 2.0**24 if torch.int32 in (a.dtype, b.dtype) else 1.0
    return (a, 0.05, a_zero, b, 0.013, b_zero, 0.09 * wide, 7, info.min, info.max, out)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", ["add", "mul"])
class TestBinary:
    @pytest.mark.parametrize("a_dtype", CODES, ids=str)
    @pytest.mark.parametrize("b_dtype", CODES, ids=str)
    @pytest.mark.parametrize("out", CODES, ids=str)
    def test_dtypes_and_broadcasts(self, name: str, a_dtype: torch.dtype, b_dtype: torch.dtype, out: Any) -> None:
        for a_shape, b_shape in PAIRS:
            both(name, *arguments(codes(a_shape, a_dtype), codes(b_shape, b_dtype), out))
            both(name, *arguments(codes(b_shape, a_dtype), codes(a_shape, b_dtype), out))

    def test_every_pair_of_codes(self, name: str) -> None:
        a = torch.arange(256).to(torch.uint8).reshape(256, 1).expand(256, 256)
        b = torch.arange(-128, 128).to(torch.int8).expand(256, 256)
        both(name, *arguments(a.contiguous(), b.contiguous(), torch.int8, 255, -128))
        both(name, a, 1.0, 0, b, 1.0, 0, 2.0, 0, 0, 255, torch.uint8)  # ties
        both(name, a, 1.0, 0, b, -1.0, 0, 2.0, 0, 0, 255, torch.uint8)  # a difference

    def test_layouts(self, name: str) -> None:
        x, y = codes((2, 5, 4, 7), torch.uint8), codes((2, 5, 4, 7), torch.int8)
        last = torch.channels_last
        for a, b in (
            (x.to(memory_format=last), y.to(memory_format=last)),
            (x.to(memory_format=last), y),
            (x, y.to(memory_format=last)),
            (x.transpose(1, 3).contiguous().transpose(1, 3), y),
            (torch.cat([x, x], 3)[..., ::2], y),
            (x[:1].expand_as(x), y[:, :1].expand_as(y)),
            (x.to(memory_format=last), y[:, :, :1, :1]),
            (y[0, :, 0, 0].reshape(5, 1, 1), x.to(memory_format=last)),
            (x.permute(3, 1, 0, 2), y.permute(3, 1, 0, 2)),
            (x[:, :, ::2], y[:, :, 1::2]),
        ):
            both(name, *arguments(a, b, torch.uint8))

    def test_ends_of_the_output(self, name: str) -> None:
        a, b = codes((300,), torch.int8), codes((300,), torch.int8)
        for low, high, zero in ((0, 0, 0), (-5, 9, 2), (3, 100, -7), (-128, 127, 127)):
            both(name, a, 0.1, 2, b, 0.2, -3, 0.1, zero, low, high, torch.int8)
        for scale in (1e-30, 1e30, 2.0**-149, 3e38):
            both(name, a, 0.1, 2, b, scale, -3, 0.1, 1, -128, 127, torch.int8)
            both(name, a, 0.1, 2, b, 0.1, -3, scale, 1, -128, 127, torch.int8)

    @pytest.mark.parametrize("factor", [2.0**7, 2.0**8, 2.0**9, 2.0**17, 2.0**18, 2.0**19, 2.0**31, float("inf")])
    def test_where_the_byte_loops_hand_over(self, name: str, factor: float) -> None:
        """The loops over bytes take moderate factors and zero points only; beyond, the result is still the same."""
        a, b = codes((300,), torch.uint8), codes((300,), torch.int8)
        for zero in (0, 1024, -1024, 1025, 10**6):
            for sign in (1.0, -1.0):
                both(name, a, factor, zero, b, sign, -3, 1.0, 1, -128, 127, torch.int8)
                both(name, a, factor, zero, b, sign * factor, -3, 1.0, 1, -128, 127, torch.int8)


@pytest.mark.usefixtures("isa", "threads")
@pytest.mark.parametrize("name", ["add", "mul"])
def test_many_elements(name: str) -> None:
    x = codes((5, 13, 41, 43), torch.uint8)
    both(name, *arguments(x, codes(tuple(x.shape), torch.int8), torch.int8))
    both(name, *arguments(x, codes((5, 13, 1, 1), torch.int8), torch.int8))
    both(name, *arguments(x.to(memory_format=torch.channels_last), codes((5, 13, 1, 1), torch.int8), torch.uint8))


@given(
    shape=st.lists(st.integers(0, 6), max_size=4),
    ones=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=4, max_size=4),
    shorter=st.integers(0, 4),
    order=st.randoms(use_true_random=False),
)
def test_any_broadcast(shape: list[int], ones: list[tuple[bool, bool]], shorter: int, order: Any) -> None:
    pairs = list(zip(shape, ones, strict=False))
    a = codes(tuple(1 if one[0] else n for n, one in pairs), torch.int8)
    b = codes(tuple(1 if one[1] else n for n, one in pairs)[min(shorter, len(shape)) :], torch.uint8)
    places = list(range(a.dim()))
    order.shuffle(places)
    a = a.permute(places).contiguous().permute([places.index(d) for d in range(a.dim())])
    for name in ("add", "mul"):
        both(name, *arguments(a, b, torch.int8))


def test_what_does_not_fit_raises() -> None:
    a, b = codes((3, 4), torch.int8), codes((3, 5), torch.int8)
    for args in (
        arguments(a, b, torch.int8),
        arguments(a, a.float(), torch.int8),
        (*arguments(a, a, torch.int8)[:-1], torch.float32),
        (a, 1.0, 0, a, 1.0, 0, 1.0, 0, -200, 127, torch.int8),
    ):
        for name in ("add", "mul"):
            with pytest.raises(RuntimeError):
                getattr(OPS, name)(*args)
