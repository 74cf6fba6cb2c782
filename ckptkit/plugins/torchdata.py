"""torchdata's StatefulDataLoader, whose position in the data goes on in a job of any size.

All ranks together take an epoch in one order, some samples from its front for each step. So one
number says where they are, however many they are: how many samples of the epoch are taken. A loader
that keeps more than that, as one of an iterable dataset does, goes on in a job of the same size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, cycle, islice
from typing import Any

from torch.utils.data import DistributedSampler, IterableDataset, Sampler

from ckptkit.errors import UsageError
from ckptkit.live.state.extra import SEEN_BY_ALL
from ckptkit.plugins import Framework

TORCHDATA = Framework("torchdata", "0.11", "torchdata")
StatefulDataLoader: Any = TORCHDATA.private(
    TORCHDATA.module("torchdata.stateful_dataloader"), "StatefulDataLoader"
)
StatefulDistributedSampler: Any = TORCHDATA.private(
    TORCHDATA.module("torchdata.stateful_dataloader.sampler"), "StatefulDistributedSampler"
)

_SKIP = 'skip=["dataloader"] begins the epoch again'


def sizes_of_steps(
    left: int, ranks: int, batch_size: int, *, drop_last: bool = False, equal: bool = False
) -> list[int]:
    """How many of the samples that are left all ranks take together in each step.

    Each rank has at least one in every step, and about as many as the others: ranks that train
    together take the same number of steps. Only in a last step may there be too few for that. With
    `drop_last` all are full; with `equal` each rank has exactly as many as the others.
    """
    full = ranks * batch_size
    steps = [full] * max(0, (left - ranks) // full)
    left -= sum(steps)  # now at most one full step and one sample less than there are ranks
    if drop_last or equal:
        left -= left % (full if drop_last else ranks)
    while left:
        # What one full step leaves would not go round: so it leaves one for each.
        keeps_back = full < left < full + ranks and batch_size > 1
        steps.append(left - ranks if keeps_back else min(left, full))
        left -= steps[-1]
    return steps


@dataclass(eq=False)
class RankBatches(Sampler[list[int]]):
    """The samples of each batch of one rank, from a place in the epoch on."""

    sampler: DistributedSampler[Any]
    batch_size: int
    drop_last: bool = field(kw_only=True)
    seen: int = 0

    @property
    def samples(self) -> int:
        """How many samples an epoch has."""
        return len(self.sampler.dataset)  # type: ignore[arg-type]

    def steps(self, seen: int) -> list[int]:
        """How many samples all ranks take together in each step that is left."""
        return sizes_of_steps(
            self.samples - seen,
            self.sampler.num_replicas,
            self.batch_size,
            drop_last=self.drop_last,
            equal=self.sampler.drop_last,
        )

    def __iter__(self) -> Iterator[list[int]]:
        mine, ranks = self.sampler, self.sampler.num_replicas
        # The order of a job of one rank is that of all jobs, before it is cut for them.
        whole: DistributedSampler[Any] = DistributedSampler(
            mine.dataset, num_replicas=1, rank=0, shuffle=mine.shuffle, seed=mine.seed
        )
        whole.set_epoch(mine.epoch)
        order = list(whole)
        steps = self.steps(self.seen)
        for start, size in zip(accumulate([self.seen, *steps]), steps, strict=False):
            taken = order[start : start + size]
            if size < ranks:  # as DistributedSampler fills up
                taken = list(islice(chain(taken, cycle(order)), ranks))
            yield taken[mine.rank :: ranks]

    def __len__(self) -> int:
        return len(self.steps(self.seen))


class ElasticDataLoader(StatefulDataLoader):  # type: ignore[misc]
    """A StatefulDataLoader that goes on in a job of any size: `sampler` is a DistributedSampler,
    which says how many shares of the data there are, and which one is read here.

    Its batches are those that DistributedSampler gives, but at the end of an epoch: what is left is
    shared out, so that no sample comes twice. Only where fewer are left than there are ranks some
    do, or are left out with the sampler's `drop_last`. The loader's `drop_last` leaves out what
    fills no whole batch on all ranks.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        sampler: Any = None,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        self._batches: RankBatches | None = None
        self._given = 0
        self._resumes = False
        # Why how many samples are taken does not say where a dataset is; empty where it does.
        self._why_not = ""
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            self._why_not = "only an iterable dataset itself knows which samples it has given"
        elif hasattr(dataset, "state_dict"):
            self._why_not = "the dataset keeps a state of its own"
        if self._why_not:
            super().__init__(dataset, batch_size, sampler=sampler, drop_last=drop_last, **options)
            return
        if type(sampler) not in (DistributedSampler, StatefulDistributedSampler):
            raise UsageError(
                "the order of this sampler is not known to be the same at another size",
                where="sampler",
                value=type(sampler).__name__,
                hint="pass DistributedSampler(dataset, shuffle=…, seed=…), in a single process "
                "with num_replicas=1, rank=0",
            )
        if options.get("shuffle"):
            raise UsageError("the sampler shuffles", hint="DistributedSampler(…, shuffle=True)")
        if type(batch_size) is not int or batch_size < 1:
            raise UsageError("batch_size has to be at least 1", value=batch_size)
        self._batches = RankBatches(sampler, batch_size, drop_last=drop_last)
        super().__init__(dataset, batch_sampler=self._batches, **options)
        # Who sets the epoch looks for the sampler here. torch refuses what is set later, because
        # its own batch sampler would not hear of it.
        self.__dict__["sampler"] = sampler

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__() if self._batches is None else self._counted(self._batches)

    def _counted(self, batches: RankBatches) -> Iterator[Any]:
        # Only the first epoch after a load goes on; in another one nothing was taken yet.
        if not (self._resumes and batches.sampler.epoch == self._epoch):
            batches.seen = self._given = 0
        self._resumes, self._epoch = False, batches.sampler.epoch
        self._seen = batches.seen
        for size, batch in zip(batches.steps(batches.seen), super().__iter__(), strict=True):
            self._seen += size
            self._given += 1
            yield batch

    def __len__(self) -> int:
        batches = self._batches
        if batches is None:
            return super().__len__()  # type: ignore[no-any-return]
        if self._resumes and (left := len(batches)):
            return self._given + left
        return len(batches.steps(0))

    def state_dict(self) -> dict[str, Any]:
        """Where all ranks are; the same on each."""
        batches = self._batches
        if batches is None:
            return super().state_dict()  # type: ignore[no-any-return]
        return {
            "epoch": self._epoch,
            SEEN_BY_ALL: self._seen,
            "batches": self._given,
            **_order(batches),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there, in this or in any other number of shares."""
        batches = self._batches
        if batches is None:
            super().load_state_dict(state)
            return
        if SEEN_BY_ALL not in state:
            raise UsageError(
                "the position of another kind of loader",
                value=sorted(state),
                hint=f"load it into a StatefulDataLoader, at the size that saved it; {_SKIP}",
            )
        for key, here in _order(batches).items():
            if state.get(key) != here:
                raise UsageError(
                    "the position is in another order of samples",
                    where=key,
                    value=f"{state.get(key)}, here {here}",
                    hint=f"pass the same data and the same sampler as then; {_SKIP}",
                )
        batches.sampler.set_epoch(state["epoch"])
        batches.seen = self._seen = state[SEEN_BY_ALL]
        self._epoch, self._given, self._resumes = state["epoch"], state["batches"], True

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on where all shares of a job of another size were."""
        if self._why_not:
            raise UsageError(
                f"a job that read {len(states)} shares of the data cannot be gone on with in "
                f"another number: {self._why_not}",
                hint=f"go on with {len(states)}, or use a dataset with __getitem__ and without "
                f"state_dict; {_SKIP}",
            )
        if any(state != states[0] for state in states):
            raise UsageError(
                "the shares were not at one place",
                value=list(states),
                hint=f"so nothing is; {_SKIP}",
            )
        self.load_state_dict(states[0])

    _epoch = 0
    _seen = 0


def _order(batches: RankBatches) -> dict[str, Any]:
    """What the order of an epoch follows from, besides its number."""
    sampler = batches.sampler
    return {"samples": batches.samples, "shuffle": sampler.shuffle, "seed": sampler.seed}
