"""What holds for every quantized module: backends agree, layouts do not matter, copies compute the same."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint.module_examples import Example, examples, used
from reference_backend import ReferenceBackend
from zeropoint.tensor import QTensor

CASES = {name: example for name, example in examples().items() if "quantized" in name}
RECURRENT = ("LSTM", "GRU", "RNN", "Embedding", "MultiheadAttention")
ONE_TENSOR = {name: example for name, example in CASES.items() if not name.rpartition(".")[2].startswith(RECURRENT)}


def outputs(result: Any) -> list[Tensor]:
    """All tensors of a result, quantized ones as codes."""
    if isinstance(result, QTensor):
        return [result.int_repr()]
    if isinstance(result, Tensor):
        return [result]
    return [tensor for part in result for tensor in outputs(part)]


def assert_equal(result: Any, expected: Any) -> None:
    pairs = list(zip(outputs(result), outputs(expected), strict=True))
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def made(example: Example) -> tuple[Any, tuple[Any, ...]]:
    torch.manual_seed(0)
    return used(example), example.inputs()


@pytest.mark.parametrize("name", CASES)
def test_native_and_reference_give_the_same_integers(name: str) -> None:
    module, inputs = made(CASES[name])
    native = CASES[name].call(module, *inputs)
    with ReferenceBackend():
        assert_equal(CASES[name].call(module, *inputs), native)


@pytest.mark.parametrize("name", CASES)
def test_copies_compute_the_same(name: str) -> None:
    module, inputs = made(CASES[name])
    expected = CASES[name].call(module, *inputs)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_equal(CASES[name].call(twin, *inputs), expected)
        assert repr(twin) == repr(module)


@pytest.mark.parametrize("name", CASES)
def test_repr_names_the_module_on_one_line_a_part(name: str) -> None:
    module, _ = made(CASES[name])
    kind = name.rpartition(".")[2].removeprefix("QuantizedLinear")
    assert kind in repr(module)
    assert "object at" not in repr(module)


@pytest.mark.parametrize("name", ONE_TENSOR)
def test_an_empty_batch_gives_an_empty_batch(name: str) -> None:
    module, (x, *rest) = made(ONE_TENSOR[name])
    call = ONE_TENSOR[name].call
    full, empty = outputs(call(module, x, *rest))[0], outputs(call(module, x[:0], *rest))[0]
    assert empty.shape == (0, *full.shape[1:])
    assert empty.dtype == full.dtype


@pytest.mark.parametrize("name", ONE_TENSOR)
def test_the_layout_of_the_input_does_not_matter(name: str) -> None:
    module, (x, *rest) = made(ONE_TENSOR[name])
    call = ONE_TENSOR[name].call
    expected = call(module, x, *rest)
    turned = x.transpose(0, -1).contiguous().transpose(0, -1)
    assert_equal(call(module, turned, *rest), expected)
    strided = torch.cat([x, x], -1)[..., : x.shape[-1]]
    assert_equal(call(module, strided, *rest), expected)
    if x.dim() == 4:
        assert_equal(call(module, x.contiguous(memory_format=torch.channels_last), *rest), expected)
    if x.dim() == 5:
        assert_equal(call(module, x.contiguous(memory_format=torch.channels_last_3d), *rest), expected)
