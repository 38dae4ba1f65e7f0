"""Pooling and means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_check import channels_last, codes

Check = Callable[..., Any]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels-last": channels_last,
    "transposed": lambda x: x.transpose(-1, -2),
}


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pooling(check: Check, dtype: torch.dtype, layout: str) -> None:
    x = LAYOUTS[layout](codes(2, 3, 9, 7, dtype=dtype))
    for ceil_mode in (False, True):
        check("max_pool", x, (3, 2), (2, 2), (1, 1), (1, 2), ceil_mode)
        for padded, divisor in ((False, None), (True, None), (True, 7), (False, -2)):
            check("avg_pool", x, 4, (3, 2), (2, 1), (1, 1), ceil_mode, padded, divisor)
    for size in ((1, 1), (2, 3), (9, 7), (4, 10), (0, 2)):
        check("adaptive_avg_pool", x, 4, size)
    for axes in ((2, 3), (), (1,), (0, -1)):
        check("mean", x, 4, axes, axes == (1,))


def test_other_ranks(check: Check) -> None:
    check("max_pool", codes(1, 2, 5, 6, 4), (2, 2, 3), (1, 2, 1), (1, 0, 1), (1, 1, 1), True)
    check("avg_pool", codes(1, 2, 9), 3, (4,), (3,), (2,), True, False, None)
    check("adaptive_avg_pool", codes(1, 2, 9), 3, (2,))
    check("mean", codes(0, 3), 4, (0,), False)
    check("mean", codes(2, 70000), 4, (1,), False)
