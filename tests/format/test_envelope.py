from __future__ import annotations

import zlib
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import CorruptionError, FormatError, VersionError
from ckptkit.format.encoding import seal, unseal
from ckptkit.format.manifest import Manifest
from tests.format import samples
from tests.format.samples import extension, plain, sealed

KIND = "ckptkit-manifest"
FIELDS = {"step": 7, "items": [1, 2, b"\0" * 50], "text": "é"}


def with_crc(body: bytes) -> bytes:
    return body + b"\xce" + zlib.crc32(body + b"\xce").to_bytes(4, "big")


def test_a_document_is_one_plain_msgpack_map_with_its_kind_first_and_its_checksum_last() -> None:
    data = seal(KIND, FIELDS)
    found = msgpack.unpackb(data)
    assert list(found) == ["format", "version", "step", "items", "text", "crc32"]
    assert (found["format"], found["version"]) == (KIND, 1)
    assert found["crc32"] == zlib.crc32(data[:-4])
    assert data[-5] == 0xCE
    assert unseal(KIND, data, "m") == FIELDS


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_flipped_byte_anywhere_is_corruption(at: int, mask: int) -> None:
    data = bytearray(samples.manifest().to_bytes())
    data[at % len(data)] ^= mask
    with pytest.raises(CorruptionError) as error:
        Manifest.from_bytes(bytes(data), "run/step/manifest.msgpack")
    assert "run/step/manifest.msgpack" in str(error.value)
    assert error.value.hint


def test_every_flipped_bit_of_a_small_document_is_corruption() -> None:
    good = seal(KIND, FIELDS)
    for bit in range(8 * len(good)):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptionError):
            unseal(KIND, bytes(data), "m")


def test_every_truncation_is_corruption() -> None:
    good = samples.manifest().to_bytes()
    for length in range(len(good)):
        with pytest.raises(CorruptionError):
            Manifest.from_bytes(good[:length], "m")


@pytest.mark.parametrize("data", [b"", b"\xce", b"\0" * 5, b"\xce\0\0\0\0", b"PK\5\6" + b"\0" * 18])
def test_what_is_no_document_at_all_is_corruption(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        unseal(KIND, data, "m")


@pytest.mark.parametrize("document", [[1, 2], "text", 5, None], ids=str)
def test_a_document_that_is_no_map_is_refused(document: object) -> None:
    with pytest.raises(FormatError):
        unseal(KIND, with_crc(msgpack.packb([document, 0])[:-1]), "m")


def test_fields_may_be_left_packed() -> None:
    packed = FIELDS | {"items": msgpack.packb(FIELDS["items"])}
    data = seal(KIND, packed, ["items"])
    assert data == seal(KIND, FIELDS)
    assert unseal(KIND, data, "m", ["items"]) == packed


@pytest.mark.parametrize(
    ("entries", "count"),
    [
        (b"\xa1a\x01\xa1a\x02", 5),
        (b"\xa1a\x01", 5),
        (b"\xa1a\x01", 3),
        (b"\xa1a\xc1", 4),
        (b"\xa1a\xdd\xff\xff\xff\xff", 4),
        (b"\xa1a\xc6\xff\xff\xff\xff", 4),
        (b"\xa1a" + b"\x91" * 5000 + b"\x01", 4),
        (b"\x91\x01\x01", 4),
        (b"\x01\x01", 4),
        (b"\xa1\xff\x01", 4),
        (b"\xa1b\xa1\xff", 4),
        (b"\xa1b\x82\xa1c\x01\xa1c\x02", 4),
    ],
)
def test_a_broken_map_is_refused_around_packed_fields(entries: bytes, count: int) -> None:
    head = b"".join(map(msgpack.packb, ("format", KIND, "version", 1)))
    data = with_crc(bytes([0x80 | count]) + head + entries + msgpack.packb("crc32"))
    with pytest.raises(FormatError):
        unseal(KIND, data, "m", ["a"])


def test_a_record_is_not_taken_for_a_manifest() -> None:
    with pytest.raises(FormatError, match="not a ckptkit-manifest") as error:
        Manifest.from_bytes(samples.record().to_bytes(), "m")
    assert "ckptkit-rank" in str(error.value)


def test_a_newer_version_is_refused_by_its_number() -> None:
    newer = plain(samples.manifest().to_bytes()) | {"version": 2}
    with pytest.raises(VersionError, match="version 2") as error:
        Manifest.from_bytes(sealed(newer), "m")
    assert "upgrade" in error.value.hint


@pytest.mark.parametrize(
    "news",
    [
        {"arrays": {"other": "form"}},
        {"sparse": extension(9, 1)},
        {"sparse": {extension(9, 1): 1}},
        {"deep": {1.5: None}},
    ],
    ids=str,
)
def test_the_version_is_looked_at_before_anything_that_only_the_newer_one_has(
    news: dict[str, object],
) -> None:
    with pytest.raises(VersionError, match="version 2"):
        unseal(KIND, sealed({"format": KIND, "version": 2, **news}), "m")


@pytest.mark.parametrize("version", [0, -1, "1", 1.0, True, None, [1], extension(2, 1)], ids=str)
def test_a_version_that_is_none_is_refused(version: object) -> None:
    with pytest.raises(FormatError, match="version"):
        unseal(KIND, sealed({"format": KIND, "version": version}), "m")


def test_the_first_two_keys_and_the_last_are_fixed() -> None:
    with pytest.raises(FormatError):
        unseal(KIND, sealed({"version": 1, "format": KIND}), "m")
    with pytest.raises(FormatError):
        unseal(KIND, sealed({"format": KIND, "step": 7, "version": 1}), "m")
    with pytest.raises(FormatError):
        unseal(KIND, sealed({"format": KIND}), "m")
    body = msgpack.packb({"format": KIND, "version": 1, "crc32": 5, "last": 0})[:-1]
    with pytest.raises(FormatError, match="last key"):
        unseal(KIND, with_crc(body), "m")


def test_a_checksum_that_is_not_the_uint32_at_the_end_is_refused() -> None:
    body = msgpack.packb({"format": KIND, "version": 1, "crc32": b"12345"})[:-5]
    with pytest.raises(FormatError):
        unseal(KIND, with_crc(body), "m")
    array = msgpack.ExtType(3, msgpack.packb(["uint8", [5], b"\xce\0\0\0\0"]))
    body = msgpack.packb({"format": KIND, "version": 1, "crc32": array})[:-5]
    with pytest.raises(FormatError, match="last key"):
        unseal(KIND, with_crc(body), "m")


def test_a_kind_of_a_hostile_type_is_a_format_error() -> None:
    kinds: list[Any] = [
        extension(3, ["int8", [2], b"ab"]),
        msgpack.ExtType(2, b"\1" * 3000),
        None,
        1,
    ]
    for kind in kinds:
        with pytest.raises(FormatError):
            unseal(KIND, sealed({"format": kind, "version": 1}), "m")
