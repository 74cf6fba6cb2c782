"""Which files of an export are there already: it goes on where an earlier one was killed.

What is finished is noted beside the files, under a name that tells what they are made of. The note
goes when all is there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from ckptkit.checkpoint.places import crc_of
from ckptkit.checkpoint.reshard.translation import Chosen
from ckptkit.checkpoint.workers import Progress
from ckptkit.errors import CkptkitError
from ckptkit.foreign.output.files import Checked, NewFiles
from ckptkit.format.leaves import dumps, unpack
from ckptkit.storage import Store
from ckptkit.version import __version__

_NOTE = ".ckptkit-export-"
_MOST_BYTES = 64 << 20


def export_name(save_id: str, arrays: Sequence[Chosen], new: NewFiles) -> str:
    """The name of an export: the same for all that write the same bytes."""
    digest = hashlib.sha256(f"{__version__} {save_id}".encode())
    for chosen in arrays:
        rows = [(rows.number, rows.start, rows.count, rows.at) for rows in chosen.rows]
        digest.update(repr((chosen.number, chosen.info.dtype.name, rows)).encode())
    for file in new.files:
        pieces = [hashlib.sha256(p).hexdigest() if type(p) is bytes else p for p in file.pieces]
        known = [piece.tensors if isinstance(piece, Checked) else piece for piece in pieces]
        digest.update(repr((file.key, known)).encode())
    for key, data in new.closing:
        digest.update(repr((key, data)).encode())
    return digest.hexdigest()[:16]


class FinishedFiles:
    """The files that an export of this name has written whole; none are noted without a name."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self.note = f"{_NOTE}{name}" if name else ""
        self.is_resumed = bool(name) and self.note in store.children("")
        self._known: dict[str, tuple[int, int]] = {}

    def begin(self, keys: Iterable[str], progress: Progress | None) -> list[str]:
        """Those of these files that an earlier run has completed, with the very bytes that it
        wrote; what is left of others is removed. AlreadyExistsError where another one begins now.
        """
        if not self.note:
            return []
        if not self.is_resumed:
            self._store.put(self.note, dumps([]), exclusive=True)
            return []
        said: Any = []
        with suppress(CkptkitError):  # one that was killed may leave an empty note
            said = unpack(self._store.read_whole(self.note, _MOST_BYTES), self.note)
        noted = {key: (size, crc) for key, size, crc in said}
        self._store.delete([entry.key for entry in self._store.leftovers("")])
        there = {entry.key: entry.size for entry in self._store.list("")}
        links = self._store.links("")
        for key in keys:
            size, crc = noted.get(key, (-1, 0)) if key not in links else (-1, 0)
            if there.get(key) == size and self._crc(key, size) == crc:
                self._known[key] = size, crc
                if progress:
                    progress(size)
            elif key in there:
                self._store.delete([key])
        return list(self._known)

    def add(self, key: str, size: int, crc: int) -> None:
        """One more is there, durable."""
        self._known[key] = size, crc
        if self.note:
            rows = [[key, size, crc] for key, (size, crc) in self._known.items()]
            self._store.put(self.note, dumps(rows))

    def forget(self) -> None:
        """All is there."""
        if self.note:
            self._store.delete([self.note])

    def _crc(self, key: str, size: int) -> int:
        with self._store.open(key, size) as source:
            return crc_of(source, 0, size)
