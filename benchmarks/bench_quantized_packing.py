"""What packed weights bring: the operator on plain weights, with cached packed weights, and packing at every call.

* *direct*: ``torch.ops.zeropoint.linear`` in its portable form (no vector instructions named) without packed weights.
* *cached*: the same operator in the best instruction set, with weights packed once: what a module does.
* *rebuild*: the same, packing at every call.
* *fused*: cached, with the ReLU in the output stage; *separate*: cached, then a clamp of the codes.

On a GPU, *direct* is the reference of the operator, in torch's own operators, and the others are our kernel.

All operands are signed 8-bit affine. The codes of all are equal, which is checked first. Medians of five batches of a
hundred calls.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import SETTINGS, Suite, in_turn, summary, table, threads
from zeropoint import backends
from zeropoint.ops.linear import linear_reference

SHAPES = ((1, 512, 1024), (32, 256, 512), (256, 512, 1024))
OUT_ZERO_POINT = 3


def _operands(m: int, n: int, k: int) -> tuple[Any, ...]:
    x = torch.randint(-128, 128, (m, k), dtype=torch.int8)
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    scale, zero_point = torch.rand(n) * 0.01 + 0.001, torch.randint(-5, 6, (n,), dtype=torch.int32)
    where = SETTINGS.device
    x, weight, scale, zero_point = (value.to(where) for value in (x, weight, scale, zero_point))
    return x, 0.02, -7, weight, scale, zero_point, torch.randn(n).to(where), 0.3, OUT_ZERO_POINT


def _linear(operands: tuple[Any, ...], packed: Tensor | None, low: int = -128) -> Tensor:
    return torch.ops.zeropoint.linear.default(*operands, low, 127, torch.int8, packed)


def _direct(operands: tuple[Any, ...]) -> Tensor:
    if SETTINGS.on_gpu:
        return linear_reference(*operands, -128, 127, torch.int8, None)
    return _linear(operands, None)


def _linear_then_clamp(operands: tuple[Any, ...], packed: Tensor | None) -> Tensor:
    return _linear(operands, packed).clamp_(min=OUT_ZERO_POINT)


def _choose(isa: str) -> None:
    if not SETTINGS.on_gpu:
        backends.set_isa(isa)


def run(quick: bool = False) -> Suite:
    suite = Suite("quantized_packing", "Packed weights of the integer linear operator", "quantized_packing_results")
    suite.notes = {
        "direct": "the operator's reference, in torch's operators"
        if SETTINGS.on_gpu
        else "torch.ops.zeropoint.linear, portable instruction set, no packed weights",
        "cached": "the best kernel, weights packed once",
        "rebuild": "the best kernel, weights packed at every call",
        "unit": "microseconds, median of 5 batches of 100 calls",
    }
    if SETTINGS.on_gpu:
        _measure(suite, "cuda", SHAPES[:1] if quick else SHAPES)
        return suite
    if not backends.is_native():
        suite.missing("zeropoint", "the native library is not built")
        return suite
    best = backends.active_isa()
    with threads(max(SETTINGS.threads)):
        _measure(suite, best, SHAPES[:1] if quick else SHAPES)
    return suite


def _measure(suite: Suite, best: str, shapes: tuple[tuple[int, int, int], ...]) -> None:
    head = ["M x N x K", "direct us", "cached us", "rebuild us", "direct/cached", "fused us", "separate us"]
    rows = [head]
    for m, n, k in shapes:
        operands = _operands(m, n, k)
        packed = torch.ops.zeropoint.linear_pack(operands[3])
        peers = {
            "direct": partial(_direct, operands),
            "cached": partial(_linear, operands, packed),
            "rebuild": partial(_linear, operands, None),
            "fused": partial(_linear, operands, packed, low=OUT_ZERO_POINT),
            "separate": partial(_linear_then_clamp, operands, packed),
        }
        wanted = linear_reference(*operands, -128, 127, torch.int8, None)
        for name, call in peers.items():
            _choose("portable" if name == "direct" else best)
            rectified = wanted.clamp(min=OUT_ZERO_POINT) if name in ("fused", "separate") else wanted
            if not torch.equal(call(), rectified):
                raise AssertionError(f"{name} gives other codes than the reference at {m} x {n} x {k}")
        before = {name: partial(_choose, "portable" if name == "direct" else best) for name in peers}
        times = in_turn(peers, batches=5, calls=100, before=before)
        _choose(best)
        us = {name: round(t.median * 1e6, 1) for name, t in times.items()}
        ratio = round(us["direct"] / us["cached"], 1)
        suite.rows.append(
            {
                "case": f"{m} x {n} x {k}",
                "device": SETTINGS.device.type,
                "m": m,
                "n": n,
                "k": k,
                **{f"{name}_us": value for name, value in us.items()},
                "direct_over_cached": ratio,
                "isa": best,
                "threads": torch.get_num_threads(),
                "peers": summary({"zeropoint" if name == "cached" else name: t for name, t in times.items()}),
            }
        )
        cells = [us["direct"], us["cached"], us["rebuild"], ratio, us["fused"], us["separate"]]
        rows.append([f"{m} x {n} x {k}", *map(str, cells)])
    print("\n" + table(rows))
