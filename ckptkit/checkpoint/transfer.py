"""Copying a committed step into another store as it is: its packs, and then its manifest.

The rules are those of a commit (`checkpoint.commit`). What is copied keeps its save id, so a copy
that was cut off goes on where it ended: packs that have arrived are not sent again. Every chunk is
compared with its checksum on the way: damage is not passed on.

Two processes may copy one step at once, as when one is slow to die: each pack gets its name when it
is complete, and replaces one that has the same bytes. So nothing that is committed ever breaks.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from ckptkit.checkpoint.barrier import Barrier
from ckptkit.checkpoint.commit import commit, committed_save_id, discard
from ckptkit.checkpoint.locate import read_manifest
from ckptkit.checkpoint.places import data_prefix, described, step_name
from ckptkit.checkpoint.sources import Sources
from ckptkit.checkpoint.threads import Progress, run_threads
from ckptkit.errors import CorruptionError, NotFoundError, PeerError, StepExistsError
from ckptkit.format.manifest import Manifest
from ckptkit.storage import Sink, Store, default_pool

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


def copy_step(
    source: Store, target: Store, step: int, barrier: Barrier, options: CopyOptions | None = None
) -> Copied:
    """Copy a committed step, each rank some of its packs.

    All ranks see both stores. On return the step exists in the target too; where one rank fails,
    all raise, and what has arrived stays for the next attempt.
    """
    try:
        copying = _Copying(source, target, step, options or CopyOptions())
        return Copied(copying.save_id, copying.run(barrier))
    except BaseException as error:
        barrier.leave(f"{type(error).__name__}: {error}".replace("\n", "; "))
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
        self._where = described(source, self._prefix)
        self._options = options

    def run(self, barrier: Barrier) -> int:
        told = ""
        if barrier.rank == 0:
            told = f"{self.save_id} {'there' if self._is_there() else ''}"
        save_id, _, there = barrier.share(told).partition(" ")
        if save_id != self.save_id:
            raise PeerError(
                "rank 0 copies another save of this step", where=self._where, hint="try again"
            )
        if there:
            return 0
        packs = range(barrier.rank, len(self._manifest.packs), barrier.world_size)
        try:
            sent = sum(self._copy(pack) for pack in packs)
        finally:
            self._sources.close()
        barrier.wait()
        if barrier.rank == 0:
            self._commit()
            barrier.share("committed")
            return sent
        try:
            barrier.share("")
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

    def _copy(self, pack: int) -> int:
        info = self._manifest.packs[pack]
        key = f"{self._folder}/{info.name}"
        # In a file system what was cut off can be seen, and have its full size already.
        if not self._target.abilities.is_file_system and _size(self._target, key) == info.size:
            return 0
        memory, progress = self._options.memory, self._options.progress
        reading = _PackReading(self._sources, self._manifest, pack)
        sink = self._target.create(key, reading.extents, memory=memory, again=True)
        _send(reading, sink, progress)
        return info.size

    def _commit(self) -> None:
        arrived = {entry.key: entry.size for entry in self._target.list(self._folder)}
        for info in self._manifest.packs:
            size = arrived.get(f"{self._folder}/{info.name}")
            if size != info.size:
                raise CorruptionError(
                    f"{info.size} bytes were sent, {size or 'none'} have arrived",
                    where=described(self._target, f"{self._folder}/{info.name}"),
                )
        overwrite = self._options.overwrite
        try:
            commit(self._target, self._prefix, self._manifest, overwrite=overwrite)
        except StepExistsError:
            discard(self._target, self._prefix, self.save_id)
            raise


class _PackReading:
    """One pack in segments, each with whole chunks, which are checked when it is read."""

    def __init__(self, sources: Sources, manifest: Manifest, pack: int) -> None:
        rows = np.flatnonzero(manifest.pack == pack)
        rows = rows[np.argsort(manifest.offset[rows])]
        self._sources = sources
        self._pack = pack
        self._starts = manifest.offset[rows].astype(np.int64)
        self._stops = self._starts + manifest.length[rows].astype(np.int64)
        self._crcs = manifest.crc32[rows]
        self._edges = segment_edges(self._starts, self._stops, manifest.packs[pack].size)
        self.extents: list[int] = np.diff(self._edges).tolist()

    def read(self, segment: int, memory: memoryview) -> None:
        """Read a segment; CorruptionError where a chunk is not as it was written."""
        start = self._edges[segment]
        with self._sources.use(self._pack) as source:
            source.read_into(start, memory)
        first, last = np.searchsorted(self._starts, [start, start + len(memory)]).tolist()
        for row in range(first, last):
            begin, end = int(self._starts[row]) - start, int(self._stops[row]) - start
            actual = int(isal_zlib.crc32(memory[begin:end]))
            if actual != int(self._crcs[row]):
                raise CorruptionError(
                    f"a chunk has the checksum {actual:08x}, written was "
                    f"{int(self._crcs[row]):08x}: the step was not copied",
                    where=f"{self._sources.where(self._pack)} at byte {start + begin}",
                    hint="`ckpt verify` lists all damage of a step; delete what cannot be mended",
                )


def _send(reading: _PackReading, sink: Sink, progress: Progress | None) -> None:
    """Write all of a pack; nothing is left behind when that fails."""
    pending = iter(enumerate(reading.extents))
    lock = threading.Lock()
    stopped = threading.Event()

    def work() -> None:
        while not stopped.is_set():
            with lock:
                part, size = next(pending, (-1, 0))
            if part < 0:
                return
            with default_pool().take(size) as memory:
                reading.read(part, memory)
                sink.write(part, memory)
            if progress:
                progress(size)

    try:
        run_threads(work, min(_THREADS, len(reading.extents)), stopped)
        sink.finish()
    except BaseException:
        sink.abort()
        raise


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
