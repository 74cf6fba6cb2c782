"""Writing one object in parts: the bookkeeping that all sinks share, and the sink of a file, which
puts each byte straight to its place.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from operator import index
from pathlib import Path

from ckptkit.errors import NotFoundError, StorageError, UsageError
from ckptkit.storage.buffers import AlignedBuffer, address_of, copy_bytes, default_pool
from ckptkit.storage.disk import (
    BLOCK,
    DirectFile,
    entered,
    refusals,
    remove_empty,
    sync_above,
    sync_folder,
    where_folders_vanish,
)
from ckptkit.storage.location import new_temporary
from ckptkit.storage.store import as_bytes

_BOUNCE = 4 << 20


class Parts:
    """Which parts of one object are written, being written, or missing: each is written once and
    whole, and both endings wait for those being written.
    """

    def __init__(self, where: str, extents: Sequence[int]) -> None:
        self.sizes = [index(extent) for extent in extents]
        if self.sizes and min(self.sizes) < 0:
            least = min(self.sizes)
            raise UsageError("a part cannot have a negative length", where=where, value=least)
        self.total = sum(self.sizes)
        self._where = where
        self._offsets = list(accumulate(self.sizes, initial=0))
        self._largest = max(self.sizes, default=0)
        self._claimed = bytearray(len(self.sizes))
        self._missing = sum(1 for size in self.sizes if size)
        self._running = 0
        self._closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    @contextmanager
    def writing(self, part: int, data: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Claim a part: yields its offset and its bytes; an error inside spoils the object."""
        view = as_bytes(self._where, data)
        with self.claiming(part, view.nbytes) as offset:
            yield offset, view

    @contextmanager
    def claiming(self, part: int, size: int) -> Iterator[int]:
        """Claim a part of so many bytes: yields its offset; an error inside spoils the object."""
        with self._changed:
            if self._closed:
                raise self._misuse("finished or aborted already")
            if self._error is not None:
                raise self._spoiled() from self._error
            if size != self.size(part):
                raise self._misuse(f"part {part} has {self.sizes[part]} bytes, not {size}")
            if self._claimed[part]:
                raise self._misuse(f"part {part} was written before")
            self._claimed[part] = 1
            self._missing -= size > 0
            self._running += 1
        try:
            yield self._offsets[part]
        except BaseException as error:
            if self._error is None:
                self._error = error
            raise
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextmanager
    def loan(self, part: int) -> Iterator[memoryview]:
        """Memory for a part, whose address suits its offset; all are of a size, to be used again
        for the next.
        """
        size = self.size(part)
        loan = default_pool().take(self._largest, congruent_to=self._offsets[part])
        # The slice is released before the loan ends: memory still looked at is not used again.
        with loan as memory, memory[:size] as data:
            yield data

    def size(self, part: int) -> int:
        """The number of bytes of a part."""
        if not 0 <= part < len(self.sizes):
            raise self._misuse(f"there is no part {part} of {len(self.sizes)}")
        return self.sizes[part]

    def complete(self) -> None:
        """Take no more parts, wait for those being written, and make sure that none is missing."""
        with self._changed:
            if self._closed:
                raise self._misuse("finished or aborted already")
            if self._missing:
                raise self._misuse(f"{self._missing} of {len(self.sizes)} parts were not written")
            self._wait()
        if self._error is not None:
            raise self._spoiled() from self._error

    def close(self) -> None:
        """Take no more parts and wait for those being written."""
        with self._changed:
            self._wait()
        # Its traceback knows whoever keeps this.
        self._error = None

    def _wait(self) -> None:
        # A descriptor closed under a running write may by then belong to another file.
        self._closed = True
        self._changed.wait_for(lambda: self._running == 0)

    def _misuse(self, what: str) -> UsageError:
        return UsageError(what, where=self._where, hint="write every part once, whole, then finish")

    def _spoiled(self) -> StorageError:
        return StorageError(
            "an earlier write to this object failed", where=self._where, hint="abort and start over"
        )


class BufferSink:
    """A new object that is in memory until it is finished, and then stored at once."""

    def __init__(
        self,
        parts: Parts,
        memory: memoryview,
        store: Callable[[], None],
        forget: Callable[[], None],
    ) -> None:
        self._parts = parts
        self._memory = memory
        self._store = store
        self._forget = forget

    def write(self, part: int, data: memoryview) -> None:
        with self._parts.writing(part, data) as (offset, view):
            copy_bytes(view, self._memory[offset : offset + view.nbytes])

    @contextmanager
    def filling(self, part: int) -> Iterator[memoryview]:
        size = self._parts.size(part)
        with (
            self._parts.claiming(part, size) as offset,
            self._memory[offset : offset + size] as memory,
        ):
            yield memory

    def finish(self) -> None:
        self._parts.complete()
        self._store()

    def abort(self) -> None:
        self._parts.close()
        self._forget()


