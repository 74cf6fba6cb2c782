"""The two calls: what would happen, and making it happen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.checkpoint.places import Place, stores_at
from ckptkit.checkpoint.read.checkpoint import Checkpoint, open_checkpoint
from ckptkit.checkpoint.reshard.budget import DEFAULT_MEMORY, resident_bytes
from ckptkit.checkpoint.reshard.planning import ReshardPlan
from ckptkit.checkpoint.reshard.selection import Selection, choose
from ckptkit.checkpoint.reshard.target import Outline, Recipe, Target, target_of
from ckptkit.checkpoint.reshard.work import Means, Resharded, Work
from ckptkit.checkpoint.rules_file import RulesLike, rules_between
from ckptkit.checkpoint.workers import Progress, cores
from ckptkit.errors import UsageError
from ckptkit.model import Strategy
from ckptkit.model.document import parse_size
from ckptkit.plan.chunks import DEFAULT_CHUNK_BYTES
from ckptkit.storage import Options, Store


def plan_reshard(  # noqa: PLR0913 — one keyword for each decision, all but one with defaults
    src: Place,
    dst: Place,
    *,
    to: str | Strategy,
    expect: str | Strategy | None = None,
    rules: RulesLike | None = None,
    sizes: Mapping[str, Any] | None = None,
    replicate_unknown: bool = False,
    allow_split_heads: bool = False,
    selection: Selection | None = None,
    chunk_bytes: int | str = DEFAULT_CHUNK_BYTES,
    memory: int | str = DEFAULT_MEMORY,
    workers: int | None = None,
    engine: str | Executor = "threads",
    digest: bool = False,
    overwrite: bool = False,
    probe: bool = False,
    storage_options: Options | None = None,
    source_options: Options | None = None,
) -> ReshardPlan:
    """What `reshard` with the same arguments would do, and the errors that it would raise before it
    writes anything.

    With `probe` also about how long it takes: a little is read of the source, and written at the
    destination and removed again.
    """
    heads = allow_split_heads
    asked = _Asked(to, expect, rules, sizes, replicate_unknown, heads, selection, chunk_bytes)
    means = Means(parse_size(memory), _workers(workers), engine, digest, overwrite)
    stores = stores_at(src, dst, storage_options, source_options)
    with _begun(*stores, asked, means) as (_, work):
        return work.plan(probe=probe)


def reshard(  # noqa: PLR0913 — one keyword for each decision, all but one with defaults
    src: Place,
    dst: Place,
    *,
    to: str | Strategy,
    expect: str | Strategy | None = None,
    rules: RulesLike | None = None,
    sizes: Mapping[str, Any] | None = None,
    replicate_unknown: bool = False,
    allow_split_heads: bool = False,
    selection: Selection | None = None,
    chunk_bytes: int | str = DEFAULT_CHUNK_BYTES,
    memory: int | str = DEFAULT_MEMORY,
    workers: int | None = None,
    engine: str | Executor = "threads",
    digest: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    storage_options: Options | None = None,
    source_options: Options | None = None,
) -> Resharded:
    """Make the step at `src` (of a run: its newest) one of strategy `to`, in the run `dst`.

    Never more than `memory` is in use beyond what the process has already, whatever the size of
    the step. Every chunk that is read is checked, `src` is only ever read, and the step exists at
    `dst` whole or not at all; after an interruption the same call goes on where it was.

    `expect` is the strategy that the step has to have; `rules` a file, a preset, `auto`, a document
    or `Rules` that say which dims tensor parallelism cuts, `sizes` the numbers that they refer to:
    where these do not tell how long an attention head is, a cut that may go through one is refused,
    unless `allow_split_heads`. `chunk_bytes` is about how large chunks are that cannot go over as
    they are. `engine` is threads, processes, dask://…, ray, ray://…, slice:i/n (see `commit_packs`)
    or any executor; `digest` records that of the state, which does not depend on the strategy, for
    which `src` is read twice.
    `storage_options` reach both places, unless `source_options` are those of `src`.
    """
    heads = allow_split_heads
    asked = _Asked(to, expect, rules, sizes, replicate_unknown, heads, selection, chunk_bytes)
    means = Means(parse_size(memory), _workers(workers), engine, digest, overwrite, progress)
    stores = stores_at(src, dst, storage_options, source_options)
    with _begun(*stores, asked, means) as (checkpoint, work):
        if not digest:
            return work.run()
        work.check_way(digest_to_come=True)
        found = _with_digest(checkpoint, work.target, means.memory)
        return Work(checkpoint, found, work.store, means, work.resident).run()


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to become of a step, as the caller says it."""

    to: str | Strategy
    expect: str | Strategy | None
    rules: RulesLike | None
    sizes: Mapping[str, Any] | None
    replicate_unknown: bool
    allow_split_heads: bool
    selection: Selection | None
    chunk_bytes: int | str


@contextmanager
def _begun(
    source: Store, destination: Store, asked: _Asked, means: Means
) -> Iterator[tuple[Checkpoint, Work]]:
    resident = resident_bytes()
    recipe = Recipe(
        Strategy.of(asked.to),
        None,
        asked.replicate_unknown,
        asked.allow_split_heads,
        asked.selection or Selection(),
        parse_size(asked.chunk_bytes),
    )
    with open_checkpoint(source) as checkpoint:
        _check_strategy(checkpoint, asked.expect)
        target = _target(checkpoint, recipe, asked)
        yield checkpoint, Work(checkpoint, target, destination, means, resident)


def _target(checkpoint: Checkpoint, recipe: Recipe, asked: _Asked) -> Target:
    outline = Outline.of(checkpoint.manifest)
    # Rules are about the names that the arrays will have.
    choice = choose(outline.arrays, outline.aliases, recipe.selection)
    names = [chosen.inner for chosen in choice.arrays]
    found = rules_between(
        checkpoint.strategy, recipe.strategy, asked.rules, names=names, sizes=asked.sizes
    )
    return target_of(outline, replace(recipe, rules=found))


def _with_digest(checkpoint: Checkpoint, target: Target, memory: int) -> Target:
    # Here, because most reshards need no digest, nor what it stands on.
    from ckptkit.checkpoint.reshard.view import digest_of  # noqa: PLC0415

    found = digest_of(checkpoint, target, memory)
    return target_of(target.outline, replace(target.recipe, digest=found))


def _check_strategy(checkpoint: Checkpoint, expected: str | Strategy | None) -> None:
    """Refuse a step of another strategy than its user thinks."""
    if expected is not None and Strategy.of(expected) != checkpoint.strategy:
        raise UsageError(
            f"the step was written by {checkpoint.strategy}, not by {Strategy.of(expected)}",
            where=checkpoint.location,
            hint="leave --from out: the strategy is in the step",
        )


def _workers(workers: int | None) -> int:
    if workers is None:
        return max(4, min(8, cores()))
    if workers < 1:
        raise UsageError("at least one worker is needed", value=workers)
    return workers
