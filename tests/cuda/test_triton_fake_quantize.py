"""Fake quantize, its gradients, and the averaged ranges of the fused form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_check import REFERENCES, assert_same, channels_last, moved

Check = Callable[..., Any]
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def values(dtype: torch.dtype) -> Tensor:
    x = (torch.randn(3, 5, 7, 2) * 3).to(dtype)
    x[0, :3, 0, 0] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    return x


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("ends", [(-128, 127), (0, 255), (-(2**31), 2**31 - 1)], ids=str)
def test_values_and_masks(check: Check, dtype: torch.dtype, ends: tuple[int, int]) -> None:
    plain = values(dtype)
    for x in (plain, channels_last(plain), plain[:, :, ::2]):
        for scale, zero_point in (
            (torch.tensor([0.05]), torch.tensor([3])),
            (torch.tensor(1e-8, dtype=torch.float64), torch.tensor(3, dtype=torch.int32)),
            (torch.tensor([0.05]), torch.tensor([3.4])),
        ):
            check("fake_quantize_per_tensor", x, scale, zero_point, *ends)
        for zero_points in (torch.randint(0, 9, (5,)), torch.rand(5)):
            mask = check("fake_quantize_per_channel", x, torch.rand(5) + 0.01, zero_points, 1, *ends)[1].cpu()
        check("fake_quantize_backward", torch.randn(x.shape).to(dtype), mask)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("symmetric", [False, True])
def test_averaged_ranges(device: torch.device, dtype: torch.dtype, axis: int | None, symmetric: bool) -> None:
    x = values(dtype)
    count = 1 if axis is None else x.shape[axis]
    ends = (torch.full((count,), float("inf")), torch.full((count,), float("-inf")))
    wanted = [*ends, torch.ones(count), torch.zeros(count, dtype=torch.int32)]
    got = [moved(buffer, device) for buffer in wanted]
    eps = torch.tensor(torch.finfo(torch.float32).eps)
    codes = (-128, 127) if symmetric else (0, 255)
    for step, batch in enumerate((x * 1e-4, x.abs() * 1e-9, x * 100, x[:0])):
        rest = (0.01, *codes, axis if batch.numel() or axis != 0 else 1, symmetric, 0 if symmetric else 128, step != 1)
        if not batch.numel() and axis == 0:
            continue
        odd = REFERENCES["moving_average_observe"](batch, *wanted, eps, *rest)
        seen = torch.ops.zeropoint.moving_average_observe(moved(batch, device), *got, moved(eps, device), *rest)
        assert_same(seen, odd)
        assert_same(tuple(got), tuple(wanted))


def test_gradients_pass_where_codes_were_inside(device: torch.device) -> None:
    from zeropoint.ops.fake_quantize import fake_quantize_per_tensor

    x = torch.tensor([-9.0, 0.3, 9.0], device=device, requires_grad=True)
    one, zero = torch.tensor([0.05], device=device), torch.tensor([0], dtype=torch.int32, device=device)
    fake_quantize_per_tensor(x, one, zero).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 1.0, 0.0]
