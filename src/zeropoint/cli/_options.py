"""Options that several commands have, and what they share in doing.

May import: everything but commands.
"""

# Annotations are evaluated: typer reads the options from them.

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = [
    "BatchSize",
    "Batches",
    "Data",
    "Inputs",
    "Json",
    "Method",
    "Observer",
    "ObserverOption",
    "Overwrite",
    "Program",
    "QConfigOption",
    "WeightGrid",
    "Weights",
    "check_source",
    "check_target",
    "saved_size",
    "shows_progress",
]


class Method(str, Enum):
    """How activations are quantized."""

    static = "static"
    dynamic = "dynamic"


class Observer(str, Enum):
    """What finds the grids of activations."""

    histogram = "histogram"
    minmax = "minmax"
    moving_average = "moving-average"
    mse = "mse"
    percentile = "percentile"
    entropy = "entropy"


class WeightGrid(str, Enum):
    """What shares a grid."""

    channel = "channel"
    tensor = "tensor"


Program = Annotated[str, typer.Argument(metavar="PROGRAM", help="The float model, as module:factory.")]
Data = Annotated[str, typer.Option("--data", "-d", metavar="DATA", help="Representative inputs, never the test data.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Samples a batch, where DATA is samples.")]
Batches = Annotated[int | None, typer.Option(min=1, help="The most batches to use; all by default.")]
Inputs = Annotated[
    int | None,
    typer.Option(min=1, help="How many tensors of a batch are the model's arguments: 1 leaves labels out."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")]
ObserverOption = Annotated[
    Observer | None, typer.Option(help="Static: what finds the grids of activations.  [default: histogram]")
]
Weights = Annotated[
    WeightGrid | None, typer.Option(help="One weight grid an output channel, or one a tensor.  [default: channel]")
]
QConfigOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="A qconfig instead: a name in zeropoint.ao.quantization, or module:name."),
]


def shows_progress(json: bool) -> bool:
    """Progress bars are for people who look."""
    import sys

    return sys.stderr.isatty() and not json


def check_source(path: Path, folders: bool = False) -> None:
    """Whether there is a file to read, or a folder where a command takes those.

    Raises:
        ValueError: in words for the user. A wrong file is status 1, so typer checks none: its own status is 2.
    """
    if not path.exists():
        raise ValueError(f"{path}: there is no such file{' or folder' if folders else ''}")
    if not (path.is_file() or folders):
        raise ValueError(f"{path}: this is no file")


def check_target(path: Path, endings: tuple[str, ...], overwrite: bool) -> None:
    """What can be known of a file to write before the work begins.

    Raises:
        ValueError: in words for the user.
    """
    if path.suffix not in endings:
        listed = " or ".join(filter(None, (", ".join(endings[:-1]), endings[-1])))
        raise ValueError(f"{path}: the name must end in {listed}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file")
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists: choose another name, or pass --overwrite")
    if path.suffix == ".safetensors":
        _need("safetensors", "safetensors")
    if path.suffix == ".html":
        _need("jinja2", "report")


def _need(package: str, extra: str) -> None:
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise ValueError(f"this needs the package {package}: pip install 'zeropoint[{extra}]'")


def saved_size(model: Any) -> int:
    """Bytes of a model's saved state dict."""
    import io

    import torch

    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell()
