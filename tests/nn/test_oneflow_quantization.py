"""OneFlow-style modules against their documented formulas, written out in NumPy."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zeropoint.nn import (
    FakeQuantization,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    QatConv1d,
    QatConv2d,
    QatConv3d,
    Quantization,
)

FORMULAS = [("google", "symmetric"), ("google", "affine"), ("cambricon", "symmetric"), ("cambricon", "affine")]
formulas = pytest.mark.parametrize(("formula", "scheme"), FORMULAS, ids=["-".join(f) for f in FORMULAS])
widths = pytest.mark.parametrize("bit", range(2, 9))
rows = pytest.mark.parametrize("per_layer", [True, False], ids=["layer", "channel"])


def grid(x: np.ndarray, formula: str, bit: int, scheme: str) -> tuple[np.floating, np.floating]:
    """Scale and zero point by the documentation, in float32."""
    peak = np.abs(x).max()
    if formula == "cambricon":
        return np.float32(np.floor(np.log2(peak)) - (bit - 2)), np.float32(0)
    if scheme == "symmetric":
        return peak / np.float32(2 ** (bit - 1) - 1), np.float32(0)
    scale = (x.max() - x.min()) / np.float32(2**bit - 1)
    return scale, -np.rint(x.min() / scale)


def codes(x: np.ndarray, scale: np.floating, zero: np.floating, formula: str, bit: int, scheme: str) -> np.ndarray:
    high = 2 ** (bit - 1) - 1
    if formula == "cambricon":
        return np.clip(np.rint(x / np.float32(2.0 ** int(scale))), -high - 1, high)
    if scheme == "symmetric":
        return np.clip(np.rint(x / scale), -high, high)
    return np.clip(np.rint(x / scale + zero), 0, 2**bit - 1)


def values(q: np.ndarray, scale: np.floating, zero: np.floating, formula: str, scheme: str) -> np.ndarray:
    if formula == "cambricon":
        return q * np.float32(2.0 ** int(scale))
    return (q - zero) * scale if scheme == "affine" else q * scale


@formulas
@widths
@rows
def test_formulas(formula, scheme, bit, per_layer):
    x = (torch.rand(4, 3, 5) - 0.4) * torch.tensor([0.1, 1.0, 7.0, 100.0]).view(4, 1, 1)
    scale, zero = MinMaxObserver(formula, bit, scheme, per_layer)(x)
    quantized = Quantization(formula, bit, scheme)(x, scale, zero)
    faked = FakeQuantization(formula, bit, scheme)(x, scale, zero)
    parts = [x] if per_layer else list(x)
    assert scale.shape == zero.shape == (len(parts),)
    expected_codes, expected_values = [], []
    for i, part in enumerate(parts):
        expected = grid(part.numpy(), formula, bit, scheme)
        assert (scale[i].item(), zero[i].item()) == (expected[0].item(), expected[1].item())
        q = codes(part.numpy(), *expected, formula, bit, scheme)
        expected_codes.append(q)
        expected_values.append(values(q, *expected, formula, scheme))
    assert np.array_equal(quantized.numpy().reshape(-1), np.concatenate([q.reshape(-1) for q in expected_codes]))
    assert np.array_equal(faked.numpy().reshape(-1), np.concatenate([v.reshape(-1) for v in expected_values]))


def test_symmetric_codes_stop_at_minus_quant_max():
    y = Quantization()(torch.tensor([-1000.0, 1000.0]), torch.ones(1), torch.zeros(1))
    assert y.tolist() == [-127.0, 127.0]


def test_ties_round_to_even():
    y = Quantization()(torch.tensor([0.5, 1.5, 2.5, -0.5]), torch.ones(1), torch.zeros(1))
    assert y.tolist() == [0.0, 2.0, 2.0, 0.0]


@formulas
@rows
def test_gradient_is_the_identity(formula, scheme, per_layer):
    x = (torch.randn(3, 4) * 10).requires_grad_()
    incoming = torch.randn(3, 4)
    scale, zero = MinMaxObserver(formula, 4, scheme, per_layer)(x * 0.1)
    assert not scale.requires_grad
    FakeQuantization(formula, 4, scheme)(x, scale, zero).backward(incoming)
    assert torch.equal(x.grad, incoming)


def test_quantization_is_not_differentiable():
    x = torch.randn(3, requires_grad=True)
    assert not Quantization()(x, *MinMaxObserver()(x)).requires_grad


@formulas
@rows
@pytest.mark.parametrize("value", [0.0, 3.0, -0.7])
def test_constant_inputs_stay_what_they_are(formula, scheme, per_layer, value):
    x = torch.full((2, 3), value)
    scale, zero = MinMaxObserver(formula, 8, scheme, per_layer)(x)
    y = FakeQuantization(formula, 8, scheme)(x, scale, zero)
    assert torch.isfinite(y).all()
    torch.testing.assert_close(y, x, rtol=1e-2, atol=0)


@formulas
def test_a_scale_of_zero_gives_zeros(formula, scheme):
    if formula == "cambricon":
        pytest.skip("a cambricon scale is an exponent")
    y = FakeQuantization(formula, 8, scheme)(torch.tensor([0.0, 5.0]), torch.zeros(1), torch.zeros(1))
    assert y.tolist() == [0.0, 0.0]


@given(
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20),
    st.integers(2, 8),
    st.sampled_from(FORMULAS),
)
def test_finite_inputs_never_give_nan(data, bit, kind):
    x = torch.tensor(data)
    observer, fake = MinMaxObserver(kind[0], bit, kind[1]), FakeQuantization(kind[0], bit, kind[1])
    x = x.nan_to_num(posinf=1.0, neginf=-1.0).clamp(-1e37, 1e37)
    assert not torch.isnan(fake(x, *observer(x))).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dtypes(dtype):
    x = torch.randn(4, 4).to(dtype)
    scale, zero = MinMaxObserver()(x)
    assert scale.dtype == zero.dtype == FakeQuantization()(x, scale, zero).dtype == dtype


def test_non_finite_values_do_not_reach_the_grid():
    scale, _ = MinMaxObserver()(torch.tensor([1.27, float("nan"), float("inf")]))
    assert scale.item() == pytest.approx(0.01)


@pytest.mark.parametrize("kind", [FakeQuantization, Quantization, MinMaxObserver])
@pytest.mark.parametrize(
    "settings",
    [
        {"quantization_bit": 1},
        {"quantization_bit": 9},
        {"quantization_bit": 4.0},
        {"quantization_formula": "tensorrt"},
        {"quantization_scheme": "linear"},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_at_construction(kind, settings):
    with pytest.raises(ValueError):
        kind(**settings)


@pytest.mark.parametrize("settings", [{"stop_update_after_iters": 0}, {"momentum": 1.5}, {"momentum": -0.1}], ids=str)
def test_moving_average_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError):
        MovingAverageMinMaxObserver(**settings)


def test_grids_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="slices along the first dimension"):
        FakeQuantization()(torch.randn(3, 2), torch.ones(2), torch.zeros(2))
    with pytest.raises(ValueError, match="slices along the first dimension"):
        FakeQuantization()(torch.randn(3, 2), torch.ones(3), torch.zeros(1))
    with pytest.raises(TypeError, match="float tensor"):
        FakeQuantization()(torch.ones(3, dtype=torch.int32), torch.ones(1), torch.zeros(1))


# --- the moving average -------------------------------------------------------------------------------------------


def step(n: int) -> torch.Tensor:
    return torch.tensor([n], dtype=torch.int64)


@formulas
def test_moving_average_rule(formula, scheme):
    observer = MovingAverageMinMaxObserver(5, formula, 8, scheme, momentum=0.75)
    low = high = None
    for n in range(4):
        x = torch.randn(10)
        scale, zero = observer(x, step(n))
        ends = (x.min(), x.max()) if (formula, scheme) == ("google", "affine") else (x.abs().max(), x.abs().max())
        low = ends[0] if low is None else low * 0.75 + ends[0] * 0.25
        high = ends[1] if high is None else high * 0.75 + ends[1] * 0.25
        assert torch.equal(observer.moving_min, low.reshape(1))
        assert torch.equal(observer.moving_max, high.reshape(1))
    if formula == "google":
        expected = (high - low) / 255 if scheme == "affine" else high / 127
        assert scale.item() == expected.item()
        assert zero.item() == (-torch.round(low / expected).item() if scheme == "affine" else 0.0)


def test_updates_stop_after_the_last_step_inclusive():
    observer = MovingAverageMinMaxObserver(stop_update_after_iters=2, momentum=0.5)
    for n, expected in ((1, 1.0), (2, 1.0), (3, 1.0)):
        observer(torch.tensor([1.0]), step(n))
        assert observer.moving_max.item() == expected
    observer(torch.tensor([9.0]), step(2))
    assert observer.moving_max.item() == 5.0
    observer(torch.tensor([99.0]), step(3))
    assert observer.moving_max.item() == 5.0


def test_eval_uses_the_stored_range():
    observer = MovingAverageMinMaxObserver(10)
    observer(torch.tensor([2.54]), step(0))
    observer.eval()
    scale, _ = observer(torch.tensor([100.0]), step(0))
    assert scale.item() == pytest.approx(0.02)


def test_a_range_that_was_never_set_gives_zeros_for_zeros():
    observer = MovingAverageMinMaxObserver(10, quantization_scheme="affine").eval()
    x = torch.zeros(3)
    assert FakeQuantization(quantization_scheme="affine")(x, *observer(x, step(0))).tolist() == [0.0, 0.0, 0.0]


def test_reset_and_state():
    observer, fresh = MovingAverageMinMaxObserver(10), MovingAverageMinMaxObserver(10)
    observer(torch.tensor([2.0]), step(0))
    assert set(observer.state_dict()) == {"moving_max", "moving_min"}
    fresh.load_state_dict(observer.state_dict())
    assert fresh.moving_max.item() == 2.0
    observer.reset_running_stats()
    assert observer.moving_max.item() == 0.0


@pytest.mark.parametrize(
    ("bad", "error"), [(3, TypeError), (torch.ones(1), TypeError), (step(1).repeat(2), ValueError)]
)
def test_steps_that_are_no_count_are_refused(bad, error):
    with pytest.raises(error, match="current_train_step"):
        MovingAverageMinMaxObserver()(torch.ones(1), bad)


# --- convolutions -------------------------------------------------------------------------------------------------

CONVOLUTIONS = [(QatConv1d, nn.Conv1d, 1), (QatConv2d, nn.Conv2d, 2), (QatConv3d, nn.Conv3d, 3)]
convolutions = pytest.mark.parametrize(("qat", "plain", "rank"), CONVOLUTIONS, ids=["1d", "2d", "3d"])


@convolutions
@formulas
@rows
def test_convolution_of_rounded_input_and_weight(qat, plain, rank, formula, scheme, per_layer):
    settings = {"stride": 2, "padding": 1, "groups": 2}
    layer = qat(
        4, 6, 3, **settings, quantization_formula=formula, quantization_scheme=scheme, weight_quant_per_layer=per_layer
    )
    twin = plain(4, 6, 3, **settings)
    twin.load_state_dict({"weight": layer.weight.detach().clone(), "bias": layer.bias.detach().clone()})
    x = torch.randn(2, 4, *[6] * rank)
    fake = FakeQuantization(formula, 8, scheme)
    with torch.no_grad():
        twin.weight.copy_(fake(twin.weight, *MinMaxObserver(formula, 8, scheme, per_layer)(twin.weight)))
    expected = twin(fake(x, *MinMaxObserver(formula, 8, scheme)(x)))
    torch.testing.assert_close(layer(x), expected)


@convolutions
def test_convolution_trains_and_keeps_its_range_in_eval(qat, plain, rank):
    layer = qat(2, 3, 3)
    layer(torch.randn(1, 2, *[5] * rank)).sum().backward()
    assert torch.isfinite(layer.weight.grad).all()
    before = layer.input_min_max_observer.moving_max.clone()
    layer.eval()(torch.randn(1, 2, *[5] * rank) * 100)
    assert torch.equal(before, layer.input_min_max_observer.moving_max)
    assert torch.equal(copy.deepcopy(layer)(torch.ones(1, 2, *[5] * rank)), layer(torch.ones(1, 2, *[5] * rank)))


def test_counting_steps_freezes_the_input_range():
    layer = QatConv1d(1, 1, 1, input_quant_momentum=0.5)
    layer(torch.ones(1, 1, 4))
    layer.current_train_step += 2
    layer(torch.ones(1, 1, 4) * 50)
    assert layer.input_min_max_observer.moving_max.item() == 1.0


def test_convolution_settings_are_checked():
    with pytest.raises(ValueError, match="quantization_bit"):
        QatConv2d(1, 1, 1, quantization_bit=16)
    assert QatConv2d(1, 1, 1, bias=False, padding_mode="circular", padding=1)(torch.randn(1, 1, 4, 4)).shape[-1] == 6


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch._dynamo itself
def test_compiles():
    layer = QatConv2d(2, 3, 3)
    x = torch.randn(1, 2, 5, 5)
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))
