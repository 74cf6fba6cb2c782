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
from tests.live.strategies import (
    EACH_LAYOUT,
    LAYOUTS,
    LIKE_OTHERS,
    adamw,
    build,
    composable,
    pp_experts,
    pp_fsdp_tp,
)

STEPS = 1


CORE = [layout for layout in LAYOUTS if layout not in LIKE_OTHERS]


def in_core(source: str, target: str) -> bool:
    """Whether every run tries this pair: a strategy loads from itself and from one that is far
    off in the list, which is its opposite; and another one loads from it.
    """
    if LIKE_OTHERS & {source, target}:
        return False
    return (CORE.index(source) - CORE.index(target)) % len(CORE) in (0, 7)


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


def save_each(locations: Mapping[str, str]) -> dict[str, Arrays]:
    """What each strategy of so many ranks saves; what torch learns of a mesh it learns once."""
    return {layout: save(layout, location) for layout, location in locations.items()}


def load_each(
    steps: Mapping[str, Mapping[str, tuple[str, Arrays]]],
) -> dict[str, dict[str, list[str]]]:
    """What is wrong with what each strategy of so many ranks has loaded."""
    return {layout: load(layout, sources) for layout, sources in steps.items()}


class Matrix:
    """Saves from every strategy once, and loads what they saved, all of as many ranks in a job."""

    def __init__(self, gloo: Pool, folder: Path) -> None:
        self._gloo = gloo
        self._folder = folder
        self._saved_beside = functools.cache(self._save_beside)
        self._loaded_beside = functools.cache(self._load_beside)

    def location(self, layout: str) -> str:
        """Where a strategy saves."""
        return str(self._folder / str(list(LAYOUTS).index(layout)))

    def saved(self, layout: str) -> Arrays:
        """The tensors of the whole job, as torch says that they were when it saved."""
        return self._saved_beside(beside(layout))[layout]

    def loaded(self, layout: str, *, rest: bool) -> list[dict[str, list[str]]]:
        """What is wrong with each of the core of the matrix, or of the rest, by rank."""
        group = (layout,) if rest else beside(layout)
        return [rank[layout] for rank in self._loaded_beside(group, rest=rest)]

    def _save_beside(self, layouts: tuple[str, ...]) -> dict[str, Arrays]:
        whole: dict[str, dict[str, Any]] = {layout: {} for layout in layouts}
        locations = {layout: self.location(layout) for layout in layouts}
        for rank in self._gloo.run(LAYOUTS[layouts[0]].ranks, save_each, locations):
            for layout, arrays in rank.items():
                # Buffers may differ between ranks: what counts are those of the first.
                whole[layout] = dict(arrays) | whole[layout]
        return dict(whole)

    def _load_beside(
        self, layouts: tuple[str, ...], *, rest: bool
    ) -> list[dict[str, dict[str, list[str]]]]:
        steps = {
            layout: {
                source: (self.location(source), self.saved(source))
                for source in LAYOUTS
                if in_core(source, layout) != rest
            }
            for layout in layouts
        }
        return self._gloo.run(LAYOUTS[layouts[0]].ranks, load_each, steps)


def beside(layout: str) -> tuple[str, ...]:
    """The strategies of the core that have as many ranks, or one that is not of the core."""
    if layout in LIKE_OTHERS:
        return (layout,)
    return tuple(each for each in CORE if LAYOUTS[each].ranks == LAYOUTS[layout].ranks)


@pytest.fixture(scope="module")
def matrix(gloo: Pool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(gloo, tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("source", EACH_LAYOUT)
def test_a_step_holds_what_the_job_held(matrix: Matrix, source: str) -> None:
    whole = matrix.saved(source)
    with ckptkit.open(matrix.location(source)) as step:
        assert set(step.arrays) == set(whole)
        assert str(step.strategy) == LAYOUTS[source].written
        assert not [name for name in whole if not same(step.read(name), whole[name])]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(source, target, marks=() if in_core(source, target) else pytest.mark.long)
        for target in LAYOUTS
        for source in LAYOUTS
    ],
)
def test_any_strategy_loads_what_any_saved(matrix: Matrix, source: str, target: str) -> None:
    found = matrix.loaded(target, rest=not in_core(source, target))
    problems = [f"rank {n}: {p}" for n, rank in enumerate(found) for p in rank[source]]
    assert not problems, "\n".join(problems)


# No part of the matrix: of eight ranks, of stages that are spread over other meshes each, or old.
APART = {
    "pp:2,fsdp:2,tp:2": (8, pp_fsdp_tp),
    "pp:2,ep:2": (4, pp_experts),
    "pp:2,efsdp=fsdp:2,ep:2": (8, pp_experts),
    "ddp:2": (2, composable),
}


def save_apart(location: str, layout: str) -> Arrays:
    """As `save`."""
    job = APART[layout][1](3, adamw)
    job.train(range(STEPS))
    with Checkpointer(location, timeout=60, differing=["*seen"]) as checkpointer:
        checkpointer.save(STEPS, model=job.model, optimizer=job.optimizer)
    return gathered(job)


def load_apart(steps: list[tuple[str, Arrays]], layout: str) -> list[list[str]]:
    """As `load`."""
    job = APART[layout][1](4, adamw)
    found = []
    for location, whole in steps:
        with Checkpointer(location, timeout=60) as checkpointer:
            checkpointer.restore(model=job.model, optimizer=job.optimizer)
        found.append(Comparison(job).differences(whole))
    return found


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=pytest.mark.long if "efsdp" in layout else ()) for layout in APART],
)
def test_three_dims_other_meshes_of_stages_and_old_wrappers_do_too(
    matrix: Matrix, gloo: Pool, tmp_path: Path, layout: str
) -> None:
    ranks, own, one = APART[layout][0], str(tmp_path / "own"), str(tmp_path / "one")
    whole: dict[str, Any] = {}
    for rank in gloo.run(ranks, save_apart, own, layout, timeout=120):
        whole = dict(rank) | whole
    with ckptkit.open(own) as step:
        assert str(step.strategy) == layout
    ckptkit.reshard(own, one, to="single")
    steps = {"own": (own, whole), "one": (one, whole)}
    for other in ("plain", "fsdp2:3"):
        loaded = gloo.run(LAYOUTS[other].ranks, load, other, steps)
        assert loaded == [{"own": [], "one": []}] * LAYOUTS[other].ranks
    source = "fsdp2:3"
    into = [(matrix.location(source), matrix.saved(source)), *steps.values()]
    assert gloo.run(ranks, load_apart, into, layout, timeout=120) == [[[], [], []]] * ranks
