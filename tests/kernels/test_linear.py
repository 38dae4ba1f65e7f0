"""Linear kernels: the same integers as the reference and as plain 64-bit arithmetic, on every instruction set."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import zeropoint as zp
from zeropoint import backends
from zeropoint.ops.linear import linear_dynamic_reference, linear_reference

OPS = torch.ops.zeropoint
native = pytest.mark.skipif(not backends.is_native(), reason="the native library is not built")


@dataclass(frozen=True)
class Case:
    """Arguments of the linear operator, by name."""

    x: Tensor
    weight: Tensor
    x_scale: float = 0.031
    x_zero_point: int = 0
    weight_scale: Tensor | None = None
    weight_zero_point: Tensor | None = None
    bias: Tensor | None = None
    out_scale: float = 0.9
    out_zero_point: int = 3
    out_min: int = 0
    out_max: int = 255
    out_dtype: torch.dtype = torch.uint8
    packed: Tensor | None = None

    def args(self) -> tuple[Any, ...]:
        scale = torch.tensor([0.007]) if self.weight_scale is None else self.weight_scale
        zeros = torch.tensor([0], dtype=torch.int32) if self.weight_zero_point is None else self.weight_zero_point
        return (
            *(self.x, self.x_scale, self.x_zero_point, self.weight, scale, zeros, self.bias),
            *(self.out_scale, self.out_zero_point, self.out_min, self.out_max, self.out_dtype, self.packed),
        )

    def bound(self) -> Tensor:
        """The arguments beside codes and weights, bound."""
        return OPS.linear_bind(self.x.dtype, *self.args()[1:-1])


def codes(shape: tuple[int, ...], dtype: torch.dtype, low: int | None = None, high: int | None = None) -> Tensor:
    info = torch.iinfo(dtype)
    low, high = info.min if low is None else low, info.max if high is None else high
    return torch.randint(low, high + 1, shape, dtype=torch.int16).to(dtype)


def random_case(m: int, n: int, k: int, signed: bool, *, per_channel: bool, shifted: bool, bias: bool) -> Case:
    dtype = torch.int8 if signed else torch.uint8
    count = n if per_channel else 1
    spread = max(k, 1) ** 0.5
    return Case(
        x=codes((m, k), dtype),
        weight=codes((n, k), torch.int8),
        x_scale=0.02,
        x_zero_point=-9 if signed else 119,
        weight_scale=(torch.rand(count) + 0.5) / 100,
        weight_zero_point=codes((count,), torch.int8).int() if shifted else torch.zeros(count, dtype=torch.int32),
        bias=torch.randn(n) * spread if bias else None,
        out_scale=0.03 * spread,
        out_zero_point=-3 if signed else 131,
        out_min=-128 if signed else 0,
        out_max=127 if signed else 255,
        out_dtype=dtype,
    )


def by_integers(case: Case) -> Tensor:
    """The numeric contract in numpy: 64-bit sums, then one float32 operation after the other."""
    x, x_scale, x_zero, weight, scale, zeros, bias, out_scale, out_zero, out_min, out_max, out_dtype, _ = case.args()
    steps = x.numpy().astype(np.int64) - x_zero
    weight_steps = weight.numpy().astype(np.int64) - zeros.numpy().astype(np.int64).reshape(-1, 1)
    sums = np.einsum("...k,nk->...n", steps, weight_steps)
    y = sums.astype(np.float32) * (np.float64(x_scale) * scale.numpy().astype(np.float64) / out_scale).astype(
        np.float32
    )
    if bias is not None:
        y = y + (bias.numpy().astype(np.float64) / out_scale).astype(np.float32)
    y = np.clip(np.rint(y), out_min - out_zero, out_max - out_zero)
    return torch.from_numpy(y.astype(np.int64) + out_zero).to(out_dtype)


def check(case: Case) -> Tensor:
    """The operator, the reference and 64-bit arithmetic agree, with and without packed weights, and bound."""
    want = by_integers(case)
    assert torch.equal(linear_reference(*case.args()), want)
    assert torch.equal(OPS.linear(*case.args()), want)
    packed = OPS.linear_pack(case.weight)
    assert torch.equal(OPS.linear(*replace(case, packed=packed).args()), want)
    if backends.is_native():
        assert torch.equal(OPS.linear_bound(case.x, case.weight, packed, case.bound()), want)
    return want


SHAPES = (
    *((0, 1, 1), (1, 1, 1), (1, 16, 4), (1, 130, 300), (2, 17, 3), (3, 64, 8), (4, 33, 7), (5, 48, 12), (6, 15, 64)),
    *(
        (7, 31, 9),
        (8, 100, 256),
        (11, 65, 31),
        (12, 128, 128),
        (13, 129, 33),
        (23, 20, 300),
        (64, 96, 40),
        (70, 130, 77),
    ),
    *((9, 5, 0), (3, 0, 5), (0, 7, 9), (33, 40, 5000), (1, 40, 5000)),
)


@pytest.mark.parametrize("signed", [False, True], ids=("uint8", "int8"))
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_shapes(isa: str, shape: tuple[int, int, int], signed: bool) -> None:
    check(random_case(*shape, signed, per_channel=False, shifted=False, bias=False))
    check(random_case(*shape, signed, per_channel=True, shifted=True, bias=True))


@pytest.mark.parametrize("shape", [(1, 300, 2000), (300, 40, 500), (65, 257, 300)], ids=str)
def test_threads(isa: str, threads: int, shape: tuple[int, int, int]) -> None:
    check(random_case(*shape, True, per_channel=True, shifted=True, bias=True))
    check(random_case(*shape, False, per_channel=True, shifted=False, bias=True))


@pytest.mark.parametrize("k", [4, 37, 512])
@pytest.mark.parametrize("w", [127, -128, -127, "alternating", "pairs"])
@pytest.mark.parametrize(
    ("x", "x_zero_point", "dtype"),
    [
        (255, 0, torch.uint8),
        (255, 255, torch.uint8),
        (0, 255, torch.uint8),
        (-128, 127, torch.int8),
        (127, -128, torch.int8),
    ],
)
def test_largest_sums(isa: str, x: int, x_zero_point: int, dtype: torch.dtype, w: int | str, k: int) -> None:
    """Where 16-bit intermediates would overflow."""
    if w == "alternating":
        weight = torch.tensor([127, -128], dtype=torch.int8).repeat(20, k)[:, :k].contiguous()
    elif w == "pairs":
        weight = torch.tensor([127, 127, -128, -128], dtype=torch.int8).repeat(20, k)[:, :k].contiguous()
    else:
        weight = torch.full((20, k), int(w), dtype=torch.int8)
    case = Case(
        x=torch.full((7, k), x, dtype=dtype),
        weight=weight,
        x_zero_point=x_zero_point,
        weight_zero_point=torch.tensor([-128, 127] * 10, dtype=torch.int32),
        out_scale=5.0 * k,
        out_zero_point=0 if dtype == torch.int8 else 128,
        out_min=torch.iinfo(dtype).min,
        out_max=torch.iinfo(dtype).max,
        out_dtype=dtype,
    )
    check(case)
    check(replace(case, weight_zero_point=None))


@pytest.mark.parametrize("spread", [5, 20, 40, 60])
def test_weights_around_zero(isa: str, spread: int) -> None:
    """Trained weights: few large ones. Kernels may treat the large ones apart."""
    case = random_case(9, 70, 300, False, per_channel=True, shifted=False, bias=True)
    check(replace(case, weight=(torch.randn(70, 300) * spread).round().clamp(-128, 127).to(torch.int8)))


@pytest.mark.parametrize("m", [1, 2, 7, 8, 57])
def test_weights_spread_as_trained_ones(isa: str, m: int) -> None:
    """A form of packed weights for them serves many rows; few rows read the weights themselves."""
    case = random_case(m, 75, 130, m % 2 == 1, per_channel=True, shifted=m == 8, bias=True)
    check(replace(case, weight=(torch.randn(75, 130) * 38).round().clamp(-128, 127).to(torch.int8)))


def test_sums_beyond_32_bits(isa: str) -> None:
    k = 70_000
    case = Case(
        x=codes((5, k), torch.uint8, 200, 255),
        weight=codes((18, k), torch.int8, 90, 127),
        weight_zero_point=torch.tensor([-128, 0] * 9, dtype=torch.int32),
        out_scale=30_000.0,
    )
    check(case)
    check(replace(case, bias=torch.randn(18) * 1e5, x_zero_point=255, out_zero_point=255))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
def test_fused_relu(isa: str, dtype: torch.dtype) -> None:
    case = random_case(10, 40, 60, dtype == torch.int8, per_channel=True, shifted=False, bias=True)
    want = check(case)
    rectified = replace(case, out_min=case.out_zero_point)
    assert torch.equal(check(rectified), want.clamp(min=case.out_zero_point))


def test_output_sign_differs_from_input_sign(isa: str) -> None:
    case = random_case(6, 20, 30, True, per_channel=True, shifted=False, bias=False)
    check(replace(case, out_dtype=torch.uint8, out_zero_point=100, out_min=0, out_max=255))


def test_leading_dimensions_and_strides(isa: str) -> None:
    case = random_case(24, 19, 30, False, per_channel=True, shifted=True, bias=True)
    want = check(case)
    assert torch.equal(check(replace(case, x=case.x.reshape(2, 3, 4, 30))), want.reshape(2, 3, 4, 19))
    assert torch.equal(check(replace(case, x=case.x[5])), want[5])
    strided = case.x.repeat_interleave(2, dim=1)[:, ::2]
    assert not strided.is_contiguous()
    assert torch.equal(check(replace(case, x=strided)), want)
    assert torch.equal(check(replace(case, x=case.x.t().contiguous().t())), want)
    weight = case.weight.t().contiguous().t()
    assert torch.equal(OPS.linear(*replace(case, weight=weight).args()), want)


def test_parameters_in_double_precision(isa: str) -> None:
    case = random_case(6, 20, 30, True, per_channel=True, shifted=True, bias=True)
    assert case.weight_scale is not None
    assert case.weight_zero_point is not None
    assert case.bias is not None
    wide = replace(
        case,
        weight_scale=case.weight_scale.double() * (1 + 1e-9),
        weight_zero_point=case.weight_zero_point.long(),
        bias=case.bias.double() * (1 + 1e-9),
    )
    check(wide)
    half = replace(case, bias=case.bias.half())
    assert torch.equal(OPS.linear(*half.args()), linear_reference(*half.args()))


def test_scales_that_overflow(isa: str) -> None:
    """An infinite multiplier gives the ends of the range, and the zero point for a sum of zero."""
    case = Case(
        x=torch.tensor([[1], [0]], dtype=torch.uint8),
        weight=torch.tensor([[1], [-1], [0]], dtype=torch.int8),
        x_scale=1e30,
        weight_scale=torch.tensor([1e30]),
        out_scale=1e-30,
        out_zero_point=7,
    )
    for run in (OPS.linear, linear_reference):
        assert run(*case.args()).tolist() == [[255, 0, 7], [7, 7, 7]]


@given(st.data())
def test_any_case(data: st.DataObject) -> None:
    integers = st.integers
    m, n, k = (data.draw(integers(0, limit), label=name) for name, limit in (("m", 20), ("n", 70), ("k", 90)))
    x_signed, out_signed, per_channel, shifted = (data.draw(st.booleans()) for _ in range(4))
    torch.manual_seed(data.draw(integers(0, 2**31)))
    case = random_case(m, n, k, x_signed, per_channel=per_channel, shifted=shifted, bias=data.draw(st.booleans()))
    out_low = -128 if out_signed else 0
    low, high = sorted((data.draw(integers(0, 255)), data.draw(integers(0, 255))))
    case = replace(
        case,
        x_zero_point=data.draw(integers(0, 255)) - (128 if x_signed else 0),
        out_scale=data.draw(st.floats(1e-3, 1e3)),
        out_zero_point=data.draw(integers(0, 255)) + out_low,
        out_min=low + out_low,
        out_max=high + out_low,
        out_dtype=torch.int8 if out_signed else torch.uint8,
    )
    before = backends.active_isa()
    for isa in backends.available_isas():
        backends.set_isa(isa)
        check(case)
    if backends.is_native():
        backends.set_isa(before)
    else:
        check(case)


# --- bound arguments ----------------------------------------------------------------------------------------------


@native
def test_bound_arguments_that_do_not_fit_are_refused() -> None:
    case = random_case(5, 40, 50, False, per_channel=True, shifted=True, bias=True)
    packed, good = OPS.linear_pack(case.weight), case.bound()
    assert torch.equal(OPS.linear_bound(case.x, case.weight, packed, good), by_integers(case))
    foreign = OPS.conv_bind(
        torch.uint8, *(0.1, 3, codes((40, 50, 1), torch.int8), torch.ones(1), torch.zeros(1, dtype=torch.int32), None),
        *([1], [0, 0], [1], 1, 0.1, 3, 0, 255, torch.uint8),
    )  # fmt: skip
    wrong = [
        torch.empty(0, dtype=torch.uint8),
        good[:-1].clone(),
        good[:100].clone(),
        good[1:].clone(),
        torch.cat([good, good[:16]]),
        torch.zeros_like(good),
        good.to(torch.int32),
        good.repeat_interleave(2)[::2],
        replace(case, weight=codes((24, 50), torch.int8), weight_scale=None, weight_zero_point=None, bias=None).bound(),
        foreign,
    ]
    for bytes_ in wrong:
        with pytest.raises(RuntimeError, match="not what was bound for a weight of 40 output channels"):
            OPS.linear_bound(case.x, case.weight, packed, bytes_)
    with pytest.raises(RuntimeError, match="bound for codes of another dtype"):
        OPS.linear_bound(case.x.to(torch.int8), case.weight, packed, good)
    with pytest.raises(RuntimeError, match=r"x must be \(\.\.\., 50\)"):
        OPS.linear_bound(case.x[:, :-1], case.weight, packed, good)
    assert torch.equal(OPS.linear_bound(case.x, case.weight, packed[:64].clone(), good), by_integers(case))


@native
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x_scale": 0.0}, "finite and above 0"),
        ({"out_scale": float("nan")}, "finite and above 0"),
        ({"x_zero_point": 256}, "x_zero_point in"),
        ({"out_zero_point": -1}, "out_zero_point in"),
        ({"out_min": 9, "out_max": 8}, "out_min <= out_max"),
        ({"out_dtype": torch.int32}, "int8 or uint8"),
        ({"weight_scale": torch.ones(7)}, "weight_scale must hold 40 numbers"),
        ({"weight_zero_point": torch.full((1,), 128)}, "must lie in"),
        ({"bias": torch.ones(3)}, "bias must hold 40 numbers"),
    ],
)
def test_binding_checks_what_a_call_checks(change: dict[str, Any], words: str) -> None:
    case = replace(random_case(5, 40, 50, False, per_channel=True, shifted=True, bias=True), **change)
    with pytest.raises(RuntimeError, match=words):
        case.bound()
    with pytest.raises(RuntimeError, match=words):
        OPS.linear(*case.args())


# --- packed weights that cannot be trusted ------------------------------------------------------------------------


def packed_for(isa: str, weight: Tensor) -> Tensor:
    before = backends.active_isa()
    backends.set_isa(isa)
    packed = OPS.linear_pack(weight)
    backends.set_isa(before)
    return packed


@native
def test_packed_weights_that_do_not_fit_are_ignored(isa: str) -> None:
    case = random_case(5, 40, 50, False, per_channel=True, shifted=True, bias=True)
    want = by_integers(case)
    good = OPS.linear_pack(case.weight)
    wrong = [
        torch.empty(0, dtype=torch.uint8),
        good[:-1].clone(),
        good[:64].clone(),
        good[:10].clone(),
        torch.cat([good, good[:64]]),
        codes((good.numel(),), torch.uint8),
        torch.zeros_like(good),
        OPS.linear_pack(codes((40, 49), torch.int8)),
        OPS.linear_pack(codes((56, 50), torch.int8)),
        OPS.linear_pack(codes((50, 40), torch.int8)),
        good.to(torch.int32),
        good.reshape(2, -1)[:, ::2],
        *(packed_for(other, case.weight) for other in backends.available_isas() if other != isa),
    ]
    for packed in wrong:
        assert torch.equal(OPS.linear(*replace(case, packed=packed).args()), want)
    assert torch.equal(OPS.linear(*replace(case, packed=good).args()), want)


@native
def test_damaged_packed_weights_do_not_crash(isa: str) -> None:
    """The header fits, the rest is noise: any result, but no access outside the bytes."""
    weight = torch.zeros(40, 64, dtype=torch.int8)
    weight[3, :2] = 127  # one large pair: a list beside the panels on some instruction sets
    good = OPS.linear_pack(weight)
    case = replace(random_case(5, 40, 64, False, per_channel=True, shifted=True, bias=True), weight=weight)
    for _ in range(20):
        noise = codes((good.numel(),), torch.uint8)
        noise[:64] = good[:64]
        assert OPS.linear(*replace(case, packed=noise).args()).shape == (5, 40)


@native
def test_header_names_length_and_sizes(isa: str) -> None:
    packed = OPS.linear_pack(codes((40, 50), torch.int8))
    magic, _version, number, n, k, length = struct.unpack_from("<8sIiqqq", bytes(packed.tolist()))
    assert magic == b"zpgemm8\0"
    assert backends.cpu.ISA_NAMES[number] == isa
    assert (n, k, length) == (40, 50, packed.numel())


# --- errors -------------------------------------------------------------------------------------------------------


@native
@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(3, 6, dtype=torch.uint8)},
        {"x": torch.tensor(3, dtype=torch.uint8)},
        {"x": torch.zeros(3, 5)},
        {"weight": torch.zeros(4, 5)},
        {"weight": torch.zeros(4, 5, 1, dtype=torch.int8)},
        {"weight_scale": torch.ones(3)},
        {"weight_scale": torch.ones(0)},
        {"weight_scale": torch.ones(4, dtype=torch.bool)},
        {"weight_zero_point": torch.zeros(5, dtype=torch.int32)},
        {"weight_zero_point": torch.full((4,), 128, dtype=torch.int32)},
        {"weight_zero_point": torch.full((4,), -129, dtype=torch.int64)},
        {"weight_zero_point": torch.zeros(4)},
        {"bias": torch.zeros(1)},
        {"bias": torch.zeros(5)},
        {"x_zero_point": 256},
        {"x_zero_point": -1},
        {"out_zero_point": 300},
        {"out_min": -1},
        {"out_max": 256},
        {"out_min": 9, "out_max": 8},
        {"out_dtype": torch.int32},
    ],
    ids=lambda change: "-".join(change),
)
def test_what_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    case = Case(x=torch.zeros(3, 5, dtype=torch.uint8), weight=torch.zeros(4, 5, dtype=torch.int8))
    OPS.linear(*case.args())
    with pytest.raises(RuntimeError):
        OPS.linear(*replace(case, **change).args())


@pytest.mark.parametrize("name", ["x_scale", "out_scale"])
@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_make_no_grid_are_refused(name: str, scale: float) -> None:
    case = Case(x=torch.zeros(3, 5, dtype=torch.uint8), weight=torch.zeros(4, 5, dtype=torch.int8))
    arguments = replace(case, **{name: scale}).args()
    for run in (OPS.linear, linear_reference):
        with pytest.raises(
            RuntimeError, match="linear takes an x_scale and an out_scale that are finite and above 0, got"
        ):
            run(*arguments)


# --- dynamic ------------------------------------------------------------------------------------------------------


def dynamic_args(x: Tensor, n: int, *, shifted: bool = True, bias: bool = True) -> list[Any]:
    zeros = codes((n,), torch.int8).int() if shifted else torch.zeros(n, dtype=torch.int32)
    offset = torch.randn(n) if bias else None
    return [x, codes((n, x.shape[-1]), torch.int8), torch.rand(n) / 50 + 0.01, zeros, offset]


def check_dynamic(args: list[Any]) -> Tensor:
    want = linear_dynamic_reference(*args, None)
    packed = OPS.linear_pack(args[1])
    for got in (OPS.linear_dynamic(*args, None), OPS.linear_dynamic(*args, packed)):
        assert got.dtype == args[0].dtype
        assert torch.equal(got, want)
    return want


@pytest.mark.parametrize("relu", [False, True], ids=("plain", "relu"))
@pytest.mark.parametrize("reduce_range", [False, True], ids=("8-bit", "7-bit"))
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_dynamic_shapes(isa: str, shape: tuple[int, int, int], reduce_range: bool, relu: bool) -> None:
    m, n, k = shape
    check_dynamic([*dynamic_args(torch.randn(m, k) * 3 - 1, n), reduce_range, relu])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dynamic_dtypes(isa: str, dtype: torch.dtype) -> None:
    check_dynamic([*dynamic_args(torch.randn(2, 5, 33).to(dtype), 21), False, False])


@pytest.mark.parametrize(
    "row",
    [
        [0.0, 0.0, 0.0],
        [-0.0, 0.0, -0.0],
        [1e-30, 0.0, -1e-30],
        [1e-44, 0.0, 0.0],
        [3e-6, 1e-6, 0.0],
        [-3e-6, -1e-6, 0.0],
        [3e-6, -1e-6, 0.0],
        [5.0, 7.0, 9.0],
        [-5.0, -7.0, -9.0],
        [3.4e38, -3.4e38, 1.0],
        [float("inf"), 1.0, -2.0],
        [float("-inf"), float("nan"), 2.0],
        [float("nan")] * 3,
        [float("inf"), float("-inf"), float("nan")],
        [1.0, 1.0 + 2**-23, -1.0],
    ],
    ids=str,
)
def test_dynamic_ranges(isa: str, row: list[float]) -> None:
    check_dynamic([*dynamic_args(torch.tensor([row, [0.0, 0.0, 0.0]]), 5), False, False])
    check_dynamic([*dynamic_args(torch.tensor([row]).repeat(1, 30), 5), True, False])


def test_dynamic_of_strided_input(isa: str) -> None:
    x = torch.randn(30, 8).t()
    args = [*dynamic_args(x, 6), False, False]
    assert torch.equal(check_dynamic(args), OPS.linear_dynamic(x.contiguous(), *args[1:], None))


def test_dynamic_threads(isa: str, threads: int) -> None:
    check_dynamic([*dynamic_args(torch.randn(300, 400), 90), False, False])
    check_dynamic([*dynamic_args(torch.randn(1, 2000), 700), False, True])


@given(st.lists(st.floats(width=32), min_size=1, max_size=40), st.booleans())
def test_dynamic_of_any_floats(values: list[float], reduce_range: bool) -> None:
    torch.manual_seed(len(values))
    check_dynamic([*dynamic_args(torch.tensor(values).reshape(1, -1), 3), reduce_range, False])


@native
@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, torch.zeros(3, 6)),
        (0, torch.zeros(3, 5, dtype=torch.int32)),
        (1, torch.zeros(4, 5)),
        (2, torch.ones(3)),
        (3, torch.full((4,), 1000, dtype=torch.int32)),
        (4, torch.zeros(3)),
    ],
)
def test_dynamic_refuses_what_does_not_fit(index: int, value: Tensor) -> None:
    args = [*dynamic_args(torch.randn(3, 5), 4), False, False, None]
    OPS.linear_dynamic(*args)
    args[index] = value
    with pytest.raises(RuntimeError):
        OPS.linear_dynamic(*args)


# --- functions over quantized tensors -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [zp.quint8, zp.qint8], ids=str)
def test_quantized_linear(dtype: zp.QDtype) -> None:
    x, weight, bias = torch.randn(2, 3, 24), torch.randn(10, 24), torch.randn(10)
    scales, zeros = weight.abs().amax(1) / 127, torch.zeros(10, dtype=torch.int64)
    qx = zp.quantize_per_tensor(x, 0.04, 100 if dtype == zp.quint8 else -20, dtype)
    qw = zp.quantize_per_channel(weight, scales, zeros, 0, zp.qint8)
    args = (qx.scale, qx.zero_point, scales, zeros, bias, 0.1, 5)
    out = zp.quantized_linear(qx, qw, *args)
    assert (out.dtype, out.shape, out.scale, out.zero_point) == (dtype, (2, 3, 10), 0.1, 5)
    error = out.dequantize() - torch.nn.functional.linear(qx.dequantize(), qw.dequantize(), bias)
    inside = (out.int_repr() > dtype.qmin) & (out.int_repr() < dtype.qmax)
    assert error[inside].abs().max() <= 0.05001
    assert torch.equal(zp.quantized_linear(qx.int_repr(), qw.int_repr(), *args).int_repr(), out.int_repr())


def test_quantized_linear_takes_the_grids_of_its_arguments() -> None:
    x = zp.quantize_per_tensor(torch.rand(2, 4), 0.1, 9, zp.quint8)
    weight = zp.quantize_per_tensor(torch.rand(3, 4), 0.2, 7, zp.qint8)
    args = (0.5, 3, torch.tensor([0.25]), torch.tensor([-1]))
    out = zp.quantized_linear(x, weight, *args, out_scale=2.0)
    real = (x.int_repr().double() - 3) * 0.5 @ ((weight.int_repr().double() + 1) * 0.25).t()
    assert torch.equal(out.int_repr(), (real / 2).round().clamp(0, 255).to(torch.uint8))


def test_quantized_linear_dynamic() -> None:
    x, weight = torch.randn(7, 30), torch.randn(12, 30)
    scales, zeros = weight.abs().amax(1) / 127, torch.zeros(12, dtype=torch.int64)
    codes_ = zp.quantize_per_channel(weight, scales, zeros, 0, zp.qint8).int_repr()
    out = zp.quantized_linear_dynamic(x, codes_, scales, zeros, torch.ones(12))
    want = torch.nn.functional.linear(x, weight, torch.ones(12))
    assert 10 * torch.log10(want.square().sum() / (out - want).square().sum()) > 35


X = torch.zeros(2, 4, dtype=torch.uint8)
W = torch.zeros(3, 4, dtype=torch.int8)
ONE, ZERO = torch.tensor([1.0]), torch.tensor([0])


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "text"),
    [
        ((torch.zeros(2, 4), W, 1.0, 0, ONE, ZERO), {}, TypeError, "quint8 input"),
        ((X, X, 1.0, 0, ONE, ZERO), {}, TypeError, "qint8 weight"),
        ((X, W[:, :3], 1.0, 0, ONE, ZERO), {}, ValueError, r"\(2, 4\) and \(3, 3\)"),
        ((X, W[0], 1.0, 0, ONE, ZERO), {}, ValueError, r"\(N, K\)"),
        ((X, W, 0.0, 0, ONE, ZERO), {}, ValueError, "input_scale"),
        ((X, W, 1.0, -1, ONE, ZERO), {}, ValueError, "input_zero_point"),
        ((X, W, 1.0, 0, torch.ones(2), ZERO), {}, ValueError, r"weight_scales must have shape \(3,\)"),
        ((X, W, 1.0, 0, torch.tensor([-1.0]), ZERO), {}, ValueError, "weight scale"),
        ((X, W, 1.0, 0, torch.tensor([float("nan")]), ZERO), {}, ValueError, "weight scale"),
        ((X, W, 1.0, 0, ZERO, ZERO), {}, TypeError, "weight_scales must be floating"),
        ((X, W, 1.0, 0, 1.0, ZERO), {}, TypeError, "weight_scales as a tensor"),
        ((X, W, 1.0, 0, ONE, ONE), {}, TypeError, "weight_zero_points must be integers"),
        ((X, W, 1.0, 0, ONE, torch.tensor([200])), {}, ValueError, "weight zero point"),
        ((X, W, 1.0, 0, ONE, ZERO), {"bias": torch.zeros(2)}, ValueError, "bias must have shape"),
        ((X, W, 1.0, 0, ONE, ZERO), {"bias": torch.zeros(3, dtype=torch.int32)}, TypeError, "float bias"),
        ((X, W, 1.0, 0, ONE, ZERO), {"out_scale": float("inf")}, ValueError, "out_scale"),
        ((X, W, 1.0, 0, ONE, ZERO), {"out_zero_point": 256}, ValueError, "out_zero_point"),
    ],
)
def test_quantized_linear_names_what_is_wrong(
    args: tuple[Any, ...], kwargs: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        zp.quantized_linear(*args, **kwargs)


def test_quantized_linear_dynamic_names_what_is_wrong() -> None:
    with pytest.raises(TypeError, match="float input"):
        zp.quantized_linear_dynamic(X, W, ONE, ZERO)
    with pytest.raises(ValueError, match=r"\(2, 5\) and \(3, 4\)"):
        zp.quantized_linear_dynamic(torch.zeros(2, 5), W, ONE, ZERO)


# --- tracing ------------------------------------------------------------------------------------------------------


def test_outputs_are_known_to_the_tracer() -> None:
    case = random_case(6, 20, 30, True, per_channel=True, shifted=True, bias=True)
    args = [arg.to("meta") if isinstance(arg, Tensor) else arg for arg in case.args()]
    out = OPS.linear(*args)
    assert (out.shape, out.dtype) == ((6, 20), torch.int8)
    x = torch.zeros(2, 3, 30, dtype=torch.float16, device="meta")
    out = OPS.linear_dynamic(x, args[3], args[4], args[5], args[6], False, True, None)
    assert (out.shape, out.dtype) == ((2, 3, 20), torch.float16)


@native
def test_self_check_passes() -> None:
    assert OPS._isa_selfcheck()
