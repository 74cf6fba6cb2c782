"""A job that was stopped and resumed, perhaps elsewhere, learns as if it had not been."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ckptkit.live import Checkpointer
from tests.live.pool import Pool
from tests.live.strategies import LAYOUTS, build

FIRST, REST = range(1), range(1, 6)
ELSEWHERE = "fsdp:2,tp:2"
TRAINED = [
    "plain",
    "fsdp2:3",
    "fsdp1:2, flat",
    "zero1:2",
    ELSEWHERE,
    "pp:2, two stages each",
]
# Made of what the others are made of; tests/live/test_matrix.py compares what each of them loads.
ALIKE = [
    "ddp:2",
    "hsdp:2x2",
    "fsdp1:2",
    "fsdp1:2, tp:2",
    "zero2:2",
    "tp:2",
    "ddp:2,tp:2",
    "pp:3",
    "pp:2,fsdp:2",
    "pp:2,fsdp:1,tp:2",
]


Losses = list[list[float]]


def train(layout: str, location: str, elsewhere: Sequence[str] = ()) -> tuple[list[float], Losses]:
    """Train, and save before the last steps; the losses of these, and those of new jobs that go
    on from there and from elsewhere.
    """
    job = build(layout)
    job.train(FIRST)
    with Checkpointer(location, timeout=30, asynchronous=True, differing=["*seen"]) as checkpointer:
        checkpointer.save(len(FIRST), model=job.model, optimizer=job.optimizer)
        losses = job.train(REST)
    return losses, resume(layout, [location, *elsewhere]) if elsewhere else []


def resume(layout: str, locations: Sequence[str]) -> Losses:
    """The losses of the same steps after a restart from each location."""
    losses = []
    for seed, location in enumerate(locations):
        job = build(layout, seed=90 + seed)
        with Checkpointer(location, timeout=30) as checkpointer:
            assert checkpointer.restore(model=job.model, optimizer=job.optimizer)
        losses.append(job.train(REST))
    return losses


@pytest.fixture(scope="module")
def elsewhere(gloo: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    location = str(tmp_path_factory.mktemp("elsewhere"))
    losses, _ = gloo.run(LAYOUTS[ELSEWHERE].ranks, train, ELSEWHERE, location)[0]
    return location, losses


@pytest.mark.parametrize(
    "layout", [*TRAINED, *(pytest.param(layout, marks=pytest.mark.long) for layout in ALIKE)]
)
def test_a_resumed_job_goes_on_as_the_one_that_was_not_stopped(
    gloo: Pool, tmp_path: Path, elsewhere: tuple[str, list[float]], layout: str
) -> None:
    ranks = LAYOUTS[layout].ranks
    found = gloo.run(ranks, train, layout, str(tmp_path), [elsewhere[0]])
    expected, (here, moved) = found[0]
    assert here == expected
    assert expected[-1] < 0.8 * expected[0]  # it does learn
    np.testing.assert_allclose(moved, elsewhere[1], rtol=1e-4)
