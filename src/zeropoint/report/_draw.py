"""Pictures as inline SVG and HTML. Colours are CSS variables of the page, so they follow light and dark.

May import: the standard library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from zeropoint.report._collect import Histogram

__all__ = ["bars", "histogram"]

WIDTH, HEIGHT, AXIS = 480, 126, 24


def bars(values: Sequence[float], labels: Sequence[str], unit: str) -> str:
    """Horizontal bars, one a value, labelled; infinite ones are drawn full. HTML, so that text keeps its size.

    Args:
        values: not negative; smaller ones are drawn as zero.
        labels: plain text.
        unit: what the values are in.
    """
    top = max([value for value in values if math.isfinite(value)] + [1e-9])
    rows = []
    for value, label in zip(values, labels, strict=True):
        share = max(0.0, value) / top if math.isfinite(value) else float(value > 0)
        text = f"{value:.1f} {unit}".rstrip() if math.isfinite(value) else "exact" if value > 0 else "no signal"
        rows.append(
            f'<div class="bar"><span>{escape(label) or "(root)"}</span><span>{escape(text)}</span>'
            f'<i style="width:{share * 100:.1f}%"></i></div>'
        )
    return "".join(rows)


def histogram(data: Histogram, name: str) -> str:
    """The distribution of the float values over the grid: ticks for the codes, what lies beyond shaded."""

    def x(value: float) -> float:
        return (value - data.low) / (data.high - data.low) * WIDTH

    tallest = max([math.log1p(count) for count in data.counts] + [1e-9])
    width = WIDTH / len(data.counts)
    plot = HEIGHT - AXIS
    columns = []
    for index, count in enumerate(data.counts):
        if count:
            tall = math.log1p(count) / tallest * plot
            columns.append(f"M{index * width:.1f} {plot}v{-tall:.1f}h{width * 0.9:.1f}v{tall:.1f}z")
    codes = round((data.grid_high - data.grid_low) / data.step)
    stride = max(1, codes // 64)
    ticks = "".join(f"M{x(data.grid_low + code * data.step):.1f} {plot}v4" for code in range(0, codes + 1, stride))
    beyond = "".join(
        f'<rect x="{start:.1f}" y="0" width="{end - start:.1f}" height="{plot}" class="beyond"/>'
        for start, end in ((0.0, x(data.grid_low)), (x(data.grid_high), float(WIDTH)))
        if end - start > 0.5
    )
    marks = "".join(
        f'<text x="{min(max(x(value), 2), WIDTH - 2):.1f}" y="{HEIGHT - 2}" class="mark {place}">{value:.3g}</text>'
        for value, place in ((data.grid_low, "start"), (data.grid_high, "end"))
    )
    return (
        f'<svg class="histogram" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="distribution of {escape(name)}">'
        f'{beyond}<path d="{"".join(columns)}" class="column"/><path d="{ticks}" class="tick"/>{marks}</svg>'
    )


def escape(text: str) -> str:
    """Text for XML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
