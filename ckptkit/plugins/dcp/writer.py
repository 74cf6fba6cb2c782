"""A save of DCP as a step. DCP plans: which rank writes which box of which tensor. The coordinator
says what each is called and how it is chunked, in the plan that DCP hands out; then every rank
writes its boxes as its pack, and the step is committed as any other: by all of them, or not at all.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from ckptkit.checkpoint.places import Place
from ckptkit.checkpoint.ranks import DEFAULT_TIMEOUT, Ranks, failing_together, in_one_line
from ckptkit.checkpoint.rules_file import fitting_presets, of_first_layer
from ckptkit.checkpoint.run.run import Run
from ckptkit.checkpoint.workers import DEFAULT_THREADS, uncollected
from ckptkit.checkpoint.write.damage import REPLACEABLE
from ckptkit.checkpoint.write.plan import PackPlan
from ckptkit.checkpoint.write.writer import HeldKind, Writer
from ckptkit.errors import (
    CkptkitError,
    LayoutError,
    StrategyError,
    UnsupportedTypeError,
    UsageError,
)
from ckptkit.foreign.extents import Extent, ForeignArray
from ckptkit.foreign.spread import by_boxes
from ckptkit.foreign.states import Path, StateTensor
from ckptkit.format.arrays import ArrayKind
from ckptkit.format.names import inner_name
from ckptkit.live.state.entries import dtensor_lines
from ckptkit.live.state.parts import HandCuts
from ckptkit.live.state.ranks import current_world
from ckptkit.live.state.tensors import as_bits, dtype_of, local_of
from ckptkit.live.state.topology import Topology
from ckptkit.model import Assigned, Box, DType, Part, Placement, Replicate, Strategy
from ckptkit.model.document import located
from ckptkit.plan.chunks import DEFAULT_CHUNK_BYTES, choose_grid, may_cut
from ckptkit.plugins.dcp.names import (
    OBJECT,
    Meeting,
    Names,
    Target,
    as_leaf,
    name_tensors,
    objects_of,
    told_by,
)
from ckptkit.storage import Options

log = logging.getLogger("ckptkit.plugins")


class ToldArray(NamedTuple):
    """What a rank has to know of an array to write its boxes of it."""

    name: str
    kind: ArrayKind
    of: str | None
    first_rank: int
    """Who has a part of it, even if that is empty."""


@dataclass(frozen=True, slots=True, eq=False)
class ToldSave:
    """What the coordinator tells each rank of a save, in the plan that DCP hands out."""

    meeting: Meeting
    step: int
    strategy: Strategy
    """As the boxes tell it."""
    arrays: Mapping[str, ToldArray]
    """By DCP's names."""
    names: Names


