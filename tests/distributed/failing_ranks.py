"""What runs on ranks of which one fails: each function returns the error that the others see."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from unittest import mock

import on_ranks
import torch
import torch.distributed as dist
from torch import Tensor

from zeropoint.distributed import collectives

TIMEOUT = timedelta(seconds=4)


def _join(rank: int, world: int, folder: str) -> dist.ProcessGroup:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/failing", rank=rank, world_size=world, timeout=TIMEOUT
    )
    return dist.group.WORLD


def _train(group: dist.ProcessGroup, hook: str, steps: int) -> str:
    """The error that ended the training, or nothing."""
    model = on_ranks.ddp(group, hook)
    try:
        for step in range(steps):
            model(on_ranks.data(group, step)).square().mean().backward()
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    return ""


def one_dies(rank: int, world: int, folder: str, hook: str) -> str:
    """The last rank is gone after its first step."""
    group = _join(rank, world, folder)
    if rank == world - 1:
        _train(group, hook, steps=1)
        os._exit(1)
    return _train(group, hook, steps=3)


def one_stops(rank: int, world: int, folder: str, hook: str) -> str:
    """The last rank goes silent after its first step, but lives."""
    group = _join(rank, world, folder)
    if rank == world - 1:
        _train(group, hook, steps=1)
        threading.Event().wait(10 * TIMEOUT.total_seconds())
    return _train(group, hook, steps=3)


def one_stops_between_the_collectives(rank: int, world: int, folder: str) -> str:
    """The last rank takes part in the first collective and never starts the second one."""
    group = _join(rank, world, folder)
    if rank < world - 1:
        return _train(group, "allreduce-8", steps=1)

    def forever(form: collectives.BlockFormat, received: Tensor) -> Tensor:
        threading.Event().wait(10 * TIMEOUT.total_seconds())
        return received

    with mock.patch.object(collectives.BlockFormat, "sum", forever):
        _train(group, "allreduce-8", steps=1)
    return ""


def one_cannot_sum(rank: int, world: int, folder: str) -> str:
    """The last rank's own step between the collectives raises: its future must tell, and so must the others'."""
    group = _join(rank, world, folder)
    x = torch.randn(1000)

    def broken(form: collectives.BlockFormat, received: Tensor) -> Tensor:
        raise RuntimeError("out of memory")

    with mock.patch.object(
        collectives.BlockFormat, "sum", broken if rank == world - 1 else collectives.BlockFormat.sum
    ):
        future = collectives.quantized_all_reduce(x, dist.ReduceOp.SUM, group, async_op=True)
        assert future is not None
        try:
            future.wait()
        except RuntimeError as error:
            return f"RuntimeError: {error}"
    return ""
