"""Values that are no tensors, given back to the ranks of another job."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckptkit.errors import CkptkitError, FormatError, UsageError
from ckptkit.format.encoding import dumps
from ckptkit.format.names import DATA_RANK
from ckptkit.format.objects import ObjectInfo, share_of, total
from ckptkit.model import Strategy

log = logging.getLogger("ckptkit.live")

# Ranks that differ along these read data of their own, and so do those that experts are spread
# over; ranks along `tp` and `pp` work on the same.
_DATA = ("ddp", "fsdp", "zero1", "zero2", "zero3", "ep")

SEEN_BY_ALL = "seen_by_all"
"""In the position of a data loader, what all ranks have taken: such a one goes on at any size."""


class WorldSizeError(CkptkitError, KeyError):
    """A value of each rank, asked for by a job with another number of ranks."""

    __str__ = CkptkitError.__str__


@dataclass(frozen=True, slots=True)
class DataRanks:
    """Who reads which share of the data, in this job and in the one that saved."""

    rank: int
    world_size: int
    here: Strategy | None
    """None where neither a model nor a mesh says how the job is spread."""
    saved: Strategy | None
    """None for a step that was resharded since."""
    own: tuple[int, int] | None = None
    """What the reader says itself of its share: its number, and of how many."""

    def find(self, item: ObjectInfo) -> Any:
        """What belongs to the share of this rank; an error where nothing does for sure."""
        shares = self._shares(item)
        there = shares[0][1]
        mine, count = self.own or data_rank(self.here, self.rank)
        if (there is None) != (count is None):
            raise _unknown(item.name, "here" if count is None else "that saved")
        sizes = (there or len(shares), count or self.world_size)
        if sizes[0] != sizes[1]:
            raise WorldSizeError(
                f"of a job that shared out its data between {sizes[0]}, "
                f"this one does between {sizes[1]}",
                where=item.name,
            )
        found = {rank: v for rank, (at, _, v) in enumerate(shares) if at == mine}
        first = next(iter(found.values()))
        if all(dumps([value]) == dumps([first]) for value in found.values()):
            return first
        if self.here and self.saved and is_spread_alike(self.here, self.saved):
            return found.get(self.rank, first)
        raise WorldSizeError(
            f"rank {', '.join(map(str, found))} read one share of the data, but had different "
            "values, and this job is spread otherwise",
            where=item.name,
        )

    def all_shares(self, item: ObjectInfo) -> list[Any]:
        """The values of all shares, in order; nothing where nobody knows whose they are."""
        try:
            shares = self._shares(item)
        except WorldSizeError:
            return []
        by_share = {at: value for at, _, value in reversed(shares)}
        agree = all(dumps([by_share[at]]) == dumps([value]) for at, _, value in shares)
        known = self.here is not None and shares[0][1] is not None
        return [by_share[at] for at in sorted(by_share)] if known and agree else []

    def _shares(self, item: ObjectInfo) -> list[tuple[int, int | None, Any]]:
        """By rank of the job that saved: which share, of how many, and the value."""
        if not is_marked(item):
            # Older versions saved one value for each rank, which read what its strategy says.
            saved = self.saved
            if saved is None or saved.world_size != len(item.value):
                raise _unknown(item.name, "that saved")
            if self.here is None and all(axis.kind == "ddp" for axis in saved.mesh.axes):
                saved = None
            return [(*data_rank(saved, rank), value) for rank, value in enumerate(item.value)]
        shares = [tuple(value[DATA_RANK]) for value in item.value]
        if not all(len(s) == 3 and isinstance(s[0], int) for s in shares):
            raise FormatError("not values of shares of the data", where=item.name)
        numbers = sorted({at for at, _, _ in shares})
        wrong = any(size not in (None, len(numbers)) for _, size, _ in shares)
        if wrong or numbers != list(range(len(numbers))) or len({s[1] for s in shares}) > 1:
            raise FormatError("not the values of all shares of the data", where=item.name)
        return shares


def _unknown(name: str, job: str) -> WorldSizeError:
    return WorldSizeError(
        f"nothing says how the job {job} shares out its data, and these values belong to shares",
        where=name,
        hint="pass model=… or mesh=… in the same call, in saves and loads alike",
    )


def is_marked(item: ObjectInfo) -> bool:
    """Whether the values say which share of the data they belong to."""
    return item.semantics == "per_rank" and all(
        isinstance(value, dict) and isinstance(value.get(DATA_RANK), list) for value in item.value
    )


class Extra(Mapping[str, Any]):
    """The `extra` of a save, as this rank gets it back.

    What was the same on all ranks is given to each; `PerRank` values return to their rank if there
    are as many ranks as there were: otherwise `extra[name]` raises a `WorldSizeError`, and
    `extra.get(name, fallback)` gives the fallback. `Sum` and `Split` values are the rank's own if
    there are as many ranks, and its share of all otherwise. `PerDataRank` values return to the
    ranks that read the same share of the data; where none is the same, that is a `WorldSizeError`.
    """

    def __init__(self, objects: Mapping[str, ObjectInfo], data: DataRanks) -> None:
        self._objects = objects
        self._data = data

    def __getitem__(self, name: str) -> Any:
        item, rank, size = self._objects[name], self._data.rank, self._data.world_size
        if item.semantics == "replicated":
            return item.value
        hint = (
            f"extra.get({name!r}, fallback) gives a fallback, extra.of_ranks({name!r}) the values"
        )
        if is_marked(item):
            try:
                return self._data.find(item)
            except WorldSizeError as error:
                error.hint = error.hint or f"{hint} of all ranks"
                raise
        if len(item.value) == size:
            return item.value[rank]
        if item.semantics == "per_rank":
            raise WorldSizeError(
                f"the value belongs to the ranks of a job of {len(item.value)}, "
                f"this one has {size}",
                where=name,
                hint=f"{hint} of all",
            )
        return share_of(item.value, rank, size)

    def of_ranks(self, name: str) -> list[Any]:
        """The values of all ranks of the job that saved."""
        item = self._objects[name]
        if is_marked(item):
            return [value[DATA_RANK][-1] for value in item.value]
        return [item.value] if item.semantics == "replicated" else list(item.value)

    def total(self, name: str) -> Any:
        """What the values of all ranks add up to."""
        return total(self.of_ranks(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._objects)

    def __len__(self) -> int:
        return len(self._objects)


def data_rank(strategy: Strategy | None, rank: int) -> tuple[int, int | None]:
    """Which share of a job's data a rank reads, and how many shares there are. Where nothing says
    how the job is spread each rank has one of its own, and nobody knows how many there are.
    """
    if strategy is None:
        return rank, None
    at, of = 0, 1
    axes = strategy.mesh.axes
    for axis, coord in zip(axes, strategy.mesh.coords(rank), strict=True):
        if axis.kind in _DATA:
            at, of = at * axis.size + coord, of * axis.size
    return at, of


def said_share(reader: object) -> tuple[int, int] | None:
    """Which share an object that reads data has, and of how many, where it says so itself. The axes
    of a job may not: FSDP counts the ranks of context parallelism, which read the same, as its own.
    """
    first = reader[0] if isinstance(reader, list) and reader else reader
    said: tuple[int, int] | None = getattr(first, "data_share", None)
    return said


def is_spread_alike(one: Strategy, other: Strategy) -> bool:
    """Whether ranks of one number do the same in two jobs, however they share out parameters."""
    kinds = (
        [("data" if a.kind in _DATA else a.kind, a.size) for a in each.mesh.axes if a.size > 1]
        for each in (one, other)
    )
    return next(kinds) == next(kinds)


def rng_state() -> dict[str, Any]:
    """The state of the generators of Python, numpy and torch (CPU and CUDA); save it as
    `PerDataRank(rng_state())`: ranks that work on the same data, as those of `tp` do, have to draw
    the same numbers. `PerRank` is for jobs that only ever go on as they were spread.
    """
    kind, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002 — what most programs still use
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys), int(place), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state().numpy(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = [each.numpy() for each in torch.cuda.get_rng_state_all()]
    return state


def set_rng_state(state: dict[str, Any] | None) -> None:
    """Set the generators to a state; None, the fallback of another world size, changes nothing."""
    if state is None:
        return
    unknown = sorted(set(state) - {"python", "numpy", "torch", "cuda"})
    if unknown or not {"python", "numpy", "torch"} <= set(state):
        raise UsageError("not a state of rng_state()", value=sorted(state))
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(torch.from_numpy(state["torch"].copy()))
    devices, count = state.get("cuda", []), torch.cuda.device_count()
    if devices and len(devices) != count:
        log.warning(
            "the generators of CUDA stay as they are: the state is of %d devices, this process "
            "sees %d",
            len(devices),
            count,
        )
    elif devices:
        torch.cuda.set_rng_state_all([torch.from_numpy(each.copy()) for each in devices])