class DcpWriter(StorageWriter):
    """DCP's storage writer: `dcp.save(state, storage_writer=Writer(run, step=7))`.

    `location` is a run, a path or a URL. One writer may save many steps, which `checkpoint_id=` of
    `dcp.save` names. Of older ones `keep_last` and `keep_every` are kept. Values that are no
    tensors are stored without pickle: one that a step has no type for is refused by its key.
    """

    def __init__(  # noqa: PLR0913 — one keyword for each decision, all with defaults
        self,
        location: Place,
        *,
        step: int | None = None,
        overwrite: bool = False,
        keep_last: int | None = None,
        keep_every: int | None = None,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        threads: int = DEFAULT_THREADS,
        timeout: float = DEFAULT_TIMEOUT,
        storage_options: Options | None = None,
    ) -> None:
        self._target = Target(location, step, storage_options)
        self._overwrite = overwrite
        self._keep = keep_last, keep_every
        self._chunk_bytes = chunk_bytes
        self._threads = threads
        self._timeout = timeout
        self._rank = 0
        self._keys: frozenset[str] = frozenset()
        self._used: Ranks | None = None
        self._told: tuple[list[Any], ToldSave] | None = None
        self._written: list[Any] = []
        self._last: tuple[list[Any], PackPlan] | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._target.name(checkpoint_id)

    def set_up_storage_writer(
        self,
        is_coordinator: bool,  # noqa: ARG002, FBT001 — DCP's
        *args: Any,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        self._rank = int(kwargs.get("rank") or 0)
        if not kwargs.get("use_collectives", True) and current_world().size > 1:
            raise UsageError(
                "without collectives each rank saves for itself: that is no step",
                where=str(self._target),
                hint="leave use_collectives=False out",
            )

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=str(self._target))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @uncollected()
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if not all(plan.usable for plan in plans):
            # A planner that caches plans says that these are those of the last save; what we tell
            # ranks is new each time.
            cached: dict[str, list[SavePlan]] = SavePlanner._cached_global_plan
            fitting = [known for known in cached.values() if len(known) == len(plans)]
            if len(fitting) != 1:
                raise UsageError(
                    "which plans the planner has cached is not to be told",
                    value=sorted(cached),
                    hint="leave enable_plan_caching out, or use one class of planners",
                )
            plans = [replace(plan, usable=True) for plan in fitting[0]]
        step, where = self._target.step, str(self._target)
        if step is None:
            raise UsageError(
                "nothing says which step this is",
                where=where,
                hint="Writer(run, step=…), or checkpoint_id= with the number of the step or its "
                "path, such as run/step-7",
            )
        # Copies: what they are of may be changed in place.
        made_for = [(list(plan.items), copy(plan.planner_data)) for plan in plans]
        if self._told is not None and self._told[0] == made_for:
            told = replace(self._told[1], meeting=Meeting.of(len(plans)), step=step)
        else:
            told = _told(plans, step, where, self._chunk_bytes, self._spread_over)
        self._told = made_for, told
        return [replace(plan, storage_data=told) for plan in plans]

    def _spread_over(
        self, arrays: list[ForeignArray], plans: Sequence[SavePlan]
    ) -> tuple[Strategy, list[ForeignArray]]:
        """The strategy of the ranks that write these plans, and the arrays with their placements,
        as far as boxes tell them. The file of an extent is the number of the rank that writes it.
        """
        spread, placed = by_boxes(arrays, len(plans))
        if spread is not None and spread.world_size == len(plans):
            return spread, placed
        # Ranks may have several pieces.
        spread = Strategy.of("single" if len(plans) == 1 else f"ddp:{len(plans)}")
        whole = (Replicate(),) * len(spread.mesh.axes)
        return spread, [replace(array, placements=whole) for array in arrays]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with uncollected():
            self.commit(self.prepared(plan, planner))
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def prepared(self, plan: SavePlan, planner: SavePlanner) -> Writer:
        """A writer that has all which the plan gives this rank."""
        told = told_by(plan, ToldSave, planner, str(self._target))
        ranks = told.meeting.ranks(self._rank, self._timeout, Ranks.failure)
        with failing_together(ranks):
            writer = self._filled(told, plan, planner, ranks)
        self._used = ranks
        return writer

    def commit(self, writer: Writer) -> None:
        """Write this rank's pack, and make the step exist together with the others."""
        assert self._used is not None  # noqa: S101 — those that `prepared` met
        with failing_together(self._used):
            writer.commit()
        self._used.end()
        self._last = (self._written, writer.plan) if writer.plan else None

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002
        self.prune()

    def prune(self) -> None:
        """Delete what is not to be kept beside the step that was committed."""
        keep_last, keep_every = self._keep
        if keep_last is None and keep_every is None:
            return
        try:
            run = Run(self._target.store())
            run.prune(keep_last=keep_last, keep_every=keep_every, up_to=self._target.step)
        except CkptkitError as error:
            # The next save tries again: no training ends because of this.
            what = "step %d was saved, but older ones could not be deleted: %s"
            log.error(what, self._target.step, in_one_line(error))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, str | os.PathLike)

    def __getstate__(self) -> dict[str, Any]:
        # To the process of an asynchronous save, whose job is another one.
        own = {**self.__dict__, "_used": None, "_told": None, "_last": None}
        return {**own, "_replaceable": dict(REPLACEABLE)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        REPLACEABLE.update(state.pop("_replaceable"))
        self.__dict__.update(state)

    def _filled(self, told: ToldSave, plan: SavePlan, planner: SavePlanner, ranks: Ranks) -> Writer:
        """A writer with what this rank has of each array."""
        state: Any = getattr(planner, "state_dict", None)
        state = state if isinstance(state, Mapping) else {}
        items: dict[str, list[WriteItem]] = {}
        for item in plan.items:
            items.setdefault(item.index.fqn, []).append(item)

        # Agree on the strategy: that of the DTensors, where all ranks read the same off them. And
        # on the values: DCP takes those of any rank, but one needs all to say what optimizers have.
        keys = {fqn for fqn, (item, *_) in items.items() if item.type == WriteItemType.BYTE_IO}
        keys |= {fqn for fqn, value in state.items() if not isinstance(value, torch.Tensor)}
        spread = _spread(told, items, state, self._rank)
        digest = hashlib.sha256(repr(sorted(keys)).encode()).digest()

        # Of each of the two, whether all ranks say one thing.
        is_spread, all_have = ranks.agree(
            ["" if spread is None else str(spread[0]), digest],
            lambda heard: [len(set(said)) == 1 for said in zip(*heard, strict=True)],
        )
        if not is_spread:
            spread = None
        of_first = keys if all_have else set(ranks.share(lambda: sorted(keys)))
        keys = keys if self._rank == 0 else {key for key in items if key in keys} - of_first

        writer = Writer(
            self._target.store(),
            step=told.step,
            strategy=told.strategy if spread is None else spread[0],
            rank=self._rank,
            barrier=ranks,
            overwrite=self._overwrite,
            chunk_bytes=self._chunk_bytes,
            threads=self._threads,
        )
        kinds: dict[Any, HeldKind] = {}  # layers are alike
        written: list[Any] = []
        rows = {} if spread is None else spread[1]
        for fqn, array in told.arrays.items():
            mine = items.get(fqn, [])
            if spread is not None and not mine and fqn not in state:
                continue  # how it is spread only others know
            held = [(box, item) for item in mine if not (box := _box(item)).is_empty]
            boxes = tuple(box for box, _ in held)
            key = id(array.kind), boxes, rows.get(fqn), array.first_rank
            if key not in kinds:
                kinds[key] = _kind(array, boxes, rows.get(fqn), writer.strategy)
            data = _data(planner, array, held, kinds[key].part) if held else None
            writer.add_alike(array.name, kinds[key], data, array.of)
            written.append((array.name, boxes, array.first_rank))

        paths = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
        values: dict[str, tuple[Path, Any]] = {}
        for fqn in sorted(keys):
            value = state[fqn] if fqn in state else _value(planner, items[fqn][0])
            values[fqn] = paths.get(fqn, (fqn,)), as_leaf(fqn, value)
        if self._rank == 0:
            for name, value in objects_of(told.names, values, str(self._target)).items():
                writer.add_object(name, value)
        elif values:
            kept = {fqn: [list(path), value] for fqn, (path, value) in values.items()}
            writer.add_object(f"{OBJECT}/rank-{self._rank:05d}", {"values": kept})
        # As the last time where each rank writes the same boxes again, which planners may share out
        # in another way.
        if self._last is not None and self._last[0] == written:
            writer.like = self._last[1]
        self._written = written
        return writer


def _told(
    plans: Sequence[SavePlan],
    step: int,
    where: str,
    chunk_bytes: int,
    spread_over: Callable[..., tuple[Strategy, list[ForeignArray]]],
) -> ToldSave:
    """What the ranks have to know, out of what all of them write."""
    tensors: dict[str, tuple[tuple[int, ...], DType, list[Extent], int]] = {}
    paths: dict[str, Path] = {}
    for rank, plan in enumerate(plans):
        spelled = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
        for item in plan.items:
            fqn = item.index.fqn
            if fqn not in paths:
                paths[fqn] = tuple(spelled.get(fqn, (fqn,)))
            if item.tensor_data is None:
                continue
            if (known := tensors.get(fqn)) is None:
                data = item.tensor_data
                with located(fqn):
                    dtype = DType.of(data.properties.dtype)
                known = tensors[fqn] = tuple(data.size), dtype, [], rank
            if not (box := _box(item)).is_empty:
                known[2].append(Extent(box, str(rank), 0))
    found = {
        fqn: StateTensor(shape, dtype, tuple(extents))
        for fqn, (shape, dtype, extents, _) in tensors.items()
    }
    arrays, names = name_tensors(found, paths, where)
    spread, placed = spread_over(list(arrays.values()), plans)

    # The dims that layouts of a known model cut; the others stay whole in a chunk.
    presets = fitting_presets(inner_name(a.name, a.role) for a in placed if a.role == "param")
    cuts = HandCuts.of(presets[0] if len(presets) == 1 else None)

    @cache
    def sliced(name: str, of: str | None, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        dims = cuts.sliced(name, shape, of=of)
        return None if dims is None else tuple(n for n in range(len(shape)) if n in {0, *dims})

    kinds: dict[Any, ArrayKind] = {}
    told: dict[str, ToldArray] = {}
    for fqn, array in zip(arrays, placed, strict=True):
        shape, dtype, extents, first_rank = tensors[fqn]
        boxes = [extent.box for extent in extents]
        is_large = may_cut(array.dtype.itemsize * int(np.prod(shape)), chunk_bytes)
        of = array.of and of_first_layer(array.of)
        dims = sliced(of_first_layer(array.name), of, shape) if is_large else None
        key = shape, dtype.name, tuple(boxes), array.role, dims, array.placements
        if key not in kinds:
            edges = _edges(shape, boxes)
            grid = choose_grid(shape, dtype.itemsize, edges, chunk_bytes, dims)
            kinds[key] = ArrayKind(shape, dtype, grid, array.role, array.placements)
        told[fqn] = ToldArray(array.name, kinds[key], array.of, first_rank)
    return ToldSave(Meeting.of(len(plans)), step, spread, told, names)


def _edges(shape: tuple[int, ...], boxes: Sequence[Box]) -> tuple[tuple[int, ...], ...]:
    """Per dim where inside of it a box begins or ends."""
    ends: list[set[int]] = [set() for _ in shape]
    for box in boxes:
        for dim, bounds in enumerate(zip(box.offset, box.stop, strict=True)):
            ends[dim].update(bounds)
    return tuple(
        tuple(sorted(found - {0, length})) for found, length in zip(ends, shape, strict=True)
    )


def _spread(
    told: ToldSave, items: Mapping[str, Any], state: Mapping[str, Any], rank: int
) -> tuple[Strategy, dict[str, tuple[Placement, ...]]] | None:
    """The strategy of the DTensors of this rank, and how its axes cut each; None where they do not
    say it, or not for all ranks of the save.
    """
    world = current_world()
    if (world.rank, world.size) != (rank, told.meeting.size) or not items.keys() <= state.keys():
        return None
    tensors = {
        fqn: tensor
        for fqn, tensor in state.items()
        if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is not None
    }
    rows: dict[str, tuple[Placement, ...]] = {}
    try:
        lines = dtensor_lines(list(tensors.values()), fully_sharded=True)
        topology = Topology.of(world.rank, world.size, lines)
        axes = topology.strategy.mesh.axes
        for fqn, tensor in tensors.items():
            cuts = topology.of_dtensor(fqn, tensor).placements
            rows[fqn] = tuple(cuts.get(axis.name, Replicate()) for axis in axes)
    except (LayoutError, StrategyError):
        return None
    if not tensors:
        return None
    whole = (Replicate(),) * len(axes)
    return topology.strategy, {fqn: rows.get(fqn, whole) for fqn in state}


def _kind(
    array: ToldArray,
    boxes: tuple[Box, ...],
    row: tuple[Placement, ...] | None,
    strategy: Strategy,
) -> HeldKind:
    """What a rank writes of an array: these boxes, as they lie in one tensor around them."""
    kind = array.kind if row is None else replace(array.kind, placements=row)
    if not boxes:
        part = Part((0, *kind.shape[1:]) if kind.shape else (), (), ())
        return HeldKind(kind, Assigned(strategy, part, array.first_rank), part)
    begin = tuple(map(min, zip(*(box.offset for box in boxes), strict=True)))
    stop = tuple(map(max, zip(*(box.stop for box in boxes), strict=True)))
    places = tuple(
        Box(tuple(a - b for a, b in zip(box.offset, begin, strict=True)), box.shape)
        for box in boxes
    )
    part = Part(tuple(b - a for a, b in zip(begin, stop, strict=True)), boxes, places)
    return HeldKind(kind, Assigned(strategy, part, array.first_rank), part)


def _data(
    planner: SavePlanner, array: ToldArray, held: Sequence[tuple[Box, WriteItem]], part: Part
) -> npt.NDArray[Any]:
    """The elements of the boxes of a rank."""
    found: list[npt.NDArray[Any]] = []
    for box, item in held:
        tensor = planner.resolve_data(item)
        fqn = item.index.fqn
        if not isinstance(tensor, torch.Tensor):
            raise UsageError("the planner gives no tensor for this", where=fqn, value=type(tensor))
        tensor = local_of(tensor)
        tensor = tensor if tensor.is_cpu else tensor.cpu()
        if tuple(tensor.shape) != box.shape or dtype_of(fqn, tensor) != array.kind.dtype:
            raise LayoutError(
                f"the planner gives {tensor.dtype} of {tuple(tensor.shape)}, "
                f"its plan says {array.kind.dtype} of {box.shape}",
                where=fqn,
            )
        found.append(as_bits(fqn, tensor))
    if len(found) == 1:
        return found[0]
    whole = np.zeros(part.shape, array.kind.dtype.bits)
    for place, each in zip(part.places, found, strict=True):
        whole[place.within(Box.whole(part.shape))] = each
    return whole


def _value(planner: SavePlanner, item: WriteItem) -> Any:
    """A value that is no tensor, of a planner that does not show its state."""
    found: Any = planner.resolve_data(item)
    try:
        found.seek(0)
        return torch.load(found, weights_only=True)
    except Exception as error:
        raise UnsupportedTypeError(
            "a value that torch reads only by running code", where=item.index.fqn
        ) from error


def _box(item: WriteItem) -> Box:
    assert item.tensor_data is not None  # noqa: S101 — asked of tensors only
    chunk = item.tensor_data.chunk
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))
