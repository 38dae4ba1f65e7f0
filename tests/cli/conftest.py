"""The command line as its users see it: a fresh process, in a folder with a program of theirs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fresh_process import environment

pytest.importorskip("typer")
pytest.importorskip("rich")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: ``nets.py``, and samples in ``x.npz``."""
    shutil.copy(Path(__file__).parent / "programs" / "nets.py", tmp_path / "nets.py")
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).normal(size=(40, 3, 8, 8)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def invoke(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a command in this process, which is quick: ``invoke("info").stdout``."""
    from typer.testing import CliRunner

    from zeropoint.cli import make_app

    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    return lambda *words: CliRunner().invoke(make_app(), [str(word) for word in words])


@pytest.fixture
def shell(folder: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command in a process of its own."""

    def run(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "zeropoint", *map(str, words)]
        return subprocess.run(
            command, capture_output=True, text=True, env=environment(), check=False, timeout=120, **options
        )

    return run
