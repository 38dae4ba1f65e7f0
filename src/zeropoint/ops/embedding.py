"""Embeddings: rows of 8- or 4-bit codes, each with a grid of its own whose zero point need not be a code.

``weight`` is uint8. With 8 bits it holds ``(rows, columns)`` codes; with 4 bits two codes a byte, the first in the low
half, ``(rows, ceil(columns / 2))``. A value is ``(code - zero_point) * scale`` in float32.

May import: ``ops.registry``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeropoint.ops.registry import operator

__all__ = ["MODES", "pack_rows", "unpack_rows"]

MODES = ("sum", "mean", "max")
"""How a bag's rows become one."""


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes ``(rows, columns)`` as ``weight``: unchanged for 8 bits, two a byte for 4."""
    if bits == 8:
        return codes.contiguous()
    padded = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return padded[:, 0::2] | (padded[:, 1::2] << 4)


def unpack_rows(weight: Tensor, bits: int, columns: int) -> Tensor:
    """uint8 codes ``(…, columns)`` of rows as ``weight`` holds them."""
    if bits == 8:
        return weight
    return torch.stack((weight & 15, weight >> 4), -1).flatten(-2)[..., :columns]


def _check(indices: Tensor, weight: Tensor) -> None:
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < weight.shape[0]:
        raise IndexError(f"embedding indices must lie in [0, {weight.shape[0]}), got {indices.min()} … {indices.max()}")


@operator(
    "embedding(Tensor indices, Tensor weight, Tensor scale, Tensor zero_point, int bits, int columns) -> Tensor",
    meta=lambda indices, weight, scale, zero_point, bits, columns: scale.new_empty((*indices.shape, columns)),
)
def embedding_reference(
    indices: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor, bits: int, columns: int
) -> Tensor:
    """float32 rows ``(…, columns)`` at integer ``indices`` ``(…)``; scales and zero points are float32, one a row."""
    _check(indices, weight)
    at = indices.to(torch.int64)
    codes = unpack_rows(weight[at], bits, columns).to(torch.float32)
    return (codes - zero_point[at].unsqueeze(-1)) * scale[at].unsqueeze(-1)


@operator(
    "embedding_bag(Tensor indices, Tensor bounds, Tensor weight, Tensor scale, Tensor zero_point, int bits,"
    " int columns, str mode, Tensor? per_sample_weights, int? padding_idx) -> Tensor",
    meta=lambda indices, bounds, weight, scale, zero_point, bits, columns, *args: scale.new_empty(
        (bounds.shape[0] - 1, columns)
    ),
)
def embedding_bag_reference(
    indices: Tensor,
    bounds: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    bits: int,
    columns: int,
    mode: str,
    per_sample_weights: Tensor | None,
    padding_idx: int | None,
) -> Tensor:
    """One float32 row a bag, from the rows of its indices in their order, each sum rounded by itself.

    Bag ``b`` holds ``indices[bounds[b]:bounds[b + 1]]``, without those equal to ``padding_idx``. An empty bag is 0.
    ``per_sample_weights`` (float32, one an index) multiply the rows of sums. A mean divides the sum by the count.
    """
    _check(indices, weight)
    starts, ends = bounds[:-1].to(torch.int64), bounds[1:].to(torch.int64)
    counts = torch.zeros_like(starts)
    out = scale.new_zeros((starts.shape[0], columns))
    longest = int((ends - starts).max()) if starts.numel() else 0
    for step in range(longest):
        at = starts + step
        bags = torch.nonzero(at < ends).squeeze(1)
        chosen = indices[at[bags]]
        if padding_idx is not None:
            bags, chosen = bags[chosen != padding_idx], chosen[chosen != padding_idx]
        rows = embedding_reference(chosen, weight, scale, zero_point, bits, columns)
        if per_sample_weights is not None:
            rows = rows * per_sample_weights[at[bags]].unsqueeze(1)
        first = (counts[bags] == 0).unsqueeze(1)
        joined = torch.maximum(out[bags], rows) if mode == "max" else out[bags] + rows
        out[bags] = torch.where(first, rows, joined)
        counts[bags] += 1
    return out / counts.clamp(min=1).to(torch.float32).unsqueeze(1) if mode == "mean" else out
