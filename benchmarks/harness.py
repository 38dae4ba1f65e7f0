"""How we measure: peers in turn, in one run, on one machine; the best and the median of every one.

A number from another run is worth little: clocks, neighbours and caches differ. So all peers of a case are warmed up,
then each gets a short batch of calls, then each again, A B C A B C …, and what is reported is the ratio within the run.

On a machine that others use too, ``--clock cpu --threads 1`` counts the processor's time instead of the wall's.
With ``--device cuda`` time is what passes on the device between two events around a batch, after a longer warm-up.

A suite leaves ``results/<suite>.json``, with machine, date and versions, and a picture beside it.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from zeropoint import backends

__all__ = ["RESULTS", "SETTINGS", "Suite", "Timing", "in_turn", "machine", "summary", "table", "threads"]

RESULTS = Path(__file__).parent / "results"
OURS = "zeropoint"
PACKAGES = ("torch", "zeropoint", "numpy", "onnxruntime", "onnx", "openvino", "triton", "torchao")


@dataclass
class Settings:
    """What the command line chose.

    Attributes:
        clock: "wall", or "cpu" for the processor's time of all threads of this process.
        threads: the numbers of threads to measure with.
        device: where tensors and layers are.
        results: the folder that takes the files.
    """

    clock: str = "wall"
    threads: tuple[int, ...] = (1, 2)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    results: Path = RESULTS

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU is measured."""
        return self.device.type == "cuda"

    def label(self, count: int) -> str:
        """What a case's name says of where it runs."""
        return str(self.device) if self.on_gpu else f"{count} thread(s)"

    def now(self) -> float:
        """Seconds on the chosen clock."""
        return time.process_time() if self.clock == "cpu" else time.perf_counter()


SETTINGS = Settings()
WARM_UP = 5  # calls on a GPU before anything is timed: kernels are compiled in the first


@dataclass(frozen=True)
class Timing:
    """Seconds a call of one peer, one number a batch."""

    batches: tuple[float, ...]

    @property
    def best(self) -> float:
        """The fastest batch: what the code can do when nothing disturbs it."""
        return min(self.batches)

    @property
    def median(self) -> float:
        """The middle batch: what a user sees."""
        return statistics.median(self.batches)


def in_turn(
    peers: Mapping[str, Callable[[], object]],
    batches: int = 7,
    calls: int | None = None,
    batch_seconds: float = 0.04,
    before: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, Timing]:
    """Times the peers in turn.

    Args:
        peers: what to call, by name.
        batches: batches a peer.
        calls: calls a batch; ``None`` chooses as many as fill ``batch_seconds``, for each peer by itself.
        batch_seconds: the length of a batch, in seconds.
        before: what is called before every batch of a peer, outside its time.
    """
    counts = {}
    prepare = before or {}
    timed = _on_device if SETTINGS.on_gpu else _on_clock
    with torch.inference_mode():
        for name, call in peers.items():
            prepare.get(name, bool)()
            for _ in range(WARM_UP if SETTINGS.on_gpu else 1):
                call()
            counts[name] = calls or max(1, int(batch_seconds / max(timed(call, 1), 1e-7)))
        samples: dict[str, list[float]] = {name: [] for name in peers}
        for _ in range(batches):
            for name, call in peers.items():
                prepare.get(name, bool)()
                samples[name].append(timed(call, counts[name]) / counts[name])
    return {name: Timing(tuple(s)) for name, s in samples.items()}


REST, RISE = 0.15, 0.02
"""Seconds before a batch. Threads of the peer before may go on for a moment, waiting for more to do; then the processor
has to come back to its full speed."""


def _on_clock(call: Callable[[], object], count: int) -> float:
    """Seconds that ``count`` calls take on the chosen clock, after a rest and some calls to warm up."""
    time.sleep(REST)
    risen = time.perf_counter() + RISE
    call()
    while time.perf_counter() < risen:
        call()
    start = SETTINGS.now()
    for _ in range(count):
        call()
    return SETTINGS.now() - start


def _on_device(call: Callable[[], object], count: int) -> float:
    """Seconds between two events of the device around ``count`` calls."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch's thread pool at ``count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def machine() -> dict[str, Any]:
    """What a measurement was made on, and with."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            module = sys.modules.get(package)
            versions[package] = getattr(module, "__version__", "not installed")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "zeropoint": backends.describe(),
        **({"gpu": _gpu()} if SETTINGS.on_gpu else {}),
        "clock": "device events" if SETTINGS.on_gpu else SETTINGS.clock,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": versions,
    }


