"""The zip archive one writer writes (FORMAT section 4): bytes in, bytes out.

Written here and not with `zipfile`, because offsets must be known before there are bytes, and
because a header that follows from name, length, CRC and offset alone lets `verify` account for
every byte of a pack.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckptkit.errors import CorruptionError
from ckptkit.model.grid import I64

ALIGNMENT = 64
END_BYTES = 22 + 20 + 56  # the three end records, zip64 included

_LIMIT32 = 0xFFFFFFFF
_LIMIT16 = 0xFFFF
# Fixed, so that the same entries are the same bytes whenever and wherever they are written.
_DATE = 0x0021
_MADE_BY = 0x031E
_MODE = 0x81A40000
_ALIGN_ID = 0xD935
_ZIP64_ID = 0x0001

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")

# Where the two have the checksum.
_LOCAL_CRC, _CENTRAL_CRC = 14, 16

# The same as numpy has them, to fill in thousands of headers at a time.
_LOCAL_ROW = np.dtype("V4,<u2,V8,<u4,<u4,<u4,<u2,<u2")
_CENTRAL_ROW = np.dtype("V6,<u2,V8,<u4,<u4,<u4,<u2,<u2,V10,<u4")
_AT_ONCE = 4096
_NONE = np.zeros((3, 0), dtype=np.int64)

_RECORD_NAME = re.compile(rb"\.ckptkit/rank-[0-9]{5,8}\.msgpack")


class Entry(NamedTuple):
    """One entry of a pack: `offset` is where its data begins."""

    name: str
    offset: int
    length: int
    crc: int


def record_name(rank: int) -> str:
    """The entry that describes what a pack holds."""
    return f".ckptkit/rank-{rank:05d}.msgpack"


def data_offset(name: str, length: int, header_offset: int) -> int:
    """Where the data of an entry begins whose local header begins at `header_offset`."""
    return int(_border_after(header_offset, len(name), length))


def _border_after(header_offset: Any, name_length: Any, length: Any) -> Any:
    """The same of numbers, or of arrays of them: the first border behind the shortest header."""
    fixed = _LOCAL.size + name_length + 20 * (length >= _LIMIT32) + 5
    return -(-(header_offset + fixed) // ALIGNMENT) * ALIGNMENT


class Entries(NamedTuple):
    """Entries of a pack in a row, as columns: some numbers for each of a million, and no object."""

    names: Sequence[str]
    offsets: I64
    lengths: I64
    crcs: npt.NDArray[np.uint32]

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Entries:
        """The columns of entries."""
        names, numbers = list[str](), array("q")
        for name, *rest in entries:
            names.append(name)
            numbers.extend(rest)
        columns = np.frombuffer(numbers, dtype=np.int64).reshape(-1, 3).T if names else _NONE
        return cls(names, columns[0], columns[1], columns[2].astype(np.uint32))

    def each(self) -> Iterator[Entry]:
        """The entries as objects, one after the other."""
        numbers = (column.tolist() for column in (self.offsets, self.lengths, self.crcs))
        return map(Entry, self.names, *numbers)

    def part(self, first: int, last: int) -> Entries:
        """The entries `first` to `last` - 1."""
        span = slice(first, last)
        return Entries(self.names[span], self.offsets[span], self.lengths[span], self.crcs[span])

    def headers(self, header_offset: int) -> I64:
        """Where their local headers begin, that of the first at `header_offset`."""
        return np.concatenate([[header_offset], (self.offsets + self.lengths)[:-1]])


def data_offsets(name_lengths: I64, lengths: I64) -> I64:
    """Where the data of each entry begins (`data_offset`); the first entry begins a pack."""
    # All data begins on a border, so that the way from one to the next does not depend on where.
    return np.cumsum(_border_after(np.append(0, lengths[:-1]), name_lengths, lengths))


def local_headers(entries: Entries, header_offset: int) -> list[bytes]:
    """All bytes between the data of some entries, the first header being at `header_offset`."""
    names, offsets, lengths, crcs = entries
    big = lengths >= _LIMIT32
    blank = _LOCAL.pack(b"PK\3\4", 0, 0, 0, 0, _DATE, 0, 0, 0, 0, 0)
    rows = np.empty(len(names), _LOCAL_ROW)
    rows["f0"], rows["f2"] = blank[:4], blank[6:14]
    rows["f1"] = np.where(big, 45, 20)
    rows["f3"] = crcs
    rows["f4"] = rows["f5"] = np.minimum(lengths, _LIMIT32)
    rows["f6"] = list(map(len, names))
    rows["f7"] = offsets - entries.headers(header_offset) - rows["f6"] - _LOCAL.size
    extras = list(map(_PADDINGS.__getitem__, (rows["f7"] - 4 - 20 * big).tolist()))
    for number in np.flatnonzero(big).tolist():
        length = int(lengths[number])
        extras[number] = struct.pack("<HHQQ", _ZIP64_ID, 16, length, length) + extras[number]
    fixed = rows.view(f"V{_LOCAL.size}").tolist()
    return [a + name.encode("ascii") + b for a, name, b in zip(fixed, names, extras, strict=True)]


def local_header(entry: Entry, header_offset: int) -> bytes:
    """All bytes from the header's offset up to the data."""
    return local_headers(Entries.of([entry]), header_offset)[0]


