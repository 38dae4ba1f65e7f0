"""The observers, and the factories of the common settings, under torch.ao's names.

May import: ``observers``, ``dtypes``.
"""

from __future__ import annotations

from typing import Final

from zeropoint.ao.quantization.observers.base import (
    ObserverBase,
    ObservingModule,
    UniformQuantizationObserverBase,
)
from zeropoint.ao.quantization.observers.clipping import EntropyObserver, MSEObserver, PercentileObserver
from zeropoint.ao.quantization.observers.histogram import HistogramObserver
from zeropoint.ao.quantization.observers.minmax import (
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
    RangeObserver,
)
from zeropoint.ao.quantization.observers.simple import (
    FixedQParamsObserver,
    NoopObserver,
    PlaceholderObserver,
    RecordingObserver,
    ReuseInputObserver,
)
from zeropoint.ao.quantization.observers.state import (
    get_observer_state_dict,
    load_observer_state_dict,
    merge_observer_state_dicts,
    sync_observers,
)
from zeropoint.dtypes import (
    per_channel_affine_float_qparams,
    per_channel_symmetric,
    per_tensor_symmetric,
    qint8,
    quint8,
)

__all__ = [
    "AffineQuantizedObserverBase",
    "EntropyObserver",
    "FixedQParamsObserver",
    "HistogramObserver",
    "MSEObserver",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "NoopObserver",
    "ObserverBase",
    "ObservingModule",
    "PerChannelMinMaxObserver",
    "PercentileObserver",
    "PlaceholderObserver",
    "RangeObserver",
    "RecordingObserver",
    "ReuseInputObserver",
    "UniformQuantizationObserverBase",
    "default_affine_fixed_qparams_observer",
    "default_debug_observer",
    "default_dynamic_quant_observer",
    "default_fixed_qparams_range_0to1_observer",
    "default_fixed_qparams_range_neg1to1_observer",
    "default_float_qparams_observer",
    "default_float_qparams_observer_4bit",
    "default_histogram_observer",
    "default_observer",
    "default_per_channel_weight_observer",
    "default_placeholder_observer",
    "default_reuse_input_observer",
    "default_symmetric_fixed_qparams_observer",
    "default_weight_observer",
    "get_observer_state_dict",
    "load_observer_state_dict",
    "merge_observer_state_dicts",
    "per_channel_weight_observer_range_neg_127_to_127",
    "sync_observers",
    "weight_observer_range_neg_127_to_127",
]

AffineQuantizedObserverBase = UniformQuantizationObserverBase

_QNNPACK_EPS = 2.0**-12

default_observer: Final = MinMaxObserver.with_args(quant_min=0, quant_max=127)
"""Activations: running range, quint8 codes 0 … 127."""

default_placeholder_observer: Final = PlaceholderObserver
"""Activations that stay in float."""

default_debug_observer: Final = RecordingObserver
"""Keeps every tensor."""

default_weight_observer: Final = MinMaxObserver.with_args(dtype=qint8, qscheme=per_tensor_symmetric)
"""Weights: one symmetric qint8 grid."""

weight_observer_range_neg_127_to_127: Final = MinMaxObserver.with_args(
    dtype=qint8, qscheme=per_tensor_symmetric, quant_min=-127, quant_max=127, eps=_QNNPACK_EPS
)
"""Weights: one symmetric qint8 grid without the code -128."""

default_histogram_observer: Final = HistogramObserver.with_args(quant_min=0, quant_max=127)
"""Activations: clipped range, quint8 codes 0 … 127."""

default_per_channel_weight_observer: Final = PerChannelMinMaxObserver.with_args(
    dtype=qint8, qscheme=per_channel_symmetric
)
"""Weights: one symmetric qint8 grid an output channel."""

per_channel_weight_observer_range_neg_127_to_127: Final = PerChannelMinMaxObserver.with_args(
    dtype=qint8, qscheme=per_channel_symmetric, quant_min=-127, quant_max=127, eps=_QNNPACK_EPS
)
"""Weights: one symmetric qint8 grid an output channel, without the code -128."""

default_dynamic_quant_observer: Final = PlaceholderObserver.with_args(
    dtype=quint8, quant_min=0, quant_max=255, is_dynamic=True
)
"""Activations whose grid is chosen at each call."""

default_float_qparams_observer: Final = PerChannelMinMaxObserver.with_args(
    dtype=quint8, qscheme=per_channel_affine_float_qparams, ch_axis=0
)
"""Embedding rows: quint8 with floating zero points."""

default_float_qparams_observer_4bit: Final = PerChannelMinMaxObserver.with_args(
    dtype=quint8, qscheme=per_channel_affine_float_qparams, ch_axis=0, quant_min=0, quant_max=15
)
"""Embedding rows: codes 0 … 15 with floating zero points, held in quint8."""

default_fixed_qparams_range_neg1to1_observer: Final = FixedQParamsObserver.with_args(
    scale=2.0 / 256.0, zero_point=128, dtype=quint8, quant_min=0, quant_max=255
)
"""Outputs of tanh."""

default_fixed_qparams_range_0to1_observer: Final = FixedQParamsObserver.with_args(
    scale=1.0 / 256.0, zero_point=0, dtype=quint8, quant_min=0, quant_max=255
)
"""Outputs of sigmoid, hardsigmoid and softmax."""

default_symmetric_fixed_qparams_observer: Final = default_fixed_qparams_range_neg1to1_observer
default_affine_fixed_qparams_observer: Final = default_fixed_qparams_range_0to1_observer

default_reuse_input_observer: Final = ReuseInputObserver
"""Outputs that keep the input's grid."""
