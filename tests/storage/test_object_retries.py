"""What a server or a network does wrong for a while is tried again, and said."""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ckptkit.errors import (
    AccessError,
    AlreadyExistsError,
    CorruptionError,
    NoSpaceError,
    StorageError,
)
from ckptkit.storage import Store, open_store
from ckptkit.storage.base.store import Sink
from ckptkit.storage.objects.errors import Transient
from ckptkit.storage.objects.server import retried
from tests.servers.faults import (
    Answer,
    Delay,
    Fault,
    FlipUpload,
    Hold,
    LoseAnswer,
    ResetDownload,
    ResetUpload,
    SlowDownload,
    Stall,
    StallDownload,
    Truncate,
    kind,
)
from tests.servers.proxy import Proxy
from tests.servers.s3_server import Bucket

PIECE = 5 << 20


@pytest.fixture
def store(bucket: Bucket, proxy: Proxy, engine: str) -> Store:
    more = {"engine": engine, "timeout": 1, "deadline": 20, "part_size": PIECE}
    return open_store(f"{bucket.url}/run", bucket.through(proxy.endpoint, **more))


def direct(bucket: Bucket) -> Store:
    return open_store(f"{bucket.url}/run", bucket.options)


def by_engine(values: Sequence[object], both: Sequence[object]) -> list[Any]:
    """Engines with values: every run has all by obstore, and those of `both` by fsspec too."""
    return [
        pytest.param(engine, value, id=f"{engine}-{value!r}", marks=marks)
        for engine in ("obstore", "fsspec")
        for value in values
        for marks in [() if engine == "obstore" or value in both else pytest.mark.long]
    ]


PASSING: list[Fault] = [
    Answer(503),
    Answer(429),
    Answer(500),
    LoseAnswer(),
    ResetDownload(1000),
    Truncate(1000),
    Stall(),
    StallDownload(1000),
]


