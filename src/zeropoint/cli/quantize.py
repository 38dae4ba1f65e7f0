"""``quantize``: a float model to an int8 checkpoint, with a report."""

# Annotations are evaluated here: typer reads the options from them.

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

if TYPE_CHECKING:
    import typer

    from zeropoint.recipe import Quantized

__all__ = ["register"]

_HELP = """Quantize a float model and write a checkpoint.

Static: convolutions, batch norms and rectifiers in a row are fused, a model without stubs is put between stubs, modules
that cannot compute on quantized tensors stay in float, activations get the grids that DATA calls for. Dynamic: weights
only; activations are quantized at each call, so DATA is needed for a report alone.

The checkpoint holds plain tensors and how they were made. In a program:

\b
  from zeropoint import recipe
  model = recipe.load(make_net(), "net.safetensors").model

{forms}

\b
EXAMPLES
  zeropoint quantize nets.py:make_net --data calibration.npz -o net.safetensors
  zeropoint quantize mypackage.nets:Net --data mypackage.data:loader --inputs 1 --batches 16 \\
      -o net.pt --report net.html
  zeropoint quantize mypackage.text:encoder --method dynamic -o encoder.safetensors
  zeropoint quantize nets.py:make_net --data calibration.npz --observer minmax --weights tensor \\
      --keep-float head --evaluate check.py:accuracy --max-drop 0.01 -o net.pt
"""


def register(app: "typer.Typer") -> None:
    """Adds the command to ``app``."""
    import typer

    from zeropoint.cli import _options as options
    from zeropoint.cli._console import command
    from zeropoint.cli._inputs import FORMS

    @command(app, "quantize", help=_HELP.format(forms=FORMS))
    def quantize(
        program: options.Program,
        output: Annotated[
            Path,
            typer.Option("--output", "-o", readable=False, help="The checkpoint to write: .safetensors, .pt or .pth."),
        ],
        data: Annotated[
            str | None, typer.Option("--data", "-d", metavar="DATA", help="Calibration data, never the test data.")
        ] = None,
        method: Annotated[options.Method, typer.Option(help="How activations are quantized.")] = options.Method.static,
        observer: options.ObserverOption = None,
        weights: options.Weights = None,
        qconfig: options.QConfigOption = None,
        keep_float: Annotated[
            list[str] | None,
            typer.Option(metavar="NAME", help="A layer to leave in float, or a module with layers. May be repeated."),
        ] = None,
        fuse: Annotated[
            bool, typer.Option("--fuse/--no-fuse", help="Fuse layers with batch norms, rectifiers.")
        ] = True,
        max_drop: Annotated[
            float | None, typer.Option(min=0, help="How much accuracy it may cost; needs --evaluate.")
        ] = None,
        evaluate: Annotated[
            str | None,
            typer.Option(metavar="module:function", help="Takes a model, returns its accuracy: higher is better."),
        ] = None,
        batch_size: options.BatchSize = 32,
        batches: options.Batches = None,
        inputs: options.Inputs = None,
        report: Annotated[
            Path | None, typer.Option(readable=False, help="Write what it cost as .html, .md or .json; needs --data.")
        ] = None,
        sensitivity: Annotated[
            bool, typer.Option("--sensitivity", help="Measure for the report which layers hurt; takes long.")
        ] = False,
        overwrite: options.Overwrite = False,
        json: options.Json = False,
    ) -> None:
        from zeropoint.cli import _inputs
        from zeropoint.cli._console import fail, show_json

        progress = options.shows_progress(json)
        options.check_target(output, (".safetensors", ".pt", ".pth"), overwrite)
        if report is not None:
            options.check_target(report, (".html", ".md", ".json"), overwrite)
        if data is None and (method.value == "static" or report is not None):
            what = "static quantization" if method.value == "static" else "a report"
            fail(f"{what} needs --data: a file of samples or module:function (or choose --method dynamic, no --report)")
        if (max_drop is None) != (evaluate is None):
            fail("--max-drop and --evaluate belong together")
        if max_drop is not None and keep_float:
            fail("--max-drop finds the layers to keep in float by itself: leave out --keep-float")
        if sensitivity and report is None:
            fail("--sensitivity is for a report: pass --report")
        chosen = _inputs.make_qconfig(
            method.value, qconfig, observer and observer.value, weights.value if weights is not None else None
        )
        settings = _settings(qconfig, observer and observer.value, weights.value if weights else None, method.value)
        model = _inputs.load_model(program)
        loaded = (
            None
            if data is None
            else _inputs.load_data(data, batch_size=batch_size, batches=batches, inputs=inputs, progress=progress)
        )
        accuracy = None
        if evaluate is not None and max_drop is not None:
            done, accuracy = _search(
                model, loaded, method.value, chosen, _inputs.load_function(evaluate), max_drop, settings, fuse, progress
            )
        else:
            done = _once(model, loaded, method.value, chosen, keep_float or [], settings, fuse, progress)
        _write(done, loaded, output, report, chosen, sensitivity, progress)
        facts = _facts(done, model, loaded, output, report, accuracy)
        if json:
            show_json(facts)
        else:
            _print(facts)


def _settings(qconfig: str | None, observer: str | None, weights: str | None, method: str) -> dict[str, str]:
    if qconfig is not None:
        return {"qconfig": qconfig}
    found = {"weights": f"one grid a {weights or 'channel'}"}
    return {"observer": observer or "histogram", **found} if method == "static" else found


