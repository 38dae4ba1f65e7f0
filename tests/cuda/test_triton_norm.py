"""Norms of codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton_check import channels_last, codes

Check = Callable[..., Any]
DTYPES = (torch.int8, torch.uint8, torch.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("affine", [False, True], ids=["plain", "affine"])
def test_norms(check: Check, dtype: torch.dtype, out_dtype: torch.dtype, affine: bool) -> None:
    limits = torch.iinfo(out_dtype)
    out = (0.01 if out_dtype != torch.int32 else 1e-8, 5, limits.min, limits.max, out_dtype)
    scale = 0.05 if dtype != torch.int32 else 1e-9
    x = codes(2, 6, 5, 3, dtype=dtype)
    x = channels_last(x) if affine else x
    weight, bias = (torch.randn(6), torch.randn(6)) if affine else (None, None)
    check("batch_norm", x, scale, 3, weight, bias, torch.randn(6), torch.rand(6), 1e-5, *out)
    check("group_norm", x, scale, 3, 3, weight, bias, 1e-5, *out)
    check("group_norm", x[:, :, ::2], scale, 3, 6, weight, bias, 1e-5, *out)
    rows = codes(4, 7, 33, dtype=dtype)
    weight, bias = (torch.randn(33), torch.randn(33)) if affine else (None, None)
    check("layer_norm", rows if affine else rows.transpose(0, 1), scale, 3, (33,), weight, bias, 1e-12, *out)
    check("layer_norm", rows, scale, 3, (7, 33), torch.randn(7, 33) if affine else None, None, 0.0, *out)


def test_a_fused_relu_is_a_lower_end(check: Check) -> None:
    for shape in ((2, 6, 5, 3), (2, 6, 2, 5, 3), (7, 6)):
        x, six = codes(*shape), (torch.randn(6), torch.randn(6))
        out = (0.02, 9, 9, 255, torch.uint8)
        check("batch_norm", x, 0.05, 3, *six, torch.randn(6), torch.rand(6), 1e-5, *out)
        check("group_norm", x, 0.05, 3, 6, *six, 1e-5, *out)


def test_extreme_codes(check: Check) -> None:
    out = (0.01, 0, -128, 127, torch.int8)
    top, bottom = 2**31 - 1, -(2**31)
    check("layer_norm", torch.full((2, 40), top, dtype=torch.int32), 1.0, bottom, (40,), None, None, 1e-5, *out)
    mixed = torch.tensor([[[top, bottom] * 20]] * 2, dtype=torch.int32)
    check("group_norm", mixed, 1.0, 0, 1, None, None, 1e-5, *out)
    check("layer_norm", codes(2, 20000), 0.1, 7, (20000,), None, None, 1e-5, *out)
