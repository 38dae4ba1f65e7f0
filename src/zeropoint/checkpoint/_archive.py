"""torch's two file formats, taken apart: ZIP archives and the older stream.

May import: ``_records``, ``_rebuild``, ``_unpickler``.
"""

from __future__ import annotations

import io
import mmap
import os
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Final

import torch

from zeropoint.checkpoint._rebuild import Allowed, StorageType, Stored
from zeropoint.checkpoint._records import CheckpointError, Record
from zeropoint.checkpoint._unpickler import Budget, Builder, Unpickler

__all__ = ["load"]

Source = str | os.PathLike[str] | IO[bytes] | bytes
Location = str | torch.device | Mapping[str, str] | Callable[[str], str] | None

_ZIP_MAGIC: Final = b"PK\x03\x04"
_MAGIC_NUMBER: Final = 0x1950A86A20F9469CFC6C
_PROTOCOL: Final = 1001
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
_DEEPEST: Final = 200


def load(source: Source, *, map_location: Location = "cpu", mmap: bool = False, allow: Iterable[str] = ()) -> Any:
    """Reads a file that ``torch.save`` wrote, without running code from it.

    Quantized tensors of ``torch.ao`` become :class:`~zeropoint.QTensor`, packed parameters
    :class:`PackedParams`, modules :class:`SavedModule`; neither ``torch.ao`` nor torch's quantized dtypes are
    needed. Views of one storage stay views of one storage, with their strides and offsets.

    Args:
        source: path, open binary file, or the file's bytes; a ZIP archive or the older stream format.
        map_location: where storages go: a device, a dict or a function from the saved location to a device, or None
            for where they were.
        mmap: let tensors read the file's pages on first use instead of copying it (ZIP files on disk; writes to the
            tensors do not reach the file).
        allow: full names of classes to read as inert records, where the reader does not know them.

    Returns:
        What was saved.

    Raises:
        CheckpointError: the file is damaged, inconsistent, or refers to what is not allowed.
        OSError: the file cannot be opened.

    Example:
        >>> import io, torch, zeropoint as zp
        >>> file = io.BytesIO()
        >>> torch.save({"weight": zp.quantize_per_tensor(torch.ones(2), 0.5, 0, zp.qint8)}, file)
        >>> zp.checkpoint.load(file.getvalue())["weight"].int_repr()
        tensor([2, 2], dtype=torch.int8)
    """
    if isinstance(allow, str):
        raise TypeError(f"allow takes a list of names, got the text {allow!r}")
    place = _placer(map_location)
    path = Path(source) if isinstance(source, (str, os.PathLike)) else None
    if mmap and path is None:
        raise ValueError("mmap=True needs a path, not an open file or bytes")
    data = _contents(source, path, mmap)
    if len(data) == 0:
        raise CheckpointError("the file is empty")
    budget = Budget(len(data))
    allowed = Allowed(budget, allow)
    if bytes(data[:4]) == _ZIP_MAGIC:
        found = _ZipReader(data, path if mmap else None, place, budget, allowed).load()
    elif mmap:
        raise CheckpointError("mmap=True needs a ZIP file; this one is in the older stream format")
    else:
        found = _LegacyReader(data, place, budget, allowed).load()
    _check_depth(found)
    return found


def _contents(source: Any, path: Path | None, mapped: bool) -> memoryview:
    if path is not None:
        if not mapped or path.stat().st_size == 0:
            return memoryview(path.read_bytes())
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if isinstance(source, (bytes, bytearray, memoryview)):
        return memoryview(source)
    if hasattr(source, "read"):
        return memoryview(source.read())
    raise TypeError(f"a checkpoint is a path, an open binary file or bytes, got {type(source).__name__}")


def _placer(map_location: Location) -> Callable[[str], torch.device]:
    """From the location in the file to the device where a storage goes."""
    if isinstance(map_location, (str, torch.device)):
        device = torch.device(map_location)
        return lambda saved: device

    def place(saved: str) -> torch.device:
        wanted: Any = saved
        if isinstance(map_location, Mapping):
            wanted = map_location.get(saved, saved)
        elif callable(map_location):
            wanted = map_location(saved)
        try:
            return torch.device(wanted)
        except (RuntimeError, TypeError) as error:
            raise CheckpointError(f"storage location {saved!r} is no device: pass map_location='cpu'") from error

    return place


