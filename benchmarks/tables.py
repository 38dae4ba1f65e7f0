"""``python -m benchmarks.tables``: writes docs/benchmarks*.md from the files in ``results``; ``--check`` compares."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import OURS, RESULTS, duration

DOCS = Path(__file__).parent.parent / "docs"
COMPILED = f"{OURS}, compiled"
SUITES = ("networks", "linear", "conv", "recurrent", "scaling", "elementwise", "fake_quantize")
HEAD = """# Benchmarks, {title}

Written by `python -m benchmarks.tables` from `benchmarks/{folder}`; {how} measures anew. Every number is the best
of many runs, all peers of a row in turn in one run. Times on shared machines are noisy: read ratios. A peer's cell
gives its time, and how many times ours it is (compiled, where networks are): above 1 we are faster.

{more}
"""


@dataclass(frozen=True)
class Page:
    """One kind of processor: its page, the folder of its results, and what else its head says."""

    file: str
    folder: Path
    title: str
    how: str
    more: str

    @property
    def text(self) -> str:
        """The whole page, from the results that there are."""
        folder = self.folder.relative_to(RESULTS.parent).as_posix()
        parts = [HEAD.format(title=self.title, folder=folder, how=self.how, more=self.more)]
        for name in SUITES:
            file = self.folder / f"{name}.json"
            if file.exists():
                parts.append(_section(json.loads(file.read_text()), f"{folder}/{name}"))
        return "\n".join(parts)


PAGES = (
    Page(
        "benchmarks.md",
        RESULTS,
        "AVX-512 VNNI",
        "`make bench`",
        "Other processors: [AVX2 only](benchmarks-avx2.md), [AMX](benchmarks-amx.md).",
    ),
    Page(
        "benchmarks-avx2.md",
        RESULTS / "avx2",
        "AVX2",
        "`python -m benchmarks --results benchmarks/results/avx2`",
        "The peers' int8 kernels for such a processor add two products in 16 bits and saturate: "
        "their codes, and so their predictions, can differ from the exact ones. Ours do not.\n\n"
        "Other processors: [AVX-512 VNNI](benchmarks.md), [AMX](benchmarks-amx.md).",
    ),
    Page(
        "benchmarks-amx.md",
        RESULTS / "amx",
        "AMX",
        "`python -m benchmarks --results benchmarks/results/amx`",
        "Other processors: [AVX-512 VNNI](benchmarks.md), [AVX2 only](benchmarks-avx2.md).",
    ),
)


def _section(report: dict[str, Any], name: str) -> str:
    machine = report["machine"]
    rows = [row for row in report["rows"] if OURS in row.get("peers", ())]
    peers = list(dict.fromkeys(peer for row in rows for peer in row["peers"]))
    versions = ", ".join(
        f"{package} {number}" for package, number in machine["versions"].items() if number != "not installed"
    )
    lines = [
        f"## {report['title']}",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['zeropoint']['isa']}, {machine['clock']} time, "
        f"{machine['date']}; {versions}.",
        *(f"Not measured: {peer} ({why})." for peer, why in report["missing"].items()),
        "",
        "| | " + " | ".join(peers) + " |",
        "| --- |" + " --- |" * len(peers),
    ]
    for row in rows:
        best = {peer: row["peers"][peer]["best_us"] / 1e6 for peer in peers if peer in row["peers"]}
        ours = best.get(COMPILED, best[OURS])
        cells = [_cell(best.get(peer), ours, peer) for peer in peers]
        lines.append(f"| {row['case']} | " + " | ".join(cells) + " |")
    lines += ["", *_means(rows, peers), "", f"![{report['title']}](../benchmarks/{name}.png)", ""]
    return "\n".join(lines)


def _cell(seconds: float | None, ours: float, peer: str) -> str:
    if seconds is None:
        return ""
    return duration(seconds) if _is_ours(peer) else f"{duration(seconds)} ({seconds / ours:.2f})"


def _is_ours(peer: str) -> bool:
    return peer == OURS or peer.startswith(f"{OURS}, ")


def _means(rows: list[dict[str, Any]], peers: list[str]) -> list[str]:
    """Geometric means of the peers' ratios."""
    means = []
    for peer in peers:
        logs = [
            math.log(row["peers"][peer]["best_us"] / row["peers"].get(COMPILED, row["peers"][OURS])["best_us"])
            for row in rows
            if peer in row["peers"]
        ]
        if not _is_ours(peer):
            means.append(f"{peer} {math.exp(sum(logs) / len(logs)):.2f}")
    return [f"Geometric means of the ratios: {', '.join(means)}."] if means else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the page is not what the results give")
    check = parser.parse_args().check
    for page in PAGES:
        file = DOCS / page.file
        if check:
            if not file.exists() or file.read_text() != page.text:
                print(f"{page.file} is not what the results give: run `python -m benchmarks.tables`")
                return 1
        else:
            file.write_text(page.text)
            print(f"written: {file}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
