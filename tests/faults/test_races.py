"""Two jobs save one step at once: one wins where the server allows it, and nowhere is there a
mixture.
"""

from __future__ import annotations

import logging
import threading

import pytest

from ckptkit.errors import AlreadyExistsError, StepExistsError, StorageError
from ckptkit.storage import Store, open_store
from tests.checkpoint.saving import small_state
from tests.faults.racing import holder, race
from tests.faults.scene import PATIENT, Scene, finished, save
from tests.servers.faults import Hold, Strip, kind
from tests.servers.proxy import Proxy
from tests.servers.rclone import Rclone
from tests.servers.s3_server import Bucket

STATES = (small_state(11), small_state(22))
ROUNDS = 3


def stores_of(bucket: Bucket, name: str, *engines: str, **more: object) -> list[Store]:
    return [
        open_store(f"{bucket.url}/{name}", {**bucket.options, "engine": engine, **more})
        for engine in engines
    ]


@pytest.mark.parametrize(
    "engines",
    [
        ("obstore", "obstore"),
        pytest.param(("fsspec", "fsspec"), marks=pytest.mark.long),
        ("obstore", "fsspec"),
    ],
)
def test_of_two_jobs_exactly_one_saves_the_step(bucket: Bucket, engines: tuple[str, str]) -> None:
    for attempt in range(ROUNDS):
        stores = stores_of(bucket, f"run-{attempt}", *engines)
        outcomes = race(stores, STATES)
        assert sorted(outcome is None for outcome in outcomes) == [False, True], outcomes
        loser = next(error for error in outcomes if error is not None)
        assert isinstance(loser, StepExistsError)
        assert loser.hint
        assert holder(stores[0], STATES) == outcomes.index(None)
        # The loser has removed what it wrote.
        assert len(stores[0].children("step-0000000002/data")) == 1


def check_no_mixture(
    stores: list[Store], caplog: pytest.LogCaptureFixture, sequel: Store
) -> list[BaseException | None]:
    with caplog.at_level(logging.WARNING, "ckptkit"):
        outcomes = race(stores, STATES)
    for error in outcomes:
        assert error is None or isinstance(error, AlreadyExistsError), error
    assert None in outcomes
    assert outcomes[holder(sequel, STATES)] is None
    warnings = [it.getMessage() for it in caplog.records if "does not refuse" in it.getMessage()]
    assert warnings
    assert any(sequel.location.path in warning for warning in warnings)
    return outcomes


@pytest.mark.parametrize("held", ["HEAD", "PUT"])
def test_on_rclone_a_slower_job_is_refused_or_replaces_all(
    rclone: Rclone, rclone_bucket: Bucket, held: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Held before it looks it finds the other's step; held after that it replaces it whole."""
    with Proxy(rclone.endpoint) as proxy:
        scene = Scene(rclone_bucket, proxy, "fsspec", pace={**PATIENT, "timeout": 20})
        hold = Hold()
        proxy.inject(hold, kind(held, path="manifest"))
        slower: list[list[BaseException]] = []
        thread = threading.Thread(target=lambda: slower.append(scene.save(STATES[1])))
        thread.start()
        assert hold.come.wait(20)
        assert save(scene.direct(), 2, STATES[0]) == []
        hold.go.set()
        thread.join()
    refused = any(isinstance(error, StepExistsError) for error in slower[0])
    assert refused is (held == "HEAD")
    assert holder(scene.direct(), STATES) == (0 if refused else 1)
    assert "does not refuse to replace" in caplog.text


def test_the_google_emulator_gives_no_mixture_and_a_warning(
    gcs_bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    stores = [open_store(f"{gcs_bucket.url}/run", gcs_bucket.options) for _ in range(2)]
    check_no_mixture(stores, caplog, stores[0])


def races_on_swift(bucket: Bucket, rounds: int, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(rounds):
        # Reached in another way each time, so that nothing is known of the server yet.
        engines = ("obstore", "fsspec" if number % 4 else "obstore")
        stores = stores_of(bucket, f"run-{number}", *engines, deadline=300.0 + number)
        outcomes = check_no_mixture(stores, caplog, stores[0])
        for store, outcome in zip(stores, outcomes, strict=True):
            # Who came when the step was there already never had to find out.
            assert outcome is not None or not store.abilities.exclusive_create
        caplog.clear()


def test_swift_is_found_out_although_it_refuses_who_comes_later(
    swift_bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    races_on_swift(swift_bucket, 3, caplog)


@pytest.mark.long
def test_in_a_hundred_races_on_swift_nobody_believes_without_a_warning_that_it_won(
    swift_bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    races_on_swift(swift_bucket, 100, caplog)


def test_stripped_conditions_give_no_mixture_and_a_warning(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.proxy.inject(Strip(), times=None)
    check_no_mixture([scene.store(), scene.store()], caplog, scene.direct())


def test_conditions_that_are_lost_only_now_and_then_give_no_mixture(scene: Scene) -> None:
    """The probe found them kept, and the one that matters is lost."""
    scene.proxy.inject(Strip(), lambda head: head.path.endswith("manifest.msgpack"), times=None)
    stores = [scene.store(), scene.store()]
    outcomes = race(stores, STATES)
    assert None in outcomes
    holder(scene.direct(), STATES)


def test_where_conditions_are_ignored_a_committed_step_is_still_refused(
    rclone_bucket: Bucket,
) -> None:
    store = open_store(f"{rclone_bucket.url}/run", rclone_bucket.options)
    assert finished(lambda: save(store, 2, STATES[0])) == []
    errors = finished(lambda: save(store, 2, STATES[1]))
    assert any(isinstance(error, StepExistsError) for error in errors)
    assert holder(store, STATES) == 0
    assert finished(lambda: save(store, 2, STATES[1], overwrite=True)) == []
    assert holder(store, STATES) == 1


def test_obstore_says_that_it_cannot_read_from_rclone(rclone_bucket: Bucket) -> None:
    options = {**rclone_bucket.options, "engine": "obstore"}
    store = open_store(f"{rclone_bucket.url}/run", options)
    store.put("a", b"0123456789")
    assert store.read_whole("a", 100) == b"0123456789"
    with pytest.raises(StorageError, match="range") as caught:
        store.read("a", 2, 3)
    assert "fsspec" in caught.value.hint
