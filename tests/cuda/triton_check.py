"""What the tests of the CUDA backend share: references, inputs, and what "the same" means."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from zeropoint import ops

REFERENCES = {
    name.removesuffix("_reference"): function
    for family in vars(ops).values()
    if isinstance(family, ModuleType)
    for name, function in vars(family).items()
    if name.endswith("_reference")
}


def moved(value: Any, device: torch.device) -> Any:
    """Arguments on a device; strides are kept."""
    if not isinstance(value, Tensor):
        return value
    if value.device == device:
        return value.clone(memory_format=torch.preserve_format) if value.numel() else value
    if value.is_contiguous():
        return value.to(device)
    base = torch.empty(value.untyped_storage().nbytes() // value.element_size(), dtype=value.dtype, device=device)
    return base.as_strided(value.shape, value.stride(), value.storage_offset()).copy_(value)


def assert_same(got: Any, wanted: Any) -> None:
    """Equal numbers, dtypes and shapes; NaN equals NaN."""
    if isinstance(wanted, tuple):
        for one, other in zip(got, wanted, strict=True):
            assert_same(one, other)
        return
    got = got.cpu()
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(nan=0.0), wanted.nan_to_num(nan=0.0)) or torch.equal(got, wanted)


def codes(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Codes over the full range of a dtype."""
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, shape, dtype=torch.int64).to(dtype)


def channels_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)
