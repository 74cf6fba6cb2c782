"""`view`: a step, and what it is compared with or would become, as one HTML file that needs no
other. What the page tells are plain values, columns where there is a row for each array. Boxes are
not among them: the page computes these, as `model.cut` does.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import threading
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.resources import files
from itertools import chain, islice
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptkit.checkpoint.places import Place, store_at
from ckptkit.checkpoint.read.checkpoint import Checkpoint, open_checkpoint
from ckptkit.checkpoint.read.stream import STREAM_MEMORY, Band, Limits, stored_arrays, stream
from ckptkit.checkpoint.reshard.plan import ReshardPlan, plan_reshard
from ckptkit.checkpoint.reshard.target import TargetArray
from ckptkit.checkpoint.rules_file import RulesLike
from ckptkit.checkpoint.run.diff import Diff, diff, numbers
from ckptkit.checkpoint.run.run import Run
from ckptkit.checkpoint.workers import Progress, uncollected
from ckptkit.errors import UsageError
from ckptkit.format.arrays import ArrayKind
from ckptkit.model import Box, Grid, Placement, Strategy, placement_to_doc
from ckptkit.model.display import fold_names
from ckptkit.model.document import in_short, parse_size
from ckptkit.plan.read import writers
from ckptkit.storage import MemoryStore, Options
from ckptkit.version import __version__

Facts: TypeAlias = dict[str, Any]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

OCTAVES = 12
"""How many powers of two below the largest number the histogram shows, on each side of zero."""

# A grid of a foreign file may have a border for each rank of a large job.
_EDGES = 1024
_ITEMS = 500
_GROUPS = 16
# What takes longer than a look is worth is not counted.
_MOST_PARTS = 50_000
_BLOCK = 1 << 14
# Exponents of float64, smaller ones together with the smallest.
_LEAST, _MOST = -1022, 1024
_SIDE = _MOST - _LEAST + 1
_short = partial(in_short, width=160)

# In this order they are one script.
SCRIPTS = ("base", "cuts", "charts", "mesh", "overview", "tree", "tensor", "reshard", "compare")


@uncollected()
def view(  # noqa: PLR0913 — one keyword for each decision, all with defaults
    location: Place,
    *,
    against: Place | None = None,
    to: str | Strategy | None = None,
    stats: bool = False,
    rules: RulesLike | None = None,
    sizes: Mapping[str, Any] | None = None,
    replicate_unknown: bool = False,
    allow_split_heads: bool = False,
    memory: int | str = STREAM_MEMORY,
    progress: Progress | None = None,
    storage_options: Options | None = None,
) -> str:
    """One HTML page that shows a step (of a run: its newest, and the others on a time line), or
    what another program saved. It needs no other file, and asks for nothing.

    With `to` it shows what `reshard` to that strategy would move (`rules` and so on are as there),
    with `against` what differs from another step, as `diff` finds it, and with `stats` what the
    numbers of each array are like. The last two read all values, every chunk checked, in `memory`;
    else only the manifest is read.
    """
    if to is None and (rules is not None or sizes or replicate_unknown or allow_split_heads):
        raise UsageError(
            "rules and sizes say how a reshard would cut, and none is asked for",
            hint="name its strategy: to=, on the command line --to",
        )
    with ExitStack() as stack:
        store = store_at(location, storage_options)
        checkpoint = stack.enter_context(open_checkpoint(store))
        facts: Facts = {"ckptkit": __version__, "step": step_facts(checkpoint)}
        # Where it was found in a run.
        facts["run"] = run_facts(checkpoint, Run(store)) if checkpoint.folder.name else None
        if to is not None:
            plan = plan_reshard(
                checkpoint.place,
                MemoryStore(),
                to=to,
                rules=rules,
                sizes=sizes,
                replicate_unknown=replicate_unknown,
                allow_split_heads=allow_split_heads,
            )
            stack.enter_context(plan.checkpoint)
            facts["plan"] = {**plan_facts(plan), "flows": flows_of(plan)}
        if against is not None:
            other = store_at(against, storage_options)
            found = diff(checkpoint.place, other, memory=memory, progress=progress)
            facts["diff"] = diff_facts(found, stack.enter_context(open_checkpoint(other)))
        if stats:
            limits = Limits.of(parse_size(memory), None, sources=[checkpoint])
            facts["statistics"] = statistics_of(checkpoint, limits, progress)
        return page_of(facts)


def page_of(facts: Facts) -> str:
    """The page of some facts: it runs its own script, and nothing that they say."""
    page, style, script = _sources()
    # Plain ASCII without a < in it: nothing in a name can end the element.
    text = json.dumps(facts, separators=(",", ":"), allow_nan=False).encode()
    data = base64.b64encode(zlib.compress(text, 9)).decode()
    digests = [hashlib.sha256(element.encode()).digest() for element in (script, style)]
    runs, shows = (f"sha256-{base64.b64encode(digest).decode()}" for digest in digests)
    parts = {
        "POLICY": f"default-src 'none'; script-src '{runs}'; style-src '{shows}'; "
        "base-uri 'none'; form-action 'none'",
        "STYLE": style,
        "DATA": data,
        "SCRIPT": script,
    }
    for name, part in parts.items():
        page = page.replace(f"@{name}@", part, 1)
    return page


@cache
def _sources() -> tuple[str, str, str]:
    """The page, its style and its script."""
    names = ["page.html", "page.css", *(f"{name}.js" for name in SCRIPTS)]
    folder = files("ckptkit.page").joinpath("web")
    page, style, *scripts = (folder.joinpath(name).read_text(encoding="utf-8") for name in names)
    return page, style, '"use strict";\n' + "\n".join(scripts)


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
        "a": [each.a and [list(each.a.shape), each.a.dtype] for each in arrays],
        "b": [each.b and [list(each.b.shape), each.b.dtype] for each in arrays],
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


def flows_of(plan: ReshardPlan) -> dict[str, Any] | None:
    """The bytes of elements, and the chunks touched, from each pack to each rank, packs and ranks
    in at most 16 groups that follow each other; None where there are too many parts to look at.

    What ranks will hold alike is in equal shares, as they write it.
    """
    manifest, ranks = plan.checkpoint.manifest, plan.target.world_size
    packs = max(len(manifest.packs), 1)
    sources, targets = min(packs, _GROUPS), min(ranks, _GROUPS)
    group_of_pack = np.arange(packs) * sources // packs
    group_of_rank = np.arange(ranks) * targets // ranks
    alike: dict[tuple[int, int], list[TargetArray]] = defaultdict(list)
    for array in plan.arrays:
        alike[id(array.source.kind), id(array.info.kind)].append(array)
    parts = 0
    for arrays in alike.values():
        layout = arrays[0].layout
        parts += ranks if layout.is_tangled else sum(1 for _ in layout.distinct_ranks())
        if parts > _MOST_PARTS:
            return None
    nbytes, touched = np.zeros((2, sources, targets))
    in_place = 0.0
    for arrays in alike.values():
        first, layout = arrays[0], arrays[0].layout
        grid, itemsize = first.source.grid, first.source.dtype.itemsize
        if not grid.chunk_count:
            continue
        starts = [plan.checkpoint.first_row(array.source.name) for array in arrays]
        held = np.stack([manifest.pack[at : at + grid.chunk_count] for at in starts])
        # How many of the arrays have each chunk in each group of packs.
        counts = np.zeros((grid.chunk_count, sources))
        for row in held:
            counts[np.arange(grid.chunk_count), group_of_pack[row]] += 1
        borders = [grid.borders(dim) for dim in range(len(grid.shape))]
        for share, writing in chain.from_iterable(writers(layout)):
            part = 1 / share.replicas.count
            shares = np.bincount(group_of_rank[writing], minlength=targets) * part
            for box in share.boxes:
                chunks, elements = _overlaps(grid, borders, box)
                nbytes += np.outer(elements * itemsize @ counts[chunks], shares)
                touched += np.outer(counts[chunks].sum(axis=0), shares)
                stays = np.isin(held[:, chunks], writing).sum(axis=0)
                in_place += float(elements @ stays) * itemsize * part
    return {
        "sources": np.bincount(group_of_pack).tolist(),
        "targets": np.bincount(group_of_rank).tolist(),
        "bytes": np.rint(nbytes).astype(np.int64).tolist(),
        "chunks": np.ceil(touched).astype(np.int64).tolist(),
        # A file of another program belongs to no rank.
        "in_place": round(in_place) if plan.checkpoint.foreign is None else None,
    }


def _overlaps(grid: Grid, borders: Sequence[I64], box: Box) -> tuple[I64, F64]:
    """The chunks that a box touches, and how many elements it has of each."""
    chunks, elements = np.zeros(1, np.int64), np.ones(1)
    for dim, span in enumerate(grid.span(box)):
        low, high = box.offset[dim], box.offset[dim] + box.shape[dim]
        met = borders[dim][span.start : span.stop + 1]
        lengths = np.diff(np.clip(met, low, high)).astype(np.float64)
        index = np.arange(span.start, span.stop)
        chunks = (chunks[:, None] * grid.counts[dim] + index).reshape(-1)
        elements = (elements[:, None] * lengths).reshape(-1)
    return chunks, elements


@dataclass(eq=False, slots=True)
class Tally:
    """What is counted of one array; several threads add to it in turn."""

    count: int = 0
    nans: int = 0
    infinite: int = 0
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf
    by_exponent: I64 = field(default_factory=lambda: np.zeros(2 * _SIDE, np.int64))

    def add(self, numbers: npt.NDArray[np.float64]) -> None:
        """Count some numbers."""
        is_finite = np.isfinite(numbers)
        if not is_finite.all():
            nans = int(np.isnan(numbers).sum())
            self.nans += nans
            self.infinite += len(numbers) - int(is_finite.sum()) - nans
            numbers = numbers[is_finite]
        if not len(numbers):
            return
        self.count += len(numbers)
        self.total += float(numbers.sum())
        self.least = min(self.least, float(numbers.min()))
        self.most = max(self.most, float(numbers.max()))
        numbers = numbers[numbers != 0]
        exponents = np.maximum(np.frexp(numbers)[1], _LEAST) - _LEAST + _SIDE * (numbers > 0)
        self.by_exponent += np.bincount(exponents, minlength=2 * _SIDE)

    def join(self, other: Tally) -> None:
        """Add what another one has counted."""
        self.count += other.count
        self.nans += other.nans
        self.infinite += other.infinite
        self.total += other.total
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)
        self.by_exponent += other.by_exponent

    def row(self) -> list[Any]:
        """min, max, mean, zeros, NaNs, infinities, the power of two that no number reaches, and the
        bars of the histogram: from the largest negative numbers over those near zero to the largest
        positive ones, the highest bar being 999. Zeros alone have none.
        """
        zeros = self.count - int(self.by_exponent.sum())
        if not self.count:
            return [None, None, None, 0, self.nans, self.infinite, 0, []]
        negative, positive = self.by_exponent[:_SIDE], self.by_exponent[_SIDE:]
        used = np.flatnonzero(negative + positive)
        if not len(used):
            return [0.0, 0.0, 0.0, zeros, self.nans, self.infinite, 0, []]
        top = int(used[-1])
        low = max(0, top - OCTAVES + 1)
        near = zeros + int(negative[:low].sum() + positive[:low].sum())
        bars = np.concatenate([negative[low : top + 1][::-1], [near], positive[low : top + 1]])
        scaled = -(-bars * 999 // max(1, int(bars.max())))
        mean = self.total / self.count
        found = [self.least, self.most, mean if math.isfinite(mean) else None]
        return [*found, zeros, self.nans, self.infinite, top + _LEAST, scaled.tolist()]


def statistics_of(
    checkpoint: Checkpoint, limits: Limits, progress: Progress | None = None
) -> list[list[Any]]:
    """A row for each array of the manifest, in its order; of complex numbers both parts count."""
    stored = stored_arrays(checkpoint, limits.chunk_bytes, limits.pace(checkpoint.store))
    names = checkpoint.manifest.table.names
    tallies = [Tally() for _ in names]
    lock = threading.Lock()

    def count(band: Band, elements: Sequence[npt.NDArray[Any]]) -> None:
        raw, dtype = elements[0].reshape(-1), stored[names[band.item]].dtype
        here = Tally()
        # Sums of the largest numbers overflow, which is no news.
        with np.errstate(over="ignore", invalid="ignore"):
            for begin in range(0, len(raw), _BLOCK):
                values = numbers(dtype, raw[begin : begin + _BLOCK])
                wide = values.view(np.float64) if values.dtype.kind == "c" else values
                here.add(wide.astype(np.float64, copy=False))
            with lock:
                tallies[band.item].join(here)

    stream([[stored[name]] for name in names], count, limits, progress=progress)
    return [tally.row() for tally in tallies]


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


@dataclass(eq=False, slots=True)
class Kinds:
    """What arrays are but for their names, each once: layers are alike."""

    _by_place: dict[int, int] = field(default_factory=dict)
    _by_value: dict[ArrayKind, int] = field(default_factory=dict)

    def number(self, kind: ArrayKind) -> int:
        """Where the kind of an array stands in the list; the arrays live as long as this."""
        found = self._by_place.get(id(kind))
        if found is None:
            found = self._by_value.setdefault(kind, len(self._by_value))
            self._by_place[id(kind)] = found
        return found

    def facts(self) -> Facts:
        """The list, and that of the placements that it refers to."""
        rows: dict[tuple[Placement, ...], int] = {}
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


def _exact(number: int) -> int | str:
    """An integer as a page shows it: it holds numbers as doubles."""
    return number if number <= 1 << 53 else str(number)


def _number(value: float | None) -> float | str | None:
    """As JSON has it; infinities and numbers that a page cannot hold are texts."""
    if value is None:
        return None
    return value if math.isfinite(value) and abs(value) < 1e300 else str(value)
