"""Hooks that let ``DistributedDataParallel`` send its gradients as 8-bit or 4-bit codes.

``quantized_allreduce_hook`` is the one to use; the two others have the names, the arguments and the protocol of
torch's own, and work on every backend. ``docs/ddp.md`` tells which one when.

DDP reads the annotations of a hook as objects, so this file does not postpone them.

May import: ``distributed.collectives``, ``distributed.lanes``.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # public, but not in its stubs
from torch.nn.parallel import DistributedDataParallel

from zeropoint.distributed.collectives import BlockFormat, gathered_mean, quantized_all_reduce
from zeropoint.distributed.lanes import require_group

__all__ = [
    "QuantizedAllReduceState",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
    "quantized_allreduce_hook",
    "register_hook",
]


def _gradients(bucket: GradBucket, who: str) -> Tensor:
    buffer: Tensor = bucket.buffer()
    if buffer.layout != torch.strided:
        raise TypeError(f"{who} sends dense gradients, got {buffer.layout}: make the embedding with sparse=False")
    return buffer


# --- the seed's two hooks -----------------------------------------------------------------------------------------


def quantization_pertensor_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[Tensor]:
    """Averages a bucket from 8-bit codes with one grid a rank, all gathered by all.

    Every rank gathers the others' scales and zero points, then their codes, and takes the mean of the values.
    A rank sends about ``(W - 1) * N`` bytes, so beyond 8 ranks more than an all-reduce of floats does:
    :func:`quantized_allreduce_hook` does not grow.

    Args:
        process_group: the ranks that take part; None is the default group.
        bucket: float gradients; their range is widened to include 0.

    Returns:
        A future of the mean, in the bucket's dtype and on its device, the same on all ranks to the bit, within half a
        step of the ranks' grids. A NaN or an infinity on any rank makes all of it NaN or infinite.

    Raises:
        TypeError, ValueError: ``process_group`` is none, or this rank is not in it; the gradients are sparse.

    Example:
        ``ddp_model.register_comm_hook(process_group, quantization_pertensor_hook)``
    """
    return gathered_mean(_gradients(bucket, "quantization_pertensor_hook"), process_group)


def quantization_perchannel_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket, bucket_size: int = 512
) -> torch.futures.Future[Tensor]:
    """Averages a bucket from 8-bit codes with one grid for every ``bucket_size`` elements, all gathered by all.

    In a large bucket, where gradients of different layers differ by orders of magnitude, many small grids resolve much
    more than one. Otherwise as :func:`quantization_pertensor_hook`.

    Args:
        process_group: the ranks that take part; None is the default group.
        bucket: float gradients.
        bucket_size: elements that share a grid. :func:`register_hook` sets it.

    Returns:
        A future of the mean, as from :func:`quantization_pertensor_hook`; a NaN or an infinity is kept within its
        ``bucket_size`` elements.

    Raises:
        TypeError, ValueError: naming the argument that does not fit.

    Example:
        ``ddp_model.register_comm_hook(process_group, quantization_perchannel_hook)``
    """
    return gathered_mean(_gradients(bucket, "quantization_perchannel_hook"), process_group, bucket_size)


# --- the hook that scales -----------------------------------------------------------------------------------------


class _Layout:
    """What a bucket holds: which parameters, and where they lie."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.identity = tuple(map(id, parameters))
        self.shapes = [list(p.shape) for p in parameters]

    def spans_1d(self) -> list[tuple[int, int]]:
        """Where parameters of one dimension or none lie, neighbours joined."""
        spans: list[tuple[int, int]] = []
        at = 0
        for shape in self.shapes:
            size = torch.Size(shape).numel()
            if len(shape) <= 1 and size:
                joined = spans.pop()[0] if spans and spans[-1][1] == at else at
                spans.append((joined, at + size))
            at += size
        return spans


class _Bucket:
    """What is kept for a bucket between steps."""

    def __init__(self, layout: _Layout, exempt_1d: bool, residual: Tensor | None) -> None:
        self.layout = layout
        self.exact = layout.spans_1d() if exempt_1d else []
        self.residual = residual


