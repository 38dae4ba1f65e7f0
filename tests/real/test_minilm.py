"""all-MiniLM-L6-v2 with trained weights, quantized dynamically."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture(scope="module")
def float_network(example: Callable[..., Any]) -> nn.Module:
    return example("networks.minilm", "load")


@pytest.fixture(scope="module")
def int8_network(example: Callable[..., Any], float_network: nn.Module) -> nn.Module:
    return example("imagenet", "quantize_dynamic", float_network)


@pytest.fixture(scope="module")
def vectors(example: Callable[..., Any], float_network: nn.Module, int8_network: nn.Module) -> tuple[Tensor, ...]:
    texts, judged = example("networks.data", "lee_documents")
    embed = [example("networks.minilm", "embed", network, texts) for network in (float_network, int8_network)]
    return (*embed, judged)


def similarity(vectors: Tensor, judged: Tensor, example: Callable[..., Any]) -> float:
    above = torch.triu_indices(len(judged), len(judged), 1).unbind()
    return example("networks.measure", "correlation", (vectors @ vectors.T)[above], judged[above])


def test_float_network_is_the_published_one(vectors: tuple[Tensor, ...], example: Callable[..., Any]) -> None:
    assert similarity(vectors[0], vectors[2], example) == pytest.approx(0.656, abs=0.001)


def test_int8_vectors_point_where_float_ones_do(vectors: tuple[Tensor, ...]) -> None:
    cosine = (vectors[0] * vectors[1]).sum(1)
    assert float(cosine.mean()) >= 0.98
    assert float(cosine.min()) >= 0.97


def test_int8_similarity_agrees_with_people_as_float_does(
    vectors: tuple[Tensor, ...], example: Callable[..., Any]
) -> None:
    assert similarity(vectors[1], vectors[2], example) >= 0.64


def test_every_linear_layer_is_int8(int8_network: nn.Module) -> None:
    assert [name for name, m in int8_network.named_modules() if type(m) is nn.Linear] == []


def test_native_and_reference_give_the_same_vectors(
    int8_network: nn.Module, reference_backend: Any, example: Callable[..., Any]
) -> None:
    tokens, mask = example("networks.minilm", "tokenizer")(["Integers are exact.", "So is this."])
    with torch.inference_mode():
        native = int8_network(tokens, mask)
        with reference_backend:
            assert torch.equal(int8_network(tokens, mask), native)


def test_compiled_network_gives_the_eager_vectors(int8_network: nn.Module, example: Callable[..., Any]) -> None:
    tokens, mask = example("networks.minilm", "tokenizer")(["Integers are exact.", "So is this."])
    compiled = torch.compile(int8_network, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(tokens, mask), int8_network(tokens, mask))
