"""The speaker encoder with trained weights: three layers of LSTM on inputs of many orders of magnitude."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from zeropoint.ao.nn.quantized import dynamic as nnqd
from zeropoint.ao.quantization import quantize_dynamic

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture(scope="module")
def network(example: Callable[..., Any]) -> nn.Module:
    return example("networks.speaker", "load")


def test_int8_tells_voices_apart_as_float_does(example: Callable[..., Any], network: nn.Module) -> None:
    spoken = example("networks.speaker", "utterances")
    samples = [sound for _, sound in spoken]
    speakers = [v for v, sound in spoken for _ in range(example("networks.speaker", "pieces_of", sound))]
    quantized = quantize_dynamic(network)
    assert (type(quantized.lstm), type(quantized.linear)) == (nnqd.LSTM, nnqd.Linear)
    vectors = [example("networks.speaker", "embed", model, samples) for model in (network, quantized)]
    assert float((vectors[0] * vectors[1]).sum(1).mean()) > 0.99
    rates = [example("networks.speaker", "equal_error_rate", v, speakers) for v in vectors]
    assert rates[1] <= rates[0] + 0.005
