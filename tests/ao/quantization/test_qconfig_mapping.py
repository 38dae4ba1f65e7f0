"""QConfigMapping: who gets which qconfig."""

from __future__ import annotations

import pytest
from torch import nn

import zeropoint as zp
import zeropoint.ao.quantization as q

A, B, C, D, E = (q.QConfig(q.MinMaxObserver.with_args(quant_max=m), nn.Identity) for m in (1, 3, 7, 15, 31))


class MyLinear(nn.Linear):
    pass


def test_precedence_rises_from_global_to_order():
    mapping = q.QConfigMapping()
    assert mapping.resolve("block.fc", nn.Linear, 0) is None
    mapping.set_global(A)
    assert mapping.resolve("block.fc", nn.Linear, 0) is A
    mapping.set_object_type(nn.Linear, B)
    assert mapping.resolve("block.fc", nn.Linear, 0) is B
    mapping.set_module_name_regex("block.*", C)
    assert mapping.resolve("block.fc", nn.Linear, 0) is C
    mapping.set_module_name("block.fc", D)
    assert mapping.resolve("block.fc", nn.Linear, 0) is D
    mapping.set_module_name_object_type_order("block", nn.Linear, 0, E)
    assert mapping.resolve("block.fc", nn.Linear, 0) is E
    assert mapping.resolve("block.fc", nn.Linear, 1) is D
    assert mapping.resolve("block.fc", nn.Linear) is D


def test_none_means_float_and_is_not_passed_over():
    mapping = q.QConfigMapping().set_global(A).set_object_type(nn.Linear, None)
    assert mapping.resolve("fc", nn.Linear) is None


def test_subclasses_follow_the_most_specific_class():
    mapping = q.QConfigMapping().set_object_type(nn.Module, A).set_object_type(nn.Linear, B)
    assert mapping.resolve("x", MyLinear) is B
    assert mapping.resolve("x", nn.ReLU) is A
    mapping.set_object_type(MyLinear, C)
    assert mapping.resolve("x", MyLinear) is C


def test_a_name_covers_what_is_inside_and_the_nearest_wins():
    mapping = q.QConfigMapping().set_module_name("encoder", A).set_module_name("encoder.layers.0", B)
    assert mapping.resolve("encoder.layers.1.fc", nn.Linear) is A
    assert mapping.resolve("encoder.layers.0.fc", nn.Linear) is B
    assert mapping.resolve("encoder2", nn.Linear) is None


def test_the_first_pattern_that_matches_wins():
    mapping = q.QConfigMapping().set_module_name_regex("foo.*bar", A).set_module_name_regex("foo.*", B)
    assert mapping.resolve("foo.bar", nn.Linear) is A
    assert mapping.resolve("foo.baz", nn.Linear) is B
    assert mapping.resolve("a.foo", nn.Linear) is None


def test_a_broken_pattern_is_refused():
    with pytest.raises(ValueError, match="not a regular expression"):
        q.QConfigMapping().set_module_name_regex("(", A)


def test_dictionary_round_trip():
    mapping = (
        q.QConfigMapping()
        .set_global(A)
        .set_object_type(nn.Linear, B)
        .set_object_type("reshape", None)
        .set_module_name_regex("x.*", C)
        .set_module_name("y", D)
        .set_module_name_object_type_order("z", nn.Linear, 2, E)
    )
    data = mapping.to_dict()
    assert data[""] is A
    assert data["object_type"] == [(nn.Linear, B), ("reshape", None)]
    assert data["module_name_object_type_order"] == [("z", nn.Linear, 2, E)]
    assert q.QConfigMapping.from_dict(data) == mapping
    assert q.QConfigMapping.from_dict({"object_type": {nn.Linear: B}}).resolve("", nn.Linear) is B
    assert q.QConfigMapping.from_dict({}) == q.QConfigMapping()


def test_unknown_keys_are_refused():
    with pytest.raises(ValueError, match="module_names"):
        q.QConfigMapping.from_dict({"module_names": []})


def test_default_mappings():
    static, training = q.get_default_qconfig_mapping(), q.get_default_qat_qconfig_mapping()
    assert static.resolve("conv", nn.Conv2d) == q.get_default_qconfig()
    assert training.resolve("conv", nn.Conv2d) == q.get_default_qat_qconfig()
    assert static.resolve("up", nn.ConvTranspose2d).weight().qscheme is zp.per_channel_symmetric
    assert static.resolve("out", nn.Sigmoid).activation().calculate_qparams()[0].item() == 1 / 256
    assert training.resolve("out", nn.Tanh).activation().zero_point.item() == 128
    assert isinstance(static.resolve("norm", nn.LayerNorm).weight(), q.PlaceholderObserver)
    assert repr(static)
