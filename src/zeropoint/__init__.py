"""zeropoint: eager int8 quantization for PyTorch.

A quantized tensor, integer kernels that are exact over the full 8-bit range, and the whole ``torch.ao``
quantization workflow on top: change ``torch.ao`` to ``zeropoint.ao`` in an import and go on.

    >>> import torch, zeropoint as zp
    >>> zp.quantize_per_tensor(torch.ones(2), scale=0.1, zero_point=0, dtype=zp.qint8).int_repr()
    tensor([10, 10], dtype=torch.int8)
"""

from importlib import import_module as _import_module
from typing import Any as _Any

from zeropoint.dtypes import (
    QDtype,
    QScheme,
    per_channel_affine,
    per_channel_affine_float_qparams,
    per_channel_symmetric,
    per_tensor_affine,
    per_tensor_symmetric,
    qint8,
    qint32,
    quint8,
)
from zeropoint.tensor import QTensor

from zeropoint import ops  # isort: skip  (defines the operators that the backend serves)
from zeropoint import backends  # isort: skip
from zeropoint.ops.linear import quantized_linear, quantized_linear_dynamic
from zeropoint.ops.quantize import (
    dequantize,
    int_repr,
    is_quantized,
    q_per_channel_axis,
    q_per_channel_scales,
    q_per_channel_zero_points,
    q_scale,
    q_zero_point,
    qscheme,
    quantize_per_channel,
    quantize_per_tensor,
    quantize_per_tensor_dynamic,
    requantize,
)
from zeropoint.plan import CompiledModel, PlanError, compile

from zeropoint import checkpoint, serialization  # isort: skip
from zeropoint.convert_torch_ao import from_torch_ao  # isort: skip
from zeropoint.uniform import load_uniform, save_uniform, uniform_dequantize, uniform_quantize  # isort: skip

backends.load()
backends.triton.register()

__version__ = "0.1.0"

__all__ = [
    "CompiledModel",
    "PlanError",
    "QDtype",
    "QScheme",
    "QTensor",
    "backends",
    "checkpoint",
    "compile",
    "dequantize",
    "from_torch_ao",
    "int_repr",
    "is_quantized",
    "load_uniform",
    "ops",
    "per_channel_affine",
    "per_channel_affine_float_qparams",
    "per_channel_symmetric",
    "per_tensor_affine",
    "per_tensor_symmetric",
    "q_per_channel_axis",
    "q_per_channel_scales",
    "q_per_channel_zero_points",
    "q_scale",
    "q_zero_point",
    "qint8",
    "qint32",
    "qscheme",
    "quantize_per_channel",
    "quantize_per_tensor",
    "quantize_per_tensor_dynamic",
    "quantized_linear",
    "quantized_linear_dynamic",
    "quint8",
    "requantize",
    "save_uniform",
    "serialization",
    "uniform_dequantize",
    "uniform_quantize",
]

_LAZY = ("analysis", "ao", "distributed", "migrate", "nn", "ns", "recipe", "report")
"""Packages that are imported when they are first used: most programs need few of them."""


def __getattr__(name: str) -> _Any:
    if name in _LAZY:
        return _import_module(f"zeropoint.{name}")
    raise AttributeError(f"module 'zeropoint' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
