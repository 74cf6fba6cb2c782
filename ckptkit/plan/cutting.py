"""How tp and ep cut tensors: as rules say, and where these are silent as the source has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptkit.errors import LayoutError, RulesError
from ckptkit.model import (
    Axis,
    Experts,
    Owner,
    Placement,
    Replicate,
    Rule,
    Rules,
    Shard,
    Strategy,
    Strided,
)
from ckptkit.plan.subjects import Subject

AS_IN_SOURCE = "as in the source"


@dataclass(frozen=True, slots=True)
class Said:
    """How an axis cuts a tensor, who says so, and which sizes should be known and are not."""

    placement: Placement
    why: str
    unknown_sizes: tuple[str, ...] = ()


class Cutter:
    """Asks the rules first, then the source, then what is left to say without either."""

    def __init__(self, subjects: Sequence[Subject], source: Strategy, rules: Rules | None) -> None:
        self._names = [subject.inner for subject in subjects]
        self._source = {
            axis.kind: i for i, axis in reversed(list(enumerate(source.mesh.axes))) if axis.size > 1
        }
        self._rules = rules
        self._sizes = rules.known if rules else {}
        self._found: dict[tuple[str, tuple[int, ...]], Rule | None] = {}
        self._experts: dict[str, int] = {}

    def said(self, subject: Subject, axis: Axis) -> Said | None:
        """How the axis cuts a tensor; None where nobody knows."""
        rule = self._rule(subject)
        if rule is not None and self._rules is not None:
            why = f"{self._rules.name}: {rule.pattern(subject.inner)}"
            try:
                return self._by_rule(subject, axis, rule, why)
            except (RulesError, LayoutError) as error:
                error.where = why
                raise
        if not subject.tensor.shape:
            return Said(Replicate(), "0-d")
        if axis.kind in self._source:
            return _as_in_source(subject.tensor.placements[self._source[axis.kind]])
        if subject.tensor.shape != subject.lead.shape:
            return Said(Replicate(), "not of the shape of its parameter")
        if self._rules is not None and self._rules.default == "replicate":
            return Said(Replicate(), f"{self._rules.name}: default")
        return None if subject.is_of_model else Said(Replicate(), "no part of the model")

    def _rule(self, subject: Subject) -> Rule | None:
        if self._rules is None:
            return None
        key = (subject.inner, subject.lead.shape)
        if key not in self._found:
            self._found[key] = self._rules.find(*key)
        return self._found[key]

    def _by_rule(self, subject: Subject, axis: Axis, rule: Rule, why: str) -> Said:
        cut = rule.tp if axis.kind == "tp" else rule.ep
        if isinstance(cut, Experts):
            return Said(self._owner(cut, subject.inner, axis), why)
        if not subject.tensor.shape:
            return Said(Replicate(), "0-d")
        if not subject.has_shape_of_lead:
            return Said(Replicate(), "not of the shape of its parameter")
        if cut is None:
            return Said(Replicate(), why)
        placement = cut.placement(subject.tensor.shape, self._sizes)
        return Said(placement, why, tuple(cut.unknown(self._sizes)))

    def _owner(self, experts: Experts, name: str, axis: Axis) -> Placement:
        number = experts.number(name)
        if number is None:  # what all experts share, such as a router
            return Replicate()
        if experts.expert not in self._experts:
            numbers = [experts.number(each) for each in self._names]
            self._experts[experts.expert] = 1 + max(n for n in numbers if n is not None)
        return Owner(number // -(-self._experts[experts.expert] // axis.size))


def _as_in_source(placement: Placement) -> Said | None:
    match placement:
        case Replicate() | Shard():
            return Said(placement, AS_IN_SOURCE)
        case Strided(dim, unit):
            return Said(Shard(dim, None, unit), AS_IN_SOURCE)
    return None
