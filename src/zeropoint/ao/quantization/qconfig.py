"""QConfig: which observer or fake quantizer a layer's activations and weights get.

May import: ``observer``, ``fake_quantize``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from zeropoint.ao.quantization.fake_quantize import (
    FakeQuantize,
    FusedMovingAvgObsFakeQuantize,
    default_dynamic_fake_quant,
    default_embedding_fake_quant,
    default_embedding_fake_quant_4bit,
    default_fake_quant,
    default_fused_act_fake_quant,
    default_fused_per_channel_wt_fake_quant,
    default_fused_wt_fake_quant,
    default_per_channel_weight_fake_quant,
    default_weight_fake_quant,
    fused_per_channel_wt_fake_quant_range_neg_127_to_127,
    fused_wt_fake_quant_range_neg_127_to_127,
)
from zeropoint.ao.quantization.observer import (
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    NoopObserver,
    PlaceholderObserver,
    ReuseInputObserver,
    default_debug_observer,
    default_dynamic_quant_observer,
    default_float_qparams_observer,
    default_float_qparams_observer_4bit,
    default_observer,
    default_per_channel_weight_observer,
    default_placeholder_observer,
    default_reuse_input_observer,
    default_weight_observer,
    per_channel_weight_observer_range_neg_127_to_127,
    weight_observer_range_neg_127_to_127,
)
from zeropoint.dtypes import qint8

__all__ = [
    "QConfig",
    "QConfigAny",
    "default_activation_only_qconfig",
    "default_debug_qconfig",
    "default_dynamic_qat_qconfig",
    "default_dynamic_qconfig",
    "default_embedding_qat_qconfig",
    "default_embedding_qat_qconfig_4bit",
    "default_per_channel_qat_qconfig",
    "default_per_channel_qconfig",
    "default_per_channel_symmetric_qnnpack_qat_qconfig",
    "default_per_channel_symmetric_qnnpack_qconfig",
    "default_qat_qconfig",
    "default_qat_qconfig_v2",
    "default_qconfig",
    "default_quint8_weight_qconfig",
    "default_reuse_input_qconfig",
    "default_symmetric_qnnpack_qat_qconfig",
    "default_symmetric_qnnpack_qconfig",
    "default_weight_only_qconfig",
    "float16_dynamic_qconfig",
    "float16_static_qconfig",
    "float_qparams_weight_only_qconfig",
    "float_qparams_weight_only_qconfig_4bit",
    "get_default_qat_qconfig",
    "get_default_qconfig",
    "per_channel_dynamic_qconfig",
    "qconfig_equals",
]


class _QConfigFields(NamedTuple):
    activation: Any
    weight: Any


class QConfig(_QConfigFields):
    """A pair of factories: one makes the activation's observer or fake quantizer, one the weight's.

    Args:
        activation, weight: classes, ``SomeObserver.with_args(...)`` factories, or other callables that make a module.

    Raises:
        ValueError: a module instance, which every layer would share.
        TypeError: something that cannot be called.

    Example:
        >>> from zeropoint.ao.quantization import MinMaxObserver, QConfig, default_weight_observer
        >>> QConfig(activation=MinMaxObserver.with_args(quant_max=127), weight=default_weight_observer).activation
        MinMaxObserver.with_args(quant_max=127)
    """

    __slots__ = ()

    def __new__(cls, activation: Callable[..., Any], weight: Callable[..., Any]) -> QConfig:
        for name, value in (("activation", activation), ("weight", weight)):
            if isinstance(value, nn.Module):
                kind = type(value).__name__
                raise ValueError(
                    f"QConfig's {name} is an instance of {kind}, which all layers would share: pass the class "
                    f"{kind}, or {kind}.with_args(...)"
                )
            if value is not None and not callable(value):
                raise TypeError(f"QConfig's {name} must be a class or a factory, got {value!r}")
        return super().__new__(cls, activation, weight)

    def __repr__(self) -> str:
        shown = [getattr(value, "__name__", repr(value)) for value in self]
        return f"QConfig(activation={shown[0]}, weight={shown[1]})"


QConfigAny = QConfig | None
"""A qconfig, or None for "leave this in float"."""


# --- common settings ----------------------------------------------------------------------------------------------

default_qconfig: Final = QConfig(default_observer, default_weight_observer)
"""Static: running range, quint8 codes 0 … 127; one symmetric weight grid."""

default_debug_qconfig: Final = QConfig(default_debug_observer, default_weight_observer)
"""Keeps every activation."""

default_per_channel_qconfig: Final = QConfig(default_observer, default_per_channel_weight_observer)
"""Static: running range, quint8 codes 0 … 127; one symmetric weight grid an output channel."""

default_dynamic_qconfig: Final = QConfig(default_dynamic_quant_observer, default_weight_observer)
"""Dynamic: one symmetric weight grid."""

per_channel_dynamic_qconfig: Final = QConfig(default_dynamic_quant_observer, default_per_channel_weight_observer)
"""Dynamic: one symmetric weight grid an output channel."""

float16_dynamic_qconfig: Final = QConfig(
    PlaceholderObserver.with_args(dtype=torch.float16, is_dynamic=True),
    PlaceholderObserver.with_args(dtype=torch.float16),
)
"""Dynamic: weights held in float16."""

float16_static_qconfig: Final = QConfig(
    PlaceholderObserver.with_args(dtype=torch.float16), PlaceholderObserver.with_args(dtype=torch.float16)
)
"""Weights and activations in float16."""

float_qparams_weight_only_qconfig: Final = QConfig(default_placeholder_observer, default_float_qparams_observer)
"""Embeddings: quint8 rows with floating zero points."""

float_qparams_weight_only_qconfig_4bit: Final = QConfig(
    default_placeholder_observer, default_float_qparams_observer_4bit
)
"""Embeddings: rows of codes 0 … 15 with floating zero points."""

default_quint8_weight_qconfig: Final = QConfig(HistogramObserver, MinMaxObserver)
"""Static: clipped activation range; one affine quint8 weight grid."""

default_weight_only_qconfig: Final = QConfig(default_placeholder_observer, default_per_channel_weight_observer)
"""Weights only: one symmetric grid an output channel; activations stay in float."""

default_activation_only_qconfig: Final = QConfig(default_fake_quant, nn.Identity)
"""Activations only: weights stay in float."""

default_reuse_input_qconfig: Final = QConfig(default_reuse_input_observer, NoopObserver)
"""Operators such as reshape, whose output keeps the input's grid."""

