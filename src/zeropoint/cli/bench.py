"""``bench``: how long a call of the user's model takes in float, in int8, and compiled."""

# Annotations are evaluated here: typer reads the options from them.

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    import typer

__all__ = ["register"]

_HELP = """Time a model: float, quantized, compiled.

Compiled means quantized and run as one native call. With --checkpoint it measures what "zeropoint quantize" wrote; else
the model is quantized on the spot. The models run in turn, so that all meet the same noise; read ratios, not times.

{forms}

\b
EXAMPLES
  zeropoint bench nets.py:make_net --data calibration.npz
  zeropoint bench nets.py:make_net --data calibration.npz --checkpoint net.safetensors --threads 1 --threads 2
  zeropoint bench mypackage.text:encoder --data texts.npz --method dynamic --batch-size 8 --json
"""


def register(app: "typer.Typer") -> None:
    """Adds the command to ``app``."""
    import typer

    from zeropoint.cli import _options as options
    from zeropoint.cli._console import command
    from zeropoint.cli._inputs import FORMS

    @command(app, "bench", help=_HELP.format(forms=FORMS))
    def bench(
        program: options.Program,
        data: options.Data,
        checkpoint: Annotated[
            Path | None, typer.Option(readable=False, help='What "zeropoint quantize" wrote.')
        ] = None,
        method: Annotated[
            options.Method, typer.Option(help="Without --checkpoint: how to quantize.")
        ] = options.Method.static,
        batch_size: Annotated[int, typer.Option(min=1, help="Samples in the batch that is timed.")] = 1,
        inputs: options.Inputs = None,
        threads: Annotated[
            list[int] | None, typer.Option(min=1, help="Threads; may be repeated.  [default: torch's number]")
        ] = None,
        seconds: Annotated[float, typer.Option(min=0.01, help="About how long to time each model.")] = 1.0,
        json: options.Json = False,
    ) -> None:
        import torch

        from zeropoint import recipe
        from zeropoint.cli import _inputs
        from zeropoint.cli._console import show_json, table

        if checkpoint is not None:
            options.check_source(checkpoint)
        model = _inputs.load_model(program)
        timed = _inputs.load_data(data, batch_size=batch_size, batches=1, inputs=inputs)
        recipe.check_data(model, timed)
        if checkpoint is not None:
            done = recipe.load(model, checkpoint)
        elif method.value == "dynamic":
            done = recipe.quantize_dynamic(model)
        else:
            calibration = _inputs.load_data(data, inputs=inputs, batches=8)
            done = recipe.quantize_static(model, calibration, progress=options.shows_progress(json))
        models: dict[str, Any] = {"float": done.reference, "quantized": done.model}
        why_not = _compile(done.model, timed[0], models)
        before = torch.get_num_threads()
        rows = []
        try:
            for count in threads or [before]:
                torch.set_num_threads(count)
                times = _in_turn(models, timed[0], seconds)
                rows += [_row(name, count, found, times["float"]) for name, found in times.items()]
        finally:
            torch.set_num_threads(before)
        if json:
            show_json({"model": type(model).__name__, "rows": rows, "not_compiled": why_not, **_machine()})
            return
        columns = ("model", "threads", "best ms", "median ms", "times float")
        words = [
            (
                *(row["model"], str(row["threads"]), f"{row['best_ms']:.3f}"),
                *(f"{row['median_ms']:.3f}", f"{row['of_float']:.2f}"),
            )
            for row in rows
        ]
        table(columns, words)
        if why_not is not None:
            print(f"not compiled: {why_not}")


def _machine() -> dict[str, Any]:
    import torch

    import zeropoint

    return {"isa": zeropoint.backends.active_isa(), "torch": torch.__version__, "zeropoint": zeropoint.__version__}


def _compile(model: Any, batch: Any, models: dict[str, Any]) -> str | None:
    """Adds the compiled model, or says why there is none."""
    from collections.abc import Mapping

    import zeropoint

    if isinstance(batch, Mapping):
        return "a plan takes its inputs by place, not by name"
    try:
        models["compiled"] = zeropoint.compile(model, batch)
    except Exception as error:  # torch.export's own among them: there are many
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return None


def _in_turn(models: dict[str, Any], batch: Any, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of single calls of each model, a few of one, then of the next, round after round."""
    import time

    import torch

    from zeropoint.analysis._data import call

    rounds = 5
    samples: dict[str, list[float]] = {name: [] for name in models}
    with torch.inference_mode():
        for model in models.values():
            call(model, batch)
        for _ in range(rounds):
            for name, model in models.items():
                end = time.perf_counter() + seconds / rounds
                while True:
                    start = time.perf_counter()
                    call(model, batch)
                    now = time.perf_counter()
                    samples[name].append((now - start) * 1e3)
                    if now >= end:
                        break
    return samples


def _row(name: str, threads: int, times: list[float], floating: list[float]) -> dict[str, Any]:
    import statistics

    return {
        "model": name,
        "threads": threads,
        "best_ms": min(times),
        "median_ms": statistics.median(times),
        "calls": len(times),
        "of_float": min(times) / min(floating),
    }
