"""The promise: what any strategy saves, any strategy loads, bit for bit."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.live import Checkpointer
from tests.live.gathering import Arrays, Comparison, gathered, same, scramble
from tests.live.pool import Pool
from tests.live.strategies import LAYOUTS, adamw, build, pp_fsdp_tp

STEPS = 2


def save(layout: str, location: str) -> Arrays:
    """Train, save, and return all that there is to be saved."""
    job = build(layout, seed=list(LAYOUTS).index(layout))
    job.train(range(STEPS))
    with Checkpointer(location, timeout=30, differing=["*seen"]) as checkpointer:
        checkpointer.save(STEPS, model=job.model, optimizer=job.optimizer)
    return gathered(job)


def load(layout: str, steps: Mapping[str, tuple[str, Arrays]]) -> dict[str, list[str]]:
    """Load what every strategy saved into the same job; what is wrong with each."""
    job = build(layout, seed=99)
    job.train([7])
    comparison = Comparison(job)
    problems = {}
    for number, (source, (location, whole)) in enumerate(steps.items()):
        scramble(job, forget=number % 2 == 0)
        try:
            with Checkpointer(location, timeout=30) as checkpointer:
                restored = checkpointer.restore(model=job.model, optimizer=job.optimizer)
            assert restored is not None
            problems[source] = [] if restored.report.is_exact else [str(restored.report)]
            problems[source] += comparison.differences(whole)
        except Exception:  # noqa: BLE001 — told to the test
            problems[source] = [traceback.format_exc()]
    return problems


class Matrix:
    """Saves from every strategy once, and loads all of them into one at a time."""

    def __init__(self, gloo: Pool, folder: Path) -> None:
        self._gloo = gloo
        self._folder = folder
        self.saved = functools.cache(self._saved)
        self.loaded = functools.cache(self._loaded)

    def location(self, layout: str) -> str:
        """Where a strategy saves."""
        return str(self._folder / str(list(LAYOUTS).index(layout)))

    def _saved(self, layout: str) -> Arrays:
        """The tensors of the whole job, as torch says that they were when it saved."""
        whole: dict[str, Any] = {}
        for rank in self._gloo.run(LAYOUTS[layout].ranks, save, layout, self.location(layout)):
            # Buffers may differ between ranks: what counts are those of the first.
            whole = dict(rank) | whole
        return whole

    def _loaded(self, layout: str) -> list[dict[str, list[str]]]:
        steps = {source: (self.location(source), self.saved(source)) for source in LAYOUTS}
        return self._gloo.run(LAYOUTS[layout].ranks, load, layout, steps)


@pytest.fixture(scope="module")
def matrix(gloo: Pool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(gloo, tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("source", LAYOUTS)
def test_a_step_holds_what_the_job_held(matrix: Matrix, source: str) -> None:
    whole = matrix.saved(source)
    with ckptkit.open(matrix.location(source)) as step:
        assert set(step.arrays) == set(whole)
        assert str(step.strategy) == LAYOUTS[source].written
        assert not [name for name in whole if not same(step.read(name), whole[name])]


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_any_strategy_loads_what_any_saved(matrix: Matrix, source: str, target: str) -> None:
    problems = [f"rank {n}: {p}" for n, r in enumerate(matrix.loaded(target)) for p in r[source]]
    assert not problems, "\n".join(problems)


EIGHT = "pp:2,fsdp:2,tp:2"


def save_on_eight(location: str) -> Arrays:
    """As `save`, of a job that is no part of the matrix."""
    job = pp_fsdp_tp(3, adamw)
    job.train(range(STEPS))
    with Checkpointer(location, timeout=60, differing=["*seen"]) as checkpointer:
        checkpointer.save(STEPS, model=job.model, optimizer=job.optimizer)
    return gathered(job)


def load_on_eight(location: str, whole: Arrays) -> list[str]:
    """As `load`."""
    job = pp_fsdp_tp(4, adamw)
    with Checkpointer(location, timeout=60) as checkpointer:
        checkpointer.restore(model=job.model, optimizer=job.optimizer)
    return Comparison(job).differences(whole)


def test_eight_ranks_in_three_dims_do_too(matrix: Matrix, gloo: Pool, tmp_path: Path) -> None:
    whole: dict[str, Any] = {}
    for rank in gloo.run(8, save_on_eight, str(tmp_path), timeout=120):
        whole = dict(rank) | whole
    with ckptkit.open(tmp_path) as step:
        assert str(step.strategy) == EIGHT
    steps = {EIGHT: (str(tmp_path), whole)}
    for layout in ("plain", "fsdp2:3"):
        loaded = gloo.run(LAYOUTS[layout].ranks, load, layout, steps)
        assert loaded == [{EIGHT: []}] * LAYOUTS[layout].ranks
    source = "fsdp2:3"
    arrays = matrix.saved(source)
    loaded_by_eight = gloo.run(8, load_on_eight, matrix.location(source), arrays, timeout=120)
    assert loaded_by_eight == [[]] * 8