def put_checksums(memory: memoryview, headers: I64, crcs: npt.NDArray[np.uint32]) -> None:
    """Put the checksums of entries into local headers that begin at these places of some memory."""
    _put_at(memory, headers + _LOCAL_CRC, crcs)


def _put_at(memory: memoryview | bytearray, places: I64, crcs: npt.NDArray[np.uint32]) -> None:
    digits = crcs.astype("<u4").view(np.uint8).reshape(-1, 4)
    np.frombuffer(memory, np.uint8)[places[:, None] + np.arange(4)] = digits


# No entry needs more.
_PADDINGS = [
    struct.pack("<HH", _ALIGN_ID, length) + bytes(length) for length in range(ALIGNMENT + 1)
]


def directory(entries: Entries) -> bytes:
    """The central directory and the end records of a pack with these entries."""
    parts = centrals(entries)
    header = int(entries.offsets[-1] + entries.lengths[-1]) if entries.names else 0
    return bytes(parts) + end_records(len(entries.names), len(parts), header)


def centrals(entries: Entries) -> bytearray:
    """The directory of a pack with these entries, without its end."""
    parts, header = bytearray(), 0
    for first in range(0, len(entries.names), _AT_ONCE):
        some = entries.part(first, first + _AT_ONCE)
        parts += _centrals(some, header)
        header = int(some.offsets[-1] + some.lengths[-1])
    return parts


class Directory:
    """The directory of a pack that is written again and again with other checksums: all but these
    is made once.
    """

    def __init__(self, entries: Entries) -> None:
        name_lengths = np.fromiter(map(len, entries.names), np.int64, len(entries.names))
        lengths = _CENTRAL.size + name_lengths + _extras(entries.lengths, entries.headers(0))
        self._places = np.cumsum(lengths) - lengths + _CENTRAL_CRC
        self._centrals = centrals(entries)

    def with_checksums(
        self, crcs: npt.NDArray[np.uint32], last: Entry, header_offset: int
    ) -> bytes:
        """The directory where the entries have these checksums, and one more comes last."""
        parts = self._centrals.copy()
        _put_at(parts, self._places, crcs)
        parts += _centrals(Entries.of([last]), header_offset)
        return bytes(parts) + end_records(len(crcs) + 1, len(parts), last.offset + last.length)


def directory_length(name_bytes: int, lengths: I64, headers: I64, offset: int) -> int:
    """The length of a `directory` that begins at `offset`, of entries whose names have so many
    bytes in all, with these lengths and header offsets.
    """
    size = name_bytes + len(lengths) * _CENTRAL.size + int(np.sum(_extras(lengths, headers)))
    return size + len(end_records(len(lengths), size, offset))


def _extras(lengths: I64, headers: I64) -> I64:
    """The bytes that each entry of a directory takes for numbers beyond 32 bits."""
    large, far = lengths >= _LIMIT32, headers >= _LIMIT32
    extras: I64 = 4 * (large | far) + 16 * large + 8 * far
    return extras


