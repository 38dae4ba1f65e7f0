"""Fake quantize, its gradients, and the averaged ranges of the fused form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton_check import REFERENCES, assert_same, channels_last, moved

from zeropoint.ao import quantization as aq
from zeropoint.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize

Check = Callable[..., Any]
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def values(dtype: torch.dtype) -> Tensor:
    x = (torch.randn(3, 5, 7, 2) * 3).to(dtype)
    x[0, :3, 0, 0] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    return x


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("ends", [(-128, 127), (0, 255), (-(2**31), 2**31 - 1)], ids=str)
def test_values_and_masks(check: Check, dtype: torch.dtype, ends: tuple[int, int]) -> None:
    plain = values(dtype)
    for x in (plain, channels_last(plain), plain[:, :, ::2]):
        for scale, zero_point in (
            (torch.tensor([0.05]), torch.tensor([3])),
            (torch.tensor(1e-8, dtype=torch.float64), torch.tensor(3, dtype=torch.int32)),
            (torch.tensor([0.05]), torch.tensor([3.4])),
        ):
            check("fake_quantize_per_tensor", x, scale, zero_point, *ends)
        for zero_points in (torch.randint(0, 9, (5,)), torch.rand(5)):
            mask = check("fake_quantize_per_channel", x, torch.rand(5) + 0.01, zero_points, 1, *ends)[1].cpu()
        check("fake_quantize_backward", torch.randn(x.shape).to(dtype), mask)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("symmetric", [False, True])
def test_averaged_ranges(device: torch.device, dtype: torch.dtype, axis: int | None, symmetric: bool) -> None:
    x = values(dtype)
    count = 1 if axis is None else x.shape[axis]
    ends = (torch.full((count,), float("inf")), torch.full((count,), float("-inf")))
    wanted = [*ends, torch.ones(count), torch.zeros(count, dtype=torch.int32)]
    got = [moved(buffer, device) for buffer in wanted]
    eps = torch.tensor(torch.finfo(torch.float32).eps)
    codes = (-128, 127) if symmetric else (0, 255)
    for step, batch in enumerate((x * 1e-4, x.abs() * 1e-9, x * 100, x[:0])):
        rest = (0.01, *codes, axis if batch.numel() or axis != 0 else 1, symmetric, 0 if symmetric else 128, step != 1)
        if not batch.numel() and axis == 0:
            continue
        odd = REFERENCES["moving_average_observe"](batch, *wanted, eps, *rest)
        seen = torch.ops.zeropoint.moving_average_observe(moved(batch, device), *got, moved(eps, device), *rest)
        assert_same(seen, odd)
        assert_same(tuple(got), tuple(wanted))


def test_gradients_pass_where_codes_were_inside(device: torch.device) -> None:
    from zeropoint.ops.fake_quantize import fake_quantize_per_tensor

    x = torch.tensor([-9.0, 0.3, 9.0], device=device, requires_grad=True)
    one, zero = torch.tensor([0.05], device=device), torch.tensor([0], dtype=torch.int32, device=device)
    fake_quantize_per_tensor(x, one, zero).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 1.0, 0.0]


def learnable(*shape: int, dtype: torch.dtype, ends: tuple[int, int], channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values inside and outside of the grids, on ties, and not finite; scales and zero points."""
    scale = torch.tensor([0.5, 0.07, 0.013])[torch.arange(channels) % 3]
    zero_point = torch.randint(max(ends[0], -9), min(ends[1], 9) + 1, (channels,), dtype=torch.int32)
    x = torch.randn(shape) * 0.3 * min(ends[1], 999)
    flat = x.view(-1)
    flat[::5] = (flat[::5] * 2).round() / 4  # ties of the first grid
    flat[:3] = torch.tensor([float("nan"), float("inf"), float("-inf")])[: flat.numel()]
    return x.to(dtype), scale, zero_point


