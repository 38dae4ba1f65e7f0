"""Gradients as bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_check import REFERENCES, assert_same, moved

Check = Callable[..., Any]


def gradients(kind: str) -> Tensor:
    x = torch.randn(1000) * 1e-4
    if kind == "odd":
        x[5], x[300] = float("nan"), float("inf")
    return {"one": x[:1], "zero": x * 0}.get(kind, x)


@pytest.mark.parametrize("kind", ["plain", "odd", "one", "zero"])
@pytest.mark.parametrize("row", [32, 100, 256])
def test_rows(check: Check, kind: str, row: int) -> None:
    x = gradients(kind)
    low, high = (end.cpu() for end in check("row_range", x, row))
    qparams = torch.stack([(high - low) / 255 + 1e-30, torch.randint(0, 255, low.shape).float()])
    codes = check("row_quantize", x, qparams, row).cpu()
    check("row_sum", torch.stack([codes, codes.flip(0)]), torch.stack([qparams, qparams]), x.numel())


@pytest.mark.parametrize("kind", ["plain", "odd", "one", "zero"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("seed", [None, 0, 2**32 - 1])
def test_blocks(device: torch.device, check: Check, kind: str, bits: int, seed: int | None) -> None:
    x = gradients(kind)
    for block, chunks in ((32, 1), (96, 3), (256, 1)):
        wanted = REFERENCES["block_pack"](x, chunks, bits, block, seed)
        packed = torch.ops.zeropoint.block_pack(moved(x, device), chunks, bits, block, seed).cpu()
        if kind != "odd":  # the bits of a NaN are no contract
            assert_same(packed, wanted)
        assert_same(REFERENCES["block_sum"](packed, bits, block), REFERENCES["block_sum"](wanted, bits, block))
        check("block_sum", wanted, bits, block)
        check("block_unpack", wanted, bits, block, x.numel())
