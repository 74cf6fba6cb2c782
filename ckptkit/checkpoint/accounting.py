"""What every byte of a step has to be, known before its packs are read: for who passes them on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckptkit.checkpoint.assemble import assemble
from ckptkit.checkpoint.pace import ask_all
from ckptkit.checkpoint.scan import (
    Expected,
    Fault,
    faults_of,
    first_difference,
    groups_bytes,
    placed,
)
from ckptkit.checkpoint.tail import PackRecord, read_record
from ckptkit.errors import CorruptionError, PeerError
from ckptkit.format.array_table import ArrayTables
from ckptkit.format.manifest import Manifest
from ckptkit.format.pack import directory
from ckptkit.storage import Store


@dataclass(frozen=True, slots=True, eq=False)
class PackBytes:
    """What the bytes of a pack have to be: entries without a gap, which end at `stops`, and then
    exactly `closing`.
    """

    stops: list[int]
    closing: bytes
    found: PackRecord | None = None

    @classmethod
    def of_rank(cls, found: PackRecord) -> PackBytes:
        """Those of a rank's pack, as its record says."""
        misplaced: list[Fault] = []
        stops = [item.stop for item in placed(found, misplaced)]
        # Gone through again, so that there is no object for each chunk.
        closing = directory(item.entry for item in placed(found, misplaced))
        if misplaced:
            raise CorruptionError(misplaced[0][1])
        if stops[-1] + len(closing) != found.pack.size:
            raise CorruptionError("the directory has another length than it should")
        return cls(stops, closing, found)

    def entries(self) -> Iterator[Expected]:
        """All entries in the order of the pack."""
        return iter(()) if self.found is None else placed(self.found, [])

    def faults(self, entries: list[Expected], memory: memoryview, start: int) -> Iterator[Fault]:
        """What is wrong in memory that begins at byte `start` of the pack with these entries."""
        for item in entries:
            yield from faults_of(item, memory, start)
        end = self.stops[-1] if self.stops else 0
        begin = max(start, end)
        actual = memory[begin - start :]
        expected = self.closing[begin - end : begin - end + len(actual)]
        if actual != expected:
            at = begin + first_difference(bytes(actual), expected)
            yield at, "the directory is damaged" if self.found else "not a group document"


class StepBytes:
    """The same for the packs of a step; each record is read when it is first needed."""

    def __init__(self, store: Store, folder: str, manifest: Manifest) -> None:
        self._store = store
        self._folder = folder
        self._manifest = manifest
        self._tables = ArrayTables()
        self._found: dict[int, PackRecord] = {}

    def check_manifest(self) -> None:
        """Compare the manifest with what the records of all packs say."""
        manifest = self._manifest
        try:
            expected = assemble([found.record for found in self._all()], manifest.packs)
        except PeerError as error:
            raise CorruptionError(f"the packs do not fit together: {error.what}") from error
        if expected.to_bytes() != manifest.to_bytes():
            raise CorruptionError("the manifest says other things than the packs do")

    def of(self, number: int) -> PackBytes:
        """What has to be in a pack."""
        pack = self._manifest.packs[number]
        if pack.record is None:
            records = [found.record for found in self._all()]
            return PackBytes([], groups_bytes(self._manifest, records))
        # The records of other ranks may refer to rank 0's.
        self._record(0)
        found = self._record(number)
        if found.pack != pack:
            raise CorruptionError("the record is not where the manifest says")
        return PackBytes.of_rank(found)

    def _all(self) -> list[PackRecord]:
        ranks = [n for n, pack in enumerate(self._manifest.packs) if pack.record is not None]
        first = [self._record(rank) for rank in ranks[:1]]
        return [*first, *ask_all(self._store, self._record, ranks[1:])]

    def _record(self, number: int) -> PackRecord:
        if number not in self._found:
            save_id, size = self._manifest.save.save_id, self._manifest.packs[number].size
            self._found[number] = read_record(
                self._store, self._folder, number, save_id, self._tables, size=size
            )
        return self._found[number]
