"""Zip files as torch writes them: which bytes of the file each member is.

Not `zipfile`: members are never read through it, and its own objects take as long to make as all
else here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from ckptkit.errors import FormatError
from ckptkit.foreign.folder import Folder

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_LIMIT16, _LIMIT32 = 0xFFFF, 0xFFFFFFFF
_ZIP64 = 1
# Read at once: the directory of most files is in it. A comment of 64 KiB fits, too.
_TAIL_BYTES = 1 << 17
_HINT = "it was cut short or changed; copy it again"


@dataclass(frozen=True, slots=True)
class Member:
    """One file in a zip file, as its directory has it."""

    name: str
    header: int
    """Where its local header begins."""
    size: int
    is_plain: bool
    """Neither compressed nor encrypted."""


def directory_of(folder: Folder, key: str) -> dict[str, Member]:
    """The members of a zip file by name."""
    where, size = folder.where(key), folder.size(key)
    tail = folder.read(key, max(0, size - _TAIL_BYTES))
    begins = size - len(tail)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or at + _END.size > len(tail):
        raise FormatError("not a whole zip file: its directory is missing", where=where, hint=_HINT)
    *_, count, length, start, _ = _END.unpack_from(tail, at)
    end = begins + at
    if count == _LIMIT16 or _LIMIT32 in (length, start):
        locator = tail[max(0, at - _LOCATOR.size) : at]
        if len(locator) < _LOCATOR.size or locator[:4] != b"PK\6\7":
            raise FormatError("the zip file has no zip64 directory", where=where, hint=_HINT)
        _, _, end, _ = _LOCATOR.unpack(locator)
        # A file that was put before it moves no offset here: torch writes none like that.
        raw = folder.read(key, end, _END64.size)
        mark, *_, count, length, start = _END64.unpack(raw)
        if mark != b"PK\6\6":
            raise FormatError("the zip file has no zip64 directory", where=where, hint=_HINT)
    if start + length > end or count * _CENTRAL.size > length:
        raise FormatError("the directory of the zip file is not in it", where=where, hint=_HINT)
    inside = start >= begins
    data = tail[start - begins : start - begins + length] if inside else None
    return _members(folder.read(key, start, length) if data is None else data, count, where)


def _members(data: bytes, count: int, where: str) -> dict[str, Member]:
    found: dict[str, Member] = {}
    at = 0
    for _ in range(count):
        if at + _CENTRAL.size > len(data):
            raise FormatError("the directory of the zip file ends early", where=where, hint=_HINT)
        mark, _, _, flags, method, *_, packed, size, names, extras, comment, _, _, _, header = (
            _CENTRAL.unpack_from(data, at)
        )
        after = at + _CENTRAL.size + names + extras + comment
        raw = data[at + _CENTRAL.size : at + _CENTRAL.size + names]
        if mark != b"PK\1\2" or after > len(data):
            raise FormatError("not a directory of a zip file", where=where, hint=_HINT)
        name = raw.decode("utf-8", "replace")
        if _LIMIT32 in (packed, size, header):
            begin = at + _CENTRAL.size + names
            wide = _wide(data[begin : begin + extras], where)
            size = wide.pop(0) if size == _LIMIT32 and wide else size
            packed = wide.pop(0) if packed == _LIMIT32 and wide else packed
            header = wide.pop(0) if header == _LIMIT32 and wide else header
        if name in found:
            raise FormatError("a member is twice in the zip file", where=where, value=name)
        is_plain = method == 0 and not flags & 1 and packed == size
        found[name] = Member(name, header, size, is_plain)
        at = after
    return found


def _wide(extras: bytes, where: str) -> list[int]:
    """The numbers of 64 bits among the extra fields of a member."""
    at = 0
    while at + 4 <= len(extras):
        kind, length = struct.unpack_from("<HH", extras, at)
        if kind == _ZIP64 and length % 8 == 0 and at + 4 + length <= len(extras):
            return list(struct.unpack_from(f"<{length // 8}Q", extras, at + 4))
        if kind == _ZIP64:  # with the number of a disk behind
            length -= length % 8
            return list(struct.unpack_from(f"<{length // 8}Q", extras[: at + 4 + length], at + 4))
        at += 4 + length
    raise FormatError("a large member of the zip file does not say its size", where=where)


def offsets_of(folder: Folder, key: str, members: Iterable[Member]) -> dict[str, int]:
    """Where the bytes of each member begin, which only the header in front of them says."""
    wanted = sorted(members, key=lambda member: member.header)
    where, size = folder.where(key), folder.size(key)
    for member in wanted:
        if not member.is_plain:
            raise FormatError(
                "the member is compressed or encrypted, which torch.save never does",
                where=f"{where}: {member.name}",
                hint="unpack the file, and zip it again without compression (zip -0)",
            )
    heads = folder.read_many(
        key, [(each.header, _LOCAL.size + len(each.name.encode())) for each in wanted]
    )
    found: dict[str, int] = {}
    for member, head in zip(wanted, heads, strict=True):
        begin = local_end(head, member.name)
        if begin is None or member.header + begin + member.size > size:
            raise FormatError(
                "the zip file has no such member where its directory says",
                where=f"{where}: {member.name}",
                hint=_HINT,
            )
        found[member.name] = member.header + begin
    return found


def local_end(head: bytes, name: str | None = None) -> int | None:
    """How long the local header is that some bytes begin with; None where it is none, or not that
    of a member of this name that is stored as it is.
    """
    if len(head) < _LOCAL.size:
        return None
    mark, _, flags, method, *_, names, extras = _LOCAL.unpack_from(head)
    if mark != b"PK\3\4" or method or flags & 1:
        return None
    if name is not None and head[_LOCAL.size : _LOCAL.size + names] != name.encode():
        return None
    return int(_LOCAL.size + names + extras)


def local_name(head: bytes) -> bytes:
    """The name in a local header that `local_end` knows."""
    length = int(_LOCAL.unpack_from(head)[-2])
    return head[_LOCAL.size : _LOCAL.size + length]
