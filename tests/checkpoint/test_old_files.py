"""Files that torch 2.13's ``torch.ao`` wrote, read by a torch that has neither ``torch.ao`` nor quantized dtypes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "torch_of_the_future.py"
NAMES = [
    f"{name}[{kind}]"
    for decorator, name in re.findall(r"^@(both|check\(\"\"\))\ndef (\w+)", PROGRAM.read_text(), flags=re.MULTILINE)
    for kind in (("zip", "stream") if decorator == "both" else ("zip",))
]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """How each check ended, in one process for all."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(PROGRAM)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("name", NAMES)
def test_old_file(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name] == "", outcomes[name]


def test_every_check_is_listed(outcomes: dict[str, str]) -> None:
    assert sorted(outcomes) == sorted(NAMES)