def _centrals(entries: Entries, header_offset: int) -> bytes:
    names, _, lengths, crcs = entries
    headers = entries.headers(header_offset)
    large, far = lengths >= _LIMIT32, headers >= _LIMIT32
    blank = _CENTRAL.pack(b"PK\1\2", _MADE_BY, 0, 0, 0, 0, _DATE, *[0] * 8, _MODE, 0)
    rows = np.empty(len(names), _CENTRAL_ROW)
    rows["f0"], rows["f2"], rows["f8"] = blank[:6], blank[8:16], blank[32:42]
    rows["f1"] = np.where(large | far, 45, 20)
    rows["f3"] = crcs
    rows["f4"] = rows["f5"] = np.minimum(lengths, _LIMIT32)
    rows["f6"] = list(map(len, names))
    rows["f7"] = _extras(lengths, headers)
    rows["f9"] = np.minimum(headers, _LIMIT32)
    extras = [b""] * len(names)
    for number in np.flatnonzero(large | far).tolist():
        length, header = int(lengths[number]), int(headers[number])
        numbers = [length, length] * bool(large[number]) + [header] * bool(far[number])
        said = struct.pack(f"<{len(numbers)}Q", *numbers)
        extras[number] = struct.pack("<HH", _ZIP64_ID, len(said)) + said
    fixed = rows.view(f"V{_CENTRAL.size}").tolist()
    named = zip(fixed, names, extras, strict=True)
    return b"".join([part for a, name, b in named for part in (a, name.encode("ascii"), b)])


def end_records(count: int, size: int, offset: int) -> bytes:
    end = b""
    if count >= _LIMIT16 or size >= _LIMIT32 or offset >= _LIMIT32:
        end = _END64.pack(b"PK\6\6", 44, _MADE_BY, 45, 0, 0, count, count, size, offset)
        end += _LOCATOR.pack(b"PK\6\7", 0, offset + size, 1)
    count16 = min(count, _LIMIT16)
    return end + _END.pack(
        b"PK\5\6", 0, 0, count16, count16, min(size, _LIMIT32), min(offset, _LIMIT32), 0
    )


def directory_extent(tail: bytes, size: int, where: str) -> tuple[int, int]:
    """(offset, length) of the central directory and end records, from the last bytes of a pack
    of `size` bytes.
    """
    if len(tail) < _END.size or tail[-_END.size : -_END.size + 4] != b"PK\5\6":
        raise CorruptionError(
            "the pack has no end record: truncated, or no pack", where=where, value=f"{size} bytes"
        )
    offset = _END.unpack(tail[-_END.size :])[6]
    locator = tail[-_END.size - _LOCATOR.size : -_END.size]
    if locator[:4] == b"PK\6\7":
        end64 = tail[-END_BYTES : -END_BYTES + _END64.size]
        if len(end64) != _END64.size or end64[:4] != b"PK\6\6":
            raise CorruptionError("the pack's zip64 end record is damaged", where=where)
        offset = _END64.unpack(end64)[9]
    if not 0 <= offset <= size - _END.size:
        raise CorruptionError("the pack's directory lies outside of it", where=where, value=offset)
    return offset, size - offset


def find_record(tail: bytes, size: int, where: str) -> Entry:
    """The record's entry, which is the last in the directory that ends with `tail`."""
    matches = list(_RECORD_NAME.finditer(tail))
    start = matches[-1].start() - _CENTRAL.size if matches else -1
    if start < 0 or tail[start : start + 4] != b"PK\1\2":
        raise CorruptionError("the pack's directory does not name its record", where=where)
    name = matches[-1].group().decode("ascii")
    fields = _CENTRAL.unpack(tail[start : start + _CENTRAL.size])
    crc, length, extra_length, header = fields[7], fields[8], fields[11], fields[16]
    if header == _LIMIT32 and extra_length == 12:
        extra = tail[matches[-1].end() : matches[-1].end() + 12]
        header = struct.unpack("<Q", extra[4:])[0] if len(extra) == 12 else size
    offset = data_offset(name, length, header)
    if offset + length > size:
        raise CorruptionError("the pack's record lies outside of it", where=where, value=offset)
    after = matches[-1].end() + extra_length
    start, _ = directory_extent(tail[-END_BYTES:], size, where)
    # The record is the last entry: the directory begins where it ends, and behind the last
    # central record there are only the end records.
    if start != offset + length or len(tail) - after not in (_END.size, END_BYTES):
        raise CorruptionError(
            "the pack does not end with its record, directory and end record", where=where
        )
    return Entry(name, offset, length, crc)
