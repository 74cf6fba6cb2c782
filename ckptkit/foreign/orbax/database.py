"""An OCDBT database of tensorstore: keys, and where in which file the value of each is.

Its manifest names the root of a B-tree; leaves have the values, or say where they are. Each process
of a job wrote a database of its own, and a manifest that was written last has all of them below it.
All of it is read once: of a value no more than its place.
"""

from __future__ import annotations

from dataclasses import dataclass

import google_crc32c

from ckptkit.errors import CorruptionError, FormatError
from ckptkit.foreign.decoded import Place, inflated, read_places
from ckptkit.foreign.folder import MOST_BYTES, Folder

MANIFEST = "manifest.ocdbt"
_OF_MANIFEST, _OF_NODE = b"\x0c\xdb\x3a\x2a", b"\x0c\xdb\x20\xde"
_HEADER_BYTES = 12
_CRC_BYTES = 4
_UUID_BYTES = 16
_MOST_PATH = 65535
_MOST_NODE = 256 << 20


@dataclass(frozen=True, slots=True)
class _Node:
    """Where a node is, how high above the leaves, what all its keys begin with, and its files."""

    place: Place
    height: int
    prefix: bytes
    base: str


def read_database(folder: Folder, top: str) -> dict[str, Place]:
    """What each key has. `top` is the folder of the database, with its slash, or empty."""
    key = f"{top}{MANIFEST}"
    said = _Fields(folder.read(key), _OF_MANIFEST, folder.where(key))
    level = _roots(said, top)
    found: dict[str, Place] = {}
    spent = 0
    while level:
        below: list[_Node] = []
        places = [node.place for node in level]
        for node, data in zip(level, read_places(folder, places), strict=True):
            where = f"{folder.where(node.place.file)} at byte {node.place.offset}"
            said = _Fields(data, _OF_NODE, where)
            # A hostile tree may have each node as a child of many others.
            spent += len(said.data) + len(node.prefix)
            if spent > MOST_BYTES:
                raise FormatError(f"a tree of more than {MOST_BYTES} bytes", where=where)
            if said.byte() != node.height:
                raise said.wrong("a node that is not as high as its parent says")
            files = said.files(node.base)
            if node.height:
                below += _children(said, files, node, top)
            else:
                spent += _values(said, files, node, top, found)
        level = below
    return found


def _roots(said: _Fields, top: str) -> list[_Node]:
    """The root of the newest version; none of a database without keys."""
    said.raw(_UUID_BYTES)
    if said.number():
        raise said.wrong("a database whose manifest is in several files")
    said.numbers(2)  # the most bytes of a value inside of a node, and of a node
    said.byte()
    if said.number():
        said.raw(4)  # the level of zstd
    files = said.files("")
    count = said.number()
    said.numbers(count)  # generations
    heights = said.raw(count)
    numbers, offsets, lengths, keys = (said.numbers(count) for _ in range(4))
    if not count or not keys[-1]:
        return []
    file, base = said.file(files, numbers[-1])
    return [_Node(Place(f"{top}{file}", offsets[-1], lengths[-1]), heights[-1], b"", base)]


def _children(said: _Fields, files: list[tuple[str, str]], node: _Node, top: str) -> list[_Node]:
    count = said.number()
    keys, common = said.keys(count, has_common=True)
    numbers, offsets, lengths = (said.numbers(count) for _ in range(3))
    found = []
    for place in range(count):
        file, base = said.file(files, numbers[place])
        prefix = node.prefix + keys[place][: common[place]]
        where = Place(f"{top}{file}", offsets[place], lengths[place])
        found.append(_Node(where, node.height - 1, prefix, base))
    return found


