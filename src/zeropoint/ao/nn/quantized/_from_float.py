"""What a calibrated float module tells its quantized twin: the weight on its grid, and the output's grid.

May import: ``tensor``, ``dtypes``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zeropoint.ao.nn._weight_norm import effective_weight
from zeropoint.dtypes import QDtype, as_qdtype, qint8
from zeropoint.tensor import QTensor, make_qtensor

__all__ = [
    "calibrated_weight",
    "describe",
    "has_seen",
    "is_fake_quantize",
    "output_grid",
    "quantized_weight",
    "require_class",
]


def describe(module: nn.Module) -> str:
    """The module's class, and its path where ``prepare`` left it, for messages."""
    path = getattr(module, "module_path", "")
    return f"{type(module).__name__} {path!r}" if path else type(module).__name__


def require_class(module: Any, allowed: tuple[type, ...], twin: type) -> None:
    """Raises TypeError unless ``module`` is an instance of one of the ``allowed`` classes."""
    if not isinstance(module, allowed):
        names = ", ".join(f"{c.__module__}.{c.__name__}" for c in allowed)
        raise TypeError(f"{twin.__module__}.{twin.__name__}.from_float takes {names}, got {type(module).__name__}")


def calibrated_weight(
    module: nn.Module,
    layer: nn.Module,
    axis: int,
    use_precomputed_fake_quant: bool,
    default: Callable[[], Any] | None = None,
) -> tuple[QTensor, Tensor | None]:
    """Quantized weight and float bias of a float, fused or QAT module.

    Args:
        module: the module with the qconfig, or the ``weight_fake_quant``.
        layer: the module with weight and bias: ``module`` itself, or what it wraps. One that keeps a batch norm beside
            its weights gives both folded through ``folded_weight_bias()``.
        axis: the output channels' dimension of the weight.
        use_precomputed_fake_quant: take the grid that ``weight_fake_quant`` holds, whether it saw the weight or not.
        default: makes the observer where there is no qconfig.

    Raises:
        RuntimeError: there is no qconfig and no default.
    """
    if hasattr(layer, "folded_weight_bias"):
        weight, bias = layer.folded_weight_bias()  # type: ignore[operator]
    else:
        weight, bias = effective_weight(layer), layer.bias
    observer = getattr(module, "weight_fake_quant", None)
    # What was trained keeps its grid: the weight is shown only to observers that have seen none.
    trained = observer is not None and has_seen(observer)
    if observer is None:
        qconfig = getattr(module, "qconfig", None)
        if qconfig is None and default is None:
            raise RuntimeError(f"{describe(module)} has no qconfig, so there is no observer for its weight: set one")
        factory = default if qconfig is None else qconfig.weight
        observer = factory().to(weight.device)  # type: ignore[misc]
    assert isinstance(bias, Tensor | None)
    return quantized_weight(weight, observer, axis, not trained, use_precomputed_fake_quant and trained, module), bias


def has_seen(observer: Any) -> bool:
    """Whether an observer, or the one inside a fake quantize, saw data; one that keeps no range needs none."""
    inner = getattr(observer, "activation_post_process", observer)
    low, high = getattr(inner, "min_val", None), getattr(inner, "max_val", None)
    if not isinstance(low, Tensor) or not isinstance(high, Tensor):
        return True
    return bool((low <= high).any())


def is_fake_quantize(observer: Any) -> bool:
    """Whether an observer also simulates the rounding, so that it carries the grid it simulates."""
    return isinstance(observer, nn.Module) and hasattr(observer, "fake_quant_enabled")


def quantized_weight(
    weight: Tensor,
    observer: Any,
    axis: int,
    observe: bool = True,
    use_precomputed: bool = False,
    module: nn.Module | None = None,
) -> QTensor:
    """The weight on the grid of its observer, codes kept inside the observer's bounds.

    Args:
        weight: float weight; float16 and bfloat16 are widened.
        observer: an observer or a fake quantize.
        axis: the output channels' dimension, which per-channel grids must use.
        observe: show the weight to the observer first.
        use_precomputed: of a fake quantize, take the grid it holds even where it is switched off.
        module: for messages.

    Raises:
        TypeError: the observer's dtype is not qint8. ValueError: its channels lie along another axis.
    """
    where = "the weight" if module is None else f"the weight of {describe(module)}"
    if as_qdtype(observer.dtype) != qint8:
        raise TypeError(f"{where} must be observed as qint8, its observer has {observer.dtype}")
    values = weight.detach()
    if values.dtype not in (torch.float32, torch.float64):
        values = values.to(torch.float32)
    if observe:
        observer(values)
    scale, zero_point = observed_grid(observer, use_precomputed)
    scale, zero_point = scale.to(values.device), zero_point.to(values.device)
    low, high = int(observer.quant_min), int(observer.quant_max)
    if scale.numel() == 1 and not _is_per_channel(observer):
        step, zero = float(scale), int(zero_point)
        codes = torch.ops.zeropoint.quantize_per_tensor.default(values, step, zero, low, high, torch.int8)
        return make_qtensor(codes, qint8, step, zero)
    if scale.shape != (values.shape[axis],):
        raise ValueError(
            f"{where} has {values.shape[axis]} output channels along axis {axis}, its observer made "
            f"{scale.numel()} grids: set ch_axis={axis}, and let it see the weight before"
        )
    scales, zero_points = scale.to(torch.float64), zero_point.to(torch.int64)
    codes = torch.ops.zeropoint.quantize_per_channel.default(values, scales, zero_points, axis, low, high, torch.int8)
    return make_qtensor(codes, qint8, scales, zero_points, axis)


def _is_per_channel(observer: Any) -> bool:
    scheme = getattr(observer, "qscheme", None)
    return scheme is not None and "per_channel" in str(getattr(scheme, "name", scheme))


def observed_grid(observer: Any, use_precomputed: bool) -> tuple[Tensor, Tensor]:
    """Scale and zero point, 1-D, that an observer stands for: of a fake quantize, the ones that it rounds to."""
    holds_grid = is_fake_quantize(observer) and not isinstance(observer.scale, nn.Parameter)
    if holds_grid and (use_precomputed or bool(observer.fake_quant_enabled)):
        return observer.scale.reshape(-1), observer.zero_point.reshape(-1)
    scale, zero_point = observer.calculate_qparams()
    return scale.detach().reshape(-1), zero_point.detach().reshape(-1)


def output_grid(module: nn.Module) -> tuple[float, int, QDtype]:
    """Scale, zero point and dtype that the module's activation observer found.

    Raises:
        RuntimeError: the module has no observer.
        TypeError: the observer's dtype is not an 8-bit one.
    """
    observer = getattr(module, "activation_post_process", None)
    if observer is None or not hasattr(observer, "calculate_qparams"):
        raise RuntimeError(
            f"{describe(module)} has no activation observer, so its output grid is not known: set its qconfig, call "
            "prepare() and run calibration data through the model"
        )
    qdtype = as_qdtype(observer.dtype)
    scale, zero_point = observed_grid(observer, use_precomputed=False)
    if scale.numel() != 1:
        raise ValueError(f"{describe(module)} has a per-channel activation observer: activations have one grid")
    return float(scale), int(zero_point), qdtype
