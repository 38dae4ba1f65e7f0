"""Writes checkpoint files by hand, with whatever a test wants to say in them."""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass
from typing import Any


@dataclass
class Global:
    """A name that the file refers to."""

    module: str
    name: str


@dataclass
class Call:
    """A call that the file asks for."""

    function: Any
    args: Any


@dataclass
class Storage:
    """A reference to a storage of the file."""

    kind: str
    key: str
    numel: int


def emit(value: Any) -> bytes:
    """The pickle operations that build ``value``."""
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        body = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return b"\x8a" + bytes([len(body)]) + body
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
    if isinstance(value, tuple):
        return b"(" + b"".join(map(emit, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(emit, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(emit(part) for item in value.items() for part in item) + b"u"
    if isinstance(value, Global):
        return f"c{value.module}\n{value.name}\n".encode()
    if isinstance(value, Call):
        return emit(value.function) + emit(value.args) + b"R"
    assert isinstance(value, Storage)
    return emit(("storage", Global("torch", value.kind), value.key, "cpu", value.numel)) + b"Q"


def archive(value: Any, storages: dict[str, bytes] | None = None, **records: bytes) -> bytes:
    """A ZIP file with ``value`` in it; ``value`` may be ready-made pickle bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as target:
        target.writestr("archive/data.pkl", value if isinstance(value, bytes) else b"\x80\x02" + emit(value) + b".")
        for key, data in (storages or {}).items():
            target.writestr(f"archive/data/{key}", data)
        for name, data in records.items():
            target.writestr(f"archive/{name}", data)
    return file.getvalue()


def quantized(
    *,
    size: tuple[Any, ...] = (2, 3),
    stride: tuple[Any, ...] = (3, 1),
    offset: Any = 0,
    grid: tuple[Any, ...] = (Global("torch", "per_tensor_affine"), 0.5, 0),
    kind: str = "QInt8Storage",
    numel: int = 6,
) -> Call:
    """A quantized tensor as ``torch.ao`` wrote it, over storage "0"."""
    args = (Storage(kind, "0", numel), offset, size, stride, grid, False, None)
    return Call(Global("torch._utils", "_rebuild_qtensor"), args)


def plain(size: tuple[Any, ...], stride: tuple[Any, ...], offset: Any = 0, numel: int = 6) -> Call:
    """A plain int8 tensor over storage "0"."""
    args = (Storage("CharStorage", "0", numel), offset, size, stride, False, None)
    return Call(Global("torch._utils", "_rebuild_tensor_v2"), args)
