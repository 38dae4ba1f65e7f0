"""Where the names of ``torch.ao`` live in this package.

May import: every module of the package, to see what is there.
"""

from __future__ import annotations

import functools
import importlib
import types
from typing import Any, Final

__all__ = ["is_module", "is_of_interest", "new_name", "why_left"]

_PACKAGES: Final = {
    "torch.ao.quantization": "zeropoint.ao.quantization",
    "torch.quantization": "zeropoint.ao.quantization",
    "torch.ao.nn": "zeropoint.ao.nn",
    "torch.ao.ns": "zeropoint.ao.ns",
    "torch.ao": "zeropoint.ao",
    "torch.nn.quantized": "zeropoint.ao.nn.quantized",
    "torch.nn.quantizable": "zeropoint.ao.nn.quantizable",
    "torch.nn.intrinsic": "zeropoint.ao.nn.intrinsic",
    "torch.nn.qat": "zeropoint.ao.nn.qat",
    "torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks": (
        "zeropoint.distributed.algorithms.ddp_comm_hooks.quantization_hooks"
    ),
}

_QUANTIZATION: Final = ["zeropoint", "ao", "quantization"]
_SPLIT: Final = (
    *("fake_quantize", "fuse_modules", "fuser_method_mappings", "observer", "qconfig", "qconfig_mapping"),
    *("quantization_mappings", "quantize", "stubs", "utils"),
)
"""Modules of ``torch.ao.quantization`` whose names the package itself has too."""

_TOP_LEVEL: Final = frozenset(
    (
        *("qint8", "quint8", "qint32"),
        *("per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric"),
        *("per_channel_affine_float_qparams", "quantize_per_tensor", "quantize_per_channel"),
        *("quantize_per_tensor_dynamic", "dequantize", "int_repr", "q_scale", "q_zero_point"),
        *("q_per_channel_scales", "q_per_channel_zero_points", "q_per_channel_axis"),
    )
)
"""Names of ``torch`` itself that are names of ``zeropoint`` itself."""

_REASONS: Final = {
    "torch.ao.quantization.quantize_fx": "graph mode has no counterpart: use prepare and convert",
    "torch.quantization.quantize_fx": "graph mode has no counterpart: use prepare and convert",
    "torch.ao.quantization.quantize_pt2e": "export mode has no counterpart: use prepare and convert",
    "torch.backends.quantized": "not needed: zeropoint chooses its kernels itself",
    "torch.ops.quantized": "torch's operators take torch's quantized tensors: use the modules or zeropoint's functions",
    "torch.jit.quantized": "TorchScript has no counterpart: use torch.export",
    "torch.quint4x2": "there is no 4-bit dtype",
    "torch.quint2x4": "there is no 2-bit dtype",
    "torch.quantized_": "torch's function takes torch's quantized tensors",
}


def _below(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _top_level(name: str) -> bool:
    return name.startswith("torch.") and name.removeprefix("torch.") in _TOP_LEVEL


def is_of_interest(name: str) -> bool:
    """Whether a full dotted name belongs to what torch is removing."""
    if name == "torch.ao" or any(_below(name, package) for package in _PACKAGES if package != "torch.ao"):
        return True
    return _top_level(name) or any(_reason_fits(name, start) for start in _REASONS)


def _reason_fits(name: str, start: str) -> bool:
    return _below(name, start) or (start.endswith("_") and name.startswith(start))


def why_left(name: str) -> str:
    """Why a name of interest has no counterpart."""
    for start, reason in _REASONS.items():
        if _reason_fits(name, start):
            return reason
    return "no counterpart in zeropoint"


@functools.cache
def new_name(name: str) -> str | None:
    """The name here of what ``torch`` calls ``name``, or None.

    Args:
        name: a full dotted name, ``torch.nn.quantized.modules.linear.Linear``.

    Returns:
        A name that exists, as a module or in one.
    """
    if _top_level(name):
        return f"zeropoint.{name.removeprefix('torch.')}"
    package = max((old for old in _PACKAGES if _below(name, old)), key=len, default=None)
    if package is None:
        return None
    straight = _PACKAGES[package] + name.removeprefix(package)
    if _lookup(straight) is not None:
        return straight
    # torch splits its packages into modules of its own: the public package has the name as well.
    parts = straight.split(".")
    if "modules" in parts:
        public = [*parts[: parts.index("modules")], parts[-1]]
    elif parts[:3] == _QUANTIZATION and len(parts) == 5 and parts[3] in _SPLIT:
        public = [*_QUANTIZATION, parts[-1]]
    else:
        return None
    short = ".".join(public)
    return None if _lookup(short) is None or is_module(short) else short


def is_module(name: str) -> bool:
    """Whether a name of this package is a module, so that it can be imported."""
    return isinstance(_lookup(name), types.ModuleType)


@functools.cache
def _lookup(name: str) -> Any:
    """The object of a full dotted name of this package, or None."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            found = getattr(found, part, None)
        return found
    return None
