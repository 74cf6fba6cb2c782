"""An object that is sent at once, when all of it is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ckptkit.storage.buffers import copy_bytes, default_pool
from ckptkit.storage.objects.server import Server
from ckptkit.storage.parts import Parts


class WholeSink:
    """A new object of a single piece, in memory until it is finished."""

    def __init__(self, server: Server, key: str, parts: Parts) -> None:
        self._server = server
        self._key = key
        self._parts = parts
        self._buffer = default_pool().take(parts.total)

    def write(self, part: int, data: memoryview) -> None:
        """Copy one part to its place."""
        with self._parts.writing(part, data) as (offset, view):
            copy_bytes(view, self._buffer.view[offset : offset + view.nbytes])

    @contextmanager
    def filling(self, part: int) -> Iterator[memoryview]:
        """The place of a part."""
        size = self._parts.size(part)
        with (
            self._parts.claiming(part, size) as offset,
            self._buffer.view[offset : offset + size] as memory,
        ):
            yield memory

    def finish(self) -> None:
        """Store it."""
        self._parts.complete()
        self._server.put(self._key, self._buffer.view)
        self._buffer.give_back()

    def abort(self) -> None:
        """Forget it."""
        self._parts.close()
        self._buffer.give_back()
