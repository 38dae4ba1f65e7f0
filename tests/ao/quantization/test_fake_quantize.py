"""Fake quantize: values, gradients, flags, buffers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zeropoint as zp
from zeropoint.ao.quantization import (
    FakeQuantize,
    FakeQuantizeBase,
    FixedQParamsFakeQuantize,
    FusedMovingAvgObsFakeQuantize,
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelFakeQuantize,
    default_dynamic_fake_quant,
    default_embedding_fake_quant,
    default_fake_quant,
    default_fixed_qparams_range_0to1_fake_quant,
    default_fixed_qparams_range_neg1to1_fake_quant,
    default_fused_act_fake_quant,
    default_fused_per_channel_wt_fake_quant,
    default_fused_wt_fake_quant,
    default_histogram_fake_quant,
    default_per_channel_weight_fake_quant,
    default_weight_fake_quant,
    disable_fake_quant,
    disable_observer,
    enable_fake_quant,
    enable_observer,
    fake_quantize_per_channel,
    fake_quantize_per_tensor,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MODULES = {
    "FakeQuantize": default_fake_quant,
    "weight": default_weight_fake_quant,
    "per channel": default_per_channel_weight_fake_quant,
    "embedding": default_embedding_fake_quant,
    "histogram": default_histogram_fake_quant,
    "fused": default_fused_act_fake_quant,
    "fused weight": default_fused_wt_fake_quant,
    "fused per channel": default_fused_per_channel_wt_fake_quant,
}
modules = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())

infinity, nan = float("inf"), float("nan")


# --- values -------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=50),
    st.floats(2**-20, 2**20, width=32),
    st.integers(-128, 127),
    st.sampled_from(DTYPES),
)
def test_equals_dequantize_of_quantize_bit_for_bit(values, scale, zero_point, dtype):
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    quantized = zp.quantize_per_tensor(x, scale, zero_point, zp.qint8)
    expected = torch.where(torch.isnan(x), x, zp.dequantize(quantized, dtype))
    assert torch.equal(fake_quantize_per_tensor(x, scale, zero_point).nan_to_num(nan=1.5), expected.nan_to_num(nan=1.5))


def test_per_channel_equals_per_tensor_of_each_slice():
    x, scales, zeros = torch.randn(3, 4, 5), torch.rand(4) * 0.05 + 0.01, torch.tensor([0, -5, 100, -128])
    for layout in (x, x.transpose(0, 2).contiguous().transpose(0, 2)):
        y = fake_quantize_per_channel(layout, scales, zeros, axis=-2)
        for channel in range(4):
            alone = fake_quantize_per_tensor(x[:, channel], scales[channel], zeros[channel])
            assert torch.equal(y[:, channel], alone)


def test_ties_round_to_even_before_the_zero_point_is_added():
    assert fake_quantize_per_tensor(torch.tensor([0.5, 1.5, 2.5]), 1.0, 1).tolist() == [0.0, 2.0, 2.0]


def test_infinities_saturate_and_nan_stays():
    y = fake_quantize_per_tensor(torch.tensor([infinity, -infinity, nan, 9.2e14, -3e38]), 1e-4, 3)
    assert y[:2].tolist() == pytest.approx([124e-4, -131e-4])
    assert torch.isnan(y[2])
    assert y[3:].tolist() == pytest.approx([124e-4, -131e-4])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_output_has_the_inputs_dtype_and_format(dtype):
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64).to(dtype).to(memory_format=torch.channels_last)
    y = fake_quantize_per_tensor(x, 0.1, 0)
    assert y.dtype == dtype
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(y, fake_quantize_per_tensor(x.contiguous(), 0.1, 0))


def test_floating_zero_points_are_added_before_rounding():
    x, scales, zeros = torch.tensor([[0.3], [0.3]]), torch.tensor([1.0, 0.5]), torch.tensor([0.25, -0.75])
    expected = (torch.round(x * (1 / scales[:, None]) + zeros[:, None]).clamp(0, 15) - zeros[:, None]) * scales[:, None]
    assert torch.equal(fake_quantize_per_channel(x, scales, zeros, 0, 0, 15), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_scale_tensors_of_any_float_dtype(dtype):
    y = fake_quantize_per_tensor(torch.tensor([0.3]), torch.tensor([0.25], dtype=dtype), torch.tensor([0]))
    assert y.tolist() == [0.25]


def test_empty_and_zero_dim_inputs():
    assert fake_quantize_per_tensor(torch.empty(0, 3), 0.1, 0).shape == (0, 3)
    assert fake_quantize_per_tensor(torch.tensor(0.26), 0.1, 0).item() == pytest.approx(0.3)
    assert fake_quantize_per_channel(torch.empty(2, 0), torch.ones(2), torch.zeros(2, dtype=torch.int32)).shape == (
        2,
        0,
    )


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: fake_quantize_per_tensor(torch.zeros(1, dtype=torch.int32), 1.0, 0), TypeError),
        (lambda: fake_quantize_per_tensor(torch.zeros(1), torch.tensor([1]), 0), TypeError),
        (lambda: fake_quantize_per_tensor(torch.zeros(1), 0.0, 0), ValueError),
        (lambda: fake_quantize_per_tensor(torch.zeros(1), infinity, 0), ValueError),
        (lambda: fake_quantize_per_tensor(torch.zeros(1), 1.0, 200), ValueError),
        (lambda: fake_quantize_per_tensor(torch.zeros(1), 1.0, torch.tensor([200])), ValueError),
        (lambda: fake_quantize_per_tensor(torch.zeros(1), 1.0, 0.5), ValueError),
        (lambda: fake_quantize_per_tensor(torch.zeros(1), 1.0, 0, 5, -5), ValueError),
        (lambda: fake_quantize_per_tensor(torch.zeros(1), torch.empty(0), 0), ValueError),
        (lambda: fake_quantize_per_tensor(torch.zeros(2), torch.ones(2), 0), ValueError),
        (lambda: fake_quantize_per_channel(torch.zeros(2, 3), torch.ones(3), torch.zeros(3)), ValueError),
        (lambda: fake_quantize_per_channel(torch.zeros(2, 3), torch.ones(2), torch.zeros(2), 2), ValueError),
        (lambda: fake_quantize_per_channel(torch.zeros(2, 3), torch.ones(2, 1), torch.zeros(2)), ValueError),
        (
            lambda: torch.ops.zeropoint.fake_quantize_per_tensor(torch.zeros(1), torch.ones(0), torch.ones(1), 0, 1),
            RuntimeError,
        ),
        (
            lambda: torch.ops.zeropoint.fake_quantize_per_channel(
                torch.zeros(2), torch.ones(3), torch.ones(3), 0, 0, 1
            ),
            RuntimeError,
        ),
    ],
)
def test_what_makes_no_grid_is_refused(call, error):
    with pytest.raises(error):
        call()


# --- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("zero_point", [0, 7])
def test_the_mask_looks_at_the_rounded_code(dtype, zero_point):
    places = [(126.5, 1), (127.0, 1), (127.25, 1), (127.5, 0), (128.0, 0), (-128.5, 1), (-129.0, 0), (0.0, 1)]
    x = torch.tensor([place - zero_point for place, _ in places], dtype=dtype, requires_grad=True)
    fake_quantize_per_tensor(x, 1.0, zero_point).sum().backward()
    # with an odd zero point the tie at a half is that of x / scale
    parity = {127.5: 1 if zero_point % 2 else 0, -128.5: 0 if zero_point % 2 else 1}
    assert x.grad.tolist() == [parity.get(place, inside) for place, inside in places]


def test_non_finite_values_get_no_gradient():
    x = torch.tensor([infinity, -infinity, nan, 0.0], requires_grad=True)
    fake_quantize_per_tensor(x, 1.0, 0).sum().backward()
    assert x.grad.tolist() == [0.0, 0.0, 0.0, 1.0]


def test_gradient_is_the_masked_incoming_one():
    x = (torch.randn(4, 6) * 3).requires_grad_()
    incoming = torch.randn(4, 6)
    scales, zeros = torch.full((4,), 0.02), torch.tensor([0, 3, -3, 60], dtype=torch.int32)
    fake_quantize_per_channel(x, scales, zeros, 0, -64, 63).backward(incoming)
    rounded = torch.round(x.detach() * (1 / scales[:, None])) + zeros[:, None]
    assert torch.equal(x.grad, incoming * ((rounded >= -64) & (rounded <= 63)))


def test_scale_and_zero_point_get_no_gradient():
    scale = torch.tensor([0.1], requires_grad=True)
    fake_quantize_per_tensor(torch.randn(3, requires_grad=True), scale, 0).sum().backward()
    assert scale.grad is None


def test_gradient_of_a_gradient():
    x = torch.randn(5, requires_grad=True)
    (grad,) = torch.autograd.grad((fake_quantize_per_tensor(x, 0.1, 0) ** 2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert torch.equal(second, torch.full((5,), 2.0))


@modules
def test_one_module_used_three_times_in_a_forward(make):
    fake, weight = make(), nn.Parameter(torch.randn(4, 3))
    total = sum((fake(weight * factor) ** 2).sum() for factor in (1.0, 2.0, 3.0))
    total.backward()
    assert torch.isfinite(weight.grad).all()


# --- modules ------------------------------------------------------------------------------------------------------


@modules
def test_output_is_on_the_grid_of_the_buffers(make):
    fake, x = make(), torch.randn(4, 8)
    y = fake(x)
    call = fake_quantize_per_channel if fake.is_per_channel else fake_quantize_per_tensor
    axis = {"axis": fake.ch_axis} if fake.is_per_channel else {}
    expected = call(x, fake.scale, fake.zero_point, quant_min=fake.quant_min, quant_max=fake.quant_max, **axis)
    assert torch.equal(y, expected)
    assert fake.scale.shape == fake.zero_point.shape == ((4,) if fake.is_per_channel else (1,))


@modules
def test_a_disabled_observer_keeps_statistics_and_grid_and_still_rounds(make):
    fake = make()
    fake(torch.randn(4, 8))
    fake.disable_observer()
    before = {key: value.clone() for key, value in fake.state_dict().items()}
    x = torch.randn(4, 8) * 100
    y = fake(x)
    assert all(torch.equal(before[key], value) for key, value in fake.state_dict().items())
    assert not torch.equal(x, y)
    fake.enable_observer()
    fake(x)
    assert not torch.equal(before["scale"], fake.scale)


@modules
def test_disabled_fake_quant_returns_the_float_input_and_still_observes(make):
    fake = make()
    fake.disable_fake_quant()
    x = torch.randn(4, 8, requires_grad=True)
    y = fake(x)
    y.sum().backward()
    assert torch.equal(x, y)
    assert torch.equal(x.grad, torch.ones_like(x))
    assert torch.isfinite(fake.activation_post_process.min_val).all()
    fake.enable_fake_quant()
    assert not torch.equal(fake(x), x)


@modules
def test_flags_not_modes_decide(make):
    fake = make().eval()
    fake(torch.randn(4, 8))
    assert torch.isfinite(fake.activation_post_process.min_val).all()
    assert not torch.equal(fake.scale, torch.ones_like(fake.scale))


@modules
def test_flags_written_or_loaded_as_buffers_are_seen(make):
    fake, x = make(), torch.randn(4, 8)
    fake(x)
    fake.fake_quant_enabled[0] = 0
    assert torch.equal(fake(x), x)
    other = make()
    other.disable_fake_quant()
    fake.enable_fake_quant()
    fake(x)
    fake.load_state_dict({**fake.state_dict(), "fake_quant_enabled": other.fake_quant_enabled})
    assert torch.equal(fake(x), x)
    fake.fake_quant_enabled = torch.ones(1, dtype=torch.uint8)
    assert not torch.equal(fake(x), x)


def test_flag_of_no_element_is_an_error():
    fake = default_fused_act_fake_quant()
    fake.observer_enabled = torch.empty(0, dtype=torch.uint8)
    with pytest.raises(RuntimeError):
        fake(torch.randn(3))


def test_functions_for_apply_act_on_fake_quantizers_only():
    model = nn.Sequential(nn.Linear(2, 2), FakeQuantize(), MinMaxObserver(), PerChannelFakeQuantize())
    for function, name, value in (
        (disable_observer, "observer_enabled", 0),
        (enable_observer, "observer_enabled", 1),
        (disable_fake_quant, "fake_quant_enabled", 0),
        (enable_fake_quant, "fake_quant_enabled", 1),
    ):
        model.apply(function)
        assert [getattr(m, name).item() for m in model if isinstance(m, FakeQuantizeBase)] == [value, value]


@modules
def test_buffers_load_into_a_fresh_module(make):
    fake, fresh = make(), make()
    fake(torch.randn(4, 8))
    fresh.load_state_dict(fake.state_dict())
    assert torch.equal(fresh.scale, fake.scale)
    assert torch.equal(fresh.activation_post_process.min_val, fake.activation_post_process.min_val)


@modules
def test_buffer_names_and_dtypes(make):
    fake = make()
    fake(torch.randn(4, 8))
    state = fake.state_dict()
    assert {"scale", "zero_point", "fake_quant_enabled", "observer_enabled", "activation_post_process.min_val"} <= set(
        state
    )
    assert state["scale"].dtype == torch.float32
    floating = fake.qscheme is zp.per_channel_affine_float_qparams
    assert state["zero_point"].dtype == (torch.float32 if floating else torch.int32)


@modules
def test_casting_the_model_keeps_the_grid_float32(make):
    fake = make().half()
    y = fake(torch.randn(4, 8).half())
    assert y.dtype == torch.float16
    assert fake.scale.dtype == torch.float32
    assert fake.activation_post_process.min_val.dtype == torch.float32


@modules
def test_copies_and_pickles(make):
    fake, x = make(), torch.randn(4, 8)
    fake(x)
    fake.disable_observer()
    for twin in (copy.deepcopy(fake), pickle.loads(pickle.dumps(fake))):
        assert torch.equal(twin(x), fake(x))
        twin.disable_fake_quant()
        assert not torch.equal(fake(x), x)


@modules
def test_prints(make):
    assert "scale=" in repr(make())


@modules
def test_empty_batches_pass_through(make):
    fake = make()
    fake(torch.randn(4, 8))
    scale = fake.scale.clone()
    if not fake.is_per_channel:
        assert fake(torch.empty(0, 8)).shape == (0, 8)
    assert torch.equal(fake.scale, scale)


@modules
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_training_under_autocast(make, dtype):
    fake, layer = make(), nn.Linear(8, 4)
    x = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=dtype):
        y = fake(layer(x))
    y.float().sum().backward()
    assert y.dtype == dtype
    assert fake.activation_post_process.min_val.dtype == torch.float32
    assert torch.isfinite(layer.weight.grad).all()


def test_per_channel_fake_quantize_is_for_weights():
    fake = PerChannelFakeQuantize()
    assert (fake.dtype, fake.qscheme, fake.ch_axis, fake.is_per_channel) == (
        zp.qint8,
        zp.per_channel_symmetric,
        0,
        True,
    )
    x = torch.randn(1, 8, 3)
    assert fake(x).shape == x.shape
    assert fake.scale.shape == (1,)


@pytest.mark.parametrize("axis", [1, -1])
def test_per_channel_along_another_axis(axis):
    fake = PerChannelFakeQuantize(ch_axis=axis)
    fake(torch.randn(2, 3, 4))
    assert fake.scale.shape == ((3,) if axis == 1 else (4,))


def test_zero_is_exact_for_a_range_without_zero():
    fake = FakeQuantize(MinMaxObserver)
    x = torch.tensor([0.1, 1.0])
    fake(x)
    fake.disable_observer()
    assert fake(torch.zeros(1)).item() == 0.0


def test_fixed_qparams_stay():
    for make, scale, zero in (
        (default_fixed_qparams_range_0to1_fake_quant, 1 / 256, 0),
        (default_fixed_qparams_range_neg1to1_fake_quant, 2 / 256, 128),
    ):
        fake = make()
        fake(torch.randn(100) * 50)
        assert (fake.scale.item(), fake.zero_point.item()) == (scale, zero)
        assert [value.item() for value in fake.calculate_qparams()] == [scale, zero]


@pytest.mark.parametrize(
    "make",
    [
        lambda: FakeQuantize(MinMaxObserver()),
        lambda: FakeQuantize(quant_min=0, quant_max=300),
        lambda: FakeQuantize(quant_min=5, quant_max=4),
        lambda: FixedQParamsFakeQuantize(MinMaxObserver),
        lambda: FusedMovingAvgObsFakeQuantize(HistogramObserver),
        lambda: FusedMovingAvgObsFakeQuantize(
            MovingAveragePerChannelMinMaxObserver, qscheme=zp.per_channel_affine_float_qparams
        ),
    ],
)
def test_impossible_settings_are_refused(make):
    with pytest.raises(ValueError):
        make()


def test_dynamic_fake_quant_has_no_memory():
    fake = default_dynamic_fake_quant()
    fake(torch.tensor([-100.0, 100.0]))
    fake(torch.tensor([-1.0, 1.0]))
    assert fake.is_dynamic
    assert fake.scale.item() == pytest.approx(2 / 255)


# --- the fused module ---------------------------------------------------------------------------------------------


def test_fused_statistics_are_moving_averages():
    fused, plain = default_fused_act_fake_quant(), MovingAverageMinMaxObserver()
    for _ in range(4):
        x = torch.randn(20)
        fused(x)
        plain(x)
    assert torch.equal(fused.activation_post_process.min_val, plain.min_val)
    assert torch.equal(fused.activation_post_process.max_val, plain.max_val)


def test_fused_grids_are_those_of_dynamic_quantization():
    fused = default_fused_act_fake_quant()
    fused(torch.zeros(3))
    assert fused.scale.item() == pytest.approx(0.1)
    symmetric = default_fused_wt_fake_quant()
    symmetric(torch.tensor([-1.0, 1.0]))
    assert symmetric.scale.item() == pytest.approx(1 / 127)
    assert symmetric.zero_point.item() == 0


def test_fused_keeps_its_grid_while_fake_quant_is_off():
    fused = default_fused_act_fake_quant()
    fused.disable_fake_quant()
    fused(torch.randn(10))
    assert fused.scale.item() == 1.0


@pytest.mark.parametrize("values", [[1.0, 2.0], [-1.0, -2.0], [0.0, 0.0]])
def test_fused_symmetric_grids_stay_symmetric_on_one_sided_weights(values):
    fused = default_fused_wt_fake_quant()
    fused(torch.tensor(values))
    assert fused.zero_point.item() == 0
    unsigned = FusedMovingAvgObsFakeQuantize(qscheme=zp.per_tensor_symmetric)
    unsigned(torch.tensor(values))
    assert unsigned.zero_point.item() == 128


def test_fused_qparams_are_the_grid_that_training_saw():
    for make in (default_fused_act_fake_quant, default_fused_per_channel_wt_fake_quant):
        fused = make()
        fused(torch.randn(4, 8))
        scale, zero_point = fused.calculate_qparams()
        assert torch.equal(scale, fused.scale)
        assert torch.equal(zero_point, fused.zero_point)
    with pytest.warns(UserWarning, match="has seen no data"):
        default_fused_act_fake_quant().calculate_qparams()


def test_fused_eps_is_the_smallest_scale():
    fused = FusedMovingAvgObsFakeQuantize(quant_min=-127, quant_max=127, dtype=zp.qint8, eps=2.0**-12)
    fused(torch.tensor([-1e-3, 1e-3]))
    assert fused.scale.item() == 2.0**-12


# --- capture ------------------------------------------------------------------------------------------------------


@modules
def test_compiles_in_one_graph_and_trains(make):
    fake, x = make(), torch.randn(4, 8)
    fake(x)
    compiled = torch.compile(copy.deepcopy(fake), backend="aot_eager", fullgraph=True)
    first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = fake(first), compiled(second)
    y.sum().backward()
    z.sum().backward()
    assert torch.equal(y, z)
    assert torch.equal(first.grad, second.grad)


@modules
def test_exports(make):
    fake, x = make(), torch.randn(4, 8)
    fake(x)
    fake.disable_observer()
    exported = torch.export.export(fake, (x,)).module()
    assert torch.equal(exported(x * 2), fake(x * 2))


def test_operators_pass_torch_opcheck():
    x = torch.randn(3, 4, requires_grad=True)
    grid = (torch.full((1,), 0.1), torch.zeros(1, dtype=torch.int32), -128, 127)
    torch.library.opcheck(torch.ops.zeropoint.fake_quantize_per_tensor.default, (x, *grid))
    channels = (torch.full((4,), 0.1), torch.zeros(4, dtype=torch.int32), 1, -128, 127)
    torch.library.opcheck(torch.ops.zeropoint.fake_quantize_per_channel.default, (x, *channels))


@modules
def test_forward_reads_no_value_on_the_host(make, monkeypatch):
    if make is default_histogram_fake_quant:
        pytest.skip("a histogram's clipping search runs on the host")
    fake, x = make(), torch.randn(4, 8)
    fake(x)
    if hasattr(fake.activation_post_process, "min_val"):
        # as on CUDA, where observers do not look whether a value is finite
        for module in ("observers.minmax", "fake_quantize"):
            monkeypatch.setattr(f"zeropoint.ao.quantization.{module}.on_host", lambda values: False)
    read = []
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._local_scalar_dense.default:
                read.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        fake(x)
    assert read == []
