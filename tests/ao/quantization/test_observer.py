"""Observers of ranges: what they see, what they ignore, and the grid they give."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import zeropoint as zp
from zeropoint.ao.quantization import (
    FixedQParamsObserver,
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    NoopObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
    RecordingObserver,
    default_dynamic_quant_observer,
    default_observer,
    default_per_channel_weight_observer,
    default_weight_observer,
    fake_quantize_per_tensor,
)

PER_TENSOR = (MinMaxObserver, MovingAverageMinMaxObserver, HistogramObserver)
PER_CHANNEL = (PerChannelMinMaxObserver, MovingAveragePerChannelMinMaxObserver)
ALL = PER_TENSOR + PER_CHANNEL

everyone = pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
per_tensor = pytest.mark.parametrize("kind", PER_TENSOR, ids=lambda kind: kind.__name__)
per_channel = pytest.mark.parametrize("kind", PER_CHANNEL, ids=lambda kind: kind.__name__)


# --- update rules -------------------------------------------------------------------------------------------------


def test_minmax_keeps_the_extremes_of_everything_seen():
    observer = MinMaxObserver()
    observer(torch.tensor([-1.0, 2.0]))
    observer(torch.tensor([-0.5, 5.0]))
    assert (observer.min_val.item(), observer.max_val.item()) == (-1.0, 5.0)


def test_moving_average_starts_with_the_first_batch():
    observer = MovingAverageMinMaxObserver(averaging_constant=0.25)
    observer(torch.tensor([-1.0, 2.0]))
    observer(torch.tensor([-2.0, 4.0]))
    assert (observer.min_val.item(), observer.max_val.item()) == (-1.25, 2.5)


def test_averaging_constant_of_one_remembers_the_newest_batch():
    observer = MovingAverageMinMaxObserver(averaging_constant=1)
    observer(torch.tensor([-9.0, 9.0]))
    observer(torch.tensor([-2.0, 4.0]))
    assert (observer.min_val.item(), observer.max_val.item()) == (-2.0, 4.0)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("strides", ["contiguous", "transposed"])
def test_per_channel_extremes_are_those_of_each_slice(axis, strides):
    x = torch.randn(3, 4, 5)
    x = x if strides == "contiguous" else x.transpose(0, 2)
    observer = PerChannelMinMaxObserver(ch_axis=axis)
    observer(x)
    others = [dim for dim in range(3) if dim != axis % 3]
    assert torch.equal(observer.min_val, x.amin(others))
    assert torch.equal(observer.max_val, x.amax(others))


def test_one_output_channel_keeps_shape_one():
    observer = PerChannelMinMaxObserver()
    observer(torch.randn(1, 8, 3))
    scale, zero_point = observer.calculate_qparams()
    assert scale.shape == zero_point.shape == (1,)


def test_a_vector_has_one_value_a_channel():
    observer = PerChannelMinMaxObserver()
    observer(torch.tensor([1.0, -2.0]))
    assert observer.min_val.tolist() == observer.max_val.tolist() == [1.0, -2.0]


@everyone
def test_forward_returns_its_input_itself(kind):
    x = torch.randn(2, 3, requires_grad=True)
    assert kind()(x) is x


@everyone
def test_statistics_hold_no_graph(kind):
    observer = kind()
    observer(torch.randn(2, 3, requires_grad=True))
    assert not observer.min_val.requires_grad


@everyone
def test_reset_forgets(kind):
    observer = kind()
    observer(torch.randn(2, 3) * 100)
    observer.reset()
    observer(torch.tensor([[-1.0, 1.0], [-1.0, 1.0]]))
    assert observer.min_val.amin() == -1.0
    assert observer.max_val.amax() == 1.0


# --- inputs -------------------------------------------------------------------------------------------------------


@everyone
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_statistics_are_float32_whatever_the_input(kind, dtype):
    observer = kind()
    x = torch.tensor([[-1.5, 0.25], [2.0, 3.0]])
    observer(x.to(dtype))
    assert observer.min_val.dtype == observer.max_val.dtype == torch.float32
    assert observer.min_val.amin() == -1.5


@everyone
def test_bounds_are_not_cast_to_int(kind):
    observer = kind()
    observer(torch.linspace(0.1, 0.9, 10).reshape(2, 5))
    assert abs(observer.max_val.amax().item() - 0.9) < 1e-6


@everyone
def test_an_empty_tensor_changes_nothing(kind):
    observer = kind()
    observer(torch.tensor([[-1.0, 1.0]]))
    before = {key: value.clone() for key, value in observer.state_dict().items()}
    assert observer(torch.empty(0, 4)).shape == (0, 4)
    assert all(torch.equal(before[key], value) for key, value in observer.state_dict().items())


@everyone
def test_non_finite_values_are_ignored_with_one_warning(kind):
    observer = kind()
    x = torch.tensor([[1.0, 2.0, float("inf")], [-float("inf"), float("nan"), -3.0]])
    with pytest.warns(UserWarning, match="NaN or infinite"):
        observer(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        observer(x)
    assert (observer.min_val.amin().item(), observer.max_val.amax().item()) == (-3.0, 2.0)
    assert torch.isfinite(observer.calculate_qparams()[0]).all()


@everyone
def test_only_non_finite_values_leave_it_unobserved(kind):
    observer = kind()
    with pytest.warns(UserWarning, match="NaN or infinite"):
        observer(torch.full((1, 3), float("nan")))
    with pytest.warns(UserWarning, match="has seen no data"):
        scale, zero_point = observer.calculate_qparams()
    assert (scale.tolist(), zero_point.tolist()) == ([1.0], [0])


@per_tensor
def test_zero_dim_float32_max_has_a_finite_scale(kind):
    observer = kind()
    observer(torch.tensor(torch.finfo(torch.float32).max))
    observer(torch.tensor(-torch.finfo(torch.float32).max))
    assert torch.isfinite(observer.calculate_qparams()[0]).all()


@everyone
def test_float64_beyond_float32_has_a_finite_scale(kind):
    observer = kind()
    observer(torch.tensor([[1e300, -1e300], [1e300, -1.0]], dtype=torch.float64))
    assert torch.isfinite(observer.calculate_qparams()[0]).all()


@everyone
@pytest.mark.parametrize("value", [5.0, -5.0, 0.0])
def test_a_constant_tensor_gives_a_grid_that_holds_it_and_zero(kind, value):
    observer = kind(quant_min=0, quant_max=255)
    observer(torch.full((2, 4), value))
    scale, zero_point = observer.calculate_qparams()
    assert (scale > 0).all()
    ends = (0 - zero_point) * scale, (255 - zero_point) * scale
    slack = scale / 2
    assert (ends[0] <= min(value, 0.0) + slack).all()
    assert (ends[1] >= max(value, 0.0) - slack).all()


@everyone
@pytest.mark.parametrize("low", [1.0, -2.0], ids=["positive", "negative"])
def test_zero_lies_inside_the_grid_of_one_sided_data(kind, low):
    observer = kind()
    observer(torch.rand(2, 50) + low)
    scale, zero_point = observer.calculate_qparams()
    assert ((zero_point >= 0) & (zero_point <= 255)).all()
    assert fake_quantize_per_tensor(torch.zeros(1), scale[:1], zero_point[:1], 0, 255).item() == 0.0


def test_a_moving_average_never_pushes_zero_out():
    observer = MovingAverageMinMaxObserver(averaging_constant=0.9)
    for x in (torch.rand(10) + 1, -torch.rand(10) - 1, -torch.rand(10) - 1):
        observer(x)
        scale, zero_point = observer.calculate_qparams()
        assert 0 <= zero_point.item() <= 255
        assert scale.item() > 0


def test_integer_tensors_are_observed():
    observer = MinMaxObserver()
    observer(torch.tensor([-3, 7]))
    assert (observer.min_val.item(), observer.max_val.item()) == (-3.0, 7.0)


@per_channel
def test_another_number_of_channels_is_an_error(kind):
    observer = kind()
    observer(torch.randn(3, 2))
    with pytest.raises(ValueError, match="3 channels"):
        observer(torch.randn(4, 2))


@per_channel
def test_a_missing_channel_dimension_is_an_error(kind):
    with pytest.raises(ValueError, match="ch_axis=1"):
        kind(ch_axis=1)(torch.randn(3))


@per_channel
def test_a_channel_that_saw_nothing_gets_the_default_grid(kind):
    observer = kind()
    with pytest.warns(UserWarning, match="NaN or infinite"):
        observer(torch.tensor([[float("nan")], [2.0]]))
    scale, zero_point = observer.calculate_qparams()
    assert (scale[0].item(), zero_point[0].item()) == (1.0, 0)
    assert scale[1].item() == pytest.approx(2 / 255)


# --- grids --------------------------------------------------------------------------------------------------------


@everyone
@pytest.mark.parametrize("dtype", [zp.qint8, zp.quint8, zp.qint32], ids=str)
def test_qparams_have_one_documented_dtype(kind, dtype):
    observer = kind(dtype=dtype)
    observer(torch.randn(4, 8))
    scale, zero_point = observer.calculate_qparams()
    assert (scale.dtype, zero_point.dtype) == (torch.float32, torch.int32)
    assert scale.shape == zero_point.shape == ((4,) if kind in PER_CHANNEL else (1,))


@everyone
def test_unobserved_qparams_warn_and_are_the_default(kind):
    with pytest.warns(UserWarning, match="has seen no data"):
        scale, zero_point = kind().calculate_qparams()
    assert (scale.tolist(), zero_point.tolist()) == ([1.0], [0])
    assert (scale.dtype, zero_point.dtype) == (torch.float32, torch.int32)


def test_symmetric_zero_points():
    def zero_point(**settings):
        observer = MinMaxObserver(qscheme=zp.per_tensor_symmetric, **settings)
        observer(torch.tensor([-1.0, 0.5]))
        return observer.calculate_qparams()[1].item()

    assert zero_point(dtype=zp.qint8) == 0
    assert zero_point(dtype=zp.quint8) == 128
    assert zero_point(dtype=zp.quint8, quant_min=0, quant_max=255) == 128
    assert zero_point(dtype=zp.quint8, quant_min=0, quant_max=127) == 63
    assert zero_point(dtype=zp.qint8, quant_min=-127, quant_max=127) == 0


def test_floating_zero_points_lie_where_the_range_begins():
    observer = PerChannelMinMaxObserver(qscheme=zp.per_channel_affine_float_qparams)
    observer(torch.tensor([[1.0, 2.0], [-3.0, 0.0]]))
    scale, zero_point = observer.calculate_qparams()
    assert zero_point.dtype == torch.float32
    assert torch.equal(zero_point, -torch.tensor([1.0, -3.0]) / scale)


@pytest.mark.parametrize(
    ("settings", "codes"),
    [
        ({}, (0, 255)),
        ({"dtype": zp.qint8}, (-128, 127)),
        ({"reduce_range": True}, (0, 127)),
        ({"dtype": zp.qint8, "reduce_range": True}, (-64, 63)),
        ({"dtype": zp.qint8, "quant_min": -8, "quant_max": 7}, (-8, 7)),
        ({"quant_max": 127}, (0, 127)),
    ],
)
def test_code_ranges(settings, codes):
    observer = MinMaxObserver(**settings)
    assert (observer.quant_min, observer.quant_max) == codes


def test_eps_is_the_smallest_scale():
    observer = MinMaxObserver(eps=2**-12)
    observer(torch.zeros(3))
    assert observer.calculate_qparams()[0].item() == 2**-12


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: MinMaxObserver(qscheme=zp.per_channel_affine), ValueError),
        (lambda: PerChannelMinMaxObserver(qscheme=zp.per_tensor_affine), ValueError),
        (lambda: MinMaxObserver(quant_min=10, quant_max=5), ValueError),
        (lambda: MinMaxObserver(quant_min=1, quant_max=5), ValueError),
        (lambda: MinMaxObserver(dtype=zp.qint8, quant_max=200), ValueError),
        (lambda: MinMaxObserver(dtype=torch.float32), TypeError),
        (lambda: MinMaxObserver(qscheme="symmetric"), TypeError),
        (lambda: MovingAverageMinMaxObserver(averaging_constant=0.0), ValueError),
        (lambda: MovingAverageMinMaxObserver(averaging_constant=0.5, is_dynamic=True), ValueError),
        (lambda: PerChannelMinMaxObserver(is_dynamic=True), ValueError),
        (lambda: HistogramObserver(is_dynamic=True), ValueError),
        (lambda: HistogramObserver(bins=0), ValueError),
        (lambda: FixedQParamsObserver(0.0, 0), ValueError),
        (lambda: FixedQParamsObserver(1.0, 300), ValueError),
    ],
)
def test_settings_that_make_no_grid_are_refused(make, error):
    with pytest.raises(error):
        make()


def test_torch_dtypes_and_schemes_mean_the_same():
    ours = MinMaxObserver(dtype=zp.qint8, qscheme=zp.per_tensor_symmetric)
    theirs = MinMaxObserver(dtype=torch.int8, qscheme=torch.per_tensor_symmetric)
    assert (ours.dtype, ours.qscheme) == (theirs.dtype, theirs.qscheme)


# --- buffers ------------------------------------------------------------------------------------------------------


@everyone
def test_state_dict_round_trip_into_a_fresh_observer(kind):
    observer, fresh = kind(), kind()
    observer(torch.randn(5, 7))
    fresh.load_state_dict(observer.state_dict())
    for ours, theirs in zip(observer.calculate_qparams(), fresh.calculate_qparams(), strict=True):
        assert torch.equal(ours, theirs)


@everyone
def test_buffers_are_named_as_in_torch(kind):
    names = {"eps", "min_val", "max_val"} | ({"histogram"} if kind is HistogramObserver else set())
    assert set(kind().state_dict()) == names


def test_state_of_another_number_of_channels_replaces_the_old():
    observer, other = PerChannelMinMaxObserver(), PerChannelMinMaxObserver()
    observer(torch.randn(3, 2))
    other(torch.randn(6, 2))
    observer.load_state_dict(other.state_dict())
    assert torch.equal(observer.min_val, other.min_val)


def test_allocate_gives_shapes_before_anything_was_seen():
    observer = PerChannelMinMaxObserver()
    observer.allocate(4)
    assert observer.state_dict()["min_val"].shape == (4,)
    observer(torch.randn(4, 2))
    assert torch.isfinite(observer.min_val).all()


def test_old_layouts_of_torch_load():
    observer = PerChannelMinMaxObserver()
    state = {"eps": torch.tensor([1e-7]), "min_vals": torch.tensor([-1.0, -2.0]), "max_vals": torch.tensor([1.0, 2.0])}
    observer.load_state_dict(state)
    assert observer.max_val.tolist() == [1.0, 2.0]
    plain = MinMaxObserver()
    plain.load_state_dict({"eps": torch.tensor([1e-7]), "min_val": torch.empty(0), "max_val": torch.empty(0)})
    assert plain.min_val.item() == float("inf")


@everyone
@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.bfloat16, nn.Module.double], ids=["half", "bf16", "double"])
def test_casting_the_model_keeps_statistics_exact(kind, cast):
    observer = kind()
    observer(torch.tensor([[0.1, 70000.1]]))
    before = observer.state_dict()
    model = cast(nn.Sequential(nn.Linear(2, 2), observer))
    after = model[1].state_dict()
    assert {key: value.dtype for key, value in before.items()} == {key: value.dtype for key, value in after.items()}
    assert all(torch.equal(before[key], after[key]) for key in before)


@everyone
def test_buffers_follow_the_module_to_another_device(kind):
    model = nn.Sequential(kind()).to("meta")
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}


@everyone
def test_factory_kwargs_choose_the_device(kind):
    if kind in (MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver, *ALL):
        assert kind(factory_kwargs={"device": "meta"}).min_val.device.type == "meta"


@everyone
def test_copies_and_pickles_are_independent(kind):
    observer = kind()
    observer(torch.randn(2, 3))
    for twin in (copy.deepcopy(observer), pickle.loads(pickle.dumps(observer))):
        assert torch.equal(twin.min_val, observer.min_val)
        twin(torch.full((2, 3), 100.0))
        assert observer.max_val.amax() < 100.0


# --- factories ----------------------------------------------------------------------------------------------------


def test_equal_factories_are_equal_and_hash_alike():
    first = MinMaxObserver.with_args(dtype=zp.qint8, quant_max=63)
    second = MinMaxObserver.with_args(quant_max=63).with_args(dtype=zp.qint8)
    assert first == second
    assert hash(first) == hash(second)
    assert first != MinMaxObserver.with_args(dtype=zp.qint8)
    assert first != MovingAverageMinMaxObserver.with_args(dtype=zp.qint8, quant_max=63)
    assert len({first, second}) == 1


def test_factories_with_unhashable_arguments_still_hash():
    factory = MinMaxObserver.with_args(factory_kwargs={"device": "cpu"})
    assert hash(factory) == hash(MinMaxObserver.with_args(factory_kwargs={"device": "cpu"}))


def test_torch_schemes_and_ours_make_equal_factories():
    ours = MinMaxObserver.with_args(qscheme=zp.per_tensor_symmetric)
    assert ours == MinMaxObserver.with_args(qscheme=torch.per_tensor_symmetric)


def test_factories_make_new_instances_and_print():
    factory = MinMaxObserver.with_args(quant_max=127)
    assert factory() is not factory()
    assert factory(quant_max=63).quant_max == 63
    assert repr(factory) == "MinMaxObserver.with_args(quant_max=127)"


def test_callable_arguments_are_called_at_construction():
    calls = []
    factory = MinMaxObserver.with_callable_args(quant_max=lambda: calls.append(1) or 127)
    assert calls == []
    assert factory().quant_max == 127
    assert factory(quant_max=63).quant_max == 63
    assert calls == [1]


def test_factories_copy_and_pickle():
    factory = default_weight_observer
    assert copy.deepcopy(factory) == factory
    assert pickle.loads(pickle.dumps(factory)) == factory


# --- the others ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("observer", [PlaceholderObserver(), NoopObserver(), RecordingObserver()])
def test_observers_that_measure_nothing_say_so(observer):
    with pytest.raises(RuntimeError, match="measures nothing"):
        observer.calculate_qparams()


def test_recording_keeps_copies():
    observer = RecordingObserver()
    x = torch.ones(2)
    observer(x)
    x.zero_()
    assert observer.get_tensor_value()[0].tolist() == [1.0, 1.0]


def test_fixed_qparams():
    observer = FixedQParamsObserver(1 / 256, 0)
    observer(torch.randn(3) * 100)
    scale, zero_point = observer.calculate_qparams()
    assert (scale.item(), zero_point.item(), scale.dtype, zero_point.dtype) == (1 / 256, 0, torch.float32, torch.int32)


def test_default_observers_declare_what_the_documentation_says():
    activation, weight, channels = default_observer(), default_weight_observer(), default_per_channel_weight_observer()
    assert (activation.dtype, activation.quant_min, activation.quant_max) == (zp.quint8, 0, 127)
    assert (weight.dtype, weight.qscheme, weight.quant_min) == (zp.qint8, zp.per_tensor_symmetric, -128)
    assert (channels.dtype, channels.qscheme, channels.ch_axis) == (zp.qint8, zp.per_channel_symmetric, 0)
    assert default_dynamic_quant_observer().is_dynamic


# --- capture ------------------------------------------------------------------------------------------------------


class Observed(nn.Module):
    def __init__(self, observer: nn.Module) -> None:
        super().__init__()
        self.observer = observer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.observer(x) + 1


@everyone
def test_an_observed_module_exports_and_still_observes(kind):
    observer = kind()
    observer(torch.zeros(2, 3))
    observer.reset()
    if kind in PER_CHANNEL:
        observer.allocate(2)
    exported = torch.export.export(Observed(observer), (torch.randn(2, 3),)).module()
    x = torch.tensor([[-1.0, 0.0, 4.0], [0.5, float("nan"), 1.0]])
    exported(x)
    state = dict(exported.named_buffers())
    assert state["observer.min_val"].amin() == -1.0
    assert state["observer.max_val"].amax() == 4.0


@everyone
def test_an_observed_module_compiles(kind):
    observer = kind()
    if kind in PER_CHANNEL:
        observer.allocate(2)
    compiled = torch.compile(Observed(observer), backend="aot_eager", fullgraph=True)
    x = torch.tensor([[-1.0, 0.0, 4.0], [0.5, 2.0, 1.0]])
    assert torch.equal(compiled(x), x + 1)
    assert (observer.min_val.amin().item(), observer.max_val.amax().item()) == (-1.0, 4.0)
