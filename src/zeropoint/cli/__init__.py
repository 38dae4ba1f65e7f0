"""The command line: ``zeropoint COMMAND``, or ``python -m zeropoint COMMAND``.

Each command is a file here with a ``register(app)`` that defines it; :data:`COMMANDS` lists them. The commands need
``typer`` and ``rich``, which the package itself does not: they are imported when a command runs.

May import: everything.
"""

from __future__ import annotations

import importlib
import signal
import sys
from typing import Any, Final

from zeropoint.cli._console import Terminated

__all__ = ["COMMANDS", "main", "make_app"]

COMMANDS: Final = ("info", "inspect_file", "quantize", "report", "bench", "convert_checkpoint", "migrate")
"""Modules of this package that define one command each, in the order of the help text."""

_HELP: Final = """Eager int8 quantization for PyTorch.

\b
EXAMPLES
  zeropoint info
  zeropoint quantize mypackage.nets:make_net --data calibration.npz -o net.safetensors --report net.html
  zeropoint inspect net.safetensors
  zeropoint COMMAND --help

\b
EXIT STATUS
  0    done
  1    it could not be done: one line on stderr says why, and no file was left half-written
  2    the command line is wrong
  3    quantized, but not as accurate as --max-drop asks: nothing was written
  130  interrupted (143: terminated)

\b
ENVIRONMENT
  ZEROPOINT_TRACEBACK=1   show where an error came from, not only what it says
  ZEROPOINT_NATIVE, ZEROPOINT_ISA   choose kernels, see "zeropoint info"
"""


def make_app() -> Any:
    """The ``typer`` application with every command. Raises ImportError where typer is missing."""
    import typer

    # Plain help: it keeps its lines, in a pipe as in a terminal, as a manual page does.
    app = typer.Typer(
        name="zeropoint",
        help=_HELP,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    app.callback()(_nothing)  # a command is named even where it is the only one
    for command in COMMANDS:
        importlib.import_module(f"zeropoint.cli.{command}").register(app)
    return app


def main() -> None:
    """Runs the command in ``sys.argv``. Says what to install where the packages for it are missing."""
    signal.signal(signal.SIGTERM, _terminated)
    try:
        app = make_app()
        # With ``-m`` the name would be that of a file.
        app(prog_name="python -m zeropoint" if sys.argv[0].endswith("__main__.py") else "zeropoint")
    except ImportError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit("the command line needs typer and rich: pip install 'zeropoint[cli]'")
    except KeyboardInterrupt as error:
        sys.exit(143 if isinstance(error, Terminated) else 130)


def _terminated(number: int, frame: Any) -> None:
    raise Terminated


def _nothing() -> None:
    pass
