"""Whatever breaks while a step is loaded: what arrives is what was saved, or there is a clear
error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ckptkit
from ckptkit.errors import CkptkitError, CorruptionError
from ckptkit.model import Box
from ckptkit.storage import Store, open_store
from tests.checkpoint.saving import Tensor, random_values, same, small_state
from tests.faults.scene import (
    ENGINES,
    FIRST,
    HASTY,
    MIB,
    PATIENT,
    Scene,
    assert_clear,
    at_fault,
    cases,
    error_of,
    finished,
    save,
    side_by_side,
)
from tests.faults.trouble import LIST, READ, READ_MANIFEST, Trouble
from tests.servers.faults import (
    Answer,
    Delay,
    FlipDownload,
    ResetDownload,
    ResetUpload,
    Stall,
    StallDownload,
    Truncate,
)
from tests.servers.moto import Moto
from tests.servers.proxy import Proxy
from tests.servers.s3_server import Bucket

# Several requests for each of two packs.
STATE = {
    **small_state(5),
    "model/wide": Tensor(random_values((2, MIB // 2), "float32", 6), {"fsdp": "shard(0)"}),
}
REQUESTS = {"request_bytes": MIB // 2, "gap_bytes": 0}

PASSING = {
    "a burst of 503": Trouble(Answer(503), times=4),
    "429 now and then": Trouble(Answer(429), every=3, times=None),
    "500 at a pack": Trouble(Answer(500), READ, times=3),
    "resets in mid-body": Trouble(ResetDownload(1000), READ, times=3),
    "resets before the body": Trouble(ResetDownload(), READ, times=3),
    "resets of requests": Trouble(ResetUpload(), READ, times=3),
    "a reset in the manifest": Trouble(ResetDownload(50), READ_MANIFEST, times=2),
    "a reset in a listing": Trouble(ResetDownload(50), LIST, times=2),
    "a stall at a pack": Trouble(Stall(), READ),
    "a stall in mid-body": Trouble(StallDownload(1000), READ),
    "a stall at the manifest": Trouble(Stall(), READ_MANIFEST),
    "bodies cut short": Trouble(Truncate(1000), READ, times=2),
    "bodies cut short without a word": Trouble(Truncate(1000, honest=True), READ, times=2),
    "an empty body": Trouble(Truncate(0, honest=True), READ),
    "the manifest cut short": Trouble(Truncate(100), READ_MANIFEST),
    "latency": Trouble(Delay(0.03), times=None),
}
FAILING = {
    "503 for ever": Trouble(Answer(503), READ, times=None),
    "500 for ever, later on": Trouble(Answer(500), READ, times=None, skip=2),
    "no answers": Trouble(Stall(), READ, times=None),
    "no answer is whole": Trouble(StallDownload(1000), READ, times=None),
    "resets for ever": Trouble(ResetDownload(1000), READ, times=None),
    "403": Trouble(Answer(403), READ),
    "bits flip for ever": Trouble(FlipDownload(1000), READ, times=None),
    "bodies are short for ever": Trouble(Truncate(1000, honest=True), READ, times=None),
    "the manifest is damaged": Trouble(FlipDownload(100), READ_MANIFEST, times=None),
    "the manifest is short": Trouble(Truncate(100, honest=True), READ_MANIFEST, times=None),
}


@pytest.fixture(scope="module")
def loaded(moto: Moto) -> Iterator[Bucket]:
    """Where all find the step, for none changes it."""
    made = moto.new_bucket()
    store = open_store(f"{made.url}/run", made.options)
    assert save(store, 1, FIRST) == save(store, 2, STATE) == []
    yield made
    moto.drop(made)


@pytest.fixture(params=ENGINES)
def scene(loaded: Bucket, proxy: Proxy, request: pytest.FixtureRequest) -> Scene:
    return Scene(loaded, proxy, request.param)


def load(store: Store) -> dict[str, Any]:
    """Every array of the newest step."""
    with ckptkit.open(store) as checkpoint:
        found = {name: np.empty(a.shape, a.dtype.numpy) for name, a in checkpoint.arrays.items()}
        checkpoint.read_many([(n, Box.whole(out.shape), out) for n, out in found.items()])
    return found


def assert_loaded(found: Mapping[str, Any]) -> None:
    assert sorted(found) == sorted(STATE)
    for name, values in found.items():
        assert same(values, STATE[name].whole), name


@pytest.mark.parametrize(
    ("scene", "name"),
    cases(
        PASSING,
        "a burst of 503",
        "resets in mid-body",
        "a stall at a pack",
        "a stall in mid-body",
        "bodies cut short",
        "bodies cut short without a word",
        "the manifest cut short",
    ),
    indirect=["scene"],
)
def test_a_step_is_loaded_all_the_same(scene: Scene, name: str) -> None:
    scene = replace(scene, pace={**PATIENT, **REQUESTS})
    PASSING[name].make(scene.proxy)
    assert_loaded(finished(lambda: load(scene.store())))
    assert scene.proxy.met


def test_a_load_that_cannot_succeed_fails_clearly(moto: Moto, scene: Scene) -> None:
    def attempt(name: str) -> None:
        with Proxy(moto.endpoint) as proxy:
            FAILING[name].make(proxy)
            there = replace(scene, proxy=proxy, pace={**HASTY, **REQUESTS})
            error = at_fault(proxy, lambda: error_of(lambda: load(there.store())))
            assert error is not None
            assert_clear(error)

    side_by_side(FAILING, attempt)


@pytest.mark.parametrize("at", [0, 1000, 200_000])
def test_a_flipped_bit_is_never_loaded(scene: Scene, at: int) -> None:
    scene = replace(scene, pace={**PATIENT, **REQUESTS})
    Trouble(FlipDownload(at), READ, times=None).make(scene.proxy)
    with pytest.raises(CorruptionError) as caught:
        finished(lambda: load(scene.store()))
    assert_clear(caught.value)


def test_after_an_outage_the_same_checkpoint_reads_on(scene: Scene) -> None:
    scene = replace(scene, pace={**PATIENT, "deadline": 8.0})
    with ckptkit.open(scene.store()) as checkpoint:
        Trouble(Answer(503), times=None).make(scene.proxy)
        with pytest.raises(CkptkitError):
            checkpoint.read("model/wide")
        scene.proxy.forgive()
        assert same(checkpoint.read("model/wide"), STATE["model/wide"].whole)
