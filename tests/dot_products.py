"""Whether this processor multiplies bytes in dot products: without them, others' int8 kernels saturate sums of two."""

from __future__ import annotations

from typing import Final

from zeropoint import backends

HAS_DOT_PRODUCTS: Final = any("vnni" in level or "neon" in level for level in backends.describe()["available"])
