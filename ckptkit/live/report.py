"""How a step and the objects it is loaded into differ, and what is too much."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ckptkit.checkpoint.checkpoint import Checkpoint
from ckptkit.errors import LayoutError
from ckptkit.live.held import Held
from ckptkit.live.tensors import dtype_of

_SHOWN = 8


class StateMismatchError(LayoutError):
    """The step does not fit the objects it was to be loaded into."""


@dataclass(slots=True)
class Report:
    """What a load found to differ; on every rank, of what that rank has."""

    missing: list[str] = field(default_factory=list)
    """In the objects but not in the step: left as they were."""
    unexpected: list[str] = field(default_factory=list)
    """In the step but not in the objects of any rank; known on rank 0."""
    reshaped: list[str] = field(default_factory=list)
    """Of another shape in the step, with both shapes: left as they were."""
    cast: list[str] = field(default_factory=list)
    """Of another dtype in the step, with both dtypes."""
    skipped: list[str] = field(default_factory=list)
    """Values of each rank of a job of another size."""

    @property
    def is_exact(self) -> bool:
        """Whether the step and the objects were the same."""
        return not (self.missing or self.unexpected or self.reshaped or self.cast or self.skipped)

    def __str__(self) -> str:
        kinds = ("missing", "unexpected", "reshaped", "cast", "skipped")
        lines = [f"{kind}: {_listed(getattr(self, kind))}" for kind in kinds if getattr(self, kind)]
        return "\n".join(lines) or "nothing differs"


def compare(checkpoint: Checkpoint, held: Held, known_as: Iterable[str], report: Report) -> str:
    """Note how a tensor differs from the step; the name to read it under, empty for none."""
    name = next((each for each in known_as if each in checkpoint), "")
    if not name:
        report.missing.append(held.name)
        return ""
    array = checkpoint[name]
    if array.shape != held.shape:
        report.reshaped.append(f"{held.name}: {array.shape} in the step, {held.shape} here")
        return ""
    dtype = dtype_of(held.name, held.local)
    if array.dtype != dtype:
        report.cast.append(f"{held.name}: {array.dtype} in the step, {dtype} here")
    return name


def refuse(report: Report, checkpoint: Checkpoint, *, partial: bool, cast: bool) -> None:
    """Raise unless all that differs may differ."""
    bad = Report(cast=[] if cast else report.cast)
    if not partial:
        bad.missing, bad.unexpected = report.missing, report.unexpected
        bad.reshaped, bad.skipped = report.reshaped, report.skipped
    if bad.is_exact:
        return
    hints = []
    if bad.missing or bad.unexpected or bad.reshaped or bad.skipped:
        hints.append("partial=True loads what fits and reports the rest")
    if bad.cast:
        hints.append("cast=True converts")
    raise StateMismatchError(
        f"the step does not fit\n{bad}", where=checkpoint.location, hint="; ".join(hints)
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
