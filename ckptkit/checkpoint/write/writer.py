"""The writer: one for each rank of a save; what all of them wrote becomes a step at once or not
at all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from operator import call, index
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from ckptkit.checkpoint.places import Place, StepFolder, new_save_id, step_name, store_at
from ckptkit.checkpoint.ranks import Ranks, failing_together, ranks_for
from ckptkit.checkpoint.workers import DEFAULT_THREADS, Progress, share_out, uncollected
from ckptkit.checkpoint.write.commit import commit, discard, gather, refuse_committed, tell_commit
from ckptkit.checkpoint.write.pack import Holding, Pack, pack_of, plan_of
from ckptkit.checkpoint.write.plan import PackPlan
from ckptkit.errors import (
    FormatError,
    GivenUpError,
    InvalidNameError,
    LayoutError,
    StepExistsError,
    UnsupportedTypeError,
    UsageError,
)
from ckptkit.format.array_table import ArrayTables
from ckptkit.format.arrays import (
    MAX_DIMS,
    ROLES,
    TOO_LARGE,
    Alias,
    ArrayInfo,
    ArrayKind,
    is_addressable,
)
from ckptkit.format.encoding import dumps, unpack
from ckptkit.format.manifest import SaveInfo, pack_name
from ckptkit.format.names import ancestors, checked_path
from ckptkit.format.objects import (
    ObjectInfo,
    PerRank,
    Replicated,
    Split,
    Sum,
    check_total,
    is_number,
)
from ckptkit.model import (
    Assigned,
    DType,
    Layout,
    Part,
    Placement,
    Replicate,
    Strategy,
    layout_of,
    parse_placement,
)
from ckptkit.model.document import located
from ckptkit.plan.chunks import DEFAULT_CHUNK_BYTES, choose_grid
from ckptkit.storage import BufferPool, Options, default_pool
from ckptkit.version import __version__


class HeldKind(NamedTuple):
    """What a rank holds of each of the arrays that are alike."""

    array: ArrayKind
    layout: Layout | Assigned
    part: Part


class Writer:
    """Writes what one rank holds of a step; used as a context manager, it commits at the end.

    Every rank makes one with the same location, step and strategy, adds its part of each array
    it holds, and leaves the block. Nothing is visible before all ranks are done; if any of them
    fails before that, all of them raise and the step does not exist.
    """

    def __init__(  # noqa: PLR0913 — one keyword for each decision, all with defaults
        self,
        location: Place,
        *,
        step: int,
        strategy: str | Strategy = "single",
        rank: int = 0,
        barrier: Ranks | None = None,
        details: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        threads: int = DEFAULT_THREADS,
        progress: Progress | None = None,
        storage_options: Options | None = None,
    ) -> None:
        self.strategy = Strategy.of(strategy)
        self.step = step
        self.rank = int(index(rank))
        self._ranks = ranks_for(self.strategy, self.rank, barrier)
        # The others meet here, and hear of what only this rank is refused.
        with failing_together(self._ranks):
            self._details = unpack(dumps(dict(details or {}), "details"), "details")
            self._folder = StepFolder(store_at(location, storage_options), step_name(step))
        self._overwrite, self._progress = overwrite, progress
        self._chunk_bytes, self._threads = chunk_bytes, threads
        self._arrays: dict[str, Holding] = {}
        # Layers are alike: what one has found out holds for all.
        self._kinds: dict[Hashable, HeldKind] = {}
        self._aliases: dict[str, Alias] = {}
        self._objects: dict[str, ObjectInfo] = {}
        self._groups: set[str] = set()
        self._pack: Pack | None = None
        self._tables = ArrayTables()
        self.plan: PackPlan | None = None
        """How the pack is laid out, once it is."""
        self.like: PackPlan | None = None
        """The plan of a committed pack of the same job: it is used again where it holds."""
        self._again: Sequence[npt.NDArray[Any] | None] | None = None
        self._done = False

    def __repr__(self) -> str:
        run = str(self._folder.store.location)
        return f"Writer({run!r}, step {self.step}, rank {self.rank})"

    def add(
        self,
        name: str,
        data: object = None,
        *,
        shape: Sequence[int] | None = None,
        dtype: object = None,
        placements: Mapping[str, Placement | str] | None = None,
        role: str = "other",
        of: str | None = None,
        sliced: Sequence[int] | None = None,
    ) -> None:
        """Add this rank's part of an array.

        `name` is a path such as `model/layers.0.weight` (`ckptkit.format.names.join` makes one
        of any names). `data` is anything with the buffer protocol, in the shape of the part, and
        must not change before the commit; a rank that holds nothing passes None, with shape and
        dtype. `shape` is the global shape; without it the array is the same on all ranks.
        `placements` says for each axis how it cuts the array; axes not named replicate it.
        `sliced` are the dims that other layouts may cut: the others stay whole in a chunk, which is
        read faster. Without it all may be.
        """
        self._check_new(name)
        if dtype is None and (dtype := getattr(data, "dtype", None)) is None:
            raise UsageError("the dtype cannot be seen", where=name, hint="pass dtype=…")
        try:
            known = DType.of(dtype)
        except UnsupportedTypeError as error:
            error.where = name
            raise
        if shape is None and (data is None or not hasattr(data, "shape")):
            raise UsageError("the shape cannot be seen", where=name, hint="pass shape=…")
        sizes = data.shape if shape is None else shape  # type: ignore[attr-defined]
        whole = tuple(int(index(size)) for size in sizes)
        later = None if sliced is None else tuple(sliced)
        key = whole, known.name, tuple((placements or {}).items()), role, later
        if key not in self._kinds:
            axes, given = [axis.name for axis in self.strategy.mesh.axes], placements or {}
            if unknown := sorted(given.keys() - set(axes)):
                what = f"{self.strategy} has the axes {', '.join(axes) or 'none'}"
                raise LayoutError(what, where=name, value=unknown[0])
            cuts = (given.get(axis, Replicate()) for axis in axes)
            row = tuple(parse_placement(cut) if isinstance(cut, str) else cut for cut in cuts)
            self._kinds[key] = self.kind(name, whole, known, row, role, later)
        self._hold(name, self._kinds[key], data, of)

    def kind(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: DType,
        placements: tuple[Placement, ...],
        role: str,
        sliced: tuple[int, ...] | None,
    ) -> HeldKind:
        """What this rank holds of arrays as `name` is, to add many of them by `add_alike`."""
        if role not in ROLES:
            raise UsageError(f"a role is one of {', '.join(ROLES)}", where=name, value=role)
        if len(shape) > MAX_DIMS:
            raise LayoutError(f"more than {MAX_DIMS} dims", where=name, value=len(shape))
        if not is_addressable(shape, dtype):
            raise LayoutError(TOO_LARGE, where=name, value=shape)
        for dim in sliced or ():
            if type(dim) is not int or not 0 <= dim < len(shape):
                what = f"sliced= are dims of an array that has {len(shape)}"
                raise LayoutError(what, where=name, value=dim)
        with located(name):
            layout = layout_of(shape, self.strategy, placements)
            chunk_bytes = self._chunk_bytes
            grid = choose_grid(shape, dtype.itemsize, layout.edges, chunk_bytes, sliced)
        kind = ArrayKind(shape, dtype, grid, role, placements)
        return HeldKind(kind, layout, layout.part(self.rank))

    def add_alike(self, name: str, kind: HeldKind, data: object, of: str | None = None) -> None:
        """Add this rank's part of an array of a kind, as `add` does."""
        self._check_new(name)
        self._hold(name, kind, data, of)

    def _hold(self, name: str, kind: HeldKind, data: object, of: str | None) -> None:
        array, layout, part = kind
        local = None if data is None else _raw_elements(name, data, part.shape, array.dtype)
        if local is None and not part.is_empty:
            raise UsageError("this rank holds a part, but no data was passed", where=name)
        if of is not None and of not in self._arrays:
            checked_path(of, where=name)
        self._arrays[name] = Holding(ArrayInfo(name, array, of), layout, part, local)
        self._note_groups(name)

    def add_alias(self, name: str, alias_of: str) -> None:
        """Add a second name for an array: tied weights are stored once."""
        self._check_new(name)
        self._aliases[name] = Alias(name, checked_path(alias_of))
        self._note_groups(name)

    def add_again(self, data: Sequence[npt.NDArray[Any] | None]) -> None:
        """Add all arrays and aliases that `like` is the plan of, whose parts now have these raw
        elements: in the order in which they were added, None for parts that are empty. Who calls
        this answers for it that nothing else has changed.
        """
        self._check_adding()
        plan = self.like
        if plan is None or self._arrays or self._aliases or self._again is not None:
            raise UsageError("what was added before cannot be added again")
        if plan.made_for[:2] != (self.rank, self.strategy):
            raise UsageError(
                "the plan is that of another rank or strategy", value=plan.made_for[:2]
            )
        for (info, _), part, held in zip(plan.arrays, plan.parts, data, strict=True):
            fits = part.is_empty if held is None else held.shape == part.shape
            if not fits or (held is not None and held.dtype != info.dtype.bits):
                raise LayoutError(
                    f"the part of this rank was {part.shape} of {info.dtype.name}",
                    where=info.name,
                    value=None if held is None else (held.shape, str(held.dtype)),
                )
        self._again = data

    def add_object(self, name: str, value: object) -> None:
        """Add a value that is no tensor: plain or Replicated(value) (the same on all ranks),
        PerRank(value), Sum(number) or Split(items).
        """
        self._check_adding()
        if not name or name in self._objects or name.encode(errors="replace").decode() != name:
            raise InvalidNameError("an object needs a name of its own", value=name)
        semantics = {PerRank: "per_rank", Sum: "sum", Split: "split"}.get(type(value), "replicated")
        inner = value.value if isinstance(value, (PerRank, Sum, Split, Replicated)) else value
        # In a manifest the values of all ranks are a list, one level deeper. Decoded again it is
        # a copy, which later changes of the caller's value do not reach.
        (copy,) = unpack(dumps([inner], name), name)
        if semantics == "sum" and not is_number(copy):
            raise UnsupportedTypeError(
                "only numbers can be summed over ranks",
                where=name,
                value=copy,
                hint="use PerRank or Replicated",
            )
        self._objects[name] = ObjectInfo(name, semantics, copy)

    def stage(self, pool: BufferPool | None = None, *, threads: int | None = None) -> None:
        """Copy all that was added into memory of the writer's own, or of a pool's; from then on the
        buffers may change, and nothing more can be added.
        """
        self._check_adding()
        self._pack = self._laid_out()
        try:
            self._pack.stage(pool or default_pool(), threads or self._threads)
        except BaseException as error:
            # Memory that is half filled would be written, with checksums of what is in it.
            self.abort(error)
            raise
        # The copy is what counts now: the caller may free what it is of.
        self._arrays.clear()
        self._again = None

    def commit(self) -> None:
        """Write this rank's pack, wait for the others, and make the step exist.

        Only rank 0 commits. Until all packs are complete every failure is a failure of all; once
        the manifest is there the step exists, and no rank says otherwise, whatever happens to the
        others.
        """
        self._check_open()
        self._done = True
        folder, ranks = self._folder, self._ranks
        store = folder.store

        def begun() -> tuple[str, float, bytes]:
            if not self._overwrite:
                refuse_committed(folder)
            return new_save_id(), time.time(), pack.plan.table.digest

        try:
            # Lay out: where each byte of this rank's pack will be.
            pack = self._pack or self._laid_out()

            # Agree on the save id and the time, both rank 0's. Where the arrays are the same as
            # rank 0's the record need not list them again.
            save_id, seconds, digest = ranks.share(begun)
            refers = ranks.rank > 0 and digest == pack.plan.table.digest
            save = SaveInfo(
                save_id=save_id,
                step=self.step,
                time=seconds,
                writer=f"ckptkit {__version__}",
                world_size=self.strategy.world_size,
                strategy=self.strategy,
                details=self._details,
            )

            # Write, by a few threads: the pack is complete and durable then, or nothing is left.
            # One of rank 0's finds out meanwhile what it commits by: at the end all would wait.
            segments = pack.segments_of(store.abilities.part_size)
            pack.begin(folder, save, segments, refers=refers, progress=self._progress)
            work = [partial(pack.write_segment, number) for number in range(len(segments))]
            if ranks.rank == 0 and not self._overwrite:
                work.insert(0, partial(store.learn, folder.name))
            try:
                share_out(work, call, self._threads)
            except BaseException:
                pack.abort()
                raise
            pack.release()

            # Meet: from here on all packs are complete, and rank 0 knows how long each is.
            try:
                sizes = ranks.collect(pack.size)
            except BaseException as error:
                # Where it is certain that rank 0 will never commit, this rank's pack goes. Others
                # may still be writing theirs, and remove them when they come here. After a time-out
                # on another rank nothing is certain: then it stays, for `prune`.
                if ranks.rank == 0 or isinstance(error, GivenUpError):
                    discard(folder, save_id, pack_name(ranks.rank))
                raise

            # Commit: from here on rank 0 alone decides.
            ranks.settle()
            if ranks.rank == 0:
                self._gather_and_commit(save_id, sizes)
            tell_commit(ranks, folder, save_id)
        except BaseException as error:
            self._give_up(error)
            raise

    def abort(self, problem: BaseException | str = "the save was given up") -> None:
        """Tell the other ranks that there will be no step; leaving the block by an exception
        does this.
        """
        if not self._done:
            self._done = True
            self._give_up(problem)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if error is not None:
            self.abort(error)
        elif not self._done:
            self.commit()

    @uncollected()
    def _laid_out(self) -> Pack:
        data = self._again
        plan = self.like
        if data is None or plan is None:
            held, aliases = self._arrays, self._aliases.values()
            plan = plan_of(self.rank, self.strategy, held, aliases, self.like)
            data = [holding.data for holding in self._arrays.values()]
        if plan is self.like:
            self._tables.add(plan.table, len(self.strategy.mesh.axes))
            documents = plan.entries(0, len(plan.documents), plan.crcs)
            self._tables.documents[plan.packed_documents] = documents
            plan.keep_headers()
        self.plan = plan
        return pack_of(self.rank, plan, data, self._objects.values())

    @uncollected()
    def _gather_and_commit(self, save_id: str, sizes: list[int]) -> None:
        """Compare what all ranks wrote, and commit it."""
        try:
            manifest = gather(self._folder, save_id, self._tables, sizes)
            for item in manifest.objects:
                check_total(item)
        except BaseException:
            # Only rank 0 ever commits, and now it will not; all others have finished writing.
            discard(self._folder, save_id)
            raise
        try:
            commit(self._folder, manifest, overwrite=self._overwrite)
        except (StepExistsError, FormatError):
            # Another save has won the step for good, or the manifest was refused before anything
            # was put: nothing will ever name this data.
            discard(self._folder, save_id)
            raise
        if self.plan and self._tables.first:
            # The same table, read already, which the next save need not do again.
            self.plan.table = self._tables.first

    def _give_up(self, problem: BaseException | str) -> None:
        if self._pack is not None:
            self._pack.release()
        self._ranks.leave(problem)

    def _check_open(self) -> None:
        if self._done:
            raise UsageError("this writer is done", hint="a writer writes one step; make another")

    def _check_adding(self) -> None:
        self._check_open()
        if self._pack is not None:
            raise UsageError(
                "the writer has staged what it writes", hint="add everything, then stage once"
            )

    def _note_groups(self, name: str) -> None:
        # With a group come those above it.
        if name.rpartition("/")[0] not in self._groups:
            self._groups.update(ancestors(name))

    def _check_new(self, name: str) -> None:
        self._check_adding()
        if self._again is not None:
            raise UsageError("all arrays were added again", value=name)
        checked_path(name)
        if name in self._arrays or name in self._aliases:
            raise InvalidNameError("the name was added before", value=name)
        clash: list[str] = []
        # The groups of what was added before are none of it.
        if name.rpartition("/")[0] not in self._groups:
            clash = [n for n in ancestors(name) if n in self._arrays or n in self._aliases]
        if name in self._groups:
            added = (*self._arrays, *self._aliases)
            clash = [other for other in added if other.startswith(f"{name}/")]
        if clash:
            what = "an array cannot have arrays below it"
            raise InvalidNameError(what, where=clash[0], value=name)


