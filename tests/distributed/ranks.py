"""Processes that stand for machines: started once for the whole test run, and asked to run functions together.

A function that runs on ranks lives in a module beside this one that imports no pytest (``on_ranks``), takes its process
group first, and returns something small.
"""

from __future__ import annotations

import multiprocessing as mp
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WORLDS = (1, 2, 3, 4, 8)
_PATIENCE = 300.0  # seconds until a rank that does not answer is given up: only ever reached by a bug


def _context() -> Any:
    """Processes forked from one that has imported torch and done nothing else: eight of them start in a second."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "zeropoint.distributed"])
    return context


def _quiet_and_single() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")


def _serve(rank: int, folder: str, pipe: Connection) -> None:
    _quiet_and_single()
    size = max(WORLDS)
    dist.init_process_group("gloo", init_method=f"file://{folder}/pool", rank=rank, world_size=size)
    groups = {n: dist.new_group(list(range(n))) for n in WORLDS if n != size}
    groups[size] = dist.group.WORLD
    while (task := pipe.recv()) is not None:
        world, function, args = task
        try:
            torch.manual_seed(rank)
            pipe.send((True, function(groups[world], *args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Ranks:
    """Eight ranks over gloo, and groups of the first 1, 2, 3 and 4 of them."""

    def __init__(self, folder: Path) -> None:
        context = _context()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(max(WORLDS)):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, str(folder), there), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def __call__(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs ``function(group, *args)`` on the first ``world`` ranks: what each returned."""
        for pipe in self._pipes[:world]:
            pipe.send((world, function, args))
        answers = []
        for rank, pipe in enumerate(self._pipes[:world]):
            if not pipe.poll(_PATIENCE):
                raise TimeoutError(f"rank {rank} of {world} does not answer")
            answers.append(pipe.recv())
        for rank, (fine, answer) in enumerate(answers):
            assert fine, f"rank {rank} of {world}:\n{answer}"
        return [answer for _, answer in answers]

    def close(self) -> None:
        """Lets the processes end."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(30)
            if process.is_alive():
                process.terminate()


def _once(rank: int, function: Callable[..., Any], args: Sequence[Any], pipe: Connection) -> None:
    _quiet_and_single()
    pipe.send(function(rank, *args))
    pipe.close()


def run_apart(
    world: int, function: Callable[..., Any], *args: Any, answering: Sequence[int] | None = None
) -> list[Any]:
    """Runs ``function(rank, *args)`` in processes of their own, which may die.

    Args:
        world: how many.
        function: of a module that children can import.
        *args: what it gets after its rank.
        answering: the ranks to wait for; None waits for all. Then all are ended.

    Returns:
        What each returned; None for a rank that died, or that was not waited for.
    """
    context = _context()
    pipes, processes = [], []
    for rank in range(world):
        here, there = context.Pipe()
        processes.append(context.Process(target=_once, args=(rank, function, args, there), daemon=True))
        processes[-1].start()
        there.close()
        pipes.append(here)
    answers: list[Any] = [None] * world
    for rank in range(world) if answering is None else answering:
        if not pipes[rank].poll(_PATIENCE):
            raise TimeoutError(f"rank {rank} of {world} does not answer")
        with suppress(EOFError):
            answers[rank] = pipes[rank].recv()
    for process in processes:
        process.terminate()
        process.join()
    return answers
