"""Fake quantize gives torch's values and gradients, and torch.ao's modules' grids."""

from __future__ import annotations

import warnings

import pytest
import torch

import zeropoint as zp
from zeropoint import ao

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    theirs = pytest.importorskip("torch.ao.quantization", reason="this torch has no torch.ao.quantization")

pytestmark = pytest.mark.filterwarnings("ignore")
ours = ao.quantization


def on_every_place(scale: float) -> torch.Tensor:
    """Values on, between and beyond the codes, ties included."""
    return torch.arange(-700, 700, dtype=torch.float32) * (scale / 4)


@pytest.mark.parametrize("codes", [(-128, 127), (0, 255), (-8, 7)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.25, 0.1, 0.037])
def test_per_tensor_values_and_gradients_are_equal(codes, scale):
    for zero_point in (codes[0], 0, 3, codes[1]):
        results = []
        for call in (ours.fake_quantize_per_tensor, torch.fake_quantize_per_tensor_affine):
            x = on_every_place(scale).requires_grad_()
            y = call(x, scale, zero_point, *codes)
            y.backward(torch.linspace(-1, 1, y.numel()))
            results.append((y, x.grad))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("floating", [False, True], ids=["whole", "floating"])
def test_per_channel_values_and_gradients_are_equal(axis, floating):
    x = torch.randn(3, 4, 5) * 4
    channels = x.shape[axis]
    scales = torch.rand(channels) * 0.05 + 0.01
    zeros = torch.randint(-50, 50, (channels,), dtype=torch.int32)
    zeros = zeros + 0.3 if floating else zeros
    results = []
    for call in (ours.fake_quantize_per_channel, torch.fake_quantize_per_channel_affine):
        leaf = x.clone().requires_grad_()
        y = call(leaf, scales, zeros, axis, -64, 63)
        y.backward(x)
        results.append((y, leaf.grad))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=0 if not floating else 1e-6)
    assert torch.equal(results[0][1], results[1][1])


MODULES = [
    ("default_weight_fake_quant", 0),
    ("default_per_channel_weight_fake_quant", 0),
    ("default_embedding_fake_quant", 0),
    ("default_fused_act_fake_quant", 1),
    ("default_fused_wt_fake_quant", 1),
    ("default_fused_per_channel_wt_fake_quant", 1),
    ("default_fixed_qparams_range_0to1_fake_quant", 0),
    ("default_fixed_qparams_range_neg1to1_fake_quant", 0),
]


@pytest.mark.parametrize(("name", "fused"), MODULES, ids=[name for name, _ in MODULES])
def test_modules_train_alike(name, fused):
    for seed in range(25):
        generator = torch.Generator().manual_seed(seed)
        first, second = getattr(ours, name)(), getattr(theirs.fake_quantize, name)()
        for i in range(4):
            x = torch.randn(4, 30, generator=generator) * (i + 1) + seed % 3 - 1
            y, z = first(x), second(x)
            torch.testing.assert_close(first.scale, second.scale, rtol=3e-7 if fused else 0, atol=0)
            assert torch.equal(first.zero_point, second.zero_point)
            if torch.equal(first.scale, second.scale):
                torch.testing.assert_close(y, z, rtol=0, atol=1e-6 if "embedding" in name else 0)
        for key, value in second.activation_post_process.state_dict().items():
            assert torch.equal(first.activation_post_process.state_dict()[key], value)


@pytest.mark.parametrize("name", [name for name, _ in MODULES])
def test_torchs_state_loads(name):
    first, second = getattr(ours, name)(), getattr(theirs.fake_quantize, name)()
    second(torch.randn(4, 30))
    second.disable_observer()
    first.load_state_dict(second.state_dict())
    x = torch.randn(4, 30)
    assert torch.equal(first.scale, second.scale)
    torch.testing.assert_close(first(x), second(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("zero_point", [0.0, 3.0, 7.0])
@pytest.mark.parametrize("per_channel", [False, True], ids=["tensor", "channel"])
def test_learnable_gradients_are_equal(zero_point, per_channel):
    # whole zero points only: between them torch's per-tensor backward rounds another way than its forward
    from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize as Theirs

    from zeropoint.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize as Ours

    kind = ("MovingAveragePerChannelMinMaxObserver", "MovingAverageMinMaxObserver")[not per_channel]
    results = []
    for make, package in ((Ours, ours), (Theirs, theirs)):
        fake = make(
            getattr(package, kind), 0, 15, scale=0.1, zero_point=zero_point, channel_len=3 if per_channel else -1
        )
        fake.enable_param_learning()
        x = torch.randn(3, 200, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = fake(x)
        y.backward(x.detach())
        results.append((y, x.grad, fake.scale.grad, fake.zero_point.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    torch.testing.assert_close(results[0][2], results[1][2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results[0][3], results[1][3], rtol=1e-4, atol=1e-4)


def test_schemes_name_the_same_members():
    assert zp.per_tensor_affine is zp.dtypes.as_qscheme(torch.per_tensor_affine)
