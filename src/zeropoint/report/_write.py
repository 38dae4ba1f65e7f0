"""Writes a report as a page, as Markdown or as JSON: the file's name says which.

May import: floors 1 to 5.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from torch import nn

from zeropoint.analysis import Sensitivity, TensorError
from zeropoint.files import write_text
from zeropoint.report import _draw
from zeropoint.report._collect import LayerReport, Report, collect

__all__ = ["write"]

WORST = 12
"""How many layers the bars show."""

PICTURES = 6
"""How many layers have their distributions drawn."""


def write(
    model: nn.Module,
    reference: nn.Module,
    data: Any,
    path: str | os.PathLike[str],
    *,
    sensitivity: Sensitivity | None = None,
    title: str | None = None,
    progress: bool = False,
) -> Report:
    """Measures a quantized model against its float twin and writes what was found.

    The page is one file that opens without a network. It is written whole or not at all.

    Args:
        model: the quantized model.
        reference: the float model, fused as the quantized one was.
        data: a tensor, or batches: tensors, tuples of arguments, or dicts of named ones.
        path: ends in ``.html``, ``.md`` or ``.json``.
        sensitivity: what :func:`zeropoint.analysis.sensitivity` found, to show.
        title: None: the model's class.
        progress: show progress bars, if tqdm or rich is installed.

    Returns:
        What was measured.

    Raises:
        ValueError: another ending, no data, or a model without quantized layers.
        ImportError: a page is asked for, and jinja2 is not installed.
        OSError: the file cannot be written; nothing is left behind.
    """
    path = Path(path)
    formats = {".html": _page, ".md": _markdown, ".json": _json}
    if path.suffix not in formats:
        raise ValueError(f"a report's name must end in .html, .md or .json, got {path.name!r}")
    if path.suffix == ".html":
        _environment()  # before the measuring, which takes time
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} into")
    report = collect(model, reference, data, sensitivity=sensitivity, title=title, progress=progress)
    write_text(path, formats[path.suffix](report))
    return report


def _json(report: Report) -> str:
    return json.dumps(report.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


# --- words --------------------------------------------------------------------------------------------------------


def _decibels(error: TensorError | None) -> str:
    return "" if error is None else _number(error.sqnr)


def _number(value: float | None, digits: int = 1) -> str:
    if value is None or math.isnan(value):
        return ""
    return f"{value:.{digits}f}" if math.isfinite(value) else "exact" if value > 0 else "no signal"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value * 100:.1f} %"


def _bytes(value: int) -> str:
    return f"{value / 1e6:.2f} MB" if value >= 1e5 else f"{value / 1e3:.1f} kB"


def _summary(report: Report) -> list[tuple[str, str]]:
    worst = {part: report.worst(part) for part in ("weight", "own")}
    rows = [
        ("Output, signal to noise", f"{_number(report.output)} dB"),
        ("Size", f"{_bytes(report.size)}, float {_bytes(report.float_size)}"),
        ("Time of a call", f"{report.milliseconds:.2f} ms, float {report.float_milliseconds:.2f} ms"),
        ("Layers", f"{len(report.layers)} quantized, {len(report.skipped)} left in float"),
    ]
    if worst["weight"]:
        rows.append(("Weight that lost most", f"{worst['weight'][0].name}, {_decibels(worst['weight'][0].weight)} dB"))
    if worst["own"]:
        rows.append(("Layer that adds most noise", f"{worst['own'][0].name}, {_decibels(worst['own'][0].own)} dB"))
    return rows


_HEAD = ("layer", "class", "weight dB", "own dB", "output dB", "clipped", "unused codes", "size", "ms")


def _row(layer: LayerReport) -> tuple[str, ...]:
    activation = layer.activation
    return (
        layer.name or "(root)",
        layer.kind,
        _decibels(layer.weight),
        _decibels(layer.own),
        _decibels(activation),
        _share(activation.clipped if activation else None),
        _share(activation.unused if activation else None),
        _bytes(layer.size),
        _number(layer.milliseconds, 3),
    )


# --- Markdown -----------------------------------------------------------------------------------------------------


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(head), line(("---",) * len(head)), *map(line, rows), ""]


def _markdown(report: Report) -> str:
    lines = [f"# {report.title}: what quantization cost", ""]
    lines += _table(("", ""), _summary(report))  # type: ignore[arg-type]
    lines += ["## Layers", "", *_table(_HEAD, [_row(layer) for layer in report.layers])]
    if report.sensitivity is not None:
        lines += ["## Sensitivity", "", f"Everything quantized: {_number(report.sensitivity.everything, 2)}.", ""]
        rows = [(s.name, s.kind, _number(s.alone, 2), _number(s.without, 2)) for s in report.sensitivity]
        lines += _table(("layer", "class", "it alone quantized", "it alone in float"), rows)  # type: ignore[arg-type]
        if report.sensitivity.skipped:
            lines += [_not_measured(report.sensitivity), ""]
    if report.skipped:
        lines += ["## Left in float", "", *_table(("layer", "class", "why"), report.skipped)]  # type: ignore[arg-type]
    lines += [", ".join(f"{name} {value}" for name, value in report.environment.items()), ""]
    return "\n".join(lines)


# --- the page -----------------------------------------------------------------------------------------------------


def _environment() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise ImportError(
            "an HTML report needs jinja2: pip install 'zeropoint[report]', or write a .md or .json report",
            name="jinja2",
        ) from error
    return jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)


def _page(report: Report) -> str:
    template = _environment().from_string((Path(__file__).parent / "page.html.jinja").read_text(encoding="utf-8"))
    by_weight, by_own = report.worst("weight"), report.worst("own")
    shown: list[LayerReport] = []
    for layer in [layer for pair in zip(by_weight, by_own, strict=False) for layer in pair]:
        if layer not in shown and (layer.weight_histogram or layer.activation_histogram):
            shown.append(layer)
    text: str = template.render(
        report=report,
        summary=_summary(report),
        head=_HEAD,
        rows=[_row(layer) for layer in report.layers],
        weight_bars=_bars(by_weight, "weight"),
        own_bars=_bars(by_own, "own"),
        pictures=[
            {
                "name": layer.name,
                "kind": layer.kind,
                "weight": layer.weight_histogram and _draw.histogram(layer.weight_histogram, f"{layer.name}, weight"),
                "per_channel": bool(layer.weight_histogram and layer.weight_histogram.per_channel),
                "activation": layer.activation_histogram
                and _draw.histogram(layer.activation_histogram, f"{layer.name}, output"),
                "errors": layer,
            }
            for layer in shown[:PICTURES]
        ],
        sensitivity=None
        if report.sensitivity is None
        else [(s.name, s.kind, _number(s.alone, 2), _number(s.without, 2)) for s in report.sensitivity],
        not_measured=(
            _not_measured(report.sensitivity) if report.sensitivity is not None and report.sensitivity.skipped else ""
        ),
        sensitivity_bars=_sensitivity_bars(report.sensitivity),
        number=_number,
        share=_share,
    )
    return text


def _not_measured(found: Sensitivity) -> str:
    """Names what the ranking leaves out, because it has weights and stays float."""
    named = ", ".join(f"{name or '(root)'} ({kind})" for name, kind in found.skipped)
    return f"Not quantized, and so not measured: {named}."


def _sensitivity_bars(found: Sensitivity | None) -> list[tuple[str, str]]:
    """Caption and bars; none for a metric of the user's own that goes below zero."""
    if found is None or not all(layer.alone >= 0 and math.isfinite(layer.alone) for layer in found):
        return []
    worst = list(found)[:WORST]
    gains = sorted(found, key=lambda layer: -layer.without)[:WORST]
    return [
        (
            "It alone quantized: a short bar is a layer that hurts by itself",
            _draw.bars([layer.alone for layer in worst], [layer.name for layer in worst], ""),
        ),
        (
            "It alone in float: what leaving it in float would bring",
            _draw.bars([layer.without - found.everything for layer in gains], [layer.name for layer in gains], "more"),
        ),
    ]


def _bars(layers: list[LayerReport], part: str) -> str:
    lossy = [layer for layer in layers if math.isfinite(getattr(layer, part).sqnr)]
    shown = (lossy or layers)[:WORST]
    return _draw.bars([getattr(layer, part).sqnr for layer in shown], [layer.name for layer in shown], "dB")