def _moved(data: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    if device.type == "cpu":
        return data
    whole = torch.empty(0, dtype=torch.uint8).set_(data)
    return whole.to(device).untyped_storage()


def _untyped(data: memoryview) -> torch.UntypedStorage:
    """A copy of a part of the file that a tensor may own and write to."""
    if len(data) == 0:
        return torch.UntypedStorage(0)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage()


def _is_reference(saved: Any, kind: str, least: int) -> bool:
    return isinstance(saved, tuple) and len(saved) >= least and isinstance(saved[0], str) and saved[0] == kind


def _storage_request(saved: Any, least: int) -> tuple[StorageType, str, str, int, Any]:
    """Checks what a file says of a storage: type, key, location, elements, view (old streams only)."""
    if not _is_reference(saved, "storage", least):
        raise CheckpointError("a reference to something else than a storage")
    kind, key, location, numel = saved[1:5]
    if not isinstance(kind, StorageType):
        raise CheckpointError("a storage of an unknown type")
    if not isinstance(key, (str, int)) or not isinstance(location, str):
        raise CheckpointError("a storage without a name or a location")
    if type(numel) is not int or not 0 <= numel < 2**48:
        raise CheckpointError(f"storage {key} of {numel} elements")
    return kind, str(key), location, numel, saved[5] if len(saved) > 5 else None


def _check_depth(root: Any) -> None:
    """Refuses what is nested so deep that walking over it by recursion would fail."""
    level, seen = [root], set()
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for value in level:
            if id(value) in seen or not isinstance(value, (list, tuple, dict, Record)):
                continue
            seen.add(id(value))
            if isinstance(value, Record):
                below += (value.args, value.state)
            else:
                below += value.values() if isinstance(value, dict) else value
        level = below
        if not level:
            return
    raise CheckpointError(f"objects nested more than {_DEEPEST} deep")


class _ZipReader:
    """Files of torch 1.6 and later: a ZIP archive with one pickle and one record a storage."""

    def __init__(
        self,
        data: memoryview,
        mapped: Path | None,
        place: Callable[[str], torch.device],
        budget: Budget,
        allowed: Allowed,
    ) -> None:
        self._data = data
        self._place = place
        self._budget = budget
        self._allowed = allowed
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._bytes_left = len(data)
        self._whole = (
            None if mapped is None else torch.UntypedStorage.from_file(str(mapped), shared=False, nbytes=len(data))
        )
        self._members = self._list_members()
        names = [name for name in self._members if name.rpartition("/")[2] == "data.pkl"]
        if len(names) != 1:
            raise CheckpointError(f"a ZIP archive with {len(names)} records called data.pkl: not a file of torch.save")
        self._folder = names[0].removesuffix("data.pkl")
        if f"{self._folder}constants.pkl" in self._members:
            raise CheckpointError(
                "this is a TorchScript archive: load it with torch.jit.load and save its state_dict()"
            )
        order = self._members.get(f"{self._folder}byteorder")
        if order is not None and bytes(self._record(order)) != sys.byteorder.encode():
            raise CheckpointError("the file was written on a machine of another byte order")

    def _list_members(self) -> dict[str, zipfile.ZipInfo]:
        try:
            with zipfile.ZipFile(io.BytesIO(self._data)) as archive:
                return {member.filename: member for member in archive.infolist()}
        except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError, OverflowError, EOFError) as error:
            raise CheckpointError(f"the ZIP archive is damaged: {error}") from error
        except (RuntimeError, LookupError, OSError) as error:
            raise CheckpointError(f"the ZIP archive is damaged: {error}") from error

    def _span(self, member: zipfile.ZipInfo) -> tuple[int, int]:
        """Where a record's bytes lie in the file.

        Records are read where they are, not through ``zipfile``: torch can write files without checksums.
        """
        if member.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"record {member.filename} is compressed: unpack the archive and store it plain")
        header = bytes(self._data[member.header_offset : member.header_offset + _LOCAL_HEADER.size])
        if len(header) != _LOCAL_HEADER.size or header[:4] != _ZIP_MAGIC:
            raise CheckpointError(f"the ZIP archive is damaged: record {member.filename} is not where it should be")
        _, name_length, extra_length = _LOCAL_HEADER.unpack(header)
        start = member.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        if start + member.file_size > len(self._data):
            raise CheckpointError(f"the file is truncated: record {member.filename} reaches beyond its end")
        return start, start + member.file_size

    def _record(self, member: zipfile.ZipInfo) -> memoryview:
        start, end = self._span(member)
        return self._data[start:end]

    def load(self) -> Any:
        pickled = self._record(self._members[f"{self._folder}data.pkl"])
        return Unpickler(pickled, self._budget, self._allowed.find, self._find_storage).load()

    def _find_storage(self, saved: Any) -> Stored:
        kind, key, location, numel, _ = _storage_request(saved, 5)
        if key not in self._storages:
            member = self._members.get(f"{self._folder}data/{key}")
            if member is None:
                raise CheckpointError(f"storage {key} is missing")
            self._storages[key] = self._read(member, location)
        data = self._storages[key]
        if not 0 <= data.nbytes() - numel * kind.dtype.itemsize < kind.dtype.itemsize:
            raise CheckpointError(
                f"storage {key} should be {numel} elements of {kind.dtype}, it has {data.nbytes()} bytes"
            )
        return Stored(kind, data, numel)

    def _read(self, member: zipfile.ZipInfo, location: str) -> torch.UntypedStorage:
        start, end = self._span(member)
        self._bytes_left -= end - start
        if self._bytes_left < 0:
            raise CheckpointError("the ZIP archive is damaged: its records overlap")
        whole = self._whole
        data = _untyped(self._data[start:end]) if whole is None or start == end else whole[start:end]
        return _moved(data, self._place(location))


