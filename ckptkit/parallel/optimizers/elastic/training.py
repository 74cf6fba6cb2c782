"""A training loop that goes on where it was, with as many ranks as there are now."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch.optim import Optimizer

from ckptkit.checkpoint.ranks import DEFAULT_TIMEOUT, Ranks, leaving
from ckptkit.errors import CkptkitError, FormatError, UsageError
from ckptkit.live.checkpointer import Checkpointer
from ckptkit.live.extra import rng_state, set_rng_state
from ckptkit.live.ranks import current_world, next_name, ranks_of
from ckptkit.live.restore import Restored
from ckptkit.model import PerRank
from ckptkit.parallel.optimizers.elastic.rate import Rule, rule_of, scale
from ckptkit.parallel.optimizers.elastic.replicas import (
    DOCUMENT,
    Replicas,
    folder_in_memory,
    newest_of,
)
from ckptkit.parallel.optimizers.elastic.sampler import GlobalSampler
from ckptkit.parallel.optimizers.elastic.seeds import seed_of

log = logging.getLogger("ckptkit.parallel")

_STAY = 10.0  # seconds, for ranks that come to the end a little later
_PAUSE = 0.005
_PATIENCE = 5.0  # seconds, for a save to end once the training has failed


@dataclass(frozen=True, slots=True)
class Step:
    """What a rank does in one step."""

    number: int
    samples: list[int]
    """Of the data set, this rank's."""
    weight: float
    """What to multiply the mean loss of the samples with, so that the mean over ranks is the mean
    over all samples; 1 where they can be shared out evenly.
    """


