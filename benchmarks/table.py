"""Results: rows for people, bars with a verdict, and all of it as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmarks.measured import Measured


@dataclass(frozen=True, slots=True)
class Bar:
    """A promise about a number, and the number."""

    what: str
    value: float
    limit: float
    at_least: bool = True
    unit: str = "x"

    @property
    def passed(self) -> bool:
        """Whether the promise is kept."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def row(self) -> list[str]:
        """As a row of the table of bars."""
        sign = "≥" if self.at_least else "≤"
        verdict = "PASS" if self.passed else "FAIL"
        value, limit = f"{self.value:.3g} {self.unit}", f"{sign} {self.limit:g} {self.unit}"
        return [self.what, value, limit, verdict]


@dataclass(frozen=True, slots=True)
class Section:
    """One measurement: a table, the bars that follow from it, and the raw samples."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    bars: Sequence[Bar] = ()
    notes: Sequence[str] = ()
    samples: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)

    def to_doc(self) -> dict[str, Any]:
        """As JSON."""
        doc = asdict(self)
        for bar, entry in zip(self.bars, doc["bars"], strict=True):
            entry["passed"] = bar.passed
        return doc

    def to_text(self) -> str:
        """As Markdown."""
        parts = [f"## {self.title}", markdown(self.columns, self.rows), *self.notes]
        return "\n\n".join(part for part in parts if part)


def speeds(measured: Measured, size: int, against: str) -> list[list[str]]:
    """Rows of seconds and GB/s, the fastest first, each compared with one of them."""
    base = measured.median(against)
    rows = []
    for name, seconds in sorted(measured.seconds.items(), key=lambda item: median(item[1])):
        middle = median(seconds)
        rows.append(
            [
                name,
                f"{min(seconds):.2f}",
                f"{middle:.2f}",
                f"{max(seconds):.2f}",
                f"{size / middle / 1e9:.2f}",
                f"{base / middle:.2f}",
                f"{measured.median_cpu(name):.2f}",
            ]
        )
    return rows


def speed_columns(against: str) -> list[str]:
    """The head of `speeds`."""
    return ["", "min s", "median s", "max s", "GB/s", f"speed / {against}", "CPU s"]


def bars_text(sections: Sequence[Section]) -> str:
    """The table of all bars."""
    rows = [bar.row() for section in sections for bar in section.bars]
    return f"## Bars\n\n{markdown(['bar', 'measured', 'wanted', ''], rows)}" if rows else ""


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns line up also when it is read as plain text."""
    if not rows:
        return ""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join([first, *rest])} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(columns), line(rule), *map(line, rows)])
