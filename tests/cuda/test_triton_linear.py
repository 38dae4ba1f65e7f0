"""Matrix products: sizes around tiles, every zero point, worst cases, split K, ``torch._int_mm``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_check import assert_same, codes, moved

Check = Callable[..., Any]
SIZES = ((1, 5, 7), (3, 16, 100), (17, 33, 65), (40, 24, 136), (1, 1, 0), (0, 4, 4))


def weights(columns: int, depth: int, grids: int, zero: bool) -> tuple[Tensor, Tensor, Tensor]:
    scale = torch.rand(grids) * 0.01 + 0.001
    zero_point = torch.zeros(grids, dtype=torch.int32)
    return codes(columns, depth, dtype=torch.int8), scale, zero_point if zero else codes(grids, dtype=torch.int8).int()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
@pytest.mark.parametrize("zero", [True, False], ids=["symmetric", "affine"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_linear(check: Check, size: tuple[int, int, int], dtype: torch.dtype, zero: bool, bias: bool) -> None:
    rows, columns, depth = size
    weight, scale, zero_point = weights(columns, depth, columns if bias else 1, zero)
    offsets = torch.randn(columns) if bias else None
    x = codes(rows, depth, dtype=dtype)
    out = (0.5, 9, 9 if bias else 0, 255, torch.uint8)
    check("linear", x, 0.02, 3, weight, scale, zero_point, offsets, *out, None)
    check("linear", x.reshape(rows, 1, depth), 0.02, 3, weight, scale.double(), zero_point, offsets, *out, None)
    floats = torch.randn(rows, depth).to(torch.bfloat16 if bias else torch.float32)
    check("linear_dynamic", floats, weight, scale, zero_point, offsets, zero, bias, None)


@pytest.mark.parametrize(("parts", "engine"), [(1, "triton"), (3, "triton"), (None, "int_mm")])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
@pytest.mark.parametrize("zero", [True, False], ids=["symmetric", "affine"])
def test_every_way_to_multiply(
    device: torch.device, check: Check, parts: int | None, engine: str, dtype: torch.dtype, zero: bool
) -> None:
    from zeropoint.backends.triton.linear import bits, column_sums, multiply
    from zeropoint.ops.linear import linear_reference

    rows, columns, depth = 40, 24, 136
    weight, scale, zero_point = weights(columns, depth, columns, zero)
    x, bias = codes(rows, depth, dtype=dtype), torch.randn(columns)
    wanted = linear_reference(x, 0.02, 3, weight, scale, zero_point, bias, 0.5, 9, 0, 255, torch.uint8, None)
    here = [moved(value, device) for value in (x, weight, scale, zero_point, bias)]
    out = torch.empty(rows, columns, dtype=torch.uint8, device=device)
    multiply(
        *here[:2],
        column_sums(here[1]),
        bits(0.02),
        3,
        *here[2:],
        out,
        out_scale=0.5,
        out_zero_point=9,
        out_max=255,
        parts=parts,
        engine=engine,
    )
    assert_same(out, wanted)


@pytest.mark.parametrize("rows", [2, 17])
def test_a_fused_relu_and_signed_codes(check: Check, rows: int) -> None:
    weight, scale, zero_point = weights(33, 65, 33, False)
    for dtype in (torch.uint8, torch.int8):
        x, bias = codes(rows, 65, dtype=dtype), torch.randn(33)
        for out in ((0.1, -7, -7, 127, torch.int8), (0.1, -7, -7, 53, torch.int8), (0.1, 9, 9, 255, torch.uint8)):
            check("linear", x, 0.02, -3, weight, scale, zero_point, bias, *out, None)


@pytest.mark.parametrize("depth", [33025, 33026, 140000])
@pytest.mark.parametrize("rows", [1, 5])
def test_worst_cases_do_not_overflow(check: Check, rows: int, depth: int) -> None:
    x = torch.full((rows, depth), 255, dtype=torch.uint8)
    weight = torch.full((3, depth), -128, dtype=torch.int8)
    zero_point = torch.tensor([127, -128, 0], dtype=torch.int32)
    grid = (x, 1e-4, 0, weight, torch.ones(1), zero_point, None, 1e3, 9, -128, 127, torch.int8)
    check("linear", *grid, None)


def test_packed_weights_are_taken_and_others_ignored(device: torch.device, check: Check) -> None:
    weight, scale, zero_point = weights(20, 33, 20, False)
    x = codes(6, 33)
    out = (0.5, 9, 0, 255, torch.uint8)
    packed = torch.ops.zeropoint.linear_pack(moved(weight, device))
    assert packed.device.type == device.type
    for given in (packed, packed[:-1].clone(), torch.zeros(7, dtype=torch.uint8)):
        check("linear", x, 0.02, 3, weight, scale, zero_point, None, *out, given)


def test_products_of_two_activations(check: Check) -> None:
    a, b = codes(2, 1, 5, 9), codes(3, 9, 4, dtype=torch.int8)
    grids = (0.2, -3, 3.0, 1, -128, 127, torch.int8)
    pairs = (
        (a, b),
        (a, b[0].t().contiguous().t()),
        (a[0, 0], b[0, :, 0]),
        (a[0, 0, 0], b),
        (b.transpose(1, 2), a[0].transpose(1, 2)),
        (a[:, :, :0], b),
    )
    for left, right in pairs:
        check("matmul", left, 0.1, 7, right, *grids, strides=False)


def test_sizes_that_do_not_fit_are_errors(device: torch.device) -> None:
    weight = torch.zeros(4, 8, dtype=torch.int8, device=device)
    one = torch.ones(1, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    x = torch.zeros(2, 7, dtype=torch.uint8, device=device)
    with pytest.raises(RuntimeError, match="takes x"):
        torch.ops.zeropoint.linear(x, 0.1, 0, weight, one, zero, None, 0.1, 0, 0, 255, torch.uint8, None)
    with pytest.raises(RuntimeError, match="linear takes an x_scale and an out_scale that are finite and above 0"):
        torch.ops.zeropoint.linear(x, 0.1, 0, weight[:, :7], one, zero, None, 0.0, 0, 0, 255, torch.uint8, None)
    with pytest.raises(RuntimeError, match="as many biases"):
        torch.ops.zeropoint.linear(
            torch.zeros(2, 8, dtype=torch.uint8, device=device),
            0.1,
            0,
            weight,
            one,
            zero,
            torch.ones(3, device=device),
            0.1,
            0,
            0,
            255,
            torch.uint8,
            None,
        )
