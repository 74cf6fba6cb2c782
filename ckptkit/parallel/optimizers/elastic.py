"""A training loop that goes on where it was, with as many ranks as there are now, and the order of
samples that it keeps.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Self, TypeAlias

import torch
from torch.optim import Optimizer

from ckptkit.checkpoint.ranks import DEFAULT_TIMEOUT, Ranks
from ckptkit.checkpoint.run.run import Run
from ckptkit.errors import CkptkitError, FormatError, UsageError
from ckptkit.format.objects import PerRank
from ckptkit.live.checkpointer import Checkpointer
from ckptkit.live.restore import Restored
from ckptkit.live.snapshot import topology_of
from ckptkit.live.state.extra import data_rank, rng_state, set_rng_state
from ckptkit.live.state.ranks import World, current_world, meeting, next_name
from ckptkit.live.wrappers import Training

log = logging.getLogger("ckptkit.parallel")

_STAY = 10.0  # seconds, for ranks that come to the end a little later
_PAUSE = 0.005
_PATIENCE = 5.0  # seconds, for a save to end once the training has failed
_MEMORY = Path("/dev/shm")  # noqa: S108 — it is memory that is wanted
_DOCUMENT = "elastic"

RateRule: TypeAlias = Callable[[float], float]
"""What a learning rate is multiplied with when there are so many times as many ranks."""

_RULES: dict[str, RateRule] = {
    "constant": lambda _: 1.0,
    "linear": lambda ratio: ratio,
    "sqrt": math.sqrt,
}


@dataclass(frozen=True, slots=True)
class Step:
    """What a rank does in one step."""

    number: int
    samples: list[int]
    """The numbers of this rank's samples in the data set."""
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

    A step takes `batch` samples of all ranks together, or `batch_per_rank` of each. Ranks of tensor
    parallelism or of a pipeline, which compute together, count as one and get the same. The
    learning rate is meant for `reference` ranks, by default for as many as the training begins
    with.

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
        rule: str | RateRule = "constant",
        reference: int | None = None,
        scheduler: object = None,
        state: Mapping[str, object] | None = None,
        save_every: int = 100,
        replicate_every: int = 1,
        replicas: str | os.PathLike[str] | None = "auto",
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self._world = world = current_world()
        # Ranks of tensor parallelism and of a pipeline compute together, on the same samples.
        spread = topology_of(world, Training.of(model=model), None).strategy
        self._reader, readers = data_rank(spread, world.rank)
        self._readers = readers or world.size
        if (batch is None) == (batch_per_rank is None):
            raise UsageError("one of batch and batch_per_rank says how many samples a step takes")
        self._count = batch if batch is not None else (batch_per_rank or 0) * self._readers
        if self._count < self._readers:
            raise UsageError(f"too few for {self._readers} ranks", where="batch", value=self._count)
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
        self._replicas = None if folder is None else replicas_in(folder, self._world, timeout)
        self.step = 0
        """How many steps have been done."""
        self._saved, self._job = -1, ""
        self._reference = reference or world.size
        self._begin(rule_of(rule))

    def steps(self, last: int) -> Iterator[Step]:
        """The steps that are left up to a number; what each has changed is saved after it."""
        while self.step < last:
            samples = self._sampler.share(self._count, self._reader, self._readers)
            yield Step(self.step + 1, samples, len(samples) * self._readers / self._count)
            # Only what has been done counts: the loop may be left in the middle of a step.
            self._sampler.advance(self._count)
            self.step += 1
            if self.step % self._save_every == 0:
                self._save(self._checkpointer)
            elif self._replicas is not None and self.step % self._replicate_every == 0:
                self._save(self._replicas)

    def close(self) -> None:
        """Save the last step, and free the memory of replicas."""
        self._checkpointer.wait()
        if self._saved < self.step:
            self._save(self._checkpointer)
            self._checkpointer.wait()
        if self._replicas is not None:
            self._replicas.close()
            with self._meeting() as ranks:
                ranks.wait()  # nobody writes there any more
            if self._world.rank == 0:
                shutil.rmtree(self._replicas.location, ignore_errors=True)
        # Rank 0 goes last: with it may go the store that the others still ask how they met.
        world = self._world
        if world.rendezvous is None:
            return
        key = f"ckptkit/{next_name(world, 'left')}"
        left = world.rendezvous.add(key, int(world.rank != 0))
        deadline = time.monotonic() + _STAY
        while world.rank == 0 and left < world.size - 1 and time.monotonic() < deadline:
            time.sleep(_PAUSE)
            left = world.rendezvous.add(key, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            # What is being written may wait for a rank that is gone: the newest step before it is
            # what the job goes on with, now and not when the time is over.
            self._checkpointer.cancel(patience=_PATIENCE)
            if self._replicas is not None:
                self._replicas.cancel()
                try:
                    self._replicas.close()
                except CkptkitError as problem:
                    # The error that ends the block says more.
                    log.warning("the last replica was not written: %s", problem)

    def _begin(self, rule: RateRule) -> None:
        """Go on with the newest step there is, of whatever number of ranks, or begin a run."""

        def newer_replica() -> int:
            """The step in memory that is newer than all checkpoints, or -1: rank 0's view."""
            if self._replicas is None:
                return -1
            saved, job = newest_of(self._checkpointer.run)
            replica, _ = newest_of(self._replicas.run, job)
            # Without a checkpoint nobody can tell whether replicas are of this run.
            return replica if replica > saved >= 0 else -1

        with self._meeting() as ranks:
            replica = int(ranks.share(newer_replica))
        restored, in_memory = self._restored(replica)
        before = 1.0
        if restored is None:
            # Replicas belong to a run that has this step: what another left is not taken for it.
            with self._meeting() as ranks:
                self._job = ranks.share(lambda: secrets.token_hex(8))
        else:
            document = restored.extra[_DOCUMENT]
            self.step = restored.step
            # A step of memory alone is lost with it: `close` has to save it first.
            self._saved = -1 if in_memory else restored.step
            self._job, self._reference = document["job"], document["reference"]
            self._sampler.load_state_dict(document["sampler"])
            if document["ranks"] == self._world.size:
                set_rng_state(restored.extra["rng"])
            else:  # not what they began with, and not the same on two ranks
                torch.manual_seed(seed_of(self.step, self._reader))
            # What was restored has been multiplied already, for the ranks that there were.
            before = rule(document["ranks"] / self._reference)
        factor = rule(self._world.size / self._reference) / before
        if factor != 1:
            scale(factor, self._optimizer, self._scheduler)
            if self._world.rank == 0:
                log.info("learning rates x %g, for %d ranks", factor, self._world.size)
        if restored is None:
            self._save(self._checkpointer)
            self._checkpointer.wait()
        if self._replicas is not None:
            with self._meeting() as ranks:
                if self._world.rank == 0:
                    # One that was of no use would be tried again by each later job.
                    free_memory(self._replicas.run, replica if in_memory else -1)
                ranks.wait()

    def _restored(self, replica: int) -> tuple[Restored | None, bool]:
        """What a step gave back: that in memory, or where it is of no use the newest checkpoint;
        and whether it was that in memory.
        """
        restored: Restored | None = None
        if replica >= 0 and self._replicas is not None:
            try:
                restored = self._replicas.restore(**self._parts, step=replica)  # type: ignore[arg-type]
                log.info("going on from step %d, which was in memory", replica)
            except CkptkitError as error:
                log.warning("step %d in memory is of no use: %s", replica, error)
        in_memory = restored is not None
        if restored is None:
            restored = self._checkpointer.restore(**self._parts, fallback=True)  # type: ignore[arg-type]
        if restored is not None and _DOCUMENT not in restored.extra:
            raise FormatError(
                "the step was not saved by an ElasticTraining",
                where=self._checkpointer.location,
                hint="begin another run, and load this step into the model first",
            )
        return restored, in_memory

    def _save(self, checkpointer: Checkpointer) -> None:
        document = {
            "job": self._job,
            "ranks": self._world.size,
            "reference": self._reference,
            "sampler": self._sampler.state_dict(),
        }
        extra = {_DOCUMENT: document, "rng": PerRank(rng_state())}
        saved = checkpointer.save(self.step, **self._parts, extra=extra)  # type: ignore[arg-type]
        if saved and checkpointer is self._checkpointer:
            self._saved = self.step

    def _meeting(self) -> AbstractContextManager[Ranks]:
        return meeting(self._world, "elastic", self._timeout, "the training does not go on")


def replicas_in(
    folder: str | os.PathLike[str], world: World, timeout: float
) -> Checkpointer | None:
    """What keeps one step in a folder that all ranks see, as in the memory of a machine, which
    outlives the processes that a launcher restarts; None where some rank does not see it.
    """
    path = Path(folder)
    token = path / f".seen-{os.getpid()}"
    with meeting(world, "replicas", timeout, "nothing was replicated") as ranks:
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Where all users may write, somebody else may have made it, or a link to what is ours.
            is_own = path.lstat().st_uid == path.stat().st_uid == os.getuid()
            if world.rank == 0 and is_own:
                token.touch()
        except OSError as error:  # without replicas the training goes on as well
            log.warning("nothing is kept in %s: %s", folder, error)
            is_own = False
        seen = path / ranks.share(lambda: token.name)
        all_see = ranks.agree(is_own and seen.exists(), all)
    if world.rank == 0 and is_own:
        token.unlink(missing_ok=True)
    if not all_see:
        if world.rank == 0:
            log.warning("%s is not seen by all ranks: only checkpoints are gone on from", folder)
        return None
    return Checkpointer(
        path,
        keep_last=1,
        asynchronous=True,
        when_busy="skip",
        overwrite=True,
        timeout=timeout,
    )


def free_memory(run: Run, kept: int) -> None:
    """Delete what killed ranks left in memory, and all steps but one."""
    try:
        run.delete(info.step for info in run.listing() if info.step != kept)
        if kept >= 0:
            run.prune(keep_last=1, grace=0)
    except CkptkitError as error:  # no reason for a training to end
        log.warning("memory that replicas take was not freed: %s", error)


def newest_of(run: Run, job: str = "") -> tuple[int, str]:
    """The newest step of a run that can be opened, and the job it is of; -1 where there is none.
    With `job`, the newest one of that.
    """
    for step in reversed(run.steps()):
        try:
            with run.open(step) as checkpoint:
                item = checkpoint.objects.get(f"extra/{_DOCUMENT}")
        except CkptkitError as error:
            log.warning("step %d of %s is passed over: %s", step, run.location, error)
            continue
        found = str(item.get("job", "")) if isinstance(item, dict) else ""
        if not job or found == job:
            return step, found
    return -1, ""


def folder_in_memory(location: str) -> Path | None:
    """Where replicas of a run are by default: under torchrun, which restarts the ranks."""
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    if job is None or not _MEMORY.is_dir():
        return None
    name = f"{os.getuid()}-{job}-{location}".replace("/", "_")[-200:]
    return _MEMORY / f"ckptkit-{name}"


def rule_of(rule: str | RateRule) -> RateRule:
    if callable(rule):
        return rule
    if rule not in _RULES:
        raise UsageError(
            "no rule for the learning rate",
            where="rule",
            value=rule,
            hint=f"known: {', '.join(_RULES)}, or a function of the ratio of ranks",
        )
    return _RULES[rule]


def scale(factor: float, optimizer: Optimizer, scheduler: object = None) -> None:
    """Multiply all learning rates, also those that a scheduler computes from."""
    for group in optimizer.param_groups:
        for key in group.keys() & {"lr", "initial_lr", "max_lr", "min_lr"}:
            group[key] = group[key] * factor
    for each in _schedulers(scheduler):
        for name in ("base_lrs", "max_lrs", "min_lrs", "_last_lr", "eta_min"):
            found = getattr(each, name, None)
            if isinstance(found, list):
                setattr(each, name, [rate * factor for rate in found])
            elif found is not None:
                setattr(each, name, found * factor)


def _schedulers(scheduler: Any) -> Iterator[Any]:
    if scheduler is not None:
        yield scheduler
        for inner in getattr(scheduler, "_schedulers", []):
            yield from _schedulers(inner)


class GlobalSampler:
    """Gives each sample once an epoch, to one rank, also when the number of ranks changes.

    Its position is how many samples all ranks together have taken. An epoch's order follows from
    the seed and the number of the epoch; a batch may reach into the next epoch.

    >>> sampler = GlobalSampler(10, shuffle=False)
    >>> sampler.share(4, rank=1, ranks=2)
    [2, 3]
    """

    def __init__(self, size: int, *, seed: int = 0, shuffle: bool = True) -> None:
        if size < 1:
            raise UsageError("a number of samples", where="size", value=size)
        self.position = 0
        self._size, self._seed, self._shuffle = size, seed, shuffle
        self._orders: dict[int, list[int]] = {}

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self.position // self._size

    def share(self, count: int, rank: int = 0, ranks: int = 1) -> list[int]:
        """What a rank has of the next samples; all ranks ask for the same number of them."""
        first = self.position
        samples = []
        # The end of a share is the beginning of the next one, rounded alike: so no sample is taken
        # twice or by nobody, and shares differ by one at most.
        for place in range(first + count * rank // ranks, first + count * (rank + 1) // ranks):
            epoch, at = divmod(place, self._size)
            if self._shuffle:
                if epoch not in self._orders:
                    if len(self._orders) > 1:
                        del self._orders[min(self._orders)]
                    generator = torch.Generator().manual_seed(seed_of(self._seed, epoch))
                    order = torch.randperm(self._size, generator=generator, device="cpu")
                    self._orders[epoch] = order.tolist()
                at = self._orders[epoch][at]
            samples.append(at)
        return samples

    def advance(self, count: int) -> None:
        """Go on by as many samples as all ranks together have taken."""
        self.position += count

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "size": self._size,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position in the same order."""
        mine = self.state_dict()
        for key in ("size", "seed", "shuffle"):
            if state[key] != mine[key]:
                raise UsageError(
                    f"the order was made with {key}={state[key]!r}: here samples would be lost "
                    "or come again",
                    where=f"sampler.{key}",
                    value=mine[key],
                )
        self.position = state["position"]


def seed_of(*numbers: int) -> int:
    """A seed made of several numbers; of 32 bits, as torch's generator on CPUs ignores more."""
    text = "/".join(map(str, numbers))
    return int.from_bytes(sha256(text.encode()).digest()[:4], "big")
