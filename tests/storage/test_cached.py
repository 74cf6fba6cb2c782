"""Bytes that a file lends: from the page cache only while nobody can cut it, or read past it."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckptkit.errors import CorruptionError, StorageError
from ckptkit.storage import LocalStore
from ckptkit.storage.base.buffers import PAGE, address_of, default_pool
from ckptkit.storage.base.disk import LocalSource
from tests.storage.page_cache import forget

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


@contextmanager
def leased_for_a_while(path: Path) -> Iterator[None]:
    """Somebody who gives the file back once another one wants it, but not at once."""
    holder = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(holder, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        later = threading.Timer(0.2, fcntl.fcntl, (holder, fcntl.F_SETLEASE, fcntl.F_UNLCK))
        later.start()
        yield
        later.join()
    finally:
        os.close(holder)


def test_a_file_that_another_has_leased_is_waited_for(path: Path) -> None:
    store = LocalStore(path.parent)
    with leased_for_a_while(path):
        assert store.read("a", 5, 100) == DATA[5:105]
    with leased_for_a_while(path):
        store.sync(["a"])


LOCKED = """
import ctypes, sys
from ckptkit.storage import LocalStore

if ctypes.CDLL(None).mlockall(2):  # what is mapped from now on
    raise SystemExit("may not")
with LocalStore(sys.argv[1]).open("a") as source, source.lend(0, 1 << 20) as memory:
    print(len(memory))
    del memory
"""


def test_a_process_whose_memory_is_locked_is_lent_it_too(path: Path) -> None:
    command = [sys.executable, "-c", LOCKED, str(path.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.stderr == "may not\n":
        pytest.skip("this system lets nobody lock memory")
    assert (done.returncode, done.stdout) == (0, f"{MB}\n"), done.stderr


def test_a_lease_that_the_system_took_back_is_told(path: Path, source: LocalSource) -> None:
    def take_back() -> None:
        with source.lend(0, MB):
            # As the system does where a writer has waited for 45 s.
            fcntl.fcntl(source._file.fileno(), fcntl.F_SETLEASE, fcntl.F_UNLCK)

    with pytest.raises(StorageError) as caught:
        take_back()
    assert caught.value.where == str(path)
    assert "read it again" in caught.value.hint
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
    forget(path)
    with source.lend(4 * MB, MB) as memory:
        assert memory is None
    buffer = bytearray(MB)
    source.read_into(4 * MB, memoryview(buffer))
    assert buffer == DATA[4 * MB : 5 * MB]


def test_who_asks_again_is_told_that_it_is_at_hand(path: Path, source: LocalSource) -> None:
    assert all(source.is_at_hand(place) for place in (0, 4 * MB, len(DATA) - 1))
    forget(path)
    for place in (0, 4 * MB, len(DATA) - 1):
        assert not source.is_at_hand(place)
        assert source.is_at_hand(place)


def test_what_a_device_brings_at_once_was_not_at_hand(
    path: Path, source: LocalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget(path)
    monkeypatch.setattr(os, "preadv", lambda *_: 1)
    assert not source.is_at_hand(4 * MB)


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 0), (0, 1), (0, len(DATA)), (4095, 2), (4096, 4096), (12_345, 3 * MB + 7), (len(DATA), 0)],
)
def test_what_is_read_past_the_cache_is_what_the_file_has(
    path: Path, source: LocalSource, offset: int, length: int
) -> None:
    forget(path)
    for _ in range(2):
        with source.lend(offset, length, past_cache=True) as memory:
            assert memory == DATA[offset : offset + length]
            del memory
    assert not source.is_at_hand(2 * MB), "it does not go through the cache"


def test_what_was_just_written_is_read_past_the_cache(path: Path, source: LocalSource) -> None:
    with path.open("r+b") as file:
        file.seek(MB)
        file.write(b"anew")
        file.flush()
        with source.lend(MB - 1, 6, past_cache=True) as memory:
            assert memory is not None
            assert bytes(memory) == b"".join([DATA[MB - 1 : MB], b"anew", DATA[MB + 4 : MB + 5]])
            del memory


def test_memory_to_read_into_past_the_cache_is_used_again(source: LocalSource) -> None:
    pool, found = default_pool(), set()
    pool.clear()
    for offset in (0, 5000, MB):
        with source.lend(offset, 4 * MB, past_cache=True) as memory:
            assert memory is not None
            found.add(address_of(memory) // PAGE)
            del memory
    assert len(found) == 1


@pytest.mark.parametrize("left", [0, 100, MB, 2 * MB - 1])
def test_a_file_that_was_cut_gives_nothing_past_the_cache(
    path: Path, source: LocalSource, left: int
) -> None:
    os.truncate(path, left)
    for offset, length in ((MB, MB), (len(DATA) - 1, 2)):
        with source.lend(offset, length, past_cache=True) as memory:
            assert memory is None
    with pytest.raises(CorruptionError, match=f"ends at byte {max(left, MB)}"):
        source.fetch(MB, MB)


@pytest.mark.parametrize("refused", ["open", "preadv"])
def test_where_the_system_refuses_nothing_is_lent(
    source: LocalSource, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    plain: Any = getattr(os, refused)

    def refuse(*args: Any) -> Any:
        flags = args[1] if refused == "open" else fcntl.fcntl(args[0], fcntl.F_GETFL)
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain(*args)

    monkeypatch.setattr(os, refused, refuse)
    for _ in range(2):
        with source.lend(12_345, MB, past_cache=True) as memory:
            assert memory is None
    assert source.fetch(12_345, MB) == DATA[12_345 : 12_345 + MB]


def test_a_device_that_gives_less_at_a_time_is_asked_again(
    source: LocalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, into, at: plain(file, [into[0][:8192]], at))
    with source.lend(12_345, 100_000, past_cache=True) as memory:
        assert memory == DATA[12_345:112_345]
        del memory


def test_a_file_in_memory_is_at_hand() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        (Path(folder) / "a").write_bytes(DATA)
        with LocalStore(folder).open("a") as source:
            assert source.is_at_hand(0)


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
