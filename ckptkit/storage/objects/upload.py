"""A large object being written: sent to the server in pieces while its parts come in.

A *part* is what the caller of the sink writes at once. A *piece* is what the server is sent at
once: S3 calls that a part of the upload. A *block* is the memory between the two: a whole part, or,
of a part that is longer than a piece, as much as a piece has.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from itertools import accumulate, chain

import numpy as np

from ckptkit.errors import (
    AccessError,
    CkptkitError,
    CorruptionError,
    NoSpaceError,
    NotFoundError,
    StorageError,
)
from ckptkit.storage.base.buffers import AlignedBuffer, copy_bytes, default_pool
from ckptkit.storage.base.store import Parts, as_bytes, piece_size
from ckptkit.storage.objects.errors import Transient
from ckptkit.storage.objects.server import ObjectServer, Stat

# One is filled while another is sent.
_LEAST_PIECES = 2
# An engine that sends a piece again may say nothing, for as long as its deadline is.
_PATIENCE = 30.0
# Seconds that an upload is waited for at a time: Ctrl-C may reach another thread, which ends no
# wait of this one. Not by `join`, which takes a thread for ended when Ctrl-C comes (Python 3.11).
_LOOK = 0.1

_log = logging.getLogger("ckptkit.storage")


class ObjectSink:
    """A new object of several pieces, invisible until it is finished.

    Whoever writes fills blocks of an `UploadWindow`; a thread hands them to the client, in order,
    which sends several at a time. The first error, of either side, ends the other.
    """

    def __init__(
        self, server: ObjectServer, key: str, parts: Parts, memory: int | None, *, again: bool
    ) -> None:
        self._server = server
        self._key = key
        self._again = again
        self._where = parts.where
        self._parts = parts
        preferred, many = server.settings.part_size, server.settings.concurrency
        self._piece_size = piece_size(self._parts.total, preferred)
        # What the client copies needs the same memory twice.
        each = self._piece_size * (2 if server.client.copies else 1)
        # More than are sent at a time, so that the next ones are filled meanwhile.
        wanted = many + 2 if memory is None else memory // each
        most_pieces = max(_LEAST_PIECES, wanted)
        self._concurrency = min(many, most_pieces, -(-self._parts.total // self._piece_size))
        self._check = server.body_check(key, self._parts.total, self._piece_size)
        seen = self._check.add if self._check else None
        self._window = UploadWindow(
            parts.sizes, self._piece_size, most_pieces * self._piece_size, seen
        )
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        self._starting = threading.Lock()
        self._etag: str | None = None
        # What was there when it began.
        self._before: Stat | None = None
        self._error: BaseException | None = None
        self._ended = False

    def write(self, part: int, data: memoryview) -> None:
        """Copy one part; what is whole is on its way."""
        view = as_bytes(self._where, data)
        with self._parts.claiming(part, view.nbytes), self._writing():
            self._window.write(part, view)

    @contextmanager
    def filling(self, part: int) -> Iterator[memoryview]:
        """Memory for one part. It is sent from there, unless the part is longer than a piece: that
        is put together in other memory, and copied.
        """
        size = self._parts.size(part)
        with self._parts.claiming(part, size), self._writing():
            blocks = self._window.blocks_of(part)
            if len(blocks) == 1:
                with self._window.filling(blocks[0]) as memory:
                    yield memory
                return
            with self._parts.loan(part) as memory:
                with self._window.coming():
                    yield memory
                self._window.write(part, memory)

    def finish(self) -> None:
        """Make the object visible, once the server has every piece of it."""
        self._parts.complete()
        self._window.seal()
        # Whatever is not empty has begun it.
        while self._thread is not None and not self._is_over.wait(_LOOK):
            pass
        if self._error is not None and not self._was_completed():
            raise self._refusal() from self._error
        check = self._check
        if check is not None and check.differs(self._etag):
            # Either it is of another kind, or a piece was damaged on its way. What the server gives
            # back tells: a download, and only one for a server whose ETags are of another kind.
            for number, start in enumerate(range(0, self._parts.total, self._piece_size)):
                length = min(self._piece_size, self._parts.total - start)
                if check.piece_differs(number, self._server.read(self._key, start, length)):
                    self._server.delete([self._key])
                    raise CorruptionError(
                        f"the server stored other bytes than were sent, from byte {start} on",
                        where=self._where,
                        hint="something between here and the server damages data; use https",
                    )
            self._server.distrust_etags(self._key)
        self._ended = True
        self._window.close()

    def abort(self) -> None:
        """Abort the upload on the server, too."""
        # First, or those that wait for memory would be waited for.
        self._window.stop()
        self._parts.close()
        if self._ended:
            return
        while self._thread is not None and not self._is_over.wait(_LOOK):
            pass
        self._ended = True
        if self._thread is not None and self._error is None and not self._again:
            # It was completed before it could be stopped.
            with suppress(CkptkitError):
                self._server.delete([self._key])
        self._window.close()
        # Its traceback knows this sink.
        self._error = None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """While a caller fills memory. Where that, or the upload, fails nobody waits any more."""
        try:
            # Before, because whoever waits for memory waits for what is sent.
            with self._starting:
                if self._thread is None:
                    # A daemon: a program that forgot to end a sink must be able to end.
                    thread = threading.Thread(target=self._run, name="upload", daemon=True)
                    thread.start()
                    self._thread = thread
            yield
        except Stopped:
            raise self._refusal() from self._error
        except BaseException as error:
            self._stop(error)
            raise

    def _stop(self, error: BaseException) -> None:
        """All else fails, too, by the first error."""
        if self._error is None:
            self._error = error
        self._window.stop()

    def _run(self) -> None:
        """Send the blocks as they come: what the thread of the upload does."""
        server = self._server
        try:
            # Here, while the first blocks are filled.
            if not self._again:
                server.refuse_taken(self._key)
            else:
                # S3 refuses to say that nothing is there to whoever may not list.
                with suppress(NotFoundError, AccessError):
                    self._before = server.head(self._key)
            threading.Thread(target=self._watch, name="upload watch", daemon=True).start()
            self._etag = server.client.upload(
                self._key,
                self._window.blocks(),
                self._piece_size,
                self._concurrency,
            )
        except BaseException as error:  # noqa: BLE001 — whoever writes or finishes raises it
            self._stop(error)
        finally:
            self._is_over.set()

    def _watch(self) -> None:
        """Say so while the server takes nothing of what it is sent."""
        window = self._window
        last, waited = window.under_way, 0.0
        while not self._is_over.wait(_PATIENCE):
            now = window.under_way
            # The engine has sent all that it can, and more is to come: it is not the slow one.
            waits_for_us = not now[1] and not window.is_empty
            waited = 0.0 if now != last or waits_for_us else waited + _PATIENCE
            last = now
            if waited:
                _log.warning(
                    "writing of %s: the server has taken nothing for %.0f s, still trying",
                    self._where, waited,
                )  # fmt: skip

    def _was_completed(self) -> bool:
        """Whether the upload was completed, though the answer was lost.

        Then asking again finds no such upload. Packs are never written twice: an object of this
        size that was not there before is this one.
        """
        if not self._window.is_empty or isinstance(self._error, AccessError | NoSpaceError):
            return False
        try:
            found = self._server.head(self._key)
        except CkptkitError:
            return False  # what the upload said of itself says more
        self._etag = found.etag
        return found.size == self._parts.total and found != self._before

    def _refusal(self) -> CkptkitError:
        if isinstance(self._error, CkptkitError):
            return copy(self._error)
        if not isinstance(self._error, Transient | Stopped | None):
            what = f"the upload was given up: {self._error!r}"
            return StorageError(what, where=self._where, hint="mend that, and start over")
        reason = self._error.reason if isinstance(self._error, Transient) else "it broke off"
        return StorageError(
            f"the upload failed: {reason}",
            where=self._where,
            hint="check the endpoint and the network, then save again; "
            "a slow one needs fewer bytes at a time (concurrency) or a longer timeout",
        )


class Stopped(Exception):  # noqa: N818 — tells an engine to stop, and is never seen elsewhere
    """The upload was aborted."""


class UploadWindow:
    """The blocks of an object, which take about `most_bytes` of memory at a time: filled in any
    order, handed over in order.

    Engines read a block from this very memory while they send it, and may keep it to send it again:
    it is used for another one only once nothing refers to it any more. The last block waits for
    `seal`, for with it the object is complete. `seen` looks at each one that leaves.
    """

    def __init__(
        self,
        extents: Sequence[int],
        piece_size: int,
        most_bytes: int,
        seen: Callable[[memoryview], None] | None = None,
    ) -> None:
        self._piece_size = piece_size
        self._most = max(_LEAST_PIECES * piece_size, most_bytes)
        self._seen = seen
        counts = [-(-extent // piece_size) for extent in extents]
        # The blocks of part n are those from first n to first n + 1.
        self._firsts = list(accumulate(counts, initial=0))
        self._sizes = [
            min(piece_size, extent - begin)
            for extent in extents
            for begin in range(0, extent, piece_size)
        ]
        self._ends = list(accumulate(self._sizes, initial=0))
        self._largest = max(self._sizes, default=0)
        # Who has something in hand, and does not wait.
        self._busy = 0
        self._whole: dict[int, AlignedBuffer] = {}
        # Where those end that the engine has not let go of.
        self._lent: dict[int, int] = {}
        self._waiting: set[int] = set()
        self._used = 0
        # By length: what is freed is used again.
        self._free: dict[int, list[AlignedBuffer]] = {}
        self._free_bytes = 0
        self._next = 0
        self._sealed = False
        self._stopped = False
        # Reentrant: a block may be let go of by whoever holds the lock.
        self._changed = threading.Condition()

    # Filling

    def blocks_of(self, part: int) -> range:
        """The numbers of the blocks of a part."""
        return range(self._firsts[part], self._firsts[part + 1])

    @contextmanager
    def filling(self, block: int) -> Iterator[memoryview]:
        """The memory of a block, which is whole when this ends. Waits while memory is used up."""
        buffer = self._taken(block)
        is_whole = False
        try:
            with buffer.view[: self._sizes[block]] as memory:
                yield memory
            is_whole = True
        finally:
            with self._changed:
                self._busy -= 1
                if is_whole:
                    self._whole[block] = buffer
                else:
                    self._put_back(block, buffer)
                self._changed.notify_all()

    @contextmanager
    def coming(self) -> Iterator[None]:
        """While a part is put together in other memory: it will come, so others may wait for it."""
        with self._changed:
            self._busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def write(self, part: int, data: memoryview) -> None:
        """Copy a part to its blocks. Waits while memory is used up."""
        for block in self.blocks_of(part):
            with self.filling(block) as memory:
                copy_bytes(data[: memory.nbytes], memory)
                data = data[memory.nbytes :]

    def _taken(self, number: int) -> AlignedBuffer:
        length = self._length(number)
        with self._changed:
            self._waiting.add(number)
            try:
                self._wait_for(lambda: self._may_take(number))
            finally:
                self._waiting.remove(number)
                # Others may go beyond the limit as soon as nobody waits for the next block.
                self._changed.notify_all()
            if free := self._free.get(length):
                self._free_bytes -= length
                buffer = free.pop()
            else:
                if self._used + self._free_bytes + length > self._most:
                    # Of other lengths.
                    self._free.clear()
                    self._free_bytes = 0
                buffer = default_pool().take(length)
            self._used += length
            self._busy += 1
            return buffer

    def _may_take(self, number: int) -> bool:
        if self._used + self._length(number) <= self._most:
            return True
        # More than that only so that not all wait for ever: where nothing is being sent, no memory
        # comes free before the next block leaves. Whoever fills a later one may wait for it.
        if number == self._next:
            return not self._sendable()
        # Any other only where nobody has the next, or is about to have it.
        is_coming = self._next in self._waiting or self._may_leave(self._next) or self._busy
        return not (is_coming or self._sendable())

    def _length(self, number: int) -> int:
        """How much memory a block gets. Most get as much as the largest, so that what one gives
        back fits the next; one of less than half of that gets its own length.
        """
        size = self._sizes[number]
        return self._largest if 2 * size > self._largest else size

    def _put_back(self, number: int, buffer: AlignedBuffer) -> None:
        length = self._length(number)
        self._used -= length
        self._free.setdefault(length, []).append(buffer)
        self._free_bytes += length

    # Handing over

    @property
    def is_empty(self) -> bool:
        """Whether every block was handed over."""
        return self._next == len(self._sizes)

    @property
    def under_way(self) -> tuple[int, int]:
        """How many blocks were handed over so far, and how many of them the engine could have let
        go of, and has not.
        """
        with self._changed:
            return self._next, self._sendable()

    def blocks(self) -> Iterator[memoryview]:
        """Each block in turn, once it is whole; `Stopped` after `stop`."""
        for number in range(len(self._sizes)):
            # No name may hold the block: it could not be let go of while the next one is awaited.
            yield self._handed_over(number)

    def _handed_over(self, number: int) -> memoryview:
        with self._changed:
            self._wait_for(lambda: self._may_leave(number))
            buffer = self._whole.pop(number)
            self._next = number + 1
            self._lent[number] = self._ends[number + 1]
            # An array, because a memoryview cannot tell when the last of its users is gone.
            array = np.frombuffer(buffer.view[: self._sizes[number]], np.uint8)
            weakref.finalize(array, self._take_back, number, buffer).atexit = False
            self._changed.notify_all()
        if self._seen is not None:
            self._seen(array.data)
        return array.data

    def _take_back(self, number: int, buffer: AlignedBuffer) -> None:
        with self._changed:
            del self._lent[number]
            self._put_back(number, buffer)
            self._changed.notify_all()

    def _may_leave(self, number: int) -> bool:
        is_last = number == len(self._sizes) - 1
        return number in self._whole and (self._sealed or not is_last)

    def _sendable(self) -> int:
        """How many of the blocks that were handed over lie in complete pieces: those the engine can
        send and let go of. Of other pieces it may still wait for the rest.
        """
        complete = self._ends[self._next] // self._piece_size * self._piece_size
        # A copy, because while they are counted this very thread may let go of one.
        return sum(end <= complete or self.is_empty for end in list(self._lent.values()))

    # Ending

    def seal(self) -> None:
        """Let the last block go, too."""
        with self._changed:
            self._sealed = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Whoever fills, waits for or takes blocks gets `Stopped`."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """Give the memory back; nobody may use the window any more."""
        with self._changed:
            buffers = [*chain.from_iterable(self._free.values()), *self._whole.values()]
            self._free.clear()
            self._whole.clear()
        for buffer in buffers:
            buffer.give_back()

    def _wait_for(self, ready: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._stopped or ready())
        if self._stopped:
            raise Stopped


def pieces_of(blocks: Iterator[memoryview], size: int) -> Iterator[bytes]:
    """Copies of all bytes, in pieces of `size`, which outlive the blocks."""
    held: list[memoryview] = []
    missing = size
    # Nothing may be held of what the next block is waited for.
    while (block := next(blocks, None)) is not None:
        while block is not None:
            count = min(missing, block.nbytes)
            held.append(block[:count])
            block = block[count:] if count < block.nbytes else None
            missing -= count
            if not missing:
                piece = b"".join(held)
                held.clear()
                missing = size
                yield piece
                del piece
    if held:
        yield b"".join(held)
