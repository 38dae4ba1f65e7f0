"""The command line: ``python -m zeropoint COMMAND``.

Each command is a file here with a ``register(app)`` that defines it; :data:`COMMANDS` lists them. The commands need
``typer`` and ``rich``, which the package itself does not: they are imported when a command runs.

May import: everything.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Final

__all__ = ["COMMANDS", "main", "make_app"]

COMMANDS: Final = ("convert_checkpoint", "migrate")
"""Modules of this package that define one command each, in the order of the help text."""


def make_app() -> Any:
    """The ``typer`` application with every command. Raises ImportError where typer is missing."""
    import typer

    app = typer.Typer(name="zeropoint", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_nothing)  # a command is named even where it is the only one
    for command in COMMANDS:
        importlib.import_module(f"zeropoint.cli.{command}").register(app)
    return app


def main() -> None:
    """Runs the command in ``sys.argv``. Says what to install where the packages for it are missing."""
    try:
        app = make_app()
    except ImportError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit("the command line needs typer and rich: pip install 'zeropoint[cli]'")
    app(prog_name="python -m zeropoint")


def _nothing() -> None:
    """Eager int8 quantization for PyTorch."""
