"""Which class takes the place of which: the mappings of the workflow, built from what every class says of itself.

May import: ``ao.nn``, ``stubs``, ``observer``, ``fake_quantize``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from zeropoint.ao.nn import _registry, intrinsic, qat, quantizable, quantized
from zeropoint.ao.quantization import stubs
from zeropoint.ao.quantization.fake_quantize import (
    default_fixed_qparams_range_0to1_fake_quant,
    default_fixed_qparams_range_neg1to1_fake_quant,
)
from zeropoint.ao.quantization.observer import (
    default_fixed_qparams_range_0to1_observer,
    default_fixed_qparams_range_neg1to1_observer,
)

__all__ = [
    "DEFAULT_DYNAMIC_QUANT_MODULE_MAPPINGS",
    "DEFAULT_MODULE_TO_ACT_POST_PROCESS",
    "DEFAULT_QAT_MODULE_MAPPINGS",
    "DEFAULT_STATIC_QUANT_MODULE_MAPPINGS",
    "get_default_compare_output_module_list",
    "get_default_dynamic_quant_module_mappings",
    "get_default_qat_module_mappings",
    "get_default_qconfig_propagation_list",
    "get_default_static_quant_module_mappings",
    "get_dynamic_quant_module_class",
    "get_static_quant_module_class",
    "no_observer_set",
]

# Importing these packages fills the registry.
_FAMILIES = (intrinsic, qat, quantizable, quantized, stubs)

Mapping = dict[type[nn.Module], type[nn.Module]]

DEFAULT_STATIC_QUANT_MODULE_MAPPINGS: Mapping = _registry.STATIC
"""Float, fused and QAT classes → classes that compute on quantized tensors: what ``convert`` swaps."""

DEFAULT_DYNAMIC_QUANT_MODULE_MAPPINGS: Mapping = _registry.DYNAMIC
"""Float classes → classes that quantize their input on every call: what ``quantize_dynamic`` swaps."""

DEFAULT_QAT_MODULE_MAPPINGS: Mapping = _registry.QAT
"""Float and fused classes → classes that simulate quantized weights: what ``prepare_qat`` swaps."""

DEFAULT_MODULE_TO_ACT_POST_PROCESS: dict[type[nn.Module], Any] = {
    nn.Hardsigmoid: default_fixed_qparams_range_0to1_observer,
    nn.Sigmoid: default_fixed_qparams_range_0to1_observer,
    nn.Softmax: default_fixed_qparams_range_0to1_observer,
    nn.Tanh: default_fixed_qparams_range_neg1to1_observer,
}
"""Classes whose output range is known beforehand → the observer with that grid."""

KEEPS_GRID: tuple[type[nn.Module], ...] = (
    *(nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle, nn.Hardtanh),
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
    *(nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d, nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d),
    *(nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d),
    *(nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d),
)
"""Float classes that compute on quantized tensors as they are, on the input's grid."""

_FIXED_FAKE_QUANT = {
    default_fixed_qparams_range_0to1_observer: default_fixed_qparams_range_0to1_fake_quant,
    default_fixed_qparams_range_neg1to1_observer: default_fixed_qparams_range_neg1to1_fake_quant,
}


def get_default_static_quant_module_mappings() -> Mapping:
    """A copy of :data:`DEFAULT_STATIC_QUANT_MODULE_MAPPINGS`, to extend and pass to ``convert``."""
    return dict(DEFAULT_STATIC_QUANT_MODULE_MAPPINGS)


def get_default_dynamic_quant_module_mappings() -> Mapping:
    """A copy of :data:`DEFAULT_DYNAMIC_QUANT_MODULE_MAPPINGS`, to extend and pass to ``quantize_dynamic``."""
    return dict(DEFAULT_DYNAMIC_QUANT_MODULE_MAPPINGS)


def default_dynamic_kinds() -> set[type[nn.Module]]:
    """The classes that ``quantize_dynamic`` swaps when it is not told which."""
    table = DEFAULT_DYNAMIC_QUANT_MODULE_MAPPINGS
    return {kind for kind, twin in table.items() if not getattr(twin, "ON_REQUEST", False)}


