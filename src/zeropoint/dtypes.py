"""The quantized dtypes and schemes.

PyTorch is removing its own ``torch.qint8``, ``torch.quint8`` and ``torch.qint32``; these objects take
their place. While torch still has its dtypes they compare equal to ours, so code that says
``x.dtype == torch.quint8`` keeps working.

May import: torch only.
"""

from __future__ import annotations

import enum
from typing import Any, Final

import torch

__all__ = [
    "QDtype",
    "QScheme",
    "as_qdtype",
    "as_qscheme",
    "per_channel_affine",
    "per_channel_affine_float_qparams",
    "per_channel_symmetric",
    "per_tensor_affine",
    "per_tensor_symmetric",
    "qint8",
    "qint32",
    "quint8",
]


class QDtype:
    """A quantized dtype: the integer storage behind it and the codes it holds.

    There are three instances, :data:`qint8`, :data:`quint8` and :data:`qint32`; none can be made beside them.

    Attributes:
        name: ``"qint8"``, ``"quint8"`` or ``"qint32"``.
        storage: the plain torch integer dtype that holds the codes.
        qmin, qmax: the smallest and the largest code.
        itemsize: bytes an element.

    Example:
        >>> import zeropoint as zp
        >>> zp.quint8.qmin, zp.quint8.qmax, zp.quint8.storage
        (0, 255, torch.uint8)
    """

    __slots__ = ("itemsize", "name", "qmax", "qmin", "storage")

    is_quantized: Final = True
    is_floating_point: Final = False
    is_complex: Final = False

    name: str
    storage: torch.dtype
    qmin: int
    qmax: int
    itemsize: int

    def __init__(self, name: str, storage: torch.dtype) -> None:
        info = torch.iinfo(storage)
        for key, value in (
            ("name", name),
            ("storage", storage),
            ("qmin", info.min),
            ("qmax", info.max),
            ("itemsize", info.bits // 8),
        ):
            object.__setattr__(self, key, value)

    def __setattr__(self, key: str, value: Any) -> None:
        raise AttributeError(f"{self!r} is immutable")

    @property
    def is_signed(self) -> bool:
        """Whether codes below zero exist."""
        return self.qmin < 0

    def __repr__(self) -> str:
        return f"zeropoint.{self.name}"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, QDtype):
            return self.name == other.name
        if isinstance(other, torch.dtype):
            return other is getattr(torch, self.name, None)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(getattr(torch, self.name, self.name))

    def __reduce__(self) -> str:
        return self.name

    def __copy__(self) -> QDtype:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> QDtype:
        return self


qint8: Final = QDtype("qint8", torch.int8)
quint8: Final = QDtype("quint8", torch.uint8)
qint32: Final = QDtype("qint32", torch.int32)

_BY_STORAGE: Final = {qdtype.storage: qdtype for qdtype in (qint8, quint8, qint32)}
_BY_NAME: Final = {qdtype.name: qdtype for qdtype in (qint8, quint8, qint32)}


def as_qdtype(dtype: Any) -> QDtype:
    """The quantized dtype that ``dtype`` means.

    Args:
        dtype: a :class:`QDtype`, its name, the plain storage dtype (``torch.int8`` …), or, while torch has them,
            ``torch.qint8``, ``torch.quint8``, ``torch.qint32``.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(dtype, QDtype):
        return dtype
    found = _BY_STORAGE.get(dtype) if isinstance(dtype, torch.dtype) else _BY_NAME.get(dtype)
    if found is None and isinstance(dtype, torch.dtype):
        found = _BY_NAME.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise TypeError(f"expected a quantized dtype (qint8, quint8 or qint32), got {dtype!r}")
    return found


class QScheme(enum.IntEnum):
    """How a grid is laid over a tensor. An int, as :func:`qscheme` promises, that prints as a name."""

    per_tensor_affine = 0
    per_channel_affine = 1
    per_tensor_symmetric = 2
    per_channel_symmetric = 3
    per_channel_affine_float_qparams = 4

    @property
    def is_per_channel(self) -> bool:
        """Whether each channel has a grid of its own."""
        return self not in (QScheme.per_tensor_affine, QScheme.per_tensor_symmetric)

    @property
    def is_symmetric(self) -> bool:
        """Whether real zero sits in the middle of the codes."""
        return self in (QScheme.per_tensor_symmetric, QScheme.per_channel_symmetric)

    def __str__(self) -> str:
        return f"zeropoint.{self.name}"


per_tensor_affine: Final = QScheme.per_tensor_affine
per_channel_affine: Final = QScheme.per_channel_affine
per_tensor_symmetric: Final = QScheme.per_tensor_symmetric
per_channel_symmetric: Final = QScheme.per_channel_symmetric
per_channel_affine_float_qparams: Final = QScheme.per_channel_affine_float_qparams


def as_qscheme(qscheme: Any) -> QScheme:
    """The :class:`QScheme` that ``qscheme`` means.

    Args:
        qscheme: a member, its number or name, or torch's object of the same name.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(qscheme, QScheme):
        return qscheme
    if isinstance(qscheme, int) and qscheme in QScheme.__members__.values():
        return QScheme(qscheme)
    name = str(qscheme).rpartition(".")[2]
    if name in QScheme.__members__ and (isinstance(qscheme, str) or type(qscheme).__module__.startswith("torch")):
        return QScheme[name]
    raise TypeError(f"expected a quantization scheme such as per_tensor_affine, got {qscheme!r}")