def _raw_elements(
    name: str, data: object, shape: tuple[int, ...], dtype: DType
) -> npt.NDArray[Any]:
    """Any buffer as an array of raw elements in the shape of the part, without a copy."""
    if type(data) is np.ndarray and data.dtype is dtype.bits and data.shape == shape:
        return data
    if hasattr(data, "filled"):  # by its class numpy would import all of `numpy.ma`
        raise UsageError("a masked array would lose its mask", where=name, hint="pass x.filled()")
    try:
        array = data if isinstance(data, np.ndarray) else np.asarray(memoryview(data))  # type: ignore[arg-type]  # what is no buffer raises
    except (TypeError, ValueError) as error:
        what, hint = "neither an array nor a buffer", "pass an array, or a buffer and dtype=…"
        raise UsageError(what, where=name, value=type(data).__name__, hint=hint) from error
    # Elements may come as raw bits, and what numpy lacks as the signed integers of torch's `view`.
    spellings = [dtype.numpy, dtype.bits]
    if dtype.numpy.type.__module__ != "numpy":
        spellings.append(np.dtype(f"<i{dtype.itemsize}"))
    if array.dtype not in spellings:
        # Bytes are taken for elements; elements of another type never for the bytes of this one.
        if array.dtype not in (np.uint8, np.int8, np.dtype("S1")) or not array.flags.c_contiguous:
            what = f"the buffer is not of {dtype.name}"
            hint = "pass little-endian elements of that dtype, or their contiguous bytes"
            raise LayoutError(what, where=name, value=array.dtype, hint=hint)
        if array.nbytes % dtype.itemsize:
            raise LayoutError(
                f"{array.nbytes} bytes are not a whole number of {dtype.name} elements", where=name
            )
        array = array.reshape(-1)
    array = array.view(dtype.bits)
    if array.ndim == 1 and array.flags.c_contiguous and array.size == math.prod(shape):
        array = array.reshape(shape)
    if array.shape != shape:
        raise LayoutError(
            f"the buffer does not fit: this rank holds {shape} of {dtype.name}",
            where=name,
            value=array.shape,
            hint="pass the local part, in its own shape, or as flat bytes",
        )
    return array