def get_default_qat_module_mappings() -> Mapping:
    """A copy of :data:`DEFAULT_QAT_MODULE_MAPPINGS`, to extend and pass to ``prepare_qat``."""
    return dict(DEFAULT_QAT_MODULE_MAPPINGS)


def twin_of(kind: type, mapping: Mapping) -> tuple[type[nn.Module], type[nn.Module]] | None:
    """The most specific class of ``kind``'s MRO that the mapping names, and what the mapping puts in its place.

    Returns:
        The pair, or None: no class is named, ``kind`` itself is something that the mapping puts in place, or it is
        ``NonDynamicallyQuantizableLinear``, whose owner reads the float weight.
    """
    if kind not in mapping and (kind is NonDynamicallyQuantizableLinear or kind in mapping.values()):
        return None
    for base in kind.__mro__:
        if base in mapping:
            return base, mapping[base]
    return None


def _class_for(float_module_class: type, mapping: Mapping, extra: Mapping | None, kind: str) -> type[nn.Module]:
    found = twin_of(float_module_class, {**mapping, **(extra or {})})
    if found is None:
        raise ValueError(f"{float_module_class.__name__} has no {kind} quantized class: pass one in the mapping")
    return found[1]


def get_static_quant_module_class(
    float_module_class: type[nn.Module], additional_static_quant_mapping: Mapping | None = None
) -> type[nn.Module]:
    """The class that ``convert`` puts in place of a float class. Raises ValueError if there is none."""
    table = DEFAULT_STATIC_QUANT_MODULE_MAPPINGS
    return _class_for(float_module_class, table, additional_static_quant_mapping, "static")


def get_dynamic_quant_module_class(
    float_module_class: type[nn.Module], additional_dynamic_quant_mapping: Mapping | None = None
) -> type[nn.Module]:
    """The class that ``quantize_dynamic`` puts in place of a float class. Raises ValueError if there is none."""
    table = DEFAULT_DYNAMIC_QUANT_MODULE_MAPPINGS
    return _class_for(float_module_class, table, additional_dynamic_quant_mapping, "dynamic")


def get_default_qconfig_propagation_list() -> set[type[nn.Module]]:
    """The classes whose output ``prepare`` observes."""
    observed = {kind for kind, twin in DEFAULT_STATIC_QUANT_MODULE_MAPPINGS.items() if is_observed(twin)}
    return observed | set(DEFAULT_QAT_MODULE_MAPPINGS) - _unobserved()


def _unobserved() -> set[type[nn.Module]]:
    return {kind for kind, twin in DEFAULT_STATIC_QUANT_MODULE_MAPPINGS.items() if not is_observed(twin)}


def is_observed(twin: type[nn.Module]) -> bool:
    """Whether the quantized class needs an output grid, which an observer of its float twin must find."""
    return bool(getattr(twin, "OBSERVED", True))


def get_default_compare_output_module_list() -> set[type[nn.Module]]:
    """The classes, float and quantized, whose outputs the numeric suite compares."""
    tables: Iterable[Mapping] = (
        DEFAULT_STATIC_QUANT_MODULE_MAPPINGS,
        DEFAULT_DYNAMIC_QUANT_MODULE_MAPPINGS,
        DEFAULT_QAT_MODULE_MAPPINGS,
    )
    return {kind for table in tables for pair in table.items() for kind in pair}


def no_observer_set() -> set[type[nn.Module]]:
    """Observed custom classes that ``prepare`` gives no output observer: they observe themselves."""
    return set(_registry.OBSERVED.values())


def fixed_observer_of(module: nn.Module, simulates: bool) -> Callable[[], nn.Module] | None:
    """The factory of a known output grid, as an observer or as a fake quantize; None where the range is not known."""
    for base in type(module).__mro__:
        if base in DEFAULT_MODULE_TO_ACT_POST_PROCESS:
            observer = DEFAULT_MODULE_TO_ACT_POST_PROCESS[base]
            factory: Callable[[], nn.Module] = _FIXED_FAKE_QUANT.get(observer, observer) if simulates else observer
            return factory
    return None