default_qat_qconfig: Final = QConfig(default_fake_quant, default_weight_fake_quant)
"""Training: averaged activation range, quint8 over all codes; one symmetric weight grid."""

default_per_channel_qat_qconfig: Final = QConfig(default_fake_quant, default_per_channel_weight_fake_quant)
"""Training: averaged activation range, quint8 over all codes; one symmetric weight grid an output channel."""

default_dynamic_qat_qconfig: Final = QConfig(default_dynamic_fake_quant, default_weight_fake_quant)
"""Training for dynamic quantization."""

default_qat_qconfig_v2: Final = QConfig(default_fused_act_fake_quant, default_fused_wt_fake_quant)
"""Fused twin of :data:`default_qat_qconfig`."""

default_embedding_qat_qconfig: Final = QConfig(
    NoopObserver.with_args(dtype=torch.float32), default_embedding_fake_quant
)
"""Training of embeddings: quint8 rows with floating zero points."""

default_embedding_qat_qconfig_4bit: Final = QConfig(
    NoopObserver.with_args(dtype=torch.float32), default_embedding_fake_quant_4bit
)
"""Training of embeddings: rows of codes 0 … 15 with floating zero points."""

_signed_histogram: Final = HistogramObserver.with_args(dtype=qint8, eps=2.0**-12)
_signed_fused: Final = FusedMovingAvgObsFakeQuantize.with_args(
    observer=MovingAverageMinMaxObserver, quant_min=-128, quant_max=127, dtype=qint8, eps=2.0**-12
)

