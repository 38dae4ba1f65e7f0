"""A network for handwritten digits with trained weights, quantized statically."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zeropoint.ao.nn.quantized import dynamic as nnqd
from zeropoint.ao.quantization import convert, fuse_modules, get_default_qconfig, prepare, quantize_dynamic

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture(scope="module")
def float_network(example: Callable[..., Any]) -> nn.Module:
    return example("networks.mnist", "load")


@pytest.fixture(scope="module")
def digits(example: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    return example("networks.mnist", "digits")


@pytest.fixture(scope="module")
def int8_network(float_network: nn.Module, digits: tuple[Tensor, Tensor]) -> nn.Module:
    rows = [["conv_layers.0", "conv_layers.1"], ["conv_layers.3", "conv_layers.4"], ["conv_layers.6", "conv_layers.7"]]
    fused = fuse_modules(float_network, [*rows, ["fc_layers.0", "fc_layers.1"]])
    fused.qconfig = get_default_qconfig("x86")
    prepared = prepare(fused)
    with torch.inference_mode():
        prepared(digits[0][:256])
    return convert(prepared)


@torch.inference_mode()
def guesses(network: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([network(batch) for batch in x.split(256)]).argmax(1)


def test_int8_reads_digits_as_well_as_float(
    float_network: nn.Module, int8_network: nn.Module, digits: tuple[Tensor, Tensor]
) -> None:
    x, labels = digits[0][256:], digits[1][256:]
    floating, integer = guesses(float_network, x), guesses(int8_network, x)
    accuracy = [float((guess == labels).float().mean()) for guess in (floating, integer)]
    assert accuracy[0] > 0.75
    assert accuracy[1] >= accuracy[0] - 0.005
    assert float((floating == integer).float().mean()) >= 0.985


def test_dynamic_convolutions_read_digits_as_well_as_float(
    float_network: nn.Module, digits: tuple[Tensor, Tensor]
) -> None:
    x, labels = digits[0][256:], digits[1][256:]
    quantized = quantize_dynamic(float_network, {nn.Conv2d, nn.Linear})
    assert {type(part).__module__ for name, part in quantized.named_modules() if "Conv2d" in type(part).__name__} == {
        nnqd.Conv2d.__module__
    }
    accuracy = [float((guesses(m, x) == labels).float().mean()) for m in (float_network, quantized)]
    assert accuracy[1] >= accuracy[0] - 0.005


def test_every_layer_is_int8(int8_network: nn.Module) -> None:
    assert int8_network.quantization_summary.skipped == {}


def test_native_and_reference_give_the_same_logits(
    int8_network: nn.Module, digits: tuple[Tensor, Tensor], reference_backend: Any
) -> None:
    with torch.inference_mode():
        native = int8_network(digits[0][:8])
        with reference_backend:
            assert torch.equal(int8_network(digits[0][:8]), native)
