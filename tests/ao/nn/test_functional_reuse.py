"""One FloatFunctional for two operations: a warning that names it."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn

from zeropoint.ao.nn.quantized import FloatFunctional, QFunctional
from zeropoint.ao.quantization import (
    QuantStub,
    convert,
    default_qat_qconfig,
    default_qconfig,
    prepare,
    prepare_qat,
)


class Block(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.sum = FloatFunctional()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.sum.add(x, x)
        return x


class Model(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.quant = QuantStub()
        self.block = Block(times)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.quant(x))


def test_a_functional_used_twice_in_a_pass_is_named() -> None:
    model = Model(2).eval()
    model.qconfig = default_qconfig
    prepared = prepare(model)
    with pytest.warns(UserWarning, match=r"FloatFunctional 'block\.sum' is used more than once"):
        prepared(torch.randn(4))
    training = Model(2).train()
    training.qconfig = default_qat_qconfig
    with pytest.warns(UserWarning, match=r"'block\.sum'"):
        prepare_qat(training)(torch.randn(4))


def test_one_use_in_each_of_many_passes_is_right() -> None:
    model = Model(1).eval()
    model.qconfig = default_qconfig
    prepared = prepare(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for candidate in (prepared, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
            for _ in range(3):
                candidate(torch.randn(4))
            candidate.block(torch.randn(4))  # a part alone is no pass of the model
            candidate.block(torch.randn(4))


def test_conversion_leaves_no_hook_of_it() -> None:
    model = Model(1).eval()
    model.qconfig = default_qconfig
    prepared = prepare(model)
    prepared(torch.randn(4))
    converted = convert(prepared)
    assert type(converted.block.sum) is QFunctional
    assert len(converted._forward_hooks) == 0
    assert len(converted._forward_pre_hooks) == 0


def test_a_pass_that_fails_leaves_nothing_counted() -> None:
    model = Model(1).eval()
    model.qconfig = default_qconfig
    prepared = prepare(model)
    with pytest.raises(AttributeError):
        prepared("no tensor")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared(torch.randn(4))
