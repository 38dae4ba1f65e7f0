"""Graphemes to phonemes with trained weights: two GRUs, two embeddings and a Linear, quantized dynamically."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from zeropoint.ao.nn import quantized as nnq
from zeropoint.ao.nn.quantized import dynamic as nnqd
from zeropoint.ao.quantization import quantize_dynamic

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture(scope="module")
def network(example: Callable[..., Any]) -> nn.Module:
    return example("networks.g2p", "load")


def test_int8_speaks_as_well_as_float(example: Callable[..., Any], network: nn.Module) -> None:
    known = example("networks.g2p", "words", 100)
    quantized = quantize_dynamic(network)
    kinds = {name: type(part) for name, part in quantized.named_children()}
    assert kinds == {
        "letters": nnq.Embedding,
        "encoder": nnqd.GRU,
        "phonemes": nnq.Embedding,
        "decoder": nnqd.GRU,
        "output": nnqd.Linear,
    }
    rates = []
    for model in (network, quantized):
        spoken = example("networks.g2p", "pronounce", model, list(known))
        rates.append(example("networks.g2p", "error_rate", spoken, list(known.values())))
    assert rates[0] < 0.12
    assert rates[1] <= rates[0] + 0.002


def test_int8_is_a_quarter_of_float(network: nn.Module) -> None:
    def size(model: nn.Module) -> int:
        return sum(value.numel() * value.element_size() for value in model.state_dict().values())

    assert size(quantize_dynamic(network)) < 0.27 * size(network)


def test_int8_runs_words_alone_and_together_alike(example: Callable[..., Any], network: nn.Module) -> None:
    quantized = quantize_dynamic(network)
    some = ["quantize", "zero", "point", "recurrent"]
    together = example("networks.g2p", "pronounce", quantized, some)
    # Linear lays one grid over its whole input, so a batch could differ there: these words are far from any tie.
    assert together == [example("networks.g2p", "pronounce", quantized, [word])[0] for word in some]
