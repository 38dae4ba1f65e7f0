"""Between float and codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

Check = Callable[..., Any]
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
GRIDS = (
    (0.1, 3, -128, 127, torch.int8),
    (0.1, 128, 0, 255, torch.uint8),
    (1e-6, -70000, -(2**31), 2**31 - 1, torch.int32),
)


def values(dtype: torch.dtype) -> Tensor:
    """Ordinary values, exact halves of steps, and what is not finite."""
    x = (torch.randn(7, 33) * 30).to(dtype)
    x[0, :3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    x[1] = (torch.arange(33) * 0.05).to(dtype)
    return x


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: str(grid[-1]))
def test_one_grid(check: Check, dtype: torch.dtype, grid: tuple[Any, ...]) -> None:
    x = values(dtype)
    scale, zero_point = grid[:2]
    codes = check("quantize_per_tensor", x, *grid).cpu()
    check("quantize_per_tensor", x.t()[::2], *grid)
    check("dequantize_per_tensor", codes, scale, zero_point, dtype)
    check("requantize", codes, scale, zero_point, 0.07, 5, -128, 127, torch.int8)
    check("requantize", codes, scale, zero_point, 3e-9, 5, -(2**31), 2**31 - 1, torch.int32)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("real_zero", [False, True])
def test_a_grid_for_each_channel(check: Check, dtype: torch.dtype, real_zero: bool) -> None:
    x = values(dtype)
    scales = torch.rand(33, dtype=torch.float64) + 0.01
    zeros = torch.rand(33) * 9 if real_zero else torch.randint(-5, 5, (33,))
    codes = check("quantize_per_channel", x, scales, zeros, 1, -128, 127, torch.int8).cpu()
    check("quantize_per_channel", x.t().contiguous().t(), scales, zeros, -1, 0, 255, torch.uint8)
    check("dequantize_per_channel", codes, scales, zeros, 1, dtype)


@pytest.mark.parametrize(
    "x",
    [
        *(values(dtype) for dtype in FLOATS),
        torch.zeros(3),
        torch.full((2,), 1e-7),
        torch.tensor([-1e-8, 1e-39]),
        torch.tensor([-3.0, -2.0]),
        torch.empty(0),
        torch.full((3,), float("nan")),
        torch.randn(70000),
    ],
    ids=lambda x: f"{tuple(x.shape)}-{x.dtype}",
)
def test_range_and_grid_of_a_tensor(check: Check, x: Tensor) -> None:
    check("dynamic_range", x)
    for ends in ((0, 255), (0, 127), (-128, 127)):
        check("dynamic_qparams", x, *ends)


def test_nothing_to_do(check: Check) -> None:
    check("quantize_per_tensor", torch.empty(0, 3), *GRIDS[0])
    check("dequantize_per_tensor", torch.empty(0, 3, dtype=torch.int8), 0.1, 0, torch.float32)
