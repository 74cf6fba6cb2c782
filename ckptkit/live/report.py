"""How a step and the objects it is loaded into differ, and what is too much."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.live.state.parts import LiveTensor
from ckptkit.live.state.tensors import dtype_of
from ckptkit.live.wrappers.entries import StateMismatchError

_SHOWN = 8


@dataclass(slots=True)
class Report:
    """What a load found to differ, on any rank: all ranks have the same report."""

    missing: list[str] = field(default_factory=list)
    """In the objects but not in the step: left as they were."""
    unexpected: list[str] = field(default_factory=list)
    """In the step but not in the objects of any rank."""
    reshaped: list[str] = field(default_factory=list)
    """Of another shape in the step, with both shapes: left as they were."""
    cast: list[str] = field(default_factory=list)
    """Of another dtype in the step, with both dtypes."""
    skipped: list[str] = field(default_factory=list)
    """Values of each rank of a job of another size."""
    untied: list[str] = field(default_factory=list)
    """One tensor here, under two names that have different values in the step."""
    ranks: dict[str, list[int]] = field(default_factory=dict)
    """The ranks that found a difference, where not all did."""

    @property
    def is_exact(self) -> bool:
        """Whether the step and the objects were the same."""
        return not any(self.found().values())

    def found(self) -> dict[str, list[str]]:
        """What differs, by the way in which it does."""
        return {kind: getattr(self, kind) for kind in _KINDS}

    def __str__(self) -> str:
        lines = [f"{kind}: {self._listed(names)}" for kind, names in self.found().items() if names]
        return "\n".join(lines) or "nothing differs"

    def _listed(self, names: list[str]) -> str:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return ", ".join(name + self._who(name) for name in names[:_SHOWN]) + more

    def _who(self, name: str) -> str:
        ranks = self.ranks.get(name, [])
        more = ", …" if len(ranks) > _SHOWN else ""
        return f" (rank {', '.join(map(str, ranks[:_SHOWN]))}{more})" if ranks else ""


_KINDS = ("missing", "unexpected", "reshaped", "cast", "skipped", "untied")


def of_all(found: Sequence[Mapping[str, list[str]]]) -> dict[str, Any]:
    """The fields of the report that all ranks have together, of what each rank found."""
    ranks: dict[str, list[int]] = {}
    for rank, kinds in enumerate(found):
        for name in dict.fromkeys(name for names in kinds.values() for name in names):
            ranks.setdefault(name, []).append(rank)
    together = {k: list(dict.fromkeys(n for each in found for n in each[k])) for k in _KINDS}
    some = {name: who for name, who in ranks.items() if len(who) < len(found)}
    return {**together, "ranks": some}


def compare(
    checkpoint: Checkpoint, held: LiveTensor, known_as: Iterable[str], report: Report
) -> str:
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
    bad = Report(cast=[] if cast else report.cast, ranks=report.ranks)
    if not partial:
        bad.missing, bad.unexpected, bad.untied = report.missing, report.unexpected, report.untied
        bad.reshaped, bad.skipped = report.reshaped, report.skipped
    if bad.is_exact:
        return
    hints = []
    if bad.missing or bad.unexpected or bad.reshaped or bad.skipped or bad.untied:
        hints.append("partial=True loads what fits and reports the rest")
    if bad.cast:
        hints.append("cast=True converts")
    raise StateMismatchError(
        f"the step does not fit\n{bad}", where=checkpoint.location, hint="; ".join(hints)
    )


def readable(nbytes: float) -> str:
    """A number of bytes, such as `1.25 GB`."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"
