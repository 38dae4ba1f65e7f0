"""A pickle machine that cannot run code.

It knows the operations that torch's files consist of and no other, calls nothing but the builders it is given, and
needs no more memory than the file holds: memo slots live in a dict, every length is checked against what is left of
the file, and a failing builder is an error with a text.

May import: ``_records``.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from zeropoint.checkpoint._records import CheckpointError, Record
from zeropoint.dtypes import QDtype

__all__ = ["Budget", "Builder", "Unpickler"]

_LONGEST_INT: Final = 64
"""Bytes of the longest whole number; torch's files have none above 10."""

_LONGEST_KEY: Final = 16
"""Entries of the longest tuple that may be a dict's key."""

_MARK: Final = object()


class Budget:
    """How much a file may ask for. What it holds is used about once; a file that uses one list for everything is not.

    Args:
        size: bytes of the file.
    """

    def __init__(self, size: int) -> None:
        self._left = 1_000_000 + size

    def charge(self, amount: int) -> None:
        """Takes ``amount`` elements off. Raises CheckpointError when nothing is left."""
        self._left -= amount
        if self._left < 0:
            raise CheckpointError("the file asks for far more work than a file of its size should")


@dataclass(frozen=True)
class Builder:
    """What a global of the file stands for: a function of this package, called with the arguments in the file."""

    name: str
    build: Callable[..., Any]


class Unpickler:
    """Reads one pickle.

    Args:
        data: the file, or a part of it.
        budget: what the builders may still work on.
        position: where the pickle starts. After :meth:`load`, where it ended.
        find_global: (module, name) → a value or a :class:`Builder`; raises CheckpointError for what is not allowed.
        find_persistent: what a persistent id in the file stands for.
    """

    def __init__(
        self,
        data: bytes | memoryview,
        budget: Budget,
        find_global: Callable[[str, str], Any],
        find_persistent: Callable[[Any], Any] | None = None,
        position: int = 0,
    ) -> None:
        self.data = memoryview(data)
        self.position = position
        self._budget = budget
        self._find_global = find_global
        self._find_persistent = find_persistent
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def load(self) -> Any:
        """The pickled object.

        Raises:
            CheckpointError: the pickle is damaged, or asks for something else than building plain objects.
        """
        while True:
            start = self.position
            code = self._bytes(1)[0]
            if code == ord("."):
                return self._pop()
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise CheckpointError(f"pickle operation {bytes([code])!r} at byte {start} is not allowed")
            operation(self)

    # --- reading ---

    def _bytes(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.data):
            left = len(self.data) - self.position
            raise CheckpointError(f"the file is truncated: {count} bytes expected at byte {self.position}, {left} left")
        part = bytes(self.data[self.position : end])
        self.position = end
        return part

    def _number(self, layout: str) -> Any:
        return struct.unpack(layout, self._bytes(struct.calcsize(layout)))[0]

    def _line(self) -> str:
        window = bytes(self.data[self.position : self.position + 512])
        length = window.find(b"\n")
        if length < 0:
            raise CheckpointError(f"a name at byte {self.position} does not end")
        return _text(self._bytes(length + 1)[:-1])

    # --- the stack ---

    def _pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise CheckpointError(f"the pickle is damaged: nothing to take at byte {self.position}")
        return self._stack.pop()

    def _top(self, kind: type | tuple[type, ...], what: str) -> Any:
        if not self._stack or not isinstance(self._stack[-1], kind):
            raise CheckpointError(f"the pickle is damaged: no {what} at byte {self.position}")
        return self._stack[-1]

    def _since_mark(self) -> list[Any]:
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place] is _MARK:
                items = self._stack[place + 1 :]
                del self._stack[place:]
                return items
        raise CheckpointError(f"the pickle is damaged: no mark before byte {self.position}")

    def _call(self, function: Any, args: Any) -> Any:
        if not isinstance(function, Builder):
            raise CheckpointError(f"the file calls {_seen(function)}, which is no function")
        if not isinstance(args, tuple):
            raise CheckpointError(f"the file calls {function.name} with {_seen(args)}, not with a tuple")
        self._budget.charge(_weight(args))
        try:
            return function.build(*args)
        except CheckpointError:
            raise
        except (TypeError, ValueError, RuntimeError, OverflowError, LookupError, AttributeError) as error:
            raise CheckpointError(f"{function.name}: {error}") from error

    # --- operations ---

    def _append(self, items: list[Any]) -> None:
        self._top(list, "list").extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self._top(dict, "dict")
        if len(items) % 2:
            raise CheckpointError(f"the pickle is damaged: a key without a value at byte {self.position}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_check_key(key)] = value

    def _build(self) -> None:
        state = self._pop()
        target = self._top((OrderedDict, Record), "object that takes a state")
        if isinstance(target, Record):
            target.state = state
        elif isinstance(state, dict) and isinstance(state.get("_metadata"), dict):
            target._metadata = state["_metadata"]  # the versions of a state dict's modules


_Operation = Callable[[Unpickler], None]
_OPERATIONS: dict[int, _Operation] = {}


def _operation(*codes: str) -> Callable[[_Operation], _Operation]:
    def register(function: _Operation) -> _Operation:
        for code in codes:
            _OPERATIONS[ord(code)] = function
        return function

    return register


def _push(code: str, make: Callable[[Unpickler], Any]) -> None:
    _OPERATIONS[ord(code)] = lambda machine: machine._stack.append(make(machine))


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"the pickle is damaged: {error}") from error


def _whole_number(machine: Unpickler, length: int) -> int:
    if not 0 <= length <= _LONGEST_INT:
        raise CheckpointError(f"a whole number of {length} bytes at byte {machine.position}")
    return int.from_bytes(machine._bytes(length), "little", signed=True)


