"""What the names in a torch file stand for here: the list of all that a file may use.

``torch.ao``'s quantized tensors become :class:`~zeropoint.QTensor`, so neither ``torch.ao`` nor torch's quantized
dtypes are needed. Everything that comes from the file is checked before torch sees it.

May import: ``dtypes``, ``tensor``, ``_records``, ``_unpickler``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn

from zeropoint.checkpoint._records import CheckpointError, PackedParams, Record, SavedModule
from zeropoint.checkpoint._unpickler import Budget, Builder
from zeropoint.dtypes import QDtype, QScheme, qint8, qint32, quint8
from zeropoint.tensor import QTensor

__all__ = ["Allowed", "StorageType", "Stored"]


@dataclass(frozen=True)
class StorageType:
    """How a storage's bytes are read.

    Attributes:
        name: the name in the file.
        dtype: the plain dtype of an element.
        qdtype: the quantized dtype that the elements are codes of, or None.
        codes_per_byte: 2 and 4 where torch packs codes of 4 and 2 bits; they are unpacked to quint8.
    """

    name: str
    dtype: torch.dtype
    qdtype: QDtype | None = None
    codes_per_byte: int = 1


@dataclass
class Stored:
    """A storage of the file: its bytes, and how a reference reads them."""

    kind: StorageType
    data: torch.UntypedStorage
    numel: int


_PLAIN_STORAGES: Final = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}
_STORAGES: Final = {
    **{name: StorageType(name, dtype) for name, dtype in _PLAIN_STORAGES.items()},
    "QInt8Storage": StorageType("QInt8Storage", torch.int8, qint8),
    "QUInt8Storage": StorageType("QUInt8Storage", torch.uint8, quint8),
    "QInt32Storage": StorageType("QInt32Storage", torch.int32, qint32),
    "QUInt4x2Storage": StorageType("QUInt4x2Storage", torch.uint8, quint8, 2),
    "QUInt2x4Storage": StorageType("QUInt2x4Storage", torch.uint8, quint8, 4),
}

_QUANTIZED: Final = {"qint8": qint8, "quint8": quint8, "qint32": qint32, "quint4x2": quint8, "quint2x4": quint8}

_MODULES: Final = (
    *("torch.nn.modules.", "torch.ao.nn.", "torch.nn.quantized.", "torch.nn.intrinsic.", "torch.nn.qat."),
    *("torch.nn.quantizable.", "torch.ao.quantization.", "torch.quantization.", "zeropoint.ao.", "zeropoint.nn."),
)
"""Packages whose classes are read as records of modules."""

_MOST_DIMENSIONS: Final = 64
_LARGEST_SIZE: Final = 2**48
_LARGEST_EXPANDED: Final = 2**24
"""Elements of the largest tensor whose elements share memory: a small file must not blow up."""


class Allowed:
    """The globals that a file may name.

    Args:
        budget: what the builders may work on.
        extra: full names (``"package.module.Class"``) to read as inert records as well.
    """

    def __init__(self, budget: Budget, extra: Iterable[str] = ()) -> None:
        self._budget = budget
        self._extra = frozenset(extra)

    def find(self, module: str, name: str) -> Any:
        """The value that a global of the file stands for.

        Raises:
            CheckpointError: it is not in the list.
        """
        full = f"{module}.{name}"
        if full in self._extra:
            return _recorder(full, SavedModule)
        if full in _BUILDERS:
            return Builder(full, _BUILDERS[full])
        if full == "torch._utils._rebuild_qtensor":
            return Builder(full, self._rebuild_qtensor)
        if full == "zeropoint.tensor._rebuild_qtensor":
            return Builder(full, self._rebuild_own_qtensor)
        if module in ("torch", "torch.cuda", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if full in ("numpy.dtype", "functools.partial"):
            return _recorder(full, Record)
        if full in ("torch.ScriptObject", "torch._C.ScriptObject"):
            return _recorder(full, PackedParams)
        if module == "torch":
            for table in (_QUANTIZED, QScheme.__members__, vars(torch)):
                if isinstance(table.get(name), (QDtype, QScheme, torch.dtype, torch.layout, torch.memory_format)):
                    return table[name]
        if module == "zeropoint.dtypes" and name in _QUANTIZED:
            return _QUANTIZED[name]
        if full in ("torch.Tensor", "torch.nn.parameter.Parameter"):
            return nn.Parameter if name == "Parameter" else Tensor
        if module.startswith(_MODULES):
            return _recorder(full, SavedModule)
        error = CheckpointError(
            f"the file refers to {full}, which is not in the list of what this reader builds: save a state_dict "
            f"instead, or pass allow=[{full!r}] to read it as an inert record"
        )
        error.unknown_class = full
        raise error

    # --- quantized tensors ---

    def _rebuild_qtensor(
        self, storage: Any, offset: Any, size: Any, stride: Any, quantizer: Any, requires_grad: Any = False, *rest: Any
    ) -> QTensor:
        if not isinstance(storage, Stored) or storage.kind.qdtype is None:
            raise CheckpointError("a quantized tensor over a storage that holds no codes")
        codes = self._codes(storage, offset, size, stride)
        if not isinstance(quantizer, tuple) or not quantizer or not isinstance(quantizer[0], QScheme):
            raise CheckpointError("a quantized tensor without a known scheme")
        if not quantizer[0].is_per_channel:
            if len(quantizer) != 3:
                raise CheckpointError("a per-tensor grid is a scale and a zero point")
            return _on_grid(codes, quantizer[1], quantizer[2], None)
        if len(quantizer) != 4:
            raise CheckpointError("a per-channel grid is scales, zero points and an axis")
        return self._on_channel_grid(codes, *quantizer[1:])

    def _codes(self, storage: Stored, offset: Any, size: Any, stride: Any) -> Tensor:
        kind = storage.kind
        if kind.codes_per_byte == 1:
            return _view(storage.data, kind.dtype, storage.numel, offset, size, stride)
        # Codes narrower than a byte: one after the other, the first in the lowest bits.
        self._budget.charge(storage.numel)
        packed = _view(storage.data, torch.uint8, storage.numel, 0, (storage.numel,), (1,))
        bits = 8 // kind.codes_per_byte
        shifts = torch.arange(0, 8, bits, device=packed.device, dtype=torch.uint8)
        codes = ((packed.unsqueeze(1) >> shifts) & (2**bits - 1)).flatten()
        return _view(codes.untyped_storage(), torch.uint8, codes.numel(), offset, size, stride)

    def _rebuild_own_qtensor(self, codes: Any, scale: Any, zero_point: Any, axis: Any) -> QTensor:
        if not isinstance(codes, Tensor) or isinstance(codes, QTensor):
            raise CheckpointError("a quantized tensor without codes")
        if axis is None:
            return _on_grid(codes, scale, zero_point, None)
        return self._on_channel_grid(codes, scale, zero_point, axis)

    def _on_channel_grid(self, codes: Tensor, scales: Any, zero_points: Any, axis: Any) -> QTensor:
        axis = _integer(axis, "the channel axis")
        if not 0 <= axis < codes.dim():
            raise CheckpointError(f"channel axis {axis} is out of range for a tensor of {codes.dim()} dimensions")
        channels = codes.shape[axis]
        for name, values in (("scales", scales), ("zero points", zero_points)):
            shaped = values.dim() == 1 if isinstance(values, Tensor) else isinstance(values, (list, tuple))
            if not shaped or isinstance(values, QTensor) or len(values) != channels:
                raise CheckpointError(f"axis {axis} has {channels} channels, the file has other {name} for it")
        self._budget.charge(2 * channels)
        return _on_grid(codes, _channel_values(scales, codes), _channel_values(zero_points, codes), axis)


def _on_grid(codes: Tensor, scale: Any, zero_point: Any, axis: int | None) -> QTensor:
    """The quantized tensor; an impossible grid is an error that names what is wrong with it."""
    for name, value in (("scale", scale), ("zero point", zero_point)):
        if axis is None and (isinstance(value, (bool, Tensor)) or not isinstance(value, (int, float))):
            raise CheckpointError(
                f"the {name} of a per-tensor grid must be a number, the file has {type(value).__name__}"
            )
    try:
        return QTensor.from_codes(codes, scale, zero_point, axis=axis)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"quantized tensor of shape {tuple(codes.shape)}: {error}") from error


def _channel_values(values: Any, codes: Tensor) -> Tensor:
    """Scales or zero points as a tensor; as a list they were numbers of Python."""
    if isinstance(values, Tensor):
        return values.detach().to(codes.device)
    if not all(isinstance(value, (int, float)) for value in values):
        raise CheckpointError("the scales and zero points of a per-channel grid must be numbers")
    floating = any(isinstance(value, float) for value in values)
    return torch.tensor(list(values), dtype=torch.float64 if floating else torch.int64, device=codes.device)


# --- tensors ------------------------------------------------------------------------------------------------------


def _integer(value: Any, what: str) -> int:
    if type(value) is not int:
        raise CheckpointError(f"{what} must be a whole number, the file has {type(value).__name__}")
    return value


def _integers(values: Any, what: str) -> tuple[int, ...]:
    if not isinstance(values, (tuple, list)) or len(values) > _MOST_DIMENSIONS:
        raise CheckpointError(f"{what} must be at most {_MOST_DIMENSIONS} whole numbers")
    numbers = tuple(_integer(value, what) for value in values)
    if any(not 0 <= number <= _LARGEST_SIZE for number in numbers):
        raise CheckpointError(f"{what} {numbers} out of range")
    return numbers


def _view(data: torch.UntypedStorage, dtype: torch.dtype, numel: int, offset: Any, size: Any, stride: Any) -> Tensor:
    """A tensor over a storage of ``numel`` elements, if it lies inside."""
    sizes, strides = _integers(size, "a tensor's shape"), _integers(stride, "a tensor's strides")
    start = _integers((offset,), "a tensor's offset")[0]
    if len(sizes) != len(strides):
        raise CheckpointError(f"a tensor of shape {sizes} with strides {strides}")
    elements, last = 1, start
    for length, step in zip(sizes, strides, strict=True):
        elements *= length
        last += (length - 1) * step
    if elements == 0:
        last = start - 1
    if last >= numel:
        raise CheckpointError(
            f"a tensor of shape {sizes}, strides {strides} and offset {start} reaches beyond its storage "
            f"of {numel} elements"
        )
    if elements > max(numel, _LARGEST_EXPANDED):
        raise CheckpointError(f"a tensor of shape {sizes} over a storage of only {numel} elements")
    return torch.empty(0, dtype=dtype, device=data.device).set_(data, start, sizes, strides)


def _rebuild_tensor(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    metadata: Any = None,
) -> Tensor:
    if not isinstance(storage, Stored) or storage.kind.qdtype is not None:
        raise CheckpointError("a tensor over something that is no storage of plain numbers")
    tensor = _view(storage.data, storage.kind.dtype, storage.numel, offset, size, stride)
    return _finish(tensor, requires_grad, metadata)


def _rebuild_tensor_v3(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> Tensor:
    if not isinstance(storage, Stored) or not isinstance(dtype, torch.dtype):
        raise CheckpointError("a tensor without a storage or a dtype")
    numel = storage.data.nbytes() // dtype.itemsize
    return _finish(_view(storage.data, dtype, numel, offset, size, stride), requires_grad, metadata)


def _finish(tensor: Tensor, requires_grad: Any, metadata: Any) -> Tensor:
    if metadata:
        if not isinstance(metadata, dict) or not set(metadata) <= {"conj", "neg"}:
            raise CheckpointError("a tensor with metadata that is not known")
        if metadata.get("conj"):
            tensor = tensor.conj()
        if metadata.get("neg"):
            tensor = torch._neg_view(tensor)
    if requires_grad is True and (tensor.is_floating_point() or tensor.is_complex()):
        tensor.requires_grad_()
    return tensor


def _rebuild_parameter(data: Any, requires_grad: Any, *rest: Any) -> Tensor:
    if not isinstance(data, Tensor):
        raise CheckpointError("a parameter without a tensor")
    if isinstance(data, QTensor):
        return data
    trainable = requires_grad is True and (data.is_floating_point() or data.is_complex())
    return nn.Parameter(data.detach(), requires_grad=trainable)


def _rebuild_from_type(builder: Any, kind: Any, args: Any, state: Any) -> Any:
    """A tensor with Python attributes: they are dropped."""
    allowed = (_rebuild_tensor, _rebuild_tensor_v3, _rebuild_parameter)
    if not isinstance(builder, Builder) or builder.build not in allowed or not isinstance(args, tuple):
        raise CheckpointError("a tensor subclass that is not known")
    tensor = builder.build(*args)
    return nn.Parameter(tensor) if kind is nn.Parameter and tensor.is_floating_point() else tensor


# --- plain objects ------------------------------------------------------------------------------------------------


def _ordered_dict(items: Any = ()) -> OrderedDict[Any, Any]:
    if not isinstance(items, (list, tuple)) or not all(
        isinstance(item, (list, tuple)) and len(item) == 2 and isinstance(item[0], (str, int)) for item in items
    ):
        raise CheckpointError("an OrderedDict of something else than pairs")
    return OrderedDict(cast(Any, items))


def _set(items: Any = ()) -> set[Any]:
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, (str, int)) for item in items):
        raise CheckpointError("a set of something else than names and numbers")
    return set(items)


def _scheme(number: Any) -> QScheme:
    return QScheme(_integer(number, "a quantization scheme"))


def _bytes(text: Any, encoding: Any) -> bytes:
    """How the older pickle protocols write bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise CheckpointError("bytes in an unknown encoding")
    return text.encode("latin1")


