"""The environment of a command that runs in a process of its own."""

from __future__ import annotations

import os
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


def environment(**more: str) -> dict[str, str]:
    """Warnings are errors there, too."""
    return {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONWARNINGS": "error", **more}
