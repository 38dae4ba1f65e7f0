"""``migrate``: programs written for ``torch.ao``, rewritten for this package."""

# Annotations are evaluated here: typer reads the options from them.

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    import typer

__all__ = ["register"]

_HELP = """Rewrite imports of torch.ao to zeropoint.

What has no counterpart is left, and listed.

\b
EXAMPLES
  zeropoint migrate src/ --diff
  zeropoint migrate src/ tools/train.py --write
"""


def register(app: "typer.Typer") -> None:
    """Adds the command to ``app``."""
    import typer

    from zeropoint.cli._console import command

    @command(app, "migrate", help=_HELP)
    def migrate(
        paths: Annotated[list[Path], typer.Argument(exists=True, help="Python files and folders.")],
        diff: Annotated[bool, typer.Option("--diff", help="Show every change.")] = False,
        write: Annotated[bool, typer.Option("--write", help="Change the files.")] = False,
    ) -> None:
        from difflib import unified_diff

        from zeropoint.cli._console import table
        from zeropoint.migrate import migrate_paths

        changes, changed, left = 0, 0, []
        for path, before, migration in migrate_paths(paths, write=write):
            changes += len(migration.changes)
            changed += bool(migration.changes)
            left += [(f"{path}:{place.line}", place.what, place.why) for place in migration.left]
            if diff:
                lines = unified_diff(
                    before.splitlines(keepends=True), migration.text.splitlines(keepends=True), str(path), str(path)
                )
                print("".join(lines), end="")
        table(("left as it is", "name", "why"), left)
        verb = "made" if write else "to make"
        print(f"{changes} changes {verb} in {changed} files; {len(left)} places left")
        if changes and not write:
            print("--diff shows them, --write applies them")
