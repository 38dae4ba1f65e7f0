"""Uniform quantization of parameters: formula, layout, exact restoring, checks, files."""

from __future__ import annotations

import builtins
import copy
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from zeropoint import load_uniform, save_uniform, uniform_dequantize, uniform_quantize

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LIMITS = [1, 7, 127, 128, 255, 32767, 2**24, 2**24 + 1, 2**31 - 1, 2**31, 2**53, 2**53 + 1, 2**62, 2**63 - 1]


class One(nn.Module):
    """A model with a single parameter ``weight``."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone(), requires_grad=weight.requires_grad)


class Tied(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        if tie:
            self.second.weight = self.first.weight


def same_bits(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(x, y)


@given(
    st.lists(st.floats(width=64, allow_nan=False, allow_infinity=False), min_size=0, max_size=30),
    st.one_of(st.sampled_from(LIMITS), st.integers(1, 2**63 - 1), st.integers(1, 300)),
    st.sampled_from(FLOATS),
)
def test_no_code_wraps_and_restoring_is_exact(values, quant_max, dtype):
    weight = torch.tensor(values, dtype=torch.float64).to(dtype)
    weight = torch.where(torch.isfinite(weight), weight, torch.finfo(dtype).max)
    model, codes = uniform_quantize(One(weight), quant_max)
    quant, scale = codes["weight"]["quant"], codes["weight"]["scale"]
    assert quant.to(torch.float64).abs().le(float(quant_max)).all()
    assert all(-quant_max <= code <= quant_max for code in quant.tolist())
    assert torch.isfinite(scale)
    assert (quant.sign() * weight.sign() >= 0).all()  # a code that wrapped would change its sign
    assert same_bits(uniform_dequantize(One(torch.zeros_like(weight)), codes).weight, model.weight)


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=30), st.integers(1, 2**53))
def test_the_error_is_at_most_half_a_step(values, quant_max):
    weight = torch.tensor(values, dtype=torch.float64)
    model, codes = uniform_quantize(One(weight), quant_max)
    step = 1 / codes["weight"]["scale"]
    slack = weight.abs().max() * 4 * torch.finfo(torch.float64).eps
    assert ((model.weight - weight).abs() <= step / 2 + slack).all()


@given(
    st.lists(st.floats(-100, 100, width=16), min_size=1, max_size=30).filter(lambda v: max(map(abs, v)) > 0.1),
    st.sampled_from([(torch.float32, 127), (torch.float32, 2**24), (torch.float16, 127), (torch.bfloat16, 200)]),
)
def test_small_codes_follow_the_formula_in_the_parameters_dtype(values, kind):
    dtype, quant_max = kind
    weight = torch.tensor(values).to(dtype)
    model, codes = uniform_quantize(One(weight), quant_max)
    scale = quant_max / weight.abs().max()
    expected = torch.clamp(torch.round(scale * weight), -quant_max, quant_max)
    assert same_bits(codes["weight"]["scale"], scale)
    assert torch.equal(codes["weight"]["quant"].to(dtype), expected)
    assert same_bits(model.weight.detach(), expected / scale)


@pytest.mark.parametrize(
    ("quant_max", "dtype"),
    [
        (1, torch.int8),
        (127, torch.int8),
        (128, torch.int16),
        (2**15 - 1, torch.int16),
        (2**15, torch.int32),
        (2**31 - 1, torch.int32),
        (2**31, torch.int64),
        (2**63 - 1, torch.int64),
    ],
)
def test_codes_use_the_smallest_dtype(quant_max, dtype):
    _, codes = uniform_quantize(nn.Linear(2, 3), quant_max)
    assert codes["weight"]["quant"].dtype == dtype


def test_layout():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    statistics = model[1].running_var.clone()
    same, codes = uniform_quantize(model, 127)
    assert same is model
    assert set(codes) == {name for name, _ in model.named_parameters()}
    for entry in codes.values():
        assert set(entry) == {"quant", "scale"}
        assert entry["scale"].shape == ()
        assert not entry["quant"].requires_grad
        assert not entry["scale"].requires_grad
    assert torch.equal(model[1].running_var, statistics)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_element_keeps_its_sign_at_every_width(dtype):
    for quant_max in LIMITS:
        _, codes = uniform_quantize(One(torch.tensor([-0.7, 0.7, 0.1], dtype=dtype)), quant_max)
        assert codes["weight"]["quant"][:2].tolist() == [-quant_max, quant_max]


def test_zeros_have_the_scale_one():
    model, codes = uniform_quantize(One(torch.zeros(3)), 127)
    assert codes["weight"]["scale"].item() == 1.0
    assert model.weight.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("shape", [(0,), (0, 4), ()], ids=str)
def test_empty_and_zero_dim_parameters(shape):
    model, codes = uniform_quantize(One(torch.ones(shape)), 127)
    assert codes["weight"]["quant"].shape == shape
    assert torch.equal(uniform_dequantize(One(torch.zeros(shape)), codes).weight, model.weight)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_tiny_magnitudes_have_a_finite_scale(dtype):
    tiny = torch.finfo(dtype).smallest_normal
    model, codes = uniform_quantize(One(torch.tensor([tiny, -tiny / 2], dtype=dtype)), 127)
    assert torch.isfinite(codes["weight"]["scale"])
    assert torch.isfinite(model.weight).all()


def test_frozen_parameters_and_gradients_are_left_alone():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()
    uniform_quantize(model, 127)
    assert model.weight.requires_grad
    assert not model.bias.requires_grad
    assert torch.equal(model.weight.grad, torch.ones(2, 2))


def test_strides_are_kept():
    weight = torch.randn(4, 3).t()
    model = One(torch.zeros(0))
    model.weight = nn.Parameter(weight)
    uniform_quantize(model, 127)
    assert model.weight.stride() == weight.stride()


# --- ties ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [True, False], ids=["tied source", "untied source"])
@pytest.mark.parametrize("target", [True, False], ids=["tied target", "untied target"])
def test_ties_restore_both_ways(source, target):
    model, codes = uniform_quantize(Tied(source), 127)
    restored = uniform_dequantize(Tied(target), codes)
    assert torch.equal(restored.first.weight, model.first.weight)
    if source or not target:
        assert torch.equal(restored.second.weight, model.second.weight)
    assert (restored.first.weight is restored.second.weight) is target


def test_only_the_second_name_is_enough_for_a_tied_target():
    model, codes = uniform_quantize(Tied(), 127)
    del codes["first.weight"]
    assert torch.equal(uniform_dequantize(Tied(), codes).first.weight, model.first.weight)


# --- checks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant_max", [0, -1, 2**63, 2**70])
def test_quant_max_out_of_range(quant_max):
    with pytest.raises(ValueError, match=str(quant_max)):
        uniform_quantize(nn.Linear(2, 2), quant_max)


@pytest.mark.parametrize("quant_max", [127.0, "127", True, None])
def test_quant_max_of_another_type(quant_max):
    with pytest.raises(TypeError, match="quant_max"):
        uniform_quantize(nn.Linear(2, 2), quant_max)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (torch.tensor([1.0, float("nan")]), ValueError),
        (torch.tensor([1.0, float("inf")]), ValueError),
        (torch.tensor([1 + 2j]), TypeError),
        (torch.tensor([1, 2]), TypeError),
        (torch.empty(2, device="meta"), ValueError),
    ],
    ids=["nan", "inf", "complex", "int", "meta"],
)
def test_a_parameter_that_cannot_be_quantized_is_named_and_nothing_is_touched(bad, error):
    model = nn.Sequential(nn.Linear(2, 2), One(torch.zeros(1)))
    model[1].weight = nn.Parameter(bad, requires_grad=False)
    before = copy.deepcopy(model[0].state_dict())
    with pytest.raises(error, match=r"1\.weight"):
        uniform_quantize(model, 127)
    assert all(torch.equal(before[key], value) for key, value in model[0].state_dict().items())


def test_missing_and_misshapen_codes_are_named_and_nothing_is_touched():
    source = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    _, codes = uniform_quantize(source, 127)
    target = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(KeyError, match=r"1\.bias"):
        uniform_dequantize(target, {name: entry for name, entry in codes.items() if name != "1.bias"})
    with pytest.raises(ValueError, match=r"1\.bias"):
        uniform_dequantize(target, {**codes, "1.bias": {"quant": torch.zeros(3), "scale": torch.ones(())}})
    assert all(torch.equal(before[key], value) for key, value in target.state_dict().items())


def test_further_names_are_ignored():
    _, codes = uniform_quantize(nn.Linear(2, 2), 127)
    uniform_dequantize(nn.Linear(2, 2), {**codes, "other": {"quant": torch.zeros(1), "scale": torch.ones(())}})


# --- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_file_round_trip(tmp_path, dtype):
    pytest.importorskip("safetensors")
    model, codes = uniform_quantize(Tied().to(dtype), 1000)
    save_uniform(codes, tmp_path / "codes.safetensors")
    loaded = load_uniform(tmp_path / "codes.safetensors")
    assert set(loaded) == set(codes)
    for name, entry in codes.items():
        assert same_bits(loaded[name]["quant"], entry["quant"])
        assert same_bits(loaded[name]["scale"], entry["scale"])
    assert torch.equal(uniform_dequantize(Tied(False).to(dtype), loaded).second.weight, model.second.weight)


def test_another_file_is_refused(tmp_path):
    torch_files = pytest.importorskip("safetensors.torch")
    torch_files.save_file({"x": torch.zeros(1)}, str(tmp_path / "other.safetensors"))
    with pytest.raises(ValueError, match="not written by save_uniform"):
        load_uniform(tmp_path / "other.safetensors")


def test_without_safetensors_the_error_says_what_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("safetensors"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match="pip install safetensors"):
        save_uniform({}, tmp_path / "codes.safetensors")
