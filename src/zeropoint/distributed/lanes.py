"""Where the second half of an exchange runs.

An exchange of two collectives starts its second one when the first is done, and on a host backend (gloo, MPI) that is
found out on some thread of the backend, at another moment on every rank. Collectives of one process group are matched
by the order in which ranks start them, so the second ones need an order of their own: they run on a twin of the group
that nobody else uses, and start there in the order in which the first ones were started.

On a backend that queues work on device streams (NCCL) a future's callbacks run at once on the calling thread, so the
order is right by itself, and the group serves for both.

May import: torch only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Lane", "host_backend", "lane_of", "require_group"]

_HOST_BACKENDS = ("gloo", "mpi", "ucc")
_lanes: WeakKeyDictionary[Any, Lane] = WeakKeyDictionary()
_making = threading.Lock()


def require_group(group: Any, who: str) -> dist.ProcessGroup:
    """The process group meant by ``group``; None is the default one.

    Raises:
        TypeError: it is no process group.
        ValueError: this rank is not in it.
        RuntimeError: None, and no default group was initialized.
    """
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError(f"{who}: there is no default process group, call torch.distributed.init_process_group")
        group = dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{who}: this rank is not a member of the process group that was given")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{who} takes a torch.distributed.ProcessGroup or None, got {type(group).__name__}")
    return group


def host_backend(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The name of the backend that serves ``device``, if it moves bytes from host memory, else None."""
    config = dist.get_backend_config(group)
    names = dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)
    name = names.get(device.type, config)
    return name if device.type == "cpu" or name in _HOST_BACKENDS else None


@dataclass
class _Start:
    launch: Callable[[], torch.futures.Future[Any]]
    then: Callable[[torch.futures.Future[Any]], None]
    failed: Callable[[BaseException], None]


class Lane:
    """Starts collectives on a group in the order of their tickets.

    Args:
        group: where they run: a process group, or a backend of one.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._tickets = 0
        self._next = 0
        self._waiting: dict[int, _Start | None] = {}

    def all_gather(self, own: Tensor, gathered: Tensor) -> torch.futures.Future[Any]:
        """Starts to gather every rank's ``own`` into ``gathered`` (ranks, ...): to be called from ``launch``."""
        future: torch.futures.Future[Any] = self._group.allgather([list(gathered.unbind(0))], [own]).get_future()
        return future

    def ticket(self) -> int:
        """A place in the order. Every ticket must be used once, by :meth:`start` or :meth:`skip`."""
        with self._lock:
            self._tickets += 1
            return self._tickets - 1

    def start(
        self,
        ticket: int,
        launch: Callable[[], torch.futures.Future[Any]],
        then: Callable[[torch.futures.Future[Any]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Calls ``launch`` when all earlier tickets have been used, and hands its future to ``then``.

        ``failed`` gets the exception if ``launch`` raises. ``then`` and ``failed`` run on the thread that used the
        last missing ticket.
        """
        self._use(ticket, _Start(launch, then, failed))

    def skip(self, ticket: int) -> None:
        """Gives a place up."""
        self._use(ticket, None)

    def _use(self, ticket: int, start: _Start | None) -> None:
        started: list[Callable[[], None]] = []
        with self._lock:
            self._waiting[ticket] = start
            while self._next in self._waiting:
                due = self._waiting.pop(self._next)
                self._next += 1
                if due is not None:
                    started.append(_launch(due))
        for go_on in started:
            go_on()


def _launch(start: _Start) -> Callable[[], None]:
    """Starts a collective; what is to be done next is returned, to be done outside the lock."""
    try:
        future = start.launch()
    except Exception as error:
        caught = error  # the name of an except clause ends with it
        return lambda: start.failed(caught)
    return lambda: start.then(future)


def lane_of(group: dist.ProcessGroup, device: torch.device) -> Lane | None:
    """The lane for the second collectives of exchanges on ``group``, or None where its backend cannot have one (MPI).

    On gloo the first call makes the twin, with the same ranks and the same timeout, which is a collective of its own:
    all ranks of the group must come here. The twin goes when the group goes.
    """
    backend = host_backend(group, device)
    if backend is not None and backend != "gloo":
        return None
    if backend is None:
        return Lane(group)
    with _making:
        lane = _lanes.get(group)
        if lane is None:
            lane = _lanes[group] = Lane(_gloo_twin(group))
        return lane


def _gloo_twin(group: dist.ProcessGroup) -> Any:
    """A gloo backend of its own over the group's store.

    ``new_group`` would not do: it wants all ranks of the job, or else it tells groups apart by a count of each rank's
    groups, which need not be the same on all ranks of this one.
    """
    store = dist.PrefixStore("zeropoint_second_collectives", group.get_group_store())  # type: ignore[attr-defined]
    return dist.ProcessGroupGloo(store, group.rank(), group.size(), _timeout(group))


def _timeout(group: dist.ProcessGroup) -> timedelta:
    """The group's timeout, which torch keeps in the backend's options; torch's default where it is not found."""
    try:
        timeout = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout
    return timeout if isinstance(timeout, timedelta) else dist.default_pg_timeout
