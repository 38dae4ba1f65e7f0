"""Files that are there whole or not at all.

May import: the standard library.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replacing", "write_bytes", "write_text"]


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a path beside ``path`` to write to; what was written there takes its place at the end.

    The bytes are on the disk before the name is. If anything fails or is interrupted, Ctrl-C included, ``path`` is as
    it was and nothing else is left. A file that is replaced keeps its permissions; a link stays, and what it points to
    is replaced.

    Args:
        path: the file to write.

    Yields:
        The path of an empty file in the same folder, with the same ending.

    Raises:
        FileNotFoundError: there is no such folder.
        OSError: the file cannot be written, or is a device, a pipe or a folder; the error names ``path``.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from zeropoint.files import replacing
        >>> target = Path(tempfile.mkdtemp()) / "notes.txt"
        >>> with replacing(target) as temporary:
        ...     _ = temporary.write_text("whole")
        >>> [file.name for file in target.parent.iterdir()]
        ['notes.txt']
    """
    target = Path(path).resolve()
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG | 0o666 & ~_umask()
    if not stat.S_ISREG(mode):
        raise OSError(f"{path} is no regular file: it is not replaced")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent} to write {target.name} into")
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}.", suffix=target.suffix)
        os.close(handle)
        yield Path(temporary)
        with open(temporary, "r+b") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, stat.S_IMODE(mode))
        os.replace(temporary, target)
    except OSError as error:
        if error.errno is None or error.filename not in (None, temporary):
            raise
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)


def write_bytes(path: str | os.PathLike[str], data: bytes | memoryview) -> None:
    """Writes a file whole or not at all, as :func:`replacing` says."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text in UTF-8 whole or not at all, as :func:`replacing` says."""
    write_bytes(path, text.encode("utf-8"))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