def _once(
    model: Any, data: Any, method: str, qconfig: Any, keep: list[str], settings: Any, fuse: bool, progress: bool
) -> "Quantized":
    from zeropoint import recipe

    if method == "dynamic":
        if data is not None:
            recipe.check_data(model, data)
        return recipe.quantize_dynamic(model, qconfig=qconfig, keep_float=keep, settings=settings)
    return recipe.quantize_static(
        model, data, qconfig=qconfig, keep_float=keep, fuse=fuse, settings=settings, progress=progress
    )


def _search(
    model: Any,
    data: Any,
    method: Any,
    qconfig: Any,
    evaluate: Any,
    max_drop: float,
    settings: Any,
    fuse: bool,
    progress: bool,
) -> "tuple[Quantized, dict[str, Any]]":
    """As much as accuracy allows."""
    from zeropoint import recipe
    from zeropoint.analysis import quantize_with_accuracy
    from zeropoint.cli._console import fail

    if method == "static":
        reference, made = recipe.prepare_float(model, data, fuse=fuse)
    else:
        if data is None:
            fail("--max-drop needs --data: it measures which layers hurt")
        reference, made = model, recipe.Recipe("dynamic")
    result = quantize_with_accuracy(
        reference,
        data,
        evaluate,
        max_drop,
        qconfig=qconfig,
        method=method,
        progress=progress,
    )
    found = {
        "float": result.float_accuracy,
        "quantized": result.accuracy,
        "everything_quantized": result.quantized_accuracy,
        "kept_in_float": list(result.kept_in_float),
        "other_observer": list(result.other_observer),
        "steps": [[step.what, step.accuracy] for step in result.steps],
    }
    if getattr(result.model, "quantization_summary", None) is None:
        fail(
            f"no quantized model comes within {max_drop:g} of the float accuracy {result.float_accuracy:g}: "
            f"everything quantized has {result.quantized_accuracy:g}",
            3,
        )
    return recipe.Quantized(result.model, reference, recipe.describe(result.model, made, settings)), found


def _write(
    done: "Quantized", data: Any, output: Path, report: Path | None, qconfig: Any, ranked: bool, progress: bool
) -> None:
    """Both files, or none."""
    from zeropoint import recipe
    from zeropoint.files import replacing

    with replacing(output) as temporary:
        try:
            recipe.save(done, temporary)
        except OSError as error:
            raise type(error)(error.errno, error.strerror, str(output)) from error
        if report is not None:
            _report(done, data, report, qconfig, ranked, progress)


def _report(done: "Quantized", data: Any, path: Path, qconfig: Any, ranked: bool, progress: bool) -> None:
    from zeropoint import analysis
    from zeropoint import report as reports

    ranking, method = None, cast(Any, done.recipe.method)
    if ranked:
        ranking = analysis.sensitivity(done.reference, data[:1], qconfig=qconfig, method=method, progress=progress)
    title = type(done.reference.module if done.recipe.wrap else done.reference).__name__
    reports.write(done.model, done.reference, data[:2], path, sensitivity=ranking, title=title, progress=progress)


def _facts(
    done: "Quantized", model: Any, data: Any, output: Path, report: Path | None, accuracy: Any
) -> dict[str, Any]:
    from zeropoint.analysis import output_sqnr
    from zeropoint.analysis._data import first_tensor, run
    from zeropoint.cli._options import saved_size

    summary: Any = done.model.quantization_summary
    decibels = None
    if data is not None:
        wanted, got = (first_tensor(run(part, data[:1])[0]) for part in (done.reference, done.model))
        decibels = output_sqnr(wanted, got)
    return {
        "model": type(model).__name__,
        "method": done.recipe.method,
        "settings": dict(done.recipe.settings),
        "fused": [list(row) for row in done.recipe.fuse],
        "wrapped": done.recipe.wrap,
        "quantized": [[record.name, record.before, record.after] for record in summary.swapped.values()],
        "left_in_float": [[record.name, record.before, record.reason] for record in summary.skipped.values()],
        "output_sqnr_db": decibels,
        "float_bytes": saved_size(model),
        "bytes": output.stat().st_size,
        "accuracy": accuracy,
        "output": str(output),
        "report": None if report is None else str(report),
    }


def _print(facts: dict[str, Any]) -> None:
    from zeropoint.cli._console import counted, megabytes, table

    left = facts["left_in_float"]
    print(f"{facts['model']}: {counted(len(facts['quantized']), 'module')} quantized, {len(left)} left in float")
    rows = [("method", ", ".join([facts["method"], *(f"{k} {v}" for k, v in facts["settings"].items())]))]
    if facts["fused"]:
        rows.append(("fused", f"{counted(len(facts['fused']), 'row')}, such as {' + '.join(facts['fused'][0])}"))
    if facts["wrapped"]:
        rows.append(("stubs", "put around the model, which has none"))
    rows.append(("size", f"{megabytes(facts['bytes'])}, float {megabytes(facts['float_bytes'])}"))
    if facts["output_sqnr_db"] is not None:
        rows.append(("output", f"{facts['output_sqnr_db']:.1f} dB signal to noise, on the first batch"))
    if facts["accuracy"] is not None:
        rows.append(("accuracy", f"{facts['accuracy']['quantized']:.4f}, float {facts['accuracy']['float']:.4f}"))
    table(("", ""), rows)
    table(("left in float", "class", "why"), [(name or "(root)", kind, why) for name, kind, why in left])
    print("wrote " + " and ".join(path for path in (facts["output"], facts["report"]) if path))
