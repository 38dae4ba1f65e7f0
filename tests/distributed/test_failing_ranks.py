"""A rank that is lost gives the others an error, not a hang."""

from __future__ import annotations

from pathlib import Path

import failing_ranks
import pytest
from ranks import run_apart

pytestmark = pytest.mark.slow

HOOKS = pytest.mark.parametrize("hook", ["pertensor", "allreduce-8"])


@HOOKS
def test_a_rank_that_dies(tmp_path: Path, hook: str) -> None:
    answers = run_apart(3, failing_ranks.one_dies, 3, str(tmp_path), hook)
    assert answers[2] is None
    assert all("RuntimeError" in answer for answer in answers[:2])


@HOOKS
def test_a_rank_that_goes_silent(tmp_path: Path, hook: str) -> None:
    answers = run_apart(2, failing_ranks.one_stops, 2, str(tmp_path), hook, answering=[0])
    assert "RuntimeError" in answers[0]
    assert "imed out" in answers[0]


def test_a_rank_that_goes_silent_halfway(tmp_path: Path) -> None:
    answers = run_apart(2, failing_ranks.one_stops_between_the_collectives, 2, str(tmp_path), answering=[0])
    assert "RuntimeError" in answers[0]
    assert "imed out" in answers[0]


def test_a_rank_whose_own_step_fails(tmp_path: Path) -> None:
    answers = run_apart(2, failing_ranks.one_cannot_sum, 2, str(tmp_path))
    assert "RuntimeError" in answers[0]
    assert "out of memory" in answers[1]
