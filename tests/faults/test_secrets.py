"""The secret key is in no log, no error, no repr and no byte that is stored."""

from __future__ import annotations

import logging
import pickle
import traceback
from dataclasses import replace

import pytest

import ckptkit
from ckptkit import CkptkitError, Run, Writer
from ckptkit.storage import open_store
from tests.checkpoint.saving import small_state
from tests.faults.scene import ENGINES, HASTY, Scene, save, scene_of, side_by_side
from tests.servers.faults import Answer, Fault, LoseAnswer, ResetUpload, Stall, Truncate
from tests.servers.moto import Moto
from tests.servers.s3_server import Bucket

ACCESS = "TELLTALEACCESSKEYOFTHETEST"
SECRET = "telltale/Secret+of/the+test=that-nobody-may+see"
TOKEN = "telltale-token-that-nobody-may-see"
# Also as it looks in a URL.
TALES = (SECRET, TOKEN, SECRET.replace("/", "%2F"), SECRET.replace("/", "%2F").replace("+", "%2B"))
STATE = small_state(31)


TROUBLES: dict[str, Fault] = {
    "503": Answer(503),
    "403": Answer(403),
    "400": Answer(400),
    "no-bucket": Answer(404, "NoSuchBucket"),
    "stall": Stall(),
    "lost": LoseAnswer(),
    "resets": ResetUpload(),
    "short": Truncate(5),
}
EVERY = {"lost": 2, "resets": 2, "short": 2}


def with_secrets(bucket: Bucket) -> Bucket:
    keys = {"access_key": ACCESS, "secret_key": SECRET, "session_token": TOKEN}
    return replace(bucket, options={**bucket.options, **keys})


def assert_silent(text: str) -> None:
    for tale in TALES:
        assert tale not in text


def assert_error_silent(error: BaseException) -> None:
    shown = "".join(traceback.format_exception(error))
    copy = pickle.loads(pickle.dumps(error))
    for text in (str(error), repr(error), shown, str(copy), repr(vars(error))):
        assert_silent(text)


def test_nothing_that_is_stored_or_shown_holds_it(scene: Scene) -> None:
    told = replace(scene, bucket=with_secrets(scene.bucket))
    store = told.store()
    assert save(store, 2, STATE) == []
    for entry in told.direct().list():
        data = told.direct().read(entry.key)
        assert not [tale for tale in TALES if tale.encode() in data], entry.key
    writer = Writer(store, step=3)
    with ckptkit.open(store) as checkpoint:
        things = (store, store.address, checkpoint, Run(store), writer, checkpoint.store.location)
        for thing in things:
            assert_silent(repr(thing))
            assert_silent(str(thing))
    writer.abort()


@pytest.mark.parametrize("engine", ENGINES)
def test_no_error_and_no_log_holds_it(
    moto: Moto, bucket: Bucket, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "ckptkit")
    told = with_secrets(bucket)
    errors: list[BaseException] = []

    def attempt(name: str) -> None:
        with scene_of(moto, told, engine) as scene:
            scene.proxy.inject(TROUBLES[name], times=None, every=EVERY.get(name, 1))
            errors.extend(save(scene.store(), 2, STATE))
            for read in (ckptkit.open, lambda store: store.delete(["nothing"])):
                try:
                    read(scene.store())
                except CkptkitError as error:
                    errors.append(error)

    side_by_side(TROUBLES, attempt)
    assert len(errors) > len(TROUBLES)
    for error in errors:
        assert_error_silent(error)
    assert caplog.records
    for record in caplog.records:
        assert_silent(record.getMessage())
        assert_silent(repr(record.args))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoint": "http://127.0.0.1:1"},
        {"endpoint": "http://no-such-host.invalid"},
        {"endpoint": f"http://{ACCESS}:{SECRET}@127.0.0.1:1"},
        {"secret": SECRET},
        {"endpoint": "http://127.0.0.1:port"},
        {"secret_key": [SECRET]},
        {"anonymous": True},
        {"profile": "other"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_no_refusal_of_options_holds_it(engine: str, wrong: dict[str, object]) -> None:
    options = {**HASTY, "access_key": ACCESS, "secret_key": SECRET, "engine": engine, **wrong}
    with pytest.raises(CkptkitError) as caught:
        open_store("s3://bucket/run", options).read("key")
    assert_error_silent(caught.value)


def test_a_server_that_tells_it_is_not_repeated(rclone_bucket: Bucket) -> None:
    options = {**rclone_bucket.options, **HASTY, "secret_key": SECRET}
    with pytest.raises(CkptkitError) as caught:
        open_store(f"{rclone_bucket.url}/run", options).read("key")
    assert_error_silent(caught.value)
