"""The processes that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Eight ranks over gloo: ``ranks(world, function, *args)``."""
    pool = Ranks(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()
