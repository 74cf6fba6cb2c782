"""The packs of a step, opened when first read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass

from isal import isal_zlib

from ckptkit.checkpoint.places import StepFolder, described, read_manifest
from ckptkit.checkpoint.workers import Pace
from ckptkit.errors import CkptkitError, CorruptionError, FormatError, NotFoundError
from ckptkit.foreign.contents import ForeignManifest, GatheredSource
from ckptkit.foreign.decoded import DECODED, DecodedSource, kept_bytes
from ckptkit.format.array_table import ArrayTables
from ckptkit.format.manifest import Manifest, PackInfo, Record, pack_name
from ckptkit.format.pack import END_BYTES, Entry, find_record
from ckptkit.storage import Source

# Processes may often open 1,024 files, and one that is lent from the page cache, or read past it,
# counts twice; what is beyond this is opened for each read.
_KEPT_OPEN = 300


class OpenPacks:
    """Open packs by number; safe to use from any thread, except `close`."""

    def __init__(self, folder: StepFolder, manifest: Manifest) -> None:
        self.manifest = manifest
        self.pace = Pace.of(folder.store)
        # The most that is in memory of what was read, besides what is asked for.
        self.kept_bytes = 0
        self._files = len(manifest.packs)
        # Where opening asks for a pack, an open one is that which was looked at, whatever becomes
        # of its name.
        self._open_asks = folder.store.abilities.open_survives_delete
        self._store = folder.store
        self._folder = folder
        self._open: dict[int, Source] = {}
        self._lock = threading.Lock()

    def where(self, pack: int) -> str:
        """A pack's place, for messages."""
        return described(self._store, self.key(pack))

    def corrupt(self, key: str, found: int, written: int, pack: int, at: int) -> CorruptionError:
        """What to raise for a chunk that is not what was written."""
        return CorruptionError(
            f"chunk {key} has the checksum {found:08x}, written was {written:08x}",
            where=f"{self.where(pack)} at byte {at}",
            hint="`ckpt verify` lists all damage of a step; `ckpt ls RUN` shows the other steps",
        )

    @contextmanager
    def use(self, pack: int) -> Iterator[Source]:
        """An open pack, for as long as the block lasts at least, which does nothing but read it."""
        # First without the lock: nearly every read finds its pack open, and many threads read.
        kept = self._open.get(pack)
        if kept is None:
            with self._lock:
                if pack not in self._open and len(self._open) < _KEPT_OPEN:
                    self._open[pack] = self._opened(pack)
                kept = self._open.get(pack)
        if kept is not None and self._open_asks:
            yield kept
            return
        with self._opened(pack) if kept is None else nullcontext(kept) as source:
            if self._open_asks or self.is_put_together(pack):
                yield source
                return
            # Nobody has asked the store about it: a read that fails finds out why.
            try:
                yield source
            except NotFoundError as error:
                raise self._unlike(pack, None) from error
            except CorruptionError as error:
                size = written = self.manifest.packs[pack].size
                with suppress(CkptkitError):
                    size = self._store.size(self.key(pack))
                if size == written:
                    raise
                raise self._unlike(pack, size) from error

    def close(self) -> None:
        """Close all."""
        with self._lock:
            closing, self._open = self._open, {}
        for source in closing.values():
            source.close()

    def is_put_together(self, pack: int) -> bool:
        """Whether some bytes of a chunk take as long to read as all of it."""
        return pack >= self._files

    def _opened(self, pack: int) -> Source:
        written = self.manifest.packs[pack].size
        try:
            source = self._store.open(self.key(pack), written)
        except NotFoundError as error:
            raise self._unlike(pack, None) from error
        if source.size != written:
            source.close()
            raise self._unlike(pack, source.size)
        return source

    def _unlike(self, pack: int, size: int | None) -> CkptkitError:
        """What to raise for a pack of another size than was written; None for one that is missing.

        A step is given up before its packs go, so its manifest says whether a missing one was.
        """
        how, what = "", "a pack of the step is missing"
        if size is not None:
            what = f"the pack has {size} bytes, written were {self.manifest.packs[pack].size}"
        else:
            try:
                now = read_manifest(self._folder).save.save_id
                how = "" if now == self.manifest.save.save_id else "overwritten"
            except NotFoundError:
                how = "deleted"
            except FormatError:
                pass
        if how:
            return NotFoundError(
                f"the step was {how} while it was read",
                where=str(self._folder),
                hint="open it again, or the run for its newest step",
            )
        return CorruptionError(
            what,
            where=self.where(pack),
            hint="`ckpt verify` lists all damage; `ckpt ls RUN` shows the other steps",
        )

    def key(self, pack: int) -> str:
        """Where the store has a pack."""
        return self._folder.pack(self.manifest.save.save_id, self.manifest.packs[pack].name)


