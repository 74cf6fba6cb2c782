"""One rank's pack, from what it holds to the bytes in the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from ckptkit.checkpoint.content import LocalArray, LocalContent, PackContent
from ckptkit.checkpoint.image import (
    ImageWriting,
    PackImage,
    Segment,
    stage_image,
    write_image,
)
from ckptkit.checkpoint.places import data_prefix
from ckptkit.checkpoint.threads import Progress
from ckptkit.format.array_table import ArrayTable
from ckptkit.format.arrays import Alias, ArrayInfo, array_document, group_document, key_of
from ckptkit.format.manifest import pack_name
from ckptkit.format.names import ancestors
from ckptkit.format.objects import ObjectInfo
from ckptkit.format.pack import record_name
from ckptkit.format.record import Record, SaveInfo
from ckptkit.model import Layout, Part
from ckptkit.plan.write import Owned, chunks_to_write, writes_document
from ckptkit.storage import AlignedBuffer, BufferPool, Store


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """One array as its rank added it; `data` is the part, None where there is none."""

    info: ArrayInfo
    layout: Layout
    part: Part
    data: npt.NDArray[Any] | None


@dataclass(frozen=True, slots=True)
class Holdings:
    """All that one rank added to a step, by name."""

    arrays: Mapping[str, Holding]
    aliases: Mapping[str, Alias]
    objects: Mapping[str, ObjectInfo]


class Pack:
    """What one rank will write: laid out when made, then perhaps staged, then written."""

    def __init__(
        self,
        content: PackContent,
        table: ArrayTable,
        rank: int,
        objects: Sequence[ObjectInfo],
    ) -> None:
        self.table = table
        self._content = content
        self._rank = rank
        self._objects = tuple(objects)
        self.image = PackImage(content)
        self._staged: AlignedBuffer | None = None
        documents = content.documents
        # Known before they are written, because the length of the record depends on them.
        self.image.crcs[: len(documents)] = [isal_zlib.crc32(data) for _, data in documents]

    @classmethod
    def of(cls, holdings: Holdings, rank: int) -> Pack:
        """The pack of what a saving rank holds."""
        # Arrays are sorted by name in the record, and in the order they were added in the pack.
        arrays = [holdings.arrays[name].info for name in sorted(holdings.arrays)]
        table = ArrayTable.of(arrays, tuple(holdings.aliases.values()))
        return cls(_content(holdings, rank), table, rank, tuple(holdings.objects.values()))

    def stage(self, threads: int, pool: BufferPool) -> None:
        """Copy all data, so that the buffers it came from may change."""
        self._staged = stage_image(self.image, pool, threads=threads)

    def write(
        self,
        store: Store,
        prefix: str,
        save: SaveInfo,
        *,
        refers: bool,
        threads: int,
        progress: Progress | None = None,
    ) -> None:
        """Write the pack; complete and durable on return, and nothing left behind when it fails.

        With `refers` its record refers to rank 0's for the arrays, which are the same.
        """
        try:
            segments = self.image.segments(store.abilities.part_size)
            writing = self.begin(store, prefix, save, segments, refers=refers)
            write_image(writing, threads=threads, progress=progress)
        finally:
            self.release()

    def begin(
        self,
        store: Store,
        prefix: str,
        save: SaveInfo,
        segments: Sequence[Segment],
        *,
        refers: bool,
        memory: int | None = None,
    ) -> ImageWriting:
        """Begin to write the pack, for a caller with threads of its own, who may say how much
        memory the store's sink can have.
        """
        name = record_name(self._rank)
        # Of no arrays the tables are the same for any strategies: these have to be compared then.
        refers = refers and len(self.table.arrays) > 0
        return ImageWriting(
            store,
            f"{data_prefix(prefix, save.save_id)}/{pack_name(self._rank)}",
            self.image,
            segments,
            (
                self.image.tail_length(name, len(self._record(save, refers=refers))),
                lambda: self.image.tail(name, self._record(save, refers=refers))[0],
            ),
            self._staged,
            memory,
        )

    def release(self) -> None:
        """Free the staged copy."""
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.give_back()

    def _record(self, save: SaveInfo, *, refers: bool) -> bytes:
        content, image = self._content, self.image
        count = len(content.documents)
        place = {array.name: index for index, array in enumerate(self.table.arrays)}
        renumbered = np.array([place[a.info.name] for a in content.arrays], dtype=np.uint32)
        return Record(
            save=save,
            rank=self._rank,
            table=self.table,
            documents=tuple(image.entry(index) for index in range(count)),
            array=renumbered[content.array],
            chunk=content.chunk.astype(np.uint64),
            offset=image.offsets[count:].astype(np.uint64),
            length=image.lengths[count:].astype(np.uint64),
            crc32=image.crcs[count:],
            objects=self._objects,
            refers=refers,
        ).to_bytes()


def documents_of(
    known: Sequence[tuple[Owned, ArrayInfo]],
    writes: Mapping[str, npt.NDArray[np.int64]],
    rank: int,
) -> list[tuple[str, bytes]]:
    """The Zarr documents in the pack of a rank that writes these chunks."""
    documents: dict[str, bytes] = {}
    if rank == 0:
        names = {group for held, _ in known for group in ancestors(held.name)} | {""}
        documents = {key_of(name): group_document() for name in sorted(names)}
    for held, info in known:
        if writes_document(held, writes[held.name], rank):
            documents[key_of(held.name)] = array_document(info)
    return list(documents.items())


def _content(holdings: Holdings, rank: int) -> PackContent:
    order = list(holdings.arrays.values())
    # Shared out in the order of names, which is the same on all ranks however they were added.
    named = sorted(order, key=lambda h: h.info.name)
    known = [Owned(h.info.name, h.layout, h.info.grid, h.info.dtype.itemsize) for h in named]
    writes = dict(zip(sorted(holdings.arrays), chunks_to_write(known, rank), strict=True))
    infos = [holding.info for holding in named]
    return LocalContent(
        documents_of(list(zip(known, infos, strict=True)), writes, rank),
        [LocalArray(h.info, writes[h.info.name], h.part, h.data) for h in order],
    )
