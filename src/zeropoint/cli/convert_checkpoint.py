"""``convert-checkpoint``: an old file of ``torch.ao``, written anew as safetensors."""

# Annotations are evaluated here: typer reads the options from them.

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    import typer

__all__ = ["register"]

_HELP = """Bring a torch.ao checkpoint to safetensors.

No code in it is run, and torch.ao is not needed.

\b
EXAMPLES
  zeropoint convert-checkpoint resnet18_int8.pth resnet18_int8.safetensors
  zeropoint convert-checkpoint training.ckpt weights.safetensors --key model.state_dict
"""


def register(app: "typer.Typer") -> None:
    """Adds the command to ``app``."""
    import typer

    from zeropoint.cli import _options as options
    from zeropoint.cli._console import command

    @command(app, "convert-checkpoint", help=_HELP)
    def convert_checkpoint(
        source: Annotated[Path, typer.Argument(readable=False, help="A file that torch.save wrote.")],
        target: Annotated[Path, typer.Argument(readable=False, help="The safetensors file to write.")],
        key: Annotated[
            str | None, typer.Option(help="Where the state dict is in the file, such as model.state_dict.")
        ] = None,
        allow: Annotated[
            list[str] | None, typer.Option(help="A class of your own that the file names, to read as an inert record.")
        ] = None,
        overwrite: options.Overwrite = False,
        json: options.Json = False,
    ) -> None:
        from zeropoint.checkpoint import CheckpointError, convert_file
        from zeropoint.cli._console import fail, show_json, table, without_python

        options.check_source(source)
        options.check_target(target, (".safetensors",), overwrite)
        try:
            summary = convert_file(source, target, key=key, allow=allow or ())
        except (CheckpointError, ImportError, TypeError) as error:
            fail(f"{source}: {without_python(error, '--allow')}")
        if json:
            show_json({**asdict(summary), "target": str(target), "bytes": target.stat().st_size})
            return
        rows = [
            *((name, "unpacked", what) for name, what in summary.modules.items()),
            *((name, "quantized tensor", what) for name, what in summary.quantized.items()),
            *((name, "left", what) for name, what in summary.left.items()),
        ]
        table(("name", "became", "what it is"), rows)
        print(str(summary).splitlines()[0])
        print(f"wrote {target}, {target.stat().st_size:,} bytes")
