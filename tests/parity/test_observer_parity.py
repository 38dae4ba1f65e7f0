"""Observers give torch.ao's statistics and grids on random streams of batches."""

from __future__ import annotations

import warnings

import pytest
import torch

import zeropoint as zp
from zeropoint import ao

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    theirs = pytest.importorskip("torch.ao.quantization", reason="this torch has no torch.ao.quantization")

pytestmark = pytest.mark.filterwarnings("ignore")
ours = ao.quantization

STREAMS = range(200)


def stream(seed: int) -> list[torch.Tensor]:
    """A few batches of one random kind: normal, cubed, rectified, shifted, growing, half precision, zeros first."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(1 + seed % 4):
        x = torch.randn(4, 50 + 13 * (seed % 11), generator=generator) * (1 + i * (seed % 3)) + (seed % 5 - 2)
        if seed % 3 == 0:
            x = x**3
        if seed % 7 == 0:
            x = x.relu()
        if seed % 10 == 9 and i == 0:
            x = torch.zeros_like(x)
        batches.append(x)
    return batches


def settings(seed: int, per_channel: bool) -> tuple[dict, dict]:
    """The same settings in our words and in torch's."""
    symmetric, signed = seed % 2 == 1, seed % 4 >= 2
    codes = [{}, {"quant_min": 0, "quant_max": 127}, {"quant_min": 0, "quant_max": 15}][seed % 3]
    if signed:
        codes = [{}, {"quant_min": -127, "quant_max": 127}, {"quant_min": -8, "quant_max": 7}][seed % 3]
    scheme = ("per_channel_" if per_channel else "per_tensor_") + ("symmetric" if symmetric else "affine")
    dtype = "qint8" if signed else "quint8"
    return (
        {"dtype": getattr(zp, dtype), "qscheme": getattr(zp, scheme), **codes},
        {"dtype": getattr(torch, dtype), "qscheme": getattr(torch, scheme), **codes},
    )


def assert_same_grid(first, second) -> None:
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1].to(torch.int64), second[1].to(torch.int64))


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("MinMaxObserver", {}),
        ("MovingAverageMinMaxObserver", {"averaging_constant": 0.1}),
        ("PerChannelMinMaxObserver", {"ch_axis": 0}),
        ("PerChannelMinMaxObserver", {"ch_axis": 1}),
        ("MovingAveragePerChannelMinMaxObserver", {"ch_axis": 0}),
    ],
    ids=str,
)
def test_ranges_and_grids_are_equal(name, extra):
    for seed in STREAMS:
        mine, his = settings(seed, "Channel" in name)
        first, second = getattr(ours, name)(**mine, **extra), getattr(theirs, name)(**his, **extra)
        for x in stream(seed):
            first(x)
            second(x)
        assert torch.equal(first.min_val, second.min_val)
        assert torch.equal(first.max_val, second.max_val)
        assert_same_grid(first.calculate_qparams(), second.calculate_qparams())


def test_float_qparams_are_equal():
    for seed in STREAMS:
        first = ours.PerChannelMinMaxObserver(qscheme=zp.per_channel_affine_float_qparams)
        second = theirs.PerChannelMinMaxObserver(qscheme=torch.per_channel_affine_float_qparams)
        for x in stream(seed):
            first(x)
            second(x)
        for mine, his in zip(first.calculate_qparams(), second.calculate_qparams(), strict=True):
            assert torch.equal(mine, his)


def test_histogram_ranges_are_equal_within_one_bin():
    for seed in STREAMS:
        mine, his = settings(seed, False)
        first, second = ours.HistogramObserver(**mine), theirs.HistogramObserver(**his)
        for x in stream(seed):
            first(x)
            second(x)
        width = (first.max_val - first.min_val) / first.bins
        for end, other in zip(first.clipping_range(), second._non_linear_param_search(), strict=True):
            assert abs(end - other) <= width * 1.001, seed


def test_histogram_counts_are_equal_while_torch_counts_exactly():
    for seed in range(0, 200, 10):
        first, second = ours.HistogramObserver(), theirs.HistogramObserver()
        for x in stream(seed):
            first(x)
            second(x)
        torch.testing.assert_close(first.histogram.float(), second.histogram, rtol=1e-4, atol=2.0)


@pytest.mark.parametrize(
    "name",
    [
        "default_observer",
        "default_weight_observer",
        "default_per_channel_weight_observer",
        "default_histogram_observer",
        "weight_observer_range_neg_127_to_127",
        "per_channel_weight_observer_range_neg_127_to_127",
        "default_fixed_qparams_range_0to1_observer",
        "default_fixed_qparams_range_neg1to1_observer",
    ],
)
def test_common_settings_are_the_same(name):
    first, second = getattr(ours, name)(), getattr(theirs.observer, name)()
    assert first.dtype == second.dtype
    assert first.qscheme is zp.dtypes.as_qscheme(second.qscheme)
    assert (first.quant_min, first.quant_max) == (second.quant_min, second.quant_max)


@pytest.mark.parametrize(
    "name", ["MinMaxObserver", "PerChannelMinMaxObserver", "HistogramObserver", "MovingAverageMinMaxObserver"]
)
def test_torchs_state_loads(name):
    first, second = getattr(ours, name)(), getattr(theirs, name)()
    second(torch.randn(4, 100))
    first.load_state_dict(second.state_dict())
    assert_same_grid(first.calculate_qparams(), second.calculate_qparams())


def test_fake_quantize_and_observer_names_are_all_here():
    for module in (theirs.observer, theirs.fake_quantize, theirs.qconfig_mapping):
        wanted = {name for name in module.__all__ if not hasattr(ours, name)}
        # granularities and mapping types serve torch's graph-mode flow only
        assert wanted <= {
            "Granularity", "MappingType", "PerAxis", "PerBlock", "PerGroup", "PerRow", "PerTensor", "PerToken",
            "TorchAODType", "ZeroPointDomain", "get_block_size",
        }  # fmt: skip
    assert {name for name in theirs.qconfig.__all__ if not hasattr(ours, name)} <= {
        "QConfigDynamic",
        "get_default_qconfig_dict",
        "get_default_qat_qconfig_dict",
    }
