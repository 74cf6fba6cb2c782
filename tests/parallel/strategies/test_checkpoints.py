"""What one strategy has trained and saved, any other goes on with."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ckptkit.live import (
    Checkpointer,
    DistributedModel,
    load,
    save_distributed,
)
from tests.live.pool import Pool
from tests.parallel.strategies.test_losses import ON_FOUR, ranks_of
from tests.parallel.strategies.training import STEPS, farthest, reference, spread, train, values

SPECS = (
    "single",
    "ddp:2",
    "zero1:2",
    "zero2:2",
    "fsdp:3",
    "ddp:2,fsdp:2",
    "tp:2",
    "tp:2,fsdp:2",
    "ddp:2,tp:2",
    "pp:2",
    "pp:2,ddp:2",
    "pp:2,zero1:2",
    "pp:2,fsdp:2",
    "pp:2,tp:2",
)
# One process, uneven shares, cuts along two axes, and stages that share out their optimizers: any
# of these goes on with what they saved, any other with what the two of them did that are farthest
# from one process, and one process with what any saved. All other pairs are for long tests.
CORE = ("single", "fsdp:3", "tp:2,fsdp:2", "pp:2,zero1:2")
FAR = CORE[-2:]
HALF = STEPS // 2

Saved = Callable[[str], str]


def save(spec: str, location: str) -> None:
    """Train half of the steps, and save."""
    dist = spread(spec)
    train(dist, range(HALF))
    dist.save(location, HALF, timeout=30, differing=["*seen"])


def go_on(spec: str, locations: Mapping[str, str]) -> dict[str, str]:
    """Load what each strategy saved, and train the other half; what is wrong with each."""
    dist = spread(spec, seed=9)
    train(dist, [7])
    losses, parameters = reference()
    problems = {}
    for source, location in locations.items():
        try:
            restored = dist.load(location, timeout=30)
            assert (restored.step, restored.report.is_exact) == (HALF, True)
            found = train(dist, range(HALF, STEPS))
            apart = max(abs(a - b) for a, b in zip(found, losses[HALF:], strict=True))
            apart = max(apart, farthest(values(dist), parameters))
            problems[source] = "" if apart < 1e-5 else f"apart by {apart:g}"
        except Exception:  # noqa: BLE001 — told to the test
            problems[source] = traceback.format_exc()
    return problems


@pytest.fixture(scope="module")
def saved(gloo: Pool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Where a strategy has saved."""
    folder = tmp_path_factory.mktemp("saved")

    @functools.cache
    def found(spec: str) -> str:
        location = str(folder / spec.replace(":", "").replace(",", "-"))
        gloo.run(ranks_of(spec), save, spec, location)
        return location

    return found


@pytest.mark.parametrize(
    ("target", "sources"),
    [
        ("single", SPECS),
        *((target, CORE if target in CORE else FAR) for target in SPECS[1:]),
        *(pytest.param(target, SPECS, marks=pytest.mark.long) for target in SPECS),
    ],
    ids=lambda value: value if isinstance(value, str) else f"of {len(value)}",
)
def test_training_goes_on_as_if_it_had_been_one_process_all_along(
    gloo: Pool, saved: Saved, target: str, sources: tuple[str, ...]
) -> None:
    locations = {source: saved(source) for source in sources}
    for rank, problems in enumerate(gloo.run(ranks_of(target), go_on, target, locations)):
        assert not {k: v for k, v in problems.items() if v}, f"rank {rank}"


def with_checkpointer(spec: str, location: str, steps: list[int]) -> tuple[int, list[float]]:
    """Train on from the newest step of a run, and save in the background."""
    dist = spread(spec)
    with Checkpointer(location, asynchronous=True, timeout=30, differing=["*seen"]) as checkpointer:
        restored = checkpointer.restore(model=dist.model, optimizer=dist.optimizer)
        losses = train(dist, steps)
        checkpointer.save(steps[-1], model=dist.model, optimizer=dist.optimizer)
    return restored.step if restored else 0, losses


def test_a_run_changes_its_strategy_by_changing_a_text(gloo: Pool, tmp_path: Path) -> None:
    location = str(tmp_path / "run")
    losses: list[float] = []
    for number, spec in enumerate(("fsdp:4", "tp:2,fsdp:2", "pp:2,ddp:2", "ddp:2,tp:2")):
        found = gloo.run(ranks_of(spec), with_checkpointer, spec, location, [number])
        losses += found[0][1]
    assert losses == pytest.approx(reference()[0], abs=1e-5)


def twice(spec: str, location: str) -> tuple[bool, str]:
    """Whether stopping and going on gives the very bits of a run without a stop."""
    whole, half = spread(spec), spread(spec)
    train(whole, range(STEPS))
    train(half, range(HALF))
    half.save(location, HALF, timeout=30, differing=["*seen"])
    again = spread(spec, seed=9)
    again.load(location, timeout=30)
    train(again, range(HALF, STEPS))
    mine, theirs = values(again), values(whole)
    return all(mine[name].equal(theirs[name]) for name in theirs), str(again.strategy)


# Each way to hold state, once.
HELD = ("ddp:4", "zero1:4", "zero2:4", "tp:2,fsdp:2", "pp:2,zero1:2")


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, marks=() if spec in HELD else pytest.mark.long)
        for spec in ON_FOUR
        if spec not in ("zero3:4", "tp:4")
    ],
)
def test_resumed_training_is_the_same_to_the_bit(gloo: Pool, tmp_path: Path, spec: str) -> None:
    for same, _ in gloo.run(ranks_of(spec), twice, spec, str(tmp_path)):
        assert same


def whole(spec: str, location: str) -> None:
    """What `as_distributed` made is a model for all of `ckptkit.live`."""
    dist = spread(spec)
    train(dist, range(STEPS))
    assert DistributedModel(dist).strategy.world_size == dist.strategy.world_size
    with Checkpointer(location, differing=["*seen"]) as checkpointer:
        save_distributed(checkpointer, dist, dist.optimizer, step=1)
    before = dist.full_state_dict()
    train(dist, [7])
    load(location, model=dist, optimizer=dist.optimizer)
    full = dist.full_state_dict()
    if before is None or full is None:
        assert before is full
        assert dist.strategy.world_size > 1
        return
    parameters = reference()[1]
    assert farthest({name: full[name] for name in parameters}, parameters) < 1e-5
    assert all(full[name].equal(value) for name, value in before.items())


@pytest.mark.parametrize("spec", ["single", "zero1:2", "fsdp:3", "tp:2,fsdp:2", "pp:2"])
def test_the_whole_parameters_are_one_call(gloo: Pool, spec: str, tmp_path: Path) -> None:
    gloo.run(ranks_of(spec), whole, spec, str(tmp_path))