def _seen(value: Any) -> str:
    return value.name if isinstance(value, (Builder, Record)) else f"a value of type {type(value).__name__}"


def _weight(args: tuple[Any, ...], levels: int = 2) -> int:
    """How many elements the containers among a call's arguments hold."""
    inner = [arg for arg in args if isinstance(arg, (list, tuple, dict, set))]
    return 1 + len(args) + sum(_weight(tuple(arg), levels - 1) if levels else len(arg) for arg in inner)


_PLAIN_KEYS = (str, bytes, int, bool, type(None), torch.dtype, QDtype)


def _check_key(key: Any) -> Any:
    """Only plain keys: a nested tuple would be hashed by recursion without an end, long numbers may share one hash."""
    parts = key if isinstance(key, tuple) and len(key) <= _LONGEST_KEY else (key,)
    if not all(isinstance(k, _PLAIN_KEYS) and not (isinstance(k, int) and k.bit_length() > 64) for k in parts):
        raise CheckpointError(f"{_seen(key)} as a dict's or a set's key is not allowed")
    return key


# Numbers, texts, bytes.
_push("N", lambda m: None)
_push("\x88", lambda m: True)
_push("\x89", lambda m: False)
_push("K", lambda m: m._number("<B"))
_push("M", lambda m: m._number("<H"))
_push("J", lambda m: m._number("<i"))
_push("G", lambda m: m._number(">d"))
_push("\x8a", lambda m: _whole_number(m, m._number("<B")))
_push("\x8b", lambda m: _whole_number(m, m._number("<i")))
_push("X", lambda m: _text(m._bytes(m._number("<I"))))
_push("\x8c", lambda m: _text(m._bytes(m._number("<B"))))
_push("\x8d", lambda m: _text(m._bytes(m._number("<Q"))))
_push("U", lambda m: _text(m._bytes(m._number("<B"))))  # texts of Python 2
_push("T", lambda m: _text(m._bytes(m._number("<I"))))
_push("C", lambda m: m._bytes(m._number("<B")))
_push("B", lambda m: m._bytes(m._number("<I")))
_push("\x8e", lambda m: m._bytes(m._number("<Q")))

# Containers.
_push("(", lambda m: _MARK)
_push(")", lambda m: ())
_push("]", lambda m: [])
_push("}", lambda m: {})
_push("\x8f", lambda m: set())
_push("t", lambda m: tuple(m._since_mark()))
_push("l", lambda m: m._since_mark())
_push("\x91", lambda m: frozenset(map(_check_key, m._since_mark())))
_push("\x85", lambda m: (m._pop(),))
_push("\x86", lambda m: tuple(reversed([m._pop(), m._pop()])))
_push("\x87", lambda m: tuple(reversed([m._pop(), m._pop(), m._pop()])))


@_operation("a")
def _append_one(machine: Unpickler) -> None:
    machine._append([machine._pop()])


@_operation("e")
def _append_many(machine: Unpickler) -> None:
    machine._append(machine._since_mark())


@_operation("s")
def _set_item(machine: Unpickler) -> None:
    value, key = machine._pop(), machine._pop()
    machine._set_items([key, value])


@_operation("u")
def _set_many(machine: Unpickler) -> None:
    machine._set_items(machine._since_mark())


@_operation("\x90")
def _add_many(machine: Unpickler) -> None:
    items = machine._since_mark()
    machine._top(set, "set").update(map(_check_key, items))


# The stack and the memo.
@_operation("0")
def _drop(machine: Unpickler) -> None:
    machine._pop()


@_operation("1")
def _drop_to_mark(machine: Unpickler) -> None:
    machine._since_mark()


def _remember(machine: Unpickler, slot: int) -> None:
    machine._memo[slot] = machine._top(object, "value")


def _recall(machine: Unpickler, slot: int) -> None:
    if slot not in machine._memo:
        raise CheckpointError(f"the pickle is damaged: slot {slot} is empty at byte {machine.position}")
    machine._stack.append(machine._memo[slot])


_OPERATIONS[ord("q")] = lambda m: _remember(m, m._number("<B"))
_OPERATIONS[ord("r")] = lambda m: _remember(m, m._number("<I"))
_OPERATIONS[0x94] = lambda m: _remember(m, len(m._memo))
_OPERATIONS[ord("h")] = lambda m: _recall(m, m._number("<B"))
_OPERATIONS[ord("j")] = lambda m: _recall(m, m._number("<I"))


# Protocol and framing.
@_operation("\x80")
def _protocol(machine: Unpickler) -> None:
    version = machine._number("<B")
    if not 2 <= version <= 5:
        raise CheckpointError(f"pickle protocol {version} is not known")


_OPERATIONS[0x95] = lambda m: m._number("<Q") and None  # a frame is only a hint how much to read at once


# Globals, and what is made with them.
_push("c", lambda m: m._find_global(m._line(), m._line()))


@_operation("\x93")
def _stack_global(machine: Unpickler) -> None:
    name, module = machine._pop(), machine._pop()
    if not (isinstance(name, str) and isinstance(module, str)):
        raise CheckpointError(f"the pickle is damaged: a global without a name at byte {machine.position}")
    machine._stack.append(machine._find_global(module, name))


@_operation("Q")
def _persistent(machine: Unpickler) -> None:
    if machine._find_persistent is None:
        raise CheckpointError(f"a storage is referred to at byte {machine.position}, where there can be none")
    machine._stack.append(machine._find_persistent(machine._pop()))


@_operation("R", "\x81")
def _reduce(machine: Unpickler) -> None:
    args, function = machine._pop(), machine._pop()
    machine._stack.append(machine._call(function, args))


_OPERATIONS[ord("b")] = Unpickler._build
