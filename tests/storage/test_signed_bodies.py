"""Who compares a body with what was sent: the server, or we by its ETag."""

from __future__ import annotations

import pytest

from ckptkit.errors import CkptkitError, CorruptionError
from ckptkit.storage import Store, open_store
from ckptkit.storage.base.address import SMALLEST_PART
from ckptkit.storage.objects import server
from tests.faults.trouble import PART, Trouble
from tests.servers.faults import Answer, FlipUpload, kind
from tests.servers.proxy import Proxy
from tests.servers.s3_server import Bucket

SIZE = 2 * SMALLEST_PART
SCRATCH = kind("PUT", path=".tmp-")


@pytest.fixture
def store(bucket: Bucket, proxy: Proxy, engine: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(server, "WORTH_ASKING", SIZE)
    pace = {"part_size": SMALLEST_PART, "timeout": 5.0, "deadline": 30.0}
    options = bucket.through(proxy.endpoint, engine=engine, **pace)
    return open_store(f"{bucket.url}/folder", options)


def save(store: Store, key: str) -> None:
    sink = store.create(key, [SIZE])
    try:
        sink.write(0, memoryview(b"x" * SIZE))
        sink.finish()
    finally:
        sink.abort()


def test_one_that_compares_nothing_is_asked_once(store: Store, proxy: Proxy) -> None:
    for key in ("a", "b"):
        save(store, key)
    asked = [head for head in proxy.requests if SCRATCH(head)]
    assert len(asked) == 1
    assert store.leftovers() == []
    assert [entry.key for entry in store.list()] == ["a", "b"]


def test_one_that_compares_nothing_is_not_believed(store: Store, proxy: Proxy) -> None:
    save(store, "a")
    Trouble(FlipUpload(1000), PART).make(proxy)
    with pytest.raises(CorruptionError, match="other bytes than were sent"):
        save(store, "b")
    assert [entry.key for entry in store.list()] == ["a"]


@pytest.mark.parametrize("status", [400, 403, 503])
def test_who_gives_no_answer_is_not_believed(store: Store, proxy: Proxy, status: int) -> None:
    Trouble(Answer(status), SCRATCH).make(proxy)
    save(store, "a")
    assert proxy.met
    Trouble(FlipUpload(1000), PART).make(proxy)
    with pytest.raises(CkptkitError):
        save(store, "b")


def test_who_gave_no_answer_is_asked_again(store: Store, proxy: Proxy) -> None:
    Trouble(Answer(403), SCRATCH).make(proxy)
    for key in ("a", "b", "c"):
        save(store, key)
    asked = [head for head in proxy.requests if SCRATCH(head)]
    assert len(asked) == 2  # the second time it answers
