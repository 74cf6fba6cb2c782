"""Whatever breaks while a step is resharded from one bucket to another: it arrives whole or not at
all, the source stays, and the same call again goes on.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

import ckptkit
from ckptkit.storage import Store
from tests.checkpoint.saving import Tensor, random_values, small_state
from tests.faults.scene import (
    FIRST,
    HASTY,
    MIB,
    PATIENT,
    Scene,
    all_and_some,
    assert_clear,
    assert_whole,
    at_fault,
    cases,
    error_of,
    finished,
    save,
    side_by_side,
)
from tests.faults.trouble import BEGIN, COMPLETE, LIST, MANIFEST, PACK, PART, READ, Trouble
from tests.servers.faults import (
    Answer,
    FlipDownload,
    FlipUpload,
    LoseAnswer,
    ResetDownload,
    ResetUpload,
    Stall,
    Truncate,
)
from tests.servers.moto import Moto
from tests.servers.proxy import Proxy
from tests.servers.s3_server import Bucket

# As two packs for one rank each, and as one of several parts.
STATE = {
    **small_state(9),
    "model/wide": Tensor(random_values((2, 3 * MIB // 4), "float32", 8), {"fsdp": "shard(0)"}),
}
FOLDER = "step-0000000002"

PASSING = {
    "503 now and then": Trouble(Answer(503), every=5, times=None),
    "resets while reading": Trouble(ResetDownload(1000), READ, times=3),
    "bodies cut short": Trouble(Truncate(1000, honest=True), READ, times=2),
    "a stall while reading": Trouble(Stall(), READ),
    "a stall at a part": Trouble(Stall(), PART),
    "resets of parts": Trouble(ResetUpload(MIB), PART, times=2),
    "a lost answer to the completion": Trouble(LoseAnswer(), COMPLETE),
    "a lost answer to the manifest": Trouble(LoseAnswer(), MANIFEST),
    "a flipped bit in the manifest": Trouble(FlipUpload(100), MANIFEST),
}
UNSURE = {
    "503 for ever": Trouble(Answer(503), times=None, skip=3),
    "no more answers": Trouble(Stall(), times=None, skip=5),
    "no listing": Trouble(Answer(500), LIST, times=None),
    "no uploads": Trouble(Answer(503), BEGIN, times=None),
    "no completions": Trouble(LoseAnswer(), COMPLETE, times=None),
    "no manifest": Trouble(ResetUpload(10), MANIFEST, times=None),
    "flipped bits in what is read": Trouble(FlipDownload(1000), READ, times=None),
    "flipped bits in parts": Trouble(FlipUpload(1000), PART, times=None),
    "flipped bits in packs": Trouble(FlipUpload(1000), PACK, times=None),
    "403": Trouble(Answer(403), PACK),
}

# What each engine does by itself: it reads, lists, ends uploads, and gives up.
BY_ITSELF = ("no more answers", "no listing", "no completions", "flipped bits in what is read")


def reshard(source: Store, destination: Store) -> None:
    ckptkit.reshard(source, destination, to="single", workers=2)


@pytest.fixture
def scene(scene: Scene) -> Scene:
    assert save(scene.direct(), 2, STATE) == []
    return scene


@pytest.fixture
def target(scene: Scene) -> Scene:
    """Where the step goes, in the same bucket and through the same proxy."""
    return replace(scene, name="target")


@pytest.mark.parametrize(
    ("scene", "name"),
    cases(PASSING, "503 now and then", "a stall at a part", "a lost answer to the completion"),
    indirect=["scene"],
)
def test_a_step_arrives_all_the_same(scene: Scene, target: Scene, name: str) -> None:
    PASSING[name].make(scene.proxy)
    finished(lambda: reshard(scene.store(), target.store()))
    assert scene.proxy.met
    target.assert_steps({2: STATE})
    scene.assert_steps({1: FIRST, 2: STATE})


@all_and_some(UNSURE, BY_ITSELF)
def test_a_step_arrives_whole_or_not_at_all(
    moto: Moto, bucket: Bucket, engine: str, names: tuple[str, ...]
) -> None:
    with Proxy(moto.endpoint) as unused:
        source = Scene(bucket, unused, engine)
        assert save(source.direct(), 2, STATE) == []
        side_by_side(names, partial(_attempt, moto, source))
        source.assert_steps({2: STATE})


def _attempt(moto: Moto, source: Scene, name: str) -> None:
    with Proxy(moto.endpoint) as proxy:
        target = Scene(source.bucket, proxy, source.engine, name.replace(" ", "-"), HASTY)
        through = replace(target, name=source.name).store()
        target.connect()
        UNSURE[name].make(proxy)
        error = at_fault(proxy, lambda: error_of(lambda: reshard(through, target.store())))
        if error is not None:
            assert_clear(error)
            target.assert_steps({}, {2: STATE})
            proxy.forgive()
            _reshard_again(source.direct(), replace(target, pace=PATIENT))
        assert_whole(target.bucket, f"{target.name}/{FOLDER}", STATE)


def _reshard_again(source: Store, target: Scene) -> None:
    """As a user would: what was begun goes on, and what turns out to be there is fine."""
    if not ckptkit.Run(target.direct()).steps():
        finished(lambda: reshard(source, target.store()))
