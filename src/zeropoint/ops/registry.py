"""How an operator is declared: a schema over plain tensors, a reference in plain torch, and its output's shape.

The reference runs on every device and is the definition; a native kernel registered for the CPU
(``zeropoint.backends.cpu``) or CUDA takes its place there and must give the same integers.

May import: torch only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["native_operator", "operator"]

_LIBRARY = torch.library.Library("zeropoint", "DEF")
_F = TypeVar("_F", bound=Callable[..., Any])


def operator(schema: str, *, meta: Callable[..., Any], differentiable: bool = False) -> Callable[[_F], _F]:
    """Registers ``torch.ops.zeropoint.<name>`` with the decorated function as its reference.

    Args:
        schema: ``"name(Tensor x, float scale) -> Tensor"``.
        meta: makes empty outputs of the right shape, dtype and strides from the same arguments; torch.compile and
            torch.export run it in place of the kernel.
        differentiable: a gradient is registered elsewhere. Otherwise outputs do not require one: rounding has none,
            and a part of the graph that is lost in silence would be worse than none.

    Returns:
        The reference, unchanged: tests call it to compare backends.
    """
    name = schema.partition("(")[0]

    def register(reference: _F) -> _F:
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
        if not differentiable:
            _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"zeropoint::{name}", _outside_of_onnx(name, meta), lib=_LIBRARY)
        return reference

    return register


def native_operator(schema: str) -> None:
    """Declares an operator that only the native library has: a shorter way to call another one, for eager code alone.

    It takes plain tensors on the CPU and is not traced: what is compiled or exported calls the operator it stands for.
    """
    _LIBRARY.define(schema)
    _LIBRARY.impl(schema.partition("(")[0], torch.library.fallthrough_kernel, "Autograd")


def _outside_of_onnx(name: str, meta: Callable[..., Any]) -> Callable[..., Any]:
    """``meta``, unless torch.onnx traces a model: what it makes of an unknown operator says nothing about a cure."""

    @functools.wraps(meta)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export():
            raise RuntimeError(
                f"torch.onnx.export does not know the operator zeropoint::{name}: export a converted model with "
                "zeropoint.onnx.export, which does"
            )
        return meta(*args, **kwargs)

    return checked
