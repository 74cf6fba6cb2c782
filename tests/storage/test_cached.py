"""Bytes that a file lends from the page cache: only while nobody can cut the file."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptkit.errors import CorruptionError
from ckptkit.storage import LocalStore
from ckptkit.storage.local import LocalSource

MB = 1 << 20
DATA = memoryview(os.urandom(8 * MB + 1000))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "a"
    found.write_bytes(DATA)
    if not os.major(found.stat().st_dev):
        pytest.skip("a file system without a device, such as one on a network, lends nothing")
    with found.open("rb") as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError:
            pytest.skip("this system gives no leases")
    return found


@pytest.fixture
def source(path: Path) -> Iterator[LocalSource]:
    with LocalStore(path.parent).open("a") as opened:
        yield opened


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 1), (0, len(DATA)), (4095, 2), (4096, 4096), (12_345, 3 * MB + 7), (len(DATA) - 1, 1)],
)
def test_what_is_lent_is_what_the_file_has(source: LocalSource, offset: int, length: int) -> None:
    for _ in range(2):
        with source.lend(offset, length) as memory:
            assert memory == DATA[offset : offset + length]
            assert memory.readonly
            del memory


def test_nobody_opens_for_writing_or_cuts_what_is_lent(path: Path, source: LocalSource) -> None:
    flags = os.O_NONBLOCK  # to be refused at once instead of waiting
    with source.lend(0, MB) as memory:
        for change in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
            with pytest.raises(BlockingIOError):
                os.open(path, change | flags)
        assert memory == DATA[:MB]
        del memory
    os.close(os.open(path, os.O_WRONLY | flags))


def test_while_a_writer_waits_no_more_is_lent(path: Path, source: LocalSource) -> None:
    with source.lend(0, MB) as memory, source.lend(MB, MB) as beside:
        assert (memory, beside) == (DATA[:MB], DATA[MB : 2 * MB])
        with pytest.raises(BlockingIOError):
            os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        with source.lend(2 * MB, MB) as late:
            assert late is None
        del memory, beside
    writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    with source.lend(0, MB) as memory:
        assert memory is None, "somebody may cut it"
    os.close(writer)
    with source.lend(0, MB) as memory:
        assert memory == DATA[:MB]
        del memory


def test_a_block_that_fails_gives_back(path: Path, source: LocalSource) -> None:
    with pytest.raises(ZeroDivisionError), source.lend(0, MB):
        raise ZeroDivisionError
    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))


@pytest.mark.parametrize("left", [0, 100, MB, 2 * MB - 1])
def test_a_file_that_was_cut_lends_nothing_beyond_its_end(
    path: Path, source: LocalSource, left: int
) -> None:
    with source.lend(0, 4 * MB) as memory:
        assert memory is not None
        del memory
    os.truncate(path, left)
    with source.lend(MB, MB) as memory:
        assert memory is None
    with pytest.raises(CorruptionError, match=f"ends at byte {max(left, MB)}"):
        source.read_into(MB, memoryview(bytearray(MB)))


def test_what_is_not_in_the_cache_is_not_lent(path: Path, source: LocalSource) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with source.lend(4 * MB, MB) as memory:
        assert memory is None
    buffer = bytearray(MB)
    source.read_into(4 * MB, memoryview(buffer))
    assert buffer == DATA[4 * MB : 5 * MB]


def test_what_was_lent_is_no_memory_of_the_process(source: LocalSource) -> None:
    def mapped_files() -> int:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssFile"))

    before = mapped_files()
    for offset in range(0, 8 * MB, MB):
        with source.lend(offset, MB) as memory:
            assert memory is not None
            del memory
    assert mapped_files() - before < 4 * MB


def test_a_file_replaced_by_another_lends_what_was_opened(path: Path, source: LocalSource) -> None:
    other = path.with_name("b")
    other.write_bytes(bytes(len(DATA)))
    other.replace(path)
    with source.lend(100, MB) as memory:
        assert memory == DATA[100 : 100 + MB]
        del memory
