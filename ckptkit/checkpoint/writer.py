"""The writer: one for each rank of a save; what all of them wrote becomes a step at once or not
at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from ckptkit.checkpoint.attempt import Attempt
from ckptkit.checkpoint.content import as_local
from ckptkit.checkpoint.locate import refuse_begun
from ckptkit.checkpoint.pack_writer import Holding, Holdings, Pack
from ckptkit.checkpoint.places import Place, step_name, store_at
from ckptkit.checkpoint.ranks import OneRank, Ranks, in_one_line
from ckptkit.checkpoint.threads import DEFAULT_THREADS, Progress
from ckptkit.errors import (
    InvalidNameError,
    LayoutError,
    StepExistsError,
    UnsupportedTypeError,
    UsageError,
)
from ckptkit.format.arrays import ROLES, TOO_LARGE, Alias, ArrayInfo, is_addressable
from ckptkit.format.leaves import dumps, unpack
from ckptkit.format.names import ancestors, checked_path
from ckptkit.format.objects import ObjectInfo, is_number
from ckptkit.format.record import SaveInfo
from ckptkit.model import (
    DType,
    Grid,
    Layout,
    PerRank,
    Placement,
    Replicate,
    Replicated,
    Split,
    Strategy,
    Sum,
    layout_of,
    parse_placement,
)
from ckptkit.plan.chunks import DEFAULT_CHUNK_BYTES, choose_grid
from ckptkit.storage import BufferPool, Options, default_pool


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
        self.rank = rank
        self._prefix = step_name(step)
        self._barrier = _checked_barrier(barrier, rank, self.strategy)
        self._details = unpack(dumps(dict(details or {}), "details"), "details")
        self._store = store_at(location, storage_options)
        self._overwrite = overwrite
        self._chunk_bytes = chunk_bytes
        self._threads = threads
        self._progress = progress
        self._arrays: dict[str, Holding] = {}
        self._aliases: dict[str, Alias] = {}
        self._objects: dict[str, ObjectInfo] = {}
        self._groups: set[str] = set()
        self._pack: Pack | None = None
        self._done = False

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
    ) -> None:
        """Add this rank's part of an array.

        `name` is a path such as `model/layers.0.weight` (`ckptkit.format.names.join` makes one
        of any names). `data` is anything with the buffer protocol, in the shape of the part, and
        must not change before the commit; a rank that holds nothing passes None, with shape and
        dtype. `shape` is the global shape; without it the array is the same on all ranks.
        `placements` says for each axis how it cuts the array; axes not named replicate it.
        """
        self._check_open()
        self._check_new(name)
        if role not in ROLES:
            raise UsageError(f"a role is one of {', '.join(ROLES)}", where=name, value=role)
        known = _dtype(name, data, dtype)
        whole = _global_shape(name, data, shape)
        if not is_addressable(whole, known):
            raise LayoutError(TOO_LARGE, where=name, value=whole)
        row = self._placements(name, placements or {})
        layout, grid = self._cut(name, whole, known, row)
        part = layout.part(self.rank)
        local = None if data is None else as_local(name, data, part.shape, known)
        if local is None and not part.is_empty:
            raise UsageError("this rank holds a part, but no data was passed", where=name)
        if of is not None:
            checked_path(of, where=name)
        info = ArrayInfo(name, whole, known, grid, role, row, of)
        self._arrays[name] = Holding(info, layout, part, local)
        self._groups.update(ancestors(name))

    def add_alias(self, name: str, alias_of: str) -> None:
        """Add a second name for an array: tied weights are stored once."""
        self._check_open()
        self._check_new(name)
        self._aliases[name] = Alias(name, checked_path(alias_of))
        self._groups.update(ancestors(name))

    def add_object(self, name: str, value: object) -> None:
        """Add a value that is no tensor: plain or Replicated(value) (the same on all ranks),
        PerRank(value), Sum(number) or Split(items).
        """
        self._check_open()
        self._check_not_staged()
        if not name or name in self._objects or not _is_text(name):
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
        self._check_open()
        self._check_not_staged()
        self._pack = self._laid_out()
        self._pack.stage(threads or self._threads, pool or default_pool())

    def commit(self) -> None:
        """Write this rank's pack, wait for the others, and make the step exist."""
        self._check_open()
        self._done = True
        try:
            attempt = Attempt(self._store, self._prefix, self._barrier, overwrite=self._overwrite)
            pack = self._pack or self._laid_out()
            save, refers = self._begin(attempt, pack.table.digest)
            pack.write(
                self._store,
                self._prefix,
                save,
                refers=refers,
                threads=self._threads,
                progress=self._progress,
            )
            attempt.end(save)
        except BaseException as error:
            self._give_up(in_one_line(error))
            raise

    def abort(self, problem: str = "the save was given up") -> None:
        """Tell the other ranks that there will be no step; leaving the block by an exception
        does this.
        """
        if not self._done:
            self._done = True
            self._give_up(problem)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.abort(in_one_line(error))
        elif not self._done:
            self.commit()

    def _begin(self, attempt: Attempt, digest: bytes) -> tuple[SaveInfo, bool]:
        try:
            return attempt.begin(self.step, self.strategy, self._details, digest)
        except StepExistsError:
            refuse_begun(self._store, self._prefix)
            raise

    def _laid_out(self) -> Pack:
        return Pack.of(Holdings(self._arrays, self._aliases, self._objects), self.rank)

    def _give_up(self, problem: str) -> None:
        if self._pack is not None:
            self._pack.release()
        self._barrier.leave(problem)

    def _check_open(self) -> None:
        if self._done:
            raise UsageError("this writer is done", hint="a writer writes one step; make another")

    def _check_not_staged(self) -> None:
        if self._pack is not None:
            raise UsageError(
                "the writer has staged what it writes", hint="add everything, then stage once"
            )

    def _check_new(self, name: str) -> None:
        self._check_not_staged()
        checked_path(name)
        if name in self._arrays or name in self._aliases:
            raise InvalidNameError("the name was added before", value=name)
        clash = [n for n in ancestors(name) if n in self._arrays or n in self._aliases]
        if name in self._groups:
            added = (*self._arrays, *self._aliases)
            clash = [other for other in added if other.startswith(f"{name}/")]
        if clash:
            raise InvalidNameError(
                "an array cannot have arrays below it", where=clash[0], value=name
            )

    def _cut(
        self, name: str, shape: tuple[int, ...], dtype: DType, row: tuple[Placement, ...]
    ) -> tuple[Layout, Grid]:
        try:
            layout = layout_of(shape, self.strategy, row)
            return layout, choose_grid(shape, dtype.itemsize, layout.edges, self._chunk_bytes)
        except LayoutError as error:
            error.where = f"{name}: {error.where}" if error.where else name
            raise

    def _placements(self, name: str, given: Mapping[str, Placement | str]) -> tuple[Placement, ...]:
        axes = [axis.name for axis in self.strategy.mesh.axes]
        unknown = sorted(set(given) - set(axes))
        if unknown:
            raise LayoutError(
                f"{self.strategy} has the axes {', '.join(axes) or 'none'}",
                where=name,
                value=unknown[0],
            )
        row = (given.get(axis, Replicate()) for axis in axes)
        return tuple(parse_placement(p) if isinstance(p, str) else p for p in row)


