"""What commands print with."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

__all__ = ["fail", "table"]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints rows under a header; nothing if there are none."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    filled = Table(*header, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        filled.add_row(*(Text(cell, overflow="fold") for cell in row))
    if filled.row_count:
        Console(width=None if sys.stdout.isatty() else 200).print(filled)


def fail(message: str) -> NoReturn:
    """Ends the command with a message and exit status 1."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)
