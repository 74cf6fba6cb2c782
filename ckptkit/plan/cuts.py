"""How tp and ep cut tensors: as rules say, and where these are silent as the source has it.

A rule whose unit (the length of a head) nobody gave cannot tell where a head ends. Where the source
is cut is such an end: it was trained so.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from urllib.parse import unquote

from ckptkit.errors import LayoutError, RulesError
from ckptkit.model import Axis, Owner, Placement, Replicate, Shard, Strategy, Strided
from ckptkit.model.cut import AxisCut, DimCut
from ckptkit.model.rules import Cut, Experts, Rule, Rules, number_in

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
        self._axes = source.mesh.axes
        self._source = {
            axis.kind: i for i, axis in reversed(list(enumerate(self._axes))) if axis.size > 1
        }
        self._rules = rules
        self._sizes = rules.known if rules else {}
        self._found: dict[tuple[str, tuple[int, ...]], tuple[Rule | None, str]] = {}
        self._experts: dict[str, int] = {}

    def said(self, subject: Subject, axis: Axis) -> Said | None:
        """How the axis cuts a tensor; None where nobody knows."""
        rule, pattern = self._rule(subject)
        is_told = axis.kind in self._source
        if rule is not None and self._rules is not None and not (is_told and self._rules.is_guess):
            why = f"{self._rules.name}: {pattern}"
            try:
                return self._by_rule(subject, axis, rule, why)
            except (RulesError, LayoutError) as error:
                error.where = why
                raise
        if not subject.tensor.shape:
            return Said(Replicate(), "0-d")
        if is_told:
            return self._as_in_source(subject, axis, rule)
        if subject.tensor.shape != subject.lead.shape:
            return Said(Replicate(), "not of the shape of its parameter")
        if self._rules is not None and self._rules.default == "replicate":
            return Said(Replicate(), f"{self._rules.name}: default")
        return None if subject.is_of_model else Said(Replicate(), "no part of the model")

    def kind(self, subject: Subject) -> tuple[Hashable, ...]:
        """Tensors of one kind are cut alike by every axis: nothing else about them is asked for."""
        tensor, lead = subject.tensor, subject.lead
        rule, pattern = self._rule(subject)
        by_name = subject.inner if rule is not None and isinstance(rule.ep, Experts) else None
        return (
            *(tensor.shape, lead.shape, lead is tensor, tensor.role, tensor.is_parameter),
            # Arrays that are alike share their placements, which are long to compare.
            *(id(tensor.placements), id(rule), pattern, by_name),
        )

    def _rule(self, subject: Subject) -> tuple[Rule | None, str]:
        """The rule for a tensor, and which of its patterns."""
        if self._rules is None:
            return None, ""
        key = (subject.inner, subject.lead.shape)
        if key not in self._found:
            rule = self._rules.find(*key)
            self._found[key] = rule, "" if rule is None else rule.pattern(subject.inner)
        return self._found[key]

    def _by_rule(self, subject: Subject, axis: Axis, rule: Rule, why: str) -> Said:
        cut = rule.tp if axis.kind == "tp" else rule.ep
        if isinstance(cut, Experts):
            number = number_in(subject.inner, cut.expert)
            if number is None:  # what all experts share, such as a router
                return Said(Replicate(), why)
            if cut.expert not in self._experts:
                numbers = [number_in(each, cut.expert) for each in self._names]
                self._experts[cut.expert] = 1 + max(n for n in numbers if n is not None)
            return Said(Owner(number // -(-self._experts[cut.expert] // axis.size)), why)
        if not subject.tensor.shape:
            return Said(Replicate(), "0-d")
        if not subject.has_shape_of_lead:
            return Said(Replicate(), "not of the shape of its parameter")
        if cut is None:
            return Said(Replicate(), why)
        placement = cut.placement(subject.tensor.shape, self._sizes)
        return Said(placement, why, self._unknown(cut, placement, subject, axis))

    def _unknown(
        self, cut: Cut, placement: Placement, subject: Subject, axis: Axis
    ) -> tuple[str, ...]:
        """The sizes without which nobody knows whether the axis cuts heads in two."""
        unknown = tuple(name for each in cut.expressions for name in each.unknown(self._sizes))
        if not unknown or not isinstance(placement, Shard) or axis.size == 1:
            return ()
        index = self._source.get(axis.kind)
        before = None if index is None else _plain(subject.tensor.placements[index])
        if index is None or not isinstance(before, Shard) or before.dim != placement.dim:
            return unknown
        # Where an axis of the kind has cut the source is between heads: it was trained so.
        known = _edges(before, subject, self._axes[index])
        return () if known and _edges(placement, subject, axis) <= known else unknown

    def _as_in_source(self, subject: Subject, axis: Axis, rule: Rule | None) -> Said | None:
        placement = _plain(subject.tensor.placements[self._source[axis.kind]])
        if placement is None:
            return None
        cut = rule.tp if rule is not None and axis.kind == "tp" else None
        if not (
            isinstance(cut, Cut)
            and isinstance(placement, Shard)
            and (cut.dim, placement.unit) == (placement.dim, 1)
        ):
            return Said(placement, AS_IN_SOURCE)
        # It cuts what the rule cuts, and lacks only the unit, which tensors do not tell.
        unit = cut.unit.value(self._sizes) if cut.unit is not None else 1
        placement = replace(placement, unit=unit)
        return Said(placement, AS_IN_SOURCE, self._unknown(cut, placement, subject, axis))


def _plain(placement: Placement) -> Replicate | Shard | None:
    """A placement of a source as one for other meshes, if there is one."""
    match placement:
        case Replicate() | Shard():
            return placement
        case Strided(dim, unit):
            return Shard(dim, None, unit)
    return None


def _edges(placement: Shard, subject: Subject, axis: Axis) -> set[int]:
    """Where an axis cuts the dim, were it the only one."""
    cut = AxisCut(0, axis.name, axis.size, placement.blocks, placement.unit)
    return set(DimCut(subject.tensor.shape[placement.dim], (cut,)).edges())


class Tensor(NamedTuple):
    """What has to be known of a tensor to place it; `placements` are those of the source."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    role: str
    of: str | None
    placements: tuple[Placement, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter, or may well be one: nobody said what it is."""
        return self.role == "param" or (self.role == "other" and self.name.startswith("model/"))


class Subject(NamedTuple):
    """A tensor, its name inside of its group, and the parameter that it follows: often itself."""

    tensor: Tensor
    inner: str
    lead: Tensor

    @property
    def has_shape_of_lead(self) -> bool:
        """Whether it is cut as the parameter is; what is 0-d is never cut."""
        return bool(self.tensor.shape) and self.tensor.shape == self.lead.shape

    @property
    def is_of_model(self) -> bool:
        """Whether it belongs to the model, or follows what does; what is neither is only kept."""
        tensor = self.tensor
        return tensor.role != "other" or tensor.is_parameter or self.lead is not tensor


def subjects_of(tensors: Sequence[Tensor]) -> list[Subject]:
    """The tensors, in their order, with what each of them follows."""
    by_name = {tensor.name: tensor for tensor in tensors}
    # A parameter and its state have one: found once for all of them.
    inners: dict[str | None, str] = {None: ""}
    inners |= {tensor.of: ruled_name(tensor) for tensor in tensors if tensor.of}
    parameters = {ruled_name(tensor): tensor for tensor in tensors if tensor.is_parameter}
    # For a parameter that is not there stands the largest of its state: it has its shape.
    absent: dict[str, Tensor] = {}
    for tensor in tensors:
        if tensor.of is not None and tensor.of not in by_name:
            known = absent.setdefault(tensor.of, tensor)
            if (tensor.elements, len(tensor.shape)) > (known.elements, len(known.shape)):
                absent[tensor.of] = tensor
    subjects = []
    for tensor in tensors:
        inner, lead = inners[tensor.of or None] or ruled_name(tensor), tensor
        if tensor.of is not None:
            lead = by_name.get(tensor.of) or absent[tensor.of]
        elif tensor.role in ("other", "optimizer") and not tensor.is_parameter:
            same = parameters.get(inner)
            if same is not None and (same.shape == tensor.shape or tensor.role == "optimizer"):
                lead = same
        subjects.append(Subject(tensor, inner, lead))
    return subjects


def ruled_name(tensor: Tensor) -> str:
    """The name that rules are asked about, inside of its group: of what follows a parameter, that
    one's.
    """
    nodes = (tensor.of or tensor.name).split("/")
    if tensor.of is None and tensor.role == "optimizer" and len(nodes) > 2:
        nodes = nodes[:-1]
    inner = "/".join(nodes[1:] or nodes)
    return unquote(inner) if "%" in inner else inner
