"""Convolution kernels: the same integers as the reference and as plain 64-bit arithmetic, on every instruction set."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

import zeropoint as zp
from zeropoint import backends
from zeropoint.ops.conv import conv, conv_reference, pad_codes, padding_pairs

OPS = torch.ops.zeropoint
native = pytest.mark.skipif(not backends.is_native(), reason="the native library is not built")


def codes(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max + 1, shape, dtype=torch.int16).to(dtype)


def channels_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


@dataclass(frozen=True)
class Case:
    """Arguments of the convolution operator, by name; sequences repeat a number for every dimension."""

    x: Tensor
    weight: Tensor
    stride: int | tuple[int, ...] = 1
    padding: int | tuple[int, ...] = 0
    dilation: int | tuple[int, ...] = 1
    groups: int = 1
    x_scale: float = 0.031
    x_zero_point: int = 7
    weight_scale: Tensor | None = None
    weight_zero_point: Tensor | None = None
    bias: Tensor | None = None
    out_scale: float = 0.5
    out_zero_point: int = 3
    out_min: int = 0
    out_max: int = 255
    out_dtype: torch.dtype = torch.uint8
    packed: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.weight.dim() - 2

    def numbers(self, name: str, count: int) -> list[int]:
        value = getattr(self, name)
        return [value] * count if isinstance(value, int) else list(value)

    def args(self) -> tuple[Any, ...]:
        scale = torch.tensor([0.007]) if self.weight_scale is None else self.weight_scale
        zeros = torch.tensor([0], dtype=torch.int32) if self.weight_zero_point is None else self.weight_zero_point
        return (
            *(self.x, self.x_scale, self.x_zero_point, self.weight, scale, zeros, self.bias),
            *(self.numbers("stride", self.rank), self.numbers("padding", 2 * self.rank)),
            *(self.numbers("dilation", self.rank), self.groups),
            *(self.out_scale, self.out_zero_point, self.out_min, self.out_max, self.out_dtype, self.packed),
        )

    def packed_now(self) -> Case:
        return replace(self, packed=OPS.conv_pack(self.weight, self.groups))

    def run(self) -> Tensor:
        return OPS.conv(*self.args())

    def run_bound(self) -> Tensor:
        """The operator with packed weights and bound arguments."""
        packed, bound = OPS.conv_pack(self.weight, self.groups), OPS.conv_bind(self.x.dtype, *self.args()[1:-1])
        return OPS.conv_bound(self.x, self.weight, packed, bound)

    def reference(self) -> Tensor:
        return conv_reference(*self.args())


def exact_sums(case: Case) -> np.ndarray:
    """Sums of ``(x - zero_point) * (w - zero_point)`` in 64-bit integers, by windows: (N, out_channels, spatial)."""
    rank, kernel = case.rank, case.weight.shape[2:]
    stride, padding = case.numbers("stride", rank), case.numbers("padding", 2 * rank)
    dilation = case.numbers("dilation", rank)
    x = case.x.numpy().astype(np.int64) - case.x_zero_point
    x = np.pad(x, [(0, 0), (0, 0), *[(padding[2 * d], padding[2 * d + 1]) for d in range(rank)]])
    w = case.weight.numpy().astype(np.int64)
    if case.weight_zero_point is not None:
        w = w - case.weight_zero_point.numpy().astype(np.int64).reshape(-1, *[1] * (rank + 1))
    extents = [dilation[d] * (kernel[d] - 1) + 1 for d in range(rank)]
    windows = np.lib.stride_tricks.sliding_window_view(x, extents, tuple(range(2, 2 + rank)))
    windows = windows[(..., *[slice(None, None, s) for s in dilation])]
    windows = windows[(slice(None), slice(None), *[slice(None, None, s) for s in stride])]
    group_in, group_out = w.shape[1], w.shape[0] // case.groups
    parts = []
    for g in range(case.groups):
        window = windows[:, g * group_in : (g + 1) * group_in]
        axes = [1, *range(2 + rank, 2 + 2 * rank)]
        part = np.tensordot(window, w[g * group_out : (g + 1) * group_out], (axes, list(range(1, 2 + rank))))
        parts.append(np.moveaxis(part, -1, 1))
    return np.concatenate(parts, 1)


def exact_codes(case: Case) -> np.ndarray:
    """The numeric contract in numpy: every operation rounds by itself."""
    channels = case.weight.shape[0]
    shape = (-1, *[1] * case.rank)
    w_scale = np.float64([0.007]).astype(np.float32) if case.weight_scale is None else case.weight_scale.numpy()
    w_scale = np.broadcast_to(w_scale.astype(np.float64), (channels,)).reshape(shape)
    y = exact_sums(case).astype(np.float32) * (case.x_scale * w_scale / case.out_scale).astype(np.float32)
    if case.bias is not None:
        y = y + (case.bias.numpy().astype(np.float64) / case.out_scale).astype(np.float32).reshape(shape)
    assert y.dtype == np.float32
    steps = np.clip(np.rint(y), case.out_min - case.out_zero_point, case.out_max - case.out_zero_point)
    return steps.astype(np.int64) + case.out_zero_point


def assert_exact(case: Case) -> None:
    """Operator (weights packed before or in the call, or bound) == reference == 64-bit integers; layout as promised."""
    expected = exact_codes(case)
    reference = case.reference()
    assert np.array_equal(reference.numpy().astype(np.int64), expected)
    bound = [case.run_bound()] if backends.is_native() else []
    for result in (case.run(), case.packed_now().run(), *bound):
        assert result.dtype == case.out_dtype
        assert result.stride() == reference.stride()
        assert result.movedim(1, -1).is_contiguous()
        assert torch.equal(result, reference)


def random_case(
    shape: tuple[int, ...],
    out_channels: int,
    kernel: tuple[int, ...],
    groups: int = 1,
    *,
    signed: bool = False,
    shifted: bool = False,
    bias: bool = True,
    **more: Any,
) -> Case:
    dtype = torch.int8 if signed else torch.uint8
    info = torch.iinfo(dtype)
    weight = codes((out_channels, shape[1] // groups, *kernel), torch.int8)
    spread = math.sqrt(weight[0].numel())
    given_values = {
        "x_zero_point": int(torch.randint(info.min, info.max + 1, ())),
        "weight_scale": torch.rand(out_channels) * 0.01 + 0.002,
        "weight_zero_point": torch.randint(-128, 128, (out_channels,), dtype=torch.int32) if shifted else None,
        "bias": torch.randn(out_channels) * spread if bias else None,
        "out_scale": 0.02 * spread * (2.0 if shifted else 1.0),
        "out_zero_point": info.min + 100,
        "out_min": info.min,
        "out_max": info.max,
        "out_dtype": dtype,
    }
    return Case(codes(shape, dtype), weight, groups=groups, **(given_values | more))


# --- forms --------------------------------------------------------------------------------------------------------

FORMS = {
    "1x1": ((2, 16, 5, 6), 17, (1, 1), 1, {}),
    "1x1-odd-channels": ((1, 17, 4, 5), 33, (1, 1), 1, {}),
    "1x1-stride": ((1, 16, 9, 8), 8, (1, 1), 1, {"stride": 2}),
    "1x1-groups": ((1, 16, 5, 5), 8, (1, 1), 2, {}),
    "3x3": ((1, 16, 8, 7), 24, (3, 3), 1, {"padding": 1}),
    "3x3-picture": ((2, 3, 13, 21), 32, (3, 3), 1, {"padding": 1, "stride": 2}),
    "one-channel": ((1, 1, 12, 9), 5, (5, 5), 1, {"padding": 2}),
    "two-channels": ((1, 2, 9, 9), 4, (3, 3), 1, {}),
    "one-output": ((1, 130, 5, 4), 1, (3, 3), 1, {"padding": 1}),
    "wide": ((1, 130, 6, 6), 65, (3, 3), 1, {"stride": (2, 1), "padding": (0, 1, 2, 1)}),
    "dilated": ((1, 5, 11, 12), 16, (3, 2), 1, {"dilation": (2, 3), "padding": (2, 1, 0, 3)}),
    "groups": ((1, 15, 7, 7), 9, (3, 3), 3, {"padding": 1}),
    "groups-dilated": ((1, 8, 9, 9), 6, (3, 3), 2, {"padding": 2, "dilation": 2}),
    "same-even": ((1, 4, 9, 10), 6, (4, 2), 1, {"padding": (1, 2, 0, 1)}),
    "1d": ((2, 6, 31), 10, (5,), 1, {"padding": (2, 1), "stride": 2}),
    "1d-groups": ((2, 6, 20), 4, (3,), 2, {"dilation": 3, "padding": 3}),
    "3d": ((1, 5, 5, 6, 7), 9, (3, 2, 3), 1, {"padding": (1, 0, 1, 1, 0, 1), "stride": (1, 2, 1)}),
    "3d-groups": ((1, 4, 4, 4, 5), 6, (2, 2, 2), 2, {"dilation": (1, 2, 1)}),
    "depthwise-3x3": ((2, 96, 9, 11), 96, (3, 3), 96, {"padding": 1}),
    "depthwise-3x3-stride": ((1, 70, 12, 13), 70, (3, 3), 70, {"padding": 1, "stride": 2}),
    "depthwise-5x5": ((1, 130, 9, 9), 130, (5, 5), 130, {"padding": 2}),
    "depthwise-5x5-stride": ((1, 48, 14, 15), 48, (5, 5), 48, {"padding": 2, "stride": 2}),
    "depthwise-7x7": ((1, 64, 10, 10), 64, (7, 7), 64, {"padding": 3}),
    "depthwise-narrow-input": ((1, 64, 7, 1), 64, (5, 5), 64, {"padding": 2, "stride": 2}),
    "depthwise-few": ((1, 3, 8, 8), 3, (3, 3), 3, {"padding": 1}),
    "depthwise-twice": ((1, 17, 7, 9), 34, (3, 3), 17, {"padding": 1}),
    "depthwise-odd-kernel": ((1, 33, 9, 9), 33, (2, 4), 33, {"padding": (1, 0, 2, 1), "stride": (1, 3)}),
    "depthwise-dilated": ((1, 32, 12, 12), 32, (3, 3), 32, {"padding": 2, "dilation": 2}),
    "depthwise-1d": ((1, 20, 40), 20, (9,), 20, {"padding": 4}),
    "depthwise-3d": ((1, 16, 5, 6, 7), 16, (3, 3, 3), 16, {"padding": 1, "stride": (1, 1, 2)}),
    "depthwise-long-line": ((1, 16, 3, 700), 16, (3, 3), 16, {"padding": 1}),
}


@pytest.mark.parametrize("shifted", [False, True], ids=["symmetric", "weight-zero-points"])
@pytest.mark.parametrize("signed", [False, True], ids=["uint8", "int8"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_exact(isa: str, form: str, signed: bool, shifted: bool) -> None:
    shape, out_channels, kernel, groups, more = FORMS[form]
    assert_exact(random_case(shape, out_channels, kernel, groups, signed=signed, shifted=shifted, **more))


@pytest.mark.parametrize("form", ["3x3", "1x1", "depthwise-3x3", "3x3-picture", "3d", "1d"])
def test_memory_order_of_the_input_does_not_matter(isa: str, form: str) -> None:
    shape, out_channels, kernel, groups, more = FORMS[form]
    case = random_case(shape, out_channels, kernel, groups, **more)
    expected = case.reference()
    sparse = codes((*(2 * size for size in shape),), torch.uint8)[tuple(slice(None, None, 2) for _ in shape)]
    sparse.copy_(case.x)
    for x in (channels_last(case.x), sparse, case.x.transpose(-1, -1), case.x.transpose(1, 2).clone().transpose(1, 2)):
        assert torch.equal(replace(case, x=x).run(), expected)


@pytest.mark.parametrize("form", ["1x1", "3x3", "groups", "depthwise-3x3", "depthwise-5x5-stride", "3x3-picture"])
def test_threads_change_nothing(isa: str, threads: int, form: str) -> None:
    shape, out_channels, kernel, groups, more = FORMS[form]
    case = random_case((3, shape[1], 40, 35), out_channels, kernel, groups, **more)
    assert torch.equal(case.run(), case.reference())


@pytest.mark.parametrize("signed_out", [False, True])
@pytest.mark.parametrize("signed_in", [False, True])
@pytest.mark.parametrize("form", ["3x3", "depthwise-3x3"])
def test_signs_mix(isa: str, form: str, signed_in: bool, signed_out: bool) -> None:
    shape, out_channels, kernel, groups, more = FORMS[form]
    case = random_case(shape, out_channels, kernel, groups, signed=signed_in, **more)
    low = -128 if signed_out else 0
    dtype = torch.int8 if signed_out else torch.uint8
    assert_exact(replace(case, out_dtype=dtype, out_min=low, out_max=low + 255, out_zero_point=low + 77))


@pytest.mark.parametrize("form", ["3x3", "depthwise-3x3"])
def test_relu_and_relu6_are_ends_of_the_output(isa: str, form: str) -> None:
    shape, out_channels, kernel, groups, more = FORMS[form]
    case = random_case(shape, out_channels, kernel, groups, **more)
    fused = replace(case, out_min=100, out_max=160).run()
    assert torch.equal(fused, case.run().clamp(100, 160))


def test_one_weight_scale_and_zero_point_serve_all_channels(isa: str) -> None:
    case = random_case((1, 8, 6, 6), 5, (3, 3), padding=1)
    one = replace(case, weight_scale=torch.tensor([0.004]), weight_zero_point=torch.tensor([-3], dtype=torch.int32))
    many = replace(one, weight_scale=torch.full((5,), 0.004), weight_zero_point=torch.full((5,), -3))
    assert_exact(one)
    assert torch.equal(one.run(), many.run())


# --- worst cases --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [-128, 127])
@pytest.mark.parametrize(
    ("shape", "kernel", "groups"),
    [((1, 555, 3, 3), (3, 3), 1), ((1, 5000, 2, 2), (1, 1), 1), ((1, 64, 5, 5), (5, 5), 64), ((1, 4, 700), (600,), 4)],
    ids=["deep", "5000-channels", "depthwise", "long-depthwise"],
)
def test_largest_sums_are_exact(
    isa: str, shape: tuple[int, ...], kernel: tuple[int, ...], groups: int, weight: int
) -> None:
    """All codes 255 and all weights at an end: what 16-bit sums would saturate."""
    out_channels = 64 if groups == 64 else 4
    depth = shape[1] // groups * math.prod(kernel)
    case = Case(
        torch.full(shape, 255, dtype=torch.uint8),
        torch.full((out_channels, shape[1] // groups, *kernel), weight, dtype=torch.int8),
        groups=groups,
        x_zero_point=0,
        x_scale=1.0,
        weight_scale=torch.tensor([1.0]),
        out_scale=depth * 400.0,
        out_zero_point=128,
    )
    assert_exact(case)
    assert_exact(replace(case, x_zero_point=255, x=torch.zeros_like(case.x)))
    assert_exact(replace(case, weight_zero_point=torch.full((out_channels,), -1 - weight, dtype=torch.int32)))


def test_sums_beyond_32_bits_are_exact(isa: str) -> None:
    depth = 70_000  # 70_000 * 255 * 255 > 2**31
    case = Case(
        torch.full((1, depth, 1, 2), 255, dtype=torch.uint8),
        torch.full((2, depth, 1, 1), 127, dtype=torch.int8),
        x_zero_point=0,
        x_scale=1.0,
        weight_scale=torch.tensor([1.0]),
        weight_zero_point=torch.tensor([-128, 127], dtype=torch.int32),
        out_scale=depth * 400.0,
    )
    assert_exact(case)


def test_multipliers_out_of_range_saturate(isa: str) -> None:
    """A grid of nonsense: results saturate or are the zero point, as in the reference, and nothing breaks."""
    for groups in (1, 16):
        case = random_case((1, 16, 5, 5), 16, (3, 3), groups, bias=False)
        for out_scale in (1e-30, 1e30, 1e-320):
            case = replace(case, out_scale=out_scale, x_scale=1e20 if out_scale < 1e-300 else 1.0)
            assert torch.equal(case.run(), case.reference())


# --- empty and refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 8])
def test_empty_batch(isa: str, groups: int) -> None:
    case = random_case((0, 8, 5, 6), 8, (3, 3), groups, padding=1)
    result = case.run()
    assert result.shape == (0, 8, 5, 6)
    assert result.stride() == case.reference().stride()


X = torch.zeros(1, 4, 5, 5, dtype=torch.uint8)
W = torch.zeros(6, 4, 3, 3, dtype=torch.int8)
REFUSED = {
    "channels": Case(X, torch.zeros(6, 5, 3, 3, dtype=torch.int8)),
    "groups": Case(X, torch.zeros(6, 1, 3, 3, dtype=torch.int8), groups=4),
    "no-groups": Case(X, W, groups=0),
    "negative-groups": Case(X, W, groups=-1),
    "kernel-too-large": Case(X, torch.zeros(6, 4, 6, 3, dtype=torch.int8)),
    "dilated-kernel-too-large": Case(X, W, dilation=3),
    "no-stride": Case(X, W, stride=0),
    "negative-stride": Case(X, W, stride=(1, -1)),
    "no-dilation": Case(X, W, dilation=0),
    "negative-padding": Case(X, W, padding=(0, 0, -1, 0)),
    "few-strides": Case(X, W, stride=(1,)),
    "few-paddings": Case(X, W, padding=(1, 1)),
    "rank": Case(X[0], W),
    "no-spatial": Case(X[:, :, 0, 0], W[:, :, 0, 0]),
    "no-outputs": Case(X, torch.zeros(0, 4, 3, 3, dtype=torch.int8)),
    "empty-kernel": Case(X, torch.zeros(6, 4, 0, 3, dtype=torch.int8)),
    "float-input": Case(X.float(), W),
    "float-weights": Case(X, W.float()),
    "wide-output": Case(X, W, out_dtype=torch.int32),
    "scales": Case(X, W, weight_scale=torch.ones(5)),
    "zero-points": Case(X, W, weight_zero_point=torch.zeros(7, dtype=torch.int32)),
    "biases": Case(X, W, bias=torch.zeros(5)),
    "no-bias": Case(X, W, bias=torch.zeros(0)),
    "input-zero-point": Case(X, W, x_zero_point=256),
    "output-zero-point": Case(X, W, out_zero_point=-1),
    "output-ends": Case(X, W, out_min=9, out_max=8),
    "empty-input": Case(torch.zeros(1, 4, 0, 5, dtype=torch.uint8), W),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_that_do_not_fit_are_refused(name: str) -> None:
    for run in (REFUSED[name].run, REFUSED[name].reference):
        with pytest.raises(RuntimeError, match="conv"):
            run()


@pytest.mark.parametrize("size", [2**31, 2**62])
def test_huge_arguments_are_refused(size: int) -> None:
    for case in (Case(X, W, padding=size), Case(X, W, stride=size), Case(X, W, dilation=size)):
        for run in (case.run, case.reference):
            with pytest.raises(RuntimeError, match=r"paddings of at least 0, all below 2\*\*31, got"):
                run()


@native
def test_an_output_that_no_memory_holds_is_refused() -> None:
    with pytest.raises(RuntimeError):
        Case(X, W, padding=2**31 - 1).run()


@pytest.mark.parametrize("name", ["x_scale", "out_scale"])
@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_make_no_grid_are_refused(name: str, scale: float) -> None:
    case = replace(Case(X, W), **{name: scale})
    for run in (case.run, case.reference):
        with pytest.raises(
            RuntimeError, match="conv takes an x_scale and an out_scale that are finite and above 0, got"
        ):
            run()
    if name == "out_scale":
        q = zp.quantize_per_tensor(torch.zeros(1, 4, 5, 5), 1.0, 0, zp.quint8)
        with pytest.raises(ValueError, match="out_scale must be finite and above 0, got"):
            conv(q, W, torch.ones(1), torch.zeros(1, dtype=torch.int32), None, scale, 0)


@native
def test_bound_arguments_that_do_not_fit_are_refused() -> None:
    case = random_case((2, 6, 7, 8), 9, (3, 3), 3, padding=1)
    packed, good = OPS.conv_pack(case.weight, 3), OPS.conv_bind(case.x.dtype, *case.args()[1:-1])
    assert torch.equal(OPS.conv_bound(case.x, case.weight, packed, good), case.reference())
    one = replace(case, weight=codes((9, 2, 3), torch.int8), x=case.x[..., 0])
    of_linear = OPS.linear_bind(
        *(torch.uint8, 0.1, 3, codes((9, 54), torch.int8), torch.ones(1), torch.zeros(1, dtype=torch.int32), None),
        *(0.1, 3, 0, 255, torch.uint8),
    )
    wrong = [good[:0], good[:-1], good[:100], good[1:], torch.cat([good, good]), torch.zeros_like(good), of_linear]
    wrong += [OPS.conv_bind(one.x.dtype, *one.args()[1:-1])]  # of another rank
    for bytes_ in wrong:
        with pytest.raises(RuntimeError, match="not what was bound for a weight of 9 output channels"):
            OPS.conv_bound(case.x, case.weight, packed, bytes_)
    for weight in (case.weight[:, 0, 0, 0], case.weight[:, 0, 0], case.weight[..., None, None, None]):
        with pytest.raises(RuntimeError, match="bound for a weight"):
            OPS.conv_bound(case.x, weight, packed, good)
    with pytest.raises(RuntimeError, match="bound for other codes"):
        OPS.conv_bound(case.x.to(torch.int8), case.weight, packed, good)
    with pytest.raises(RuntimeError, match="takes an input of 6 channels"):
        OPS.conv_bound(case.x[:, :5], case.weight, packed, good)
    with pytest.raises(RuntimeError, match="strides"):
        OPS.conv_bind(case.x.dtype, *replace(case, stride=(1,)).args()[1:-1])


@native
def test_damaged_windows_are_errors_and_no_crash() -> None:
    """Any of the numbers in bound arguments may be wrong: sizes are checked in every call."""
    case = random_case((1, 4, 6, 6), 5, (3, 3), 1, padding=1)
    packed, good = OPS.conv_pack(case.weight, 1), OPS.conv_bind(case.x.dtype, *case.args()[1:-1])
    words = good[:256].view(torch.int64)
    for at in range(2, len(words)):
        for value in (-1, 0, 1, 2**31, 2**62, -(2**63)):
            damaged = good.clone()
            damaged[:256].view(torch.int64)[at] = value
            try:
                OPS.conv_bound(case.x, case.weight, packed, damaged)
            except RuntimeError as error:
                assert "conv" in str(error)  # noqa: PT017


# --- packed weights -----------------------------------------------------------------------------------------------


@native
@pytest.mark.parametrize("form", ["3x3", "groups", "depthwise-3x3"])
def test_packed_bytes_that_do_not_fit_are_ignored(isa: str, form: str) -> None:
    shape, out_channels, kernel, groups, more = FORMS[form]
    case = random_case(shape, out_channels, kernel, groups, **more)
    expected = case.reference()
    packed = OPS.conv_pack(case.weight, groups)
    other = OPS.conv_pack(codes((out_channels + groups, *case.weight.shape[1:]), torch.int8), groups)
    garbage = [
        packed[:0],
        packed[:-1],
        packed[:100],
        packed[1:],
        torch.cat([packed, packed]),
        torch.zeros_like(packed),
        torch.full_like(packed, 255),
        codes(tuple(packed.shape), torch.uint8),
        other,
        packed.to(torch.int32),
        packed.view(torch.int8),
        torch.stack([packed, packed])[:, ::2].reshape(-1),
        torch.cat([packed.new_zeros(1), packed])[1:],
    ]
    for candidate in garbage:
        assert torch.equal(replace(case, packed=candidate).run(), expected)


@native
@pytest.mark.parametrize("form", ["3x3", "groups", "depthwise-3x3"])
def test_a_damaged_header_is_never_trusted(isa: str, form: str) -> None:
    """Every 8-byte word of the header, and of the table behind it, replaced by wild numbers: no crash, same codes."""
    shape, out_channels, kernel, groups, more = FORMS[form]
    case = random_case(shape, out_channels, kernel, groups, **more)
    expected = case.reference()
    packed = OPS.conv_pack(case.weight, groups)
    header = 128 + (16 * groups if form == "groups" else 0)
    for at in range(0, header, 8):
        for value in (-1, 2**62, len(packed), 3):
            damaged = packed.clone()
            damaged[at : at + 8] = torch.frombuffer(bytearray(struct.pack("<q", value)), dtype=torch.uint8)
            if not torch.equal(damaged, packed):
                assert torch.equal(replace(case, packed=damaged).run(), expected)


@native
def test_weights_packed_for_another_instruction_set_are_packed_anew() -> None:
    before = backends.active_isa()
    try:
        for groups in (1, 16):
            case = random_case((1, 16, 6, 6), 16, (3, 3), groups)
            for packed_for in backends.available_isas():
                backends.set_isa(packed_for)
                packed = OPS.conv_pack(case.weight, groups)
                for run_on in backends.available_isas():
                    backends.set_isa(run_on)
                    assert torch.equal(replace(case, packed=packed).run(), case.reference())
    finally:
        backends.set_isa(before)


# --- properties ---------------------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rank = draw(st.integers(1, 3))
    small = st.integers(1, 4)
    groups = draw(st.sampled_from([1, 1, 2, 5, 19]))
    group_in = draw(st.sampled_from([1, 1, 2, 3, 9]))
    out_channels = groups * draw(st.sampled_from([1, 1, 2, 7]))
    kernel = tuple(draw(st.lists(small, min_size=rank, max_size=rank)))
    stride = tuple(draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank)))
    dilation = tuple(draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank)))
    padding = tuple(draw(st.lists(st.integers(0, 4), min_size=2 * rank, max_size=2 * rank)))
    size = tuple(draw(st.lists(st.integers(1, 10), min_size=rank, max_size=rank)))
    for d in range(rank):
        assume(size[d] + padding[2 * d] + padding[2 * d + 1] >= dilation[d] * (kernel[d] - 1) + 1)
    torch.manual_seed(draw(st.integers(0, 2**31)))
    return random_case(
        *((draw(st.integers(1, 2)), groups * group_in, *size), out_channels, kernel, groups),
        signed=draw(st.booleans()),
        shifted=draw(st.booleans()),
        bias=draw(st.booleans()),
        stride=stride,
        padding=padding,
        dilation=dilation,
    )


@given(cases())
def test_any_geometry_is_exact(case: Case) -> None:
    assert_exact(case)


@given(cases())
def test_fake_outputs_have_the_real_shape_and_strides(case: Case) -> None:
    real = case.run()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = OPS.conv(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in case.args()))
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


# --- quantized tensors --------------------------------------------------------------------------------------------


def float_conv(rank: int) -> Any:
    return (F.conv1d, F.conv2d, F.conv3d)[rank - 1]


def quantized(shape: tuple[int, ...]) -> zp.QTensor:
    return zp.QTensor.from_codes(codes(shape, torch.uint8), 0.05, 90)


def compare_with_float(x: zp.QTensor, kernel: tuple[int, ...], reference: Any, **more: Any) -> zp.QTensor:
    """A quantized convolution lies within one step of the float one of the same codes."""
    rank = len(kernel)
    weight = codes((6, 4, *kernel), torch.int8)
    zero = torch.zeros(1, dtype=torch.int32)
    result = conv(x, weight, torch.tensor([0.01]), zero, None, 0.5, 120, **more)
    real = reference(x.dequantize(), weight.float() * 0.01)
    expected = zp.quantize_per_tensor(real, 0.5, 120, zp.quint8)
    assert result.shape == real.shape
    assert rank == weight.dim() - 2
    assert (result.int_repr().int() - expected.int_repr().int()).abs().max() <= 1
    return result


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # of the float convolution
@pytest.mark.parametrize("kernel", [(3,), (4,), (3, 4), (2, 5), (3, 2, 4)])
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_padding_by_name(kernel: tuple[int, ...], padding: str) -> None:
    x = quantized((2, 4, *[7] * len(kernel)))
    compare_with_float(x, kernel, lambda v, w: float_conv(len(kernel))(v, w, padding=padding), padding=padding)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("kernel", [(3,), (3, 5), (3, 3, 3)])
def test_padding_modes(kernel: tuple[int, ...], mode: str) -> None:
    x = quantized((2, 4, *[7] * len(kernel)))
    pairs = [p for k in reversed(kernel) for p in (k // 2, k // 2)]
    compare_with_float(
        *(x, kernel, lambda v, w: float_conv(len(kernel))(F.pad(v, pairs, mode), w)),
        padding=tuple(k // 2 for k in kernel),
        padding_mode=mode,
    )


@pytest.mark.parametrize("kernel", [(3,), (3, 3), (3, 3, 3)])
def test_an_input_without_a_batch(kernel: tuple[int, ...]) -> None:
    x = quantized((4, *[6] * len(kernel)))
    compare_with_float(x, kernel, lambda v, w: float_conv(len(kernel))(v, w, padding=1), padding=1)


def test_border_is_real_zero_not_code_zero() -> None:
    x = zp.QTensor.from_codes(torch.full((1, 1, 3, 3), 90, dtype=torch.uint8), 0.05, 90)
    weight = torch.full((1, 1, 3, 3), 100, dtype=torch.int8)
    result = conv(x, weight, torch.tensor([0.01]), torch.zeros(1, dtype=torch.int32), None, 0.5, 7, padding=1)
    assert (result.int_repr() == 7).all()


def test_codes_are_padded_as_values_are() -> None:
    x = channels_last(codes((2, 3, 5, 6), torch.uint8))
    for mode in ("reflect", "replicate", "circular"):
        padded = pad_codes(x, [1, 2, 3, 4], mode)
        assert torch.equal(padded.float(), F.pad(x.float(), (3, 4, 1, 2), mode))
        assert padded.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(pad_codes(x, [1, 0, 0, 2], "zeros", 9).float(), F.pad(x.float(), (0, 2, 1, 0), value=9.0))


def test_padding_that_cannot_be_read() -> None:
    x = codes((1, 1, 3, 3), torch.uint8)
    with pytest.raises(ValueError, match="same"):
        padding_pairs("same", (3, 3), (2, 2), (1, 1))
    with pytest.raises(ValueError, match="half"):
        padding_pairs("half", (3, 3), (1, 1), (1, 1))
    with pytest.raises(ValueError, match="negative"):
        padding_pairs(-1, (3, 3), (1, 1), (1, 1))
    with pytest.raises(ValueError, match="2 ints"):
        padding_pairs((1, 1, 1), (3, 3), (1, 1), (1, 1))
    with pytest.raises(TypeError, match="padding"):
        padding_pairs(1.5, (3, 3), (1, 1), (1, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mode"):
        pad_codes(x, [1, 1, 1, 1], "mirror")
    with pytest.raises(RuntimeError, match="reflect"):
        pad_codes(x, [3, 0, 0, 0], "reflect")
    with pytest.raises(RuntimeError, match="circular"):
        pad_codes(x, [4, 0, 0, 0], "circular")


def test_wrong_inputs_are_named() -> None:
    weight, scale, zero = codes((2, 4, 3, 3), torch.int8), torch.ones(1), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(TypeError, match="quantize"):
        conv(torch.zeros(1, 4, 5, 5), weight, scale, zero, None, 1.0, 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="qint32"):
        conv(quantized((1, 4, 5, 5)), weight, scale, zero, None, 1.0, 0, out_dtype=zp.qint32)
    with pytest.raises(RuntimeError, match="conv2d"):
        conv(quantized((4, 5)), weight, scale, zero, None, 1.0, 0)
    per_channel = zp.quantize_per_channel(torch.zeros(1, 4, 5, 5), torch.ones(4), torch.zeros(4), 1, zp.quint8)
    with pytest.raises(RuntimeError, match="per-tensor"):
        conv(per_channel, weight, scale, zero, None, 1.0, 0)
