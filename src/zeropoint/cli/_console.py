"""What commands print with, and what becomes of errors.

May import: the standard library; rich and typer when a command runs.
"""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

__all__ = ["Terminated", "command", "counted", "fail", "megabytes", "show_json", "table", "without_python"]

_EXPLAINED = (ValueError, TypeError, RuntimeError, OSError, ImportError)
"""Errors whose text is enough: it names what was seen and the cure. Others are named by their class too."""


class Terminated(KeyboardInterrupt):
    """SIGTERM: ends a command as Ctrl-C does, so that everything that cleans up runs."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints rows under a header, if it says anything; nothing if there are no rows."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    filled = Table(*header, box=None, header_style="bold", pad_edge=False, show_header=any(header))
    for row in rows:
        filled.add_row(*(Text(cell, overflow="fold") for cell in row))
    if filled.row_count:
        console = Console(width=None if sys.stdout.isatty() else 200)
        with console.capture() as text:
            console.print(filled)
        print("\n".join(line.rstrip() for line in text.get().splitlines()))


def show_json(value: Any) -> None:
    """Prints JSON that any reader takes: what is not finite becomes null."""
    print(json.dumps(_finite(value), indent=1, ensure_ascii=False, allow_nan=False))


def _finite(x: Any) -> Any:
    if isinstance(x, float):
        return x if math.isfinite(x) else None
    if isinstance(x, dict):
        return {str(key): _finite(value) for key, value in x.items()}
    return [_finite(value) for value in x] if isinstance(x, (list, tuple)) else x


def megabytes(size: int) -> str:
    """A file's size for people."""
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def counted(count: int, noun: str) -> str:
    """``1 row``, ``2 rows``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def without_python(error: Exception, option: str | None = None) -> str:
    """The text of an error; its cure for a class that the reader of checkpoints does not know is the command's option.

    Args:
        error: any.
        option: what the command calls ``allow``; None where it has no such option.
    """
    text, name = str(error).strip(), getattr(error, "unknown_class", None)
    if name is None:
        return text
    if option is None:
        return text.replace(f", or pass allow=[{name!r}] to read it as an inert record", "")
    return text.replace(f"allow=[{name!r}]", f"{option} {shlex.quote(name)}")


def fail(message: str, status: int = 1) -> NoReturn:
    """Ends the command with one line on stderr."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)


def command(app: Any, name: str, *, help: str) -> Callable[[Callable[..., None]], None]:
    """Defines a command of ``app`` whose errors are one line on stderr, and which Ctrl-C ends with status 130."""

    def define(function: Callable[..., None]) -> None:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> None:
            with _in_one_line():
                function(*args, **kwargs)

        app.command(name, help=help)(guarded)

    return define


@contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
        sys.stdout.flush()
    except Terminated:
        fail("terminated", 143)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except BrokenPipeError:  # the reader of a pipe has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except MemoryError:
        fail("out of memory")
    except Exception as error:
        if type(error).__module__.split(".")[0] in ("click", "typer"):
            raise  # a wrong command line, or an exit: typer's own
        if os.environ.get("ZEROPOINT_TRACEBACK", "0") not in ("", "0"):
            traceback.print_exc()
        fail(_words(error))


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        what = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or type(error).__name__).lower()
        return f"{error.filename}: {what}" if error.filename else what
    text = without_python(error)
    return text if text and isinstance(error, _EXPLAINED) else f"{type(error).__name__}: {text}".removesuffix(": ")