def _checked_barrier(barrier: Ranks | None, rank: int, strategy: Strategy) -> Ranks:
    ranks = strategy.world_size
    if not 0 <= rank < ranks:
        raise UsageError(f"{strategy} has the ranks 0 to {ranks - 1}", value=rank)
    if barrier is None:
        if ranks > 1:
            raise UsageError(
                f"{strategy} has {ranks} ranks, which need a barrier to meet at",
                hint="pass barrier=FileBarrier(folder, rank, world_size)",
            )
        return OneRank()
    if (barrier.rank, barrier.world_size) != (rank, ranks):
        raise UsageError(
            f"the barrier does not fit rank {rank} of {ranks}",
            value=(barrier.rank, barrier.world_size),
        )
    return barrier


def _dtype(name: str, data: object, dtype: object) -> DType:
    if dtype is None:
        dtype = getattr(data, "dtype", None)
    if dtype is None:
        raise UsageError("the dtype cannot be seen", where=name, hint="pass dtype=…")
    try:
        return DType.of(dtype)
    except UnsupportedTypeError as error:
        error.where = name
        raise


def _global_shape(name: str, data: object, shape: Sequence[int] | None) -> tuple[int, ...]:
    if shape is not None:
        return tuple(shape)
    if data is None or not hasattr(data, "shape"):
        raise UsageError("the shape cannot be seen", where=name, hint="pass shape=…")
    return tuple(data.shape)


def _is_text(name: str) -> bool:
    try:
        return bool(name.encode("utf-8"))
    except UnicodeEncodeError:
        return False