class ForeignFiles(OpenPacks):
    """The files of a foreign checkpoint, which its manifest calls packs, and what is put together
    from them.
    """

    def __init__(self, folder: StepFolder, manifest: ForeignManifest) -> None:
        super().__init__(folder, manifest)
        self._foreign = manifest
        self._files = len(manifest.foreign.files)
        self._numbers = {pack.name: number for number, pack in enumerate(manifest.packs)}
        self.kept_bytes = kept_bytes(manifest.foreign.encoded)

    def key(self, pack: int) -> str:
        return self.manifest.packs[pack].name

    def _opened(self, pack: int) -> Source:
        if not self.is_put_together(pack):
            return super()._opened(pack)

        def use(key: str) -> AbstractContextManager[Source]:
            return self.use(self._numbers[key])

        if self.key(pack) == DECODED:
            encoded = self._foreign.foreign.encoded
            return DecodedSource(encoded, use, lambda key: described(self._store, key))
        return GatheredSource(self._foreign, use)

    def _unlike(self, pack: int, size: int | None) -> CkptkitError:
        has = "is gone" if size is None else f"has {size} bytes now"
        return NotFoundError(
            f"a file of the checkpoint {has}, it had {self.manifest.packs[pack].size}",
            where=self.where(pack),
            hint="it was changed while it was read; open it again",
        )


# The last central record (46 bytes, name, extra) and the end records, with room to spare.
_TAIL = END_BYTES + 256


@dataclass(frozen=True, slots=True, eq=False)
class PackRecord:
    """A pack's record, the pack as a manifest lists it, and the record's entry in it."""

    record: Record
    pack: PackInfo
    entry: Entry


def read_record(
    folder: StepFolder,
    save_id: str,
    rank: int,
    tables: ArrayTables,
    *,
    size: int | None = None,
) -> PackRecord:
    """The record of a rank's pack, checked; CorruptionError where the pack is not the one of this
    rank and save: copied, or renamed. Rank 0's has to be read before the others.

    Who knows the size of the pack saves asking for it.
    """
    store, name = folder.store, pack_name(rank)
    key = folder.pack(save_id, name)
    where = described(store, key)
    first = _TAIL
    if store.abilities.waits_for_answers:
        # Requests are dear: most records fit into so much, and need no second one.
        first = max(_TAIL, store.abilities.gap_bytes)
    try:
        size = store.size(key) if size is None else size
        length = min(size, first)
        tail = store.read(key, size - length, length)
    except NotFoundError as error:
        raise CorruptionError(
            "the pack is missing", where=where, hint="a file of the step was moved or deleted"
        ) from error
    entry = find_record(tail[-_TAIL:], size, where)
    begin = entry.offset - (size - length)
    data = tail[begin : begin + entry.length] if begin >= 0 else b""
    data = data or store.read(key, entry.offset, entry.length)
    actual = int(isal_zlib.crc32(data))
    if actual != entry.crc:
        raise CorruptionError(
            f"the record's checksum is {actual:08x}, written was {entry.crc:08x}", where=where
        )
    record = Record.from_bytes(data, where, tables, (rank, save_id))
    return PackRecord(record, PackInfo(name, size, (entry.offset, entry.length)), entry)
