"""Copying a committed step into another store as it is: its packs, and then its manifest.

The rules are those of a commit (`checkpoint.commit`). What is copied keeps its save id, so a copy
that was cut off goes on where it ended: packs that have arrived are not sent again. Every byte is
accounted for on the way, as `verify` does: damage is not passed on.

Two processes may copy one step at once, as when one is slow to die: each pack gets its name when it
is complete, and replaces one that has the same bytes. So nothing that is committed ever breaks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np
import numpy.typing as npt

from ckptkit.checkpoint.accounting import PackBytes, StepBytes
from ckptkit.checkpoint.commit import commit, committed_save_id, discard
from ckptkit.checkpoint.locate import read_manifest
from ckptkit.checkpoint.places import data_prefix, described, step_name
from ckptkit.checkpoint.ranks import Ranks, in_one_line
from ckptkit.checkpoint.scan import Expected
from ckptkit.checkpoint.sources import Sources
from ckptkit.checkpoint.threads import Progress, share_out
from ckptkit.errors import (
    CorruptionError,
    FormatError,
    NotFoundError,
    PeerError,
    StepExistsError,
    StorageError,
)
from ckptkit.storage import Sink, Store

_SEGMENT = 8 << 20
_THREADS = 4


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """How to copy a step."""

    overwrite: bool = False
    memory: int = 128 << 20
    """About how many bytes of a rank may be on their way at a time."""
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class Copied:
    """What is in the target now."""

    save_id: str
    nbytes: int
    """How many bytes this rank sent."""


class UnsoundStepError(CorruptionError):
    """What was to be copied is not as it was written, or no longer there: all ranks raise this in
    the same place, and their barrier goes on to serve.
    """

    def __init__(self, what: str, *, where: str, save_id: str) -> None:
        hint = "`ckpt verify` lists all damage of a step; delete what cannot be mended"
        super().__init__(what, where=where, hint=hint)
        self.save_id = save_id


def copy_step(
    source: Store, target: Store, step: int, barrier: Ranks, options: CopyOptions | None = None
) -> Copied:
    """Copy a committed step, each rank some of its packs.

    All ranks see both stores. On return the step exists in the target too; where one rank fails,
    all raise, and what has arrived stays for the next attempt.
    """
    try:
        copying = _Copying(source, target, step, options or CopyOptions())
        return Copied(copying.save_id, copying.run(barrier))
    except UnsoundStepError:
        raise
    except BaseException as error:
        barrier.leave(in_one_line(error))
        raise


class _Copying:
    """One step on its way."""

    def __init__(self, source: Store, target: Store, step: int, options: CopyOptions) -> None:
        self._target = target
        self._prefix = step_name(step)
        self._manifest = read_manifest(source, self._prefix)
        self.save_id = self._manifest.save.save_id
        self._folder = data_prefix(self._prefix, self.save_id)
        self._sources = Sources(source, self._prefix, self._manifest)
        self._bytes = StepBytes(source, self._folder, self._manifest)
        self._where = described(source, self._prefix)
        self._options = options

    def run(self, barrier: Ranks) -> int:
        save_id, is_there = barrier.share(lambda: (self.save_id, self._is_there()))
        if save_id != self.save_id:
            raise PeerError(
                "rank 0 copies another save of this step", where=self._where, hint="try again"
            )
        if is_there:
            return 0
        sent, problem = self._send(barrier)
        self._agree(barrier, problem)
        if barrier.rank == 0:
            self._commit()
            barrier.share(lambda: "committed")
            return sent
        try:
            barrier.share(lambda: "")
        except PeerError:
            # Rank 0 may have committed before it was lost, as in `Attempt.end`.
            if committed_save_id(self._target, self._prefix) != self.save_id:
                raise
        return sent

    def _is_there(self) -> bool:
        there = committed_save_id(self._target, self._prefix)
        if there in (None, self.save_id) or self._options.overwrite:
            return there == self.save_id
        raise StepExistsError(
            "another save of this step is there already",
            where=described(self._target, self._prefix),
            hint="delete one of the two steps, or pass overwrite=True",
        )

    def _send(self, barrier: Ranks) -> tuple[int, UnsoundStepError | None]:
        """Send this rank's packs; how many bytes that were, and what ended it early."""
        sent = 0
        try:
            if barrier.rank == 0:
                with self._reading(self._where):
                    self._bytes.check_manifest()
            for pack, info in enumerate(self._manifest.packs):
                # What the one without a record holds follows from all others: rank 0 has them.
                owner = 0 if info.record is None else pack % barrier.world_size
                if owner == barrier.rank:
                    sent += self._copy(pack)
        except UnsoundStepError as problem:
            return sent, problem
        finally:
            self._sources.close()
        return sent, None

    def _agree(self, barrier: Ranks, problem: UnsoundStepError | None) -> None:
        """When all packs are complete, go on; where one is damaged, raise on all ranks."""
        mine = None if problem is None else (problem.what, problem.where)
        told = barrier.agree(mine, lambda heard: next(filter(None, heard), None))
        if told is not None:
            what, where = told
            raise problem or UnsoundStepError(what, where=where, save_id=self.save_id)

    @contextmanager
    def _reading(self, where: str) -> Iterator[None]:
        """Where what goes wrong is the source's fault."""
        try:
            yield
        except (FormatError, NotFoundError) as error:
            raise UnsoundStepError(
                f"{error.what}: the step was not copied",
                where=error.where or where,
                save_id=self.save_id,
            ) from error

    def _copy(self, pack: int) -> int:
        info = self._manifest.packs[pack]
        key = f"{self._folder}/{info.name}"
        # In a file system what was cut off can be seen, and have its full size already.
        if not self._target.abilities.is_file_system and _size(self._target, key) == info.size:
            return 0
        memory = self._options.memory
        with self._reading(self._sources.where(pack)):
            reading = _PackReading(self._sources, pack, info.size, self._bytes.of(pack))
        sink = self._target.create(key, reading.extents, memory=memory, again=True)
        self._send_pack(reading, sink)
        return info.size

    def _send_pack(self, reading: _PackReading, sink: Sink) -> None:
        """Write all of a pack; nothing is left behind when that fails."""
        progress = self._options.progress

        def send(segment: _Segment) -> None:
            with sink.filling(segment.number) as memory, self._reading(reading.where):
                reading.read(segment, memory)
            if progress:
                progress(segment.size)

        try:
            share_out(reading.segments(), send, min(_THREADS, len(reading.extents)))
            sink.finish()
        except BaseException:
            sink.abort()
            raise

    def _commit(self) -> None:
        arrived = {entry.key: entry.size for entry in self._target.list(self._folder)}
        for info in self._manifest.packs:
            size = arrived.get(f"{self._folder}/{info.name}")
            if size != info.size:
                raise StorageError(
                    f"{info.size} bytes were sent, {size or 'none'} have arrived",
                    where=described(self._target, f"{self._folder}/{info.name}"),
                )
        overwrite = self._options.overwrite
        try:
            commit(self._target, self._prefix, self._manifest, overwrite=overwrite)
        except StepExistsError:
            discard(self._target, self._prefix, self.save_id)
            raise


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """Some of a pack: whole entries, or what follows them."""

    number: int
    start: int
    size: int
    entries: list[Expected]


