"""What a page tells of a step, a plan and a comparison: plain values, columns where there is a row
for each array. Boxes are not among them: the page computes these, as `model.cut` does.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

from ckptkit.checkpoint.check.differences import ArrayForm, Diff
from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.reshard.plan import ReshardPlan
from ckptkit.checkpoint.run.run import Run
from ckptkit.format.arrays import ArrayKind
from ckptkit.format.names import fold_names
from ckptkit.model import Grid, Placement, Strategy, placement_to_doc
from ckptkit.model.document import in_short

Facts: TypeAlias = dict[str, Any]

# A grid of a foreign file may have a border for each rank of a large job.
_EDGES = 1024
_ITEMS = 500
_short = partial(in_short, width=160)


def step_facts(checkpoint: Checkpoint) -> Facts:
    """The step itself; its arrays in the order of names, tied ones under each of theirs."""
    manifest, foreign = checkpoint.manifest, checkpoint.foreign
    table = manifest.table
    place = {name: number for number, name in enumerate(table.names)}
    tied = [place[alias.alias_of] for alias in table.aliases]
    names = [*table.names, *(alias.name for alias in table.aliases)]
    kinds = Kinds()
    kind = [kinds.number(each) for each in table.kinds]
    kind += [kind[number] for number in tied]
    alias = [*([-1] * len(place)), *tied]
    for name in dict(zip(reversed(kind), reversed(names), strict=True)).values():
        checkpoint[name].layout  # noqa: B018 - raises where its placements do not fit its shape
    folds = fold_names(names, zip(kind, (at >= 0 for at in alias), strict=True))
    fold = [0] * len(names)
    for number, each in enumerate(folds):
        for at in each.places:
            fold[at] = number
    ofs = [*table.ofs, *(table.ofs[number] for number in tied)]
    theirs = None if foreign is None else [foreign.theirs.get(name) for name in names]
    return {
        **_head(checkpoint),
        "details": [
            [key, _short(value)] for key, value in islice(checkpoint.details.items(), _ITEMS)
        ],
        "objects": [
            [item.name, item.semantics, _short(item.value)] for item in manifest.objects[:_ITEMS]
        ],
        "object_count": len(manifest.objects),
        "names": names,
        "kind": kind,
        "alias": alias,
        "of": [-1 if of is None else place.get(of, of) for of in ofs],
        "theirs": theirs if theirs and any(theirs) else None,
        "fold": fold,
        "folds": [each.name for each in folds],
        **kinds.facts(),
    }


def run_facts(checkpoint: Checkpoint, run: Run) -> list[Facts]:
    """The steps of the run that a step was found in, ascending."""
    return [
        {
            "step": _exact(info.step),
            "bytes": info.nbytes,
            "time": _number(info.time),
            "strategy": info.strategy or info.format,
            "committed": info.committed or bool(info.format),
            "problem": info.problem,
            "here": info.step == checkpoint.step,
        }
        for info in sorted([*run.listing(), *run.foreign()], key=lambda info: info.step)
    ]


def plan_facts(plan: ReshardPlan) -> Facts:
    """What a reshard would do, with the rows of `step_facts` for the same step."""
    table, kinds, whys = plan.checkpoint.manifest.table, Kinds(), dict[str, int]()
    place = {name: number for number, name in enumerate(table.names)}
    count = len(table.names) + len(table.aliases)
    kind, why, kept = [-1] * count, [0] * count, [0] * count
    for array in plan.arrays:
        at = place[array.source.name]
        kind[at] = kinds.number(array.info.kind)
        why[at] = whys.setdefault(array.why, len(whys))
        kept[at] = int(array.is_kept)
    for number, alias in enumerate(table.aliases, len(table.names)):
        at = place[alias.alias_of]
        kind[number], why[number], kept[number] = kind[at], why[at], kept[at]
    return {
        "strategy": _strategy(plan.target.strategy),
        "kind": kind,
        "why": why,
        "whys": list(whys),
        "kept": kept,
        "bytes_needed": plan.bytes_needed,
        "bytes_read": plan.bytes_read,
        "bytes_written": plan.bytes_written,
        "read_amplification": plan.read_amplification,
        "requests": plan.requests,
        "chunks": plan.chunks,
        "imbalance": plan.imbalance,
        "bytes_by_rank": list(plan.bytes_by_rank),
        **kinds.facts(),
    }


def diff_facts(found: Diff, other: Checkpoint) -> Facts:
    """What differs between a step and another one."""
    arrays = found.arrays
    values = [each.values for each in arrays]
    return {
        "other": _head(other),
        "array_count": found.array_count,
        "object_count": found.object_count,
        "bytes": found.nbytes,
        "name": [each.name for each in arrays],
        "what": [each.kind for each in arrays],
        "a": [_form(each.a) for each in arrays],
        "b": [_form(each.b) for each in arrays],
        "count": [each and each.count for each in values],
        "of": [each and each.of for each in values],
        "most": [each and _number(each.max_abs) for each in values],
        "first": [each and list(each.first) for each in values],
        "objects": [
            [each.name, each.kind, _short(each.a), _short(each.b)]
            for each in found.objects[:_ITEMS]
        ],
        "objects_differ": len(found.objects),
    }


def _head(checkpoint: Checkpoint) -> Facts:
    manifest, foreign = checkpoint.manifest, checkpoint.foreign
    is_known = foreign is None or foreign.strategy is not None
    sizes = [pack.size for pack in manifest.packs]
    if foreign is not None:  # as its last pack is put together of files that are listed already
        sizes = [foreign.files[key] for key in sorted(foreign.files)]
    return {
        "location": checkpoint.location,
        "step": _exact(checkpoint.step),
        "time": _number(checkpoint.time or None),
        "save_id": checkpoint.save_id,
        "writer": manifest.save.writer,
        "format": None if foreign is None else foreign.format,
        "strategy": _strategy(checkpoint.strategy) if is_known else None,
        "packs": sizes,
        "files": None if foreign is None else sorted(foreign.files)[:_ITEMS],
    }


def _strategy(strategy: Strategy) -> Facts:
    axes = [[axis.name, axis.kind, axis.size] for axis in strategy.mesh.axes]
    return {"text": str(strategy), "axes": axes}


class Kinds:
    """What arrays are but for their names, each once: layers are alike."""

    def __init__(self) -> None:
        self._by_place: dict[int, int] = {}
        self._by_value: dict[ArrayKind, int] = {}
        self._rows: dict[tuple[Placement, ...], int] = {}

    def number(self, kind: ArrayKind) -> int:
        """Where the kind of an array stands in the list; the arrays live as long as this."""
        found = self._by_place.get(id(kind))
        if found is None:
            found = self._by_value.setdefault(kind, len(self._by_value))
            self._by_place[id(kind)] = found
        return found

    def facts(self) -> Facts:
        """The list, and that of the placements that it refers to."""
        rows = self._rows
        kinds = [
            {
                "shape": kind.shape,
                "dtype": kind.dtype.name,
                "itemsize": kind.dtype.itemsize,
                "role": kind.role,
                "chunks": _grid(kind.grid),
                "counts": kind.grid.counts,
                "placements": rows.setdefault(kind.placements, len(rows)),
            }
            for kind in self._by_value
        ]
        texts = [[{**placement_to_doc(p), "text": str(p)} for p in row] for row in rows]
        return {"kinds": kinds, "placements": texts}


def _grid(grid: Grid) -> Facts:
    if grid.is_regular:
        return {"shape": grid.chunk_shape}
    few = sum(map(len, grid.edges)) <= _EDGES
    return {"edges": grid.edges if few else None}


def _form(form: ArrayForm | None) -> list[Any] | None:
    return None if form is None else [list(form.shape), form.dtype]


def _exact(number: int) -> int | str:
    """An integer as a page shows it: it holds numbers as doubles."""
    return number if number <= 1 << 53 else str(number)


def _number(value: float | None) -> float | str | None:
    """As JSON has it; infinities and numbers that a page cannot hold are texts."""
    if value is None:
        return None
    return value if math.isfinite(value) and abs(value) < 1e300 else str(value)
