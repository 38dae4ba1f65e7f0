"""Quantize, dequantize, requantize, range and look-up: the same integers as the reference on every instruction set."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zeropoint import backends
from zeropoint.ops import activation, quantize

pytestmark = pytest.mark.skipif(not backends.is_native(), reason="the native library is not built")

OPS = torch.ops.zeropoint
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
CODES = (torch.int8, torch.uint8, torch.int32)
LENGTHS = (0, 1, 7, 15, 31, 33, 63, 64, 65, 127, 1000, 1025)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "permuted": lambda x: x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2),
    "strided": lambda x: torch.cat([x, x], 3)[..., ::2],
    "expanded": lambda x: x[:1].expand(x.shape),
}

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)
storages = pytest.mark.parametrize("storage", CODES, ids=str)
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def specials(dtype: torch.dtype) -> Tensor:
    """Where rounding and saturation go wrong: ties, ends, signed zeros, subnormals, huge and non-finite values."""
    info = torch.finfo(dtype)
    numbers = [0.0, -0.0, info.max, info.min, info.tiny, -info.tiny, info.smallest_normal / 2, info.eps]
    numbers += [float("inf"), float("-inf"), float("nan"), 2.0**15, -(2.0**15), 2.0**31, 2.0**32, -(2.0**33), 2.0**63]
    return torch.cat([torch.tensor(numbers, dtype=torch.float64).to(dtype), torch.arange(-300, 300, 0.25).to(dtype)])


def floats(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random values with the special ones strewn in."""
    values = (torch.randn(shape, dtype=torch.float64) * 40).to(dtype).reshape(-1)
    odd = specials(dtype)
    places = torch.arange(0, values.numel(), 3)
    values[places] = odd[torch.randint(odd.numel(), places.shape)]
    return values.reshape(shape)


def codes(shape: tuple[int, ...], storage: torch.dtype) -> Tensor:
    info = torch.iinfo(storage)
    return torch.randint(info.min, info.max + 1, shape, dtype=torch.int64).to(storage)


def ends(storage: torch.dtype) -> tuple[int, int]:
    return torch.iinfo(storage).min, torch.iinfo(storage).max


def assert_same(native: Tensor, reference: Tensor) -> None:
    """Equal bits, dtype and strides; a NaN only where the reference has one."""
    assert native.dtype == reference.dtype
    assert native.shape == reference.shape
    assert native.stride() == reference.stride()
    if native.is_floating_point():
        nan = torch.isnan(reference)
        assert torch.equal(torch.isnan(native), nan)
        size = {2: torch.int16, 4: torch.int32, 8: torch.int64}[native.element_size()]
        native, reference = (x.contiguous().masked_fill(nan, 0).view(size) for x in (native, reference))
    assert torch.equal(native, reference)


