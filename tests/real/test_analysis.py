"""EfficientNet-Lite0 with one min-max grid a weight, which costs it a tenth of its answers: found, and mended."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zeropoint.analysis import correct_bias, equalize, output_sqnr, own_errors, quantize_with_accuracy, weight_errors
from zeropoint.ao.quantization import MinMaxObserver, QConfig, convert, fuse_modules, prepare
from zeropoint.dtypes import per_tensor_symmetric, qint8, quint8

pytestmark = [pytest.mark.real, pytest.mark.slow]

PER_TENSOR = QConfig(
    MinMaxObserver.with_args(dtype=quint8), MinMaxObserver.with_args(dtype=qint8, qscheme=per_tensor_symmetric)
)


@pytest.fixture(scope="module")
def network(example: Callable[..., Any]) -> nn.Module:
    network = example("networks.efficientnet_lite0", "load")
    return fuse_modules(network, network.fuse_lists()).requires_grad_(False)


@pytest.fixture(scope="module")
def crops(example: Callable[..., Any]) -> Tensor:
    return example("networks.data", "calibration_crops", 32)


@pytest.fixture(scope="module")
def other_crops(example: Callable[..., Any]) -> Tensor:
    return example("networks.data", "other_crops", 5)


@pytest.fixture(scope="module")
def wanted(network: nn.Module, other_crops: Tensor) -> Tensor:
    return logits(network, other_crops)


@torch.inference_mode()
def logits(network: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([network(batch) for batch in x.split(20)])


def agreement(wanted: Tensor, got: Tensor) -> float:
    return float((got.argmax(1) == wanted.argmax(1)).double().mean())


def quantized(network: nn.Module, crops: Tensor) -> nn.Module:
    network = copy.deepcopy(network)
    network.qconfig = PER_TENSOR
    prepared = prepare(network, inplace=True)
    logits(prepared, crops)
    return convert(prepared, inplace=True)


def test_the_depthwise_layers_are_named_and_most_of_the_loss_is_mended(
    network: nn.Module, crops: Tensor, other_crops: Tensor, wanted: Tensor
) -> None:
    plain_network = quantized(network, crops)
    worst = list(weight_errors(network, plain_network))
    assert all("depthwise" in name for name in worst[:2])
    assert sum("depthwise" in name for name in worst[:8]) >= 6
    assert "depthwise" in next(iter(own_errors(network, plain_network, crops[:4])))

    plain = logits(plain_network, other_crops)
    corrected = logits(quantized(correct_bias(network, crops, qconfig=PER_TENSOR), crops), other_crops)
    equal = equalize(network, crops)
    both = logits(quantized(correct_bias(equal, crops, qconfig=PER_TENSOR), crops), other_crops)
    lost = 1 - agreement(wanted, plain)
    assert lost > 0.08
    assert 1 - agreement(wanted, corrected) <= 0.65 * lost
    assert 1 - agreement(wanted, both) <= 0.5 * lost  # at least half is recovered
    assert output_sqnr(wanted, both) >= output_sqnr(wanted, plain) + 6


def test_equalization_keeps_what_a_network_with_relu6_computes(
    network: nn.Module, crops: Tensor, other_crops: Tensor, wanted: Tensor
) -> None:
    equal = equalize(network, crops[:4])
    assert output_sqnr(wanted[:20], logits(equal, other_crops[:20])) > 90  # on pictures that it has not seen, too
    x = crops[:4]
    # What the paper does, ReLU in place of ReLU6, this network does not survive.
    assert output_sqnr(logits(network, x), logits(equalize(network, x, relu6="relu"), x)) < 20


def test_as_much_quantization_as_accuracy_allows(
    network: nn.Module, crops: Tensor, example: Callable[..., Any]
) -> None:
    pictures, labels = example("networks.data", "imagenet_pictures")

    def evaluate(candidate: nn.Module) -> float:
        return float((logits(candidate, pictures).argmax(1) == labels).double().mean())

    result = quantize_with_accuracy(network, crops[:8], evaluate, 0.01, qconfig=PER_TENSOR, progress=False)
    assert result.accuracy >= result.float_accuracy - 0.01
    assert any("Quantized" in module._get_name() for module in result.model.modules())
