"""What the examples print: signal to noise, correlations, sizes, times."""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

__all__ = ["correlation", "in_turn", "megabytes", "ranks", "sqnr", "table"]


def sqnr(reference: Tensor, noisy: Tensor) -> float:
    """Signal to quantization noise ratio, in dB."""
    reference, noise = reference.double(), (noisy - reference).double()
    return float(10 * torch.log10(reference.square().sum() / noise.square().sum()))


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's r of two 1-D tensors; of their ``ranks`` it is Spearman's rho."""
    return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1])


def ranks(values: Tensor) -> Tensor:
    """The rank of every value, equal values sharing the mean of theirs."""
    _, place, count = torch.unique(values, return_inverse=True, return_counts=True)
    return (count.cumsum(0) - (count - 1) / 2)[place]


def megabytes(network: nn.Module) -> float:
    """Size of the saved state dict, in millions of bytes."""
    file = io.BytesIO()
    torch.save(network.state_dict(), file)
    return file.tell() / 1e6


@torch.inference_mode()
def in_turn(
    peers: Mapping[str, Callable[[], object]], batches: int = 7, seconds: float = 0.1
) -> dict[str, list[float]]:
    """Milliseconds a call, [best, median]: a batch of calls of each peer, then again: all meet the same noise."""
    calls = {}
    for name, call in peers.items():
        call()
        start = time.perf_counter()
        call()
        calls[name] = max(1, round(seconds / (time.perf_counter() - start)))
    samples: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(batches):
        for name, call in peers.items():
            start = time.perf_counter()
            for _ in range(calls[name]):
                call()
            samples[name].append((time.perf_counter() - start) / calls[name] * 1e3)
    return {name: [min(s), statistics.median(s)] for name, s in samples.items()}


def table(title: str, head: list[str], rows: list[list[str]]) -> str:
    """Plain text; the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, ["-" * w for w in widths], *rows)
    ]
    return "\n".join(["", title, "", *lines])
