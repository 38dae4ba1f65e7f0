"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from zeropoint import backends

settings.register_profile("default", max_examples=50, deadline=None)
settings.register_profile("thorough", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample",
        type=int,
        metavar="N",
        help="run at most N cases of each test function, spread evenly over its parameters (make check)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    most = config.getoption("--sample")
    if most is None:
        return
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept: set[pytest.Item] = set()
    for cases in families.values():
        step = max(len(cases) / most, 1.0)
        kept.update(cases[int(i * step)] for i in range(min(most, len(cases))))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.fixture(params=backends.available_isas() or ("reference",))
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that runs here in turn; the best one is back afterwards."""
    if request.param == "reference":
        yield "reference"
        return
    before = backends.active_isa()
    backends.set_isa(request.param)
    yield request.param
    backends.set_isa(before)


@pytest.fixture(params=(1, 2), ids=("1-thread", "2-threads"))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """One and two threads in torch's pool; the old number is back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