class _PackReading:
    """One pack in segments, each with whole entries, which are checked when it is read."""

    def __init__(self, sources: Sources, pack: int, size: int, known: PackBytes) -> None:
        self.where = sources.where(pack)
        self._sources = sources
        self._pack = pack
        self._known = known
        stops = np.array(known.stops, dtype=np.int64)
        starts = np.concatenate([[0], stops[:-1]])[: len(stops)]
        self._edges = segment_edges(starts, stops, size)
        # How many entries end at each edge or before it.
        self._counts = np.searchsorted(stops, self._edges, side="right").tolist()
        self.extents: list[int] = np.diff(self._edges).tolist()

    def segments(self) -> Iterator[_Segment]:
        """All, in the order of the pack."""
        entries = self._known.entries()
        counts = [after - before for before, after in pairwise(self._counts)]
        for number, (start, size) in enumerate(zip(self._edges, self.extents, strict=False)):
            yield _Segment(number, start, size, list(islice(entries, counts[number])))

    def read(self, segment: _Segment, memory: memoryview) -> None:
        """Read a segment; CorruptionError where a byte is not as it was written."""
        with self._sources.use(self._pack) as source:
            source.read_into(segment.start, memory)
        for at, what in self._known.faults(segment.entries, memory, segment.start):
            raise CorruptionError(what, where=f"{self.where} at byte {at}")


def segment_edges(
    starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64], size: int
) -> list[int]:
    """Where to cut a pack of some bytes, so that no chunk is in two segments and segments are not
    much larger than they have to be.
    """
    end = int(stops[-1]) if len(stops) else 0
    borders = np.unique(np.concatenate([starts, np.arange(end, size, _SEGMENT), [size]]))
    edges = [0]
    while edges[-1] < size:
        at = int(np.searchsorted(borders, edges[-1] + _SEGMENT, side="right")) - 1
        if at < 0 or borders[at] <= edges[-1]:
            at += 1  # a chunk larger than a segment
        edges.append(int(borders[at]))
    return edges


def _size(store: Store, key: str) -> int | None:
    try:
        return store.size(key)
    except NotFoundError:
        return None