class QuantizedAllReduceState:
    """What :func:`quantized_allreduce_hook` needs and keeps.

    Args:
        process_group: the ranks that take part; None is the default group.
        bits: 8 or 4.
        block: elements that share a scale, a multiple of 32.
        error_feedback: keep what rounding lost, and add it to the next step's gradients: float32, once the size of
            the gradients. Worth it at 4 bits.
        stochastic_rounding: round up and down at random, without bias.
        exempt_1d: send gradients of one-dimensional parameters (biases, norms) as float32. They are few, and their
            magnitudes are not those of their neighbours.
        start_after: average so many steps with a plain all-reduce first.
        seed: of stochastic rounding; the same on all ranks.

    Raises:
        TypeError, ValueError: naming the argument that does not fit.
        RuntimeError: ``process_group`` is None and no default group was initialized.

    Note:
        With error feedback and a GradScaler, a residual is in units of the loss scale of its step; a scale that
        changes by 2 makes that one residual half or twice as large. Residuals of a step with NaN or infinities are
        dropped where they are not finite.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        bits: int = 8,
        block: int = 256,
        error_feedback: bool = False,
        stochastic_rounding: bool = False,
        exempt_1d: bool = True,
        start_after: int = 0,
        seed: int = 0,
    ) -> None:
        self.form = BlockFormat(bits, block)
        for name, value in (
            ("error_feedback", error_feedback),
            ("stochastic_rounding", stochastic_rounding),
            ("exempt_1d", exempt_1d),
        ):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}")
        for name, number in (("start_after", start_after), ("seed", seed)):
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"{name} must be an int, got {number!r}")
            if number < 0:
                raise ValueError(f"{name} must not be negative, got {number}")
        require_group(process_group, "QuantizedAllReduceState")
        self.process_group = process_group
        self.error_feedback = error_feedback
        self.stochastic_rounding = stochastic_rounding
        self.exempt_1d = exempt_1d
        self.start_after = start_after
        self.seed = seed
        self.steps = 0
        self._buckets: dict[int, _Bucket] = {}
        self._loaded: dict[int, dict[str, Any]] = {}

    @property
    def bits(self) -> int:
        """Bits a code."""
        return self.form.bits

    @property
    def block(self) -> int:
        """Elements that share a scale."""
        return self.form.block

    def __repr__(self) -> str:
        return (
            f"QuantizedAllReduceState(bits={self.bits}, block={self.block}, error_feedback={self.error_feedback},"
            f" stochastic_rounding={self.stochastic_rounding}, exempt_1d={self.exempt_1d},"
            f" start_after={self.start_after}, seed={self.seed}, steps={self.steps})"
        )

    def _bucket(self, bucket: GradBucket, buffer: Tensor) -> _Bucket:
        """What is kept for this bucket; when DDP has dealt its parameters out anew, the old residual is void."""
        layout = _Layout(bucket.parameters())
        kept = self._buckets.get(bucket.index())
        if kept is not None and kept.layout.identity == layout.identity:
            return kept
        residual = None
        if self.error_feedback:
            saved = self._loaded.get(bucket.index())
            if saved is not None and saved["shapes"] == layout.shapes:
                residual = self._loaded.pop(bucket.index())["residual"].to(buffer.device, torch.float32, copy=True)
            else:
                residual = torch.zeros(buffer.numel(), device=buffer.device)
        kept = self._buckets[bucket.index()] = _Bucket(layout, self.exempt_1d, residual)
        return kept

    def state_dict(self) -> dict[str, Any]:
        """Steps taken, and this rank's residuals: numbers, lists and tensors, so ``weights_only`` loads them.

        Every rank saves its own.
        """
        return {
            "steps": self.steps,
            "residuals": {
                index: {"shapes": kept.layout.shapes, "residual": kept.residual.detach().cpu().clone()}
                for index, kept in self._buckets.items()
                if kept.residual is not None
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from :meth:`state_dict`. A residual waits until a bucket of its number and layout comes.

        Raises:
            ValueError: it is not such a dict.
        """
        try:
            steps, residuals = int(state_dict["steps"]), dict(state_dict["residuals"])
            complete = all(isinstance(one["residual"], Tensor) and "shapes" in one for one in residuals.values())
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a state of QuantizedAllReduceState: {error!r}") from error
        if not complete:
            raise ValueError("not a state of QuantizedAllReduceState: a residual is not a tensor with its shapes")
        self.steps = steps
        self._buckets.clear()
        self._loaded = residuals

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: all but the process group, which belongs to a running job."""
        kept = {name: value for name, value in vars(self).items() if name not in ("process_group", "_buckets")}
        return {**kept, "process_group": None, "_buckets": {}, "_loaded": self.state_dict()["residuals"]}


def quantized_allreduce_hook(state: QuantizedAllReduceState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Averages a bucket with :func:`zeropoint.distributed.quantized_all_reduce`.

    A rank sends about ``2 * N * bits / 8`` bytes, however many ranks there are, in two collectives.

    Args:
        state: how, and what is kept between steps.
        bucket: float16, bfloat16, float32 or float64 gradients.

    Returns:
        A future of the bucket's own buffer, which then holds the mean, the same on all ranks to the bit. A NaN or an
        infinity on any rank makes its block NaN or infinite on all.

    Raises:
        TypeError: ``state`` is no :class:`QuantizedAllReduceState`, or the gradients are sparse.

    Example:
        ``ddp_model.register_comm_hook(QuantizedAllReduceState(bits=8), quantized_allreduce_hook)``
    """
    who = "quantized_allreduce_hook"
    if not isinstance(state, QuantizedAllReduceState):
        raise TypeError(f"{who} takes a QuantizedAllReduceState, got {type(state).__name__}")
    buffer = _gradients(bucket, who)
    step = state.steps
    if bucket.is_last():
        state.steps += 1
    if step < state.start_after:
        group = require_group(state.process_group, who)
        work = dist.all_reduce(buffer.div_(group.size()), group=group, async_op=True)
        averaged: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
        return averaged
    kept = state._bucket(bucket, buffer)
    future = quantized_all_reduce(
        buffer,
        dist.ReduceOp.AVG,
        state.process_group,
        bits=state.bits,
        block=state.block,
        seed=state.seed + (step << 32) + bucket.index() if state.stochastic_rounding else None,
        residual=kept.residual,
        exact=kept.exact,
        async_op=True,
    )
    assert future is not None
    return future


