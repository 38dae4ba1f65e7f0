"""The mappings: complete, copied, extensible; and the names that programs import."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from zeropoint.ao import quantization
from zeropoint.ao.nn import intrinsic as nni
from zeropoint.ao.nn import quantized as nnq
from zeropoint.ao.nn.quantized import dynamic as nnqd
from zeropoint.ao.quantization import (
    DeQuantStub,
    QuantStub,
    default_qconfig,
    get_default_dynamic_quant_module_mappings,
    get_default_qconfig_propagation_list,
    get_default_static_quant_module_mappings,
    get_dynamic_quant_module_class,
    get_static_quant_module_class,
    swap_module,
)
from zeropoint.ao.quantization.quantization_mappings import twin_of

STATIC = {
    QuantStub: nnq.Quantize,
    DeQuantStub: nnq.DeQuantize,
    nn.Linear: nnq.Linear,
    nn.Conv1d: nnq.Conv1d,
    nn.Conv2d: nnq.Conv2d,
    nn.Conv3d: nnq.Conv3d,
    nn.BatchNorm2d: nnq.BatchNorm2d,
    nn.BatchNorm3d: nnq.BatchNorm3d,
    nn.ReLU: nnq.ReLU,
    nn.ReLU6: nnq.ReLU6,
    nn.ELU: nnq.ELU,
    nn.LeakyReLU: nnq.LeakyReLU,
    nn.Hardswish: nnq.Hardswish,
    nn.Hardsigmoid: nnq.Hardsigmoid,
    nn.Mish: nnq.Mish,
    nn.Softplus: nnq.Softplus,
    nn.Sigmoid: nnq.Sigmoid,
    nn.Tanh: nnq.Tanh,
    nnq.FloatFunctional: nnq.QFunctional,
    nni.LinearReLU: nni.quantized.LinearReLU,
    nni.ConvReLU1d: nni.quantized.ConvReLU1d,
    nni.ConvReLU2d: nni.quantized.ConvReLU2d,
    nni.ConvReLU3d: nni.quantized.ConvReLU3d,
    nni.BNReLU2d: nni.quantized.BNReLU2d,
    nni.BNReLU3d: nni.quantized.BNReLU3d,
}


def test_the_static_mapping_holds_every_pair() -> None:
    mapping = get_default_static_quant_module_mappings()
    assert {kind: mapping[kind] for kind in STATIC} == STATIC


def test_the_dynamic_mapping_holds_every_pair() -> None:
    mapping = get_default_dynamic_quant_module_mappings()
    assert mapping[nn.Linear] is nnqd.Linear
    assert mapping[nni.LinearReLU] is nni.quantized.dynamic.LinearReLU
    assert {mapping[getattr(nn, name)] for name in ("LSTM", "GRU", "RNN")} == {nnqd.LSTM, nnqd.GRU, nnqd.RNN}


def test_getters_give_copies() -> None:
    get_default_static_quant_module_mappings()[nn.Linear] = nn.Identity
    assert get_default_static_quant_module_mappings()[nn.Linear] is nnq.Linear


def test_a_class_is_found_by_its_nearest_base() -> None:
    class Mine(nn.Linear):
        pass

    mapping = get_default_static_quant_module_mappings()
    assert twin_of(Mine, mapping) == (nn.Linear, nnq.Linear)
    mapping[Mine] = nn.Identity
    assert twin_of(Mine, mapping) == (Mine, nn.Identity)
    assert twin_of(NonDynamicallyQuantizableLinear, mapping) is None
    assert twin_of(nnq.BatchNorm2d, mapping) is None
    assert twin_of(nn.GLU, mapping) is None


def test_class_getters_take_more_pairs_and_name_what_is_missing() -> None:
    assert get_static_quant_module_class(nn.Conv2d) is nnq.Conv2d
    assert get_dynamic_quant_module_class(nn.Linear) is nnqd.Linear
    assert get_static_quant_module_class(nn.GLU, {nn.GLU: nn.Identity}) is nn.Identity
    with pytest.raises(ValueError, match="GLU has no static quantized class"):
        get_static_quant_module_class(nn.GLU)


def test_what_keeps_its_inputs_grid_is_not_in_the_propagation_list() -> None:
    observed = get_default_qconfig_propagation_list()
    assert {nn.Conv2d, nn.Linear, QuantStub, nni.ConvReLU2d} <= observed
    assert not observed & {nn.ReLU, nn.MaxPool2d, nn.Dropout, DeQuantStub}


def test_swap_module_needs_a_qconfig_and_a_twin() -> None:
    mapping = get_default_dynamic_quant_module_mappings()
    linear = nn.Linear(2, 2)
    assert swap_module(linear, mapping) is linear
    linear.qconfig = default_qconfig
    assert type(swap_module(linear, mapping)) is nnqd.Linear
    glu = nn.GLU()
    glu.qconfig = default_qconfig
    assert swap_module(glu, mapping) is glu


NAMES = [
    "quantize_per_tensor",
    "quantize_per_channel",
    "quantize_per_tensor_dynamic",
    "dequantize",
    "int_repr",
    "q_scale",
    "q_zero_point",
    "q_per_channel_scales",
    "q_per_channel_zero_points",
    "q_per_channel_axis",
    "is_quantized",
    "qscheme",
    "fake_quantize_per_tensor",
    "fake_quantize_per_channel",
    "quantized_linear",
    "quantized_linear_dynamic",
    "MinMaxObserver",
    "PerChannelMinMaxObserver",
    "HistogramObserver",
    "MovingAverageMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "PlaceholderObserver",
    "FixedQParamsObserver",
    "FakeQuantize",
    "PerChannelFakeQuantize",
    "FixedQParamsFakeQuantize",
    "FusedMovingAvgObsFakeQuantize",
    "default_observer",
    "default_weight_observer",
    "default_dynamic_quant_observer",
    "get_observer_state_dict",
    "load_observer_state_dict",
    "QConfig",
    "QConfigMapping",
    "default_qconfig",
    "default_dynamic_qconfig",
    "default_per_channel_qconfig",
    "default_weight_only_qconfig",
    "default_per_channel_qat_qconfig",
    "QuantStub",
    "DeQuantStub",
    "prepare",
    "prepare_qat",
    "convert",
    "quantize",
    "quantize_dynamic",
    "quantize_qat",
    "fuse_modules",
    "fuse_modules_qat",
    "get_default_qconfig",
    "get_default_qat_qconfig",
    "disable_observer",
    "enable_observer",
    "disable_fake_quant",
    "enable_fake_quant",
    "QuantWrapper",
    "add_quant_dequant",
    "propagate_qconfig_",
    "swap_module",
    "get_default_static_quant_module_mappings",
    "no_observer_set",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_the_workflow(name: str) -> None:
    assert name in quantization.__all__
    assert hasattr(quantization, name)


def test_dataless_modules_have_no_parameters() -> None:
    assert not list(nnq.Linear(2, 2).parameters())
    assert all(isinstance(b, torch.Tensor) for b in nnq.Linear(2, 2).buffers())
