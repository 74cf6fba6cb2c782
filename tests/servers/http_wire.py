"""The little of HTTP/1.1 that a proxy has to understand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

PIECE = 64 << 10
_MOST_HEAD = 64 << 10

Header = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Head:
    """The first line and the headers of a request or of an answer."""

    line: str
    headers: tuple[Header, ...]

    def get(self, name: str) -> str:
        """The value of a header, empty where there is none."""
        return next((value for known, value in self.headers if known.lower() == name), "")

    @property
    def length(self) -> int | None:
        """The length of the body, None where it is not said."""
        found = self.get("content-length")
        return int(found) if found else None

    @property
    def method(self) -> str:
        return self.line.split(" ", 1)[0]

    @property
    def target(self) -> str:
        return self.line.split(" ", 2)[1]

    @property
    def path(self) -> str:
        return unquote(urlsplit(self.target).path)

    @property
    def query(self) -> str:
        return urlsplit(self.target).query

    @property
    def status(self) -> int:
        return int(self.line.split(" ", 2)[1])

    @property
    def kind(self) -> str:
        """The method, but LIST for the listing of a bucket."""
        parts = [part for part in self.path.split("/") if part]
        listing = len(parts) <= 1 or self.path.endswith("/o")
        return "LIST" if self.method == "GET" and listing else self.method

    def without(self, names: Iterable[str]) -> Head:
        """Without some of the headers."""
        gone = {name.lower() for name in names}
        return Head(self.line, tuple(pair for pair in self.headers if pair[0].lower() not in gone))

    def having(self, name: str, value: str) -> Head:
        """With a header in place of all of that name."""
        return Head(self.line, (*self.without([name]).headers, (name, value)))

    def encode(self) -> bytes:
        """As it goes over the wire; the headers keep their order."""
        lines = [self.line, *(f"{name}: {value}" for name, value in self.headers), "", ""]
        return "\r\n".join(lines).encode("latin-1")


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """The next head, None where the other side is done."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return None
    line, *rest = raw[:_MOST_HEAD].decode("latin-1").rstrip("\r\n").split("\r\n")
    pairs = (item.partition(":") for item in rest)
    return Head(line, tuple((name.strip(), value.strip()) for name, _, value in pairs))


async def body_of(
    reader: asyncio.StreamReader, head: Head, *, answer: bool
) -> AsyncIterator[bytes]:
    """The body in pieces as they come; that of an answer without a length goes on to the end, and
    one in chunks stays in its chunks.
    """
    if "chunked" in head.get("transfer-encoding").lower() and not answer:
        async for piece in _chunks(reader):
            yield piece
        return
    left = head.length if head.length is not None or answer else 0
    while left is None or left > 0:
        piece = await reader.read(PIECE if left is None else min(PIECE, left))
        if not piece:
            return
        left = None if left is None else left - len(piece)
        yield piece


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        size_line = await reader.readuntil(b"\r\n")
        size = int(size_line.split(b";")[0], 16)
        yield size_line + await reader.readexactly(size + 2)
        if size == 0:
            return
