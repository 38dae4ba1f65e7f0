"""Normalization of codes: the same integers as the reference on every instruction set, and close to float."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import zeropoint as zp
from zeropoint import backends
from zeropoint.ops import norm

native = pytest.mark.skipif(not backends.is_native(), reason="the native library is not built")

OPS = torch.ops.zeropoint
CODES = (torch.int8, torch.uint8, torch.int32)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "strided": lambda x: torch.cat([x, x], 3)[..., ::2],
}
SHAPES = ((2, 6, 4, 5), (1, 12, 1, 1), (3, 6, 9, 17), (2, 6, 3, 1), (0, 6, 2, 2), (2, 6, 0, 2), (1, 66, 5, 5))

storages = pytest.mark.parametrize("storage", CODES, ids=str)
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def codes(shape: tuple[int, ...], storage: torch.dtype) -> Tensor:
    info = torch.iinfo(storage)
    return torch.randint(info.min, info.max + 1, shape, dtype=torch.int64).to(storage)


def both(name: str, *args: Any) -> None:
    """Calls the kernel and the reference, and compares integers, dtypes and strides."""
    result, reference = getattr(OPS, name)(*args), getattr(norm, f"{name}_reference")(*args)
    assert result.dtype == reference.dtype
    assert result.stride() == reference.stride()
    assert torch.equal(result, reference)


def tail(out: torch.dtype, scale: float = 0.03) -> tuple[Any, ...]:
    info = torch.iinfo(out)
    return (scale, 5, info.min, info.max, out)


@native
@pytest.mark.usefixtures("isa")
class TestKernels:
    @storages
    @layouts
    @pytest.mark.parametrize("out", CODES, ids=str)
    def test_batch_norm(self, storage: torch.dtype, layout: str, out: torch.dtype) -> None:
        for shape in SHAPES:
            c = shape[1]
            x = LAYOUTS[layout](codes(shape, storage))
            mean, var = torch.randn(c), torch.rand(c, dtype=torch.float64) + 0.1
            scale = 1e-9 if storage == torch.int32 else 0.02
            for weight, bias in ((None, None), (torch.randn(c), torch.randn(c, dtype=torch.float16))):
                both("batch_norm", x, scale, 3, weight, bias, mean, var, 1e-5, *tail(out))

    def test_batch_norm_of_zero_variance(self) -> None:
        x, zeros = codes((3, 4, 9), torch.int8), torch.zeros(4)
        for var in (zeros, zeros - 1, zeros + float("inf"), zeros + float("nan")):
            both("batch_norm", x, 0.1, 3, None, None, zeros, var, 0.0, *tail(torch.int8))

    @storages
    @layouts
    @pytest.mark.parametrize("groups", [1, 3, 6], ids=lambda g: f"{g}-groups")
    def test_group_norm(self, storage: torch.dtype, layout: str, groups: int) -> None:
        for shape in SHAPES:
            c = shape[1]
            x = LAYOUTS[layout](codes(shape, storage))
            for weight, bias in ((None, None), (torch.randn(c), torch.randn(c))):
                both("group_norm", x, 0.02, 3, groups, weight, bias, 1e-5, *tail(storage))
                both("group_norm", x, 0.02, 3, c, weight, bias, 1e-5, *tail(storage))
        for shape in ((2, 6, 7), (2, 6, 3, 2, 4)):
            both("group_norm", codes(shape, storage), 0.02, 3, groups, None, None, 1e-5, *tail(storage))

    @storages
    @layouts
    def test_layer_norm(self, storage: torch.dtype, layout: str) -> None:
        for shape in SHAPES:
            x = LAYOUTS[layout](codes(shape, storage))
            for rank in (1, 2, 3):
                sizes = list(shape[-rank:])
                for weight, bias in ((None, None), (torch.randn(sizes), torch.randn(sizes))):
                    both("layer_norm", x, 0.02, 3, sizes, weight, bias, 1e-5, *tail(storage))

    @storages
    def test_equal_codes(self, storage: torch.dtype) -> None:
        """No variance: eps alone decides, and without it every code is NaN, so the zero point."""
        for value in (torch.iinfo(storage).min, 0, torch.iinfo(storage).max):
            x = torch.full((2, 4, 33), value, dtype=torch.int64).to(storage)
            for eps in (1e-5, 0.0):
                both("layer_norm", x, 0.02, 3, [33], None, None, eps, *tail(storage))
                both("group_norm", x, 0.02, 3, 2, None, None, eps, *tail(storage))

    def test_sums_beyond_32_bits(self) -> None:
        x = torch.full((1, 1, 1_100_000), 255, dtype=torch.uint8)
        x[..., ::7] = 254
        both("group_norm", x, 0.02, 0, 1, None, None, 1e-5, *tail(torch.uint8))
        x = x.reshape(1, 4, -1, 1).to(memory_format=torch.channels_last)
        both("group_norm", x, 0.02, 0, 2, None, None, 1e-5, *tail(torch.uint8))

    @pytest.mark.usefixtures("threads")
    def test_many_elements(self) -> None:
        for make in LAYOUTS.values():
            x = make(codes((3, 12, 57, 61), torch.int8))
            both("batch_norm", x, 0.02, 3, None, None, torch.randn(12), torch.rand(12), 1e-5, *tail(torch.int8))
            both("group_norm", x, 0.02, 3, 4, None, None, 1e-5, *tail(torch.int8))
            both("layer_norm", x, 0.02, 3, [61], torch.randn(61), torch.randn(61), 1e-5, *tail(torch.int8))
            both("group_norm", x[:1], 0.02, 3, 4, None, None, 1e-5, *tail(torch.int8))

    def test_what_does_not_fit_raises(self) -> None:
        x, four, three = codes((2, 4, 5), torch.int8), torch.ones(4), torch.ones(3)
        for name, args in (
            ("batch_norm", (x, 0.1, 0, three, None, four, four, 1e-5)),
            ("batch_norm", (x, 0.1, 0, None, None, four, three, 1e-5)),
            ("batch_norm", (x[0, 0], 0.1, 0, None, None, four, four, 1e-5)),
            ("batch_norm", (x.float(), 0.1, 0, None, None, four, four, 1e-5)),
            ("layer_norm", (x, 0.1, 0, [4], None, None, 1e-5)),
            ("layer_norm", (x, 0.1, 0, [2, 4, 5, 1], None, None, 1e-5)),
            ("layer_norm", (x, 0.1, 0, [5], four, None, 1e-5)),
            ("group_norm", (x, 0.1, 0, 3, None, None, 1e-5)),
            ("group_norm", (x, 0.1, 0, 0, None, None, 1e-5)),
            ("group_norm", (x, 0.1, 0, 2, three, None, 1e-5)),
        ):
            with pytest.raises(RuntimeError):
                getattr(OPS, name)(*args, *tail(torch.int8))


def within_a_step(quantized: zp.QTensor, real: Tensor, tolerance: float = 0.51) -> bool:
    """Whether every value is the nearest one of the output grid, but for saturation and near ties."""
    low, high = (
        (end - quantized.zero_point) * quantized.scale for end in (quantized.qdtype.qmin, quantized.qdtype.qmax)
    )
    error = (quantized.dequantize().double() - real.clamp(low, high)).abs().max()
    return bool(error <= tolerance * quantized.scale)


@pytest.mark.parametrize("qdtype", [zp.qint8, zp.quint8, zp.qint32], ids=str)
class TestAgainstFloat:
    """Each norm is the float one of the dequantized input, to the nearest code of its own grid."""

    def quantized(self, qdtype: zp.QDtype, shape: tuple[int, ...] = (3, 6, 5, 7)) -> tuple[zp.QTensor, float]:
        wide = qdtype == zp.qint32
        x = torch.randn(shape, dtype=torch.float64) * 2 + 1
        return zp.quantize_per_tensor(x, 1e-6 if wide else 0.05, 40, qdtype), 1e-4 if wide else 0.03

    def test_batch_norm(self, qdtype: zp.QDtype) -> None:
        q, scale = self.quantized(qdtype)
        w, b, mean, var = torch.randn(6), torch.randn(6), torch.randn(6), torch.rand(6) + 0.5
        real = F.batch_norm(q.dequantize(torch.float64), mean.double(), var.double(), w.double(), b.double(), eps=1e-3)
        assert within_a_step(norm.batch_norm(q, w, b, mean, var, 1e-3, scale, 60), real)
        rectified = norm.batch_norm(q, w, b, mean, var, 1e-3, scale, 60, relu=True)
        assert within_a_step(rectified, real.relu())

    def test_layer_norm(self, qdtype: zp.QDtype) -> None:
        q, scale = self.quantized(qdtype)
        w, b = torch.randn(5, 7), torch.randn(5, 7)
        real = F.layer_norm(q.dequantize(torch.float64), (5, 7), w.double(), b.double())
        assert within_a_step(norm.layer_norm(q, (5, 7), w, b, 1e-5, scale, 60), real)

    def test_group_and_instance_norm(self, qdtype: zp.QDtype) -> None:
        q, scale = self.quantized(qdtype)
        w, b = torch.randn(6), torch.randn(6)
        real = q.dequantize(torch.float64)
        expected = F.group_norm(real, 3, w.double(), b.double())
        assert within_a_step(norm.group_norm(q, 3, w, b, 1e-5, scale, 60), expected)
        expected = F.instance_norm(real, weight=w.double(), bias=b.double())
        assert within_a_step(norm.instance_norm(q, w, b, 1e-5, scale, 60), expected)

    def test_the_zero_point_does_not_matter(self, qdtype: zp.QDtype) -> None:
        c = codes((3, 4, 9), qdtype.storage)
        a, b = (zp.QTensor.from_codes(c, 0.1, zero) for zero in (0, 100))
        assert torch.equal(
            norm.layer_norm(a, (9,), None, None, 1e-5, 0.03, 7), norm.layer_norm(b, (9,), None, None, 1e-5, 0.03, 7)
        )


def test_a_large_mean_does_not_swallow_the_variance() -> None:
    """32-bit codes far from zero whose spread is a few steps: float32 alone could not tell them apart."""
    c = (2**30 + torch.randint(-5, 6, (2, 3, 50))).to(torch.int32)
    q = zp.QTensor.from_codes(c, 1e-3, 0)
    real = F.layer_norm(q.dequantize(torch.float64), (50,), eps=1e-12)
    assert within_a_step(norm.layer_norm(q, (50,), None, None, 1e-12, 1e-3, 0), real)


def test_errors_name_what_does_not_fit() -> None:
    x = torch.zeros(2, 4, 5)
    q = zp.quantize_per_tensor(x, 0.1, 0, zp.qint8)
    four = torch.ones(4)
    with pytest.raises(TypeError, match="layer_norm takes a quantized tensor"):
        norm.layer_norm(x, (5,), None, None, 1e-5, 0.1, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not end in normalized_shape"):
        norm.layer_norm(q, (4,), None, None, 1e-5, 0.1, 0)
    with pytest.raises(ValueError, match="weight must have shape"):
        norm.batch_norm(q, torch.ones(3), None, four, four, 1e-5, 0.1, 0)
    with pytest.raises(ValueError, match="do not split into 3 groups"):
        norm.group_norm(q, 3, None, None, 1e-5, 0.1, 0)
    with pytest.raises(ValueError, match="3 or more dimensions"):
        norm.instance_norm(q.reshape(8, 5), None, None, 1e-5, 0.1, 0)
    channels = zp.quantize_per_channel(x, torch.ones(4), torch.zeros(4, dtype=torch.int64), 1, zp.qint8)
    with pytest.raises(RuntimeError, match="per-tensor"):
        norm.group_norm(channels, 2, None, None, 1e-5, 0.1, 0)