def _values(
    said: _Fields, files: list[tuple[str, str]], node: _Node, top: str, found: dict[str, Place]
) -> int:
    """Put what a leaf has to what was found; the bytes of its keys."""
    count = said.number()
    keys, _ = said.keys(count)
    lengths, kinds = said.numbers(count), said.numbers(count)
    if not {*kinds} <= {0, 1}:
        raise said.wrong("a value that is neither inside nor outside of its node")
    apart = sum(kinds)
    numbers, offsets = said.numbers(apart), said.numbers(apart)
    spent = number = 0
    for key, length, is_apart in zip(keys, lengths, kinds, strict=True):
        if is_apart:
            file, _ = said.file(files, numbers[number])
            place = Place(f"{top}{file}", offsets[number], length)
            number += 1
        else:
            place = Place(node.place.file, node.place.offset, length, said.raw(length))
        name = node.prefix + key
        spent += len(name)
        try:
            found[name.decode()] = place
        except UnicodeDecodeError as error:
            raise said.wrong("a key that is no text") from error
    return spent


class _Fields:
    """What is in a manifest or a node, taken one after the other."""

    def __init__(self, data: bytes, magic: bytes, where: str) -> None:
        self.where = where
        self.data = data
        crc = int.from_bytes(data[-_CRC_BYTES:], "little")
        if data[:4] != magic or int.from_bytes(data[4:_HEADER_BYTES], "little") != len(data):
            raise self.wrong("no database of tensorstore, or one that was cut short")
        if google_crc32c.value(data[:-_CRC_BYTES]) != crc:
            raise CorruptionError(
                "the checksum is not that of what is there",
                where=where,
                value=f"{crc:08x}",
                hint="the file was damaged; copy it again",
            )
        self.data, self._at = data[_HEADER_BYTES:-_CRC_BYTES], 0
        if self.number() or (method := self.number()) > 1:
            raise self.wrong("a version, or a compression, that is not read here")
        if method:
            frame = self.data[self._at :]
            self.data, self._at = inflated(frame, where, most=_MOST_NODE).tobytes(), 0

    def wrong(self, what: str) -> FormatError:
        return FormatError(what, where=self.where)

    def raw(self, count: int) -> bytes:
        if count > len(self.data) - self._at:
            raise self.wrong("it ends in the middle of a field")
        self._at += count
        return self.data[self._at - count : self._at]

    def byte(self) -> int:
        return self.raw(1)[0]

    def number(self) -> int:
        return self.numbers(1)[0]

    def numbers(self, count: int) -> list[int]:
        """So many: of each byte seven bits, the lowest first, and one that says whether more
        follow.
        """
        if count > len(self.data) - self._at:
            raise self.wrong("it ends in the middle of a field")
        found, data, at = [], self.data, self._at
        try:
            for _ in range(count):
                value = shift = 0
                while (byte := data[at]) & 0x80:
                    value |= (byte & 0x7F) << shift
                    shift += 7
                    at += 1
                    if shift > 63:
                        raise self.wrong("a number of more than 64 bits")
                found.append(value | byte << shift)
                at += 1
        except IndexError as error:
            raise self.wrong("it ends in the middle of a field") from error
        self._at = at
        return found

    def keys(self, count: int, *, has_common: bool = False) -> tuple[list[bytes], list[int]]:
        """Keys, each of which says how much of the one before it begins with; and how much of each
        all below it begin with.
        """
        shared = [0, *self.numbers(max(0, count - 1))]
        more = self.numbers(count)
        common = self.numbers(count) if has_common else []
        return self._joined(shared[:count], more), common

    def files(self, base: str) -> list[tuple[str, str]]:
        """The files of a node, and what those of its children begin with."""
        count = self.number()
        shared = [0, *self.numbers(max(0, count - 1))]
        more, bases = self.numbers(count), self.numbers(count)
        try:
            return [
                (base + path.decode(), base + path[:length].decode())
                for path, length in zip(self._joined(shared[:count], more), bases, strict=True)
            ]
        except UnicodeDecodeError as error:
            raise self.wrong("a name of a file that is no text") from error

    def _joined(self, shared: list[int], more: list[int]) -> list[bytes]:
        found: list[bytes] = []
        last, total = b"", 0
        for begin, length in zip(shared, more, strict=True):
            total += begin + length
            if begin > len(last) or begin + length > _MOST_PATH or total > MOST_BYTES:
                raise self.wrong("a name that is longer than names are")
            last = last[:begin] + self.raw(length)
            found.append(last)
        return found

    def file(self, files: list[tuple[str, str]], number: int) -> tuple[str, str]:
        if number >= len(files):
            raise self.wrong("a file that is not in its table")
        return files[number]
