"""Programs written for ``torch.ao``, rewritten for this package.

Only names change: imports and the dotted names that lead to what was imported. What has no counterpart here stays as
it is, and is listed. ``python -m zeropoint migrate PATH…`` is the same on the command line.

    >>> from zeropoint.migrate import migrate_source
    >>> print(migrate_source("from torch.ao.quantization import prepare").text)
    from zeropoint.ao.quantization import prepare

May import: every module of the package, to see what is there.
"""

from __future__ import annotations

from zeropoint.migrate._files import migrate_paths, python_files
from zeropoint.migrate._rewrite import Change, Left, Migration, migrate_source

__all__ = ["Change", "Left", "Migration", "migrate_paths", "migrate_source", "python_files"]
