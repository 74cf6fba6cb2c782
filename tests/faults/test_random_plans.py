"""Whatever breaks, in whatever order: what is committed is whole, and what is loaded is right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

import ckptkit
from ckptkit import CkptkitError
from ckptkit.model import Box
from tests.checkpoint.saving import State, same
from tests.faults.scene import (
    ENGINES,
    FIRST,
    NEXT,
    Scene,
    assert_clear,
    finished,
    scene_of,
    side_by_side,
)
from tests.faults.trouble import LIST, MANIFEST, PACK, READ, READ_MANIFEST, Trouble
from tests.servers.faults import (
    Answer,
    Delay,
    FlipDownload,
    FlipUpload,
    LoseAnswer,
    ResetDownload,
    ResetUpload,
    Stall,
    Strip,
    Truncate,
    everything,
    kind,
)
from tests.servers.moto import Moto
from tests.servers.s3_server import Bucket


def random_trouble(rng: random.Random) -> Trouble:
    at = rng.choice([0, 1, 10, 100, 1000])
    faults = (
        Answer(rng.choice([403, 429, 500, 503])),
        ResetUpload(at),
        ResetDownload(at),
        Truncate(at, honest=rng.random() < 0.5),
        FlipUpload(at),
        FlipDownload(at),
        LoseAnswer(),
        Stall(),
        Delay(0.05),
        Strip(),
    )
    matches = (everything, PACK, MANIFEST, LIST, READ, READ_MANIFEST, kind("POST"), kind("HEAD"))
    times = rng.choice([1, 1, 2, 4, None])
    every, skip = rng.choice([1, 1, 2, 5]), rng.choice([0, 0, 1, 3, 6])
    return Trouble(rng.choice(faults), rng.choice(matches), times, every, skip)


def test_no_plan_of_faults_breaks_a_promise(moto: Moto, bucket: Bucket) -> None:
    try_plans(moto, bucket, range(8))


@pytest.mark.long
def test_no_plan_of_many_breaks_a_promise(moto: Moto, bucket: Bucket) -> None:
    try_plans(moto, bucket, range(8, 80))


def try_plans(moto: Moto, bucket: Bucket, seeds: Sequence[int]) -> None:
    met: dict[str, bool] = {}

    def attempt(seed: str) -> None:
        rng = random.Random(int(seed))
        with scene_of(moto, bucket, rng.choice(ENGINES)) as scene:
            for _ in range(rng.randint(1, 4)):
                random_trouble(rng).make(scene.proxy)
            keep_promises(scene)
            met[seed] = bool(scene.proxy.met)

    side_by_side(map(str, seeds), attempt)
    # What a plan is about may never be asked for.
    assert sum(met.values()) > 0.7 * len(seeds)


def keep_promises(scene: Scene) -> None:
    errors = scene.save(NEXT)
    saved = {1: FIRST} if errors else {1: FIRST, 2: NEXT}
    scene.assert_steps(saved, {2: NEXT})
    load_something(scene)
    target = replace(scene, name=f"{scene.name}-target")
    reshard_or_fail(scene, target)
    target.assert_steps({}, {1: FIRST, 2: NEXT})
    scene.assert_steps(saved, {2: NEXT})


def load_something(scene: Scene) -> None:
    """A step, if any arrives, is one that was saved."""
    try:
        step, found = finished(lambda: _loaded(scene))
    except CkptkitError as error:
        assert_clear(error)
        return
    state: State = {1: FIRST, 2: NEXT}[step]
    assert all(same(found[name], state[name].whole) for name in state)


def _loaded(scene: Scene) -> tuple[int, dict[str, np.ndarray]]:
    with ckptkit.open(scene.store()) as checkpoint:
        found = {name: np.empty(a.shape, a.dtype.numpy) for name, a in checkpoint.arrays.items()}
        checkpoint.read_many([(n, Box.whole(out.shape), out) for n, out in found.items()])
        return checkpoint.step, found


def reshard_or_fail(scene: Scene, target: Scene) -> None:
    try:
        finished(lambda: ckptkit.reshard(scene.store(), target.store(), to="fsdp:3", workers=2))
    except CkptkitError as error:
        assert_clear(error)