class ElasticTraining:
    """Steps through a training whose workers come and go.

    A launcher such as `torchrun --nnodes 1:4` restarts all workers when one dies, leaves or joins.
    Each then makes the process group, the model and this, and goes on: with the step in the memory
    of the machine (`replicas`, a folder that all ranks see; by default one in /dev/shm that is the
    launcher's job's own) if there is one, else with the newest checkpoint. State is resharded to
    the ranks there are, the samples go on at the same place, and the learning rate follows `rule`
    ("constant", "linear", "sqrt", or a function of the ratio of ranks).

    A step takes `batch` samples of all ranks together, or `batch_per_rank` of each. The learning
    rate is meant for `reference` ranks, by default for as many as the training begins with.

    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> sampler = GlobalSampler(8)
    >>> with (
    ...     Checkpointer("runs/elastic") as ckpt,
    ...     ElasticTraining(
    ...         ckpt, model=model, optimizer=optimizer, sampler=sampler, batch=4
    ...     ) as training,
    ... ):
    ...     for step in training.steps(2):
    ...         model(torch.ones(len(step.samples), 2)).sum().backward()
    ...         optimizer.step()
    >>> training.step
    2
    """

    def __init__(  # noqa: PLR0913 — one keyword for each decision
        self,
        checkpointer: Checkpointer,
        *,
        model: object,
        optimizer: Optimizer,
        sampler: GlobalSampler,
        batch: int | None = None,
        batch_per_rank: int | None = None,
        rule: str | Rule = "constant",
        reference: int | None = None,
        scheduler: object = None,
        state: Mapping[str, object] | None = None,
        save_every: int = 100,
        replicate_every: int = 1,
        replicas: str | os.PathLike[str] | None = "auto",
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self._world = current_world()
        ranks = self._world.size
        if (batch is None) == (batch_per_rank is None):
            raise UsageError("one of batch and batch_per_rank says how many samples a step takes")
        self._count = batch if batch is not None else (batch_per_rank or 0) * ranks
        if self._count < ranks:
            raise UsageError(f"too few for {ranks} ranks", where="batch", value=self._count)
        if save_every < 1 or replicate_every < 1:
            raise UsageError("at least 1", where="save_every, replicate_every")
        self._checkpointer = checkpointer
        self._parts = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "state": state,
        }
        self._optimizer, self._scheduler, self._sampler = optimizer, scheduler, sampler
        self._save_every, self._replicate_every = save_every, replicate_every
        self._timeout = timeout
        folder = folder_in_memory(checkpointer.location) if replicas == "auto" else replicas
        self._replicas = None if folder is None else Replicas.of(folder, self._world, timeout)
        self._step, self._saved, self._job = 0, -1, ""
        self._reference = reference or ranks
        self._begin(rule_of(rule))

    @property
    def step(self) -> int:
        """How many steps have been done."""
        return self._step

    def steps(self, last: int) -> Iterator[Step]:
        """The steps that are left up to a number; what each has changed is saved after it."""
        rank, ranks = self._world.rank, self._world.size
        while self._step < last:
            samples = self._sampler.share(self._count, rank, ranks)
            yield Step(self._step + 1, samples, len(samples) * ranks / self._count)
            # Only what has been done counts: the loop may be left in the middle of a step.
            self._sampler.advance(self._count)
            self._step += 1
            if self._step % self._save_every == 0:
                self._save(self._checkpointer)
            elif self._replicas is not None and self._step % self._replicate_every == 0:
                self._save(self._replicas.checkpointer)

    def close(self) -> None:
        """Save the last step, and free the memory of replicas."""
        self._checkpointer.wait()
        if self._saved < self._step:
            self._save(self._checkpointer)
            self._checkpointer.wait()
        if self._replicas is not None:
            self._replicas.close()
            self._room().wait()  # nobody writes there any more
            if self._world.rank == 0:
                self._replicas.remove()
        self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            # What is being written may wait for a rank that is gone: the newest step before it is
            # what the job goes on with, now and not when the time is over.
            self._checkpointer.cancel(patience=_PATIENCE)
            if self._replicas is not None:
                self._replicas.checkpointer.cancel()
                try:
                    self._replicas.close()
                except CkptkitError as problem:
                    # The error that ends the block says more.
                    log.warning("the last replica was not written: %s", problem)

    def _begin(self, rule: Rule) -> None:
        newest = self._newest()
        restored = self._restore(newest)
        if restored is None:
            # Replicas belong to a run that has this step: what another left is not taken for it.
            self._job = self._room().share(lambda: secrets.token_hex(8))
            self._adapt(rule(self._world.size / self._reference))
            self._save(self._checkpointer)
            self._checkpointer.wait()
            self._clear(-1)
            return
        document = restored.extra[DOCUMENT]
        self._step, self._job = restored.step, document["job"]
        self._reference = document["reference"]
        self._saved = restored.step
        self._sampler.load_state_dict(document["sampler"])
        if document["ranks"] == self._world.size:
            set_rng_state(restored.extra["rng"])
        else:  # not what they began with, and not the same on two ranks
            torch.manual_seed(seed_of(self._step, self._world.rank))
        before = rule(document["ranks"] / self._reference)
        self._adapt(rule(self._world.size / self._reference) / before)
        self._clear(newest)

    def _newest(self) -> int:
        """The step in memory that is newer than all checkpoints, or -1: rank 0's view."""

        def newest() -> int:
            if self._replicas is None:
                return -1
            saved, job = newest_of(self._checkpointer.run)
            replica, _ = newest_of(self._replicas.checkpointer.run, job)
            return replica if replica > saved >= 0 else -1

        ranks = self._room()
        with leaving(ranks):
            return int(ranks.share(newest))

    def _restore(self, replica: int) -> Restored | None:
        if replica >= 0 and self._replicas is not None:
            try:
                restored = self._replicas.checkpointer.restore(**self._parts, step=replica)  # type: ignore[arg-type]
                log.info("going on from step %d, which was in memory", replica)
                return self._checked(restored)
            except CkptkitError as error:
                log.warning("step %d in memory is of no use: %s", replica, error)
        return self._checked(self._checkpointer.restore(**self._parts, fallback=True))  # type: ignore[arg-type]

    def _checked(self, restored: Restored | None) -> Restored | None:
        if restored is not None and DOCUMENT not in restored.extra:
            raise FormatError(
                "the step was not saved by an ElasticTraining",
                where=self._checkpointer.location,
                hint="begin another run, and load this step into the model first",
            )
        return restored

    def _adapt(self, factor: float) -> None:
        if factor != 1:
            scale(factor, self._optimizer, self._scheduler)
            if self._world.rank == 0:
                log.info("learning rates x %g, for %d ranks", factor, self._world.size)

    def _save(self, checkpointer: Checkpointer) -> None:
        document = {
            "job": self._job,
            "ranks": self._world.size,
            "reference": self._reference,
            "sampler": self._sampler.state_dict(),
        }
        extra = {DOCUMENT: document, "rng": PerRank(rng_state())}
        saved = checkpointer.save(self._step, **self._parts, extra=extra)  # type: ignore[arg-type]
        if saved and checkpointer is self._checkpointer:
            self._saved = self._step

    def _clear(self, but: int) -> None:
        if self._replicas is not None:
            if self._world.rank == 0:
                self._replicas.clear(but=but)
            self._room().wait()

    def _leave(self) -> None:
        """Rank 0 goes last: with it may go the store that the others still ask how they met."""
        world, key = self._world, f"ckptkit/{next_name(self._world, 'left')}"
        if world.store is None:
            return
        left = world.store.add(key, int(world.rank != 0))
        deadline = time.monotonic() + _STAY
        while world.rank == 0 and left < world.size - 1 and time.monotonic() < deadline:
            time.sleep(_PAUSE)
            left = world.store.add(key, 0)

    def _room(self) -> Ranks:
        name = next_name(self._world, "elastic")
        return ranks_of(self._world, name, self._timeout, "the training does not go on")
