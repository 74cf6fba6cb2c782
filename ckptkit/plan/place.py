"""How a target strategy cuts every tensor, and on which pipeline stage it lies: one placement for
each axis, and who says so.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

from ckptkit.errors import LayoutError, RulesError
from ckptkit.model import (
    Axis,
    Owner,
    Placement,
    Replicate,
    Shard,
    Stage,
    Strategy,
    Strided,
    layout_of,
)
from ckptkit.model.display import fold_names
from ckptkit.model.document import counted
from ckptkit.model.rules import Pipeline, Rules, fits
from ckptkit.plan.chunks import owners_of
from ckptkit.plan.cuts import AS_IN_SOURCE, Cutter, Said, Subject, Tensor, subjects_of

_SHARDERS = ("fsdp", "zero2", "zero3")
_LISTED = 8
_HINT = (
    "say it in the rules, such as pipeline: {layers: 'layers\\.(\\d+)', split: balanced,"
    " first: [...], last: [...]}"
)


class Placed(NamedTuple):
    """How a tensor is cut: one placement per axis of the target's mesh, and who says so.

    `unknown` are the axes for which nobody said anything, so that they replicate; `unknown_sizes`
    those without which heads may be cut in two.
    """

    name: str
    placements: tuple[Placement, ...]
    why: str
    unknown: tuple[str, ...] = ()
    unknown_sizes: tuple[str, ...] = ()


def place(
    tensors: Sequence[Tensor],
    *,
    source: Strategy,
    target: Strategy,
    rules: Rules | None = None,
    replicate_unknown: bool = False,
    allow_split_heads: bool = False,
) -> list[Placed]:
    """How the target cuts the tensors; a RulesError names all for which nobody says how, and those
    of which heads may be cut in two.
    """
    found = decide(tensors, source=source, target=target, rules=rules)
    unknown = [placed.name for placed in found if placed.unknown]
    if unknown and not replicate_unknown:
        axes = sorted({axis for placed in found for axis in placed.unknown})
        raise RulesError(
            f"no rule says how {' and '.join(axes)} cuts {_listed(unknown)}",
            where=rules.name if rules else "",
            hint="give rules with --rules (`ckpt rules` shows what they do), or replicate these"
            " tensors with --replicate-unknown",
        )
    blind = [placed for placed in found if placed.unknown_sizes]
    if blind and not allow_split_heads:
        sizes = sorted({size for placed in blind for size in placed.unknown_sizes})
        raise RulesError(
            f"without {' and '.join(sizes)} nobody knows whether attention heads are cut in two, of"
            f" {_listed([placed.name for placed in blind])}",
            where=rules.name if rules else "",
            hint=f"pass --config config.json, or --set {sizes[0]}=N (sizes={{...}} in Python);"
            " --allow-split-heads (allow_split_heads=True) cuts them wherever it falls",
        )
    return found


def decide(
    tensors: Sequence[Tensor], *, source: Strategy, target: Strategy, rules: Rules | None = None
) -> list[Placed]:
    """As `place`, but what nobody knows is replicated, and said to be unknown."""
    subjects = subjects_of(tensors)
    cutter = Cutter(subjects, source, rules)
    # Stages and owners go by names.
    one_by_one = any(axis.kind in ("pp", "zero1") for axis in target.mesh.axes)
    kinds: dict[Hashable, _Row] = {}
    rows = []
    for subject in subjects:
        kind = subject.tensor.name if one_by_one else cutter.kind(subject)
        row = kinds.get(kind)
        if row is None:
            row = kinds[kind] = _Row(subject, [Replicate() for _ in target.mesh.axes])
        row.subjects.append(subject)
        rows.append(row)
    distinct = list(kinds.values())
    _cut(distinct, cutter, source, target, rules)
    sharders = [i for i, axis in enumerate(target.mesh.axes) if axis.kind in _SHARDERS]
    for i in sharders:
        for row in distinct:
            # They cut parameters, and what follows these in their shape.
            subject = row.subject
            follows = subject.lead is not subject.tensor or subject.tensor.role == "optimizer"
            if subject.has_shape_of_lead and (subject.tensor.is_parameter or follows):
                right = row.placements[i + 1 :]
                is_cut = any(isinstance(each, Shard) and each.dim == 0 for each in right)
                row.placements[i] = Strided(0) if is_cut else Shard(0)
    _check(distinct, target)
    # Last, as what a rank has of a parameter is what the other axes leave of it.
    for i, axis in enumerate(target.mesh.axes):
        if axis.kind == "zero1":
            _give_owners(distinct, i, axis.size, target)
    placed = {id(row): row.placed for row in distinct}
    return [Placed(s.tensor.name, *placed[id(row)]) for s, row in zip(subjects, rows, strict=True)]


_Answer: TypeAlias = tuple[tuple[Placement, ...], str, tuple[str, ...], tuple[str, ...]]
"""As `Placed` has it, but for the name."""


@dataclass(slots=True)
class _Row:
    """Tensors that are cut alike, while they are being placed."""

    subject: Subject
    """The first of them, which stands for all."""
    placements: list[Placement]
    subjects: list[Subject] = field(default_factory=list)
    why: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    unknown_sizes: list[str] = field(default_factory=list)
    problem: RulesError | LayoutError | None = None

    def hear(self, index: int, axis: Axis, said: Said | None) -> None:
        if said is not None:
            self.placements[index] = said.placement
            self.why.append(said.why)
            self.unknown_sizes += said.unknown_sizes
        elif axis.size > 1:
            self.unknown.append(axis.name)
            self.why.append("no rule")

    @property
    def placed(self) -> _Answer:
        why = "; ".join(dict.fromkeys(self.why)) or _kind_of(self.subject)
        sizes = tuple(dict.fromkeys(self.unknown_sizes))
        return tuple(self.placements), why, tuple(self.unknown), sizes


def _cut(
    rows: list[_Row], cutter: Cutter, source: Strategy, target: Strategy, rules: Rules | None
) -> None:
    """What rules or the source decide: tp, ep and pp.

    Several pp axes make one pipeline of as many stages as their product, the last axis the fastest.
    """
    pipes = [(i, axis) for i, axis in enumerate(target.mesh.axes) if axis.kind == "pp"]
    sizes = [axis.size for _, axis in pipes]
    if pipes:
        subjects = [row.subject for row in rows]
        staged = _staged(subjects, target, math.prod(sizes), source, rules)
        for row, said in zip(rows, staged, strict=True):
            for place, (i, axis) in enumerate(pipes):
                along = said
                if said is not None and isinstance(said.placement, Stage):
                    inner = math.prod(sizes[place + 1 :])
                    along = Said(Stage(said.placement.coord // inner % axis.size), said.why)
                row.hear(i, axis, along)
    for i, axis in enumerate(target.mesh.axes):
        if axis.kind in ("tp", "ep"):
            for row in rows:
                try:
                    row.hear(i, axis, cutter.said(row.subject, axis))
                except (RulesError, LayoutError) as error:
                    row.problem = error


def _check(rows: list[_Row], target: Strategy) -> None:
    """Refuse rules that do not fit, all at once."""
    for row in rows:
        if row.problem is None:
            try:
                layout_of(row.subject.tensor.shape, target, row.placements)
            except LayoutError as error:
                row.problem = error
    wrong = [(subject, row) for row in rows if row.problem is not None for subject in row.subjects]
    if wrong:
        lines = ""
        for subject, row in wrong[:_LISTED]:
            tensor, says = subject.tensor, str(row.problem).partition("\nhint:")[0]
            cuts = ", ".join(str(p) for p in row.placements if not isinstance(p, Replicate))
            why = f" ({row.placed[1]})" if row.why else ""
            shape = list(tensor.shape)
            lines += f"\n  {tensor.name} of shape {shape}, cut as {cuts or '?'}{why}: {says}"
        more = f"\n  and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        hints = [
            row.problem.hint for _, row in wrong if row.problem is not None and row.problem.hint
        ]
        raise RulesError(
            f"rules do not fit {counted(len(wrong), 'tensor')}:{lines}{more}",
            hint=hints[0] if hints else "`ckpt rules` shows which rule each tensor follows",
        )


def _give_owners(rows: list[_Row], index: int, ranks: int, target: Strategy) -> None:
    """Give all state of a parameter to one rank; apart for every stage, since each has an optimizer
    of its own.
    """
    parameters = {row.subject.tensor.name: row for row in rows}
    members: dict[object, dict[str, list[_Row]]] = {}
    for row in rows:
        tensor, lead = row.subject.tensor, row.subject.lead
        if tensor.role == "optimizer" and (tensor.of is not None or lead is not tensor):
            apart = ((i, p) for i, p in enumerate(row.placements) if isinstance(p, Stage | Owner))
            members.setdefault(tuple(apart), {}).setdefault(lead.name, []).append(row)
    for states in members.values():
        sizes = {}
        for name in states:
            parameter = parameters[name]
            layout = layout_of(parameter.subject.tensor.shape, target, parameter.placements)
            # What one rank has of it is all that its optimizer sees, and deals out by.
            sizes[name] = sum(box.size for box in layout.part(layout.first_rank).boxes)
        for name, rank in owners_of(sizes, ranks).items():
            for row in states[name]:
                row.placements[index] = Owner(rank)


def _listed(names: Sequence[str]) -> str:
    rows = fold_names(names, [()] * len(names))  # layers are alike
    shown = ", ".join(row.name for row in rows[:_LISTED])
    rest = sum(len(row.places) for row in rows[_LISTED:])
    return f"{counted(len(names), 'tensor')}: {shown}{f' and {rest} more' if rest else ''}"


def _kind_of(subject: Subject) -> str:
    if not subject.tensor.shape:
        return "0-d"
    if subject.tensor.is_parameter:
        return "parameter"
    if subject.lead is subject.tensor:
        return subject.tensor.role
    return "as its parameter" if subject.has_shape_of_lead else "not of the shape of its parameter"


def _staged(
    subjects: Sequence[Subject], target: Strategy, count: int, source: Strategy, rules: Rules | None
) -> Iterator[Said | None]:
    """The stage of each tensor, of a pipeline of so many: as rules say; without them as in a source
    of as many stages.
    """
    pipes = {i: axis.size for i, axis in enumerate(source.mesh.axes) if axis.kind == "pp"}
    if count == 1:
        yield from [Said(Stage(0), "the only stage")] * len(subjects)
    elif rules is not None and rules.pipeline is not None:
        stages = _stages(subjects, rules.pipeline, count, rules.name)
        for subject in subjects:
            yield _by_pipeline(subject, rules, rules.pipeline, stages, count)
    elif pipes and math.prod(pipes.values()) == count:
        for subject in subjects:
            yield _stage_in_source(subject, pipes)
    else:
        raise RulesError(
            f"nothing says how layers are split into {count} stages", where=str(target), hint=_HINT
        )


def _stage_in_source(subject: Subject, pipes: Mapping[int, int]) -> Said | None:
    stage, placements = 0, [subject.tensor.placements[index] for index in pipes]
    if all(isinstance(placement, Replicate) for placement in placements):
        return Said(Replicate(), AS_IN_SOURCE)
    for placement, size in zip(placements, pipes.values(), strict=True):
        if not isinstance(placement, Stage):
            return None
        stage = stage * size + placement.coord
    return Said(Stage(stage), AS_IN_SOURCE)


def _by_pipeline(
    subject: Subject,
    rules: Rules,
    pipeline: Pipeline,
    stages: Mapping[tuple[int, int], int],
    count: int,
) -> Said | None:
    layer = pipeline.layer(subject.inner)
    if layer is not None:
        return Said(Stage(stages[layer]), f"{rules.name}: layer {layer[1]}")
    ends = ((Stage(0), pipeline.first), (Stage(count - 1), pipeline.last))
    for placement, patterns in (*ends, (Replicate(), pipeline.every)):
        pattern = next((each for each in patterns if fits(each, subject.inner)), None)
        if pattern is not None:
            return Said(placement, f"{rules.name}: {pattern}")
    if rules.default == "replicate":
        return Said(Replicate(), f"{rules.name}: default")
    if not subject.is_of_model or subject.lead.role == "buffer" or not subject.lead.shape:
        return Said(Replicate(), "outside of the layers")
    return None


def balanced(layers: Sequence[int], stages: int, first: int = 0, last: int = 0) -> list[int]:
    """The stage of each layer: contiguous, none empty, and the largest stage as small as it can be;
    of all such splits the evenest.

    `first` and `last` are bytes that lie on the first and the last stage in any case.
    """
    totals = [0, *(total + first for total in accumulate(layers))]
    totals[-1] += last
    least = _best(totals, stages, None)[0]
    cuts = _best(totals, stages, least)[1]
    return [stage for stage, (a, b) in enumerate(pairwise(cuts)) for _ in range(a, b)]


def _best(totals: list[int], stages: int, limit: int | None) -> tuple[int, list[int]]:
    """Without a limit, the least largest stage; with one, the split of least squares within it."""
    count = len(totals) - 1
    best: list[tuple[int, list[int]] | None] = [(0, [0])] + [None] * count
    for stage in range(1, stages + 1):
        now: list[tuple[int, list[int]] | None] = [None] * (count + 1)
        for stop in range(stage, count - (stages - stage) + 1):
            for start in range(stop - 1, stage - 2, -1):
                before = best[start]
                size = totals[stop] - totals[start]
                if limit is not None and size > limit:
                    break
                if before is None:
                    continue
                cost = max(before[0], size) if limit is None else before[0] + size * size
                known = now[stop]
                if known is None or cost < known[0]:
                    now[stop] = (cost, [*before[1], stop])
        best = now
    found = best[count]
    assert found is not None  # noqa: S101 — there are as many layers as stages, and the limit was reached before
    return found


def _stages(
    subjects: Sequence[Subject], pipeline: Pipeline, size: int, name: str
) -> dict[tuple[int, int], int]:
    """The stage of each layer, as the pipeline splits them."""
    nbytes: dict[tuple[int, int], int] = {}
    ends = [0, 0]
    for subject in subjects:
        mine = subject.tensor.elements * subject.tensor.itemsize
        layer = pipeline.layer(subject.inner)
        if layer is not None:
            nbytes[layer] = nbytes.get(layer, 0) + mine
        elif any(fits(pattern, subject.inner) for pattern in pipeline.first):
            ends[0] += mine
        elif any(fits(pattern, subject.inner) for pattern in pipeline.last):
            ends[1] += mine
    layers = sorted(nbytes)
    if len(layers) < size:
        raise RulesError(
            f"{counted(len(layers), 'layer')} cannot be split into {size} stages",
            where=f"{name}: pipeline",
            value=" ".join(pipeline.layers),
            hint="layers is a regular expression that finds the number of a layer in a name",
        )
    if pipeline.split == "balanced":
        found = balanced([nbytes[layer] for layer in layers], size, ends[0], ends[1])
        return dict(zip(layers, found, strict=True))
    split = pipeline.split
    if len(split) != size - 1 or split[-1:] >= (len(layers),):
        raise RulesError(
            f"{size} stages of {len(layers)} layers are split at {size - 1} of them",
            where=f"{name}: pipeline.split",
            value=list(split),
            hint="the numbers are those of the first layer of each stage but the first",
        )
    return {layer: sum(at <= i for at in split) for i, layer in enumerate(layers)}
