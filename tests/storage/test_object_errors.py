"""What cannot work is said at once, with what to do, and without a word of the secret."""

from __future__ import annotations

import errno
import logging
import math
import os
import pickle
import socket
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from obstore.exceptions import GenericError

from ckptkit.errors import (
    AccessError,
    AlreadyExistsError,
    CkptkitError,
    NoSpaceError,
    NotFoundError,
    StorageError,
    UsageError,
)
from ckptkit.storage import Address, Location, Store, open_store
from ckptkit.storage.base.address import Settings
from ckptkit.storage.objects import errors
from ckptkit.storage.objects.amazon import profile_endpoint
from ckptkit.storage.objects.errors import Transient, translation
from ckptkit.storage.objects.obstore import obstore_translation
from ckptkit.storage.objects.server import CREATORS, RACES
from tests.servers.faults import Answer, Strip
from tests.servers.http_wire import Head
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
    [
        ("http://127.0.0.1:9", "nobody listens"),
        ("http://no-such-host.invalid:5000", "has no address|cannot be looked up"),
    ],
)
def test_a_wrong_endpoint_fails_long_before_the_deadline(
    endpoint: str, word: str, bucket: Bucket, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason, within = errors._PASSING["refused"]
    assert within == 10
    monkeypatch.setitem(errors._PASSING, "refused", (reason, 1))
    # A machine without network says of every name that it cannot be looked up now.
    deadline = 5 if "host" in endpoint else 300
    store = open_store(bucket.url, bucket.through(endpoint, engine=engine, deadline=deadline))
    began = time.monotonic()
    with pytest.raises(StorageError, match=word) as caught:
        store.size("a")
    assert time.monotonic() - began < (10 if "host" in endpoint else 15)
    assert "endpoint" in caught.value.hint


@pytest.mark.parametrize(
    "folder",
    [
        "certificate",
        "TimedOut",
        "dns error",
        "BadScheme",
        "169.254.169.254",
        "redirect without LOCATION",
    ],
)
def test_the_name_of_a_folder_is_no_reason(
    folder: str, bucket: Bucket, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than what is left of the deadline: nothing is asked twice.
    monkeypatch.setattr("ckptkit.storage.objects.server.FIRST_PAUSE", 60.0)
    options = bucket.through("http://127.0.0.1:9", engine=engine, deadline=7)
    for url in (f"{bucket.url}/{folder}/run", f"s3://{folder.replace(' ', '-')}/run"):
        for error in refusals(open_store(url, options)):
            assert "nobody listens" in error.what


def test_a_resolver_that_is_busy_is_asked_again() -> None:
    busy = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    for error, within in ((busy, math.inf), (unknown, 1)):
        told = translation(error, "s3://bucket/key")
        assert isinstance(told, Transient)
        assert told.within == within
        text = f'HTTP error: error sending request\n\nDebug source:\n"dns error", "{error}"'
        told = obstore_translation(GenericError(text), "s3://bucket/key", ())
        assert isinstance(told, Transient)
        assert told.within == within


def test_a_full_disk_is_one_whatever_else_went_wrong_before() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    full.__context__ = FileNotFoundError("part")
    assert isinstance(translation(full, "sftp://host/key"), NoSpaceError)


def test_a_put_with_a_condition_is_one_request_however_large(
    bucket: Bucket, proxy: Proxy, engine: str
) -> None:
    store = open_store(bucket.url, bucket.through(proxy.endpoint, engine=engine))
    data = bytes(120 << 20)
    store.put("large", data, exclusive=True)
    assert not [head for head in proxy.requests if "uploads" in head.line]
    assert store.size("large") == len(data)


def test_an_object_that_ends_where_the_first_look_ends_comes_whole(
    bucket: Bucket, proxy: Proxy, engine: str
) -> None:
    store = open_store(bucket.url, bucket.through(proxy.endpoint, engine=engine))
    data = b"x" * (8 << 20)
    store.put("whole", data)
    proxy.forget()
    assert store.read_whole("whole", 16 << 20) == data
    assert sum(head.method == "GET" for head in proxy.requests) == 1


def test_a_token_of_the_environment_does_not_go_with_keys_that_were_passed(
    bucket: Bucket, proxy: Proxy, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-somebody-else")
    store = open_store(bucket.url, bucket.through(proxy.endpoint, engine=engine))
    store.put("a", b"x")
    assert store.leftovers() == []
    assert proxy.requests
    for head in proxy.requests:
        assert "of-somebody-else" not in str(head)
        assert f"Credential={bucket.options['access_key']}/" in head.get("authorization")


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


def test_the_endpoint_of_a_profile_is_that_of_both_engines(
    bucket: Bucket, proxy: Proxy, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*_AWS, "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "config"
    keys = "aws_access_key_id = me\naws_secret_access_key = none\n"
    file.write_text(
        f"[profile plain]\n{keys}endpoint_url = {proxy.endpoint}\n"
        f"[profile service]\n{keys}services = here\nendpoint_url = http://127.0.0.1:9\n"
        f"[services here]\ns3 =\n  endpoint_url = {proxy.endpoint}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    for profile in ("plain", "service"):
        proxy.forget()
        store = open_store(bucket.url, {"engine": engine, "profile": profile})
        store.put("a", b"x")
        assert store.read("a") == b"x"
        assert store.leftovers() == []
        assert proxy.requests
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert profile_endpoint(Settings(profile="plain"), "") is None


def test_new_credentials_in_a_file_are_taken_by_the_next_store(
    bucket: Bucket, proxy: Proxy, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in _AWS:
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    for number in (1, 2):
        file.write_text(f"[default]\naws_access_key_id = me-{number}\naws_secret_access_key = x\n")
        os.utime(file, (number, number))
        open_store(bucket.url, {"endpoint": proxy.endpoint, "engine": engine}).put("a", b"x")
        assert f"Credential=me-{number}/" in proxy.requests[-1].get("authorization")


def test_a_server_that_refuses_conditions_is_worked_around_too(
    bucket: Bucket, proxy: Proxy, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.inject(Answer(501, "NotImplemented"), _is_conditional, times=None)
    store = open_store(f"{bucket.url}/run", bucket.through(proxy.endpoint, engine=engine))
    with caplog.at_level(logging.WARNING, "ckptkit"):
        store.put("step/a", b"first", exclusive=True)
    assert "does not refuse" in caplog.text
    assert not store.abilities.exclusive_create
    with pytest.raises(AlreadyExistsError):
        store.put("step/a", b"other", exclusive=True)
    assert store.read("step/a") == b"first"


def _is_conditional(head: Head) -> bool:
    return bool(head.get("if-none-match"))


def test_a_probe_that_was_killed_is_left_over_in_the_folder_of_what_was_created(
    bucket: Bucket, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"{bucket.url}/run", {**bucket.options, "engine": engine})
    monkeypatch.setattr("ckptkit.storage.objects.server.ObjectServer.delete", _nothing)
    store.put("step-0000000001/a", b"x", exclusive=True)
    left = store.leftovers()
    assert len(left) == 1 + RACES
    assert all(it.key.startswith("step-0000000001/.tmp-") for it in left)


def _nothing(*_: object) -> None:
    """Killed before."""


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
    monkeypatch.setattr("ckptkit.storage.objects.server.ObjectServer._refuses_to_replace", _no)

    def settle(_: float) -> None:
        other.put("a", b"theirs")

    monkeypatch.setattr("ckptkit.storage.objects.server.time.sleep", settle)
    with pytest.raises(AlreadyExistsError):
        store.put("a", b"mine", exclusive=True)


def _no(*_: object) -> bool:
    return False


def test_the_probe_is_made_once_and_only_when_something_is_created(
    bucket: Bucket, proxy: Proxy, engine: str
) -> None:
    store = open_store(bucket.url, bucket.through(proxy.endpoint, engine=engine))
    store.put("plain", b"x")
    assert proxy.counts["PUT"] == 1
    store.put("a", b"x", exclusive=True)
    store.put("b", b"x", exclusive=True)
    again = open_store(f"{bucket.url}/run", bucket.through(proxy.endpoint, engine=engine))
    again.put("c", b"x", exclusive=True)
    assert proxy.counts["PUT"] == 1 + (2 + CREATORS * RACES) + 3
    assert store.abilities.exclusive_create


def test_a_probe_whose_threads_cannot_start_ends_and_is_made_again(
    bucket: Bucket, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(bucket.url, {**bucket.options, "engine": engine})
    store.put("plain", b"x")
    told: list[str] = []

    def start(thread: threading.Thread, begin: Any = threading.Thread.start) -> None:
        if thread.name.endswith(f"_{CREATORS - 1}"):
            raise RuntimeError("can't start new thread")
        begin(thread)

    def put() -> None:
        with pytest.raises(RuntimeError) as caught:
            store.put("a", b"x", exclusive=True)
        told.append(str(caught.value))

    putting = threading.Thread(target=put, daemon=True)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        putting.start()
        putting.join(30)
    assert told == ["can't start new thread"]
    store.put("a", b"x", exclusive=True)
    assert store.abilities.exclusive_create


def test_the_secret_shows_nowhere(
    bucket: Bucket, proxy: Proxy, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = bucket.through(proxy.endpoint, engine=engine, deadline=0.2, session_token="toktok")
    shown: list[str] = []
    with caplog.at_level(logging.DEBUG, "ckptkit"):
        # What has to succeed is given the time of a busy machine.
        open_store(bucket.url, options | {"deadline": 60}).put("a", b"x", exclusive=True)
        store = open_store(bucket.url, options)
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


def test_an_obstore_that_is_too_old_is_refused(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**bucket.options, "engine": "obstore", "timeout": 7}
    monkeypatch.setattr("obstore.__version__", "0.9.5")
    with pytest.raises(UsageError, match=r"obstore is too old .got '0\.9\.5'") as caught:
        open_store(bucket.url, options)
    assert "obstore>=0.11" in str(caught.value.hint)
    for version in ("0.11.0", "0.12.1", "1.0.0rc1"):
        monkeypatch.setattr("obstore.__version__", version)
        open_store(bucket.url, options)
