"""``inspect``: what a file with weights holds. Nothing in it is executed."""

# Annotations are evaluated here: typer reads the options from them.

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    import typer

__all__ = ["register"]

_HELP = """Show what a checkpoint holds.

Names, types, shapes, sizes and grids of its tensors. FILE is what zeropoint or torch.save wrote, old files of torch.ao
included, or any safetensors file. It is read without running code from it, and torch.ao is not needed.

\b
EXAMPLES
  zeropoint inspect net.safetensors
  zeropoint inspect old_torch_ao.pth
  zeropoint inspect training.ckpt --allow mypackage.config.Config
  zeropoint inspect net.pt --json | jq '.tensors[] | select(.grid == null) | .name'
"""


def register(app: "typer.Typer") -> None:
    """Adds the command to ``app``."""
    import typer

    from zeropoint.cli._console import command

    @command(app, "inspect", help=_HELP)
    def inspect_file(
        file: Annotated[Path, typer.Argument(readable=False, help="The file.")],
        allow: Annotated[
            list[str] | None, typer.Option(help="A class of your own that the file names, to read as an inert record.")
        ] = None,
        json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        from zeropoint.cli._console import counted, megabytes, show_json, table

        found = _inspect(file, allow or [])
        if json:
            show_json(found)
            return
        rows = [
            (
                *(entry["name"], entry["dtype"], ", ".join(map(str, entry["shape"])) or "number"),
                *(f"{entry['bytes']:,}", _grid_words(entry["grid"])),
            )
            for entry in found["tensors"]
        ]
        table(("name", "dtype", "shape", "bytes", "grid"), rows)
        table(("also in the file", "what it is"), [(entry["name"], entry["what"]) for entry in found["other"]])
        recipe = found["recipe"]
        if recipe is not None:
            print(
                f"made by zeropoint quantize: {recipe['method']}, {counted(len(recipe['fuse']), 'row')} fused, "
                f"{counted(len(recipe['islands']), 'module')} in float"
                + "".join(f", {name} {value}" for name, value in recipe["settings"].items())
            )
        others = counted(len(found["tensors"]) - found["quantized_tensors"], "other")
        print(
            f"{found['format']}, {megabytes(found['file_bytes'])}: "
            f"{counted(found['quantized_tensors'], 'quantized tensor')} ({megabytes(found['quantized_bytes'])}), "
            f"{others} ({megabytes(found['other_bytes'])})"
        )


def _inspect(path: Path, allow: list[str]) -> dict[str, Any]:
    import json

    from zeropoint import checkpoint, recipe
    from zeropoint.cli._console import fail, without_python
    from zeropoint.cli._options import check_source

    check_source(path)
    try:
        kind, state, settings = _read(path, allow)
    except checkpoint.CheckpointError as error:
        fail(f"{path}: {without_python(error, '--allow')}")
    entries, other = [], []
    for name, value in state:
        entry = _tensor(name, value)
        if entry is not None:
            entries.append(entry)
        else:
            other.append({"name": name, "what": _what(value)})
    entries = _with_grids(entries)
    text = settings.get("zeropoint_recipe")
    quantized = [entry for entry in entries if entry["grid"] is not None]
    return {
        "file": str(path),
        "format": kind,
        "file_bytes": path.stat().st_size,
        "quantized_tensors": len(quantized),
        "quantized_bytes": sum(entry["bytes"] for entry in quantized),
        "other_bytes": sum(entry["bytes"] for entry in entries if entry["grid"] is None),
        "recipe": json.loads(recipe.Recipe.from_json(text).to_json()) if isinstance(text, str) else None,
        "tensors": [{key: entry[key] for key in ("name", "dtype", "shape", "bytes", "grid")} for entry in entries],
        "other": other,
    }


def _read(path: Path, allow: list[str]) -> tuple[str, list[tuple[str, Any]], Mapping[str, Any]]:
    """The format, everything in the file by its path there, and the texts beside it."""
    from zeropoint import checkpoint

    with path.open("rb") as file:
        start = file.read(10)
    if start[8:9] == b"{":  # eight bytes of length, then JSON
        return "safetensors", list(checkpoint.load_file(path).items()), checkpoint.read_metadata(path)
    found = checkpoint.load(path, allow=allow)
    texts = found if isinstance(found, Mapping) else {}
    return "torch.save", [pair for pair in _walk("", found) if pair[0] != "zeropoint_recipe"], texts


def _walk(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    from zeropoint.checkpoint import PackedParams, SavedModule

    if isinstance(value, SavedModule):
        value = value.state_dict()
    elif isinstance(value, PackedParams):
        value = list(value.contents)
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        yield name, value
        return
    for key, part in items:
        yield from _walk(f"{name}.{key}" if name else str(key), part)


def _tensor(name: str, value: Any) -> dict[str, Any] | None:
    from torch import Tensor

    from zeropoint.tensor import QTensor

    if not isinstance(value, Tensor):
        return None
    plain = value.codes() if isinstance(value, QTensor) else value
    grid = None
    if isinstance(value, QTensor):
        grid = _grid(value.scale, value.zero_point, value.axis)
    return {
        "name": name or "(the file)",
        "dtype": value.qdtype.name if isinstance(value, QTensor) else str(value.dtype).removeprefix("torch."),
        "shape": list(plain.shape),
        "bytes": plain.numel() * plain.element_size(),
        "grid": grid,
        "value": plain,
    }


def _with_grids(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Codes whose grid lies beside them, as modules keep it, get that grid; the grid is no entry of its own."""
    named = {entry["name"]: entry for entry in entries}
    parts: set[str] = set()
    for name, entry in named.items():
        scale, zero_point = named.get(f"{name}_scale"), named.get(f"{name}_zero_point")
        if scale is not None and zero_point is not None and entry["grid"] is None:
            parts |= {f"{name}_scale", f"{name}_zero_point"}
            entry["grid"] = _grid(scale["value"], zero_point["value"], None)
            entry["bytes"] += scale["bytes"] + zero_point["bytes"]
            entry["dtype"] = {"int8": "qint8", "uint8": "quint8", "int32": "qint32"}.get(entry["dtype"], entry["dtype"])
    return [entry for entry in entries if entry["name"] not in parts]


def _grid(scale: Any, zero_point: Any, axis: int | None) -> dict[str, Any]:
    import torch

    scales, zeros = torch.as_tensor(scale).double().flatten(), torch.as_tensor(zero_point).flatten()
    grids = scales.numel()
    return {
        "grids": grids,
        "axis": axis,
        "scale": [float(scales.min()), float(scales.max())] if grids else [],
        "zero_point": [zeros.min().item(), zeros.max().item()] if zeros.numel() else [],
    }


def _grid_words(grid: dict[str, Any] | None) -> str:
    if grid is None or not grid["scale"]:
        return ""
    low, high = grid["scale"]
    first, last = grid["zero_point"]
    zero = f"zero point {first}" if first == last else f"zero points {first} to {last}"
    if grid["grids"] == 1:
        return f"scale {low:.4g}, {zero}"
    return f"{grid['grids']} grids, scale {low:.4g} to {high:.4g}, {zero}"


def _what(value: Any) -> str:
    text = repr(value)
    if isinstance(value, str):
        text = repr(value if len(value) < 60 else value[:57] + "...")
    return text if len(text) < 80 else type(value).__name__
