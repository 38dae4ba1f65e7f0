"""Histograms: counting, widening, clipping; and the observers that clip by another rule."""

from __future__ import annotations

import tracemalloc
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zeropoint as zp
from zeropoint.ao.quantization import (
    EntropyObserver,
    HistogramObserver,
    MinMaxObserver,
    MSEObserver,
    PercentileObserver,
    fake_quantize_per_tensor,
)
from zeropoint.ops.histogram import clipping_error, count, redistribute, search_clipping_range

KINDS = (HistogramObserver, PercentileObserver, EntropyObserver, MSEObserver)
every = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)

floats = st.floats(-1e6, 1e6, width=32)


def squared_error(observer, x):
    scale, zero_point = observer.calculate_qparams()
    y = fake_quantize_per_tensor(x, scale, zero_point, observer.quant_min, observer.quant_max)
    return (x - y).square().mean().item()


# --- counting -----------------------------------------------------------------------------------------------------


@given(st.lists(floats, min_size=1, max_size=200), st.integers(1, 64))
def test_every_value_is_counted_once(values, bins):
    x = torch.tensor(values)
    counts = count(x, bins, float(x.min()), float(x.max()))
    assert counts.sum().item() == len(values)


@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=50),
    st.floats(-10, 10),
    st.floats(0, 10),
    st.floats(0, 1e30),
    st.floats(0, 1e30),
)
def test_widening_keeps_the_total(values, low, span, more_low, more_high):
    counts = torch.tensor(values, dtype=torch.float64)
    wider = redistribute(counts, low, low + span, low - more_low, low + span + more_high)
    assert wider.sum().item() == pytest.approx(counts.sum().item(), rel=1e-12, abs=1e-12)
    assert (wider >= 0).all()


def test_widening_moves_counts_to_where_the_values_lie():
    counts = torch.tensor([16.0, 32.0], dtype=torch.float64)
    assert redistribute(counts, 0.0, 1.0, 0.0, 2.0).tolist() == [48.0, 0.0]
    assert redistribute(counts, 0.0, 1.0, -1.0, 1.0).tolist() == [0.0, 48.0]
    assert redistribute(counts, 1.0, 1.0, 0.0, 4.0).tolist() == [48.0, 0.0]


def test_zeros_first_then_a_normal_batch():
    observer = HistogramObserver()
    observer(torch.zeros(8))
    observer(torch.zeros(8))
    observer(torch.linspace(-1, 1, 1000))
    assert observer.histogram.sum().item() == 1016
    assert (observer.min_val.item(), observer.max_val.item()) == (-1.0, 1.0)
    assert observer.calculate_qparams()[0].item() == pytest.approx(2 / 255, rel=0.01)


def test_the_range_grows_with_later_batches():
    observer = HistogramObserver()
    observer(torch.rand(100) * 0.01)
    observer(torch.rand(100_000) * 10)
    low, high = observer.clipping_range()
    assert 9.0 < high.item() <= 10.0
    assert low.item() == pytest.approx(0.0, abs=0.01)


def test_a_jump_of_forty_orders_of_magnitude_costs_no_memory():
    observer = HistogramObserver()
    observer(torch.rand(100) * 1e-38)
    tracemalloc.start()
    observer(torch.randn(100) * 100)
    observer(torch.tensor([3.4e38, -3.4e38]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
    assert observer.histogram.shape == (2048,)
    assert observer.histogram.sum().item() == pytest.approx(202)


@every
@pytest.mark.parametrize("step", [1e-45, 1e-44, 1e-40])
def test_values_closer_than_a_bin_width_of_subnormals(kind, step):
    observer = kind()
    observer(torch.tensor([0.0, step]))
    observer(torch.tensor([0.0, step, 2 * step]))
    scale, zero_point = observer.calculate_qparams()
    assert scale.item() > 0
    assert zero_point.item() == 0


def test_counts_beyond_32_bits_still_grow_by_one():
    observer = HistogramObserver(bins=4)
    observer(torch.tensor([0.0, 1.0]))
    observer.histogram[0] = 2.0**31
    observer(torch.tensor([0.0, 1.0]))
    assert observer.histogram.tolist() == [2.0**31 + 1, 0.0, 0.0, 2.0]


@every
def test_infinities_do_not_reach_the_counts(kind):
    observer = kind()
    with pytest.warns(UserWarning, match="NaN or infinite"):
        observer(torch.tensor([1.0, 2.0, float("inf")]))
    assert observer.histogram.sum().item() == 2
    assert observer.max_val.item() == 2.0


@every
def test_streams_batches_of_any_shape(kind):
    observer = kind()
    for shape in ((4,), (2, 3, 5), (1, 1, 1, 7), ()):
        observer(torch.randn(shape))
    assert observer.histogram.sum().item() == pytest.approx(4 + 30 + 7 + 1)


@every
def test_other_bins_load(kind):
    observer, fresh = kind(bins=64), kind()
    observer(torch.randn(1000))
    fresh.load_state_dict(observer.state_dict())
    assert fresh.bins == 64
    assert torch.equal(fresh.calculate_qparams()[0], observer.calculate_qparams()[0])


# --- the search ---------------------------------------------------------------------------------------------------


def test_error_of_a_uniform_density_is_a_twelfth_of_the_cell_squared():
    counts = np.full(64, 3.0)
    cell = 64 / 16
    assert clipping_error(counts, 0, 63, 16) == pytest.approx(counts.sum() * cell**2 / 12)


@given(st.lists(st.integers(0, 1000), min_size=8, max_size=8), st.integers(0, 3), st.integers(4, 7), st.integers(1, 16))
def test_error_equals_a_numeric_integral(values, start, stop, cells):
    counts = np.asarray(values, dtype=np.float64)
    samples = 20_000
    place = (np.arange(samples) + 0.5) / samples * 8
    width = (stop - start + 1) / cells
    centre = (np.clip(np.floor((place - start) / width), 0, cells - 1) + 0.5) * width + start
    expected = np.sum((place - centre) ** 2 * counts[np.floor(place).astype(int)]) * 8 / samples
    assert clipping_error(counts, start, stop, cells) == pytest.approx(expected, rel=1e-3, abs=1e-3)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=64), st.sampled_from([2, 16, 256, 2**32]))
