"""Whether what a server stored is what was sent, as far as its ETag tells."""

from __future__ import annotations

import hashlib
import re

_ETAG = re.compile(r'"?([0-9a-f]{32})(?:-([0-9]+))?"?')


class Digest:
    """The ETag that S3 gives an object: its MD5, or of several pieces that of their MD5s."""

    def __init__(self, piece_size: int) -> None:
        self._size = piece_size
        self._pieces: list[bytes] = []
        self._piece = _md5()
        self._taken = 0

    def add(self, data: memoryview) -> None:
        """Take what comes next."""
        while data.nbytes:
            count = min(self._size - self._taken, data.nbytes)
            self._piece.update(data[:count])
            self._taken += count
            data = data[count:]
            if self._taken == self._size:
                self._end_piece()

    def end(self) -> None:
        """That was all."""
        if self._taken or not self._pieces:
            self._end_piece()

    def differs(self, etag: str | None) -> bool:
        """Whether this is the ETag of other bytes; one of another form tells nothing."""
        match = _ETAG.fullmatch(etag or "")
        if match is None:
            return False
        if match[2] is None:
            return len(self._pieces) == 1 and match[1] != self._pieces[0].hex()
        whole = _md5(b"".join(self._pieces)).hexdigest()
        return int(match[2]) == len(self._pieces) and match[1] != whole

    def piece_differs(self, number: int, data: bytes | memoryview) -> bool:
        """Whether piece number `number` is not these bytes."""
        return _md5(data).digest() != self._pieces[number]

    def _end_piece(self) -> None:
        self._pieces.append(self._piece.digest())
        self._piece = _md5()
        self._taken = 0


def _md5(data: bytes | memoryview = b"") -> hashlib._Hash:
    return hashlib.md5(data, usedforsecurity=False)
