"""Whatever breaks while a step is saved: it is committed whole or is invisible, and earlier steps
stay.
"""

from __future__ import annotations

import pytest

from tests.checkpoint.saving import State
from tests.faults.scene import (
    FIRST,
    LARGE,
    MIB,
    NEXT,
    Scene,
    all_and_some,
    at_fault,
    cases,
    save,
    scene_of,
    side_by_side,
)
from tests.faults.trouble import BEGIN, COMPLETE, LIST, MANIFEST, PACK, PART, READ, Trouble
from tests.servers.faults import (
    Answer,
    Delay,
    Fault,
    FlipDownload,
    FlipUpload,
    LoseAnswer,
    ResetDownload,
    ResetUpload,
    Stall,
    Truncate,
)
from tests.servers.moto import Moto
from tests.servers.s3_server import Bucket

PASSING = {
    "a burst of 503": Trouble(Answer(503), times=3),
    "429 now and then": Trouble(Answer(429), every=4, times=None),
    "500 at the manifest": Trouble(Answer(500), MANIFEST, times=3),
    "a reset in the upload of a pack": Trouble(ResetUpload(100), PACK, times=2),
    "a reset in the upload of the manifest": Trouble(ResetUpload(100), MANIFEST, times=2),
    "a reset in a listing": Trouble(ResetDownload(20), LIST, times=2),
    "a reset while a record is read": Trouble(ResetDownload(20), READ, times=2),
    "a stall at a pack": Trouble(Stall(), PACK),
    "a stall at the manifest": Trouble(Stall(), MANIFEST),
    "a lost answer to a pack": Trouble(LoseAnswer(), PACK),
    "a lost answer to the manifest": Trouble(LoseAnswer(), MANIFEST),
    "lost answers to the manifest and 503 thereafter": Trouble(LoseAnswer(), MANIFEST, times=2),
    "a listing cut short": Trouble(Truncate(50), LIST),
    "a record cut short": Trouble(Truncate(50), READ),
    "a record cut short without a word": Trouble(Truncate(50, honest=True), READ),
    "a bit flipped on the way up in a pack": Trouble(FlipUpload(500), PACK),
    "a bit flipped on the way up in the manifest": Trouble(FlipUpload(100), MANIFEST),
    "latency": Trouble(Delay(0.03), times=None),
}
PASSING_LARGE = {
    "resets in the upload of parts": Trouble(ResetUpload(MIB), PART, times=2),
    "503 at parts": Trouble(Answer(503), PART, times=3),
    "a stall at a part": Trouble(Stall(), PART),
    "a lost answer to a part": Trouble(LoseAnswer(), PART),
    "a lost answer to the beginning": Trouble(LoseAnswer(), BEGIN),
    "a lost answer to the completion": Trouble(LoseAnswer(), COMPLETE),
    "503 at the completion": Trouble(Answer(503), COMPLETE, times=2),
}
UNSURE = {
    "a bit flipped in a record that is read": Trouble(FlipDownload(10), READ),
    "a bit flipped in a listing": Trouble(FlipDownload(200), LIST),
    "no more answers to a listing": Trouble(Stall(), LIST, times=None),
    "403 for the manifest": Trouble(Answer(403), MANIFEST, times=None),
    "no manifest ever comes through": Trouble(ResetUpload(10), MANIFEST, times=None),
    "no answer to any manifest": Trouble(LoseAnswer(), MANIFEST, times=None),
    "every manifest is damaged": Trouble(FlipUpload(100), MANIFEST, times=None),
    "every pack is damaged": Trouble(FlipUpload(500), PACK, times=None),
    "an honest short listing": Trouble(Truncate(300, honest=True), LIST),
}
UNSURE_LARGE = {
    "a bit flipped on the way up in a part": Trouble(FlipUpload(MIB), PART),
    "the answer to the completion is cut short": Trouble(Truncate(30), COMPLETE),
}

# What each engine does by itself: it reads, lists, begins and ends uploads, and gives up.
BY_ITSELF = (
    "a bit flipped in a record that is read",
    "no more answers to a listing",
    "403 for the manifest",
    "no answer to any manifest",
)
GONE = [f"{fault}-after-{n}" for fault in ("503", "stall") for n in (0, 2, 5, 8, 11)]


@pytest.mark.parametrize(
    ("scene", "name"),
    cases(
        PASSING,
        "a burst of 503",
        "a reset in the upload of a pack",
        "a stall at the manifest",
        "a lost answer to the manifest",
        "a listing cut short",
        "a record cut short without a word",
        "a bit flipped on the way up in a pack",
    ),
    indirect=["scene"],
)
def test_a_step_is_saved_all_the_same(scene: Scene, name: str) -> None:
    survive(scene, PASSING[name], NEXT)


@pytest.mark.parametrize(
    ("scene", "name"),
    cases(
        PASSING_LARGE,
        "resets in the upload of parts",
        "a stall at a part",
        "a lost answer to the beginning",
        "a lost answer to the completion",
    ),
    indirect=["scene"],
)
def test_a_step_of_several_parts_is_saved_all_the_same(scene: Scene, name: str) -> None:
    survive(scene, PASSING_LARGE[name], LARGE)


@all_and_some(UNSURE, BY_ITSELF)
def test_a_step_is_saved_whole_or_not_at_all(
    moto: Moto, bucket: Bucket, engine: str, names: tuple[str, ...]
) -> None:
    def attempt(name: str) -> None:
        with scene_of(moto, bucket, engine) as scene:
            be_whole_or_absent(scene, UNSURE[name], NEXT)

    side_by_side(names, attempt)


@pytest.mark.parametrize("name", UNSURE_LARGE)
def test_a_step_of_several_parts_is_saved_whole_or_not_at_all(scene: Scene, name: str) -> None:
    be_whole_or_absent(scene, UNSURE_LARGE[name], LARGE)


@all_and_some(GONE, ("503-after-5", "stall-after-0", "stall-after-8"))
def test_a_server_that_goes_away_fails_the_save_and_nothing_else(
    moto: Moto, bucket: Bucket, engine: str, names: tuple[str, ...]
) -> None:
    faults: dict[str, Fault] = {"503": Answer(503), "stall": Stall()}

    def attempt(name: str) -> None:
        fault, _, after = name.partition("-after-")
        with scene_of(moto, bucket, engine) as scene:
            be_whole_or_absent(scene, Trouble(faults[fault], times=None, skip=int(after)), NEXT)

    side_by_side(names, attempt)


def survive(scene: Scene, trouble: Trouble, state: State) -> None:
    trouble.make(scene.proxy)
    assert scene.save(state) == []
    assert scene.proxy.met
    scene.assert_steps({1: FIRST, 2: state})


def be_whole_or_absent(scene: Scene, trouble: Trouble, state: State) -> None:
    trouble.make(scene.proxy)
    errors = at_fault(scene.proxy, lambda: scene.save(state))
    scene.assert_steps({1: FIRST} if errors else {1: FIRST, 2: state}, {2: state})
    scene.proxy.forgive()
    # Whatever is left does not stand in the way of trying again.
    assert save(scene.direct(), 2, state, overwrite=True) == []
    scene.assert_steps({1: FIRST, 2: state})
