"""What is wrong with a step, and what differs between two: as records, lines and a card."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Any

from ckptkit.model.document import counted, size_text
from ckptkit.model.folds import fold_names, natural_order
from ckptkit.model.pictures import card, table

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a step."""

    kind: str
    """corrupt, missing, extra, mismatch, unreadable, or values: some are no finite numbers."""
    where: str
    what: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.what}"


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """What an array is, but for its values."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """How many elements of an array differ, and how much."""

    count: int
    of: int
    max_abs: int | float | None
    """The largest difference; None where none is a number, as between a number and a NaN."""
    first: tuple[int, ...]
    """The index of the first of them, in row-major order."""


@dataclass(frozen=True, slots=True)
class ArrayDifference:
    """An array that is not the same in both steps."""

    name: str
    kind: str
    """only_a, only_b, shape, dtype or values."""
    a: ArrayForm | None
    b: ArrayForm | None
    values: ValueDifference | None = None

    def __str__(self) -> str:
        a, b, values = self.a, self.b, self.values
        if a is None or b is None:
            return f"{self.name}: only in {'B' if a is None else 'A'}"
        if self.kind == "shape":
            return f"{self.name}: shape {a.shape} != {b.shape}"
        if values is None:
            return f"{self.name}: dtype {a.dtype} != {b.dtype}"
        most = "" if values.max_abs is None else f" by {values.max_abs:.6g} at most"
        first = f", first at {list(values.first)}" if values.first else ""
        return f"{self.name}: {values.count} of {counted(values.of, 'element')} differ{most}{first}"


@dataclass(frozen=True, slots=True)
class ObjectDifference:
    """An object that is not the same in both steps; sums by their total, splits by all items."""

    name: str
    kind: str
    """only_a, only_b, semantics or value."""
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class Compared:
    """One of the two steps."""

    location: str
    step: int
    strategy: str


@dataclass(frozen=True, slots=True)
class Diff:
    """Two steps, what of them was compared, and what differs, sorted by name."""

    a: Compared
    b: Compared
    arrays: tuple[ArrayDifference, ...]
    objects: tuple[ObjectDifference, ...]
    array_count: int
    object_count: int
    nbytes: int
    """The bytes of the arrays that were compared, on one side."""

    @property
    def same(self) -> bool:
        """Whether they are the same state."""
        return not self.arrays and not self.objects

    def lines(self) -> list[str]:
        """A line for each array that differs, the largest difference first: other names, shapes and
        dtypes are larger than any, and alike layers share a line of these.
        """
        others = [each for each in self.arrays if each.values is None]
        kinds = [(each.kind, each.a, each.b) for each in others]
        found = []
        for name, places in fold_names([each.name for each in others], kinds):
            count = f", {len(places)} x" if len(places) > 1 else ""
            found.append(str(replace(others[places[0]], name=f"{name}{count}")))
        values = {each.name: each for each in self.arrays if each.values is not None}
        ordered = [values[name] for name in natural_order(values)]
        return [*found, *map(str, sorted(ordered, key=_nearness))]

    def summary(self) -> str:
        """What came of it, on one line."""
        between = f"A {self.a.strategy}, B {self.b.strategy}"
        arrays, objects = counted(self.array_count, "array"), counted(self.object_count, "object")
        if self.same:
            return f"the same state: {arrays}, {objects}, {size_text(self.nbytes)} ({between})"
        differing = ((self.arrays, arrays), (self.objects, objects))
        parts = [f"{len(items)} of {every}" for items, every in differing if items]
        verb = "differs" if len(self.arrays) + len(self.objects) == 1 else "differ"
        return f"{' and '.join(parts)} {verb} ({between})"

    def __repr__(self) -> str:
        return f"Diff({self.summary()})"

    def _repr_html_(self) -> str:
        lines = [line.rpartition(": ") for line in self.lines()]
        rows = [(name, what) for name, _, what in lines[:_SHOWN]]
        if len(lines) > _SHOWN:
            rows.append((f"and {len(lines) - _SHOWN} more", ""))
        facts = {"A": self.a.location, "B": self.b.location, "": self.summary()}
        if self.objects:
            facts["objects"] = ", ".join(each.name for each in self.objects[:_SHOWN])
        return card("diff", facts, table(("array", "differs"), rows))


def _nearness(found: ArrayDifference) -> float:
    """What those with the largest difference have least of; of a NaN there is no difference."""
    largest = None if found.values is None else found.values.max_abs
    return -inf if largest is None else -largest
