"""Local files: direct writes of parts that end anywhere, and of what happens without them."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import AlreadyExistsError, NotFoundError, StorageError, UsageError
from ckptkit.storage import BufferPool, LocalStore
from ckptkit.storage.base.buffers import address_of
from ckptkit.storage.base.disk import BLOCK, DirectFile

Pwritev = Callable[[int, Sequence[memoryview], int], int]

sizes = st.one_of(
    st.integers(0, 200),
    st.integers(0, 5 * BLOCK),
    st.builds(lambda n, d: max(0, n * BLOCK + d), st.integers(0, 4), st.integers(-2, 2)),
)


@pytest.fixture(params=["disk", "shared memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def placed(pool: BufferPool, data: bytes, address: int) -> memoryview:
    """A copy of the data whose address equals `address` modulo the block size."""
    view = pool.take(len(data), congruent_to=address).view
    view[:] = data
    return view


def spy_on_pwritev(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int], int]]:
    """Every call as the addresses and sizes of its pieces (modulo a block) and its offset."""
    calls = []
    real = os.pwritev

    def spy(descriptor: int, pieces: Sequence[memoryview], offset: int) -> int:
        addresses = [address_of(piece) % BLOCK for piece in pieces]
        calls.append((addresses, [piece.nbytes for piece in pieces], offset))
        return real(descriptor, pieces, offset)

    monkeypatch.setattr(os, "pwritev", spy)
    return calls


def is_direct_here(path: Path) -> bool:
    file = DirectFile(path / "probe")
    file.close()
    return file.direct


@pytest.mark.parametrize("base", [None, "/dev/shm"])
@given(extents=st.lists(sizes, max_size=12), congruent=st.booleans(), data=st.data())
def test_any_extents_in_any_order_from_any_address_give_the_same_bytes(
    base: str | None, extents: list[int], congruent: bool, data: st.DataObject
) -> None:
    pool = BufferPool()
    contents = [os.urandom(size) for size in extents]
    offsets = [sum(extents[:number]) for number in range(len(extents))]
    shift = 0 if congruent else data.draw(st.integers(1, BLOCK - 1))
    views = [placed(pool, c, o + shift) for c, o in zip(contents, offsets, strict=True)]
    order = data.draw(st.permutations(range(len(extents))))
    with tempfile.TemporaryDirectory(dir=base) as name:
        sink = LocalStore(name).create("a/b", extents)
        with ThreadPoolExecutor(data.draw(st.sampled_from([1, 4]))) as threads:
            list(threads.map(lambda number: sink.write(number, views[number]), order))
        sink.finish()
        assert Path(name, "a/b").read_bytes() == b"".join(contents)
        assert [path.name for path in Path(name, "a").iterdir()] == ["b"]


def test_a_part_goes_straight_from_its_buffer_with_the_blocks_at_its_borders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_direct_here(tmp_path):
        pytest.skip("this file system has no direct writes")
    calls = spy_on_pwritev(monkeypatch)
    extents = [100, 3 * BLOCK, 50]
    content = [os.urandom(size) for size in extents]
    sink = LocalStore(tmp_path).create("a", extents)
    sink.write(0, memoryview(content[0]))
    sink.write(2, memoryview(content[2]))
    assert calls == []
    sink.write(1, placed(BufferPool(), content[1], 100))
    assert calls == [([0, 0, 0], [BLOCK, 2 * BLOCK, BLOCK], 0)]
    sink.finish()
    assert (tmp_path / "a").read_bytes() == b"".join(content)


def test_a_buffer_at_an_unsuitable_address_is_copied_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_direct_here(tmp_path):
        pytest.skip("this file system has no direct writes")
    calls = spy_on_pwritev(monkeypatch)
    content = os.urandom(10 << 20)
    sink = LocalStore(tmp_path).create("a", [len(content)])
    sink.write(0, placed(BufferPool(), content, 8))
    sink.finish()
    assert all(address == 0 for addresses, _, _ in calls for address in addresses)
    assert (tmp_path / "a").read_bytes() == content


@pytest.mark.parametrize("total", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 7])
def test_the_padding_of_the_last_block_is_cut_off(folder: Path, total: int) -> None:
    content = os.urandom(total)
    sink = LocalStore(folder).create("a", [total])
    sink.write(0, memoryview(content))
    sink.finish()
    assert (folder / "a").read_bytes() == content


def test_one_block_may_be_shared_by_very_many_parts(folder: Path) -> None:
    content = os.urandom(3 * BLOCK)
    sink = LocalStore(folder).create("a", [1] * len(content))
    with ThreadPoolExecutor(4) as threads:
        writes = range(len(content) - 1, -1, -1)
        list(threads.map(lambda n: sink.write(n, memoryview(content)[n : n + 1]), writes))
    sink.finish()
    assert (folder / "a").read_bytes() == content


def refuse_direct_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, command: int, flags: int = 0) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct writes here")
        return flags

    monkeypatch.setattr("ckptkit.storage.base.disk.fcntl.fcntl", refuse)


def refuse_direct_writes(monkeypatch: pytest.MonkeyPatch, after: int) -> list[int]:
    """Direct writes fail from call number `after` on; buffered ones do not."""
    real, calls = os.pwritev, []

    def pwritev(descriptor: int, pieces: Sequence[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) > after and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct writes here")
        return real(descriptor, pieces, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    return calls


@pytest.mark.parametrize("refused", ["the flag", "the first write", "the third write"])
def test_where_direct_writes_are_refused_the_page_cache_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    if refused == "the flag":
        refuse_direct_flag(monkeypatch)
    else:
        refuse_direct_writes(monkeypatch, after=0 if refused == "the first write" else 2)
    extents = [5000, 12_000, 1, 70_000, 4096, 33]
    content = [os.urandom(size) for size in extents]
    sink = LocalStore(tmp_path).create("a", extents)
    for number in (3, 0, 5, 1, 4, 2):
        sink.write(number, memoryview(content[number]))
    sink.finish()
    assert (tmp_path / "a").read_bytes() == b"".join(content)


@pytest.mark.parametrize("step", [BLOCK, BLOCK + 512, 3 * BLOCK - 1])
def test_short_writes_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    real = os.pwritev

    def short(descriptor: int, pieces: Sequence[memoryview], offset: int) -> int:
        whole = b"".join(pieces)
        pool = BufferPool()
        count = real(descriptor, [placed(pool, whole[: step // 512 * 512], 0)], offset)
        return min(count, step)

    monkeypatch.setattr(os, "pwritev", short)
    extents = [100, 50_000, 9]
    content = [os.urandom(size) for size in extents]
    sink = LocalStore(tmp_path).create("a", extents)
    for number in (1, 0, 2):
        sink.write(number, memoryview(content[number]))
    sink.finish()
    assert (tmp_path / "a").read_bytes() == b"".join(content)


def test_a_disk_that_takes_no_whole_block_is_an_error_not_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_direct_here(tmp_path):
        pytest.skip("this file system has no direct writes")
    monkeypatch.setattr(os, "pwritev", lambda *_: 100)
    sink = LocalStore(tmp_path).create("a", [BLOCK])
    with pytest.raises(StorageError, match="100 bytes"):
        sink.write(0, memoryview(bytes(BLOCK)))
    sink.abort()


def test_a_failed_write_spoils_the_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    sink = LocalStore(tmp_path).create("data/a", [BLOCK, BLOCK])
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", broken)
        with pytest.raises(StorageError) as caught:
            sink.write(0, memoryview(bytes(BLOCK)))
    assert caught.value.where == str(tmp_path / "data/a")
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(StorageError, match="an earlier write"):
        sink.write(1, memoryview(bytes(BLOCK)))
    with pytest.raises(UsageError):
        sink.finish()
    sink.abort()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ending", ["finish", "abort"])
def test_both_endings_wait_for_a_write_that_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    real, begun, go_on = os.pwritev, threading.Event(), threading.Event()

    def slow(descriptor: int, pieces: Sequence[memoryview], offset: int) -> int:
        begun.set()
        assert go_on.wait(10)
        return real(descriptor, pieces, offset)

    monkeypatch.setattr(os, "pwritev", slow)
    sink = LocalStore(tmp_path).create("a", [BLOCK])
    with ThreadPoolExecutor(2) as threads:
        write = threads.submit(sink.write, 0, memoryview(bytes(BLOCK)))
        assert begun.wait(10)
        end = threads.submit(getattr(sink, ending))
        with pytest.raises(TimeoutError):
            end.result(0.1)
        go_on.set()
        write.result(10)
        end.result(10)
    assert (tmp_path / "a").exists() == (ending == "finish")


def test_abort_keeps_its_hands_off_a_file_that_was_there_first(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"precious")
    with pytest.raises(AlreadyExistsError) as caught:
        LocalStore(tmp_path).create("a", [3])
    assert caught.value.where == str(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"precious"


def test_an_unfinished_file_is_listed_so_that_it_can_be_deleted(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    sink = store.create("data/id/pack", [10 * BLOCK])
    assert [entry.key for entry in store.list()] == ["data/id/pack"]
    store.delete(["data/id/pack"])
    assert store.children() == []
    sink.abort()


def test_a_file_that_lost_its_name_is_not_finished_and_abort_spares_its_successor(
    tmp_path: Path,
) -> None:
    store = LocalStore(tmp_path)
    sink = store.create("data/pack", [])
    store.put("data/pack", b"another writer's")
    with pytest.raises(NotFoundError, match="deleted or replaced"):
        sink.finish()
    sink.abort()
    assert store.read("data/pack") == b"another writer's"


def test_a_folder_in_which_another_writes_again_stays_when_it_is_emptied(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("step/a", b"x")
    sink = store.create("step/b", [3], again=True)
    (tmp_path / "step/.tmp-0123456789abcdef").write_bytes(b"left by a crash")
    store.delete(["step/a"])
    sink.write(0, memoryview(b"new"))
    sink.finish()
    assert store.read("step/b") == b"new"
    store.create("step/c", [3], again=True).abort()
    store.delete(["step/b"])
    assert store.children() == []


def test_writers_that_give_up_do_not_trip_those_that_begin(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)

    def create_and_abort(number: int) -> None:
        for attempt in range(30):
            sink = store.create(f"deep/down/data/{number}-{attempt}", [10])
            store.put(f"deep/down/meta/{number}-{attempt}", b"x", exclusive=True)
            sink.abort()
            store.delete([f"deep/down/meta/{number}-{attempt}"])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(create_and_abort, range(8)))
    assert store.children() == []
