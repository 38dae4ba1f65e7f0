"""Collectives that send codes instead of floats.

Three exchanges, all over flat gradients of any floating dtype, all with the same result on every rank to the bit:

* :func:`quantized_all_reduce`: an all-to-all of packed blocks, a float32 sum of one share on every rank, an all-gather
  of the packed sums. Bytes sent by a rank do not grow with the number of ranks.
* :func:`quantized_reduce_scatter`: its first half.
* :func:`gathered_mean`: an all-gather of scales and zero points, an all-gather of codes, and the mean of them all on
  every rank.

:func:`all_reduce_range` is the exact collective under observers that share their ranges.

May import: ``grid``, ``ops.distributed``, ``distributed.lanes``.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from zeropoint import grid
from zeropoint.distributed.lanes import Lane, host_backend, lane_of, require_group
from zeropoint.ops.distributed import block_bytes, smallest_scale

__all__ = [
    "BlockFormat",
    "all_reduce_range",
    "gathered_mean",
    "quantized_all_reduce",
    "quantized_reduce_scatter",
]

_SMALLEST_BLOCK, _LARGEST_BLOCK = 32, 1 << 16


@dataclass(frozen=True)
class BlockFormat:
    """How a flat tensor becomes bytes: codes around zero, and one float32 scale a block, in the same buffer.

    Args:
        bits: 8 or 4.
        block: elements that share a scale: a multiple of 32 up to 65536. A small one follows outliers more closely
            and sends more scales: ``bits / 8 + 4 / block`` bytes an element.

    Raises:
        TypeError, ValueError: naming the argument that does not fit.
    """

    bits: int = 8
    block: int = 256

    def __post_init__(self) -> None:
        for name in ("bits", "block"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r}")
        if self.bits not in (4, 8):
            raise ValueError(f"bits must be 8 or 4, got {self.bits}")
        if self.block % _SMALLEST_BLOCK or not _SMALLEST_BLOCK <= self.block <= _LARGEST_BLOCK:
            raise ValueError(f"block must be a multiple of {_SMALLEST_BLOCK} up to {_LARGEST_BLOCK}, got {self.block}")

    def pack(self, x: Tensor, chunks: int, seed: int | None = None) -> Tensor:
        """A flat float32 tensor as uint8 (chunks, bytes): see ``ops.distributed``."""
        packed: Tensor = torch.ops.zeropoint.block_pack.default(x, chunks, self.bits, self.block, seed)
        return packed

    def sum(self, data: Tensor) -> Tensor:
        """The values of packed rows, added in order: float32, one row long."""
        total: Tensor = torch.ops.zeropoint.block_sum.default(data, self.bits, self.block)
        return total

    def unpack(self, data: Tensor, length: int) -> Tensor:
        """The first ``length`` values of packed rows, one row after the other: float32."""
        values: Tensor = torch.ops.zeropoint.block_unpack.default(data, self.bits, self.block, length)
        return values

    def elements(self, data: Tensor) -> int:
        """How many elements a packed row holds."""
        return data.shape[1] // block_bytes(self.bits, self.block) * self.block


# --- checks and small parts ---------------------------------------------------------------------------------------


def _check_tensor(tensor: Any, who: str) -> None:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        seen = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{who} takes a floating-point tensor, got {seen}")


def _is_mean(op: Any, who: str) -> bool:
    if op == dist.ReduceOp.AVG:
        return True
    if op == dist.ReduceOp.SUM:
        return False
    raise ValueError(f"{who} knows ReduceOp.SUM and ReduceOp.AVG, got {op}")


def _seed(seed: int | None, rank: int, stage: int) -> int | None:
    """32 bits that differ between ranks and between the two times that a value is rounded; None stays None."""
    return None if seed is None else random.Random((seed << 32) + 2 * rank + stage).getrandbits(32)


def _finite_or_zero(x: Tensor) -> Tensor:
    return x.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _done(value: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(value)
    return future


def _devices(device: torch.device) -> list[torch.device] | None:
    return None if device.type == "cpu" else [device]


def _all_to_all(send: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    received = torch.empty_like(send)
    work = dist.all_to_all_single(received, send, group=group, async_op=True)
    return received, work


def _all_gather(own: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    gathered = own.new_empty((group.size(), *own.shape))
    # The list form, into views of one tensor, is the one that every backend and every version of torch has.
    work = dist.all_gather(list(gathered.unbind(0)), own, group=group, async_op=True)
    return gathered, work


# --- all-reduce and reduce-scatter of packed blocks ---------------------------------------------------------------


class _AllReduce:
    """The three local steps between and around the two collectives of a quantized all-reduce."""

    def __init__(
        self,
        tensor: Tensor,
        mean: bool,
        group: dist.ProcessGroup,
        form: BlockFormat,
        seed: int | None,
        residual: Tensor | None,
        exact: Sequence[tuple[int, int]],
    ) -> None:
        self.tensor, self.mean, self.form, self.residual, self.exact = tensor, mean, form, residual, exact
        self.ranks, self.rank = group.size(), group.rank()
        self.seed = seed
        self.packed_bytes = 0
        self.chunk = 0

    def message(self) -> Tensor:
        """uint8 (ranks, bytes): for every rank its share of this rank's values, packed, then exact ones."""
        values = self.tensor.reshape(-1).to(torch.float32)
        plain = [values[start:stop] for start, stop in self.exact]
        spans = torch.cat(plain) if plain else None
        if self.residual is not None:
            values = values + self.residual
        elif spans is not None:
            values = values.clone()
        for start, stop in self.exact:
            values[start:stop] = 0.0
        packed = self.form.pack(values, self.ranks, _seed(self.seed, self.rank, 0))
        self.packed_bytes, self.chunk = packed.shape[1], self.form.elements(packed)
        if self.residual is not None:
            lost = values.sub_(self.form.unpack(packed, values.numel()))
            self.residual.copy_(_finite_or_zero(lost))
        if spans is None:
            return packed
        share = -(-spans.numel() // self.ranks)
        spans = torch.nn.functional.pad(spans, (0, share * self.ranks - spans.numel()))
        return torch.cat([packed, spans.view(self.ranks, share).view(torch.uint8)], dim=1)

    def reduce(self, received: Tensor) -> Tensor:
        """uint8 (bytes): this rank's share of the result, packed, from what all ranks sent for it."""
        total = self.form.sum(received[:, : self.packed_bytes])
        if self.mean:
            total /= self.ranks
        packed = self.form.pack(total, 1, _seed(self.seed, self.rank, 1))
        if self.residual is not None:
            self._keep_lost(total, packed)
        if not self.exact:
            return packed[0]
        spans = received[:, self.packed_bytes :].contiguous().view(torch.float32).sum(dim=0)
        if self.mean:
            spans /= self.ranks
        return torch.cat([packed[0], spans.view(torch.uint8)])

    def _keep_lost(self, total: Tensor, packed: Tensor) -> None:
        """What rounding the result lost goes into this rank's residual, so that the next result makes up for it."""
        assert self.residual is not None
        start = self.rank * self.chunk
        own = self.residual[start : start + self.chunk]
        lost = _finite_or_zero(total - self.form.unpack(packed, total.numel()))
        own += lost[: own.numel()] * (self.ranks if self.mean else 1)

    def finish(self, gathered: Tensor) -> Tensor:
        """Writes the result into the tensor, and returns it."""
        values = self.form.unpack(gathered[:, : self.packed_bytes], self.tensor.numel())
        if self.exact:
            spans = gathered[:, self.packed_bytes :].contiguous().view(torch.float32).view(-1)
            at = 0
            for start, stop in self.exact:
                values[start:stop] = spans[at : at + stop - start]
                at += stop - start
        return self.tensor.copy_(values.view(self.tensor.shape))


def quantized_all_reduce(
    tensor: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    *,
    bits: int = 8,
    block: int = 256,
    seed: int | None = None,
    residual: Tensor | None = None,
    exact: Sequence[tuple[int, int]] = (),
    async_op: bool = False,
) -> Future[Tensor] | None:
    """Sums or averages a tensor over the ranks in place, sending codes instead of floats.

    Every value is rounded twice: by its own rank, and, summed, by the rank that sums it. An error is at most half a
    step of each grid. With W ranks and N elements a rank sends ``2 * (W - 1) / W * N * (bits / 8 + 4 / block)`` bytes.
    The result is the same on all ranks to the bit; where any rank has a NaN or an infinity it is NaN or infinite, for
    the rest of that block too.

    Args:
        tensor: float tensor of any shape and dtype, contiguous or not; summed in float32.
        op: ``ReduceOp.SUM`` or ``ReduceOp.AVG``.
        group: the ranks that take part; None is the default group.
        bits, block: see :class:`BlockFormat`.
        seed: rounds up and down at random, as often as it takes for the error to have no bias; the same number on all
            ranks, another one for every call. None rounds to nearest.
        residual: float32, as long as the tensor: is added before rounding, and then holds what rounding lost, for the
            next call (error feedback). Where that is not finite it is set to 0.
        exact: spans ``(start, stop)`` of the flat tensor that are sent as float32 and not rounded at all, in the same
            two messages.
        async_op: return at once (on MPI, when all is done). The tensor must be left alone until the future is done.

    Returns:
        None, or with ``async_op`` a future of ``tensor``.

    Raises:
        TypeError, ValueError: naming the argument that does not fit, before anything is sent.
        RuntimeError: the backend's, when a rank is lost.
    """
    who = "quantized_all_reduce"
    _check_tensor(tensor, who)
    mean = _is_mean(op, who)
    form = BlockFormat(bits, block)
    group = require_group(group, who)
    _check_residual(residual, tensor, who)
    _check_spans(exact, tensor.numel(), who)
    if tensor.numel() == 0 or group.size() == 1:
        return _done(tensor) if async_op else None
    exchange = _AllReduce(tensor.detach(), mean, group, form, seed, residual, exact)
    lane = lane_of(group, tensor.device) if async_op else None
    if lane is not None:
        return _in_background(exchange, group, lane, tensor.device)
    hop = _Hop.of(group, tensor.device)
    received, work = _all_to_all(hop.out(exchange.message()), group)
    work.wait()
    gathered, work = _all_gather(hop.out(exchange.reduce(hop.back(received))), group)
    work.wait()
    result = exchange.finish(hop.back(gathered))
    return _done(result) if async_op else None


def quantized_reduce_scatter(
    output: Tensor,
    input: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    *,
    bits: int = 8,
    block: int = 256,
    seed: int | None = None,
) -> None:
    """Sums or averages over the ranks, and leaves each rank its share: the first half of the all-reduce.

    Args:
        output: float tensor, this rank's share.
        input: float tensor of as many shares, one after the other, as there are ranks.
        op, group, bits, block, seed: as in :func:`quantized_all_reduce`.

    Raises:
        TypeError, ValueError: naming the argument that does not fit, before anything is sent.
    """
    who = "quantized_reduce_scatter"
    _check_tensor(input, who)
    _check_tensor(output, who)
    mean = _is_mean(op, who)
    form = BlockFormat(bits, block)
    group = require_group(group, who)
    ranks, share = group.size(), output.numel()
    if input.numel() != ranks * share:
        raise ValueError(
            f"{who}: {ranks} ranks with {share} elements each need an input of {ranks * share} elements,"
            f" got {input.numel()}"
        )
    if share == 0:
        return
    if ranks == 1:
        output.copy_(input.view(output.shape))
        return
    values = input.detach().reshape(ranks, share).to(torch.float32)
    # Every share fills its own blocks, so that a chunk of the packed buffer is a share.
    values = torch.nn.functional.pad(values, (0, -share % form.block))
    packed = form.pack(values.view(-1), ranks, _seed(seed, group.rank(), 0))
    hop = _Hop.of(group, input.device)
    received, work = _all_to_all(hop.out(packed), group)
    work.wait()
    total = form.sum(hop.back(received))[:share]
    if mean:
        total /= ranks
    output.copy_(total.view(output.shape))


def _check_residual(residual: Tensor | None, tensor: Tensor, who: str) -> None:
    if residual is None:
        return
    if not isinstance(residual, Tensor) or residual.dtype != torch.float32:
        seen = residual.dtype if isinstance(residual, Tensor) else type(residual).__name__
        raise TypeError(f"{who}: residual must be a float32 tensor, got {seen}")
    if residual.shape != (tensor.numel(),) or residual.device != tensor.device:
        raise ValueError(
            f"{who}: residual must be 1-D with {tensor.numel()} elements on {tensor.device}, got shape"
            f" {tuple(residual.shape)} on {residual.device}"
        )


def _check_spans(exact: Sequence[tuple[int, int]], length: int, who: str) -> None:
    end = 0
    for start, stop in exact:
        if not end <= start < stop <= length:
            raise ValueError(
                f"{who}: exact must hold rising, separate spans (start, stop) inside {length} elements,"
                f" got ({start}, {stop}) after {end}"
            )
        end = stop


# --- the two ways to run an exchange ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Hop:
    """Moves messages of a device tensor through host memory where the backend needs that (gloo with CUDA tensors)."""

    device: torch.device
    staged: bool

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device) -> _Hop:
        return cls(device, device.type != "cpu" and host_backend(group, device) is not None)

    def out(self, message: Tensor) -> Tensor:
        return message.cpu() if self.staged else message

    def back(self, message: Tensor) -> Tensor:
        return message.to(self.device) if self.staged else message


