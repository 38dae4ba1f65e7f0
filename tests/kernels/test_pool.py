"""Pooling, means, padding and clamping of codes: equal to their definitions in float64, on every instruction set."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

import zeropoint as zp
from zeropoint import backends
from zeropoint.ops import pool as reference
from zeropoint.ops.pool import code_of

native = pytest.mark.skipif(not backends.is_native(), reason="the native library is not built")

OPS = torch.ops.zeropoint
DTYPES = [torch.uint8, torch.int8, torch.int32]


def codes(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max + 1, shape, dtype=torch.int64).to(dtype)


def channels_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def mean_code(values: np.ndarray, divisor: int, zero_point: int, dtype: torch.dtype) -> int:
    """``rint(sum / divisor) + zero_point``, saturated, of codes counted from the zero point."""
    total = int((values.astype(np.int64) - zero_point).sum())
    info = torch.iinfo(dtype)
    return min(max(int(np.rint(np.float64(total) / np.float64(divisor))) + zero_point, info.min), info.max)


def pool_by_definition(
    x: Tensor,
    sizes: tuple[int, ...],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    reduce: Any,
) -> np.ndarray:
    """``reduce(codes inside, positions counting the padding)`` for every window, one at a time."""
    codes_in = x.numpy()
    out = np.zeros((*x.shape[:2], *sizes), dtype=np.int64)
    for place in itertools.product(*map(range, sizes)):
        inside, counted = [], 1
        for d, o in enumerate(place):
            start = o * stride[d] - padding[d]
            taps = [start + k * dilation[d] for k in range(kernel[d])]
            inside.append([t for t in taps if 0 <= t < x.shape[2 + d]])
            counted *= sum(t < x.shape[2 + d] + padding[d] for t in taps)
        for n, c in itertools.product(range(x.shape[0]), range(x.shape[1])):
            out[(n, c, *place)] = reduce(codes_in[(n, c, *np.ix_(*inside))], counted)
    return out


def assert_native(name: str, x: Tensor, *args: Any) -> Tensor:
    """The operator equals its reference: codes, dtype and strides. Returns the result."""
    result, expected = getattr(OPS, name)(x, *args), getattr(reference, f"{name}_reference")(x, *args)
    assert result.dtype == expected.dtype == x.dtype
    assert result.stride() == expected.stride()
    assert torch.equal(result, expected)
    return result


# --- windows ------------------------------------------------------------------------------------------------------

WINDOWS = {
    "3x3": ((2, 33, 7, 8), [3, 3], [1, 1], [1, 1], [1, 1], False),
    "stride": ((1, 64, 9, 10), [3, 3], [2, 2], [1, 1], [1, 1], False),
    "ceil": ((1, 17, 8, 9), [3, 2], [2, 2], [1, 1], [1, 1], True),
    "ceil-hangs-over": ((1, 5, 6, 7), [4, 4], [3, 3], [2, 2], [1, 1], True),
    "whole": ((1, 70, 5, 4), [5, 4], [1, 1], [0, 0], [1, 1], False),
    "dilated": ((1, 16, 11, 9), [3, 2], [1, 2], [2, 1], [2, 3], False),
    "1d": ((2, 130, 15), [4], [3], [2], [1], True),
    "3d": ((1, 3, 5, 6, 4), [2, 3, 2], [2, 1, 2], [1, 1, 0], [1, 1, 1], False),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WINDOWS)
def test_max_pool(isa: str, name: str, dtype: torch.dtype) -> None:
    shape, kernel, stride, padding, dilation, ceil_mode = WINDOWS[name]
    x = codes(shape, dtype)
    result = assert_native("max_pool", x, kernel, stride, padding, dilation, ceil_mode)
    args = (tuple(result.shape[2:]), kernel, stride, padding, dilation)
    expected = pool_by_definition(x, *args, lambda inside, _: inside.max(initial=torch.iinfo(dtype).min))
    assert np.array_equal(result.numpy().astype(np.int64), expected)
    last = assert_native("max_pool", channels_last(x), kernel, stride, padding, dilation, ceil_mode)
    assert torch.equal(last, result)
    assert last.movedim(1, -1).is_contiguous()


@pytest.mark.parametrize("divisor", [None, 7, -3])
@pytest.mark.parametrize("count_padding", [True, False], ids=["count-padding", "inside-only"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in WINDOWS if name != "dilated"])
def test_avg_pool(isa: str, name: str, dtype: torch.dtype, count_padding: bool, divisor: int | None) -> None:
    shape, kernel, stride, padding, dilation, ceil_mode = WINDOWS[name]
    x, zero = codes(shape, dtype), 100
    args = (zero, kernel, stride, padding, ceil_mode, count_padding, divisor)
    result = assert_native("avg_pool", x, *args)

    def average(inside: np.ndarray, counted: int) -> int:
        return mean_code(inside, divisor or (counted if count_padding else inside.size), zero, dtype)

    expected = pool_by_definition(x, tuple(result.shape[2:]), kernel, stride, padding, dilation, average)
    assert np.array_equal(result.numpy().astype(np.int64), expected)
    assert torch.equal(assert_native("avg_pool", channels_last(x), *args), result)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "out"),
    [((2, 40, 7, 7), [1, 1]), ((1, 17, 10, 7), [3, 4]), ((1, 3, 4), [9]), ((1, 5, 4, 5, 6), [2, 1, 4])],
    ids=["global", "uneven", "1d-grows", "3d"],
)
def test_adaptive_avg_pool(isa: str, shape: tuple[int, ...], out: list[int], dtype: torch.dtype) -> None:
    x = codes(shape, dtype)
    result = assert_native("adaptive_avg_pool", x, 5, out)
    assert torch.equal(assert_native("adaptive_avg_pool", channels_last(x), 5, out), result)
    for place in itertools.product(*map(range, out)):
        window = [
            slice(o * size // wanted, math.ceil((o + 1) * size / wanted))
            for o, size, wanted in zip(place, shape[2:], out, strict=True)
        ]
        for n, c in itertools.product(range(shape[0]), range(shape[1])):
            values = x.numpy()[(n, c, *window)]
            assert int(result[(n, c, *place)]) == mean_code(values, values.size, 5, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [[2, 3], [-1], [0], [1, 3], [], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("keepdim", [False, True])
def test_mean(isa: str, dim: list[int], keepdim: bool, dtype: torch.dtype) -> None:
    x = codes((2, 19, 6, 5), dtype)
    result = assert_native("mean", x, -7, dim, keepdim)
    assert torch.equal(assert_native("mean", channels_last(x), -7, dim, keepdim), result)
    assert torch.equal(
        assert_native("mean", x.transpose(0, 2), -7, [1], keepdim), OPS.mean(x.transpose(0, 2), -7, [1], keepdim)
    )
    axes = tuple(d % 4 for d in dim) or (0, 1, 2, 3)
    total = (x.numpy().astype(np.int64) + 7).sum(axes, keepdims=keepdim)
    info = torch.iinfo(dtype)
    expected = np.rint(total / math.prod(x.shape[d] for d in axes)).astype(np.int64) - 7
    assert np.array_equal(result.numpy().astype(np.int64), expected.clip(info.min, info.max))


@pytest.mark.parametrize("positions", [255, 256, 257, 258, 514, 20_000])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_long_windows_do_not_overflow(isa: str, dtype: torch.dtype, positions: int) -> None:
    """All codes at one end, around the number of taps that 16-bit sums can hold."""
    info = torch.iinfo(dtype)
    for code, zero in ((info.max, info.min), (info.min, info.max)):
        x = channels_last(torch.full((1, 35, positions), code, dtype=dtype))
        assert (assert_native("mean", x, zero, [2], False) == code).all()
        x[..., 0] = zero
        assert_native("adaptive_avg_pool", x, zero, [1])
        stride = -(-positions // 600)
        assert_native("avg_pool", x, zero, [positions], [stride], [positions // 2], False, True, None)


def test_ties_round_to_the_even_step_from_the_zero_point(isa: str) -> None:
    x = torch.tensor([[[3, 4], [4, 5], [5, 6]]], dtype=torch.uint8)
    assert OPS.mean(x, 3, [2], False).tolist() == [[3, 5, 5]]  # steps 0.5, 1.5, 2.5
    assert OPS.mean(x, 4, [2], False).tolist() == [[4, 4, 6]]  # steps -0.5, 0.5, 1.5


@pytest.mark.parametrize("channels", [1, 15, 16, 17, 31, 32, 33, 64, 65, 127, 128, 129, 200])
def test_every_number_of_channels(isa: str, threads: int, channels: int) -> None:
    x = channels_last(codes((2, channels, 9, 11), torch.int8))
    assert_native("max_pool", x, [3, 3], [2, 2], [1, 1], [1, 1], False)
    assert_native("avg_pool", x, 3, [3, 3], [2, 2], [1, 1], False, False, None)
    assert_native("adaptive_avg_pool", x, 3, [1, 1])


@pytest.mark.parametrize("last", [False, True])
def test_empty_batches(isa: str, last: bool) -> None:
    x = torch.zeros(0, 4, 6, 6, dtype=torch.uint8)
    x = channels_last(x) if last else x
    assert assert_native("max_pool", x, [2, 2], [2, 2], [0, 0], [1, 1], False).shape == (0, 4, 3, 3)
    assert assert_native("avg_pool", x, 0, [2, 2], [2, 2], [0, 0], False, True, None).shape == (0, 4, 3, 3)
    assert assert_native("adaptive_avg_pool", x, 0, [1, 1]).shape == (0, 4, 1, 1)
    assert assert_native("mean", x, 9, [2, 3], False).shape == (0, 4)
    assert assert_native("mean", x, 9, [0], False).eq(9).all()  # the mean of nothing is real zero


@st.composite
def windows(draw: st.DrawFn) -> tuple[Tensor, list[int], list[int], list[int], bool]:
    rank = draw(st.integers(1, 3))
    size = draw(st.lists(st.integers(1, 9), min_size=rank, max_size=rank))
    kernel = [draw(st.integers(1, s)) for s in size]
    stride = draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank))
    padding = [draw(st.integers(0, k // 2)) for k in kernel]
    torch.manual_seed(draw(st.integers(0, 2**31)))
    x = codes((draw(st.integers(0, 2)), draw(st.integers(1, 40)), *size), draw(st.sampled_from(DTYPES)))
    return channels_last(x) if draw(st.booleans()) else x, kernel, stride, padding, draw(st.booleans())


@given(windows(), st.booleans(), st.integers(0, 100))
def test_any_window_equals_the_reference(case: Any, count_padding: bool, zero: int) -> None:
    x, kernel, stride, padding, ceil_mode = case
    ones = [1] * len(kernel)
    calls = {
        "max_pool": (kernel, stride, padding, ones, ceil_mode),
        "avg_pool": (zero, kernel, stride, padding, ceil_mode, count_padding, None),
        "adaptive_avg_pool": (zero, kernel),
        "mean": (zero, list(range(2, x.dim())), False),
    }
    for name, args in calls.items():
        real = assert_native(name, x, *args)
        with FakeTensorMode() as mode:
            fake = getattr(OPS, name)(mode.from_tensor(x), *args)
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


X = torch.zeros(1, 4, 5, 5, dtype=torch.uint8)
REFUSED = {
    "kernel-too-large": ("max_pool", ([6, 6], [1, 1], [0, 0], [1, 1], False)),
    "dilated-kernel-too-large": ("max_pool", ([3, 3], [1, 1], [0, 0], [3, 1], False)),
    "no-kernel": ("max_pool", ([0, 2], [1, 1], [0, 0], [1, 1], False)),
    "no-stride": ("max_pool", ([2, 2], [0, 1], [0, 0], [1, 1], False)),
    "no-dilation": ("max_pool", ([2, 2], [1, 1], [0, 0], [0, 1], False)),
    "much-padding": ("max_pool", ([3, 3], [1, 1], [2, 2], [1, 1], False)),
    "negative-padding": ("max_pool", ([3, 3], [1, 1], [-1, 0], [1, 1], False)),
    "few-strides": ("max_pool", ([3, 3], [1], [0, 0], [1, 1], False)),
    "rank": ("max_pool", ([3], [1], [0], [1], False)),
    "no-rank": ("max_pool", ([], [], [], [], False)),
    "average-kernel": ("avg_pool", (0, [6, 6], [1, 1], [0, 0], False, True, None)),
    "average-padding": ("avg_pool", (0, [2, 2], [1, 1], [2, 0], False, True, None)),
    "average-divisor": ("avg_pool", (0, [2, 2], [1, 1], [0, 0], False, True, 0)),
    "adaptive-size": ("adaptive_avg_pool", (0, [-1, 1])),
    "adaptive-rank": ("adaptive_avg_pool", (0, [1])),
    "mean-range": ("mean", (0, [4], False)),
    "mean-twice": ("mean", (0, [1, -3], False)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_do_not_fit_are_refused(name: str) -> None:
    operator, args = REFUSED[name]
    for run in (getattr(OPS, operator), getattr(reference, f"{operator}_reference")):
        with pytest.raises(RuntimeError, match=r"pool|mean"):
            run(X, *args)


@native
def test_huge_numbers_are_refused_with_the_limit() -> None:
    huge, one = [2**40, 1], [1, 1]
    for call in (
        lambda: OPS.max_pool(X, huge, one, [0, 0], one, False),
        lambda: OPS.max_pool(X, one, huge, [0, 0], one, False),
        lambda: OPS.avg_pool(X, 0, huge, one, [0, 0], False, True, None),
        lambda: OPS.adaptive_avg_pool(X, 0, huge),
    ):
        with pytest.raises(RuntimeError, match=r"at most 2\*\*31, got \[.*1099511627776, 1\]"):
            call()


def test_empty_images_are_refused() -> None:
    empty = torch.zeros(1, 4, 0, 5, dtype=torch.uint8)
    for run in (OPS.max_pool, reference.max_pool_reference):
        with pytest.raises(RuntimeError, match="above 0"):
            run(empty, [1, 1], [1, 1], [0, 0], [1, 1], False)


# --- torch's functions on quantized tensors -----------------------------------------------------------------------


def quantized(shape: tuple[int, ...], dtype: zp.QDtype = zp.quint8) -> zp.QTensor:
    return zp.QTensor.from_codes(codes(shape, dtype.storage), 0.05, dtype.qmin + 120)


EXACT = {
    "max_pool1d": (lambda x: F.max_pool1d(x, 3, 2, 1), 1),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), 2),
    "max_pool3d": (lambda x: F.max_pool3d(x, (2, 3, 2), stride=1), 3),
    "MaxPool2d": (torch.nn.MaxPool2d(2), 2),
    "adaptive_max_pool1d": (lambda x: F.adaptive_max_pool1d(x, 3), 1),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, (3, None)), 2),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, 2), 3),
    "pad": (lambda x: F.pad(x, (1, 2, 0, 3)), 2),
    "pad-crops": (lambda x: F.pad(x, (-1, 2)), 2),
    "pad-reflect": (lambda x: F.pad(x, (1, 2, 3, 0), "reflect"), 2),
    "pad-replicate": (lambda x: F.pad(x, (1, 9, 3, 0), "replicate"), 2),
    "pad-circular": (lambda x: F.pad(x, (1, 2), "circular"), 1),
    "ZeroPad2d": (torch.nn.ZeroPad2d(2), 2),
    "ReLU6": (torch.nn.ReLU6(), 2),
    "Hardtanh": (torch.nn.Hardtanh(-1.0, 2.0), 2),
    "clamp": (lambda x: torch.clamp(x, -1.0, 2.0), 2),
    "clamp-method": (lambda x: x.clamp(max=0.5), 2),
    "clip": (lambda x: x.clip(min=torch.tensor(0.25)), 2),
    "clamp_min": (lambda x: torch.clamp_min(x, 0.25), 2),
    "clamp_max": (lambda x: x.clamp_max(0.25), 2),
    "pad-value": (lambda x: F.pad(x, (1, 1), value=1.5), 2),
}
ROUNDED = {
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 3, 2, 1), 1),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False), 2),
    "avg_pool2d-divisor": (lambda x: F.avg_pool2d(x, 2, divisor_override=3), 2),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2, ceil_mode=True), 3),
    "AvgPool2d": (torch.nn.AvgPool2d(2), 2),
    "adaptive_avg_pool1d": (lambda x: F.adaptive_avg_pool1d(x, 3), 1),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (None, 4)), 2),
    "AdaptiveAvgPool3d": (torch.nn.AdaptiveAvgPool3d(1), 3),
    "mean": (lambda x: x.mean((-2, -1)), 2),
    "mean-keepdim": (lambda x: torch.mean(x, -1, keepdim=True), 2),
    "mean-all": (lambda x: x.mean(), 2),
}


@pytest.mark.parametrize("batched", [True, False], ids=["batch", "no-batch"])
@pytest.mark.parametrize("dtype", [zp.quint8, zp.qint8])
@pytest.mark.parametrize("name", EXACT)
def test_selections_equal_the_float_function(name: str, dtype: zp.QDtype, batched: bool) -> None:
    function, rank = EXACT[name]
    x = quantized((*((2,) if batched else ()), 5, *[8] * rank), dtype)
    result, expected = function(x), function(x.dequantize())
    assert result.shape == expected.shape
    assert torch.equal(result.int_repr(), zp.quantize_per_tensor(expected, x.scale, x.zero_point, dtype).int_repr())


@pytest.mark.parametrize("batched", [True, False], ids=["batch", "no-batch"])
@pytest.mark.parametrize("dtype", [zp.quint8, zp.qint8])
@pytest.mark.parametrize("name", ROUNDED)
def test_averages_lie_within_half_a_step(name: str, dtype: zp.QDtype, batched: bool) -> None:
    function, rank = ROUNDED[name]
    x = quantized((*((2,) if batched else ()), 5, *[8] * rank), dtype)
    result, expected = function(x), function(x.dequantize().double())
    assert result.shape == expected.shape
    low, high = ((end - x.zero_point) * x.scale for end in (dtype.qmin, dtype.qmax))
    error = (result.dequantize().double() - expected.clamp(low, high)).abs().max()
    assert float(error) <= x.scale * 0.5001


def test_the_grid_is_kept() -> None:
    x = quantized((1, 4, 6, 6))
    for result in (F.max_pool2d(x, 2), F.avg_pool2d(x, 2), x.mean((2, 3)), F.pad(x, (1, 1)), F.relu6(x)):
        assert (result.scale, result.zero_point, result.qdtype) == (x.scale, x.zero_point, x.qdtype)


def test_clamping_in_place() -> None:
    x = quantized((2, 30))
    expected = x.clamp(-1.0, 1.0)
    assert F.hardtanh(x, inplace=True) is x
    assert torch.equal(x, expected)
    y = quantized((2, 30))
    assert y.clamp_(max=0.5) is y
    assert y.dequantize().max() <= 0.5


def test_code_of_a_value() -> None:
    x = zp.QTensor.from_codes(torch.zeros(1, dtype=torch.uint8), 0.5, 10)
    values = (0.0, 0.25, 0.75, -99.0, math.inf, -math.inf)
    assert [code_of(x, value) for value in values] == [10, 10, 12, 0, 255, 0]
    with pytest.raises(ValueError, match="NaN"):
        code_of(x, math.nan)


def test_the_same_errors_as_float() -> None:
    """Arguments that torch's float functions refuse are refused with the same type of error."""
    x = quantized((1, 4, 5, 5))
    calls: list[Any] = [
        lambda v: F.max_pool2d(v, 6),
        lambda v: F.max_pool2d(v, 3, stride=0),
        lambda v: F.max_pool2d(v, 3, padding=2),
        lambda v: F.max_pool1d(v, 3),
        lambda v: F.avg_pool2d(v, 7),
        lambda v: F.avg_pool2d(v, 2, divisor_override=0),
        lambda v: F.pad(v, (5, 5), "reflect"),
        lambda v: F.pad(v, (1, 1, 1)),
        lambda v: torch.clamp(v),
        lambda v: F.hardtanh(v, 2.0, 1.0),
    ]
    for call in calls:
        with pytest.raises(Exception) as of_float:
            call(x.dequantize())
        with pytest.raises((RuntimeError, ValueError)) as of_codes:
            call(x)
        assert isinstance(of_codes.value, of_float.type) or isinstance(of_float.value, NotImplementedError)


