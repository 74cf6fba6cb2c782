"""What cannot work is said at once, with what to do, and without a word of the secret."""

from __future__ import annotations

import logging
import pickle
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptkit.errors import (
    AccessError,
    AlreadyExistsError,
    CkptkitError,
    NotFoundError,
    StorageError,
    UsageError,
)
from ckptkit.storage import Address, Location, Store, open_store
from tests.servers.faults import Answer, Strip
from tests.servers.proxy import Proxy
from tests.servers.s3_server import SECRET_KEY, Bucket

_AWS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE")


def refusals(store: Store) -> list[CkptkitError]:
    calls: list[Callable[[], object]] = [
        lambda: store.read_whole("a", 10),
        lambda: store.put("a", b"x"),
        store.list,
        store.children,
    ]
    found = []
    for call in calls:
        with pytest.raises(CkptkitError) as caught:
            call()
        found.append(caught.value)
    assert all(error.hint and error.where.startswith("s3://") for error in found)
    return found


def test_a_bucket_that_there_is_not_is_named(bucket: Bucket, engine: str) -> None:
    store = open_store("s3://no-such-bucket/run", {**bucket.options, "engine": engine})
    for error in refusals(store):
        assert isinstance(error, NotFoundError)
        assert "no bucket s3://no-such-bucket" in error.what


@pytest.mark.parametrize(
    ("answer", "expected", "word"),
    [
        (Answer(403), AccessError, "not allowed"),
        (Answer(403, "InvalidAccessKeyId"), AccessError, "access key"),
        (Answer(403, "SignatureDoesNotMatch"), AccessError, "secret key"),
        (Answer(403, "RequestTimeTooSkewed"), AccessError, "clocks"),
        (Answer(400, "ExpiredToken"), AccessError, "expired"),
        (Answer(400, "AuthorizationHeaderMalformed"), StorageError, "region"),
        (Answer(301, "PermanentRedirect"), StorageError, "region"),
    ],
)
def test_what_the_server_refuses_is_said_at_once(
    answer: Answer,
    expected: type[CkptkitError],
    word: str,
    bucket: Bucket,
    proxy: Proxy,
    engine: str,
) -> None:
    store = open_store(bucket.url, bucket.through(proxy.endpoint, engine=engine))
    proxy.inject(answer, times=None)
    for error in refusals(store):
        assert isinstance(error, expected)
        assert word in error.what
        assert "<" not in str(error), "no document of the server"
        assert "{" not in str(error), "no dump of the request"
    if "Redirect" not in answer.code or engine == "obstore":  # botocore follows where it can
        assert len(proxy.met) <= 8


@pytest.mark.parametrize(
    ("endpoint", "word"),
    [("http://127.0.0.1:9", "listens"), ("http://no-such-host.invalid:5000", "address")],
)
def test_a_wrong_endpoint_fails_long_before_the_deadline(
    endpoint: str, word: str, bucket: Bucket, engine: str
) -> None:
    store = open_store(bucket.url, bucket.through(endpoint, engine=engine))
    began = time.monotonic()
    with pytest.raises(StorageError, match=word) as caught:
        store.size("a")
    assert time.monotonic() - began < 30
    assert "endpoint" in caught.value.hint


def test_a_server_that_does_not_speak_https_is_not_asked_again(bucket: Bucket, engine: str) -> None:
    endpoint = str(bucket.options["endpoint"]).replace("http://", "https://")
    options = bucket.through(endpoint, engine=engine, deadline=20)
    with pytest.raises(StorageError, match="does not speak https") as caught:
        open_store(bucket.url, options).size("a")
    assert "http=true" in caught.value.hint