@pytest.mark.usefixtures("isa")
class TestPerTensor:
    @dtypes
    @storages
    def test_special_values(self, dtype: torch.dtype, storage: torch.dtype) -> None:
        low, high = ends(storage)
        for scale in (1.0, 0.5, 0.1, 1e-30, 3e38, 2.0**-149, 7.3e-5):
            for zero_point in (0, 1, high, low, high // 3):
                args = (specials(dtype), scale, zero_point, low, high, storage)
                assert_same(OPS.quantize_per_tensor(*args), quantize.quantize_per_tensor_reference(*args))

    @dtypes
    @storages
    def test_lengths(self, dtype: torch.dtype, storage: torch.dtype) -> None:
        for n in LENGTHS:
            args = (floats((n,), dtype), 0.37, 5, *ends(storage), storage)
            assert_same(OPS.quantize_per_tensor(*args), quantize.quantize_per_tensor_reference(*args))
            back = (codes((n,), storage), 0.37, 5, dtype)
            assert_same(OPS.dequantize_per_tensor(*back), quantize.dequantize_per_tensor_reference(*back))

    @dtypes
    @layouts
    def test_layouts(self, dtype: torch.dtype, layout: str) -> None:
        x = LAYOUTS[layout](floats((2, 5, 4, 7), dtype))
        args = (x, 0.21, 100, 0, 255, torch.uint8)
        assert_same(OPS.quantize_per_tensor(*args), quantize.quantize_per_tensor_reference(*args))
        back = (LAYOUTS[layout](codes((2, 5, 4, 7), torch.int8)), 0.21, -7, dtype)
        assert_same(OPS.dequantize_per_tensor(*back), quantize.dequantize_per_tensor_reference(*back))

    def test_narrow_range_and_scalars(self) -> None:
        args = (floats((200,), torch.float32), 0.5, -3, -8, 7, torch.int8)
        assert_same(OPS.quantize_per_tensor(*args), quantize.quantize_per_tensor_reference(*args))
        args = (torch.tensor(3.25), 0.5, 0, -128, 127, torch.int8)
        assert_same(OPS.quantize_per_tensor(*args), quantize.quantize_per_tensor_reference(*args))

    @dtypes
    @storages
    def test_dequantize_every_code(self, dtype: torch.dtype, storage: torch.dtype) -> None:
        low, high = ends(storage)
        every = codes((4096,), storage) if storage == torch.int32 else torch.arange(low, high + 1).to(storage)
        for scale in (0.1, 1e-40, 3e37, 1.0):
            for zero_point in (low, 0, high, 77):
                args = (every, scale, zero_point, dtype)
                assert_same(OPS.dequantize_per_tensor(*args), quantize.dequantize_per_tensor_reference(*args))

    @storages
    @pytest.mark.parametrize("out", CODES, ids=str)
    def test_requantize(self, storage: torch.dtype, out: torch.dtype) -> None:
        low, high = ends(out)
        for zero_point in (0, 9, -(10**6), 2**24 + 1):
            for scale in (0.1, 0.05, 1e-9, 1e12):
                args = (codes((3, 211), storage), scale, zero_point, 0.1, 3, low, high, out)
                assert_same(OPS.requantize(*args), quantize.requantize_reference(*args))


@pytest.mark.usefixtures("isa")
class TestPerChannel:
    @dtypes
    @storages
    @pytest.mark.parametrize("zero_dtype", [torch.int64, torch.int32, torch.float32, torch.float64], ids=str)
    def test_axes_and_layouts(self, dtype: torch.dtype, storage: torch.dtype, zero_dtype: torch.dtype) -> None:
        low, high = ends(storage)
        for shape in ((3, 5, 4, 7), (2, 1, 3, 40), (4, 40, 3, 3)):
            for make in LAYOUTS.values():
                x, c = make(floats(shape, dtype)), make(codes(shape, storage))
                for axis in range(4):
                    scales = torch.rand(shape[axis], dtype=torch.float64) + 0.1
                    zeros = torch.rand(shape[axis], dtype=torch.float64) * 100 + 3.3
                    grid = (scales, zeros.to(zero_dtype), axis)
                    args = (x, *grid, low, high, storage)
                    assert_same(OPS.quantize_per_channel(*args), quantize.quantize_per_channel_reference(*args))
                    back = (c, *grid, dtype)
                    assert_same(OPS.dequantize_per_channel(*back), quantize.dequantize_per_channel_reference(*back))

    @pytest.mark.parametrize("zero_dtype", [torch.int64, torch.float32], ids=str)
    @pytest.mark.parametrize("shape", [(5000, 3), (3, 5000), (1, 70), (0, 4), (300, 200)], ids=str)
    def test_long_and_short_rows(self, zero_dtype: torch.dtype, shape: tuple[int, int]) -> None:
        for axis in (0, 1):
            grid = (torch.rand(shape[axis]) + 0.1, (torch.rand(shape[axis]) * 200).to(zero_dtype), axis)
            args = (floats(shape, torch.float32), *grid, 0, 255, torch.uint8)
            assert_same(OPS.quantize_per_channel(*args), quantize.quantize_per_channel_reference(*args))
            back = (codes(shape, torch.uint8), *grid, torch.float32)
            assert_same(OPS.dequantize_per_channel(*back), quantize.dequantize_per_channel_reference(*back))


@pytest.mark.usefixtures("isa", "threads")
class TestManyElements:
    """Enough elements for several threads and several pieces of every loop."""

    def test_quantize_and_back(self) -> None:
        x = floats((7, 13, 31, 37), torch.float32)
        args = (x, 0.2, 3, -128, 127, torch.int8)
        out = OPS.quantize_per_tensor(*args)
        assert_same(out, quantize.quantize_per_tensor_reference(*args))
        assert_same(
            OPS.dequantize_per_tensor(out, 0.2, 3, torch.bfloat16),
            quantize.dequantize_per_tensor_reference(out, 0.2, 3, torch.bfloat16),
        )
        for zeros in (torch.randint(-9, 9, (13,)), torch.randn(13)):
            args = (x.to(memory_format=torch.channels_last), torch.rand(13) + 0.1, zeros, 1, -128, 127, torch.int8)
            assert_same(OPS.quantize_per_channel(*args), quantize.quantize_per_channel_reference(*args))

    @dtypes
    def test_range(self, dtype: torch.dtype) -> None:
        for x in (floats((100_003,), dtype), floats((1025,), dtype), torch.zeros(0, dtype=dtype)):
            for native, reference in zip(OPS.dynamic_range(x), quantize.dynamic_range_reference(x), strict=True):
                assert native.shape == ()
                assert native.dtype == reference.dtype
                assert native.item() == reference.item()


@pytest.mark.usefixtures("isa")
class TestRangeAndLookup:
    @dtypes
    def test_grid_of_a_range(self, dtype: torch.dtype) -> None:
        x = floats((300,), dtype)
        for values in (x, x.abs(), -x.abs(), x * 0, x[:0], x * 1e-6, x.abs() * 1e-6, -x.abs() * 1e-6, x.clamp(-2, 9)):
            for ends_of_grid in ((0, 255), (-128, 127), (0, 127), (-64, 63), (-8, 7)):
                native = OPS.dynamic_qparams(values, *ends_of_grid)
                reference = quantize.dynamic_qparams_reference(values, *ends_of_grid)
                assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(native, reference, strict=True))

    @dtypes
    def test_range_of_nothing_finite(self, dtype: torch.dtype) -> None:
        for x in (torch.full((n,), v, dtype=dtype) for n in LENGTHS for v in (float("inf"), float("nan"))):
            assert [v.item() for v in OPS.dynamic_range(x)] == [0.0, 0.0]

    def test_range_of_every_length(self) -> None:
        for n in LENGTHS[1:]:
            for place in {0, n // 2, n - 1}:
                x = torch.ones(n)
                x[place] = -4.0
                assert OPS.dynamic_range(x)[0].item() == -4.0
                assert OPS.dynamic_range(-x)[1].item() == 4.0

    @pytest.mark.parametrize("storage", [torch.int8, torch.uint8], ids=str)
    @pytest.mark.parametrize("out", CODES, ids=str)
    def test_lookup(self, storage: torch.dtype, out: torch.dtype) -> None:
        table = codes((256,), out)
        for make in LAYOUTS.values():
            c = make(codes((2, 5, 4, 7), storage))
            assert_same(OPS.lookup(c, table), activation.lookup_reference(c, table))
        for n in LENGTHS:
            c = codes((n,), storage)
            assert_same(OPS.lookup(c, table), activation.lookup_reference(c, table))
        every = torch.arange(torch.iinfo(storage).min, torch.iinfo(storage).max + 1).to(storage)
        assert torch.equal(OPS.lookup(every, table), table)


@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=70),
    scale=st.floats(min_value=1e-30, max_value=1e30),
    zero_point=st.integers(-128, 127),
)
def test_any_float_on_any_grid(values: list[float], scale: float, zero_point: int) -> None:
    args = (torch.tensor(values), scale, zero_point, -128, 127, torch.int8)
    assert_same(OPS.quantize_per_tensor(*args), quantize.quantize_per_tensor_reference(*args))


