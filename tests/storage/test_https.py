"""Over https: bodies are not hashed; who compares them by a CRC-64 is found out, and then does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckptkit.errors import CkptkitError
from ckptkit.storage import open_store
from ckptkit.storage.base.address import SMALLEST_PART
from ckptkit.storage.objects import server
from ckptkit.storage.objects.store import ObjectStore
from tests.faults.trouble import PART, Trouble
from tests.servers.certificate import Certificate
from tests.servers.faults import Answer, FlipUpload, kind
from tests.servers.http_wire import Head
from tests.servers.proxy import Proxy
from tests.servers.s3_server import Bucket

SIZE = 2 * SMALLEST_PART
DATA = memoryview(b"x" * SIZE)
SCRATCH = kind("PUT", path=".tmp-")
CRC, HASH = "x-amz-checksum-crc64nvme", "x-amz-content-sha256"


@pytest.fixture(autouse=True)
def _asking_early(monkeypatch: pytest.MonkeyPatch, certificate: Certificate) -> None:
    monkeypatch.setattr(server, "WORTH_ASKING", SIZE)
    for name, value in certificate.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def checking(swift_bucket: Bucket, certificate: Certificate) -> Iterator[Proxy]:
    """Where https ends, before Swift: it compares all that a head announces."""
    with Proxy(str(swift_bucket.options["endpoint"]), tls=certificate.context) as proxy:
        yield proxy


@pytest.fixture
def ignoring(bucket: Bucket, certificate: Certificate) -> Iterator[Proxy]:
    """Where https ends, before moto: it compares nothing."""
    with Proxy(str(bucket.options["endpoint"]), tls=certificate.context) as proxy:
        yield proxy


def opened(bucket: Bucket, endpoint: str, **more: object) -> ObjectStore:
    pace = {"part_size": SMALLEST_PART, "timeout": 20.0, "deadline": 30.0}
    store = open_store(f"{bucket.url}/folder", bucket.through(endpoint, **pace, **more))
    assert isinstance(store, ObjectStore)
    return store


def save(store: ObjectStore, key: str) -> None:
    sink = store.create(key, [SIZE])
    try:
        sink.write(0, DATA)
        sink.finish()
    finally:
        sink.abort()


def asked(proxy: Proxy) -> list[Head]:
    return [head for head in proxy.requests if SCRATCH(head)]


def sent(proxy: Proxy) -> list[Head]:
    return [head for head in proxy.requests if PART(head)]


def test_one_that_compares_is_asked_once_and_told_the_crc_of_all_that_it_is_sent(
    swift_bucket: Bucket, checking: Proxy
) -> None:
    store = opened(swift_bucket, checking.endpoint)
    for key in ("a", "b"):
        save(store, key)
        assert store.read(key) == DATA
    store.put("c", b"small")
    assert len(asked(checking)) == 2  # another body, which it refuses, and the right one
    assert [entry.key for entry in store.list()] == ["a", "b", "c"]
    assert store.leftovers() == []
    assert len(sent(checking)) == 4
    for head in [*sent(checking), checking.requests[-1]]:
        if head.method == "PUT":
            assert head.get(CRC)
            assert head.get(HASH) == "UNSIGNED-PAYLOAD"


def test_what_is_damaged_where_https_ends_is_found_by_one_that_compares(
    swift_bucket: Bucket, checking: Proxy
) -> None:
    store = opened(swift_bucket, checking.endpoint)
    Trouble(FlipUpload(1000), PART).make(checking)
    with pytest.raises(CkptkitError, match="BadDigest"):
        save(store, "a")
    assert checking.met
    assert store.list() == []
    save(store, "a")
    assert store.read("a") == DATA


def test_one_that_compares_nothing_is_asked_once_and_told_nothing(
    bucket: Bucket, ignoring: Proxy
) -> None:
    store = opened(bucket, ignoring.endpoint)
    for key in ("a", "b"):
        save(store, key)
        assert store.read(key) == DATA
    assert len(asked(ignoring)) == 1
    assert [entry.key for entry in store.list()] == ["a", "b"]
    assert store.leftovers() == []
    for head in sent(ignoring):
        assert not head.get(CRC)
        assert head.get(HASH) == "UNSIGNED-PAYLOAD"


@pytest.mark.parametrize(
    "answer",
    [Answer(400, "BadDigest"), Answer(501, "NotImplemented"), Answer(403)],
    ids=["refuses any", "cannot", "may not"],
)
def test_one_that_does_not_know_the_crc_is_told_nothing(
    bucket: Bucket, ignoring: Proxy, answer: Answer
) -> None:
    ignoring.inject(answer, SCRATCH, times=None)
    store = opened(bucket, ignoring.endpoint)
    save(store, "a")
    save(store, "b")
    assert store.read("b") == DATA
    assert not any(head.get(CRC) for head in sent(ignoring))


def test_s3fs_sends_no_crc_and_asks_for_none(bucket: Bucket, ignoring: Proxy) -> None:
    store = opened(bucket, ignoring.endpoint, engine="fsspec")
    save(store, "a")
    assert store.read("a") == DATA
    assert asked(ignoring) == []
