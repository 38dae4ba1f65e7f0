"""``migrate``: programs written for ``torch.ao``, rewritten for this package."""

# Annotations are evaluated here: typer reads the options from them.

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    import typer

__all__ = ["register"]

_HELP = """Rewrite imports of torch.ao to zeropoint.

What has no counterpart is left, and listed. A file that is no Python is named, and makes the status 1.

\b
EXAMPLES
  zeropoint migrate src/ --diff
  zeropoint migrate src/ tools/train.py --write
  zeropoint migrate src/ --json | jq '.files[].left'
"""


def register(app: "typer.Typer") -> None:
    """Adds the command to ``app``."""
    import typer

    from zeropoint.cli import _options as options
    from zeropoint.cli._console import command

    @command(app, "migrate", help=_HELP)
    def migrate(
        paths: Annotated[list[Path], typer.Argument(readable=False, help="Python files and folders.")],
        diff: Annotated[bool, typer.Option("--diff", help="Show every change.")] = False,
        write: Annotated[bool, typer.Option("--write", help="Change the files.")] = False,
        json: options.Json = False,
    ) -> None:
        from difflib import unified_diff

        from zeropoint.cli._console import counted, fail, show_json, table
        from zeropoint.migrate import migrate_paths

        for given in paths:
            options.check_source(given, folders=True)
        changes, changed, left = 0, 0, []
        facts: list[dict[str, Any]] = []
        unread: list[str] = []
        for path, before, migration in migrate_paths(paths, write=write):
            changes += len(migration.changes)
            changed += bool(migration.changes)
            left += [(f"{path}:{place.line}", place.what, place.why) for place in migration.left]
            unread += [str(path)] if migration.unread else []
            texts = (before.splitlines(keepends=True), migration.text.splitlines(keepends=True))
            difference = "".join(unified_diff(*texts, str(path), str(path))) if diff else ""
            facts.append(
                {
                    "path": str(path),
                    "read": not migration.unread,
                    "changes": [asdict(change) for change in migration.changes],
                    "left": [asdict(place) for place in migration.left],
                    **({"diff": difference} if diff else {}),
                }
            )
            if not json:
                print(difference, end="")
        if json:
            show_json({"written": write, "changes": changes, "changed_files": changed, "files": facts})
        else:
            table(("left as it is", "name", "why"), left)
            verb = "made" if write else "to make"
            print(
                f"{counted(changes, 'change')} {verb} in {counted(changed, 'file')}; {counted(len(left), 'place')} left"
            )
            if changes and not write:
                print("--diff shows them, --write applies them")
        if unread:
            sys.stdout.flush()
            fail(f"{counted(len(unread), 'file')} could not be read as Python: {', '.join(unread)}")
