"""``python -m benchmarks.tables``: writes docs/benchmarks.md from the files in ``results``; ``--check`` compares."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from benchmarks.harness import OURS, RESULTS, duration

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
COMPILED = f"{OURS}, compiled"
SUITES = ("networks", "linear", "conv", "recurrent", "scaling", "elementwise", "fake_quantize")
HEAD = """# Benchmarks

Written by `python -m benchmarks.tables` from `benchmarks/results`; `make bench` measures anew. Every number is the best
of many runs, all peers of a row in turn in one run. Times on shared machines are noisy: read ratios. A peer's cell
gives its time, and how many times ours it is (compiled, where networks are): above 1 we are faster.
"""


def page() -> str:
    """The whole page, from the results that there are."""
    parts = [HEAD]
    for name in SUITES:
        file = RESULTS / f"{name}.json"
        if file.exists():
            parts.append(_section(json.loads(file.read_text()), name))
    return "\n".join(parts)


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
    lines += ["", *_means(rows, peers), "", f"![{report['title']}](../benchmarks/results/{name}.png)", ""]
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
    text = page()
    if check:
        if PAGE.read_text() != text:
            print(f"{PAGE.name} is not what the results give: run `python -m benchmarks.tables`")
            return 1
        return 0
    PAGE.write_text(text)
    print(f"written: {PAGE}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