default_symmetric_qnnpack_qconfig: Final = QConfig(_signed_histogram, weight_observer_range_neg_127_to_127)
"""Static: qint8 activations; one symmetric weight grid without the code -128."""

default_per_channel_symmetric_qnnpack_qconfig: Final = QConfig(
    _signed_histogram, per_channel_weight_observer_range_neg_127_to_127
)
"""Static: qint8 activations; one symmetric weight grid an output channel, without the code -128."""

default_symmetric_qnnpack_qat_qconfig: Final = QConfig(_signed_fused, fused_wt_fake_quant_range_neg_127_to_127)
"""Training twin of :data:`default_symmetric_qnnpack_qconfig`."""

default_per_channel_symmetric_qnnpack_qat_qconfig: Final = QConfig(
    _signed_fused, fused_per_channel_wt_fake_quant_range_neg_127_to_127
)
"""Training twin of :data:`default_per_channel_symmetric_qnnpack_qconfig`."""


# --- getters ------------------------------------------------------------------------------------------------------

BACKENDS: Final = ("x86", "fbgemm", "qnnpack", "onednn")
"""torch's backend names. They mean the same here: the kernels are exact on every processor."""


def _check_backend(backend: str, version: int, versions: tuple[int, ...], name: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"{name}: unknown backend {backend!r}, choose from {BACKENDS}: they all mean the same")
    if version not in versions:
        raise ValueError(f"{name}: unknown version {version!r}, choose from {versions}")


def get_default_qconfig(backend: str = "x86", version: int = 0) -> QConfig:
    """Static quantization: histogram activations over all codes, one symmetric weight grid an output channel.

    Args:
        backend: any of torch's backend names; they mean the same.
        version: 0.

    Raises:
        ValueError: another backend or version.
    """
    _check_backend(backend, version, (0,), "get_default_qconfig")
    return QConfig(HistogramObserver, default_per_channel_weight_observer)


def get_default_qat_qconfig(backend: str = "x86", version: int = 1) -> QConfig:
    """Training: averaged activations over all codes, one symmetric weight grid an output channel.

    Args:
        backend: any of torch's backend names; they mean the same.
        version: 0 for the plain fake quantizers, 1 for the fused ones.

    Raises:
        ValueError: another backend or version.
    """
    _check_backend(backend, version, (0, 1), "get_default_qat_qconfig")
    if version == 0:
        return default_per_channel_qat_qconfig
    return QConfig(default_fused_act_fake_quant, default_fused_per_channel_wt_fake_quant)


# --- helpers ------------------------------------------------------------------------------------------------------


def qconfig_equals(first: QConfigAny, second: QConfigAny) -> bool:
    """Whether two qconfigs make the same modules: the same classes with the same arguments."""
    return first == second


def _assert_valid_qconfig(qconfig: QConfigAny, module: nn.Module) -> None:
    """Checks that both factories make what ``prepare`` can attach to ``module``.

    Raises:
        TypeError: a factory makes something that is not a module.
    """
    if qconfig is None:
        return
    for name, factory in zip(qconfig._fields, qconfig, strict=True):
        made = None if factory is None else factory()
        if made is not None and not isinstance(made, nn.Module):
            raise TypeError(
                f"the qconfig of {type(module).__name__} makes {type(made).__name__} for its {name}, not a module"
            )


def _activation_is_memoryless(qconfig: QConfig) -> bool:
    """Whether the activation's observer remembers the newest batch only."""
    made = qconfig.activation()
    observer = made.activation_post_process if isinstance(made, FakeQuantize) else made
    return getattr(observer, "averaging_constant", None) == 1


def _is_reuse_input_qconfig(qconfig: QConfigAny) -> bool:
    """Whether the operator's output keeps its input's grid."""
    return qconfig is not None and qconfig.activation is ReuseInputObserver
