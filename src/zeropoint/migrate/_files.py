"""Programs on disk.

May import: ``files``, ``_rewrite``.
"""

from __future__ import annotations

import io
import os
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from zeropoint.files import write_bytes
from zeropoint.migrate._rewrite import Left, Migration, migrate_source

__all__ = ["migrate_paths", "python_files", "read_source"]

_SKIPPED = frozenset({"__pycache__", "build", "dist", "node_modules", "site-packages", "venv"})


def python_files(paths: Iterable[str | os.PathLike[str]]) -> Iterator[Path]:
    """The Python files among ``paths`` and below those that are folders, in order.

    Folders that start with a dot, and those of builds and environments, are skipped unless they are named themselves.

    Raises:
        FileNotFoundError: a path does not exist; then no other one is given.
    """
    given = [Path(path) for path in paths]
    for path in given:
        if not path.exists():
            raise FileNotFoundError(f"{path}: there is no such file or folder")
    for path in given:
        if path.is_dir():
            for folder, folders, files in os.walk(path):
                folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith("."))
                yield from (Path(folder, name) for name in sorted(files) if name.endswith((".py", ".pyi")))
        else:
            yield path


def migrate_paths(
    paths: Iterable[str | os.PathLike[str]], *, write: bool = False
) -> Iterator[tuple[Path, str, Migration]]:
    """Rewrites programs.

    Args:
        paths: files and folders.
        write: put the rewritten programs in the place of the old ones.

    Yields:
        For each file that has something to rewrite or to list: its path, its text as it was, and what became of it.
    """
    for path in python_files(paths):
        try:
            before, encoding = read_source(path)
            migration = migrate_source(before)
        except (SyntaxError, UnicodeDecodeError, ValueError) as error:
            left = Left(getattr(error, "lineno", 1) or 1, path.name, f"not read: {error}")
            yield path, "", Migration("", (), (left,), unread=True)
            continue
        if not migration.changes and not migration.left:
            continue
        if write and migration.changes:
            write_bytes(path, migration.text.encode(encoding))
        yield path, before, migration


def read_source(path: Path) -> tuple[str, str]:
    """A program's text with its line ends as they are, and its encoding."""
    data = path.read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return data.decode(encoding), encoding
