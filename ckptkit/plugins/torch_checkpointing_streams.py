"""A file of torch_checkpointing while it is written or read, and the checksums of its blocks."""

from __future__ import annotations

import errno
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from isal import isal_zlib

from ckptkit.checkpoint.workers import DEFAULT_THREADS, share_out
from ckptkit.errors import CkptkitError, CorruptionError
from ckptkit.foreign.readers.torch_save import RECORD_KIND
from ckptkit.format.encoding import seal
from ckptkit.live.state.tensors import local_of
from ckptkit.storage import Store

SUMS_KIND = f"{RECORD_KIND}-sums"
BLOCK = 4 << 20
"""The bytes that have a checksum: a read of fewer reads so many."""
# What torch writes at a time, other than the memory of a large tensor, is copied.
_LARGE = 1 << 20


class WritingStream(io.RawIOBase):
    """A file that is being written: it is there when the block around it has ended well.

    Memory of large tensors is not copied: it is written when the stream is closed, which
    torch_checkpointing promises to do before it changes.
    """

    def __init__(self, store: Store, key: str, sums: str, data: object) -> None:
        super().__init__()
        self._store, self._file, self._sums = store, key, sums
        self._kept = list(_memories(data))
        self._parts: list[memoryview] = []
        self._small = bytearray()
        self._size = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._size += view.nbytes
        if view.nbytes >= _LARGE:
            self._cut()
            begin = np.frombuffer(view, np.uint8).ctypes.data
            is_kept = any(a <= begin and begin + view.nbytes <= b for a, b in self._kept)
            self._parts.append(view if is_kept else memoryview(bytes(view)))
        else:
            self._small += view
            if len(self._small) >= _LARGE:
                self._cut()
        return view.nbytes

    def _cut(self) -> None:
        if self._small:
            self._parts.append(memoryview(bytes(self._small)))
            self._small.clear()

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        self._cut()
        most = self._store.abilities.part_size
        parts = [p[at : at + most] for p in self._parts for at in range(0, p.nbytes, most)]
        sink = self._store.create(self._file, [part.nbytes for part in parts], again=True)
        try:
            share_out(list(enumerate(parts)), lambda part: sink.write(*part), DEFAULT_THREADS)
            sink.finish()
        except BaseException:
            sink.abort()
            raise
        if self._sums:
            sums = np.array(block_sums(self._parts), "<u4").tobytes()
            fields = {"size": self._size, "block": BLOCK, "sums": sums}
            self._store.put(self._sums, seal(SUMS_KIND, fields))
        self._parts = []

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            super().close()

    def __del__(self) -> None:
        super().close()  # given up


class ReadingStream(io.RawIOBase):
    """A file, of which any range is read; with `sums`, every block is compared with its own."""

    def __init__(
        self, store: Store, key: str, size: int, sums: npt.NDArray[np.uint32] | None
    ) -> None:
        super().__init__()
        self._where = f"{store.location}/{key}"
        self._source = store.open(key, size)
        self._size, self._sums = size, sums
        if sums is not None and len(sums) != -(-size // BLOCK):
            raise CorruptionError("not a checksum for each block", where=self._where)
        self._at = 0
        self._block = -1, memoryview(b"")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if self._at < 0:
            raise OSError(errno.EINVAL, "before the begin of the file")
        return self._at

    def readall(self) -> bytes:
        found = bytearray(max(0, self._size - self._at))
        view, done = memoryview(found), 0
        while done < len(found):
            done += self.readinto(view[done:])
        return bytes(found)

    def readinto(self, buffer: Any) -> int:
        try:
            with memoryview(buffer).cast("B") as view:
                length = self._fill(view)
        except CkptkitError as error:
            # torch_checkpointing frees the memory while it handles the error, whose frames have it.
            problem = error.with_traceback(None)
            problem.__cause__ = problem.__context__ = None
        else:
            self._at += length
            return length
        raise problem

    def _fill(self, view: memoryview) -> int:
        length = min(view.nbytes, self._size - self._at)
        if length <= 0:
            return 0
        number, inside = divmod(self._at, BLOCK)
        whole = length if self._at + length == self._size else length // BLOCK * BLOCK
        if self._sums is None:
            self._source.read_into(self._at, view[:length])
        elif inside == 0 and whole:
            length = whole
            self._source.read_into(self._at, view[:length])
            self._compare(number, view[:length])
        else:
            if self._block[0] != number:
                begin = number * BLOCK
                block = self._source.fetch(begin, min(BLOCK, self._size - begin))
                self._compare(number, block)
                self._block = number, block
            length = min(length, self._block[1].nbytes - inside)
            view[:length] = self._block[1][inside : inside + length]
        return length

    def _compare(self, first: int, data: memoryview) -> None:
        assert self._sums is not None  # noqa: S101 — asked of files that have them
        for number, sum_ in enumerate(block_sums([data]), first):
            if sum_ != self._sums[number]:
                raise CorruptionError(
                    f"the checksum is {sum_:08x}, written was {self._sums[number]:08x}",
                    where=f"{self._where}: bytes from {number * BLOCK} on",
                    hint="the checkpoint is damaged: load another",
                )

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()


def block_sums(parts: Sequence[memoryview]) -> list[int]:
    """The CRC-32 of each block of what these are together."""
    sums: list[int] = []
    crc = filled = 0
    for part in parts:
        at = 0
        while at < part.nbytes:
            piece = part[at : at + BLOCK - filled]
            crc = int(isal_zlib.crc32(piece, crc))
            at, filled = at + piece.nbytes, filled + piece.nbytes
            if filled == BLOCK:
                sums.append(crc)
                crc = filled = 0
    return [*sums, crc] if filled else sums


def _memories(data: object) -> Iterator[tuple[int, int]]:
    """Where the tensors of nested containers lie in the memory of this machine."""
    if isinstance(data, torch.Tensor):
        storage = local_of(data).untyped_storage()
        if storage.device.type == "cpu":
            yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from _memories(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _memories(value)
