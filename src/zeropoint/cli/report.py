"""``report``: what quantization cost a model in a file, as a page."""

# Annotations are evaluated here: typer reads the options from them.

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

if TYPE_CHECKING:
    import typer

__all__ = ["register"]

_HELP = """Report what quantization cost, layer by layer.

CHECKPOINT is what "zeropoint quantize" wrote for the same PROGRAM.

{forms}

\b
EXAMPLES
  zeropoint report nets.py:make_net net.safetensors --data calibration.npz -o net.html
  zeropoint report nets.py:make_net net.safetensors --data calibration.npz -o net.html --sensitivity
  zeropoint report nets.py:make_net net.safetensors --data calibration.npz -o net.json
"""


def register(app: "typer.Typer") -> None:
    """Adds the command to ``app``."""
    import typer

    from zeropoint.cli import _options as options
    from zeropoint.cli._console import command
    from zeropoint.cli._inputs import FORMS

    @command(app, "report", help=_HELP.format(forms=FORMS))
    def report(
        program: options.Program,
        checkpoint: Annotated[
            Path, typer.Argument(metavar="CHECKPOINT", readable=False, help="The quantized checkpoint.")
        ],
        data: options.Data,
        output: Annotated[
            Path, typer.Option("--output", "-o", readable=False, help="The report: .html, .md or .json.")
        ],
        title: Annotated[str | None, typer.Option(help="Of the page.  [default: the model's class]")] = None,
        sensitivity: Annotated[
            bool, typer.Option("--sensitivity", help="Measure which layers hurt as well; takes long.")
        ] = False,
        batch_size: options.BatchSize = 32,
        batches: options.Batches = 2,
        inputs: options.Inputs = None,
        overwrite: options.Overwrite = False,
        json: options.Json = False,
    ) -> None:
        from zeropoint import analysis, recipe
        from zeropoint import report as reports
        from zeropoint.cli import _inputs
        from zeropoint.cli._console import counted, show_json

        progress = options.shows_progress(json)
        options.check_target(output, (".html", ".md", ".json"), overwrite)
        options.check_source(checkpoint)
        model = _inputs.load_model(program)
        loaded = _inputs.load_data(data, batch_size=batch_size, batches=batches, inputs=inputs, progress=progress)
        recipe.check_data(model, loaded)
        done = recipe.load(model, checkpoint)
        ranking = None
        if sensitivity:
            method = cast(Any, done.recipe.method)
            ranking = analysis.sensitivity(done.reference, loaded[:1], method=method, progress=progress)
        found = reports.write(
            done.model,
            done.reference,
            loaded,
            output,
            sensitivity=ranking,
            title=title or type(model).__name__,
            progress=progress,
        )
        if json:
            show_json(found.to_dict())
            return
        worst = found.worst()[0] if found.worst() else None
        print(
            f"{counted(len(found.layers), 'layer')}, output {found.output:.1f} dB"
            + (f", the layer that adds most noise is {worst.name or '(root)'}" if worst else "")
        )
        print(f"wrote {output}")
