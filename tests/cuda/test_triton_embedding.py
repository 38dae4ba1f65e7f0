"""Rows of embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Check = Callable[..., Any]


def table(bits: int) -> tuple[Any, ...]:
    weight = torch.randint(0, 256, (11, 19 if bits == 8 else 10), dtype=torch.uint8)
    return weight, torch.rand(11), torch.randn(11), bits, 19


@pytest.mark.parametrize("bits", [8, 4])
def test_rows(check: Check, bits: int) -> None:
    check("embedding", torch.randint(0, 11, (3, 4)), *table(bits))
    check("embedding", torch.empty(0, dtype=torch.int32), *table(bits))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags(check: Check, bits: int, mode: str) -> None:
    indices, bounds = torch.randint(0, 11, (20,), dtype=torch.int32), torch.tensor([0, 3, 3, 10, 20])
    for weights, padding in ((None, None), (torch.randn(20), None), (None, int(indices[4]))):
        own = weights if mode == "sum" else None
        check("embedding_bag", indices, bounds, *table(bits), mode, own, padding)


def test_an_index_outside_the_table_is_a_row_of_nan(device: torch.device) -> None:
    weight, scale, zero_point, *rest = table(8)
    tensors = [value.to(device) for value in (torch.tensor([1, 11, -1]), weight, scale, zero_point)]
    rows = torch.ops.zeropoint.embedding(*tensors, *rest)
    assert rows.isnan().all(1).tolist() == [False, True, True]