class TestRefusals:
    """What does not fit raises RuntimeError and leaves memory alone."""

    def test_dtypes(self) -> None:
        x, c = torch.ones(3), torch.ones(3, dtype=torch.int8)
        for call in (
            lambda: OPS.quantize_per_tensor(c, 1.0, 0, -128, 127, torch.int8),
            lambda: OPS.quantize_per_tensor(x, 1.0, 0, -128, 127, torch.int64),
            lambda: OPS.dequantize_per_tensor(x, 1.0, 0, torch.float32),
            lambda: OPS.dequantize_per_tensor(c, 1.0, 0, torch.int32),
            lambda: OPS.dynamic_range(c),
            lambda: OPS.lookup(c.int(), torch.zeros(256, dtype=torch.int8)),
        ):
            with pytest.raises(RuntimeError, match=r"expected|dtype"):
                call()

    def test_sizes(self) -> None:
        x, c = torch.ones(3, 4), torch.ones(3, 4, dtype=torch.int8)
        scales, zeros = torch.ones(3), torch.zeros(3, dtype=torch.int64)
        for call in (
            lambda: OPS.quantize_per_channel(x, scales, zeros, 1, -128, 127, torch.int8),
            lambda: OPS.quantize_per_channel(x, scales, zeros, 2, -128, 127, torch.int8),
            lambda: OPS.quantize_per_channel(x, scales, zeros[:2], 0, -128, 127, torch.int8),
            lambda: OPS.dequantize_per_channel(c, scales, zeros, 1, torch.float32),
            lambda: OPS.lookup(c, torch.zeros(255, dtype=torch.int8)),
            lambda: OPS.quantize_per_tensor(x, 1.0, 0, -129, 127, torch.int8),
            lambda: OPS.quantize_per_tensor(x, 1.0, 300, 0, 255, torch.uint8),
        ):
            with pytest.raises(RuntimeError):
                call()