_NUMPY_KINDS: Final = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1")


def _numpy_number(kind: Any, data: Any) -> Any:
    """A NumPy scalar, such as the best accuracy so far, as a number of Python."""
    spelled = kind.args[0] if isinstance(kind, Record) and kind.name == "numpy.dtype" and kind.args else None
    if spelled not in _NUMPY_KINDS or not isinstance(data, bytes) or len(data) != int(spelled[1]):
        raise CheckpointError("a NumPy scalar of a kind that is not known")
    return np.frombuffer(data, dtype=f"<{spelled}")[0].item()


def _size(sizes: Any = ()) -> torch.Size:
    return torch.Size(_integers(sizes, "a shape"))


def _device(kind: Any, index: Any = None) -> torch.device:
    if not isinstance(kind, str) or not (index is None or type(index) is int):
        raise CheckpointError("a device that is not known")
    return torch.device(kind) if index is None else torch.device(kind, index)


def _recorder(name: str, record: type[Record]) -> Builder:
    return Builder(name, lambda *args: record(name, args))


_BUILDERS: Final[dict[str, Callable[..., Any]]] = {
    "_codecs.encode": _bytes,
    "builtins.set": _set,
    "__builtin__.set": _set,
    "collections.OrderedDict": _ordered_dict,
    "numpy.core.multiarray.scalar": _numpy_number,
    "numpy._core.multiarray.scalar": _numpy_number,
    "torch.Size": _size,
    "torch.device": _device,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "zeropoint.dtypes.QScheme": _scheme,
}
"""What is built for the functions and classes that torch's files name; quantized tensors need the budget too."""
