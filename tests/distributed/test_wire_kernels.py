"""The operators under the hooks: every instruction set gives the reference's bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zeropoint import grid
from zeropoint.ops import distributed as reference

OPS = torch.ops.zeropoint
LENGTHS = (1, 31, 512, 513, 40_001)
NAN, INF = float("nan"), float("inf")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal element by element, a NaN equal to any NaN."""
    return (
        a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    )


def spread(length: int) -> Tensor:
    """Values of both signs over many magnitudes, with exact zeros and ties."""
    x = torch.randn(length) * 10.0 ** torch.randint(-6, 3, (length,))
    x[::7] = 0.0
    x[::11] = x.abs().max()
    return x


def grids(x: Tensor, row: int) -> Tensor:
    scale, zero_point = grid.affine_qparams(*reference.row_range_reference(x, row), 0, 255, reference.SMALLEST_SCALE)
    return torch.stack([scale, zero_point.to(torch.float32)])


@pytest.mark.parametrize("row", [1, 100, 512, 50_000])
@pytest.mark.parametrize("length", LENGTHS)
def test_rows_equal_the_reference(length: int, row: int, isa: str) -> None:
    x = spread(length)
    low, high = OPS.row_range(x, row)
    want_low, want_high = reference.row_range_reference(x, row)
    assert torch.equal(low, want_low)
    assert torch.equal(high, want_high)
    qparams = grids(x, row)
    codes = OPS.row_quantize(x, qparams, row)
    assert torch.equal(codes, reference.row_quantize_reference(x, qparams, row))
    many, their = torch.stack([codes, codes.flip(0), codes // 2]), torch.stack([qparams, qparams * 2, qparams])
    assert same_bits(OPS.row_sum(many, their, length), reference.row_sum_reference(many, their, length))


@pytest.mark.parametrize("seed", [None, 0xFFFFFFFF], ids=["nearest", "random"])
@pytest.mark.parametrize("block", [32, 256])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("length", LENGTHS)
def test_blocks_equal_the_reference(length: int, bits: int, block: int, seed: int | None, isa: str) -> None:
    x = spread(length)
    for chunks in (1, 3):
        data = OPS.block_pack(x, chunks, bits, block, seed)
        assert torch.equal(data, reference.block_pack_reference(x, chunks, bits, block, seed))
        assert same_bits(OPS.block_sum(data, bits, block), reference.block_sum_reference(data, bits, block))
        values = OPS.block_unpack(data, bits, block, length)
        assert same_bits(values, reference.block_unpack_reference(data, bits, block, length))


def test_threads_change_nothing(threads: int) -> None:
    x = spread(200_001)
    data = OPS.block_pack(x, 3, 8, 256, 1)
    assert torch.equal(data, reference.block_pack_reference(x, 3, 8, 256, 1))
    assert same_bits(OPS.block_sum(data, 8, 256), reference.block_sum_reference(data, 8, 256))
    for row in (512, 200_001):
        qparams = grids(x, row)
        codes = OPS.row_quantize(x, qparams, row)
        assert torch.equal(codes, reference.row_quantize_reference(x, qparams, row))
        assert torch.equal(torch.stack(OPS.row_range(x, row)), torch.stack(reference.row_range_reference(x, row)))


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_that_lie_apart(bits: int, isa: str) -> None:
    data = OPS.block_pack(spread(4000), 4, bits, 64, None)
    wide = torch.cat([data, torch.full((4, 12), 255, dtype=torch.uint8)], dim=1)
    apart = wide[:, : data.shape[1]]
    assert torch.equal(OPS.block_sum(apart, bits, 64), OPS.block_sum(data, bits, 64))
    assert torch.equal(OPS.block_unpack(apart, bits, 64, 4000), OPS.block_unpack(data, bits, 64, 4000))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("at", [0, 70, 129, 199])
def test_what_is_not_finite_shows(bad: float, at: int, isa: str) -> None:
    x = torch.randn(200)
    x[at] = bad
    for bits in (8, 4):
        data = OPS.block_pack(x, 1, bits, 64, None)
        values = OPS.block_unpack(data, bits, 64, 200)
        assert same_bits(values, reference.block_unpack_reference(data, bits, 64, 200))
        block = at // 64
        finite = values.isfinite()
        assert not finite[64 * block : 64 * block + 64].any()
        assert finite[: 64 * block].all()
        assert finite[64 * block + 64 :].all()
    low, high = OPS.row_range(x, 64)
    want_low, want_high = reference.row_range_reference(x, 64)
    assert same_bits(low, want_low)
    assert same_bits(high, want_high)
    qparams = grids(x, 64)
    codes = OPS.row_quantize(x, qparams, 64)
    assert torch.equal(codes, reference.row_quantize_reference(x, qparams, 64))
    assert not OPS.row_sum(codes[None], qparams[None], 200)[64 * (at // 64) : 64 * (at // 64) + 64].isfinite().any()


@given(
    values=st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=1, max_size=80),
    bits=st.sampled_from([8, 4]),
)
def test_a_value_comes_back_within_half_a_step(values: list[float], bits: int) -> None:
    x = torch.tensor(values)
    limit = 2 ** (bits - 1) - 1
    back = OPS.block_unpack(OPS.block_pack(x, 1, bits, 32, None), bits, 32, x.numel()).double()
    for start in range(0, x.numel(), 32):
        block = x[start : start + 32].double()
        step = max(block.abs().max().item() / limit, reference.SMALLEST_SCALE)
        assert (back[start : start + 32] - block).abs().max().item() <= step * 0.50001


@pytest.mark.parametrize("bits", [8, 4])
def test_stochastic_rounding_has_no_bias(bits: int) -> None:
    x = torch.rand(64) * 2 - 1
    x[0] = 1.0
    step = 1.0 / (2 ** (bits - 1) - 1)
    draws = torch.stack(
        [
            OPS.block_unpack(OPS.block_pack(x, 1, bits, 64, seed * 2_654_435_761 & 0xFFFFFFFF), bits, 64, 64)
            for seed in range(4000)
        ]
    )
    assert (draws - x).abs().max() < step * 1.0001
    # A mean of 4000 draws, each off by at most a step, strays by step / 2 / sqrt(4000) at the most: five times that.
    assert (draws.double().mean(dim=0) - x).abs().max() < step * 0.04


def test_tiny_gradients_keep_their_resolution() -> None:
    x = torch.randn(256) * 1e-9
    back = OPS.block_unpack(OPS.block_pack(x, 1, 8, 256, None), 8, 256, 256)
    assert (back - x).abs().max() <= x.abs().max() / 127 * 0.50001


def test_zeros_stay_zeros(isa: str) -> None:
    x = torch.zeros(100)
    assert torch.equal(OPS.block_unpack(OPS.block_pack(x, 2, 4, 32, 5), 4, 32, 100), x)
    assert torch.equal(OPS.row_sum(OPS.row_quantize(x, grids(x, 64), 64)[None], grids(x, 64)[None], 100), x)


def test_shapes_without_data() -> None:
    x = torch.randn(1000, device="meta")
    data = OPS.block_pack(x, 3, 4, 64, None)
    assert data.shape == reference.block_pack_reference(torch.randn(1000), 3, 4, 64, None).shape
    assert OPS.block_sum(data, 4, 64).shape == (384,)
    assert OPS.block_unpack(data, 4, 64, 1000).shape == (1000,)
    low, _ = OPS.row_range(x, 512)
    codes = OPS.row_quantize(x, x.new_empty(2, 2), 512)
    assert low.shape == (2,)
    assert codes.shape == (2, 512)
    assert OPS.row_sum(codes[None], x.new_empty(1, 2, 2), 1000).shape == (1000,)


def test_sizes_that_do_not_fit_are_errors() -> None:
    data = OPS.block_pack(torch.randn(64), 1, 8, 32, None)
    for wrong in (
        lambda: OPS.block_unpack(data, 8, 32, 65),
        lambda: OPS.block_sum(data[:, 1:], 8, 32),
        lambda: OPS.block_pack(torch.randn(64), 1, 8, 33, None),
        lambda: OPS.block_pack(torch.randn(64), 1, 5, 32, None),
        lambda: OPS.row_quantize(torch.randn(64), torch.ones(2, 3), 32),
        lambda: OPS.row_sum(torch.zeros(1, 2, 32, dtype=torch.uint8), torch.ones(1, 2, 2), 65),
    ):
        with pytest.raises(RuntimeError):
            wrong()
