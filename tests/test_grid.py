"""The affine grid: the rounding rules and the formulas that make qparams."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeropoint import grid

FLOAT32 = st.floats(width=32, allow_nan=False)
SCALES = st.floats(min_value=2.0**-20, max_value=2.0**20, width=32)
RANGES = st.sampled_from([(-128, 127), (0, 255), (0, 127), (-8, 7), (-(2**31), 2**31 - 1)])


def numpy_codes(x: float, scale: float, zero_point: int, low: int, high: int) -> int:
    """The rule of the module's docstring, written with numpy scalars and Python integers."""
    with np.errstate(over="ignore", invalid="ignore"):
        steps = np.rint(np.float32(x) * (np.float32(1.0) / np.float32(scale)))
    if math.isinf(steps):
        return high if steps > 0 else low
    return min(max(int(steps) + zero_point, low), high)


@given(x=FLOAT32, scale=SCALES, limits=RANGES, where=st.floats(0, 1))
def test_quantize_is_the_written_rule(x: float, scale: float, limits: tuple[int, int], where: float) -> None:
    low, high = limits
    zero_point = low + int(where * (high - low))
    code = grid.quantize(torch.tensor(x), scale, zero_point, low, high)
    assert code.item() == numpy_codes(x, scale, zero_point, low, high)


@pytest.mark.parametrize(
    ("x", "zero_point", "code"), [(0.5, 1, 1), (1.5, 1, 3), (-0.5, 1, 1), (2.5, 0, 2), (127.5, 0, 127)]
)
def test_ties_round_to_even_before_the_zero_point_is_added(x: float, zero_point: int, code: int) -> None:
    assert grid.quantize(torch.tensor(x), 1.0, zero_point, -128, 127).item() == code


def test_non_finite_and_extreme_values() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 2.0**32, 9.2e14])
    assert grid.quantize(x, 1e-4, 5, -128, 127).tolist() == [127, -128, 5, 127, -128, 127, 127]
    values, mask = grid.fake_quantize(x, 1e-4, 5, -128, 127)
    assert math.isnan(values[2].item())
    assert not mask.any()


@given(
    x=st.lists(st.floats(width=32), min_size=1, max_size=20),
    scale=SCALES,
    limits=RANGES,
    where=st.floats(0, 1),
)
def test_fake_quantize_is_dequantize_of_quantize_bit_for_bit(
    x: list[float], scale: float, limits: tuple[int, int], where: float
) -> None:
    low, high = limits
    zero_point = low + int(where * (high - low))
    values = torch.tensor(x, dtype=torch.float32)
    through_codes = grid.dequantize(
        grid.quantize(values, scale, zero_point, low, high), scale, zero_point, torch.float32
    )
    simulated, _ = grid.fake_quantize(values, scale, zero_point, low, high)
    finite = ~torch.isnan(values)
    assert torch.equal(through_codes.view(torch.int32)[finite], simulated.view(torch.int32)[finite])


@pytest.mark.parametrize(
    ("x", "passes"), [(127.49, True), (127.5, False), (128.0, False), (-128.5, True), (-128.51, False), (126.5, True)]
)
def test_the_mask_uses_the_rounded_position(x: float, passes: bool) -> None:
    _, mask = grid.fake_quantize(torch.tensor(x), 1.0, 0, -128, 127)
    assert mask.item() == passes


def test_a_floating_zero_point_is_added_before_rounding() -> None:
    zero = torch.tensor(0.25)
    assert grid.quantize(torch.tensor(1.25), 1.0, zero, -128, 127).item() == 2  # 1.5 ties to even
    assert grid.dequantize(torch.tensor(2), 1.0, zero, torch.float32).item() == 1.75


