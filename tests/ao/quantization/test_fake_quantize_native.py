"""Native fake quantize gives the reference's bits for every dtype, layout, instruction set and number of threads."""

from __future__ import annotations

import pytest
import torch

from zeropoint.ops.fake_quantize import (
    fake_quantize_backward_reference,
    fake_quantize_per_channel_reference,
    fake_quantize_per_tensor_reference,
    moving_average_observe_reference,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SPECIAL = [float("inf"), -float("inf"), float("nan"), -0.0, 0.05, -0.05, 1e30, -1e30, 65504.0]


def samples(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(shape, dtype=torch.float64) * 8
    flat = x.reshape(-1)
    flat[: min(len(SPECIAL), flat.numel())] = torch.tensor(SPECIAL, dtype=torch.float64)[: flat.numel()]
    ties = (torch.arange(flat.numel()) % 3 == 0) & torch.isfinite(flat) & (flat.abs() < 100)
    return torch.where(ties.view(shape), torch.round(x * 10) / 10 + 0.05, x).to(dtype)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    numbers = ~(torch.isnan(x) & torch.isnan(y)) if x.is_floating_point() else torch.ones_like(x, dtype=torch.bool)
    return x.dtype == y.dtype and torch.equal(x.view(width)[numbers], y.view(width)[numbers])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 33, 70_001])
@pytest.mark.parametrize("codes", [(-128, 127, 0), (0, 255, 13), (-(2**31), 2**31 - 1, -5)], ids=str)
def test_per_tensor(isa, threads, dtype, size, codes):
    x = samples(size, dtype=dtype)
    low, high, zero = codes
    arguments = (x, torch.tensor([0.1]), torch.tensor([zero], dtype=torch.int32), low, high)
    for ours, expected in zip(
        torch.ops.zeropoint.fake_quantize_per_tensor(*arguments),
        fake_quantize_per_tensor_reference(*arguments),
        strict=True,
    ):
        assert same_bits(ours, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("floating", [False, True], ids=["whole", "floating"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "sliced"])
def test_per_channel(isa, dtype, axis, floating, layout):
    x = samples(6, 5, 4, 18, dtype=dtype)
    x = x.to(memory_format=torch.channels_last) if layout == "channels_last" else x
    x = x[:, :, :, ::2] if layout == "sliced" else x
    channels = x.shape[axis]
    zeros = torch.randint(-20, 20, (channels,), dtype=torch.int32)
    arguments = (x, torch.rand(channels) * 0.1 + 0.01, zeros + 0.25 if floating else zeros, axis, -128, 127)
    for ours, expected in zip(
        torch.ops.zeropoint.fake_quantize_per_channel(*arguments),
        fake_quantize_per_channel_reference(*arguments),
        strict=True,
    ):
        assert torch.equal(ours.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
        assert ours.stride() == expected.stride()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, 17, 70_001])
def test_backward(isa, threads, dtype, size):
    grad, mask = samples(size, dtype=dtype), torch.rand(size) > 0.3
    ours = torch.ops.zeropoint.fake_quantize_backward(grad, mask)
    assert same_bits(ours, fake_quantize_backward_reference(grad, mask))


def test_backward_of_another_layout():
    grad, mask = torch.randn(3, 4), torch.rand(4, 3).t() > 0.5
    assert torch.equal(torch.ops.zeropoint.fake_quantize_backward(grad, mask), grad * mask)


def test_mismatched_sizes_are_errors():
    call = torch.ops.zeropoint
    with pytest.raises(RuntimeError, match="one scale"):
        call.fake_quantize_per_tensor(torch.zeros(2), torch.ones(2), torch.zeros(1), 0, 1)
    with pytest.raises(RuntimeError, match="axis 3"):
        call.fake_quantize_per_channel(torch.zeros(2), torch.ones(2), torch.zeros(2), 3, 0, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
@pytest.mark.parametrize("codes", [(-128, 127, True, 0), (0, 255, False, 0), (0, 255, True, 128)], ids=str)
def test_statistics_averages_and_grids(isa, dtype, axis, codes):
    low, high, symmetric, middle = codes
    shape = (5, 7, 40)
    channels = 1 if axis is None else shape[axis]
    states = []
    for _ in range(2):
        ends = [torch.full((channels,), sign * float("inf")) for sign in (1.0, -1.0)]
        ends = [end[0] if axis is None else end for end in ends]
        states.append([*ends, torch.ones(channels), torch.zeros(channels, dtype=torch.int32)])
    settings = (torch.tensor([2.0**-23]), 0.3, low, high, axis, symmetric, middle)
    batches = [samples(*shape, dtype=dtype), torch.rand(shape).to(dtype), torch.zeros(shape, dtype=dtype)]
    batches += [samples(5, 7, 80, dtype=dtype)[:, :, ::2], -batches[1] * 1e-6, torch.full(shape, 6e4, dtype=dtype)]
    batches += [torch.empty((channels, 0) if axis == 0 else (0, channels, channels), dtype=dtype)]
    for i, x in enumerate(batches):
        ignored = torch.ops.zeropoint.moving_average_observe(x, *states[0], *settings, i != 2)
        assert bool(ignored) == bool(moving_average_observe_reference(x, *states[1], *settings, i != 2))
        for ours, expected in zip(*states, strict=True):
            assert same_bits(ours, expected)


def test_one_sided_and_tiny_ranges_have_the_references_grid(isa):
    for value in (0.0, 1.0, -1.0, 1e-6, -1e-6, 3e38, -3e38, 1e-40):
        for symmetric, eps in ((True, 2.0**-23), (False, 2.0**-23), (True, 2.0**-12), (False, 2.0**-12)):
            states = [
                [
                    torch.tensor(float("inf")),
                    torch.tensor(-float("inf")),
                    torch.ones(1),
                    torch.zeros(1, dtype=torch.int32),
                ]
                for _ in range(2)
            ]
            settings = (torch.tensor([eps]), 0.3, -127, 127, None, symmetric, 0, True)
            x = torch.tensor([value, value / 2])
            torch.ops.zeropoint.moving_average_observe(x, *states[0], *settings)
            moving_average_observe_reference(x, *states[1], *settings)
            assert all(same_bits(ours, expected) for ours, expected in zip(*states, strict=True))


def test_statistics_of_another_size_are_an_error():
    state = [torch.zeros(3), torch.zeros(3), torch.ones(3), torch.zeros(3, dtype=torch.int32)]
    with pytest.raises(RuntimeError, match="one a channel"):
        torch.ops.zeropoint.moving_average_observe(
            torch.zeros(4, 2), *state, torch.ones(1), 0.1, 0, 255, 0, False, 0, True
        )
