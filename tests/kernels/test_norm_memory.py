"""Normalization makes no float copy of its input."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import zeropoint as zp
from zeropoint import backends
from zeropoint.ops import norm

OUT = (0.05, 120)

CASES: dict[str, tuple[tuple[int, ...], Callable[[zp.QTensor], zp.QTensor]]] = {
    "layer norm": ((8, 64, 768), lambda x: norm.layer_norm(x, (768,), torch.ones(768), torch.zeros(768), 1e-5, *OUT)),
    "group norm": ((4, 64, 28, 28), lambda x: norm.group_norm(x, 8, torch.ones(64), torch.zeros(64), 1e-5, *OUT)),
    "instance norm": ((4, 64, 28, 28), lambda x: norm.group_norm(x, 64, None, None, 1e-5, *OUT)),
    "batch norm": (
        (4, 64, 28, 28),
        lambda x: norm.batch_norm(x, None, None, torch.zeros(64), torch.ones(64), 1e-5, *OUT),
    ),
}


def largest_allocation(call: Callable[[], object]) -> int:
    """Bytes of the largest block that torch's allocator gave during a call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    blocks = [event.nbytes() for event in _memory_events(seen)]
    assert blocks
    return max(blocks)


def _memory_events(seen: profile) -> list[object]:
    return [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]


@pytest.mark.skipif(not backends.is_native(), reason="the reference computes on float copies")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_no_allocation_is_larger_than_the_codes(name: str, channels_last: bool) -> None:
    shape, call = CASES[name]
    x = zp.quantize_per_tensor(torch.randn(shape), 0.04, 110, zp.quint8)
    if channels_last and len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    call(x)
    codes = x.int_repr().numel()
    assert codes <= largest_allocation(lambda: call(x)) < 2 * codes
    assert largest_allocation(lambda: x.dequantize()) >= 4 * codes