def test_without_credentials_there_is_one_clear_error(
    bucket: Bucket, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in _AWS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    options = {"endpoint": bucket.options["endpoint"], "engine": engine}
    for error in refusals(open_store(bucket.url, options)):
        assert isinstance(error, AccessError)
        assert "no credentials" in error.what


def test_a_profile_gives_credentials(
    bucket: Bucket, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in _AWS:
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "credentials"
    file.write_text(f"[research]\naws_access_key_id = me\naws_secret_access_key = {SECRET_KEY}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    options = {"endpoint": bucket.options["endpoint"], "engine": engine, "profile": "research"}
    store = open_store(bucket.url, options)
    store.put("a", b"x")
    assert store.read("a") == b"x"
    with pytest.raises(UsageError, match="profile"):
        open_store(bucket.url, {**options, "profile": "nobody"}).size("a")


def test_a_server_that_ignores_conditions_is_found_out_and_worked_around(
    bucket: Bucket, proxy: Proxy, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.inject(Strip(), times=None)
    store = open_store(f"{bucket.url}/run", bucket.through(proxy.endpoint, engine=engine))
    assert proxy.requests == []
    with caplog.at_level(logging.WARNING, "ckptkit"):
        store.put("a", b"first", exclusive=True)
        store.put("b", b"second", exclusive=True)
    assert len([it for it in caplog.records if "does not refuse" in it.getMessage()]) == 1
    assert not store.abilities.exclusive_create
    with pytest.raises(AlreadyExistsError):
        store.put("a", b"other", exclusive=True)
    assert store.read("a") == b"first"
    assert [entry.key for entry in store.list()] == ["a", "b"]
    assert store.leftovers() == [], "the scratch object is gone"


def test_a_creator_that_was_overwritten_on_such_a_server_hears_of_it(
    bucket: Bucket, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(bucket.url, {**bucket.options, "engine": engine})
    other = open_store(bucket.url, bucket.options)
    monkeypatch.setattr("ckptkit.storage.objects.exclusive.ExclusiveCreate._probed", _no)

    def settle(_: float) -> None:
        other.put("a", b"theirs")

    monkeypatch.setattr("ckptkit.storage.objects.exclusive.time.sleep", settle)
    with pytest.raises(AlreadyExistsError):
        store.put("a", b"mine", exclusive=True)


def _no(_: object) -> bool:
    return False


def test_the_probe_is_made_once_and_only_when_something_is_created(
    bucket: Bucket, proxy: Proxy, engine: str
) -> None:
    store = open_store(bucket.url, bucket.through(proxy.endpoint, engine=engine))
    store.put("plain", b"x")
    assert proxy.counts["PUT"] == 1
    store.put("a", b"x", exclusive=True)
    store.put("b", b"x", exclusive=True)
    assert proxy.counts["PUT"] == 1 + 2 + 2
    assert store.abilities.exclusive_create


def test_the_secret_shows_nowhere(
    bucket: Bucket, proxy: Proxy, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = bucket.through(proxy.endpoint, engine=engine, deadline=0.2, session_token="toktok")
    shown: list[str] = []
    with caplog.at_level(logging.DEBUG, "ckptkit"):
        store = open_store(bucket.url, options)
        store.put("a", b"x", exclusive=True)
        for answer in (Answer(403, "SignatureDoesNotMatch"), Answer(503), Answer(400, SECRET_KEY)):
            proxy.inject(answer, times=None)
            for call in (store.list, lambda: store.put("b", b"x"), lambda: store.size("a")):
                try:
                    call()
                except CkptkitError as error:
                    text = "".join(traceback.format_exception(error))
                    shown += [
                        str(error),
                        repr(error),
                        text,
                        repr(pickle.loads(pickle.dumps(error))),
                    ]
            proxy.forgive()
    again = pickle.loads(pickle.dumps(store.address))
    shown += [repr(store), str(store.location), repr(store.address), str(again), repr(again)]
    shown += [repr(store._server.settings), repr(store._server.client), caplog.text]  # type: ignore[attr-defined]
    assert shown
    assert not [text for text in shown if SECRET_KEY in text or "toktok" in text]
    assert open_store(again).address.options["secret_key"] == SECRET_KEY
    assert isinstance(again, Address)
    assert again.location == Location.parse(bucket.url)


def test_uploads_that_were_cut_off_are_seen_and_aborted(bucket: Bucket, engine: str) -> None:
    store = open_store(
        f"{bucket.url}/run",
        {**bucket.options, "engine": engine, "part_size": 5 << 20, "deadline": 3},
    )
    kept, gone = (store.create(f"step/{name}", [12 << 20]) for name in ("kept", "gone"))
    for sink in (kept, gone):
        sink.write(0, memoryview(bytes(12 << 20)))
    until = time.monotonic() + 30
    while sum(entry.size for entry in store.leftovers()) < 20 << 20 and time.monotonic() < until:
        time.sleep(0.05)
    found = store.leftovers("step")
    assert len(found) == 2
    assert {entry.size for entry in found} == {10 << 20}
    assert store.leftovers("other") == store.list() == []
    gone.abort()
    (entry,) = store.leftovers()
    assert entry.key.startswith("step/.tmp-")
    store.delete([entry.key])
    assert store.leftovers() == []
    with pytest.raises((StorageError, NotFoundError)):
        kept.finish()
    kept.abort()
    assert store.list() == []


def test_no_request_is_made_to_open_a_store_or_a_source_of_known_size(
    bucket: Bucket, proxy: Proxy
) -> None:
    for engine in ("obstore", "fsspec"):
        store = open_store(bucket.url, bucket.through(proxy.endpoint, engine=engine))
        assert store.open("a", 10).size == 10
        assert store.abilities.concurrency == 16
    assert not proxy.counts