@pytest.mark.parametrize("fault", PASSING, ids=repr)
def test_a_read_survives(
    fault: Fault, store: Store, bucket: Bucket, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    data = random.Random(1).randbytes(100_000)
    direct(bucket).put("a", data)
    proxy.inject(fault, kind("GET"), times=2)
    with caplog.at_level(logging.WARNING, "ckptkit"):
        assert store.read("a", 10, 90_000) == data[10:90_010]
    # aiohttp asks a second time by itself where a connection ends without an answer.
    assert len(proxy.met) == 2
    assert caplog.records
    assert "reading" in caplog.text
    assert f"{bucket.url}/run/a" in caplog.text
    assert "attempt 2" in caplog.text


def test_an_answer_may_take_as_long_as_it_keeps_coming(
    bucket: Bucket, proxy: Proxy, engine: str
) -> None:
    data = random.Random(8).randbytes(100_000)
    direct(bucket).put("a", data)
    more = {"engine": engine, "timeout": 2, "deadline": 20}
    store = open_store(f"{bucket.url}/run", bucket.through(proxy.endpoint, **more))
    proxy.inject(SlowDownload(len(data) // 12, seconds=0.25), kind("GET"), times=None)
    assert store.read("a", 0, len(data)) == data
    assert store.read_whole("a", len(data)) == data
    assert len(proxy.met) == 2, "nothing was asked for twice"


def test_an_answer_that_comes_too_slowly_is_asked_for_again(
    bucket: Bucket,
    proxy: Proxy,
    engine: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("ckptkit.storage.base.address.READ_RATE", 1e9)
    data = random.Random(9).randbytes(100_000)
    direct(bucket).put("a", data)
    more = {"engine": engine, "timeout": 1, "deadline": 20}
    store = open_store(f"{bucket.url}/run", bucket.through(proxy.endpoint, **more))
    proxy.inject(SlowDownload(10), kind("GET"))
    with caplog.at_level(logging.WARNING, "ckptkit"):
        assert store.read("a", 0, len(data)) == data
    assert "no answer in time); attempt 2" in caplog.text


def test_a_stalled_answer_is_given_up_long_before_a_slow_one(
    bucket: Bucket, proxy: Proxy, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptkit.storage.base.address.READ_RATE", 1e6)
    direct(bucket).put("a", bytes(100_000))
    # More than `timeout` until it is known to be slow, and less until it stalls.
    for fault in (StallDownload(1000), Stall()):
        more = {"engine": engine, "timeout": 1, "deadline": 15}
        store = open_store(f"{bucket.url}/run", bucket.through(proxy.endpoint, **more))
        # As long as a slow one may take there would be no time for a second attempt.
        proxy.inject(fault, kind("GET"))
        assert store.read("a", 0, 100_000) == bytes(100_000)
    assert len(proxy.met) == 2


def test_google_s_answers_too_may_be_slow_and_must_not_stall(
    gcs_bucket: Bucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = random.Random(10).randbytes(100_000)
    direct(gcs_bucket).put("a", data)
    with Proxy(str(gcs_bucket.options["endpoint"])) as proxy:
        slow = gcs_bucket.through(proxy.endpoint, timeout=3, deadline=60)
        proxy.inject(SlowDownload(len(data) // 12, seconds=0.4), kind("GET"))
        assert open_store(f"{gcs_bucket.url}/run", slow).read("a", 0, len(data)) == data
        assert proxy.counts["GET"] == 1
        monkeypatch.setattr("ckptkit.storage.base.address.READ_RATE", 1e9)
        stalled = gcs_bucket.through(proxy.endpoint, timeout=2, deadline=60)
        proxy.inject(StallDownload(1000), kind("GET"), times=2)
        with caplog.at_level(logging.WARNING, "ckptkit"):
            assert open_store(f"{gcs_bucket.url}/run", stalled).read("a", 0, len(data)) == data
        assert proxy.counts["GET"] == 4
        assert "attempt 3" in caplog.text, "it is ckptkit that asks again"


@pytest.mark.parametrize(
    ("engine", "times"),
    by_engine([1, 2, 3], [2]),
    indirect=["engine"],
)
def test_a_lost_answer_to_a_create_is_resolved_by_reading_back(
    times: int, store: Store, bucket: Bucket, proxy: Proxy
) -> None:
    store.put("first", b"x", exclusive=True)
    proxy.inject(LoseAnswer(), kind("PUT", path="run/a"), times=times)
    store.put("a", b"mine", exclusive=True)
    assert direct(bucket).read("a") == b"mine"


@pytest.mark.parametrize(
    "fault", [Answer(503), ResetUpload(1000), LoseAnswer(), Stall(), FlipUpload(7)], ids=repr
)
@pytest.mark.parametrize(
    ("engine", "exclusive"), by_engine([False, True], [True]), indirect=["engine"]
)
def test_a_put_survives_and_is_made_once(
    fault: Fault, exclusive: bool, store: Store, bucket: Bucket, proxy: Proxy
) -> None:
    data = random.Random(2).randbytes(100_000)
    store.put("first", b"x", exclusive=True)
    proxy.inject(fault, kind("PUT", path="run/a"), times=2)
    store.put("a", data, exclusive=exclusive)
    assert len(proxy.met) == 2
    assert direct(bucket).read("a") == data
    if exclusive:
        with pytest.raises(AlreadyExistsError):
            store.put("a", b"other", exclusive=True)


@pytest.mark.parametrize(
    ("engine", "fault"),
    by_engine(
        [Answer(503), Answer(500), ResetUpload(1000), LoseAnswer(), Stall()],
        [Answer(503), ResetUpload(1000), Stall()],
    ),
    indirect=["engine"],
)
def test_a_part_of_an_upload_survives(
    fault: Fault, store: Store, bucket: Bucket, proxy: Proxy
) -> None:
    data = random.Random(3).randbytes(3 * PIECE + 99)
    proxy.inject(fault, kind("PUT", query="partNumber=2"), times=2)
    sink = store.create("a", [len(data)])
    sink.write(0, memoryview(data))
    sink.finish()
    assert len(proxy.met) == 2
    assert direct(bucket).read("a") == data


@pytest.mark.parametrize(
    ("engine", "fault"),
    by_engine([LoseAnswer(), Answer(500), Stall()], [LoseAnswer(), Stall()]),
    indirect=["engine"],
)
def test_a_lost_answer_to_completing_an_upload_is_resolved_by_looking(
    fault: Fault, store: Store, bucket: Bucket, proxy: Proxy
) -> None:
    data = random.Random(4).randbytes(2 * PIECE)
    proxy.inject(fault, kind("POST", query="uploadId="))
    sink = store.create("a", [len(data)])
    sink.write(0, memoryview(data))
    sink.finish()
    assert len(proxy.met) == 1
    assert direct(bucket).read("a") == data
    assert direct(bucket).leftovers() == []


def test_an_upload_over_an_object_of_its_size_is_taken_for_that_only_where_it_was_completed(
    store: Store, bucket: Bucket, proxy: Proxy
) -> None:
    old, new = (random.Random(seed).randbytes(2 * PIECE) for seed in (5, 6))
    direct(bucket).put("a", old)
    proxy.inject(Answer(403, "QuotaExceeded"), kind("PUT", query="partNumber"), times=None)
    sink = store.create("a", [len(new)], again=True)
    with pytest.raises(NoSpaceError, match="quota"):
        written(sink, new)
    sink.abort()
    proxy.forgive()
    assert direct(bucket).read("a") == old
    proxy.inject(LoseAnswer(), kind("POST", query="uploadId="))
    written(store.create("a", [len(new)], again=True), new)
    assert direct(bucket).read("a") == new


def written(sink: Sink, data: bytes) -> None:
    sink.write(0, memoryview(data))
    sink.finish()


def test_a_part_that_was_damaged_on_its_way_is_never_committed(
    store: Store, bucket: Bucket, proxy: Proxy
) -> None:
    data = random.Random(5).randbytes(2 * PIECE)
    proxy.inject(FlipUpload(1234), kind("PUT", query="partNumber=1"))
    sink = store.create("a", [len(data)])
    sink.write(0, memoryview(data))
    with pytest.raises(CorruptionError, match="other bytes than were sent"):
        sink.finish()
    sink.abort()
    assert direct(bucket).list() == []


def test_an_upload_that_fails_for_good_says_so_and_leaves_nothing(
    store: Store, bucket: Bucket, proxy: Proxy
) -> None:
    proxy.inject(Answer(403), kind("PUT", query="partNumber=2"), times=None)
    sink = store.create("a", [PIECE] * 4)

    def write() -> None:
        for part in range(4):
            sink.write(part, memoryview(bytes(PIECE)))
        sink.finish()

    with pytest.raises(AccessError) as caught:
        write()
    sink.abort()
    assert caught.value.hint
    assert "run/a" in caught.value.where
    assert direct(bucket).list() == direct(bucket).leftovers() == []


def test_the_deadline_bounds_all_attempts(bucket: Bucket, proxy: Proxy, engine: str) -> None:
    more = {"engine": engine, "timeout": 5, "deadline": 0.5}
    store = open_store(bucket.url, bucket.through(proxy.endpoint, **more))
    proxy.inject(Answer(503), times=None)
    calls: list[Callable[[], object]] = [
        lambda: store.read("a", 0, 1),
        lambda: store.put("a", b"x"),
        store.list,
        lambda: store.delete(["a"]),
    ]
    for call in calls:
        began = time.monotonic()
        with pytest.raises(StorageError, match="SlowDown") as caught:
            call()
        assert time.monotonic() - began < 15
        assert "tried" in caught.value.what
        assert "deadline" in caught.value.hint


def test_a_server_that_starts_again_within_seconds_is_waited_for(
    bucket: Bucket, engine: str
) -> None:
    store = open_store(bucket.url, {**bucket.options, "engine": engine})
    store.put("a", b"x")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    back = threading.Timer(1.0, lambda: proxies.append(started(bucket, port)))
    proxies: list[Proxy] = []
    late = open_store(bucket.url, bucket.through(f"http://127.0.0.1:{port}", engine=engine))
    back.start()
    try:
        assert late.read("a") == b"x"
    finally:
        back.join()
        for proxy in proxies:
            proxy.__exit__()


def started(bucket: Bucket, port: int) -> Proxy:
    return Proxy(str(bucket.options["endpoint"]), port).__enter__()


def test_parts_may_take_as_long_as_a_slow_way_up_needs(
    bucket: Bucket, proxy: Proxy, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptkit.storage.base.address.LEAST_RATE", 1e6)
    more = {"engine": engine, "timeout": 0.5, "deadline": 20, "part_size": PIECE}
    store = open_store(bucket.url, bucket.through(proxy.endpoint, **more))
    proxy.inject(Delay(1), kind("PUT"), times=None)
    data = random.Random(6).randbytes(2 * PIECE)
    for key, size in (("several", len(data)), ("one", PIECE)):
        sink = store.create(key, [size])
        sink.write(0, memoryview(data)[:size])
        sink.finish()
    assert len(proxy.met) == 3, "nothing was sent twice"
    assert store.read("several") == data


def test_an_upload_of_which_nothing_is_taken_says_so(
    bucket: Bucket,
    proxy: Proxy,
    engine: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("ckptkit.storage.objects.upload._PATIENCE", 0.05)
    held = Hold()
    proxy.inject(held, kind("PUT", query="partNumber"))
    more = {"engine": engine, "part_size": PIECE}
    store = open_store(bucket.url, bucket.through(proxy.endpoint, **more))
    data = random.Random(7).randbytes(2 * PIECE)
    with caplog.at_level(logging.WARNING, "ckptkit"):
        sink = store.create("a", [len(data)])
        sink.write(0, memoryview(data))
        finishing = threading.Thread(target=sink.finish, daemon=True)
        finishing.start()
        assert held.come.wait(30)
        for _ in range(3000):
            if "taken nothing" in caplog.text:
                break
            time.sleep(0.01)
        held.go.set()
        finishing.join(60)
    assert f"writing of {bucket.url}/a: the server has taken nothing for" in caplog.text
    assert store.read("a") == data


def test_a_last_attempt_that_ends_otherwise_hides_no_reason() -> None:
    told = [Transient("503 SlowDown"), Transient("503 SlowDown"), Transient("late", within=0)]

    def do() -> None:
        raise told.pop(0)

    with pytest.raises(StorageError, match=r"late, before that 503 SlowDown \(tried 3 times"):
        retried(30, "listing", "s3://bucket", do)