def test_indices_are_refused() -> None:
    x = quantized((1, 4, 6, 6))
    for call in (
        lambda: F.max_pool2d(x, 2, return_indices=True),
        lambda: F.max_pool1d(x[0], 2, return_indices=True),
        lambda: torch.nn.MaxPool3d(2, return_indices=True)(x),
        lambda: F.adaptive_max_pool2d(x, 2, return_indices=True),
    ):
        with pytest.raises(ValueError, match="indices"):
            call()


def test_wrong_calls_are_named() -> None:
    x = quantized((1, 4, 6, 6))
    with pytest.raises(ValueError, match="kernel_size"):
        F.max_pool2d(x, (1, 2, 3))
    with pytest.raises(TypeError, match="dequantize"):
        x.mean(1, dtype=torch.float32)
    with pytest.raises(TypeError, match="bounds"):
        torch.clamp(x, min=torch.zeros(6))
    with pytest.raises(ValueError, match="NaN"):
        x.clamp(min=math.nan)
    with pytest.raises(ValueError, match="no value"):
        F.pad(x, (1, 1, 1, 1), "reflect", value=1.0)
    per_channel = zp.quantize_per_channel(torch.zeros(1, 4, 6, 6), torch.ones(4), torch.zeros(4), 1, zp.quint8)
    for call in (lambda: F.max_pool2d(per_channel, 2), lambda: per_channel.mean(), lambda: F.relu6(per_channel)):
        with pytest.raises(RuntimeError, match="per-tensor"):
            call()
