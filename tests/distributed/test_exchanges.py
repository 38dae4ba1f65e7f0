"""The exchanges as plain functions, on 1, 2, 3, 4 and 8 ranks over gloo."""

from __future__ import annotations

from typing import Any

import on_ranks
import pytest
import torch
import torch.distributed as dist
from ranks import WORLDS, Ranks

import zeropoint.distributed as zd
from zeropoint.distributed.lanes import Lane

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


@DTYPES
@pytest.mark.parametrize("world", WORLDS)
def test_gathered_means_are_within_half_a_step(ranks: Ranks, world: int, dtype: torch.dtype) -> None:
    ranks(world, on_ranks.seed_hooks_are_within_half_a_step, dtype)


@pytest.mark.parametrize("bits", [8, 4])
@DTYPES
@pytest.mark.parametrize("world", WORLDS)
def test_all_reduce_is_within_two_half_steps(ranks: Ranks, world: int, dtype: torch.dtype, bits: int) -> None:
    ranks(world, on_ranks.all_reduce_is_within_two_half_steps, dtype, bits)


def test_many_grids_resolve_more_than_one(ranks: Ranks) -> None:
    for per_tensor, per_channel in ranks(2, on_ranks.error_on_mixed_magnitudes, 6_000_000):
        assert per_channel < per_tensor


@pytest.mark.parametrize("bits", [8, 4])
def test_bytes_do_not_grow_with_the_ranks(ranks: Ranks, bits: int) -> None:
    length = 1_000_000
    for world in WORLDS:
        sent = ranks(world, on_ranks.bytes_sent, length, bits)
        formula = 2 * (world - 1) / world * length * (bits / 8 + 4 / 256)
        assert len(set(sent)) == 1
        assert formula <= sent[0] <= formula * 1.005
        assert sent[0] <= 2.04 * length * bits / 8 + 0.04 * length


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_reaches_all(ranks: Ranks, bad: float) -> None:
    ranks(3, on_ranks.what_is_not_finite_reaches_all, bad)


@pytest.mark.parametrize("mean", [True, False], ids=["mean", "sum"])
def test_error_feedback_makes_up_for_rounding(ranks: Ranks, mean: bool) -> None:
    for with_feedback, without in ranks(4, on_ranks.feedback_makes_up_for_rounding, mean):
        assert with_feedback < 0.1
        assert without > 2 * with_feedback


def test_a_residual_survives_infinities(ranks: Ranks) -> None:
    ranks(2, on_ranks.a_residual_survives_infinities)


@pytest.mark.parametrize("world", [2, 3])
def test_exact_spans_are_exact(ranks: Ranks, world: int) -> None:
    ranks(world, on_ranks.exact_spans_are_exact)


@pytest.mark.parametrize("world", [1, 3])
def test_odd_tensors(ranks: Ranks, world: int) -> None:
    ranks(world, on_ranks.odd_tensors)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_order_of_completion_does_not_matter(ranks: Ranks, world: int) -> None:
    ranks(world, on_ranks.order_does_not_matter)


def test_the_ways_of_other_backends(ranks: Ranks) -> None:
    ranks(2, on_ranks.other_backends)


def test_stochastic_rounding_differs_between_ranks(ranks: Ranks) -> None:
    ranks(3, on_ranks.stochastic_rounding_differs_between_ranks)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_reduce_scatter(ranks: Ranks, world: int, bits: int) -> None:
    ranks(world, on_ranks.reduce_scatter, bits)


@pytest.mark.parametrize("world", [1, 4])
def test_ranges(ranks: Ranks, world: int) -> None:
    ranks(world, on_ranks.ranges)


# --- without other ranks ------------------------------------------------------------------------------------------


def test_no_process_group_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        zd.quantized_all_reduce(torch.randn(3))
    with pytest.raises(RuntimeError, match="init_process_group"):
        zd.QuantizedAllReduceState()


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ({"bits": 5}, ValueError, "bits must be 8 or 4, got 5"),
        ({"bits": 8.0}, TypeError, "bits"),
        ({"block": 100}, ValueError, "multiple of 32"),
        ({"block": 0}, ValueError, "multiple of 32"),
        ({"op": dist.ReduceOp.MAX}, ValueError, "ReduceOp.SUM and ReduceOp.AVG"),
        ({"group": "gloo"}, TypeError, "ProcessGroup"),
        ({"group": dist.GroupMember.NON_GROUP_MEMBER}, ValueError, "not a member"),
        ({"tensor": torch.zeros(3, dtype=torch.int32)}, TypeError, "int32"),
        ({"tensor": [1.0]}, TypeError, "list"),
    ],
    ids=str,
)
def test_wrong_arguments(how: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments = {"tensor": torch.randn(3), **how}
    with pytest.raises(error, match=text):
        zd.quantized_all_reduce(**arguments)


def test_a_lane_starts_in_the_order_of_tickets() -> None:
    lane = Lane(None)
    seen: list[str] = []

    def use(ticket: int, name: str) -> None:
        def launch() -> torch.futures.Future[str]:
            seen.append(name)
            future: torch.futures.Future[str] = torch.futures.Future()
            future.set_result(name)
            return future

        lane.start(ticket, launch, lambda future: seen.append(future.value() + "!"), lambda error: None)

    first, second, third, fourth = (lane.ticket() for _ in range(4))
    use(fourth, "d")
    use(second, "b")
    assert seen == []
    use(first, "a")
    assert seen == ["a", "b", "a!", "b!"]
    lane.skip(third)
    assert seen[4:] == ["d", "d!"]


def test_a_lane_hands_errors_on() -> None:
    lane = Lane(None)
    errors: list[BaseException] = []

    def launch() -> torch.futures.Future[None]:
        raise RuntimeError("no network")

    lane.start(lane.ticket(), launch, lambda future: None, errors.append)
    assert [str(error) for error in errors] == ["no network"]
