"""Fake quantize that trains its grid: gradients against the written-out formula and against finite differences."""

from __future__ import annotations

import pytest
import torch

import zeropoint as zp
from zeropoint.ao.quantization import MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver
from zeropoint.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize
from zeropoint.ops.fake_quantize import fake_quantize_learnable


def learner(**settings):
    fake = _LearnableFakeQuantize(MovingAverageMinMaxObserver, **settings)
    fake.enable_param_learning()
    return fake


def written_out(x, scale, zero_point, quant_min, quant_max, incoming):
    """The documented gradients, element by element."""
    whole = zero_point.round().clamp(quant_min, quant_max)
    rounded = torch.round(x * (1 / scale)) + whole
    y = (rounded.clamp(quant_min, quant_max) - whole) * scale
    inside = (rounded >= quant_min) & (rounded <= quant_max)
    end = torch.where(rounded > quant_max, float(quant_max), float(quant_min))
    by_scale = torch.where(inside, (y - x) / scale, end - whole)
    by_zero = torch.where(inside, torch.zeros(()), -scale)
    return incoming * inside, incoming * by_scale, incoming * by_zero


@pytest.mark.parametrize("zero_point", [0.0, 3.0, 2.5, -1.5, -0.4, 500.0])
def test_per_tensor_gradients_equal_the_formula(zero_point):
    x = (torch.randn(200) * 8).double().requires_grad_()
    scale, zero = torch.tensor([0.11], requires_grad=True), torch.tensor([zero_point], requires_grad=True)
    incoming = torch.randn(200).double()
    fake_quantize_learnable(x, scale, zero, None, -32, 31).backward(incoming)
    by_x, by_scale, by_zero = written_out(x.detach(), scale.detach().double(), zero.detach(), -32, 31, incoming)
    assert torch.equal(x.grad, by_x)
    assert scale.grad.item() == pytest.approx(by_scale.sum().item(), rel=1e-5)
    assert zero.grad.item() == pytest.approx(by_zero.sum().item(), rel=1e-5)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_per_channel_gradients_are_summed_in_each_channel(axis):
    x = (torch.randn(3, 4, 5) * 8).requires_grad_()
    channels = x.shape[axis]
    scale = (torch.rand(channels) * 0.1 + 0.05).requires_grad_()
    zero = (torch.randn(channels) * 4).requires_grad_()
    incoming = torch.randn(3, 4, 5)
    fake_quantize_learnable(x, scale, zero, axis, -32, 31, grad_factor=0.5).backward(incoming)
    shape = [1, 1, 1]
    shape[axis] = -1
    parts = written_out(x.detach(), scale.detach().view(shape), zero.detach().view(shape), -32, 31, incoming)
    others = [dim for dim in range(3) if dim != axis % 3]
    assert torch.equal(x.grad, parts[0])
    torch.testing.assert_close(scale.grad, 0.5 * parts[1].sum(others), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(zero.grad, 0.5 * parts[2].sum(others), rtol=1e-4, atol=1e-4)


def test_saturated_values_have_the_gradient_of_finite_differences():
    x = torch.tensor([50.0, -50.0, 60.0], dtype=torch.float64)
    scale = torch.tensor([0.1], dtype=torch.float64, requires_grad=True)
    zero = torch.tensor([4.0], dtype=torch.float64, requires_grad=True)

    def value(scale, zero):
        return fake_quantize_learnable(x, scale, zero, None, -128, 127).sum()

    value(scale, zero).backward()
    step = 1e-6
    by_scale = (value(scale + step, zero) - value(scale - step, zero)) / (2 * step)
    by_zero = (value(scale, zero + 1) - value(scale, zero - 1)) / 2
    assert scale.grad.item() == pytest.approx(by_scale.item(), rel=1e-6)
    assert zero.grad.item() == pytest.approx(by_zero.item(), rel=1e-6)


def test_inside_the_scale_gradient_follows_the_rounding_error():
    # d/dscale of the straight-through surrogate: value(s) = s * (rint(x / s0) + (x / s - x / s0))
    x, size = torch.tensor([0.34], dtype=torch.float64), 0.1
    scale = torch.tensor([size], dtype=torch.float64, requires_grad=True)
    fake_quantize_learnable(x, scale, torch.zeros(1, dtype=torch.float64), None, -128, 127).backward()

    def surrogate(s):
        return s * (round(0.34 / size) + (0.34 / s - 0.34 / size))

    difference = (surrogate(size + 1e-6) - surrogate(size - 1e-6)) / 2e-6
    assert scale.grad.item() == pytest.approx(difference, rel=1e-6)


def test_sums_are_exact_where_float32_would_lose_terms():
    # the first element's share is 2**25 times that of every other
    x = torch.full((1001,), 50.0)
    incoming = torch.ones(1001)
    incoming[0] = 2.0**25
    scale, zero = torch.tensor([0.25], requires_grad=True), torch.zeros(1, requires_grad=True)
    fake_quantize_learnable(x, scale, zero, None, -128, 127).backward(incoming)
    assert scale.grad.item() == torch.tensor(127.0 * (2**25 + 1000)).item()
    assert zero.grad.item() == torch.tensor(-0.25 * (2**25 + 1000)).item()


def test_a_half_precision_scale_keeps_the_error_of_rounding():
    x = torch.randn(64).half()
    grads = []
    for dtype in (torch.float16, torch.float32):
        scale = torch.tensor([0.25], dtype=dtype, requires_grad=True)
        fake_quantize_learnable(x, scale, torch.zeros(1), None, -128, 127).sum().backward()
        grads.append(scale.grad)
    assert torch.equal(grads[0], grads[1].half())


def test_gradients_have_gradients():
    x = torch.tensor([0.34, 50.0], dtype=torch.float64, requires_grad=True)
    scale = torch.tensor([0.1], dtype=torch.float64, requires_grad=True)
    incoming = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    y = fake_quantize_learnable(x, scale, torch.zeros(1, dtype=torch.float64), None, -128, 127)
    first = torch.autograd.grad(y, (x, scale), incoming, create_graph=True)
    by_incoming = torch.autograd.grad(first[0].sum() + first[1].sum(), incoming)[0]
    torch.testing.assert_close(by_incoming, torch.tensor([1.0 + (0.3 - 0.34) / 0.1, 127.0], dtype=torch.float64))


def test_the_backward_operator_passes_opcheck_and_names_what_does_not_fit():
    operator, x, codes = (
        torch.ops.zeropoint.fake_quantize_learnable_backward,
        torch.randn(3, 4),
        torch.zeros(4, dtype=torch.int32),
    )
    for axis, channels in ((None, 1), (1, 4)):
        grid = (torch.full((channels,), 0.1), codes[:channels])
        torch.library.opcheck(operator.default, (x, x, *grid, axis, -8, 7, 0.5))
    with pytest.raises(RuntimeError, match="3 grids need as many scales"):
        operator(x, x, torch.ones(4), codes, 0, -8, 7, 1.0)
    with pytest.raises(RuntimeError, match="does not fit values of"):
        operator(x[:2], x, torch.ones(4), codes, 1, -8, 7, 1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes_train(dtype):
    fake = learner(scale=0.1)
    x = torch.randn(30).to(dtype).requires_grad_()
    y = fake(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype
    assert fake.scale.grad.dtype == torch.float32
    wide = learner(scale=0.1)
    wide(x.detach().double()).sum().backward()
    assert fake.scale.grad.item() == pytest.approx(wide.scale.grad.item(), rel=1e-2, abs=1e-2)


def test_used_three_times_in_a_forward():
    fake, weight = learner(scale=0.1), torch.randn(5, requires_grad=True)
    sum(fake(weight * factor).sum() for factor in (1.0, 2.0, 3.0)).backward()
    assert torch.isfinite(fake.scale.grad).all()


def test_static_mode_takes_the_observers_grid():
    fake = _LearnableFakeQuantize(MovingAverageMinMaxObserver)
    x = torch.randn(100)
    fake(x)
    scale, zero_point = fake.activation_post_process.calculate_qparams()
    assert torch.equal(fake.scale.detach(), scale)
    assert torch.equal(fake.zero_point.detach(), zero_point.float())


def test_modes():
    fake, x = _LearnableFakeQuantize(MovingAverageMinMaxObserver), torch.randn(50)
    assert fake.enable_static_observation() is fake
    assert torch.equal(fake(x), x)
    assert not fake.scale.requires_grad
    fake.enable_static_estimate()
    assert not torch.equal(fake(x), x)
    fake.enable_param_learning()
    before = fake.scale.detach().clone()
    fake(x * 100)
    assert torch.equal(before, fake.scale.detach())
    assert fake.scale.requires_grad
    assert [fake.static_enabled.item(), fake.learning_enabled.item(), fake.fake_quant_enabled.item()] == [0, 1, 1]


def test_training_lowers_the_error():
    x = torch.randn(2000)
    fake = learner(scale=1.5, zero_point=8.0, quant_min=0, quant_max=15)
    optimizer = torch.optim.SGD([fake.scale], lr=5e-2)
    errors = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = (fake(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        errors.append(loss.item())
    assert errors[-1] < errors[0] * 0.9


def test_scale_never_falls_below_eps():
    fake = learner(scale=-1.0)
    fake(torch.randn(3))
    assert fake.scale.item() == fake.eps.item()


@pytest.mark.parametrize(("dtype", "codes", "zero"), [(zp.qint8, (-128, 127), 0.0), (zp.quint8, (0, 255), 128.0)])
def test_symmetric_schemes_keep_their_zero_point(dtype, codes, zero):
    fake = learner(quant_min=codes[0], quant_max=codes[1], dtype=dtype, qscheme=zp.per_tensor_symmetric, zero_point=9.0)
    fake(torch.randn(4))
    assert fake.zero_point.item() == zero


def test_gradient_scaling():
    x, gradients = torch.randn(64), []
    for scaled in (False, True):
        fake = learner(scale=0.1, use_grad_scaling=scaled)
        fake(x).sum().backward()
        gradients.append(fake.scale.grad.item())
    assert gradients[1] == pytest.approx(gradients[0] * (64 * 255) ** -0.5, rel=1e-5)


def test_channels_follow_the_observer():
    fake = _LearnableFakeQuantize(
        MovingAveragePerChannelMinMaxObserver,
        -128,
        127,
        channel_len=3,
        dtype=zp.qint8,
        qscheme=zp.per_channel_symmetric,
    )
    fake(torch.randn(3, 5))
    assert fake.scale.shape == (3,)
    with pytest.raises(ValueError):
        fake(torch.randn(4, 5))


def test_qparams_are_rounded_into_the_codes():
    fake = learner(scale=0.1, zero_point=300.4)
    scale, zero_point = fake.calculate_qparams()
    assert (scale.item(), zero_point.item(), zero_point.dtype) == (pytest.approx(0.1), 255, torch.int32)


@pytest.mark.parametrize("settings", [{"channel_len": 0}, {"quant_min": 3, "quant_max": 3}, {"quant_max": 300}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ValueError):
        _LearnableFakeQuantize(MovingAverageMinMaxObserver, **settings)


def test_state_round_trip():
    fake, fresh = learner(scale=0.3, zero_point=7.0), _LearnableFakeQuantize(MovingAverageMinMaxObserver)
    fresh.load_state_dict(fake.state_dict())
    x = torch.randn(5)
    assert torch.equal(fake(x), fresh(x))
