"""Where zip needs its 64-bit forms: many entries really written, large ones in sparse files."""

from __future__ import annotations

import io
import os
import shutil
import struct
import subprocess
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptkit.format.pack import (
    END_BYTES,
    Entries,
    Entry,
    data_offset,
    directory,
    directory_extent,
    find_record,
    local_header,
    record_name,
)

GIB = 1 << 30
SMALL = b"small"


def laid_out(sizes: list[tuple[str, int]], crc: int = 0) -> list[Entry]:
    entries, position = [], 0
    for name, length in sizes:
        entries.append(Entry(name, data_offset(name, length, position), length, crc))
        position = entries[-1].offset + length
    return entries


@pytest.mark.parametrize("count", [65_534, 65_535, 65_536, 70_000])
def test_more_entries_than_16_bits_count_are_all_read_back(count: int) -> None:
    names = [f"a/c/{index}" for index in range(count - 1)] + [record_name(0)]
    entries = laid_out([(name, 1) for name in names], zlib.crc32(b"x"))
    pack = bytearray()
    for entry in entries:
        pack += local_header(entry, len(pack)) + b"x"
    closing = directory(Entries.of(entries))
    assert (b"PK\6\6" in closing[-END_BYTES:]) == (count >= 65_535)
    pack += closing
    with zipfile.ZipFile(io.BytesIO(pack)) as archive:
        assert archive.namelist() == names
        assert archive.read(names[-2]) == b"x"
    tail = bytes(pack[-400:])
    assert find_record(tail, len(pack), "p") == entries[-1]
    assert directory_extent(tail, len(pack), "p") == (len(pack) - len(closing), len(closing))


class Sparse:
    """A pack in a file of which only headers and small entries take space."""

    def __init__(self, path: Path, sizes: list[tuple[str, int]]) -> None:
        self.path = path
        entries, header = [], 0
        with path.open("wb") as file:
            for empty in laid_out(sizes):
                data = SMALL if empty.length == len(SMALL) else b""
                entry = Entry(empty.name, empty.offset, empty.length, zlib.crc32(data))
                file.seek(header)
                file.write(local_header(entry, header) + data)
                header = entry.offset + entry.length
                entries.append(entry)
            file.seek(header)
            file.write(directory(Entries.of(entries)))
        self.entries = entries
        self.directory = header
        self.size = path.stat().st_size


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    probe = tmp_path / "probe"
    with probe.open("wb") as file:
        file.truncate(20 * GIB)
    if probe.stat().st_blocks * 512 > GIB or shutil.disk_usage(tmp_path).free < GIB:
        pytest.skip("the file system has no sparse files")
    probe.unlink()
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


CASES = {
    "a size just below": [("a/c/0", 4 * GIB - 2), ("a/c/1", 5), (record_name(0), 5)],
    "a size at the limit": [("a/c/0", 4 * GIB - 1), ("a/c/1", 5), (record_name(0), 5)],
    "a size beyond": [("a/c/0", 5), ("a/c/1", 5 * GIB), ("a/c/2", 5), (record_name(0), 5)],
    "a size and an offset beyond": [("a/c/0", 5 * GIB), ("a/c/1", 6 * GIB), (record_name(0), 5)],
    "offsets beyond": [(f"a/c/{i}", 3 * GIB) for i in range(3)] + [(record_name(0), 5)],
}


@pytest.mark.parametrize("case", CASES)
def test_sizes_and_offsets_beyond_4_gib_are_read_back(folder: Path, case: str) -> None:
    pack = Sparse(folder / "rank-00000.zip", CASES[case])
    with zipfile.ZipFile(pack.path) as archive:
        assert archive.start_dir == pack.directory
        header = 0
        for entry, info in zip(pack.entries, archive.infolist(), strict=True):
            assert (info.filename, info.file_size) == (entry.name, entry.length)
            assert (info.compress_size, info.CRC) == (entry.length, entry.crc)
            assert info.header_offset == header
            with archive.open(info) as data:
                at = pack.path.open("rb")
                at.seek(entry.offset)
                assert data.read(5) == at.read(min(5, entry.length))
                at.close()
            header = entry.offset + entry.length
    with pack.path.open("rb") as file:
        file.seek(-400, os.SEEK_END)
        tail = file.read()
    assert find_record(tail, pack.size, "p") == pack.entries[-1]
    assert directory_extent(tail, pack.size, "p") == (pack.directory, pack.size - pack.directory)


def test_unzip_lists_a_pack_beyond_4_gib(folder: Path) -> None:
    if shutil.which("unzip") is None:
        pytest.skip("unzip is not installed")
    pack = Sparse(folder / "rank-00000.zip", CASES["offsets beyond"])
    command = ["unzip", "-p", str(pack.path), record_name(0)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, SMALL, b"")


def test_zip64_fields_are_there_exactly_where_they_are_needed() -> None:
    big, last = laid_out([("a/c/0", 2**32 - 1), (record_name(0), 5)])
    header = local_header(big, 0)
    assert header[4:6] == struct.pack("<H", 45)
    assert header[18:26] == b"\xff" * 8
    assert header[35:55] == struct.pack("<HHQQ", 1, 16, 2**32 - 1, 2**32 - 1)
    assert header[55:57] == struct.pack("<H", 0xD935)
    closing = directory(Entries.of([big, last]))
    first = 46 + len("a/c/0") + 20
    assert closing[46 + 5 : first] == struct.pack("<HHQQ", 1, 16, 2**32 - 1, 2**32 - 1)
    assert closing[42:46] == struct.pack("<I", 0), "the offset of the first header needs no more"
    second = closing[first:-END_BYTES]
    assert second[6:8] == struct.pack("<H", 45)
    assert second[20:28] == struct.pack("<II", 5, 5), "its size needs no more"
    assert second[42:46] == b"\xff" * 4
    assert second[46 + len(last.name) :] == struct.pack("<HHQ", 1, 8, big.offset + big.length)
    size = first + len(second)
    begin = last.offset + last.length
    assert closing[-END_BYTES:] == (
        struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 0x031E, 45, 0, 0, 2, 2, size, begin)
        + struct.pack("<4sIQI", b"PK\6\7", 0, begin + size, 1)
        + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 2, 2, size, 2**32 - 1, 0)
    )