def check_learnable(device: torch.device, *arguments: Any) -> None:
    """Elements are the same; sums differ by their order in float64 at most, and by nothing in a second call."""
    wanted = REFERENCES["fake_quantize_learnable_backward"](*arguments)
    there = [moved(value, device) for value in arguments]
    got, again = (torch.ops.zeropoint.fake_quantize_learnable_backward.default(*there) for _ in range(2))
    assert_same(got[0], wanted[0])
    assert got[0].stride() == torch.empty_like(arguments[1]).stride()
    for one, other in zip(got[1:], wanted[1:], strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert_same(again, tuple(one.cpu() for one in got))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("ends", [(-128, 127), (0, 15), (-(2**31), 2**31 - 1)], ids=str)
@pytest.mark.parametrize("axis", [None, 0, 1, 3])
def test_learnable_gradients(device: torch.device, dtype: torch.dtype, ends: tuple[int, int], axis: int | None) -> None:
    shape = (3, 5, 7, 2)
    x, scale, zero_point = learnable(*shape, dtype=dtype, ends=ends, channels=1 if axis is None else shape[axis])
    grad = torch.randn(shape).to(dtype)
    check_learnable(device, grad, x, scale, zero_point, axis, *ends, 0.37)
    check_learnable(device, grad, channels_last(x), scale.to(dtype), zero_point, axis, *ends, 1.0)
    grad[2, 1, 3, :1] = float("nan")
    check_learnable(device, channels_last(grad)[:, :, ::2], x[:, :, ::2], scale, zero_point, axis, *ends, 1.0)
    check_learnable(device, grad[:, :, :0], x[:, :, :0], scale, zero_point, axis, *ends, 1.0)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((2501,), None), ((701,), 0), ((3, 2501), 0), ((2501, 3), 1), ((2, 45, 70), 1), ((40, 33, 5), 1), ((1, 1), 0)],
    ids=str,
)
def test_learnable_gradients_in_parts(
    device: torch.device, shape: tuple[int, ...], axis: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zeropoint import backends

    kernels = backends.triton.function("fake_quantize_learnable_backward").__globals__
    monkeypatch.setitem(kernels, "INTERPRETED", False)  # a device's tiles
    channels = 1 if axis is None else shape[axis]
    x, scale, zero_point = learnable(*shape, dtype=torch.float32, ends=(-128, 127), channels=channels)
    check_learnable(device, torch.randn(shape), x, scale, zero_point, axis, -128, 127, 1.0)


@pytest.mark.parametrize("axis", [None, 1, -2])
def test_a_learnable_fake_quantizer_trains(device: torch.device, axis: int | None) -> None:
    from zeropoint.ops.fake_quantize import fake_quantize_learnable

    x, scale, zero_point = learnable(4, 6, 5, dtype=torch.float32, ends=(0, 15), channels=1 if axis is None else 6)
    zero_point = zero_point + 0.5
    there = [moved(value, device).requires_grad_() for value in (x, scale, zero_point)]
    y = fake_quantize_learnable(*there, axis, 0, 15, 0.25)
    y.sum().backward()  # an expanded gradient
    codes = zero_point.round().clamp(0, 15).to(torch.int32)
    channels = (scale.expand(6), codes.expand(6), 1)
    assert_same(y.detach(), REFERENCES["fake_quantize_per_channel"](x, *channels, 0, 15)[0])
    wanted = REFERENCES["fake_quantize_learnable_backward"](
        torch.ones(x.shape), x, scale, codes, None if axis is None else 1, 0, 15, 0.25
    )
    assert torch.equal(there[0].grad.cpu(), wanted[0])
    for got, other in zip(there[1:], wanted[1:], strict=True):
        torch.testing.assert_close(got.grad.cpu(), other, rtol=1e-6, atol=1e-6)


class _ReadsNoValue(TorchDispatchMode):
    """Here a value that the host reads is an error."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Waiting for the device is an error. On the CPU, kernels only count as launched: values are garbage."""
    from zeropoint.backends.triton import _core

    if device.type == "cpu":
        with _ReadsNoValue(), _core.replaced_launch(lambda *arguments, **settings: None):
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "make",
    [
        aq.default_fake_quant,
        aq.default_per_channel_weight_fake_quant,
        aq.default_fused_act_fake_quant,
        aq.default_fused_per_channel_wt_fake_quant,
        partial(_LearnableFakeQuantize, aq.MovingAverageMinMaxObserver, scale=0.1, use_grad_scaling=True),
        partial(_LearnableFakeQuantize, aq.MovingAveragePerChannelMinMaxObserver, channel_len=4, scale=0.1),
    ],
    ids=["tensor", "channel", "fused-tensor", "fused-channel", "learnable-tensor", "learnable-channel"],
)
def test_training_waits_for_nothing(
    device: torch.device, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("observers.minmax", "fake_quantize"):  # as on CUDA, where observers do not look at values
        monkeypatch.setattr(f"zeropoint.ao.quantization.{module}.on_host", lambda values: False)
    fake, x = make().to(device), torch.randn(4, 8, device=device, requires_grad=True)
    fake(x).sum().backward()
    if isinstance(fake, _LearnableFakeQuantize):
        fake.enable_param_learning()
        fake(x).sum().backward()
    with no_waiting(device):
        fake(x).sum().backward()
    if isinstance(fake, _LearnableFakeQuantize):
        assert fake.scale.grad is not None