class _LegacyReader:
    """The stream format before torch 1.6: pickles one after the other, the storages behind them.

    Tensors come before the bytes that they lie over. So the pickle is read twice: to learn which storages there are,
    and, once they are found, to build what it holds.
    """

    def __init__(
        self, data: memoryview, place: Callable[[str], torch.device], budget: Budget, allowed: Allowed
    ) -> None:
        self._data = data
        self._place = place
        self._budget = budget
        self._allowed = allowed
        self._requests: dict[str, tuple[StorageType, str, int]] = {}
        self._storages: dict[str, torch.UntypedStorage] = {}

    def _unpickle(self, position: int, find_storage: Callable[[Any], Any] | None, dry: bool = False) -> tuple[Any, int]:
        machine = Unpickler(
            self._data, self._budget, self._find_nothing if dry else self._allowed.find, find_storage, position
        )
        return machine.load(), machine.position

    def load(self) -> Any:
        if bytes(self._data[257:262]) == b"ustar":
            raise CheckpointError(
                "this is a tar file of torch before 0.1.10: load and save it with a torch of that time"
            )
        if self._data[0] != 0x80:
            raise CheckpointError("this is no file of torch.save")
        magic, position = self._unpickle(0, None)
        if magic != _MAGIC_NUMBER:
            raise CheckpointError("this is no file of torch.save: another magic number")
        protocol, position = self._unpickle(position, None)
        if protocol != _PROTOCOL:
            raise CheckpointError(f"stream protocol {protocol} is not known")
        system, position = self._unpickle(position, None)
        if isinstance(system, dict) and system.get("little_endian", True) is not (sys.byteorder == "little"):
            raise CheckpointError("the file was written on a machine of another byte order")
        start = position
        _, position = self._unpickle(start, self._note_storage, dry=True)
        keys, position = self._unpickle(position, None)
        if not isinstance(keys, list):
            raise CheckpointError("the list of storages is damaged")
        for key in keys:
            position = self._read_storage(key, position)
        result, _ = self._unpickle(start, self._find_storage)
        return result

    def _find_nothing(self, module: str, name: str) -> Any:
        """Stands in for every global while the storages are looked for: nothing is built."""
        found = self._allowed.find(module, name)
        if isinstance(found, Builder) and found.name not in (
            "collections.OrderedDict",
            "builtins.set",
            "__builtin__.set",
        ):
            return Builder(found.name, lambda *args: Record(found.name))
        return found

    def _note_storage(self, saved: Any) -> Any:
        if _is_reference(saved, "module", 2):  # a class, with its source code
            return saved[1]
        kind, key, location, numel, _ = _storage_request(saved, 6)
        known = self._requests.setdefault(key, (kind, location, numel))
        if known[2] * known[0].dtype.itemsize != numel * kind.dtype.itemsize:
            raise CheckpointError(f"storage {key} is referred to with two sizes")
        return Record("storage")

    def _read_storage(self, key: Any, position: int) -> int:
        request = self._requests.get(str(key)) if isinstance(key, (str, int)) else None
        if request is None or str(key) in self._storages:
            raise CheckpointError(f"the list of storages is damaged: {str(key)[:40]!r}")
        kind, location, numel = request
        (stored,) = struct.unpack("<q", self._take(position, 8))
        # Codes narrower than a byte are counted in bytes in one place and in codes in the other.
        if stored != numel:
            raise CheckpointError(f"storage {key} should have {numel} elements, it has {stored}")
        size = numel * kind.dtype.itemsize
        self._storages[str(key)] = _moved(_untyped(self._take(position + 8, size)), self._place(location))
        return position + 8 + size

    def _take(self, position: int, count: int) -> memoryview:
        if position + count > len(self._data):
            raise CheckpointError(f"the file is truncated: {count} bytes expected at byte {position}")
        return self._data[position : position + count]

    def _find_storage(self, saved: Any) -> Any:
        if _is_reference(saved, "module", 2):
            return saved[1]
        kind, key, _, numel, view = _storage_request(saved, 6)
        data = self._storages.get(key)
        if data is None:
            raise CheckpointError(f"storage {key} is missing")
        if view is None:
            return Stored(kind, data, numel)
        if not isinstance(view, tuple) or len(view) != 3 or not all(type(n) is int and n >= 0 for n in view[1:]):
            raise CheckpointError(f"a view of storage {key} that is not known")
        offset, length = view[1:]
        if offset + length > numel:
            raise CheckpointError(f"a view of storage {key} reaches beyond it")
        width = kind.dtype.itemsize
        part = data[offset * width : (offset + length) * width] if length else torch.UntypedStorage(0)
        return Stored(kind, part, length)
