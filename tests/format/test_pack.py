from __future__ import annotations

import io
import shutil
import struct
import subprocess
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import CorruptionError
from ckptkit.format.pack import (
    ALIGNMENT,
    END_BYTES,
    Directory,
    Entries,
    Entry,
    data_offset,
    data_offsets,
    directory,
    directory_extent,
    directory_length,
    find_record,
    local_header,
    local_headers,
    put_checksums,
    record_name,
)

FILES = [
    ("zarr.json", b"{}"),
    ("model/a/zarr.json", b"{...}" * 60),
    ("model/a/c/0/0", bytes(range(256)) * 5),
    ("model/empty/c", b""),
    (record_name(3), b"record" * 40),
]


def entries_of(files: list[tuple[str, bytes]]) -> list[Entry]:
    entries, position = [], 0
    for name, data in files:
        offset = data_offset(name, len(data), position)
        entries.append(Entry(name, offset, len(data), zlib.crc32(data)))
        position = offset + len(data)
    return entries


def pack_of(files: list[tuple[str, bytes]]) -> bytes:
    pack = bytearray()
    entries = entries_of(files)
    for entry, (_, data) in zip(entries, files, strict=True):
        pack += local_header(entry, len(pack)) + data
    return bytes(pack) + directory(Entries.of(entries))


names = st.text("abcz09._-%/", min_size=1, max_size=200).filter(lambda n: n[0] != "/")
contents = st.lists(
    st.tuples(names, st.binary(max_size=300)), max_size=12, unique_by=lambda it: it[0]
)


@given(contents)
def test_any_zip_reader_finds_each_entry_at_its_offset(files: list[tuple[str, bytes]]) -> None:
    pack = pack_of(files)
    with zipfile.ZipFile(io.BytesIO(pack)) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == [name for name, _ in files]
        for entry, (name, data) in zip(entries_of(files), files, strict=True):
            info = archive.getinfo(name)
            assert archive.read(name) == data
            assert pack[entry.offset : entry.offset + entry.length] == data
            assert entry.offset % ALIGNMENT == 0
            assert entry.offset - info.header_offset < 30 + len(name) + 5 + ALIGNMENT
            assert (info.compress_type, info.CRC) == (zipfile.ZIP_STORED, entry.crc)
            assert info.date_time == (1980, 1, 1, 0, 0, 0)
            assert info.external_attr == 0o100644 << 16


