"""What a second thread brings: threads inside a call, and Python threads that share one module."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import nn

import zeropoint.ao
from benchmarks import peers
from benchmarks.harness import SETTINGS, Suite, table, threads

SIZE, CALLERS, CALLS = 1024, 10, 40


def run(quick: bool = False) -> Suite:
    suite = Suite("scaling", "Threads inside a call, and Python threads that share a module")
    if SETTINGS.on_gpu:
        suite.missing("zeropoint", "threads of the processor are what is measured")
        return suite
    _inside(suite)
    _outside(suite)
    rows = [["", "speed against one thread"], *([row["case"], f"{row['speedup']:.2f}"] for row in suite.rows)]
    print("\n" + table(rows))
    return suite


def _inside(suite: Suite) -> None:
    layer, x = nn.Linear(SIZE, SIZE).eval(), torch.randn(SIZE, SIZE)
    ours, codes = peers.quantized_layer(zeropoint.ao, layer, x)
    best = {}
    for count in (1, 2):
        with threads(count):
            case = f"linear {SIZE} x {SIZE} x {SIZE}, {count} thread(s)"
            best[count] = suite.add(case, {"zeropoint": partial(ours, codes)}, {"threads": count})["zeropoint"].best
        suite.rows[-1]["speedup"] = round(best[1] / best[count], 3)


def _outside(suite: Suite) -> None:
    """A convolution that one thread computes, called by one Python thread and by ten."""
    layer, x = nn.Conv2d(64, 64, 3, padding=1).eval(), torch.randn(1, 64, 56, 56)
    ours, codes = peers.quantized_layer(zeropoint.ao, layer, x.to(memory_format=torch.channels_last))

    def calls(count: int) -> None:
        with torch.inference_mode():
            for _ in range(count):
                ours(codes)

    with threads(1), ThreadPoolExecutor(CALLERS) as pool:
        both = {
            "zeropoint": partial(calls, CALLS),
            f"zeropoint, {CALLERS} Python threads": lambda: list(pool.map(calls, [CALLS // CALLERS] * CALLERS)),
        }
        timings = suite.add(f"{CALLS} calls of a 3x3 convolution", both, {"threads": 1})
    one, many = (timing.best for timing in timings.values())
    suite.rows[-1]["speedup"] = round(one / many, 3)
