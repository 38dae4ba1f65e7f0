"""The CUDA backend's kernels against the references: in Triton's interpreter, and on a GPU where there is one.

Without a GPU, ``TRITON_INTERPRET=1`` is set here, before Triton is first imported. On a GPU, the same tests run there:
``pytest tests/cuda -m cuda``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_check import REFERENCES, assert_same, moved

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def triton() -> Any:
    """Triton itself; without it the tests are skipped."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton: pip install --no-deps triton==3.9.0")
    return importlib.import_module("triton")


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, triton: Any) -> Iterator[torch.device]:
    """Where kernels run: on CPU tensors in the interpreter, or on a GPU."""
    from zeropoint import backends

    if request.param == "cuda":
        if not torch.cuda.is_available() or triton.knobs.runtime.interpret:
            pytest.skip("needs a GPU that torch sees, and no TRITON_INTERPRET")
        assert backends.triton.register()
        yield torch.device("cuda")
        return
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1 before triton is imported")
    with backends.triton.interpreter():
        yield torch.device("cpu")


@pytest.fixture
def check(device: torch.device) -> Callable[..., Any]:
    """``check(name, *arguments)``: the kernel gives what the operator's reference gives on the CPU."""

    def run(name: str, *arguments: Any, strides: bool = True) -> Any:
        wanted = REFERENCES[name](*arguments)
        there = [moved(value, device) for value in arguments]
        got = getattr(torch.ops.zeropoint, name).default(*there)
        assert_same(got, wanted)
        if strides and isinstance(wanted, Tensor) and wanted.numel():
            assert got.stride() == wanted.stride()
        return got

    return run