def test_unzip_accepts_every_byte(tmp_path: Path) -> None:
    if shutil.which("unzip") is None:
        pytest.skip("unzip is not installed")
    path = tmp_path / "rank-00003.zip"
    path.write_bytes(pack_of(FILES))
    done = subprocess.run(["unzip", "-t", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower()


def test_headers_are_to_the_byte_what_the_format_says() -> None:
    entry = Entry("model/a/c/0", 64, 10, 0x11223344)
    fixed = bytes.fromhex("504b0304 1400 0000 0000 0000 2100 44332211 0a000000 0a000000")
    padding = 64 - 30 - 11 - 4
    extra = struct.pack("<HH", 0xD935, padding) + bytes(padding)
    assert local_header(entry, 0) == (
        fixed + struct.pack("<HH", 11, len(extra)) + b"model/a/c/0" + extra
    )
    central = bytes.fromhex(
        "504b0102 1e03 1400 0000 0000 0000 2100 44332211 0a000000 0a000000"
        "0b00 0000 0000 0000 0000 0000a481 00000000"
    )
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 1, 1, 46 + 11, 74, 0)
    assert directory(Entries.of([entry])) == central + b"model/a/c/0" + end


@given(st.integers(0, 2**40), st.integers(1, 1024), st.sampled_from([0, 5, 2**32 - 2, 2**32 - 1]))
def test_data_begins_at_the_first_aligned_place_behind_the_header(
    header: int, name_length: int, length: int
) -> None:
    name = "n" * name_length
    offset = data_offset(name, length, header)
    least = header + 30 + name_length + 5 + (20 if length >= 2**32 - 1 else 0)
    assert offset % ALIGNMENT == 0
    assert least <= offset < least + ALIGNMENT
    assert len(local_header(Entry(name, offset, length, 0), header)) == offset - header


def find(pack: bytes, tail: int = 400) -> Entry:
    return find_record(pack[-tail:], len(pack), "rank-00003.zip")


def test_the_record_is_found_from_the_last_bytes_alone() -> None:
    pack = pack_of(FILES)
    entry = find(pack)
    assert entry == entries_of(FILES)[-1]
    assert find(pack, END_BYTES + 256) == entry
    start, length = directory_extent(pack[-END_BYTES:], len(pack), "p")
    assert pack[start:] == directory(Entries.of(entries_of(FILES)))
    assert start + length == len(pack)


@pytest.mark.parametrize("rank", [0, 99_999, 100_000, 2**24 - 1])
def test_the_record_of_any_rank_is_found(rank: int) -> None:
    files = [("model/a/c/0", b"x" * 99), (record_name(rank), b"r" * 10)]
    assert find(pack_of(files)).name == record_name(rank)


def test_every_truncation_of_a_pack_is_seen_at_its_end() -> None:
    pack = pack_of(FILES)
    accepted = []
    for length in range(len(pack)):
        try:
            find(pack[:length])
        except CorruptionError:
            pass
        else:
            accepted.append(length - len(pack))
        with pytest.raises(CorruptionError):
            directory_extent(pack[max(0, length - END_BYTES) : length], length, "p")
    assert not accepted


def test_bytes_behind_a_pack_are_seen() -> None:
    with pytest.raises(CorruptionError):
        find(pack_of(FILES) + b"\0")


@given(st.integers(0, 399), st.integers(1, 255))
def test_a_flipped_byte_at_the_end_is_corruption_or_leaves_the_record_as_it_is(
    at: int, mask: int
) -> None:
    pack = bytearray(pack_of(FILES))
    pack[-1 - at] ^= mask
    try:
        entry = find(bytes(pack))
    except CorruptionError:
        return
    # What the tail says must still lie inside; the record's own checksums find the rest.
    assert 0 <= entry.offset <= entry.offset + entry.length <= len(pack)


@given(st.binary(max_size=400))
def test_any_bytes_are_no_pack(tail: bytes) -> None:
    for tried in (
        tail,
        tail + b"PK\5\6" + b"\0" * 18,
        tail + b"PK\6\7" + b"\xff" * 16 + pack_of([]),
    ):
        with pytest.raises(CorruptionError):
            find_record(tried, len(tried), "p")


def test_a_record_that_lies_outside_of_its_pack_is_refused() -> None:
    entry = Entry(record_name(0), 64, 2**31, 0)
    closing = directory(Entries.of([entry]))
    with pytest.raises(CorruptionError):
        find_record(closing, len(closing) + 1000, "p")


def test_a_pack_without_a_record_is_refused() -> None:
    with pytest.raises(CorruptionError, match="record"):
        find(pack_of(FILES[:-1]))
    with pytest.raises(CorruptionError):
        find(pack_of([FILES[-1], FILES[0]])), "the record is the last entry"


_SIZES = st.one_of(st.integers(0, 5000), st.integers((1 << 32) - 2, (1 << 32) + 1))


@given(st.lists(st.tuples(names, _SIZES, st.integers(0, (1 << 32) - 1)), max_size=12))
def test_entries_in_a_row_are_laid_out_as_one_by_one(
    given_: list[tuple[str, int, int]],
) -> None:
    entries, headers, position = list[Entry](), list[int](), 0
    for name, length, crc in given_:
        headers.append(position)
        entries.append(Entry(name, data_offset(name, length, position), length, crc))
        position = entries[-1].offset + length
    columns = Entries.of(entries)
    lengths = np.array([len(name) for name in columns.names], dtype=np.int64)
    assert data_offsets(lengths, columns.lengths).tolist() == columns.offsets.tolist()
    for first in (0, len(entries) // 2):
        begin = headers[first] if headers else 0
        one_by_one = list(map(local_header, entries[first:], headers[first:]))
        assert local_headers(columns.part(first, len(entries)), begin) == one_by_one
    closing = directory_length(
        int(lengths.sum()), columns.lengths, np.array(headers, dtype=np.int64), position
    )
    assert closing == len(directory(columns))


@given(st.lists(st.tuples(names, _SIZES, st.integers(0, (1 << 32) - 1)), min_size=1, max_size=12))
def test_headers_that_are_kept_take_other_checksums_to_the_byte(
    given_: list[tuple[str, int, int]],
) -> None:
    entries, headers, position = list[Entry](), list[int](), 0
    for name, length, crc in given_:
        headers.append(position)
        entries.append(Entry(name, data_offset(name, length, position), length, crc))
        position = entries[-1].offset + length
    *some, last = entries
    before = Entries.of(entry._replace(crc=7) for entry in some)
    crcs = Entries.of(some).crcs
    closing = Directory(before).with_checksums(crcs, last, headers[-1])
    assert closing == directory(Entries.of(entries))
    # Next to each other in memory, as nothing else is between them there.
    kept = local_headers(before, 0)
    starts = np.cumsum([0, *map(len, kept)])[:-1]
    memory = bytearray().join(kept)
    put_checksums(memoryview(memory), starts, crcs)
    assert memory == b"".join(map(local_header, some, headers[:-1]))
