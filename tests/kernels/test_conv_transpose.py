"""Transposed convolution: integers of the native kernels, and their definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import zeropoint as zp
from zeropoint.backends import cpu
from zeropoint.ops.conv_transpose import conv_transpose, conv_transpose_reference

CONVOLVE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
FIRST = {torch.uint8: 0, torch.int8: -128}


def call(
    kernel: list[int],
    size: list[int],
    stride: list[int] | None = None,
    padding: list[int] | None = None,
    output_padding: list[int] | None = None,
    dilation: list[int] | None = None,
    groups: int = 1,
    channels: tuple[int, int] = (4, 6),
    batch: int = 2,
    dtype: torch.dtype = torch.uint8,
    out_dtype: torch.dtype = torch.uint8,
    per_channel: bool = True,
    weight_zero_point: bool = False,
    bias: bool = True,
    packed: bool = True,
    channels_last: bool = False,
    seed: int = 0,
) -> tuple[Any, ...]:
    """Arguments of the operator, made of random codes."""
    make = torch.Generator().manual_seed(seed)
    rank = len(kernel)
    ones, zeros = [1] * rank, [0] * rank
    first, out_first = FIRST[dtype], FIRST[out_dtype]
    shape = (batch, channels[0] * groups, *size)
    x = torch.randint(first, first + 256, shape, generator=make).to(dtype)
    if channels_last:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    weight_shape = (channels[0] * groups, channels[1], *kernel)
    weight = torch.randint(-128, 128, weight_shape, generator=make).to(torch.int8)
    outputs = channels[1] * groups
    scale = torch.rand(outputs, generator=make) * 1e-2 + 1e-3 if per_channel else torch.tensor(5e-3)
    zero = torch.randint(-128, 128, (outputs,), generator=make) if weight_zero_point else torch.tensor(0)
    offset = torch.randn(outputs, generator=make) if bias else None
    stride, dilation = stride or ones, dilation or ones
    bytes_ = torch.ops.zeropoint.conv_transpose_pack(weight, stride, dilation, groups) if packed else None
    zero_points = [int(torch.randint(256, (), generator=make)) for _ in range(2)]
    return (
        *(x, 0.02, first + zero_points[0], weight, scale, zero.to(torch.int32), offset),
        *(stride, padding or zeros, output_padding or zeros, dilation, groups),
        *(0.3, out_first + zero_points[1], out_first, out_first + 255, out_dtype, bytes_),
    )


def assert_native_equals_reference(arguments: tuple[Any, ...]) -> Tensor:
    expected = conv_transpose_reference(*arguments)
    result: Tensor = torch.ops.zeropoint.conv_transpose(*arguments)
    assert result.dtype == expected.dtype
    assert result.stride() == expected.stride()
    assert torch.equal(result, expected)
    return result


@pytest.mark.parametrize("isa", cpu.available_isas() or ("reference",))
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"kernel": [3, 3], "size": [5, 7], "padding": [1, 1]}, id="stride 1"),
        pytest.param({"kernel": [2, 2], "size": [6, 5], "stride": [2, 2], "channels": (32, 24)}, id="doubling"),
        pytest.param(
            {"kernel": [4, 4], "size": [5, 6], "stride": [2, 2], "padding": [1, 1], "channels": (16, 8)}, id="gan"
        ),
        pytest.param(
            {"kernel": [3, 5], "size": [4, 4], "stride": [2, 3], "padding": [1, 0], "output_padding": [1, 2]},
            id="output padding",
        ),
        pytest.param({"kernel": [2, 3], "size": [4, 5], "dilation": [3, 2], "stride": [2, 4]}, id="dilation"),
        pytest.param({"kernel": [1], "size": [9], "stride": [3], "output_padding": [2]}, id="outputs without taps"),
        pytest.param({"kernel": [2], "size": [9], "stride": [3], "bias": False}, id="no bias"),
        pytest.param({"kernel": [3], "size": [9], "padding": [3]}, id="more padding than kernel"),
        pytest.param({"kernel": [3, 3], "size": [5, 5], "groups": 4, "channels": (2, 3)}, id="groups"),
        pytest.param(
            {"kernel": [3, 3], "size": [5, 5], "groups": 19, "channels": (1, 1), "stride": [2, 2]}, id="depthwise"
        ),
        pytest.param({"kernel": [2, 3, 2], "size": [3, 4, 3], "stride": [2, 1, 2], "padding": [0, 1, 1]}, id="3d"),
        pytest.param({"kernel": [3, 3], "size": [4, 4], "weight_zero_point": True, "stride": [2, 2]}, id="zero points"),
        pytest.param({"kernel": [3, 3], "size": [4, 4], "per_channel": False}, id="one grid"),
        pytest.param({"kernel": [3, 3], "size": [4, 4], "channels": (3, 1), "stride": [2, 2]}, id="one channel out"),
        pytest.param({"kernel": [3, 3], "size": [4, 4], "channels_last": True, "stride": [2, 1]}, id="channels last"),
        pytest.param({"kernel": [3, 3], "size": [4, 4], "batch": 0, "stride": [2, 1]}, id="empty batch"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_native_gives_the_integers_of_the_reference(isa: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    before = cpu.active_isa()
    if isa != "reference":
        cpu.set_isa(isa)
    try:
        assert_native_equals_reference(call(dtype=dtype, **options))
    finally:
        if isa != "reference":
            cpu.set_isa(before)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, ...]:
    rank = draw(st.integers(1, 3))

    def numbers(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank))

    stride, dilation = numbers(1, 4), numbers(1, 3)
    return call(
        numbers(1, 4),
        numbers(1, 5),
        stride,
        numbers(0, 3),
        [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)],
        dilation,
        draw(st.integers(1, 3)),
        (draw(st.integers(1, 5)), draw(st.integers(1, 18))),
        draw(st.integers(1, 2)),
        draw(st.sampled_from([torch.uint8, torch.int8])),
        draw(st.sampled_from([torch.uint8, torch.int8])),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 1000)),
    )


@given(calls())
@settings(max_examples=50, deadline=None)
def test_native_gives_the_integers_or_the_refusal_of_the_reference(arguments: tuple[Any, ...]) -> None:
    try:
        conv_transpose_reference(*arguments)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            torch.ops.zeropoint.conv_transpose(*arguments)
        return
    assert_native_equals_reference(arguments)


@pytest.mark.parametrize("groups", [1, 2])
def test_it_is_the_float_layer_on_grids(groups: int) -> None:
    """Equal, code for code, to float64 on the real values, where no sum lies on a rounding tie."""
    make = torch.Generator().manual_seed(3)
    x = zp.quantize_per_tensor(torch.randn(2, 4, 5, 5, generator=make), 0.03, 120, zp.quint8)
    weight = torch.randint(-127, 128, (4, 3, 3, 3), generator=make).to(torch.int8)
    scale = torch.rand(3 * groups, generator=make) * 0.01 + 0.001
    out = conv_transpose(
        x, weight, scale, torch.tensor(0), None, 0.25, 100, stride=2, padding=1, output_padding=1, groups=groups
    )
    real = weight.double().reshape(groups, -1, 3, 3, 3) * scale.double().reshape(groups, 1, -1, 1, 1)
    exact = F.conv_transpose2d(
        x.dequantize().double(), real.reshape(weight.shape), None, stride=2, padding=1, output_padding=1, groups=groups
    )
    place = exact / 0.25
    clear = (place - place.floor() - 0.5).abs() > 1e-4
    expected = (torch.round(place) + 100).clamp(0, 255)
    assert bool(clear.float().mean() > 0.99)
    assert torch.equal(out.int_repr()[clear].double(), expected[clear])


def test_packed_weights_that_do_not_fit_are_not_used() -> None:
    arguments = call([4, 4], [5, 5], [2, 2])
    expected = conv_transpose_reference(*arguments)
    packed = arguments[-1]
    other = torch.ops.zeropoint.conv_transpose_pack(torch.zeros(3, 3, 2, 2, dtype=torch.int8), [1, 1], [1, 1], 1)
    broken = packed.clone()
    broken[16:32] = 255
    for wrong in (other, broken, packed[:40], packed[:0], torch.zeros_like(packed)):
        assert torch.equal(torch.ops.zeropoint.conv_transpose(*arguments[:-1], wrong), expected)


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("x", torch.zeros(2, 5, 5, 5, dtype=torch.uint8)),
        ("x", torch.zeros(4, 5, 5, dtype=torch.uint8)),
        ("x", torch.zeros(2, 4, 0, 5, dtype=torch.uint8)),
        ("weight", torch.zeros(4, 0, 3, 3, dtype=torch.int8)),
        ("weight_scale", torch.ones(5)),
        ("bias", torch.ones(5)),
        ("stride", [0, 1]),
        ("padding", [20, 0]),
        ("output_padding", [2, 0]),
        ("groups", 3),
        ("x_zero_point", 256),
        ("out_min", 300),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: str, value: Any) -> None:
    names = [a.name for a in torch.ops.zeropoint.conv_transpose.default._schema.arguments]
    arguments = list(call([3, 3], [5, 5], [2, 2], packed=False))
    arguments[names.index(change)] = value
    for function in (conv_transpose_reference, torch.ops.zeropoint.conv_transpose):
        with pytest.raises(RuntimeError):
            function(*arguments)


@pytest.mark.parametrize(
    ("change", "value", "text"),
    [
        ("stride", [2**40, 1], r"strides and dilations of at least 1, .*all below 2\*\*31, got \[1099511627776, 1\]"),
        ("dilation", [1, 2**31], r"strides and dilations of at least 1, .*all below 2\*\*31, got \[2, 2\]"),
        ("padding", [2**40, 0], r"paddings of at least 0, all below 2\*\*31, got .*\[1099511627776, 0\]"),
        ("padding", [20, 0], r"would have size -?\d+ in spatial dimension 0.*give it another input or padding"),
        ("x_scale", 0.0, "x_scale and an out_scale that are finite and above 0, got 0"),
        ("x_scale", float("nan"), "x_scale and an out_scale that are finite and above 0, got nan"),
        ("out_scale", -1.0, "x_scale and an out_scale that are finite and above 0, got 0.02 and -1"),
        ("out_scale", float("inf"), "x_scale and an out_scale that are finite and above 0, got 0.02 and inf"),
    ],
)
def test_numbers_out_of_range_are_refused_with_the_range(change: str, value: Any, text: str) -> None:
    names = [a.name for a in torch.ops.zeropoint.conv_transpose.default._schema.arguments]
    arguments = list(call([3, 3], [5, 5], [2, 2], packed=False))
    arguments[names.index(change)] = value
    for function in (conv_transpose_reference, torch.ops.zeropoint.conv_transpose):
        with pytest.raises(RuntimeError, match=text):
            function(*arguments)


def test_shape_function_agrees_with_the_kernel() -> None:
    arguments = call([3, 2], [5, 4], [2, 3], [1, 0], [1, 2])
    names = [torch.empty_like(a, device="meta") if isinstance(a, Tensor) else a for a in arguments]
    planned = torch.ops.zeropoint.conv_transpose(*names)
    result = torch.ops.zeropoint.conv_transpose(*arguments)
    assert planned.shape == result.shape
    assert planned.stride() == result.stride()
    assert planned.dtype == result.dtype
