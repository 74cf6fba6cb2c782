"""Whether what a server stored is what was sent, as far as its ETag tells."""

from __future__ import annotations

import hashlib
import re

_ETAG = re.compile(r'"?([0-9a-f]{32})(?:-([0-9]+))?"?')


class Digest:
    """The ETag that S3 gives an object: its MD5, or of several parts that of their MD5s."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def add(self, piece: memoryview) -> None:
        """Take the next piece."""
        self._pieces.append(_md5(piece))

    def differs(self, etag: str | None) -> bool:
        """Whether this is the ETag of other bytes; one of another form tells nothing."""
        match = _ETAG.fullmatch(etag or "")
        if match is None:
            return False
        if match[2] is None:
            return len(self._pieces) == 1 and match[1] != self._pieces[0].hex()
        whole = _md5(memoryview(b"".join(self._pieces))).hex()
        return int(match[2]) == len(self._pieces) and match[1] != whole

    def piece_differs(self, number: int, data: bytes | memoryview) -> bool:
        """Whether piece number `number` is not these bytes."""
        return _md5(memoryview(data)) != self._pieces[number]


def _md5(data: memoryview) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()
