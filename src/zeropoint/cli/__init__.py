"""The command line: ``python -m zeropoint COMMAND``.

Each command is a file here with a ``register(app)`` that defines it; :data:`COMMANDS` lists them. The commands need
``typer`` and ``rich``, which the package itself does not: they are imported when a command runs.

May import: everything.
"""

from __future__ import annotations

import importlib
import sys
from typing import Final

__all__ = ["COMMANDS", "main"]

COMMANDS: Final = ("convert_checkpoint", "migrate")
"""Modules of this package that define one command each, in the order of the help text."""


def main() -> None:
    """Runs the command in ``sys.argv``. Exits with 2 where the packages for it are missing."""
    try:
        import typer
    except ImportError:
        sys.exit("the command line needs typer and rich: pip install 'zeropoint[cli]'")
    app = typer.Typer(
        name="zeropoint",
        help="Eager int8 quantization for PyTorch.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_nothing)  # a command is named even where it is the only one
    for command in COMMANDS:
        importlib.import_module(f"zeropoint.cli.{command}").register(app)
    app(prog_name="python -m zeropoint")


def _nothing() -> None:
    """Eager int8 quantization for PyTorch."""
