"""The CUDA backend: Triton kernels behind the operators' CUDA key, with the integers of the reference.

Nothing is imported before the first operator runs on a CUDA tensor: registered are small functions that then load the
kernels. Without Triton, or without a torch that knows CUDA, nothing is registered and the reference serves, which runs
on every device. Operators that are not listed here keep their reference on CUDA.

The same kernels run on CPU tensors in Triton's interpreter (:func:`interpreter`), which is how they are tested.

May import: torch, and its own kernels late. ``zeropoint.ops`` must be imported first: it defines the schemas.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["OPERATORS", "describe", "function", "interpreter", "register"]

_FAMILIES = {
    "quantize": (
        "quantize_per_tensor", "quantize_per_channel", "dequantize_per_tensor", "dequantize_per_channel", "requantize",
        "dynamic_range", "dynamic_qparams",
    ),
    "arithmetic": ("add", "div", "lookup", "mul", "prelu"),
    "distributed": ("block_pack", "block_sum", "block_unpack", "row_quantize", "row_range", "row_sum"),
    "embedding": ("embedding", "embedding_bag"),
    "fake_quantize": (
        "fake_quantize_backward", "fake_quantize_learnable_backward", "fake_quantize_per_channel",
        "fake_quantize_per_tensor", "moving_average_observe",
    ),
    "norm": ("batch_norm", "group_norm", "layer_norm"),
    "softmax": ("softmax",),
    "pool": ("adaptive_avg_pool", "avg_pool", "max_pool", "mean"),
    "conv": ("conv_pack", "conv", "conv_dynamic"),
    "linear": ("linear_pack", "linear", "linear_dynamic", "matmul"),
}  # fmt: skip

OPERATORS: dict[str, str] = {name: family for family, names in _FAMILIES.items() for name in names}
"""Every operator that has a kernel, and the module that holds it."""

_LOG = logging.getLogger("zeropoint")
_registered: torch.library.Library | None = None


def function(name: str) -> Callable[..., Any]:
    """What computes ``torch.ops.zeropoint.<name>`` with Triton; imports it, and Triton, if that has not happened.

    Raises:
        ImportError: there is no Triton.
    """
    module = importlib.import_module(f"{__name__}.{OPERATORS[name]}")
    found: Callable[..., Any] = getattr(module, name)
    return found


def _late(name: str) -> Callable[..., Any]:
    """An operator that loads its kernels when it is first called."""
    loaded: Callable[..., Any] | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal loaded
        if loaded is None:
            loaded = function(name)
        return loaded(*args, **kwargs)

    return functools.update_wrapper(call, _late, assigned=(), updated=())


def register() -> bool:
    """Registers the kernels for CUDA tensors, once, where torch was built with CUDA and Triton is installed.

    ``ZEROPOINT_TRITON=0`` keeps to the reference on CUDA.

    Returns:
        Whether they are registered.
    """
    global _registered
    if _registered is None:
        wanted = os.environ.get("ZEROPOINT_TRITON", "1") != "0"
        if not wanted or torch.version.cuda is None or importlib.util.find_spec("triton") is None:
            return False
        _registered = _register("CUDA")
    return True


def _register(key: str) -> torch.library.Library:
    library = torch.library.Library("zeropoint", "IMPL")
    for name in OPERATORS:
        library.impl(name, _late(name), key)
    return library


@contextmanager
def interpreter() -> Iterator[None]:
    """Inside this context, operators on CPU tensors run the CUDA backend's kernels in Triton's interpreter: for tests.

    Packed weights made outside do not fit inside, which costs time only.

    Raises:
        RuntimeError: ``TRITON_INTERPRET=1`` was not set before Triton was first imported, or CUDA tensors are served.
        ImportError: there is no Triton.
    """
    import triton

    if not triton.knobs.runtime.interpret:
        raise RuntimeError("the interpreter needs TRITON_INTERPRET=1 in the environment before triton is imported")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*[Oo]verrid", UserWarning)  # that is the purpose
        library = _register("CPU")
    try:
        yield
    finally:
        library._destroy()


def describe() -> dict[str, object]:
    """What runs on CUDA: "triton", or "reference" and why."""
    if _registered is not None:
        return {"backend": "triton", "operators": len(OPERATORS)}
    if os.environ.get("ZEROPOINT_TRITON") == "0":
        return {"backend": "reference", "why": "ZEROPOINT_TRITON=0"}
    if torch.version.cuda is None:
        return {"backend": "reference", "why": "this torch was built without CUDA"}
    return {"backend": "reference", "why": "triton is not installed"}