def test_requantize_rounds_after_each_operation() -> None:
    # one fused multiply-add would give 1.5 - 2**-24 … and round down to 1
    total, factor, offset = 3, np.float32(0.1), np.float32(1.2)
    expected = int(np.rint(np.float32(np.float32(total) * factor) + offset))
    got = grid.requantize(torch.tensor(total), torch.tensor(factor), torch.tensor(offset), 0, -128, 127)
    assert got.item() == expected


def test_requantize_saturates_and_adds_the_zero_point_last() -> None:
    totals = torch.tensor([-(2**40), -10, 0, 5, 2**40])
    got = grid.requantize(totals, torch.tensor(0.5), None, 10, 10, 255)
    assert got.tolist() == [10, 10, 10, 12, 255]  # 2.5 ties to 2


@pytest.mark.parametrize(("total", "count", "mean"), [(5, 2, 2), (7, 2, 4), (-5, 2, -2), (10, 3, 3), (11, 3, 4)])
def test_round_mean_ties_to_even(total: int, count: int, mean: int) -> None:
    assert grid.round_mean(torch.tensor(total), count).item() == mean


@pytest.mark.parametrize(
    ("low", "high", "limits", "scale", "zero_point"),
    [
        (-4.0, 3.0, (-128, 127), 7 / 255, 18),
        (-4.0, 3.0, (-64, 63), 7 / 127, 9),
        (0.0, 0.0, (-128, 127), 0.1, 127),
        (0.0, 0.0, (0, 255), 0.1, 0),
        (1.0, 2.0, (0, 255), 2 / 255, 0),
        (-3.0, -1.0, (0, 255), 3 / 255, 255),
        (0.0, 1e-6, (0, 255), 6.1e-5, 0),
        (-1e-7, 2e-7, (0, 255), 6.1e-5, 85),
    ],
)
def test_choose_qparams(low: float, high: float, limits: tuple[int, int], scale: float, zero_point: int) -> None:
    got_scale, got_zero = grid.choose_qparams(torch.tensor(low), torch.tensor(high), *limits)
    assert got_scale.item() == pytest.approx(scale, rel=1e-7)
    assert got_zero.item() == zero_point


@given(a=FLOAT32, b=FLOAT32, limits=st.sampled_from([(-128, 127), (0, 255), (0, 127)]))
def test_every_affine_grid_holds_zero_and_is_usable(a: float, b: float, limits: tuple[int, int]) -> None:
    if math.isinf(a) or math.isinf(b):
        a, b = 0.0, 1.0
    low, high = torch.tensor(min(a, b)), torch.tensor(max(a, b))
    scale, zero_point = grid.affine_qparams(low, high, *limits)
    assert math.isfinite(scale.item())
    assert scale.item() > 0
    assert limits[0] <= zero_point.item() <= limits[1]
    assert grid.fake_quantize(torch.tensor(0.0), scale, zero_point, *limits)[0].item() == 0.0


def test_a_range_as_wide_as_float32_gives_a_finite_scale() -> None:
    extreme = torch.finfo(torch.float32).max
    scale, _ = grid.affine_qparams(torch.tensor(-extreme), torch.tensor(extreme), -128, 127)
    assert scale.item() == pytest.approx(2 * extreme / 255, rel=1e-6)


def test_symmetric_qparams_are_centred() -> None:
    scale, zero_point = grid.symmetric_qparams(torch.tensor([-1.0, 0.5]), torch.tensor([0.5, 2.0]), -128, 127, 0)
    assert torch.allclose(scale, torch.tensor([1.0, 2.0]) / 127.5)
    assert zero_point.tolist() == [0, 0]


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 1e-45, 1e39])
def test_a_scale_that_makes_no_grid_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="scale must"):
        grid.check_scale(scale)


@pytest.mark.parametrize("zero_point", [-129, 128, 0.5])
def test_a_zero_point_outside_the_codes_is_refused(zero_point: float) -> None:
    with pytest.raises(ValueError, match="zero_point must"):
        grid.check_zero_point(zero_point, -128, 127)  # type: ignore[arg-type]
