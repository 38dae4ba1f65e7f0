"""What runs on the ranks of ``test_exchanges`` and ``test_ddp_hooks``."""

from __future__ import annotations

import io
import pickle
import random
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import zeropoint.distributed as zd
from zeropoint.distributed import collectives, lanes
from zeropoint.ops import distributed as wire

AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM


class Bucket:
    """A stand-in for DDP's bucket."""

    def __init__(
        self, buffer: Tensor, parameters: list[Tensor] | None = None, index: int = 0, last: bool = True
    ) -> None:
        self._buffer, self._index, self._last = buffer, index, last
        self._parameters = [buffer[None]] if parameters is None else parameters

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last


def of_all(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's tensor, stacked."""
    gathered = torch.empty(group.size(), *own.shape, dtype=own.dtype)
    dist.all_gather(list(gathered.unbind(0)), own.contiguous(), group=group)
    return gathered


def same_everywhere(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether all ranks hold the same bits."""
    gathered = of_all(tensor.contiguous().view(-1).view(torch.uint8), group)
    return bool((gathered == gathered[0]).all())


def row_steps(x: Tensor, row: int) -> Tensor:
    """The step of each element's grid, in float64: the range, with 0 in it, in 255 parts."""
    low, high = wire.row_range_reference(x.float(), row)
    return ((high.double() - low.double()) / 255).repeat_interleave(row)[: x.numel()]


def block_steps(x: Tensor, chunks: int, bits: int, block: int) -> Tensor:
    count = wire.blocks_per_chunk(x.numel(), chunks, block) * chunks
    padded = torch.nn.functional.pad(x.float(), (0, count * block - x.numel())).view(-1, block)
    return (padded.abs().amax(dim=1).double() / (2 ** (bits - 1) - 1)).repeat_interleave(block)[: x.numel()]


def within(error: Tensor, bound: Tensor, mean: Tensor, dtype: torch.dtype) -> bool:
    """``error`` against ``bound``, give or take the rounding of the result's dtype and of float32 sums."""
    slack = mean.abs() * (torch.finfo(dtype).eps + 1e-6) + 1e-6 * bound + torch.finfo(dtype).tiny
    return bool((error <= bound + slack).all())


# --- plain functions ----------------------------------------------------------------------------------------------


def seed_hooks_are_within_half_a_step(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    for length in (1, 511, 512, 513, 1024, 1_000_000):
        x = (torch.randn(length) * 10.0 ** torch.linspace(-4, 0, length) + 0.1 * group.rank()).to(dtype)
        kept = x.clone()
        mean = of_all(x, group).double().mean(dim=0)
        for hook, row in ((zd.quantization_pertensor_hook, length), (zd.quantization_perchannel_hook, 512)):
            got = hook(group, Bucket(x)).wait()
            assert got.dtype == dtype
            assert got.shape == x.shape
            assert torch.equal(x, kept)
            assert same_everywhere(got, group), (hook.__name__, length)
            bound = of_all(row_steps(x, row), group).mean(dim=0) / 2
            assert within((got.double() - mean).abs(), bound, mean, dtype), (hook.__name__, length)


def all_reduce_is_within_two_half_steps(group: dist.ProcessGroup, dtype: torch.dtype, bits: int) -> None:
    for length in (1, 511, 512, 513, 1024, 100_000):
        x = (torch.randn(length) + 0.1 * group.rank()).to(dtype)
        mean = of_all(x, group).double().mean(dim=0)
        bound = of_all(block_steps(x, group.size(), bits, 256), group).mean(dim=0) / 2
        rounded_sum = (mean.abs() + bound).float()
        bound = bound + block_steps(rounded_sum, group.size(), bits, 256) / 2
        for asynchronous in (False, True):
            got = x.clone()
            future = zd.quantized_all_reduce(got, AVG, group, bits=bits, async_op=asynchronous)
            if future is not None:
                assert future.wait() is not None
            assert same_everywhere(got, group), length
            assert within((got.double() - mean).abs(), bound, mean, dtype), length
        total = x.clone()
        zd.quantized_all_reduce(total, SUM, group, bits=bits)
        assert within((total.double() - mean * group.size()).abs(), bound * group.size(), mean * group.size(), dtype)


def error_on_mixed_magnitudes(group: dist.ProcessGroup, length: int) -> tuple[float, float]:
    """Root mean square error of the per-tensor and of the per-channel hook."""
    x = torch.randn(length) * (10.0 ** (torch.arange(length) // (length // 6) - 5.0))
    mean = of_all(x, group).double().mean(dim=0)
    errors = [
        (hook(group, Bucket(x)).wait().double() - mean).square().mean().sqrt().item()
        for hook in (zd.quantization_pertensor_hook, zd.quantization_perchannel_hook)
    ]
    return errors[0], errors[1]


def bytes_sent(group: dist.ProcessGroup, length: int, bits: int) -> int:
    """Bytes that this rank sends to others in one all-reduce."""
    sent = []
    plain, gather = dist.all_to_all_single, lanes.Lane.all_gather

    def all_to_all(received: Tensor, send: Tensor, **how: Any) -> Any:
        sent.append(send.numel() * (group.size() - 1) // group.size())
        return plain(received, send, **how)

    def all_gather(lane: lanes.Lane, own: Tensor, gathered: Tensor) -> Any:
        sent.append(own.numel() * (group.size() - 1))
        return gather(lane, own, gathered)

    with (
        mock.patch.object(dist, "all_to_all_single", all_to_all),
        mock.patch.object(lanes.Lane, "all_gather", all_gather),
    ):
        future = zd.quantized_all_reduce(torch.randn(length), AVG, group, bits=bits, async_op=True)
        assert future is not None
        future.wait()
    assert len(sent) == (2 if group.size() > 1 else 0)
    return sum(sent)


def what_is_not_finite_reaches_all(group: dist.ProcessGroup, bad: float) -> None:
    x = torch.randn(5000)
    if group.rank() == group.size() - 1:
        x[1234] = bad
    for hook in (zd.quantization_pertensor_hook, zd.quantization_perchannel_hook):
        assert not hook(group, Bucket(x)).wait()[1234].isfinite()
    assert zd.quantization_perchannel_hook(group, Bucket(x)).wait()[:1024].isfinite().all()
    for bits in (8, 4):
        got = x.clone()
        zd.quantized_all_reduce(got, AVG, group, bits=bits)
        assert not got[1234].isfinite()
        assert got[:1024].isfinite().all()
        assert same_everywhere(got, group)


def feedback_makes_up_for_rounding(group: dist.ProcessGroup, mean: bool) -> tuple[float, float]:
    """Largest error of the average of 40 results with and without error feedback, in steps of 4 bits."""
    x = torch.randn(3000)
    want = of_all(x, group).double().sum(dim=0) / (group.size() if mean else 1)
    step = want.abs().max().item() / 7
    errors = []
    for residual in (torch.zeros(3000), None):
        total = torch.zeros(3000, dtype=torch.float64)
        for _ in range(40):
            got = x.clone()
            zd.quantized_all_reduce(got, AVG if mean else SUM, group, bits=4, residual=residual)
            total += got
        errors.append((total / 40 - want).abs().max().item() / step)
    return errors[0], errors[1]


def a_residual_survives_infinities(group: dist.ProcessGroup) -> None:
    residual = torch.zeros(600)
    x = torch.randn(600)
    x[3] = float("inf")
    zd.quantized_all_reduce(x, AVG, group, bits=4, residual=residual)
    assert not x.isfinite().all()
    assert residual.isfinite().all()
    assert residual.abs().sum() > 0


def exact_spans_are_exact(group: dist.ProcessGroup) -> None:
    x = torch.randn(4001) * 10.0 ** torch.randint(-3, 3, (4001,))
    want = of_all(x, group)
    exact = [(0, 3), (100, 101), (3999, 4001)]
    for asynchronous in (False, True):
        got = x.clone()
        future = zd.quantized_all_reduce(got, AVG, group, exact=exact, async_op=asynchronous)
        if future is not None:
            future.wait()
        assert same_everywhere(got, group)
        for start, stop in exact:
            assert torch.allclose(got[start:stop], want.mean(dim=0)[start:stop], rtol=1e-6, atol=0)


def odd_tensors(group: dist.ProcessGroup) -> None:
    for x in (
        torch.randn(7, 5).t(),
        torch.randn(6, 8)[:, ::2],
        torch.randn(()),
        torch.randn(3, 3, dtype=torch.float64),
        torch.randn(0),
    ):
        want = of_all(x, group).mean(dim=0)
        got = x.clone(memory_format=torch.preserve_format)
        zd.quantized_all_reduce(got, AVG, group)
        assert got.stride() == x.stride() or x.numel() <= 1 or x.shape == (6, 4)
        assert torch.allclose(got, want, atol=0.05)
        averaged = zd.gathered_mean(x, group).wait()
        assert averaged.dtype == x.dtype
        assert averaged.shape == x.shape
        assert torch.allclose(averaged, want, atol=0.05)


def order_does_not_matter(group: dist.ProcessGroup) -> None:
    """Second collectives become ready in another order on every rank, and still match."""
    plain = collectives.BlockFormat.sum
    jitter = random.Random(group.rank())

    def late(form: collectives.BlockFormat, data: Tensor) -> Tensor:
        time.sleep(jitter.random() * 0.01)
        return plain(form, data)

    tensors = [torch.full((100 + 37 * i,), float(i + group.rank())) for i in range(24)]
    with mock.patch.object(collectives.BlockFormat, "sum", late):
        futures = [zd.quantized_all_reduce(x, SUM, group, async_op=True) for x in tensors]
        for future in futures if group.rank() % 2 else reversed(futures):
            assert future is not None
            future.wait()
    ranks = group.size()
    for i, x in enumerate(tensors):
        want = float(ranks * i + ranks * (ranks - 1) // 2)
        assert torch.allclose(x, torch.full_like(x, want), rtol=1e-5)


def other_backends(group: dist.ProcessGroup) -> None:
    """The ways of NCCL, whose second collective runs on the group itself, and of MPI, which has no second one."""
    x = torch.randn(3000)
    want = x.clone()
    zd.quantized_all_reduce(want, AVG, group)
    for lane in (lanes.Lane(group), None):
        got = x.clone()
        with mock.patch.object(collectives, "lane_of", lambda *_, lane=lane: lane):
            future = zd.quantized_all_reduce(got, AVG, group, async_op=True)
            assert future is not None
            assert torch.equal(future.wait(), want)


def stochastic_rounding_differs_between_ranks(group: dist.ProcessGroup) -> None:
    x = torch.full((64,), 0.3)
    x[0] = 1.0
    got = [x.clone() for _ in range(3)]
    for one, seed in zip(got, (5, 5, 6), strict=True):
        zd.quantized_all_reduce(one, AVG, group, bits=4, seed=seed)
    assert torch.equal(got[0], got[1])
    assert not torch.equal(got[0], got[2])
    assert same_everywhere(got[0], group)
    # 0.3 lies between 2/7 and 3/7: if all ranks drew alike, their mean would be one of the two.
    assert len(got[0][1:].unique()) > 1


def reduce_scatter(group: dist.ProcessGroup, bits: int) -> None:
    share = 1001
    x = torch.randn(group.size() * share)
    own = slice(group.rank() * share, (group.rank() + 1) * share)
    every = of_all(x, group)
    bound = of_all(x.abs(), group).amax() / (2 ** (bits - 1) - 1) / 2
    for op, want in ((AVG, every.mean(dim=0)[own]), (SUM, every.sum(dim=0)[own])):
        got = torch.empty(share)
        zd.quantized_reduce_scatter(got, x, op, group, bits=bits)
        assert (got - want).abs().max() <= bound * (1 if op == AVG else group.size()) * 1.001


def ranges(group: dist.ProcessGroup) -> None:
    rank, ranks = group.rank(), group.size()
    low, high = torch.tensor([-1.0 - rank, float("inf")]), torch.tensor([float(rank), float("-inf")])
    all_low, all_high = zd.all_reduce_range(low, high, group)
    assert all_low.tolist() == [-float(ranks), float("inf")]
    assert all_high.tolist() == [ranks - 1.0, float("-inf")]
    assert low.tolist() == [-1.0 - rank, float("inf")]


# --- hooks in DDP -------------------------------------------------------------------------------------------------

HOOKS: dict[str, Callable[[dist.ProcessGroup], tuple[Any, Any]]] = {
    "pertensor": lambda group: (group, zd.quantization_pertensor_hook),
    "perchannel": lambda group: (group, zd.quantization_perchannel_hook),
    "allreduce-8": lambda group: (zd.QuantizedAllReduceState(group), zd.quantized_allreduce_hook),
    "allreduce-4-feedback": lambda group: (
        zd.QuantizedAllReduceState(group, bits=4, error_feedback=True),
        zd.quantized_allreduce_hook,
    ),
    "allreduce-8-stochastic": lambda group: (
        zd.QuantizedAllReduceState(group, stochastic_rounding=True),
        zd.quantized_allreduce_hook,
    ),
}


class Net(nn.Module):
    """Linear layers and a norm; a layer that is used only when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second, self.spare = (
            nn.Linear(64, 128),
            nn.LayerNorm(128),
            nn.Linear(128, 32),
            nn.Linear(32, 32),
        )

    def forward(self, x: Tensor, spare: bool = True) -> Tensor:
        x = self.second(torch.relu(self.norm(self.first(x))))
        return self.spare(x) if spare else x


def ddp(group: dist.ProcessGroup, hook: str | None, dtype: torch.dtype = torch.float32, **how: Any) -> Any:
    """A replica of one network, in several buckets."""
    torch.manual_seed(7)
    model = DistributedDataParallel(Net().to(dtype), process_group=group, bucket_cap_mb=0.02, **how)
    if hook is not None:
        model.register_comm_hook(*HOOKS[hook](group))
    return model


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.detach().float().view(-1) for p in model.parameters() if p.grad is not None])


def data(group: dist.ProcessGroup, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * step + group.rank())).to(dtype)


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def a_hook_averages_gradients(group: dist.ProcessGroup, hook: str, dtype: torch.dtype) -> float:
    """Three steps, the buckets are dealt out anew after the first; the largest relative error of a gradient."""
    plain, hooked = ddp(group, None, dtype), ddp(group, hook, dtype)
    worst = 0.0
    for step in range(3):
        for model in (plain, hooked):
            model.zero_grad()
            model(data(group, step, dtype)).float().square().mean().backward()
        assert same_everywhere(gradients(hooked), group)
        assert all(p.grad is not None and p.grad.dtype == dtype for p in hooked.parameters())
        worst = max(worst, relative_error(gradients(hooked), gradients(plain)))
    return worst


def bucket_views(group: dist.ProcessGroup, hook: str) -> float:
    """Gradients that are views of the buckets, and a graph that is promised to stay."""
    how = {"gradient_as_bucket_view": True, "static_graph": True}
    plain, hooked = ddp(group, None, **how), ddp(group, hook, **how)
    for step in range(3):
        for model in (plain, hooked):
            model.zero_grad()
            model(data(group, step)).square().mean().backward()
        assert same_everywhere(gradients(hooked), group)
    return relative_error(gradients(hooked), gradients(plain))


def accumulation(group: dist.ProcessGroup, hook: str) -> float:
    plain, hooked = ddp(group, None), ddp(group, hook)
    for _ in range(2):
        for model in (plain, hooked):
            model.zero_grad()
            with model.no_sync():
                model(data(group, 0)).square().mean().backward()
                model(data(group, 1)).square().mean().backward()
            model(data(group, 2)).square().mean().backward()
    assert same_everywhere(gradients(hooked), group)
    return relative_error(gradients(hooked), gradients(plain))


def unused_parameters(group: dist.ProcessGroup, hook: str) -> float:
    """The spare layer is used by rank 0 only, and in the last step by nobody."""
    models = [ddp(group, name, find_unused_parameters=True) for name in (None, hook)]
    worst = 0.0
    for step in range(3):
        for model in models:
            model.zero_grad()
            model(data(group, step), spare=step < 2 and group.rank() == 0).square().mean().backward()
        assert same_everywhere(gradients(models[1]), group)
        worst = max(worst, relative_error(gradients(models[1]), gradients(models[0])))
    return worst


def uneven_inputs(group: dist.ProcessGroup, hook: str) -> int:
    """Rank r has r + 2 batches; all ranks end with the same weights."""
    model = ddp(group, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    steps = 0
    with Join([model]):
        for step in range(group.rank() + 2):
            optimizer.zero_grad()
            model(data(group, step)).square().mean().backward()
            optimizer.step()
            steps += 1
    weights = torch.cat([p.detach().view(-1) for p in model.parameters()])
    assert weights.isfinite().all()
    assert same_everywhere(weights, group)
    return steps


def plain_steps_first(group: dist.ProcessGroup) -> None:
    plain, hooked = ddp(group, None), ddp(group, None)
    hooked.register_comm_hook(zd.QuantizedAllReduceState(group, start_after=2), zd.quantized_allreduce_hook)
    errors = []
    for step in range(3):
        for model in (plain, hooked):
            model.zero_grad()
            model(data(group, step)).square().mean().backward()
        errors.append(relative_error(gradients(hooked), gradients(plain)))
    assert max(errors[:2]) < 1e-6
    assert errors[2] > 1e-6


def one_dimensional_parameters_are_exact(group: dist.ProcessGroup) -> None:
    models = [ddp(group, name) for name in (None, "allreduce-4-feedback")]
    for model in models:
        model(data(group, 0)).square().mean().backward()
    pairs = list(zip(models[0].parameters(), models[1].parameters(), strict=True))
    for plain, hooked in pairs:
        error = relative_error(hooked.grad, plain.grad)
        assert error < 1e-5 if plain.dim() == 1 else error > 1e-3


def a_bad_loss_is_skipped_by_all(group: dist.ProcessGroup, hook: str) -> None:
    model = ddp(group, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = torch.cat([p.detach().clone().view(-1) for p in model.parameters()])
    for step in range(2):
        optimizer.zero_grad()
        loss = model(data(group, step)).square().mean()
        if step == 0 and group.rank() == group.size() - 1:
            loss = loss * float("nan")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        weights = torch.cat([p.detach().view(-1) for p in model.parameters()])
        assert torch.equal(weights, before) == (step == 0)
        assert weights.isfinite().all()
    assert scaler.get_scale() == 2.0**9


def buckets_dealt_out_anew(group: dist.ProcessGroup) -> None:
    state = zd.QuantizedAllReduceState(group, bits=4, error_feedback=True)
    a, b = torch.randn(40, 10), torch.randn(20, 20)
    run = lambda parameters: zd.quantized_allreduce_hook(  # noqa: E731
        state, Bucket(torch.cat([p.view(-1) for p in parameters]), parameters)
    ).wait()
    first = run([a, b])
    second = run([a, b])
    assert not torch.equal(first, second)
    swapped = run([b, a])
    fresh = zd.QuantizedAllReduceState(group, bits=4, error_feedback=True)
    want = zd.quantized_allreduce_hook(fresh, Bucket(torch.cat([b.view(-1), a.view(-1)]), [b, a])).wait()
    assert torch.equal(swapped, want)


def a_state_goes_on(group: dist.ProcessGroup, how: str) -> None:
    settings = {"bits": 4, "error_feedback": True, "stochastic_rounding": True, "seed": 3}
    state = zd.QuantizedAllReduceState(group, **settings)
    x = torch.randn(1000)
    step = lambda one: zd.quantized_allreduce_hook(one, Bucket(x.clone(), [x])).wait()  # noqa: E731
    step(state), step(state)
    if how == "pickle":
        again = pickle.loads(pickle.dumps(state))
        again.process_group = group
    else:
        file = io.BytesIO()
        torch.save(state.state_dict(), file)
        again = zd.QuantizedAllReduceState(group, **settings)
        again.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert again.steps == state.steps == 2
    for _ in range(2):
        assert torch.equal(step(state), step(again))


def wrong_registrations(group: dist.ProcessGroup) -> list[str]:
    """The errors of wrong states, options and models, each as "Type: text"."""
    model = ddp(group, None)
    errors = []
    for wrong in (
        lambda: zd.register_hook(model, "gloo", zd.quantization_pertensor_hook),
        lambda: zd.register_hook(model, group, zd.quantized_allreduce_hook),
        lambda: zd.register_hook(model, group, zd.quantization_perchannel_hook, bucket_size=0),
        lambda: zd.register_hook(model, group, zd.quantization_perchannel_hook, bucket_size=2.5),
        lambda: zd.register_hook(model, group, zd.quantization_pertensor_hook, bucket_size=64),
        lambda: zd.register_hook(model, group, print),
        lambda: zd.register_hook(model.module, group, zd.quantization_pertensor_hook),
    ):
        try:
            wrong()
        except (TypeError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    zd.register_hook(model, group, zd.quantization_perchannel_hook, bucket_size=64)
    model(data(group, 0)).square().mean().backward()
    assert same_everywhere(gradients(model), group)
    return errors


def wrong_state_in_a_backward(group: dist.ProcessGroup) -> str:
    model = ddp(group, None)
    model.register_comm_hook("gloo", zd.quantization_pertensor_hook)
    try:
        model(data(group, 0)).square().mean().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fsdp(group: dist.ProcessGroup, bits: int) -> float:
    """The relative error of the gradients of a fully sharded network."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    grads = []
    for comm in (None, zd.QuantizedReduceScatter(bits)):
        torch.manual_seed(7)
        model = fully_shard(Net(), mesh=mesh)
        if comm is not None:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_reduce_scatter(comm)
        model(data(group, 0)).square().mean().backward()
        grads.append(torch.cat([p.grad.full_tensor().view(-1) for p in model.parameters()]))
    return relative_error(grads[1], grads[0])


def training_of_a_prepared_model(group: dist.ProcessGroup) -> tuple[float, bool]:
    """Trains a model prepared for quantization, ranks on data of unlike size.

    Returns:
        The largest difference between any buffer here and on rank 0, and whether all grids are usable.
    """
    from zeropoint.ao.quantization import (
        disable_observer,
        fuse_modules_qat,
        get_default_qat_qconfig,
        prepare_qat,
    )

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).train()
    model = fuse_modules_qat(model, [["0", "1", "2"]])
    model.qconfig = get_default_qat_qconfig()  # type: ignore[assignment]
    parallel = DistributedDataParallel(prepare_qat(model), process_group=group)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    torch.manual_seed(1 + group.rank())
    for _ in range(3):
        optimizer.zero_grad()
        parallel(torch.randn(4, 3, 8, 8) * (1 + group.rank())).square().mean().backward()
        optimizer.step()
    parallel.apply(disable_observer)
    parallel.eval()
    with torch.no_grad():
        parallel(torch.ones(1, 3, 8, 8))  # DDP hands rank 0's buffers to all before a forward pass
    apart = 0.0
    buffers = dict(parallel.module.named_buffers())
    for buffer in buffers.values():
        everyone = of_all(buffer.detach().to(torch.float64).reshape(-1), group)
        apart = max(apart, float((everyone - everyone[0]).abs().max()))
    grids = [buffer for name, buffer in buffers.items() if name.endswith("scale")]
    return apart, len(grids) >= 3 and all(bool((grid > 0).all()) and grid.numel() > 0 for grid in grids)