class LocalSink:
    """A new file of the store; visible under its name, incomplete until `finish`.

    Under its name, because a crash then leaves something that is listed and can be deleted. With
    `again` it has a name of its own until then, and replaces what is there.
    """

    def __init__(
        self, root: Path, path: Path, extents: Sequence[int], *, again: bool = False
    ) -> None:
        self._root = root
        self._name = path
        self._path = path.with_name(new_temporary()) if again else path
        self._where = str(path)
        self._parts = Parts(self._where, extents)
        self._pool = default_pool()
        self._made: list[Path] = []
        self._finished = False
        # Blocks that several parts share: collected piece by piece, written as one; and how many
        # bytes each still lacks.
        self._edges: dict[int, AlignedBuffer] = {}
        self._wanted: dict[int, int] = {}
        self._edging = threading.Lock()
        self._file = self._open()
        self._blocks = self._file.direct
        try:
            with refusals(self._where):
                self._file.reserve(self._parts.total)
        except BaseException:
            self.abort()
            raise

    def _open(self) -> DirectFile:
        try:
            with refusals(self._where):
                return where_folders_vanish(self._created)
        except BaseException:
            self._remove_folders()
            raise

    def _created(self) -> DirectFile:
        with entered(self._root, self._path.parent, self._made) as folder:
            return DirectFile(self._path.name, folder)

    def write(self, part: int, data: memoryview) -> None:
        """Write one part, from the buffer itself where its address suits its offset."""
        with refusals(self._where), self._parts.writing(part, data) as (offset, view):
            if not self._blocks:
                self._file.write([view] if view.nbytes else [], offset)
            elif view.nbytes:
                self._write_blocks(offset, view)

    @contextmanager
    def filling(self, part: int) -> Iterator[memoryview]:
        with self._parts.loan(part) as memory:
            yield memory
            self.write(part, memory)

    def finish(self) -> None:
        """Make the file durable, then its name and the way to it."""
        self._parts.complete()
        with refusals(self._where):
            self._file.seal(self._parts.total)
            try:
                self._name_it()
            except FileNotFoundError:
                raise NotFoundError(
                    "the file was deleted or replaced while it was written",
                    where=self._where,
                    hint="two writers share a name, or something cleans up too early",
                ) from None
            sync_folder(self._path.parent)
            sync_above(self._path.parent, self._root, self._made)
            self._file.close()
        self._finished = True

    def _name_it(self) -> None:
        """Give the file its name, where it still has the one that it was made with."""
        with entered(self._root, self._path.parent) as folder:
            if not self._file.is_at(self._path.name, folder):
                raise FileNotFoundError
            if self._path != self._name:
                names = self._path.name, self._name.name
                os.replace(*names, src_dir_fd=folder, dst_dir_fd=folder)

    def abort(self) -> None:
        """Remove the file, and the folders that are empty then."""
        self._parts.close()
        if self._finished:
            return
        self._finished = True
        for block in self._edges.values():
            block.give_back()
        self._edges.clear()
        with suppress(OSError), entered(self._root, self._path.parent) as folder:
            # Not what another writer put in its place.
            if self._file.is_at(self._path.name, folder):
                os.unlink(self._path.name, dir_fd=folder)
        with suppress(OSError):
            self._file.close()
        self._remove_folders()

    def _remove_folders(self) -> None:
        # Whoever made a folder could not remove it while this file was in it.
        remove_empty(self._path.parent, self._root, bare=True)
        for folder in reversed(self._made):
            if self._root not in folder.parents:
                with suppress(OSError):
                    folder.rmdir()

    def _write_blocks(self, offset: int, view: memoryview) -> None:
        """Write the whole blocks of a part, with those at its borders that it completes.

        These go out in one call with the part's own, so that they cost no request of their own.
        """
        end = offset + view.nbytes
        first, last = -(-offset // BLOCK) * BLOCK, end // BLOCK * BLOCK
        head = self._edge(offset, view[: min(first, end) - offset])
        tail = self._edge(last, view[last - offset :]) if last >= first else None
        middle = view[first - offset : last - offset] if last > first else view[:0]
        try:
            if middle.nbytes and self._file.direct and address_of(middle) % BLOCK:
                self._bounce(first, middle)
                if head is not None:
                    self._file.write([head.view], first - BLOCK)
                if tail is not None:
                    self._file.write([tail.view], last)
                return
            run = [head.view] if head is not None else []
            run += [middle] if middle.nbytes else []
            run += [tail.view] if tail is not None else []
            self._file.write(run, first if head is None else first - BLOCK)
        finally:
            for block in (head, tail):
                if block is not None:
                    block.give_back()

    def _edge(self, offset: int, piece: memoryview) -> AlignedBuffer | None:
        """Take a piece that lies inside one block; returns the block when that completes it."""
        if not piece.nbytes:
            return None
        begin = offset // BLOCK * BLOCK
        with self._edging:
            block = self._edges.get(begin)
            if block is None:
                block = self._edges[begin] = self._pool.take(BLOCK)
                size = self._wanted[begin] = min(BLOCK, self._parts.total - begin)
                # What lies behind the end of the file reaches the disk too, until the file is cut.
                block.view[size:] = bytes(BLOCK - size)
            block.view[offset - begin : offset - begin + piece.nbytes] = piece
            self._wanted[begin] -= piece.nbytes
            if self._wanted[begin]:
                return None
            del self._wanted[begin]
            return self._edges.pop(begin)

    def _bounce(self, first: int, middle: memoryview) -> None:
        """Write from memory at an unsuitable address by way of some at a suitable one."""
        with self._pool.take(min(_BOUNCE, middle.nbytes)) as bounce:
            for begin in range(0, middle.nbytes, _BOUNCE):
                piece = middle[begin : begin + _BOUNCE]
                copy_bytes(piece, bounce[: piece.nbytes])
                self._file.write([bounce[: piece.nbytes]], first + begin)
