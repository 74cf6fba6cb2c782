"""How axes cut tensors whose own placements do not say it: fused projections cut by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ckptkit.errors import LayoutError, RulesError
from ckptkit.format.names import OPTIMIZER, inner_name
from ckptkit.model import Cut, Experts, Placement, Rule, Rules, Shard, parse_placement

# Either placements such as `{"*.wqkv.weight": {"tp": "shard(0)"}}`, or rules as a file has them.
RulesLike: TypeAlias = Mapping[str, Any] | Rules
HowCut: TypeAlias = Placement | Cut | Experts


@dataclass(frozen=True, slots=True)
class HandCuts:
    """What is said of tensors, by kind of axis; the first match counts."""

    said: tuple[tuple[Rule, Mapping[str, HowCut]], ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    inside: bool = False
    """Whether patterns match names inside of their groups, as those of rules files do."""

    @classmethod
    def of(cls, what: RulesLike | None) -> HandCuts:
        """What rules say, a document of such, or placements by patterns of whole names."""
        if isinstance(what, Mapping) and isinstance(what.get("rules"), list | tuple):
            what = Rules.from_doc(what, where="rules=")
        if isinstance(what, Rules):
            known = ((rule, {"tp": rule.tp, "ep": rule.ep}) for rule in what.rules)
            said = tuple(
                (rule, {k: cut for k, cut in cuts.items() if cut is not None})
                for rule, cuts in known
            )
            return cls(said, what.known, inside=True)
        return cls(tuple((Rule((p,)), _placements(p, by)) for p, by in (what or {}).items()))

    def find(
        self, name: str, shape: tuple[int, ...], *, of: str | None = None
    ) -> Mapping[str, HowCut]:
        """What is said of a tensor of this name, or with `of` of state that follows that one."""
        if self.inside and (not shape or (of is None and name.startswith(f"{OPTIMIZER}/"))):
            return {}  # 0-d, or in another shape than its parameter: replicated
        asked = inner_name(of or name, "param") if self.inside else of or name
        found = (by for rule, by in self.said if rule.matches(asked, shape, self.sizes))
        return next(found, {})

    def placement(
        self, name: str, how: HowCut, shape: tuple[int, ...], size: int
    ) -> tuple[Placement, tuple[int, ...]]:
        """How an axis of `size` ranks cuts a tensor, and the whole shape of one of which each of
        them holds an equal part.
        """
        if isinstance(how, Experts):
            raise RulesError(
                "experts that are tensors of their own are not told apart in a training job",
                where=name,
                value=how.expert,
                hint="stack them in one tensor, and cut that along the axis",
            )
        if not isinstance(how, Cut):
            return how, _whole_shape(shape, how, size)
        whole = shape
        if how.dim is not None and how.dim < len(shape):
            whole = (*shape[: how.dim], shape[how.dim] * size, *shape[how.dim + 1 :])
        try:
            placement = how.placement(whole, self.sizes)
        except (LayoutError, RulesError) as error:
            error.where = name
            raise
        return placement, _whole_shape(shape, placement, size)


def _placements(pattern: str, by_kind: object) -> dict[str, Placement]:
    if not isinstance(by_kind, Mapping):
        raise RulesError(
            "not placements by kind of axis",
            where=f"rules={{{pattern!r}: ...}}",
            value=by_kind,
            hint='write {"*.wqkv.weight": {"tp": "shard(0)"}}, or {"rules": [...]} as in a file',
        )
    return {k: parse_placement(p) if isinstance(p, str) else p for k, p in by_kind.items()}


def _whole_shape(part: tuple[int, ...], placement: Placement, size: int) -> tuple[int, ...]:
    """The shape of a plain tensor of which each of `size` ranks holds an equal part."""
    if not isinstance(placement, Shard):
        return part
    extent = part[placement.dim] * size
    if placement.blocks is not None:
        extent = sum(placement.blocks)
    return (*part[: placement.dim], extent, *part[placement.dim + 1 :])
