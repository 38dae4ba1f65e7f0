"""Convolutions: every rank, stride, padding, dilation, group and layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton_check import channels_last, codes

Check = Callable[..., Any]
# input, output channels, kernel, stride, padding, dilation, groups
CASES = (
    ((2, 5, 13), 7, (3,), (2,), (1, 1), (1,), 1),
    ((1, 6, 9), 6, (4,), (1,), (1, 2), (2,), 6),
    ((2, 6, 9, 7), 8, (3, 3), (2, 1), (1, 1, 0, 2), (1, 2), 2),
    ((2, 3, 9, 7), 18, (3, 2), (1, 1), (1, 0, 1, 1), (1, 1), 1),
    ((2, 5, 6, 7), 20, (3, 3), (1, 2), (1, 1, 1, 1), (1, 1), 5),
    ((2, 33, 3, 3), 17, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    ((1, 4, 5, 6, 4), 6, (2, 3, 2), (1, 2, 1), (1, 0, 1, 1, 0, 1), (1, 1, 2), 2),
    ((1, 3, 4, 4, 3), 3, (3, 3, 3), (1, 2, 1), (1, 1, 1, 1, 1, 1), (1, 1, 1), 3),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{len(case[2])}d-groups{case[-1]}-{case[2]}")
@pytest.mark.parametrize("affine", [False, True], ids=["symmetric", "affine"])
def test_conv(check: Check, case: tuple[Any, ...], affine: bool) -> None:
    shape, channels, kernel, *window, groups = case
    weight = codes(channels, shape[1] // groups, *kernel, dtype=torch.int8)
    grids = channels if affine else 1
    zero_point = codes(grids, dtype=torch.int8).int() if affine else torch.zeros(grids, dtype=torch.int32)
    scale, bias = torch.rand(grids) * 0.01 + 0.001, torch.randn(channels) if affine else None
    for dtype, layout in ((torch.uint8, channels_last), (torch.int8, lambda x: x)):
        x = layout(codes(*shape, dtype=dtype))
        args = (x, 0.02, 3, weight, scale, zero_point, bias, *window, groups, 0.3, 9, 0, 255, torch.uint8)
        check("conv", *args, None)
    packed = torch.ops.zeropoint.conv_pack(weight, groups)  # of the CPU: ignored on a GPU
    check("conv", *args, packed)
    x = torch.randn(shape).to(torch.float64 if affine else torch.float16)
    check("conv_dynamic", x, weight, scale, zero_point, bias, *window, groups, affine, affine, None)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
def test_depthwise_pictures_and_a_fused_relu(check: Check, dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    x, out = codes(1, 19, 7, 5, dtype=dtype), (0.05, limits.min + 9, limits.min + 9, limits.max, dtype)
    scale, zero_point, bias = torch.rand(19) * 0.01 + 0.001, codes(19, dtype=torch.int8).int(), torch.randn(19)
    for kernel, window in (
        ((3, 3), ((1, 1), (1, 1, 1, 1), (1, 1), 19)),
        ((5, 2), ((2, 1), (2, 2, 0, 1), (1, 2), 19)),
        ((3, 3), ((1, 2), (0, 0, 0, 0), (1, 1), 1)),
    ):
        weight = codes(19, 19 // window[-1], *kernel, dtype=torch.int8)
        laid_out = x if kernel == (5, 2) else channels_last(x)
        check("conv", laid_out, 0.02, 3, weight, scale, zero_point, bias, *window, *out, None)


def test_packed_weights_are_taken(device: torch.device, check: Check) -> None:
    x, weight = codes(1, 4, 5, 5), codes(6, 2, 3, 3, dtype=torch.int8)
    packed = torch.ops.zeropoint.conv_pack(weight.to(device), 2)
    args = (x, 0.02, 3, weight, torch.ones(1), torch.zeros(1, dtype=torch.int32), None, (1, 1), (1, 1, 1, 1), (1, 1), 2)
    check("conv", *args, 300.0, 9, 0, 255, torch.uint8, packed)


@pytest.mark.parametrize("groups", [1, 2])
def test_worst_cases_do_not_overflow(check: Check, groups: int) -> None:
    x = torch.full((1, 2 * groups, 150, 150), 255, dtype=torch.uint8)
    weight = torch.full((groups, 2, 130, 130), -128, dtype=torch.int8)  # 33800 products: more than 32 bits hold
    zero_point = torch.full((1,), 127, dtype=torch.int32)
    args = (x, 1e-4, 0, weight, torch.ones(1), zero_point, None, (20, 20), (0, 0, 0, 0), (1, 1), groups)
    check("conv", *args, 1e3, 3, -128, 127, torch.int8, None)
