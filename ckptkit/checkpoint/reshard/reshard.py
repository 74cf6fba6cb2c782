"""The two calls: what would happen, and making it happen."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.checkpoint.checkpoint import Checkpoint, open_checkpoint
from ckptkit.checkpoint.places import Place, store_at
from ckptkit.checkpoint.reshard.budget import DEFAULT_MEMORY, resident_bytes
from ckptkit.checkpoint.reshard.planning import ReshardPlan, cost_of, plan_of
from ckptkit.checkpoint.reshard.probe import seconds_for
from ckptkit.checkpoint.reshard.selection import Selection, choose
from ckptkit.checkpoint.reshard.target import Outline, Recipe, Target, target_of
from ckptkit.checkpoint.reshard.work import Means, Work, checked_from
from ckptkit.checkpoint.rules_file import rules_between
from ckptkit.checkpoint.threads import Progress, cores
from ckptkit.errors import UsageError
from ckptkit.model import Rules, Strategy
from ckptkit.model.quantity import parse_size
from ckptkit.plan.chunks import DEFAULT_CHUNK_BYTES

RulesLike = Rules | Mapping[str, Any] | str | os.PathLike[str] | None


@dataclass(frozen=True, slots=True)
class Resharded:
    """What a reshard has done: where the step is, and how many of its packs were there before."""

    location: str
    step: int
    committed: bool
    """False for a slice: `commit_packs` makes the step of all slices."""
    packs: int
    found: int


def plan_reshard(  # noqa: PLR0913 — one keyword for each decision, all but one with defaults
    src: Place,
    dst: Place,
    *,
    to: str | Strategy,
    source: str | None = None,
    rules: RulesLike = None,
    sizes: Mapping[str, int] | None = None,
    replicate_unknown: bool = False,
    selection: Selection | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    memory: int | str = DEFAULT_MEMORY,
    workers: int | None = None,
    engine: str | Executor = "threads",
    probe: bool = False,
) -> ReshardPlan:
    """What `reshard` with the same arguments would do; with `probe` also about how long it takes,
    for which a little is read of the source, and written and removed at the destination.
    """
    resident = resident_bytes()
    with _opened(src, source) as checkpoint:
        recipe = Recipe(Strategy.of(to), None, replicate_unknown, _checked(selection), chunk_bytes)
        target = _target(checkpoint, recipe, rules, sizes)
        means = Means(parse_size(memory), _workers(workers), engine)
        store = store_at(dst)
        work = Work(checkpoint, target, store, means, resident)
        seconds = None
        if probe:
            cost = cost_of(target, work.budget.batch_bytes)
            seconds = seconds_for(checkpoint, store, cost.bytes_read, cost.bytes_written)
        return plan_of(
            target,
            (checkpoint.location, work.location),
            work.budget,
            memory=means.memory,
            finished=work.finished(),
            seconds=seconds,
        )


def reshard(  # noqa: PLR0913 — one keyword for each decision, all but one with defaults
    src: Place,
    dst: Place,
    *,
    to: str | Strategy,
    source: str | None = None,
    rules: RulesLike = None,
    sizes: Mapping[str, int] | None = None,
    replicate_unknown: bool = False,
    selection: Selection | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    memory: int | str = DEFAULT_MEMORY,
    workers: int | None = None,
    engine: str | Executor = "threads",
    digest: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Resharded:
    """Make the step at `src` (of a run: its newest) one of strategy `to`, in the run `dst`.

    Never more than `memory` is in use beyond what the process has already, whatever the size of
    the step. Every chunk that is read is checked, `src` is only ever read, and the step exists at
    `dst` whole or not at all; after an interruption the same call goes on where it was.

    `source` is the strategy that the step is expected to have, `rules` a file, a preset, `auto` or
    a document that says which dims tensor parallelism cuts, `sizes` are numbers that they refer to.
    `engine` is threads, processes, dask://…, ray, slice:i/n or any executor; `digest` records that
    of the state, which does not depend on the strategy.
    """
    resident = resident_bytes()
    with _opened(src, source) as checkpoint:
        recipe = Recipe(Strategy.of(to), None, replicate_unknown, _checked(selection), chunk_bytes)
        target = _target(checkpoint, recipe, rules, sizes)
        if digest:
            target = _with_digest(checkpoint, target, parse_size(memory))
        means = Means(parse_size(memory), _workers(workers), engine, overwrite, progress)
        work = Work(checkpoint, target, store_at(dst), means, resident)
        is_slice = isinstance(engine, str) and engine.startswith("slice:")
        count, step = target.world_size, target.save.step
        if work.is_done:
            return Resharded(work.location, step, committed=True, packs=count, found=count)
        found = work.run()
        return Resharded(work.location, step, committed=not is_slice, packs=count, found=found)


def _opened(src: Place, expected: str | None) -> Checkpoint:
    checkpoint = open_checkpoint(src)
    checked_from(checkpoint, expected)
    return checkpoint


def _target(
    checkpoint: Checkpoint, recipe: Recipe, rules: RulesLike, sizes: Mapping[str, int] | None
) -> Target:
    outline = Outline.of(checkpoint.manifest)
    # Rules are about the names that the arrays will have.
    choice = choose(outline.arrays, outline.aliases, recipe.selection)
    names = [chosen.inner for chosen in choice.arrays]
    found = rules_between(
        checkpoint.strategy, recipe.strategy, rules, names=names, sizes=sizes or {}
    )
    return target_of(outline, replace(recipe, rules=found))


def _with_digest(checkpoint: Checkpoint, target: Target, memory: int) -> Target:
    # Here, because most reshards need no digest, nor what it stands on.
    from ckptkit.checkpoint.reshard.view import digest_of  # noqa: PLC0415

    found = digest_of(checkpoint, target, memory)
    return target_of(target.outline, replace(target.recipe, digest=found))


def _checked(selection: Selection | None) -> Selection:
    return selection or Selection()


def _workers(workers: int | None) -> int:
    if workers is None:
        return max(4, min(8, cores()))
    if workers < 1:
        raise UsageError("at least one worker is needed", value=workers)
    return workers
