"""How much of an object is in memory while it is sent, and how much of one that is read whole."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ckptkit.checkpoint.workers import share_out
from ckptkit.errors import (
    AlreadyExistsError,
    CkptkitError,
    CorruptionError,
    FormatError,
    StorageError,
)
from ckptkit.storage import open_store
from ckptkit.storage.objects.fsspec import S3fsClient
from ckptkit.storage.objects.upload import UploadWindow
from tests.servers.faults import Hold, kind
from tests.servers.proxy import Proxy
from tests.servers.s3_server import Bucket

MIB = 1 << 20
PIECE = 5 * MIB


@pytest.mark.parametrize(
    ("engine", "pieces"),
    [
        ("obstore", 4),
        pytest.param("obstore", 6, marks=pytest.mark.long),
        ("fsspec", 4),
        ("fsspec", 6),
    ],
    indirect=["engine"],
)
def test_a_sink_keeps_the_memory_that_it_may_have_copies_included(
    pieces: int, bucket: Bucket, proxy: Proxy, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent: set[Any] = set()
    sent: list[int] = []
    take, send = UploadWindow._taken, S3fsClient._call_again

    def taken(window: UploadWindow, number: int) -> Any:
        buffer = take(window, number)
        lent.add(buffer)
        return buffer

    def call(client: S3fsClient, method: str, key: str, **asked: Any) -> Any:
        sent.append(1 if method == "upload_part" else 0)
        return send(client, method, key, **asked)

    monkeypatch.setattr(UploadWindow, "_taken", taken)
    monkeypatch.setattr(S3fsClient, "_call_again", call)
    held = Hold()
    proxy.inject(held, kind("PUT", query="partNumber"), times=None)
    options = {"engine": engine, "part_size": PIECE}
    store = open_store(bucket.url, bucket.through(proxy.endpoint, **options))
    sink = store.create("a", [PIECE] * 10, memory=pieces * PIECE)
    writing = threading.Thread(target=written, args=(sink, 10), daemon=True)
    writing.start()
    assert held.come.wait(30)
    writing.join(1.0)
    assert writing.is_alive()
    used = len(lent) + sum(sent)
    held.go.set()
    writing.join(60)
    assert not writing.is_alive()
    assert 2 <= used <= pieces
    assert store.size("a") == 10 * PIECE


def test_one_that_is_sent_in_pieces_never_touches_what_is_there(
    bucket: Bucket, proxy: Proxy, engine: str
) -> None:
    options = {"engine": engine, "part_size": PIECE}
    store = open_store(bucket.url, bucket.through(proxy.endpoint, **options))
    store.put("a", b"precious")
    sink = store.create("a", [PIECE] * 3)
    with pytest.raises(AlreadyExistsError):
        written(sink, 3)
    sink.abort()
    assert store.read("a") == b"precious"
    assert not [head for head in proxy.requests if "uploads" in head.query]


@pytest.mark.parametrize("memory", [None, 2 * PIECE])
@pytest.mark.parametrize(
    "extents", [[4 * MIB] + [1000] * 60, [4 * MIB, 1, 12 * MIB, 1, 4 * MIB, 7 * MIB] + [1] * 30]
)
def test_uneven_parts_wait_for_nobody(
    extents: list[int], memory: int | None, bucket: Bucket, engine: str
) -> None:
    options = {**bucket.options, "engine": engine, "part_size": PIECE}
    store = open_store(bucket.url, options)
    sink = store.create("a", extents, memory=memory)
    parts = [bytes([number]) * extent for number, extent in enumerate(extents)]

    def write() -> None:
        for number, part in enumerate(parts):
            sink.write(number, memoryview(part))
        sink.finish()

    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    writing.join(60)
    assert not writing.is_alive()
    assert store.read("a") == b"".join(parts)


def write(sink: Any, part: int, data: bytes) -> None:
    sink.write(part, memoryview(data))


def fill(sink: Any, part: int, data: bytes) -> None:
    with sink.filling(part) as memory:
        memory[:] = data


@pytest.mark.parametrize("put", [write, fill])
def test_a_part_longer_than_all_the_memory_comes_first(
    put: Callable[[Any, int, bytes], None], bucket: Bucket, engine: str
) -> None:
    store = open_store(bucket.url, {**bucket.options, "engine": engine, "part_size": PIECE})
    sink = store.create("a", [22 * MIB, 1], memory=2 * PIECE)
    parts = [random.Random(5).randbytes(22 * MIB), b"x"]

    def all_of_it() -> None:
        for number, part in enumerate(parts):
            put(sink, number, part)
        sink.finish()

    writing = threading.Thread(target=all_of_it, daemon=True)
    writing.start()
    writing.join(60)
    assert not writing.is_alive()
    assert store.read("a") == b"".join(parts)


@pytest.mark.parametrize(
    ("engine", "memory"),
    [
        ("obstore", None),
        ("obstore", 3 * PIECE),
        pytest.param("fsspec", None, marks=pytest.mark.long),
        ("fsspec", 3 * PIECE),
    ],
    indirect=["engine"],
)
def test_what_many_threads_fill_in_place_is_what_is_stored(
    memory: int | None, bucket: Bucket, engine: str
) -> None:
    rng = random.Random(6)
    store = open_store(bucket.url, {**bucket.options, "engine": engine, "part_size": PIECE})
    sizes = [rng.choice([1, 1000, MIB, 3 * MIB, PIECE, 7 * MIB]) for _ in range(24)]
    parts = [rng.randbytes(size) for size in sizes]
    sink = store.create("a", sizes, memory=memory)
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda n: fill(sink, n, parts[n]), range(24)))
    sink.finish()
    assert store.read("a") == b"".join(parts)


def test_of_a_part_that_could_not_be_filled_nothing_is_left(bucket: Bucket, engine: str) -> None:
    store = open_store(bucket.url, {**bucket.options, "engine": engine, "part_size": PIECE})
    for failing in (PIECE, 2 * PIECE):
        sink = store.create("a", [PIECE, PIECE, failing])
        fill(sink, 0, bytes(PIECE))
        with pytest.raises(RuntimeError, match="unreadable"), sink.filling(2):
            raise RuntimeError("unreadable")
        with pytest.raises(StorageError):
            fill(sink, 1, bytes(PIECE))
        sink.abort()
        assert store.list() == []
        assert store.leftovers() == []


def test_a_failure_ends_the_wait_for_a_server_that_takes_nothing(
    bucket: Bucket, proxy: Proxy, engine: str
) -> None:
    held = Hold()
    proxy.inject(held, kind("PUT", query="partNumber"), times=None)
    options = {"engine": engine, "part_size": PIECE}
    store = open_store(bucket.url, bucket.through(proxy.endpoint, **options))
    sink = store.create("a", [PIECE] * 10, memory=(8 if engine == "fsspec" else 4) * PIECE)

    in_hand = threading.Event()

    def put(part: int) -> None:
        # Or the memory would be used up by others that come after it.
        assert part <= 2 or in_hand.wait(30)
        with sink.filling(part):
            if part == 2:
                in_hand.set()
                assert held.come.wait(30)
                raise CorruptionError("damaged", where="the source")

    def all_of_it() -> None:
        with pytest.raises(CorruptionError, match="damaged"):
            share_out(range(10), put, 3)
        failed.set()

    failed = threading.Event()
    threading.Thread(target=all_of_it, daemon=True).start()
    assert failed.wait(30)
    held.go.set()
    sink.abort()
    assert store.list() == []


def test_aborting_ends_the_wait_for_memory(bucket: Bucket, proxy: Proxy, engine: str) -> None:
    held = Hold()
    proxy.inject(held, kind("PUT", query="partNumber"), times=None)
    options = {"engine": engine, "part_size": PIECE}
    store = open_store(bucket.url, bucket.through(proxy.endpoint, **options))
    sink = store.create("a", [PIECE] * 10, memory=2 * PIECE)
    outcome: list[BaseException] = []

    def write() -> None:
        try:
            written(sink, 10)
        except CkptkitError as error:
            outcome.append(error)

    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    assert held.come.wait(30)
    aborting = threading.Thread(target=sink.abort, daemon=True)
    aborting.start()
    writing.join(30)
    assert not writing.is_alive()
    assert outcome
    held.go.set()
    aborting.join(60)
    assert not aborting.is_alive()
    assert store.list() == []


def test_nothing_is_left_of_an_upload_that_is_completed_while_it_is_aborted(
    bucket: Bucket, proxy: Proxy, engine: str
) -> None:
    held = Hold()
    proxy.inject(held, kind("POST", query="uploadId="))
    options = {"engine": engine, "part_size": PIECE}
    store = open_store(bucket.url, bucket.through(proxy.endpoint, **options))
    sink = store.create("a", [PIECE] * 2)
    main = threading.main_thread().ident
    assert main == threading.get_ident()

    def interrupt() -> None:
        assert held.come.wait(30)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        written(sink, 2)
    threading.Timer(0.5, held.go.set).start()
    sink.abort()
    assert held.go.is_set(), "it waited for the upload"
    assert store.list() == store.leftovers() == []


def written(sink: Any, parts: int) -> None:
    for part in range(parts):
        sink.write(part, memoryview(bytes(PIECE)))
    sink.finish()


class _Noting(MemoryFileSystem):  # type: ignore[misc] # fsspec ships no types
    """Notes how many bytes it gave."""

    protocol = "noting"
    store: ClassVar[dict[str, object]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    given: ClassVar[list[int]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("noting://").strip("/")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """A range."""
        data: bytes = super().cat_file(path, start, end)
        self.given.append(len(data))
        return data


def test_of_an_object_that_is_too_large_little_is_fetched() -> None:
    fsspec.register_implementation("noting", _Noting, clobber=True)
    store = open_store("noting://host/folder")
    data = bytes(range(256)) * (80 << 10)
    store.put("large", data)
    with pytest.raises(FormatError, match="at most 10485760 can be right"):
        store.read_whole("large", 10 * MIB)
    assert sum(_Noting.given) <= 8 * MIB
    for most in (20 * MIB, 1 << 32):
        assert store.read_whole("large", most) == data
    with pytest.raises(FormatError, match="at most 100 can be right"):
        store.read_whole("large", 100)
    store.put("exact", bytes(8 * MIB))
    assert len(store.read_whole("exact", 1 << 32)) == 8 * MIB
