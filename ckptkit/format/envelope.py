"""What records and manifests have in common: kind, version, and a checksum at the end (FORMAT
section 6).
"""

from __future__ import annotations

from typing import Any

import msgpack
from isal import isal_zlib

from ckptkit.errors import CorruptionError, FormatError, VersionError
from ckptkit.format.leaves import unpack

VERSION = 1
MAX_DOCUMENT_BYTES = 1 << 32

_CRC_BYTES = 5  # 0xCE and four bytes: a msgpack uint32 of fixed width


def seal(kind: str, fields: dict[str, Any]) -> bytes:
    """One msgpack map: format and version first, the CRC of everything before it last."""
    document = {"format": kind, "version": VERSION, **fields, "crc32": 0}
    body: bytes = msgpack.packb(document)[:-1] + b"\xce"
    return body + int(isal_zlib.crc32(body)).to_bytes(4, "big")


def unseal(kind: str, data: bytes, where: str) -> dict[str, Any]:
    """The fields of a document whose checksum, kind and version are right."""
    if len(data) < _CRC_BYTES + 1 or data[-_CRC_BYTES] != 0xCE:
        raise CorruptionError(
            f"{len(data)} bytes that do not end in a checksum: truncated, or no {kind}",
            where=where,
            hint="`ckpt rebuild STEP` makes a lost manifest again from the packs",
        )
    stored = int.from_bytes(data[-4:], "big")
    actual = isal_zlib.crc32(memoryview(data)[:-4])
    if stored != actual:
        raise CorruptionError(
            f"the checksum is {actual:08x}, written was {stored:08x}",
            where=where,
            hint="`ckpt rebuild STEP` makes a lost manifest again from the packs",
        )
    document = unpack(data, where)
    if not isinstance(document, dict):
        raise FormatError("not a map", where=where)
    _check_version(kind, document, where)
    return document


def _check_version(kind: str, document: dict[str, Any], where: str) -> None:
    keys = list(document)
    if keys[:1] != ["format"] or document["format"] != kind:
        raise FormatError(f"not a {kind}", where=where, value=document.get("format"))
    if keys[-1] != "crc32":
        raise FormatError("the last key is not the checksum", where=where, value=keys[-1])
    version = document.pop("version", None)
    if type(version) is not int or version < 1:
        raise FormatError("no usable version number", where=where, value=version)
    if version > VERSION:
        raise VersionError(
            f"format version {version}, this ckptkit reads up to {VERSION}",
            where=where,
            hint="pip install --upgrade ckptkit",
        )
    del document["format"], document["crc32"]