# --- registration -------------------------------------------------------------------------------------------------


def register_hook(model: Any, state: Any, hook: Callable[..., Any], **options: Any) -> None:
    """Registers one of this file's hooks after checking that everything fits, so that no mistake waits for a backward.

    ``model.register_comm_hook(state, hook)`` itself accepts any state.

    Args:
        model: the ``DistributedDataParallel`` module.
        state: a process group or None, or the :class:`QuantizedAllReduceState` of :func:`quantized_allreduce_hook`.
        hook: the hook.
        **options: ``bucket_size`` of :func:`quantization_perchannel_hook`.

    Raises:
        TypeError, ValueError: naming what does not fit; nothing is registered then.

    Example:
        ``register_hook(ddp_model, None, quantization_perchannel_hook, bucket_size=128)``
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"register_hook takes a DistributedDataParallel module, got {type(model).__name__}")
    if hook is quantized_allreduce_hook:
        if not isinstance(state, QuantizedAllReduceState):
            raise TypeError(f"quantized_allreduce_hook takes a QuantizedAllReduceState, got {type(state).__name__}")
    elif hook in (quantization_pertensor_hook, quantization_perchannel_hook):
        require_group(state, hook.__name__)
    else:
        raise ValueError(f"register_hook knows the hooks of this package, got {hook!r}")
    allowed = {"bucket_size"} if hook is quantization_perchannel_hook else set()
    for name, value in options.items():
        if name not in allowed:
            raise TypeError(f"{hook.__name__} takes no option {name!r}")
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.is_floating_point():
            raise TypeError(f"{hook.__name__} takes floating-point gradients, parameter {name} is {parameter.dtype}")
    model.register_comm_hook(state, _bind(hook, options) if options else hook)


def _bind(hook: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """The hook with its options set; DDP reads a name and a signature, which a ``functools.partial`` does not have."""

    @wraps(hook)
    def bound(state: Any, bucket: GradBucket) -> Any:
        return hook(state, bucket, **options)

    return bound