class _Outcome:
    """A future that is completed by hand, with a tensor or with an error.

    An error is raised in a callback: so it also reaches waiters in C++, as DDP is one, which a plain
    ``Future.set_exception`` does not.
    """

    def __init__(self, device: torch.device) -> None:
        self._gate: Future[Tensor | None] = Future(devices=_devices(device))  # type: ignore[arg-type]
        self._error: BaseException | None = None
        self.future: Future[Tensor] = self._gate.then(self._open)

    def _open(self, gate: Future[Tensor | None]) -> Tensor:
        if self._error is not None:
            raise self._error
        value = gate.value()
        assert value is not None
        return value

    def succeed(self, value: Tensor) -> None:
        self._gate.set_result(value)

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._gate.set_result(None)


def _when_done(future: Future[Any], step: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
    """Calls ``step`` when a collective is done, or ``failed`` with its error, or with ``step``'s."""

    def run(done: Future[Any]) -> None:
        try:
            done.value()
            step()
        except Exception as error:
            failed(error)

    future.add_done_callback(run)


def _in_background(exchange: _AllReduce, group: dist.ProcessGroup, lane: Lane, device: torch.device) -> Future[Tensor]:
    hop = _Hop.of(group, device)
    outcome = _Outcome(device)
    message = hop.out(exchange.message())
    ticket = lane.ticket()

    def give_up(error: BaseException) -> None:
        lane.skip(ticket)
        outcome.fail(error)

    def gather() -> None:
        share = hop.out(exchange.reduce(_used_here(hop.back(received))))
        gathered = share.new_empty((group.size(), *share.shape))

        def launch() -> Future[Any]:
            return lane.all_gather(share, gathered)

        def finish() -> None:
            outcome.succeed(exchange.finish(_used_here(hop.back(gathered))))

        lane.start(ticket, launch, lambda future: _when_done(future, finish, outcome.fail), outcome.fail)

    try:
        received, work = _all_to_all(message, group)
    except Exception:
        lane.skip(ticket)
        raise
    _when_done(work.get_future(), gather, give_up)
    return outcome.future


def _used_here(tensor: Tensor) -> Tensor:
    """Tells CUDA's allocator that the callback's stream uses memory of another stream."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


# --- the mean of gathered codes -----------------------------------------------------------------------------------


def gathered_mean(tensor: Tensor, group: dist.ProcessGroup | None = None, row: int | None = None) -> Future[Tensor]:
    """The mean of the ranks' tensors from 8-bit codes, all gathered by every rank.

    Each rank sends its scales and zero points, then its codes, to all others: ``(W - 1) * N`` bytes and a little, which
    grows with the number of ranks. Its error is at most half a step of each rank's grid. The result is the same on all
    ranks to the bit; a NaN or an infinity on any rank makes its whole row NaN or infinite on all.

    Args:
        tensor: float tensor of any shape and dtype; averaged in float32. It is read only.
        group: the ranks that take part; None is the default group.
        row: so many elements in a row share a grid; None is one grid for the whole tensor.

    Returns:
        A future of a new tensor of the same shape, dtype and device.

    Raises:
        TypeError, ValueError: naming the argument that does not fit, before anything is sent.
    """
    who = "gathered_mean"
    _check_tensor(tensor, who)
    group = require_group(group, who)
    if row is not None:
        try:
            row = operator.index(row)
        except TypeError:
            raise TypeError(f"{who}: row must be an int or None, got {row!r}") from None
        if row < 1:
            raise ValueError(f"{who}: row must be at least 1, got {row}")
    length = tensor.numel()
    if length == 0:
        return _done(tensor.clone())
    values = tensor.detach().reshape(-1).to(torch.float32)
    row = min(row or length, length)
    low, high = torch.ops.zeropoint.row_range.default(values, row)
    scale, zero_point = grid.affine_qparams(low, high, 0, 255, smallest_scale(values))
    own = torch.stack([scale, zero_point.to(torch.float32)])
    hop = _Hop.of(group, tensor.device)
    # A rank's codes need only its own grid: both collectives start here, on the caller's thread, in the same order on
    # every rank, and the second one waits for nothing.
    qparams, first = _all_gather(hop.out(own), group)
    codes, second = _all_gather(hop.out(torch.ops.zeropoint.row_quantize.default(values, own, row)), group)
    outcome = _Outcome(tensor.device)

    def finish() -> None:
        there, grids = _used_here(hop.back(codes)), _used_here(hop.back(qparams))
        mean = torch.ops.zeropoint.row_sum.default(there, grids, length).div_(group.size())
        outcome.succeed(mean.view(tensor.shape).to(tensor.dtype))

    both = torch.futures.collect_all([first.get_future(), second.get_future()])
    _when_done(both, finish, outcome.fail)
    return outcome.future


# --- ranges -------------------------------------------------------------------------------------------------------


def all_reduce_range(min_val: Tensor, max_val: Tensor, group: dist.ProcessGroup | None = None) -> tuple[Tensor, Tensor]:
    """The smallest minimum and the largest maximum over the ranks, exactly, in one collective.

    Args:
        min_val, max_val: float tensors of one shape, the same on all ranks; ``(inf, -inf)`` stands for nothing seen.
        group: the ranks that take part; None is the default group.

    Returns:
        New tensors of the same shape.

    Raises:
        TypeError, ValueError: naming what does not fit.
    """
    who = "all_reduce_range"
    for value in (min_val, max_val):
        _check_tensor(value, who)
    if min_val.shape != max_val.shape:
        raise ValueError(f"{who}: shapes {tuple(min_val.shape)} and {tuple(max_val.shape)} differ")
    group = require_group(group, who)
    ends = torch.stack([-min_val.detach(), max_val.detach()])
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    return -ends[0], ends[1]
