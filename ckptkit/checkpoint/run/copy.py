"""Copying a committed step into another store as it is: its packs, and then its manifest.

The rules are those of a commit (`checkpoint.write.commit`). What is copied keeps its save id, so a
copy that was cut off goes on where it ended: packs that have arrived are not sent again. Every byte
is accounted for on the way, as `verify` does: damage is not passed on.

Two processes may copy one step at once, as when one is slow to die: each pack gets its name when it
is complete, and replaces one that has the same bytes. So nothing that is committed ever breaks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ckptkit.checkpoint.check.pack import PackBytes, PackWindow
from ckptkit.checkpoint.places import data_prefix, described, read_manifest, step_name, stored_size
from ckptkit.checkpoint.ranks import Ranks, in_one_line
from ckptkit.checkpoint.read.packs import OpenPacks, PackRecord, read_record
from ckptkit.checkpoint.workers import Progress, ask_all, share_out
from ckptkit.checkpoint.write.assemble import assemble
from ckptkit.checkpoint.write.commit import commit, commit_together, committed_save_id, discard
from ckptkit.errors import (
    CorruptionError,
    FormatError,
    NotFoundError,
    PeerError,
    StepExistsError,
    StorageError,
)
from ckptkit.format.array_table import ArrayTables
from ckptkit.storage import Store

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
    the same place, and they may go on to meet.
    """

    def __init__(self, what: str, *, where: str, save_id: str) -> None:
        hint = "`ckpt verify` lists all damage of a step; delete what cannot be mended"
        super().__init__(what, where=where, hint=hint)
        self.save_id = save_id


def copy_step(
    source: Store, target: Store, step: int, ranks: Ranks, options: CopyOptions | None = None
) -> Copied:
    """Copy a committed step, each rank some of its packs.

    All ranks see both stores. On return the step exists in the target too; where one rank fails,
    all raise, and what has arrived stays for the next attempt.
    """
    try:
        copying = _Copying(source, target, step, options or CopyOptions())
        return Copied(copying.save_id, copying.run(ranks))
    except UnsoundStepError:
        raise
    except BaseException as error:
        ranks.leave(in_one_line(error))
        raise


class _Copying:
    """One step on its way."""

    def __init__(self, source: Store, target: Store, step: int, options: CopyOptions) -> None:
        self._target = target
        self._prefix = step_name(step)
        self._manifest = read_manifest(source, self._prefix)
        self.save_id = self._manifest.save.save_id
        self._folder = data_prefix(self._prefix, self.save_id)
        self._source = source
        self._sources = OpenPacks(source, self._prefix, self._manifest)
        self._tables = ArrayTables()
        self._found: dict[int, PackRecord] = {}
        self._where = described(source, self._prefix)
        self._options = options

    def run(self, ranks: Ranks) -> int:
        save_id, is_there = ranks.share(lambda: (self.save_id, self._is_there()))
        if save_id != self.save_id:
            raise PeerError(
                "rank 0 copies another save of this step", where=self._where, hint="try again"
            )
        if is_there:
            return 0
        sent, problem = self._send(ranks)
        # When all packs are complete they go on; where one is damaged, all raise.
        mine = None if problem is None else (problem.what, problem.where)
        told = ranks.agree(mine, lambda heard: next(filter(None, heard), None))
        if told is not None:
            what, where = told
            raise problem or UnsoundStepError(what, where=where, save_id=self.save_id)
        commit_together(ranks, self._target, self._prefix, save_id, self._commit)
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

    def _send(self, ranks: Ranks) -> tuple[int, UnsoundStepError | None]:
        """Send this rank's packs; how many bytes that were, and what ended it early."""
        sent = 0
        try:
            if ranks.rank == 0:
                self._check_manifest()
            for pack, info in enumerate(self._manifest.packs):
                # What the one without a record holds follows from all others: rank 0 has them.
                owner = 0 if info.record is None else pack % ranks.world_size
                if owner == ranks.rank:
                    sent += self._copy(pack)
        except UnsoundStepError as problem:
            return sent, problem
        finally:
            self._sources.close()
        return sent, None

    def _check_manifest(self) -> None:
        """Compare the manifest with the records: a call of its own, so that a second manifest does
        not stay in memory for the hours that packs may take.
        """
        with self._reading(self._where):
            try:
                records = [found.record for found in self._records()]
                expected = assemble(records, self._manifest.packs)
            except PeerError as error:
                what = f"the packs do not fit together: {error.what}"
                raise CorruptionError(what) from error
            if expected.to_bytes() != self._manifest.to_bytes():
                raise CorruptionError("the manifest says other things than the packs do")

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
        if not self._target.abilities.claims_names and stored_size(self._target, key) == info.size:
            return 0
        where, progress = self._sources.where(pack), self._options.progress
        with self._reading(where):
            if info.record is None:
                known = PackBytes.of_groups([found.record for found in self._records()])
            else:
                # The records of other ranks may refer to rank 0's.
                self._record(0)
                found = self._record(pack)
                if found.pack != info:
                    raise CorruptionError("the record is not where the manifest says")
                known = PackBytes.of_rank(found, where)
            if known.size != info.size:
                raise CorruptionError("the pack has another size than its record says", where=where)
        extents = [window.size for window in known.windows(_SEGMENT)]
        sink = self._target.create(key, extents, memory=self._options.memory, again=True)

        def send(numbered: tuple[int, PackWindow]) -> None:
            number, window = numbered
            with sink.filling(number) as memory, self._reading(where):
                with self._sources.use(pack) as source:
                    source.read_into(window.start, memory)
                for at, what in known.faults(window, memory):
                    raise CorruptionError(what, where=f"{where} at byte {at}")
            if progress:
                progress(window.size)

        try:
            share_out(enumerate(known.windows(_SEGMENT)), send, min(_THREADS, len(extents)))
            sink.finish()
        except BaseException:
            sink.abort()
            raise
        return info.size

    def _records(self) -> list[PackRecord]:
        ranks = [n for n, pack in enumerate(self._manifest.packs) if pack.record is not None]
        first = [self._record(rank) for rank in ranks[:1]]
        return [*first, *ask_all(self._source, self._record, ranks[1:])]

    def _record(self, pack: int) -> PackRecord:
        if pack not in self._found:
            size = self._manifest.packs[pack].size
            self._found[pack] = read_record(
                self._source, self._folder, pack, self.save_id, self._tables, size=size
            )
        return self._found[pack]

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