def _gpu() -> dict[str, Any]:
    about = torch.cuda.get_device_properties(SETTINGS.device)
    return {
        "name": about.name,
        "capability": f"{about.major}.{about.minor}",
        "multiprocessors": about.multi_processor_count,
        "cuda": torch.version.cuda,
        "backend": backends.triton.describe(),
    }


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def table(rows: list[list[str]]) -> str:
    """A plain text table; the first row is the head, and columns but the first stand to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def summary(timings: Mapping[str, Timing], ours: str = OURS) -> dict[str, dict[str, float]]:
    """What is kept of a case: microseconds, and how many times ``ours``'s best each best is."""
    base = timings[ours].best if ours in timings else None
    return {
        name: {
            "best_us": round(t.best * 1e6, 3),
            "median_us": round(t.median * 1e6, 3),
            **({"ratio_of_best": round(t.best / base, 3)} if base else {}),
        }
        for name, t in timings.items()
    }


class Suite:
    """The cases of one benchmark. ``add`` measures and prints one, ``finish`` writes the files."""

    def __init__(self, name: str, title: str, file: str | None = None) -> None:
        self.name, self.title, self.file = name, title, file or name
        self.rows: list[dict[str, Any]] = []
        self.absent: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        about = machine()
        where = about["gpu"] if SETTINGS.on_gpu else f"{about['cpu']}, {about['cores']} cores, {about['zeropoint']}"
        print(f"\n== {title}\n   {where}, {about['clock']} time")

    def missing(self, peer: str, why: object) -> None:
        """Names a peer that cannot be measured here, once."""
        if peer not in self.absent:
            self.absent[peer] = str(why).strip().split("\n")[0]
            print(f"   {peer} is not measured: {self.absent[peer]}")

    def add(
        self, case: str, peers: Mapping[str, Callable[[], object]], facts: Mapping[str, Any] | None = None, **how: Any
    ) -> dict[str, Timing]:
        """Measures the peers of a case in turn; ``facts`` (accuracy, size) are kept beside the times."""
        timings = in_turn(peers, **how)
        ours = timings.get(OURS)
        rows = [[case, "best", "median", "times zeropoint's best"]]
        for name, timing in timings.items():
            ratio = f"{timing.best / ours.best:.2f}" if ours else ""
            rows.append([f"  {name}", duration(timing.best), duration(timing.median), ratio])
        print("\n" + table(rows), flush=True)
        self.rows.append({"case": case, **(facts or {}), "peers": summary(timings)})
        return timings

    def finish(self) -> None:
        """Writes ``results/<file>.json`` and, with matplotlib, ``results/<file>.png``."""
        SETTINGS.results.mkdir(parents=True, exist_ok=True)
        report = {
            "suite": self.name,
            "title": self.title,
            "machine": machine(),
            **({"notes": self.notes} if self.notes else {}),
            "missing": self.absent,
            "rows": self.rows,
        }
        path = SETTINGS.results / f"{self.file}{'_cuda' if SETTINGS.on_gpu else ''}.json"
        path.write_text(json.dumps(report, indent=2) + "\n")
        print(f"\n   written: {path}")
        try:
            picture(report, path.with_suffix(".png"))
        except ModuleNotFoundError as error:
            print(f"   no picture: {error}")


def picture(report: Mapping[str, Any], path: Path) -> None:
    """One group of bars a case: how many times zeropoint's best time each peer takes, on a logarithmic axis."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in report["rows"] if OURS in row.get("peers", ())]
    if not rows:
        return
    names = list(dict.fromkeys(name for row in rows for name in row["peers"] if name != OURS))
    height = 0.8 / max(1, len(names))
    figure, axes = plt.subplots(figsize=(9, 1.2 + len(rows) * (0.15 + 0.17 * len(names))), layout="constrained")
    for i, name in enumerate(names):
        at = [r + i * height for r, row in enumerate(rows) if name in row["peers"]]
        ratios = [row["peers"][name]["ratio_of_best"] for row in rows if name in row["peers"]]
        bars = axes.barh(at, [r - 1 for r in ratios], height * 0.9, left=1, label=name)
        axes.bar_label(bars, [f"{r:.2f}" for r in ratios], padding=2, fontsize=7)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.margins(x=0.08)
    axes.set_yticks([r + 0.4 - height / 2 for r in range(len(rows))], [row["case"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("time / zeropoint's time (right of the line: zeropoint is faster)")
    about = report["machine"]
    hardware = about["gpu"]["name"] if "gpu" in about else f"{about['cpu']}, {about['cores']} cores"
    where = f"{hardware}, {about['clock']} time, {about['date']}"
    axes.set_title(f"{report['title']}\n{where}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
