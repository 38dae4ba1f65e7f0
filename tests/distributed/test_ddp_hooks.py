"""The hooks in DistributedDataParallel, and the reduce-scatter in FSDP2."""

from __future__ import annotations

from typing import Any

import on_ranks
import pytest
import torch
from ranks import Ranks

import zeropoint.distributed as zd

HOOKS = pytest.mark.parametrize("hook", list(on_ranks.HOOKS))
COARSE = {"pertensor": 0.03, "perchannel": 0.02, "allreduce-8": 0.02, "allreduce-8-stochastic": 0.03}
"""How far, relative to its norm, a gradient may be from plain DDP's; 4 bits have steps of a seventh of a block."""


def bound(hook: str) -> float:
    return COARSE.get(hook, 0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@HOOKS
def test_a_hook_averages_gradients(ranks: Ranks, hook: str, dtype: torch.dtype) -> None:
    assert max(ranks(2, on_ranks.a_hook_averages_gradients, hook, dtype)) < bound(hook)


@HOOKS
def test_three_ranks(ranks: Ranks, hook: str) -> None:
    assert max(ranks(3, on_ranks.a_hook_averages_gradients, hook, torch.float32)) < bound(hook)


@HOOKS
def test_bucket_views_and_static_graph(ranks: Ranks, hook: str) -> None:
    assert max(ranks(2, on_ranks.bucket_views, hook)) < bound(hook)


@HOOKS
def test_accumulation_and_no_sync(ranks: Ranks, hook: str) -> None:
    assert max(ranks(2, on_ranks.accumulation, hook)) < bound(hook)


@HOOKS
def test_unused_parameters(ranks: Ranks, hook: str) -> None:
    assert max(ranks(2, on_ranks.unused_parameters, hook)) < bound(hook)


@HOOKS
def test_uneven_inputs(ranks: Ranks, hook: str) -> None:
    assert ranks(3, on_ranks.uneven_inputs, hook) == [2, 3, 4]


@HOOKS
def test_a_bad_loss_is_skipped_by_all(ranks: Ranks, hook: str) -> None:
    ranks(2, on_ranks.a_bad_loss_is_skipped_by_all, hook)


def test_plain_steps_first(ranks: Ranks) -> None:
    ranks(2, on_ranks.plain_steps_first)


def test_one_dimensional_parameters_are_exact(ranks: Ranks) -> None:
    ranks(2, on_ranks.one_dimensional_parameters_are_exact)


def test_buckets_dealt_out_anew_drop_their_residuals(ranks: Ranks) -> None:
    ranks(2, on_ranks.buckets_dealt_out_anew)


@pytest.mark.parametrize("how", ["pickle", "state_dict"])
def test_a_state_goes_on(ranks: Ranks, how: str) -> None:
    ranks(2, on_ranks.a_state_goes_on, how)


@pytest.mark.parametrize("bits", [8, 4])
def test_fully_sharded(ranks: Ranks, bits: int) -> None:
    assert max(ranks(2, on_ranks.fsdp, bits)) < (0.02 if bits == 8 else 0.3)


# --- what must fail, and when -------------------------------------------------------------------------------------


def test_wrong_registrations_fail_at_once(ranks: Ranks) -> None:
    for errors in ranks(2, on_ranks.wrong_registrations):
        words = [
            ("TypeError", "ProcessGroup", "str"),
            ("TypeError", "QuantizedAllReduceState"),
            ("ValueError", "bucket_size", "0"),
            ("TypeError", "bucket_size", "2.5"),
            ("TypeError", "bucket_size"),
            ("ValueError", "print"),
            ("TypeError", "DistributedDataParallel", "Net"),
        ]
        assert len(errors) == len(words)
        for text, expected in zip(errors, words, strict=True):
            assert all(word in text for word in expected), text


def test_a_wrong_state_ends_the_backward(ranks: Ranks) -> None:
    for text in ranks(2, on_ranks.wrong_state_in_a_backward):
        assert "takes a torch.distributed.ProcessGroup or None, got str" in text


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ({"bits": 3}, ValueError, "bits"),
        ({"bits": True}, TypeError, "bits"),
        ({"block": 48}, ValueError, "block"),
        ({"error_feedback": 1}, TypeError, "error_feedback"),
        ({"stochastic_rounding": "yes"}, TypeError, "stochastic_rounding"),
        ({"exempt_1d": None}, TypeError, "exempt_1d"),
        ({"start_after": -1}, ValueError, "start_after"),
        ({"start_after": 1.5}, TypeError, "start_after"),
        ({"seed": -1}, ValueError, "seed"),
        ({"process_group": 0}, TypeError, "ProcessGroup"),
    ],
    ids=str,
)
def test_wrong_states_cannot_be_made(how: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        zd.QuantizedAllReduceState(**how)


def test_a_model_prepared_for_quantization_has_the_same_buffers_on_all_ranks(ranks: Ranks) -> None:
    assert ranks(2, on_ranks.training_of_a_prepared_model) == [(0.0, True), (0.0, True)]
