"""Gradients as bytes: what communication hooks send, and how it is summed.

Two forms, both over flat float32 tensors:

* *rows*: every ``row`` elements have an affine grid of 256 codes; codes travel apart from scales and zero points.
* *blocks*: every ``block`` elements have a grid around zero with codes from ``-limit`` to ``limit``, where
  ``limit = 2 ** (bits - 1) - 1``: neither end is cut, and stochastic rounding has no bias. A row of bytes holds the
  float32 scales of its blocks, then their codes: int8, or for 4 bits ``code + 8`` in half bytes, element ``j`` of the
  block low and element ``j + block / 2`` high in byte ``j``.

A NaN or an infinity makes the scale of its row or block NaN or infinite, and every value that is read back from it NaN
or infinite: it cannot vanish on the way.

May import: ``grid``, ``ops.registry``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from zeropoint import grid
from zeropoint.ops.registry import operator

__all__ = ["SMALLEST_SCALE", "block_bytes", "blocks_per_chunk", "smallest_scale"]

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""The floor of a gradient's scale: as small as float32 goes, since gradients of 1e-6 are ordinary."""

_INDEX_STEP, _MIX_1, _MIX_2, _WORD = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0xFFFFFFFF


def block_bytes(bits: int, block: int) -> int:
    """Bytes that a block takes on the wire: its scale and its codes."""
    return 4 + block * bits // 8


