"""Damages checkpoint files in ways that reach deep: bytes, numbers, operations, archive records."""

from __future__ import annotations

import io
import pickletools
import random
import struct
import zipfile
from collections.abc import Callable

EXTREMES = (0, 1, 2, 3, 7, 64, 127, 128, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1)
HOSTILE = (
    b"cos\nsystem\n(X\x04\x00\x00\x00trueptR",
    b"cbuiltins\neval\n",
    b"c__builtin__\ngetattr\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ctorch\nScriptObject\n)\x81",
    b"ctorch\nLongStorage\n",
    b"ccollections\nOrderedDict\n",
    b"\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x40",  # 2**62
    b"\x8a\x09" + b"\xff" * 9,
    b"\x8b\xff\xff\xff\x7f",
    b"r\xff\xff\xff\xff",
    b"B\xff\xff\xff\xff",
    b"J\xff\xff\xff\xff",
    b"G\x7f\xf8\x00\x00\x00\x00\x00\x00",  # NaN
    b"G\xbf\xf0\x00\x00\x00\x00\x00\x00",  # -1.0
    b"N",
    b")",
    b"}",
    b"]",
    b"(",
    b"0",
    b"R",
    b"b",
    b"Q",
    b".",
)


def damage(data: bytes, rng: random.Random) -> bytes:
    """A damaged copy of a checkpoint: half of the time through the pickle inside, so that the archive stays whole."""
    if data[:2] == b"PK" and rng.random() < 0.6:
        return _repack(data, rng)
    return _several(data, rng)


def _several(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        data = rng.choice(_DAMAGES)(data, rng) or b"\x80"
    return data


def _repack(data: bytes, rng: random.Random) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(target, "w") as new:
        names = old.namelist()
        pickled = next(name for name in names if name.endswith("data.pkl"))
        victim = pickled if rng.random() < 0.8 else rng.choice(names)
        for name in names:
            if name == victim and rng.random() < 0.05:
                continue
            content = old.read(name)
            compression = zipfile.ZIP_DEFLATED if rng.random() < 0.01 else zipfile.ZIP_STORED
            new.writestr(name, _several(content, rng) if name == victim else content, compression)
    return target.getvalue()


def _flip(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]


def _byte(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]


def _number(data: bytes, rng: random.Random) -> bytes:
    place, layout = rng.randrange(len(data)), rng.choice(("<B", "<H", "<I"))
    number = struct.pack(layout, rng.choice(EXTREMES) % 256 ** struct.calcsize(layout))
    return data[:place] + number + data[place + len(number) :]


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _remove(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data))
    return data[:start] + data[start + rng.randrange(1, 40) :]


def _repeat(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data))
    part = data[start : start + rng.randrange(1, 40)]
    place = rng.randrange(len(data))
    return data[:place] + part * rng.choice((1, 1, 2, 50)) + data[place:]


def _operations(data: bytes) -> list[int]:
    """Where operations start, as far as the bytes are a pickle."""
    places = []
    try:
        for _, _, position in pickletools.genops(data):
            places.append(position)
    except Exception:  # the rest is none
        pass
    return places


def _insert(data: bytes, rng: random.Random) -> bytes:
    places = _operations(data)
    place = rng.choice(places) if places else rng.randrange(len(data))
    return data[:place] + rng.choice(HOSTILE) + data[place:]


def _replace(data: bytes, rng: random.Random) -> bytes:
    places = _operations(data)
    if len(places) < 3:
        return _byte(data, rng)
    which = rng.randrange(len(places) - 1)
    return data[: places[which]] + rng.choice(HOSTILE) + data[places[which + 1] :]


def _swap(data: bytes, rng: random.Random) -> bytes:
    places = _operations(data)
    if len(places) < 4:
        return _flip(data, rng)
    a, b = sorted(rng.sample(range(len(places) - 1), 2))
    first, second = (data[places[n] : places[n + 1]] for n in (a, b))
    return data[: places[a]] + second + data[places[a + 1] : places[b]] + first + data[places[b + 1] :]


_DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(_flip, _byte, _number, _number, _cut, _remove, _repeat, _insert, _insert, _replace, _replace, _swap, _swap),
)