def test_the_search_never_raises_the_error_of_the_first_step(values, cells):
    counts = np.asarray(values, dtype=np.float64)
    start, stop = search_clipping_range(counts, cells)
    assert 0 <= start <= stop < counts.size


def test_all_mass_in_one_bin_ends_at_once():
    counts = np.full(2048, 1e-3)
    counts[0] = 1e6
    assert search_clipping_range(counts, 256) == (0, 0)


def test_no_counts_clip_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert search_clipping_range(np.zeros(16), 256) == (0, 15)


def test_the_range_is_narrower_than_minmax_where_that_pays():
    x = torch.randn(100_000)
    ours, plain = HistogramObserver(dtype=zp.qint8, quant_min=-8, quant_max=7), MinMaxObserver()
    ours(x)
    plain(x)
    low, high = ours.clipping_range()
    assert plain.min_val <= low < high <= plain.max_val


# --- other clipping rules -----------------------------------------------------------------------------------------


def test_percentile_reads_the_quantiles():
    observer = PercentileObserver(percentile=99.0)
    x = torch.linspace(0, 1, 100_001)
    observer(x)
    low, high = observer.clipping_range()
    assert low.item() == pytest.approx(0.01, abs=1e-3)
    assert high.item() == pytest.approx(0.99, abs=1e-3)


def test_percentile_of_one_hundred_clips_nothing():
    observer = PercentileObserver(percentile=100.0)
    observer(torch.randn(1000))
    assert observer.clipping_range() == (observer.min_val, observer.max_val)


def test_percentile_stays_inside_the_data_when_a_small_batch_came_first():
    observer = PercentileObserver(percentile=99.9)
    observer(torch.tensor([0.1, 0.2]))
    observer(torch.rand(10_000))
    observer(torch.tensor([316.0]))
    assert observer.clipping_range()[1].item() < 1.2


@pytest.mark.parametrize("kind", [PercentileObserver, EntropyObserver], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("qscheme", [zp.per_tensor_affine, zp.per_tensor_symmetric], ids=str)
def test_a_few_outliers_are_clipped(kind, qscheme):
    x = torch.randn(100_000)
    x[:5] = 100.0
    observer, plain = kind(dtype=zp.qint8, qscheme=qscheme), MinMaxObserver(dtype=zp.qint8, qscheme=qscheme)
    observer(x)
    plain(x)
    assert squared_error(observer, x[5:]) < squared_error(plain, x[5:]) / 10


@pytest.mark.parametrize("qscheme", [zp.per_tensor_affine, zp.per_tensor_symmetric], ids=str)
@pytest.mark.parametrize("codes", [(-128, 127), (-8, 7)], ids=["8 bits", "4 bits"])
def test_mse_is_no_worse_than_minmax_and_histogram(qscheme, codes):
    settings = {"dtype": zp.qint8, "qscheme": qscheme, "quant_min": codes[0], "quant_max": codes[1]}
    x = torch.distributions.StudentT(3.0).sample((50_000,))
    errors = []
    for kind in (MSEObserver, MinMaxObserver, HistogramObserver):
        observer = kind(**settings)
        observer(x)
        errors.append(squared_error(observer, x))
    assert errors[0] <= min(errors[1:]) * 1.01


@pytest.mark.parametrize(
    "make",
    [
        lambda: PercentileObserver(50.0),
        lambda: PercentileObserver(101.0),
        lambda: EntropyObserver(0),
        lambda: MSEObserver(0),
    ],
)
def test_impossible_settings_are_refused(make):
    with pytest.raises(ValueError):
        make()
