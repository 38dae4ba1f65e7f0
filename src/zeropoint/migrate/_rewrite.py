"""Edits of one program, at the exact places of its names: everything else stays as it is, comments and layout too.

May import: ``_names``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from zeropoint.migrate._names import is_module, is_of_interest, new_name, why_left

__all__ = ["Change", "Left", "Migration", "migrate_source"]


@dataclass(frozen=True)
class Change:
    """One edit: the line (from 1), and what stood and stands there."""

    line: int
    old: str
    new: str


@dataclass(frozen=True)
class Left:
    """One place that was left as it is: the line (from 1), what stands there, and why it stays."""

    line: int
    what: str
    why: str


@dataclass(frozen=True)
class Migration:
    """A rewritten program.

    Attributes:
        text: the program after the edits.
        changes: the edits, in order.
        left: what belongs to ``torch.ao`` and was not rewritten.
        unread: the file is no program that can be read: ``left`` says why, and ``text`` is empty.
    """

    text: str
    changes: tuple[Change, ...] = ()
    left: tuple[Left, ...] = ()
    unread: bool = False


def migrate_source(source: str) -> Migration:
    """Rewrites one program.

    Args:
        source: Python code.

    Raises:
        SyntaxError: it is none.

    Example:
        >>> print(migrate_source("import torch\\nx = torch.quantization.QuantStub()").text)
        import torch
        import zeropoint.ao.quantization
        x = zeropoint.ao.quantization.QuantStub()
    """
    return _Rewriter(source).run()


@dataclass
class _Import:
    """One name that an import statement binds."""

    statement: ast.Import | ast.ImportFrom
    alias: ast.alias
    target: str
    """The full dotted name of what is bound."""
    uses: list[str] = field(default_factory=list)

    @property
    def bound(self) -> str:
        return self.alias.asname or self.alias.name.split(".")[0]


class _Rewriter:
    def __init__(self, source: str) -> None:
        self._tree = ast.parse(source)
        self._source = source.encode()
        self._newline = "\r\n" if "\r\n" in source else "\n"
        self._starts = [0]
        for line in self._source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._edits: list[tuple[int, int, str, int]] = []
        self._left: list[Left] = []
        self._needed: set[str] = set()
        self._imported: set[str] = set()
        self._unknown: set[str] = set()
        self._imports: dict[str, list[_Import]] = {}
        self._assigned = {node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name) and _is_store(node)}
        self._assigned |= {node.arg for node in ast.walk(self._tree) if isinstance(node, ast.arg)}

    def run(self) -> Migration:
        statements = [node for node in ast.walk(self._tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        for statement in statements:
            self._note(statement)
        chains = list(self._chains())
        stays = self._bindings_that_stay(chains)
        for statement in statements:
            self._rewrite_import(statement, stays)
        for node, binding, name in chains:
            self._rewrite_chain(node, binding, name, binding.bound in stays)
        self._list_texts()
        self._add_imports()
        return self._result()

    # --- what names mean ---

    def _note(self, statement: ast.Import | ast.ImportFrom) -> None:
        for alias in statement.names:
            if isinstance(statement, ast.Import):
                target = alias.name if alias.asname else alias.name.split(".")[0]
            elif statement.level == 0 and statement.module:
                target = f"{statement.module}.{alias.name}"
            else:
                continue
            if target.split(".")[0] == "torch":
                binding = _Import(statement, alias, target)
                self._imports.setdefault(binding.bound, []).append(binding)

    def _chains(self) -> Iterator[tuple[ast.expr, _Import, str]]:
        """Dotted names that start at an import of torch: the longest ones, with their full names."""
        inner: set[int] = set()
        for node in ast.walk(self._tree):
            if not isinstance(node, (ast.Attribute, ast.Name)) or id(node) in inner:
                continue
            parts: list[str] = []
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                inner.add(id(root.value))
                parts.append(root.attr)
                root = root.value
            if not isinstance(root, ast.Name) or root.id not in self._imports or isinstance(root.ctx, ast.Store):
                continue
            binding = self._imports[root.id][0]
            name = ".".join([binding.target, *reversed(parts)])
            if is_of_interest(name):
                yield node, binding, name

    def _bindings_that_stay(self, chains: list[tuple[ast.expr, _Import, str]]) -> set[str]:
        """Names whose import cannot simply point here: something that is not here is reached through them."""
        stays: set[str] = set()
        for _, binding, name in chains:
            known, _ = _longest_known(name)
            if known is None:
                self._unknown.add(name)
            if known is None or new_name(binding.target) is None:
                stays.add(binding.bound)
        return stays

    # --- imports ---

    def _rewrite_import(self, statement: ast.Import | ast.ImportFrom, stays: set[str]) -> None:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                self._rewrite_plain_import(statement, alias, stays)
        elif statement.level == 0 and statement.module and statement.module.split(".")[0] == "torch":
            self._rewrite_from_import(statement, stays)

    def _rewrite_plain_import(self, statement: ast.Import, alias: ast.alias, stays: set[str]) -> None:
        if not is_of_interest(alias.name):
            return
        name = new_name(alias.name)
        reached = any(unknown.startswith(f"{alias.name}.") for unknown in self._unknown)
        if name is None:
            self._leave(statement, alias.name)
            return
        if alias.asname in stays if alias.asname else reached:
            self._keep(statement, alias.name)
            return
        if not alias.asname and statement in self._tree.body:
            self._imported.add(name)
        if not alias.asname and not self._binds_torch_otherwise(statement):
            name = f"torch, {name}"  # the statement bound the name torch as well
        start, _ = self._span(alias)
        self._edit(start, start + len(alias.name.encode()), name, alias.lineno)

    def _binds_torch_otherwise(self, statement: ast.Import) -> bool:
        return any(
            binding.alias.name == "torch" or not is_of_interest(binding.alias.name)
            for binding in self._imports.get("torch", [])
            if isinstance(binding.statement, ast.Import)
        )

    def _rewrite_from_import(self, statement: ast.ImportFrom, stays: set[str]) -> None:
        module = statement.module or ""
        if statement.names[0].name == "*":
            name = new_name(module) if is_of_interest(module) else None
            if name is not None:
                self._edit_module(statement, name)
                self._left.append(
                    Left(statement.lineno, f"from {module} import *", "check what the program takes from it")
                )
            elif is_of_interest(module):
                self._leave(statement, f"{module}.*")
            return
        kept: list[ast.alias] = []
        moved: dict[str, list[tuple[ast.alias, str]]] = {}
        for alias in statement.names:
            full = f"{module}.{alias.name}"
            name = new_name(full) if is_of_interest(full) else None
            if name is None or (alias.asname or alias.name) in stays:
                kept.append(alias)
                if name is not None:
                    self._keep(statement, full)
                elif is_of_interest(full):
                    self._leave(statement, full)
                continue
            parent, _, leaf = name.rpartition(".")
            moved.setdefault(parent, []).append((alias, leaf))
        if not moved:
            return
        same_names = all(alias.name == leaf for group in moved.values() for alias, leaf in group)
        if not kept and len(moved) == 1 and same_names:
            self._edit_module(statement, next(iter(moved)))
            return
        lines = [
            f"from {parent} import " + ", ".join(_alias(leaf, alias) for alias, leaf in group)
            for parent, group in moved.items()
        ]
        if kept:
            lines.append(f"from {module} import " + ", ".join(_alias(alias.name, alias) for alias in kept))
        start, end = self._span(statement)
        if b"#" in self._source[start:end]:
            self._left.append(
                Left(statement.lineno, f"from {module} import …", "split in two: its comments were dropped")
            )
        before = self._source[self._starts[statement.lineno - 1] : start]
        separator = "; " if before.strip() else self._newline + before.decode()
        self._edit(start, end, separator.join(lines), statement.lineno)

    def _edit_module(self, statement: ast.ImportFrom, name: str) -> None:
        start, end = self._span(statement)
        old = (statement.module or "").encode()
        place = self._source.index(old, start + len(b"from"), end)
        self._edit(place, place + len(old), name, statement.lineno)

    # --- dotted names ---

    def _rewrite_chain(self, node: ast.expr, binding: _Import, name: str, stays: bool) -> None:
        known, rest = _longest_known(name)
        if known is None:
            self._leave(node, name)
            return
        moved_with_import = not stays and is_of_interest(binding.target)
        if moved_with_import and known == _joined(new_name(binding.target), name, binding.target, rest):
            return
        if binding.bound in self._assigned:
            self._left.append(Left(node.lineno, name, f"{binding.bound} is assigned elsewhere in this program"))
            return
        while rest:
            assert isinstance(node, ast.Attribute)
            node, rest = node.value, rest[:-1]
        start, end = self._span(node)
        if set(self._source[start:end]) & set(b"#()\\\n"):
            self._left.append(Left(node.lineno, name, "the name is written over several lines"))
            return
        module = known
        while not is_module(module):
            module = module.rpartition(".")[0]
        self._needed.add(module)
        self._edit(start, end, known, node.lineno)

    def _add_imports(self) -> None:
        """Imports of the modules that dotted names lead through."""
        needed = {name for name in self._needed if not any(other.startswith(f"{name}.") for other in self._needed)}
        present = {
            alias.name
            for node in self._tree.body
            if isinstance(node, ast.Import)
            for alias in node.names
            if not alias.asname
        }
        wanted = sorted(needed - present - self._imported)
        if not wanted:
            return
        after: ast.stmt | None = None
        leading = True
        for statement in self._tree.body:
            if any(binding.statement is statement for group in self._imports.values() for binding in group):
                after = statement
                break
            leading = leading and _is_preamble(statement)
            after = statement if leading else after
        lines = "".join(f"import {name}{self._newline}" for name in wanted)
        line = (after.end_lineno or after.lineno) if after is not None else 0
        place = self._starts[min(line, len(self._starts) - 1)]
        if place and not self._source[:place].endswith(b"\n"):
            lines = self._newline + lines.removesuffix(self._newline)
        self._edit(place, place, lines, line + 1)

    # --- what is left ---

    def _leave(self, node: ast.stmt | ast.expr, name: str) -> None:
        self._left.append(Left(node.lineno, name, why_left(name)))

    def _keep(self, statement: ast.stmt, name: str) -> None:
        why = "kept: the program takes something from it that has no counterpart"
        self._left.append(Left(statement.lineno, name, why))

    def _list_texts(self) -> None:
        """Texts that name what has moved: nobody can tell what they are used for."""
        documentation = {
            id(node.value)
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
                word = node.value.strip()
                if " " not in word and is_of_interest(word):
                    self._left.append(Left(node.lineno, repr(word), "a text: change it if it is used as a name"))

    # --- edits ---

    def _span(self, node: ast.stmt | ast.expr | ast.alias) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def _edit(self, start: int, end: int, text: str, line: int) -> None:
        self._edits.append((start, end, text, line))

    def _result(self) -> Migration:
        result = self._source
        changes = []
        for start, end, text, line in sorted(self._edits, reverse=True):
            changes.append(Change(line, self._source[start:end].decode(), text.strip("\r\n")))
            result = result[:start] + text.encode() + result[end:]
        left = sorted(set(self._left), key=lambda place: (place.line, place.what))
        return Migration(result.decode(), tuple(reversed(changes)), tuple(left))


def _longest_known(name: str) -> tuple[str | None, list[str]]:
    """The counterpart of a dotted name, and the attributes that follow what it names.

    ``torch.quantization.default_qconfig.activation`` is ``…default_qconfig`` and then its own attribute; but what a
    package here does not have is not here.
    """
    parts = name.split(".")
    for count in range(len(parts), 1, -1):
        found = new_name(".".join(parts[:count]))
        if found is not None:
            return (None, []) if count < len(parts) and is_module(found) else (found, parts[count:])
    return None, []


def _joined(package: str | None, name: str, target: str, rest: list[str]) -> str:
    """The name that a dotted name gets when only the import that it starts at is rewritten."""
    tail = name.removeprefix(target)
    suffix = "".join(f".{part}" for part in rest)
    return f"{package}{tail.removesuffix(suffix) if suffix else tail}"


def _alias(name: str, alias: ast.alias) -> str:
    bound = alias.asname or alias.name
    return name if bound == name else f"{name} as {bound}"


def _is_store(node: ast.Name) -> bool:
    return isinstance(node.ctx, (ast.Store, ast.Del))


def _is_preamble(statement: ast.stmt) -> bool:
    is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
    return is_future or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
