"""Quantize, dequantize and what follows from them: rules that users rely on, on every backend."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import zeropoint as zp
from zeropoint import grid
from zeropoint.ops import arithmetic

QDTYPES = (zp.qint8, zp.quint8, zp.qint32)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

qdtypes = pytest.mark.parametrize("qdtype", QDTYPES, ids=str)
float_dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(_BITS[a.element_size()]), b.view(_BITS[b.element_size()]))


# --- fake quantize is quantize and dequantize ---------------------------------------------------------------------


@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=40),
    scale=st.floats(min_value=1e-12, max_value=1e12),
    zero_point=st.integers(0, 127),
    qdtype=st.sampled_from(QDTYPES),
    dtype=st.sampled_from(FLOATS),
)
def test_fake_quantize_is_quantize_then_dequantize(
    values: list[float], scale: float, zero_point: int, qdtype: zp.QDtype, dtype: torch.dtype
) -> None:
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    q = zp.quantize_per_tensor(x, scale, zero_point, qdtype)
    fake, _ = grid.fake_quantize(x, scale, zero_point, qdtype.qmin, qdtype.qmax)
    nan = torch.isnan(x)
    assert torch.isnan(fake[nan]).all()
    assert (q.int_repr()[nan] == zero_point).all()
    assert same_bits(fake[~nan], q.dequantize(dtype)[~nan])


@given(
    values=st.lists(st.floats(width=32, allow_nan=False), min_size=6, max_size=6),
    zeros=st.lists(st.floats(-200, 200, width=32), min_size=3, max_size=3),
    dtype=st.sampled_from((torch.float32, torch.float64)),
)
def test_fake_quantize_with_floating_zero_points(values: list[float], zeros: list[float], dtype: torch.dtype) -> None:
    x, zero_points = torch.tensor(values, dtype=dtype).reshape(2, 3), torch.tensor(zeros)
    scales = torch.tensor([0.1, 0.25, 3.0])
    q = zp.quantize_per_channel(x, scales, zero_points, 1, zp.quint8)
    fake, _ = grid.fake_quantize(x, scales, zero_points, 0, 255)
    assert torch.equal(fake, q.dequantize(dtype))


# --- rounding, saturation, what is not finite ---------------------------------------------------------------------


@qdtypes
@float_dtypes
def test_what_is_not_finite(qdtype: zp.QDtype, dtype: torch.dtype) -> None:
    x = torch.tensor([float("inf"), float("-inf"), float("nan"), torch.finfo(dtype).max, torch.finfo(dtype).min])
    x = x.to(dtype)
    q = zp.quantize_per_tensor(x, 1e-6, 7, qdtype)
    assert q.int_repr().tolist() == [qdtype.qmax, qdtype.qmin, 7, qdtype.qmax, qdtype.qmin]
    one_each = torch.full((5,), 1e-6), torch.full((5,), 7)
    assert torch.equal(zp.quantize_per_channel(x, *one_each, 0, qdtype).int_repr(), q.int_repr())


@qdtypes
def test_large_finite_values_saturate(qdtype: zp.QDtype) -> None:
    """Positions beyond 32 bits do not wrap."""
    for power in (31, 32, 33, 62, 63, 64, 100):
        x = torch.full((33,), 2.0**power)
        assert (zp.quantize_per_tensor(x, 0.5, 0, qdtype).int_repr() == qdtype.qmax).all()
        assert (zp.quantize_per_tensor(-x, 0.5, 0, qdtype).int_repr() == qdtype.qmin).all()


def test_ties_round_to_even_before_the_zero_point() -> None:
    x = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])
    for zero_point in (0, 1, 2):
        codes = zp.quantize_per_tensor(x, 1.0, zero_point, zp.qint8).int_repr() - zero_point
        assert codes.tolist() == [-2, -2, 0, 0, 2, 2]


def test_half_precision_is_widened_first() -> None:
    """Large activations in float16 stay finite: no product is made in half precision."""
    x = torch.full((8,), 60000.0, dtype=torch.float16)
    q = zp.quantize_per_tensor(x, 500.0, 0, zp.qint8)
    assert q.int_repr().tolist() == [120] * 8
    assert q.dequantize(torch.float16).tolist() == [60000.0] * 8


# --- layouts ------------------------------------------------------------------------------------------------------


@qdtypes
@pytest.mark.parametrize("axis", [None, 0, 1, 3], ids=lambda a: f"axis-{a}")
def test_layouts_give_the_same_codes(qdtype: zp.QDtype, axis: int | None) -> None:
    x = torch.randn(3, 5, 4, 6) * 3

    def quantize(x: Tensor) -> zp.QTensor:
        if axis is None:
            return zp.quantize_per_tensor(x, 0.05, 3, qdtype)
        channels = x.shape[axis]
        return zp.quantize_per_channel(x, torch.linspace(0.02, 0.3, channels), torch.arange(channels), axis, qdtype)

    plain = quantize(x)
    for other in (
        x.to(memory_format=torch.channels_last),
        x.transpose(1, 2).contiguous().transpose(1, 2),
        x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        torch.stack([x, -x], 4)[..., 0],
        torch.cat([x, x], 2)[:, :, :4],
    ):
        q = quantize(other)
        assert torch.equal(q.int_repr(), plain.int_repr())
        assert torch.equal(q.dequantize(), plain.dequantize())
    last = quantize(x.to(memory_format=torch.channels_last))
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert last.dequantize().is_contiguous(memory_format=torch.channels_last)


def test_transposed_matrices_and_slices() -> None:
    x = torch.randn(6, 10)
    for view in (x.t(), x[:, ::2], x[::2], x[1:, 3:]):
        expected = zp.quantize_per_tensor(view.contiguous(), 0.05, 0, zp.qint8)
        assert torch.equal(zp.quantize_per_tensor(view, 0.05, 0, zp.qint8), expected)


@qdtypes
def test_empty_and_scalar_tensors(qdtype: zp.QDtype) -> None:
    for shape in ((0,), (0, 3), (3, 0, 2), ()):
        x = torch.zeros(shape)
        q = zp.quantize_per_tensor(x, 0.1, 3, qdtype)
        assert q.shape == x.shape
        assert torch.equal(q.dequantize(), x)
    q = zp.quantize_per_tensor_dynamic(torch.zeros(0), zp.qint8)
    assert q.q_scale() > 0
    assert zp.quantize_per_channel(torch.zeros(0, 2), torch.ones(2), torch.zeros(2).long(), 1).shape == (0, 2)


def test_one_channel_stays_per_channel() -> None:
    q = zp.quantize_per_channel(torch.randn(1, 8, 3, 3), torch.tensor([0.1]), torch.tensor([0]), 0, zp.qint8)
    assert q.qscheme() == zp.per_channel_affine
    assert q.q_per_channel_scales().shape == (1,)


# --- parameters of the wrong kind ---------------------------------------------------------------------------------


def test_integer_scales_are_refused() -> None:
    x, ones = torch.ones(2, 2), torch.ones(2, dtype=torch.int64)
    with pytest.raises(TypeError, match="scales must be floating"):
        zp.quantize_per_channel(x, ones, ones, 0, zp.qint8)
    with pytest.raises(TypeError, match="zero_points must be integers or floats"):
        zp.quantize_per_channel(x, ones.float(), ones.bool(), 0, zp.qint8)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-39, 1e39])
def test_scales_that_make_no_grid(scale: float) -> None:
    x = torch.ones(2, 2)
    with pytest.raises(ValueError, match="scale must"):
        zp.quantize_per_tensor(x, scale, 0, zp.qint8)
    with pytest.raises(ValueError, match="every scale must"):
        zp.quantize_per_channel(x, torch.tensor([1.0, scale], dtype=torch.float64), torch.zeros(2).long(), 0, zp.qint8)


def test_lists_of_tensors() -> None:
    parts = [torch.randn(3), torch.randn(2, 2)]
    quantized = zp.quantize_per_tensor(parts, torch.tensor([0.1, 0.2]), torch.tensor([1, 2]), zp.quint8)
    assert [(q.q_scale(), q.q_zero_point()) for q in quantized] == [(pytest.approx(0.1), 1), (pytest.approx(0.2), 2)]
    assert [x.shape for x in zp.dequantize(quantized)] == [x.shape for x in parts]
    with pytest.raises(ValueError, match="2 tensors need as many scales"):
        zp.quantize_per_tensor(parts, torch.tensor([0.1]), torch.tensor([1, 2]), zp.quint8)


def test_dynamic_grids_ignore_what_is_not_finite() -> None:
    x = torch.tensor([-1.0, 3.0, float("inf"), float("nan")])
    q = zp.quantize_per_tensor_dynamic(x, zp.quint8)
    assert torch.equal(q[:2].int_repr(), zp.quantize_per_tensor_dynamic(x[:2], zp.quint8).int_repr())
    assert q.int_repr()[2:].tolist() == [255, q.q_zero_point()]


# --- from grid to grid --------------------------------------------------------------------------------------------


@given(
    codes=st.lists(st.integers(-128, 127), min_size=1, max_size=40),
    scale=st.floats(1e-3, 1e3),
    zero_point=st.integers(-128, 127),
    out_scale=st.floats(1e-3, 1e3),
    out_zero_point=st.integers(0, 255),
)
def test_requantize_moves_to_the_nearest_code(
    codes: list[int], scale: float, zero_point: int, out_scale: float, out_zero_point: int
) -> None:
    q = zp.QTensor.from_codes(torch.tensor(codes, dtype=torch.int8), scale, zero_point)
    out = zp.requantize(q, out_scale, out_zero_point, zp.quint8)
    real = q.dequantize(torch.float64)
    ends = [(end - out_zero_point) * out_scale for end in (0, 255)]
    assert ((out.dequantize(torch.float64) - real.clamp(*ends)).abs() <= out_scale * 0.5001).all()


def test_requantize_to_the_same_grid_is_the_same_tensor() -> None:
    q = zp.quantize_per_tensor(torch.randn(5), 0.1, 3, zp.qint8)
    assert zp.requantize(q, 0.1, 3) is q


class TestArithmetic:
    """Sums, products, quotients and joins: the nearest code of the real result."""

    def operands(self) -> tuple[zp.QTensor, zp.QTensor]:
        a = zp.quantize_per_tensor(torch.randn(2, 3, 4) * 2, 0.05, 120, zp.quint8)
        return a, zp.quantize_per_tensor(torch.randn(3, 1) * 2, 0.03, -5, zp.qint8)

    @pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
    @pytest.mark.parametrize("relu", [False, True])
    def test_nearest_code(self, name: str, relu: bool) -> None:
        a, b = self.operands()
        out = getattr(arithmetic, name)(a, b, 0.1, 100, relu=relu)
        real = getattr(torch, name)(a.dequantize(torch.float64), b.dequantize(torch.float64))
        low, high = (0.0 if relu else -10.0), 15.5
        assert out.qdtype == zp.quint8
        assert ((out.dequantize(torch.float64) - real.clamp(low, high)).abs() <= 0.0501).all()

    def test_output_dtype(self) -> None:
        a, b = self.operands()
        assert arithmetic.add(a, b, 0.1, 0).qdtype == zp.quint8
        assert arithmetic.add(b, a, 0.1, 0).qdtype == zp.qint8
        assert arithmetic.add(a, b, 0.1, 0, dtype=zp.qint32).qdtype == zp.qint32

    def test_division_by_zero(self) -> None:
        a = zp.quantize_per_tensor(torch.tensor([1.0, -1.0, 0.0]), 0.5, 10, zp.quint8)
        zero = zp.quantize_per_tensor(torch.zeros(3), 0.5, 10, zp.quint8)
        assert arithmetic.div(a, zero, 0.1, 7).int_repr().tolist() == [255, 0, 7]

    def test_matmul(self) -> None:
        a = zp.quantize_per_tensor(torch.randn(2, 5, 70), 0.02, 120, zp.quint8)
        b = zp.quantize_per_tensor(torch.randn(70, 4), 0.02, -5, zp.qint8)
        out = arithmetic.matmul(a, b, 0.3, 100)
        real = torch.matmul(a.dequantize(torch.float64), b.dequantize(torch.float64))
        assert ((out.dequantize(torch.float64) - real.clamp(-30, 46.5)).abs() <= 0.1501).all()
        with pytest.raises(TypeError, match="matmul takes qint8 or quint8"):
            arithmetic.matmul(a, zp.quantize_per_tensor(torch.randn(70, 4), 0.02, 0, zp.qint32), 0.3, 0)

    @pytest.mark.parametrize("value", [0, 0.3, -0.7, 2, 50.0, -50.0, 1e4])
    @pytest.mark.parametrize("relu", [False, True])
    def test_add_scalar(self, value: float, relu: bool) -> None:
        a, _ = self.operands()
        before = copy.deepcopy(a)
        out = arithmetic.add_scalar(a, value, relu)
        whole = round(value / 0.05) * 0.05
        real = a.dequantize(torch.float64) + whole
        real = real.relu() if relu else real
        tolerance = 1e-9 if out.q_scale() == 0.05 else out.q_scale() * 0.501
        assert ((out.dequantize(torch.float64) - real).abs() <= tolerance).all()
        assert torch.equal(a, before)

    @pytest.mark.parametrize("value", [0, 0.3, -0.7, 2, -50.0])
    @pytest.mark.parametrize("relu", [False, True])
    def test_mul_scalar_is_exact(self, value: float, relu: bool) -> None:
        for q in self.operands():
            before = copy.deepcopy(q)
            out = arithmetic.mul_scalar(q, value, relu)
            real = q.dequantize(torch.float64) * value
            torch.testing.assert_close(out.dequantize(torch.float64), real.relu() if relu else real)
            assert torch.equal(q, before)

    def test_scalars_that_are_none(self) -> None:
        a, _ = self.operands()
        for function in (arithmetic.add_scalar, arithmetic.mul_scalar):
            with pytest.raises(ValueError, match="finite"):
                function(a, float("nan"))
            with pytest.raises(TypeError, match="takes a number"):
                function(a, "1")  # type: ignore[arg-type]

    def test_cat(self) -> None:
        a = zp.quantize_per_tensor(torch.randn(2, 3), 0.05, 120, zp.quint8)
        b = zp.quantize_per_tensor(torch.randn(2, 2), 0.03, -5, zp.qint8)
        out = arithmetic.cat([a, b], 1)
        assert (out.qdtype, out.q_scale(), out.q_zero_point()) == (zp.quint8, 0.05, 120)
        assert torch.equal(out[:, :3].int_repr(), a.int_repr())
        assert torch.equal(out[:, 3:], zp.requantize(b, 0.05, 120, zp.quint8))
        clipped = arithmetic.cat([a, b], 1, 0.1, 10, relu=True)
        assert clipped.q_scale() == 0.1
        assert (clipped.int_repr() >= 10).all()

    def test_cat_refuses_what_does_not_fit(self) -> None:
        a = zp.quantize_per_tensor(torch.randn(2, 3), 0.05, 120, zp.quint8)
        with pytest.raises(ValueError, match="at least one tensor"):
            arithmetic.cat([])
        with pytest.raises(ValueError, match="of one rank"):
            arithmetic.cat([a, a[0]])
        with pytest.raises(ValueError, match="differ only in dim 0"):
            arithmetic.cat([a, a[:, :2]])
        with pytest.raises(ValueError, match="dim 2 is out of range"):
            arithmetic.cat([a, a], 2)
        with pytest.raises(TypeError, match="cat takes quantized tensors"):
            arithmetic.cat([a, torch.ones(2, 3)])  # type: ignore[list-item]

    def test_plain_and_per_channel_operands_are_refused(self) -> None:
        a, _ = self.operands()
        with pytest.raises(TypeError, match="add takes quantized tensors"):
            arithmetic.add(a, torch.ones(4), 0.1, 0)  # type: ignore[arg-type]
        channels = zp.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2).long(), 0, zp.qint8)
        with pytest.raises(RuntimeError, match="per-tensor grids"):
            arithmetic.mul(channels, a, 0.1, 0)
