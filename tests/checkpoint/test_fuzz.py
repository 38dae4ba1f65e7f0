"""Damaged files: an error that says what is wrong, never a crash, a hang or code that runs."""

from __future__ import annotations

import contextlib
import encodings.cp437  # noqa: F401  what zipfile decodes names with
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from zeropoint import QTensor, checkpoint
from zeropoint.checkpoint import CheckpointError, PackedParams, Record, SavedModule

from .mutate import damage

FIXTURES = Path(__file__).parent / "fixtures"
FILES = sorted(path for path in FIXTURES.glob("*.pt") if path.name != "expected.pt")

_watching = False
_caught: list[str] = []
_FORBIDDEN = {
    "exec",
    "compile",
    "import",
    "open",
    "os.system",
    "os.exec",
    "subprocess.Popen",
    "pickle.find_class",
    "socket.connect",
}


def _watch(event: str, args: Any) -> None:
    if _watching and event in _FORBIDDEN:
        _caught.append(f"{event}{args!r}")


sys.addaudithook(_watch)  # cannot be removed again, so it is quiet unless it watches


def _touch(value: Any, depth: int = 0) -> None:
    """Reads all that was loaded: a tensor that reaches beyond its storage would show here."""
    if isinstance(value, QTensor):
        value.dequantize()
    elif isinstance(value, torch.Tensor):
        value.detach().clone()
    elif isinstance(value, dict):
        for item in value.values():
            _touch(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _touch(item)
    elif isinstance(value, (PackedParams, SavedModule)):
        for name in ("cell", "weight_bias", "state_dict"):
            with contextlib.suppress(CheckpointError):
                getattr(value, name, dict)()
        _touch_record(value)
    elif isinstance(value, Record):
        _touch_record(value)


def _touch_record(record: Record) -> None:
    if record.args or record.state is not None:
        args, state = record.args, record.state
        record.args, record.state = (), None  # once is enough: records may hold each other
        _touch((args, state))


def _convert(found: Any) -> None:
    """What ``convert_file`` does with what was read."""
    state = found.get("state_dict", found) if isinstance(found, dict) else found
    with contextlib.suppress(CheckpointError):
        if isinstance(state, SavedModule):
            state = state.state_dict()
        if isinstance(state, dict) and all(isinstance(name, str) for name in state):
            checkpoint.convert_state_dict(state)


def _outcomes(count: int) -> dict[str, int]:
    global _watching
    contents = [path.read_bytes() for path in FILES]
    for content in contents:
        _convert(checkpoint.load(content))
        _touch(checkpoint.load(content))  # imports what reading needs, before imports are watched
    outcomes = {"read": 0, "refused": 0}
    for seed in range(count):
        rng = random.Random(seed)
        data = damage(rng.choice(contents), rng)
        _watching = True
        try:
            found = checkpoint.load(data)
        except CheckpointError as error:
            outcomes["refused"] += bool(str(error))
        else:
            outcomes["read"] += 1
            _convert(found)
            _watching = False
            _touch(found)
        finally:
            _watching = False
        assert not _caught, f"file {seed} made the reader do this: {_caught}"
    return outcomes


def test_500_damaged_files_are_read_or_refused() -> None:
    outcomes = _outcomes(500)
    assert sum(outcomes.values()) == 500
    assert min(outcomes.values()) > 20


@pytest.mark.slow
def test_10000_damaged_files_are_read_or_refused() -> None:
    outcomes = _outcomes(10_000)
    assert sum(outcomes.values()) == 10_000
    assert min(outcomes.values()) > 400
