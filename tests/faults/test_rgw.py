"""Ceph's gateway, which checks signatures and checksums: all that a run needs, and what breaks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

import ckptkit
from ckptkit import CkptkitError, Run
from ckptkit.errors import AccessError, NotFoundError, StepExistsError
from ckptkit.storage import open_store
from ckptkit.storage.base.address import SMALLEST_PART
from ckptkit.storage.objects import server
from ckptkit.storage.objects.server import BodyCheck
from ckptkit.storage.objects.store import ObjectStore
from tests.checkpoint.saving import small_state
from tests.faults.racing import holder, race
from tests.faults.scene import (
    ENGINES,
    FIRST,
    LARGE,
    MIB,
    NEXT,
    PATIENT,
    Scene,
    assert_clear,
    finished,
    save,
)
from tests.faults.trouble import COMPLETE, MANIFEST, PACK, PART, READ, Trouble
from tests.servers.faults import (
    Answer,
    FlipDownload,
    FlipUpload,
    LoseAnswer,
    ResetDownload,
    ResetUpload,
    Truncate,
)
from tests.servers.proxy import Proxy
from tests.servers.rgw import Rgw
from tests.servers.s3_server import Bucket

pytestmark = pytest.mark.rgw
UNHURRIED = {**PATIENT, "timeout": 20}
TROUBLES = {
    "503 now and then": Trouble(Answer(503), every=4, times=None),
    "a reset of a part": Trouble(ResetUpload(MIB), PART),
    "a reset while reading": Trouble(ResetDownload(10), READ, times=2),
    "a record cut short": Trouble(Truncate(10, honest=True), READ),
    "a flipped bit in a part": Trouble(FlipUpload(MIB), PART),
    "a lost answer to a part": Trouble(LoseAnswer(), PART),
    "a lost answer to the completion": Trouble(LoseAnswer(), COMPLETE),
    "a lost answer to the manifest": Trouble(LoseAnswer(), MANIFEST),
    "a flipped bit in a pack": Trouble(FlipUpload(500), PACK),
    "a flipped bit in the manifest": Trouble(FlipUpload(100), MANIFEST),
    "a flipped bit in what is read": Trouble(FlipDownload(10), READ),
}


@pytest.fixture(params=ENGINES)
def scene(rgw: Rgw, rgw_bucket: Bucket, request: pytest.FixtureRequest) -> Iterator[Scene]:
    with Proxy(rgw.endpoint) as proxy:
        yield Scene(rgw_bucket, proxy, request.param, pace=UNHURRIED)


def test_steps_of_one_and_of_several_parts_are_saved_and_loaded(scene: Scene) -> None:
    assert scene.save(FIRST, step=1) == []
    assert scene.save(LARGE) == []
    assert any("partNumber" in head.query for head in scene.proxy.requests)
    scene.assert_steps({1: FIRST, 2: LARGE})
    assert scene.store().abilities.exclusive_create


def test_a_step_is_resharded(scene: Scene) -> None:
    assert scene.save(LARGE) == []
    target = replace(scene, name="target")
    ckptkit.reshard(scene.store(), target.store(), to="fsdp:3", workers=2)
    target.assert_steps({2: LARGE})


def test_a_committed_step_is_refused_and_may_be_overwritten(scene: Scene) -> None:
    assert scene.save(FIRST) == []
    errors = scene.save(NEXT)
    assert any(isinstance(error, StepExistsError) for error in errors)
    scene.assert_steps({2: FIRST})
    assert save(scene.store(), 2, NEXT, overwrite=True) == []
    scene.assert_steps({2: NEXT})


def test_of_two_jobs_exactly_one_saves_the_step(scene: Scene) -> None:
    states = (small_state(1), small_state(2))
    stores = [scene.store(), scene.store()]
    outcomes = race(stores, states)
    assert sorted(outcome is None for outcome in outcomes) == [False, True], outcomes
    assert holder(scene.direct(), states) == outcomes.index(None)


def test_retention_removes_old_steps_and_uploads_that_were_cut_off(
    rgw: Rgw, rgw_bucket: Bucket, scene: Scene
) -> None:
    for step in (1, 2, 3):
        assert scene.save(NEXT, step=step) == []
    key = "run/step-0000000004/data/20260101T000000Z-000000000000/rank-00000.zip"
    upload = rgw.client.create_multipart_upload(Bucket=rgw_bucket.name, Key=key)["UploadId"]
    rgw.client.upload_part(
        Bucket=rgw_bucket.name, Key=key, UploadId=upload, PartNumber=1, Body=b"x" * 100
    )
    Run(scene.store()).prune(keep_last=2, grace=0)
    scene.assert_steps({2: NEXT, 3: NEXT})
    assert rgw.uploads(rgw_bucket) == []
    assert not rgw.keys(rgw_bucket, "run/step-0000000001")


@pytest.mark.parametrize("scene", ["obstore"], indirect=True)
@pytest.mark.parametrize("name", TROUBLES)
def test_faults_are_survived_or_told(scene: Scene, name: str) -> None:
    scene.begin()
    state = LARGE if "part" in name or "completion" in name else NEXT
    TROUBLES[name].make(scene.proxy)
    errors = scene.save(state)
    assert scene.proxy.met
    scene.assert_steps({1: FIRST} if errors else {1: FIRST, 2: state}, {2: state})
    try:
        finished(lambda: ckptkit.open(scene.store()).close())
    except CkptkitError as error:
        assert_clear(error)


@pytest.mark.parametrize("times", [1, None])
def test_where_the_server_compares_it_is_what_finds_a_damaged_part(
    scene: Scene, times: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "WORTH_ASKING", MIB)
    monkeypatch.setattr(BodyCheck, "add", _never)
    scene = replace(scene, pace={**UNHURRIED, "deadline": 10.0})
    scene.begin()
    Trouble(FlipUpload(MIB), PART, times=times).make(scene.proxy)
    errors = scene.save(LARGE)
    assert scene.proxy.met
    assert errors or times
    scene.assert_steps({1: FIRST} if errors else {1: FIRST, 2: LARGE}, {2: LARGE})


def _never(_check: BodyCheck, piece: memoryview) -> None:
    assert piece.nbytes < MIB, "the server compares large pieces itself"


def test_over_https_it_compares_signatures_alone(
    rgw: Rgw, rgw_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = memoryview(b"x" * (2 * SMALLEST_PART))
    monkeypatch.setattr(server, "WORTH_ASKING", data.nbytes)
    for name, value in rgw.certificate.environment.items():
        monkeypatch.setenv(name, value)
    pace = {**UNHURRIED, "part_size": SMALLEST_PART}
    plain, encrypted = (
        open_store(f"{rgw_bucket.url}/run", rgw_bucket.through(endpoint, **pace))
        for endpoint in (rgw.endpoint, rgw.tls_endpoint)
    )
    for store, name, compares in ((plain, "plain", True), (encrypted, "encrypted", False)):
        assert isinstance(store, ObjectStore)
        sink = store.create(name, [data.nbytes])
        sink.write(0, data)
        sink.finish()
        assert store._server.known.compares_bodies is compares
        assert store.read(name) == data
    assert [entry.key for entry in plain.list()] == ["encrypted", "plain"]


def test_wrong_keys_and_buckets_are_told_at_once(scene: Scene) -> None:
    options = {**scene.bucket.options, **UNHURRIED, "engine": scene.engine}
    with pytest.raises(AccessError) as caught:
        open_store(f"{scene.bucket.url}/run", {**options, "secret_key": "w" * 40}).list()
    assert "secret key" in str(caught.value)
    with pytest.raises(AccessError):
        open_store(f"{scene.bucket.url}/run", {**options, "access_key": "UNKNOWN" * 3}).list()
    with pytest.raises(NotFoundError, match="no bucket"):
        open_store("s3://no-such-bucket-here/run", options).list()
