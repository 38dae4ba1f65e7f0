"""What a conversion did to each module of a model, and why.

May import: nothing of this package.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["ModuleRecord", "QuantizationSummary"]


@dataclass(frozen=True)
class ModuleRecord:
    """One module of a converted model.

    Attributes:
        name: its path in the model; "" for the root.
        before: the name of its class before.
        after: the name of its class now, or None if it was left in float; the same as before where the float class
            computes on quantized tensors as it is.
        reason: why it was left alone, or what to mind about it; "" if there is nothing to say.
    """

    name: str
    before: str
    after: str | None
    reason: str = ""

    @property
    def swapped(self) -> bool:
        """Whether another class took its place."""
        return self.after not in (None, self.before)


class QuantizationSummary:
    """Every swap and every skip of one conversion, in the order of the model; prints as a table.

    Example:
        >>> import torch
        >>> from zeropoint.ao.quantization import quantize_dynamic
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Conv1d(4, 2, 1))
        >>> print(quantize_dynamic(model).quantization_summary)
        1 module swapped, 1 left in float
        name  before  after
        0     Linear  DynamicQuantizedLinear
        1     Conv1d  (float)                 no qconfig
    """

    def __init__(self, records: list[ModuleRecord] | None = None) -> None:
        self.records: list[ModuleRecord] = list(records or ())

    def add(self, name: str, before: str, after: str | None, reason: str = "") -> None:
        """Notes one module."""
        self.records.append(ModuleRecord(name, before, after, reason))

    @property
    def swapped(self) -> dict[str, ModuleRecord]:
        """The modules that another class took the place of, by name."""
        return {record.name: record for record in self.records if record.swapped}

    @property
    def skipped(self) -> dict[str, ModuleRecord]:
        """The modules that were left in float, by name."""
        return {record.name: record for record in self.records if record.after is None}

    def __iter__(self) -> Iterator[ModuleRecord]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __str__(self) -> str:
        done = len(self.swapped)
        head = f"{done} {'module' if done == 1 else 'modules'} swapped, {len(self.skipped)} left in float"
        rows = [("name", "before", "after", "")]
        for r in self.records:
            after = "(float)" if r.after is None else r.after if r.swapped else "(as it is)"
            rows.append((r.name or "(root)", r.before, after, r.reason))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
        return "\n".join([head, *(line.rstrip() for line in lines)])

    def __repr__(self) -> str:
        reasons = Counter(record.reason for record in self.records if record.after is None)
        return f"QuantizationSummary({len(self.swapped)} swapped, {dict(reasons)} left in float)"
