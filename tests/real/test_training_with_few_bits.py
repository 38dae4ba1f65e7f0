"""Quantization-aware training on a real task, with so few bits that quantizing after training hurts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropoint as zp
from zeropoint.ao.quantization import (
    FakeQuantize,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    QConfig,
    convert,
    disable_observer,
    fuse_modules,
    fuse_modules_qat,
    prepare,
    prepare_qat,
)

pytestmark = [pytest.mark.real, pytest.mark.slow]

ACTIVATIONS = {"quant_min": 0, "quant_max": 7, "dtype": zp.quint8}
WEIGHTS = {"quant_min": -8, "quant_max": 7, "dtype": zp.qint8, "qscheme": zp.per_tensor_symmetric}
FUSED = [[f"conv_layers.{i}", f"conv_layers.{i + 1}"] for i in (0, 3, 6)] + [["fc_layers.0", "fc_layers.1"]]
HELD_BACK = 797


@pytest.fixture(scope="module")
def digits(example: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    x, labels = example("networks.mnist", "digits")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order], labels[order]


def train(network: nn.Module, digits: tuple[Tensor, Tensor], steps: int) -> None:
    x, labels = digits[0][HELD_BACK:], digits[1][HELD_BACK:]
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-4)
    choice = torch.Generator().manual_seed(1)
    for _ in range(steps):
        batch = torch.randint(0, len(x), (64,), generator=choice)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x[batch]), labels[batch]).backward()
        optimizer.step()


@torch.no_grad()
def right(network: nn.Module, digits: tuple[Tensor, Tensor]) -> float:
    return float((network(digits[0][:HELD_BACK]).argmax(1) == digits[1][:HELD_BACK]).float().mean())


@pytest.fixture(scope="module")
def network(example: Callable[..., Any], digits: tuple[Tensor, Tensor]) -> nn.Module:
    """The trained network, used to these digits too: so training later repairs quantization and nothing else."""
    floating = example("networks.mnist", "load").train()
    train(floating, digits, 200)
    return floating.eval()


@pytest.fixture(scope="module")
def trained(network: nn.Module, digits: tuple[Tensor, Tensor]) -> nn.Module:
    model = fuse_modules_qat(copy.deepcopy(network).train(), FUSED)
    model.qconfig = QConfig(
        FakeQuantize.with_args(observer=MovingAverageMinMaxObserver, **ACTIVATIONS),
        FakeQuantize.with_args(observer=MovingAverageMinMaxObserver, averaging_constant=1.0, **WEIGHTS),
    )
    prepared = prepare_qat(model)
    train(prepared, digits, 400)
    prepared.apply(disable_observer)
    return prepared.eval()


def test_training_recovers_most_of_what_few_bits_lose(
    network: nn.Module, trained: nn.Module, digits: tuple[Tensor, Tensor]
) -> None:
    fused = fuse_modules(network, FUSED)
    fused.qconfig = QConfig(MinMaxObserver.with_args(**ACTIVATIONS), MinMaxObserver.with_args(**WEIGHTS))
    prepared = prepare(fused)
    with torch.no_grad():
        prepared(digits[0][HELD_BACK:])
    floating, after = right(network, digits), right(convert(prepared), digits)
    aware = right(convert(trained, use_precomputed_fake_quant=True), digits)
    assert floating - after >= 0.01, "too few bits to lose anything: the test shows nothing"
    assert aware - after >= 0.5 * (floating - after)


def test_conversion_changes_no_prediction(trained: nn.Module, digits: tuple[Tensor, Tensor]) -> None:
    quantized = convert(trained, use_precomputed_fake_quant=True)
    with torch.no_grad():
        x = digits[0][:1000]
        assert torch.equal(trained(x).argmax(1), quantized(x).argmax(1))