def blocks_per_chunk(length: int, chunks: int, block: int) -> int:
    """Blocks in each of ``chunks`` equal parts that together hold ``length`` elements."""
    return -(-length // (chunks * block))


def smallest_scale(x: Tensor) -> Tensor:
    """:data:`SMALLEST_SCALE` on ``x``'s device. A plain number would be copied there, for which the host waits."""
    return x.new_full((), SMALLEST_SCALE, dtype=torch.float32)


def _require(fits: bool, what: str) -> None:
    """As the native kernels do: received sizes are not trusted."""
    if not fits:
        raise RuntimeError(what)


# --- rows ---------------------------------------------------------------------------------------------------------


def _rows(length: int, row: int) -> int:
    return -(-length // row)


def _in_rows(x: Tensor, row: int) -> Tensor:
    return pad(x, (0, _rows(x.numel(), row) * row - x.numel())).view(-1, row)


@operator(
    "row_range(Tensor x, int row) -> (Tensor, Tensor)",
    meta=lambda x, row: (x.new_empty(_rows(x.numel(), row)), x.new_empty(_rows(x.numel(), row))),
)
def row_range_reference(x: Tensor, row: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest value, and 0, of every ``row`` elements of a flat float32 tensor; NaN if there is a NaN."""
    low, high = torch.aminmax(_in_rows(x, row), dim=1)
    return low.clamp(max=0.0), high.clamp(min=0.0)


@operator(
    "row_quantize(Tensor x, Tensor qparams, int row) -> Tensor",
    meta=lambda x, qparams, row: x.new_empty((_rows(x.numel(), row), row), dtype=torch.uint8),
)
def row_quantize_reference(x: Tensor, qparams: Tensor, row: int) -> Tensor:
    """uint8 codes (rows, row) of a flat float32 tensor; what is missing in the last row counts as 0.

    Args:
        x: float32, 1-D.
        qparams: float32 (2, rows): scales, and zero points as whole numbers.
        row: elements a row.
    """
    rows = _rows(x.numel(), row)
    _require(qparams.shape == (2, rows), f"row_quantize: qparams must be (2, {rows}), got {tuple(qparams.shape)}")
    scale, zero_point = qparams[:, :, None]
    return grid.quantize(_in_rows(x, row), scale, zero_point.to(torch.int64), 0, 255).to(torch.uint8)


@operator(
    "row_sum(Tensor codes, Tensor qparams, int length) -> Tensor",
    meta=lambda codes, qparams, length: codes.new_empty(length, dtype=torch.float32),
)
def row_sum_reference(codes: Tensor, qparams: Tensor, length: int) -> Tensor:
    """The real values of several ranks' codes, added in the ranks' order.

    Args:
        codes: uint8 (ranks, rows, row).
        qparams: float32 (ranks, 2, rows).
        length: elements of the result, at most rows * row.
    """
    _require(length <= codes[0].numel(), f"row_sum: {codes[0].numel()} codes a rank do not hold {length} elements")
    total = codes.new_zeros(codes.shape[1:], dtype=torch.float32)
    for own, (scale, zero_point) in zip(codes, qparams[..., None], strict=True):
        total += grid.dequantize(own, scale, zero_point.to(torch.int64), torch.float32)
    return total.view(-1)[:length]


# --- blocks -------------------------------------------------------------------------------------------------------


def _noise(length: int, seed: int, device: torch.device) -> Tensor:
    """Uniform float32 numbers in [0, 1), one an element: a multiply-and-shift hash of its index and the seed."""
    word = (torch.arange(length, device=device) * _INDEX_STEP + seed) & _WORD
    word = ((word ^ (word >> 16)) * _MIX_1) & _WORD
    word = ((word ^ (word >> 13)) * _MIX_2) & _WORD
    word = word ^ (word >> 16)
    return (word >> 8).to(torch.float32) * 2.0**-24


@operator(
    "block_pack(Tensor x, int chunks, int bits, int block, int? seed) -> Tensor",
    meta=lambda x, chunks, bits, block, seed: x.new_empty(
        (chunks, blocks_per_chunk(x.numel(), chunks, block) * block_bytes(bits, block)), dtype=torch.uint8
    ),
)
def block_pack_reference(x: Tensor, chunks: int, bits: int, block: int, seed: int | None) -> Tensor:
    """A flat float32 tensor as bytes, in equal chunks; what is missing in the last one counts as 0.

    Args:
        x: float32, 1-D.
        chunks: rows of the result.
        bits: 8 or 4.
        block: elements that share a scale, a multiple of 32.
        seed: of stochastic rounding (32 bits); None rounds to nearest.

    Returns:
        uint8 (chunks, bytes).
    """
    _require_form("block_pack", bits, block)
    count = blocks_per_chunk(x.numel(), chunks, block)
    values = pad(x, (0, chunks * count * block - x.numel())).view(chunks * count, block)
    limit = 2 ** (bits - 1) - 1
    scale, zero_point = grid.symmetric_qparams(*torch.aminmax(values, dim=1), -limit, limit, 0, smallest_scale(x))
    if seed is None:
        codes = grid.quantize(values, scale[:, None], zero_point[:, None], -limit, limit)
    else:
        noise = _noise(values.numel(), seed, x.device).view_as(values)
        codes = grid.quantize_stochastic(values, scale[:, None], noise, -limit, limit)
    if bits == 4:
        low, high = (codes + 8).to(torch.uint8).view(-1, 2, block // 2).unbind(1)
        coded = low | (high << 4)
    else:
        coded = codes.to(torch.int8).view(torch.uint8)
    return torch.cat([scale.view(torch.uint8).view(chunks, -1), coded.view(chunks, -1)], dim=1)


def _require_form(who: str, bits: int, block: int) -> None:
    _require(bits in (4, 8), f"{who}: bits must be 8 or 4, got {bits}")
    _require(block >= 32 and block % 32 == 0, f"{who}: block must be a multiple of 32, got {block}")


def _block_values(who: str, data: Tensor, bits: int, block: int) -> Tensor:
    """float32 (rows, elements) of packed rows."""
    _require_form(who, bits, block)
    _require(
        data.dim() == 2 and data.shape[1] % block_bytes(bits, block) == 0,
        f"{who}: rows of shape {tuple(data.shape)} do not hold whole blocks of {block_bytes(bits, block)} bytes",
    )
    rows, count = data.shape[0], data.shape[1] // block_bytes(bits, block)
    scale = data[:, : 4 * count].contiguous().view(torch.float32)[:, :, None]
    coded = data[:, 4 * count :].reshape(rows, count, -1)
    codes = coded.view(torch.int8) if bits == 8 else torch.cat([coded & 15, coded >> 4], dim=2).to(torch.int8) - 8
    return grid.dequantize(codes, scale, torch.zeros_like(scale, dtype=torch.int64), torch.float32).view(rows, -1)


@operator(
    "block_sum(Tensor data, int bits, int block) -> Tensor",
    meta=lambda data, bits, block: data.new_empty(
        data.shape[1] // block_bytes(bits, block) * block, dtype=torch.float32
    ),
)
def block_sum_reference(data: Tensor, bits: int, block: int) -> Tensor:
    """The values of packed rows, added in order: float32, as long as one row's elements."""
    values = _block_values("block_sum", data, bits, block)
    total = torch.zeros_like(values[0])
    for own in values:
        total += own
    return total


@operator(
    "block_unpack(Tensor data, int bits, int block, int length) -> Tensor",
    meta=lambda data, bits, block, length: data.new_empty(length, dtype=torch.float32),
)
def block_unpack_reference(data: Tensor, bits: int, block: int, length: int) -> Tensor:
    """The first ``length`` values of packed rows, one row after the other: float32."""
    values = _block_values("block_unpack", data, bits, block).reshape(-1)
    _require(length <= values.numel(), f"block_unpack: {values.numel()} elements do not hold {length}")
    return values[:length]
