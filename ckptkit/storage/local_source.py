"""A file being read, by exact ranges, from any thread."""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path

from ckptkit.errors import CorruptionError
from ckptkit.storage.closing import Closing
from ckptkit.storage.ranges import as_bytes, checked_range
from ckptkit.storage.refusals import refusals


class LocalSource(Closing):
    """A file open for reading."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        # A pipe of that name would make open wait for its writer.
        self._file = FileIO(path, opener=_open_at_once)
        status = os.fstat(self._file.fileno())
        if not stat.S_ISREG(status.st_mode):
            self._file.close()
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        self.size = status.st_size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the whole buffer from `offset`."""
        view = as_bytes(self._path, buffer)
        checked_range(self._path, self.size, offset, view.nbytes)
        with refusals(self._path):
            descriptor, done = self._file.fileno(), 0
            while done < view.nbytes:
                count = os.preadv(descriptor, [view[done:]], offset + done)
                if not count:
                    raise self._shrunk(offset + done)
                done += count

    def fetch(self, offset: int, length: int) -> memoryview:
        """These bytes, read as they are."""
        return memoryview(self.read(offset, length))

    def read(self, start: int = 0, length: int | None = None) -> bytes:
        """Exactly these bytes."""
        count = checked_range(self._path, self.size, start, length)
        with refusals(self._path):
            data = os.pread(self._file.fileno(), count, start)
        if len(data) == count:
            return data
        whole = bytearray(count)
        self.read_into(start, memoryview(whole))
        return bytes(whole)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _shrunk(self, end: int) -> CorruptionError:
        return CorruptionError(
            f"the file ends at byte {end}, it had {self.size}",
            where=self._path,
            hint="another process cut it while it was read",
        )


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
