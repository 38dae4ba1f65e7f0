"""Sums, products, quotients, PReLU and tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton_check import REFERENCES, channels_last, codes

import zeropoint as zp

Check = Callable[..., Any]
DTYPES = (torch.int8, torch.uint8, torch.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["add", "mul", "div"])
def test_two_operands(check: Check, name: str, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    limits = torch.iinfo(out_dtype)
    out = (0.01 if out_dtype != torch.int32 else 1e-8, 5, limits.min, limits.max, out_dtype)

    def one(*shape: int) -> Any:
        return codes(*shape, dtype=dtype)

    def other(*shape: int) -> Any:
        return codes(*shape, dtype=out_dtype)

    for a, b in (
        (one(3, 4, 5), other(3, 4, 5)),
        (one(3, 4, 5), other(4, 1)),
        (one(2, 6, 1, 1), channels_last(other(2, 6, 3, 3))),
        (one(3, 4).t(), other(4, 3)),
        (one(1), other(2, 1, 3, 1, 2)),
        (one(2, 2, 2, 2, 2).permute(4, 2, 0, 1, 3), other(2, 2, 2, 2, 2)),
        (one(0, 3), other(1, 3)),
    ):
        check(name, a, 0.05, 3, b, -0.02 if name == "add" else 0.02, -7, *out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slopes", [1, 3])
def test_prelu(check: Check, dtype: torch.dtype, slopes: int) -> None:
    x = codes(2, 3, 5, dtype=dtype)
    check("prelu", x, 0.05, 2, torch.randn(slopes), 0.03, 9, 0, 255, torch.uint8)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("entries", [torch.uint8, torch.int32, torch.float32, torch.bfloat16], ids=str)
def test_tables(check: Check, dtype: torch.dtype, entries: torch.dtype) -> None:
    check("lookup", channels_last(codes(2, 3, 4, 5, dtype=dtype)), torch.arange(256).to(entries))
    check("activation", codes(3, 5, dtype=dtype), "gelu", (), 0.03, 2, 0.02, 5, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [-1, 1])
def test_softmax(check: Check, dtype: torch.dtype, dim: int) -> None:
    scale = 0.05 if dtype != torch.int32 else 1e-9
    for size in (1, 3, 8, 21):
        x = codes(2, size, size + 1, dtype=dtype)
        check("softmax", x, scale, dim, 1 / 256, 0, torch.uint8)
        check("softmax", x.transpose(1, 2), scale, dim, 1e-8, -5, torch.int32)


def test_cat_brings_every_part_to_one_grid(device: torch.device) -> None:
    grids = ((0.1, 3, zp.quint8), (0.1, 3, zp.quint8), (0.03, -7, zp.qint8), (0.11, 0, zp.qint8))
    parts = [zp.quantize_per_tensor(torch.randn(2, 3 + i, 5) * 9, *grid) for i, grid in enumerate(grids)]
    wanted = [
        REFERENCES["requantize"](part.int_repr(), *grid[:2], 0.2, 7, 0, 255, torch.uint8)
        for part, grid in zip(parts, grids, strict=True)
    ]
    got = zp.ops.arithmetic.cat([part.to(device) for part in parts], 1, 0.2, 7, dtype=zp.quint8)
    assert torch.equal(got.int_repr().cpu(), torch.cat(wanted, 1))
