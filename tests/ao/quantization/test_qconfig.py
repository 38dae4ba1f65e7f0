"""QConfig and its common settings."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import zeropoint as zp
import zeropoint.ao.quantization as q
from zeropoint.ao.quantization import qconfig as module

SETTINGS = sorted(name for name in module.__all__ if name.endswith(("_qconfig", "_4bit", "_v2")) and name[0] in "dfp")


def test_holds_what_it_is_given():
    qconfig = q.QConfig(activation=q.MinMaxObserver, weight=q.default_weight_observer)
    assert qconfig.activation is q.MinMaxObserver
    assert tuple(qconfig) == (q.MinMaxObserver, q.default_weight_observer)
    assert qconfig._fields == ("activation", "weight")


@pytest.mark.parametrize("field", ["activation", "weight"])
def test_instances_are_refused(field):
    factories = {"activation": q.MinMaxObserver, "weight": q.MinMaxObserver, field: q.MinMaxObserver()}
    with pytest.raises(ValueError, match=f"{field} is an instance of MinMaxObserver"):
        q.QConfig(**factories)


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="weight must be a class or a factory"):
        q.QConfig(q.MinMaxObserver, torch.qint8 if hasattr(torch, "qint8") else 3)


def test_equal_settings_are_equal_and_hash_alike():
    def make(bits):
        return q.QConfig(
            q.MinMaxObserver.with_args(quant_max=2**bits - 1), q.FakeQuantize.with_args(observer=q.MinMaxObserver)
        )

    assert make(7) == make(7)
    assert hash(make(7)) == hash(make(7))
    assert q.qconfig_equals(make(7), make(7))
    assert not q.qconfig_equals(make(7), make(6))
    assert q.qconfig_equals(None, None)
    assert not q.qconfig_equals(None, make(7))


def test_nested_factories_compare_by_value():
    first = q.FakeQuantize.with_args(observer=q.MinMaxObserver.with_args(quant_max=7))
    second = q.FakeQuantize.with_args(observer=q.MinMaxObserver.with_args(quant_max=7))
    assert first == second
    assert hash(first) == hash(second)


@pytest.mark.parametrize("dtype", [zp.qint8, torch.int8, "qint8"], ids=str)
def test_prints_whatever_the_dtype(dtype):
    assert "MinMaxObserver" in repr(q.QConfig(q.MinMaxObserver.with_args(dtype=dtype), nn.Identity))


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_builds_prints_copies_and_pickles(name):
    qconfig = getattr(q, name)
    for factory in qconfig:
        assert isinstance(factory(), nn.Module)
    assert repr(qconfig)
    assert copy.deepcopy(qconfig) == qconfig
    assert pickle.loads(pickle.dumps(qconfig)) == qconfig


@pytest.mark.parametrize("name", SETTINGS)
def test_no_setting_gives_up_half_of_its_codes_unasked(name):
    for factory in getattr(q, name):
        made = factory()
        observer = getattr(made, "activation_post_process", made)
        assert not getattr(observer, "reduce_range", False)


def test_static_settings():
    activation, weight = (factory() for factory in q.default_qconfig)
    assert (activation.dtype, activation.quant_min, activation.quant_max) == (zp.quint8, 0, 127)
    assert (weight.dtype, weight.qscheme) == (zp.qint8, zp.per_tensor_symmetric)
    channels = q.default_per_channel_qconfig.weight()
    assert (channels.dtype, channels.qscheme, channels.ch_axis) == (zp.qint8, zp.per_channel_symmetric, 0)


def test_dynamic_settings():
    activation = q.default_dynamic_qconfig.activation()
    assert isinstance(activation, q.PlaceholderObserver)
    assert (activation.dtype, activation.quant_min, activation.quant_max, activation.is_dynamic) == (
        zp.quint8,
        0,
        255,
        True,
    )
    assert q.per_channel_dynamic_qconfig.weight().qscheme is zp.per_channel_symmetric
    assert q.float16_dynamic_qconfig.weight().dtype == torch.float16


def test_weight_only_settings():
    activation, weight = (factory() for factory in q.default_weight_only_qconfig)
    assert isinstance(activation, q.PlaceholderObserver)
    assert isinstance(weight, q.PerChannelMinMaxObserver)


def test_training_settings():
    activation, weight = (factory() for factory in q.default_per_channel_qat_qconfig)
    assert isinstance(activation.activation_post_process, q.MovingAverageMinMaxObserver)
    assert (activation.dtype, activation.quant_min, activation.quant_max) == (zp.quint8, 0, 255)
    assert isinstance(weight, q.PerChannelFakeQuantize)
    assert (weight.dtype, weight.qscheme) == (zp.qint8, zp.per_channel_symmetric)


def test_embedding_settings():
    weight = q.float_qparams_weight_only_qconfig_4bit.weight()
    assert (weight.qscheme, weight.quant_min, weight.quant_max) == (zp.per_channel_affine_float_qparams, 0, 15)


@pytest.mark.parametrize("backend", module.BACKENDS)
def test_all_backends_mean_the_same(backend):
    assert q.get_default_qconfig(backend) == q.get_default_qconfig()
    assert q.get_default_qat_qconfig(backend) == q.get_default_qat_qconfig()
    activation, weight = (factory() for factory in q.get_default_qconfig(backend))
    assert isinstance(activation, q.HistogramObserver)
    assert (activation.quant_min, activation.quant_max) == (0, 255)
    assert weight.qscheme is zp.per_channel_symmetric


def test_training_versions():
    plain, fused = q.get_default_qat_qconfig(version=0), q.get_default_qat_qconfig(version=1)
    assert type(plain.activation()) is q.FakeQuantize
    assert type(fused.activation()) is q.FusedMovingAvgObsFakeQuantize
    assert type(fused.weight()) is q.FusedMovingAvgObsFakeQuantize


@pytest.mark.parametrize(
    "call",
    [
        lambda: q.get_default_qconfig("tpu"),
        lambda: q.get_default_qconfig("x86", 1),
        lambda: q.get_default_qat_qconfig("tpu"),
        lambda: q.get_default_qat_qconfig("x86", 2),
        lambda: q.get_default_qconfig_mapping("tpu"),
    ],
)
def test_unknown_backends_and_versions_are_refused(call):
    with pytest.raises(ValueError, match="choose from"):
        call()


def test_a_factory_that_makes_no_module_is_found():
    with pytest.raises(TypeError, match="qconfig of Linear makes int for its weight"):
        module._assert_valid_qconfig(q.QConfig(nn.Identity, int), nn.Linear(1, 1))
    module._assert_valid_qconfig(q.default_qconfig, nn.Linear(1, 1))
    module._assert_valid_qconfig(None, nn.Linear(1, 1))


def test_memoryless_activations_and_reused_inputs():
    assert module._activation_is_memoryless(q.default_dynamic_qat_qconfig)
    assert not module._activation_is_memoryless(q.default_qat_qconfig)
    assert module._is_reuse_input_qconfig(q.default_reuse_input_qconfig)
    assert not module._is_reuse_input_qconfig(q.default_qconfig)
    assert not module._is_reuse_input_qconfig(None)
