"""The ranks of a live job, as torch.distributed knows them, and how they meet: over the store that
the job began with, so that a background thread can do it while the training communicates. Only
`group_along` makes groups of the job's own, in the thread that trains.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ckptkit.checkpoint.ranks import (
    DEFAULT_TIMEOUT,
    Failure,
    OneRank,
    Ranks,
    failing_together,
    late,
)
from ckptkit.checkpoint.workers import copy_threads
from ckptkit.errors import InvalidNameError, PeerError, UsageError
from ckptkit.format.encoding import canonical, dumps, unpack
from ckptkit.live.state.topology import Topology
from ckptkit.storage import Abilities

# Torch has called it so since 2.13.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Axes: TypeAlias = tuple[int, ...]
"""Axes of a mesh by number, or something of each of its axes."""
Documents: TypeAlias = list[dict[str, Any]]

_DONE, _FAILED = b"+", b"-"
_LONGEST_PAUSE = 0.25
_SHORTEST_PAUSE = 0.0005
_PAUSE_PER_RANK = 0.000005  # thousands of ranks must not keep the store from answering
_SHARE_OF_WAIT = 0.1  # what looking seldom adds to a wait


@dataclass(frozen=True, slots=True)
class World:
    """The rank of this process, how many there are, and where they leave word for each other."""

    rank: int = 0
    size: int = 1
    rendezvous: Store | None = None
    """Torch's key-value store, which lives as long as the job; none where there is one rank."""


def current_world() -> World:
    """The job of the default process group; a job of one rank where there is none."""
    if not dist.is_initialized():
        return World()
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank < 0:
        raise UsageError("this process is no rank of the default process group")
    if size == 1:
        return World()
    group: Any = dist.group.WORLD
    if group not in _connections:
        # Besides the training's own, which a save in the background must not hold up.
        store: Any = dist.distributed_c10d._get_default_store()
        _connections[group] = store.clone()
    return World(rank, size, _connections[group])


# By process group: to connect is slow where looking up the name of a host is.
_connections: WeakKeyDictionary[dist.ProcessGroup, Store] = WeakKeyDictionary()
# The names that this rank has yet to take: a process may be in several jobs, one after another, and
# not with the same others.
_names: WeakKeyDictionary[dist.ProcessGroup, Iterator[str]] = WeakKeyDictionary()


def next_name(world: World, what: str) -> str:
    """A name for one call, the same on all ranks because all make the same calls."""
    group = dist.group.WORLD
    if world.rendezvous is None or group is None:
        return what
    if group not in _names:
        # A store may outlive a process group, and what the ranks of that said must not be heard.
        generation = world.rendezvous.add(f"ckptkit/generation/{world.rank}", 1)
        _names[group] = (f"{generation}.{number}" for number in count(1))
    return f"{next(_names[group])}-{what}"


def ranks_of(
    world: World, name: str, timeout: float, failure: str = Ranks.failure
) -> StoreRanks | OneRank:
    """All ranks of a job, for one call; every rank has to ask for the same name."""
    return StoreRanks(world, name, timeout, failure) if world.size > 1 else OneRank()


@contextmanager
def meeting(
    world: World, what: str, timeout: float = DEFAULT_TIMEOUT, failure: str = Ranks.failure
) -> Iterator[Ranks]:
    """All ranks of a job, for one call that every rank makes; what goes wrong in it on one rank is
    told to the others, which raise it too.
    """
    ranks = ranks_of(world, next_name(world, what), timeout, failure)
    with failing_together(ranks):
        yield ranks


@contextmanager
def _reachable() -> Iterator[None]:
    """Turn a lost store into an error that says what that means."""
    try:
        yield
    except dist.DistError as error:
        raise PeerError(
            "the job's store does not answer: the rank or agent that holds it is gone",
            hint="look at the log of rank 0",
        ) from error


class StoreRanks(Ranks):
    """Ranks that meet over a `torch.distributed` store; every save takes a name of its own.

    Each meeting has one key, and whoever sets it first decides for all how it ended: nobody can
    see a success that another rank saw fail.
    """

    def __init__(
        self,
        world: World,
        name: str,
        timeout: float = DEFAULT_TIMEOUT,
        failure: str = Ranks.failure,
    ) -> None:
        assert world.rendezvous is not None  # noqa: S101 — a job of several ranks has one
        self.rank = world.rank
        self.world_size = world.size
        self.failure = failure
        self._rendezvous: Store = PrefixStore(f"ckptkit/{name}", world.rendezvous)
        self._timeout = timeout
        self._shares = 0
        self._meetings = 0
        self._cancelled: Failure | None = None
        self._is_settled = False

    def cancel(self, problem: str) -> None:
        """From another thread: end the meeting that this rank waits for, or the next one. What
        rank 0 says is not waited for any longer either, although it may still say it.
        """
        if not self._is_settled:
            self._cancelled = Failure.of(self.rank, problem)

    def settle(self) -> None:
        self._is_settled, self._cancelled = True, None

    def leave(self, problem: BaseException | str) -> Failure:
        own = Failure.of(self.rank, problem)
        verdict = _FAILED + (self._told or own).said()
        try:
            # Of several ranks that fail at once the first is heard, by the others of them too.
            verdict = self._decide(f"meeting/{self._meetings}", verdict)
            if self.rank == 0:
                # The next share is rank 0's alone to decide.
                self._decide(f"share/{self._shares}", verdict)
        except (RuntimeError, PeerError):
            # The store is gone, and with it rank 0: the others notice by themselves.
            pass
        if self._told is None and verdict != _DONE:
            self._told = Failure.heard(verdict[1:])
        return self._told or own

    def forget(self) -> None:
        for number in range(self._shares):
            self._rendezvous.delete_key(f"share/{number}")
        for number in range(self._meetings):
            for end in ("", "/count", *(f"/{rank}" for rank in range(self.world_size))):
                self._rendezvous.delete_key(f"meeting/{number}{end}")

    def end(self) -> None:
        # What they met for is done, and this must not say otherwise.
        with suppress(RuntimeError):
            if self._rendezvous.add("ended", 1) == self.world_size:
                self.forget()
                self._rendezvous.delete_key("ended")

    @_reachable()
    def _tell(self, data: bytes) -> bytes:
        key = f"share/{self._shares}"
        self._shares += 1
        if self.rank > 0:
            return self._outcome(key)
        self._rendezvous.set(key, _DONE + data)  # type: ignore[arg-type] # bytes do
        return data

    @_reachable()
    def _meet(self, data: bytes | None) -> list[bytes]:
        key = f"meeting/{self._meetings}"
        self._meetings += 1
        self._rendezvous.set(f"{key}/{self.rank}", data or b"")  # type: ignore[arg-type]
        if self._cancelled is not None:
            self._decide(key, _FAILED + self._cancelled.said())
        elif self._rendezvous.add(f"{key}/count", 1) == self.world_size:
            self._decide(key, _DONE)
        self._outcome(key)
        if data is None or self.rank > 0:
            return []
        return [bytes(self._rendezvous.get(f"{key}/{rank}")) for rank in range(self.world_size)]

    def _outcome(self, key: str) -> bytes:
        """What was decided under a key. What is shared rank 0 alone decides; that a meeting failed
        may any rank that gives up waiting.
        """
        started = time.monotonic()
        is_share = key.startswith("share")
        shortest = _SHORTEST_PAUSE + _PAUSE_PER_RANK * self.world_size
        while not self._rendezvous.check([key]):
            waited = time.monotonic() - started
            if self._cancelled is not None:
                if is_share:
                    raise self._cancelled.error(self.failure)
                self._decide(key, _FAILED + self._cancelled.said())
                break
            if waited > self._timeout:
                who = "rank 0"
                if not is_share:
                    ranks, check = range(self.world_size), self._rendezvous.check
                    missing = [rank for rank in ranks if not check([f"{key}/{rank}"])]
                    who = ", ".join(f"rank {r}" for r in missing[:8]) or "another rank"
                problem = late(who, self._timeout)
                own = Failure.of(self.rank, problem)
                # Unless the last rank has come just now.
                if not is_share and self._decide(key, _FAILED + own.said()) == _DONE:
                    break
                self._told = own
                raise problem
            time.sleep(min(max(shortest, _SHARE_OF_WAIT * waited), _LONGEST_PAUSE))
        verdict = bytes(self._rendezvous.get(key))
        if verdict.startswith(_FAILED):
            # What ends a meeting in failure is seen by rank 0 too, which then never commits.
            self._told = Failure.heard(verdict[1:])
            raise self._told.error(self.failure)
        return verdict[1:]

    @_reachable()
    def _decide(self, key: str, verdict: bytes) -> bytes:
        """Settle how a meeting ended, unless another rank has: its verdict counts then."""
        return bytes(self._rendezvous.compare_set(key, "", verdict))  # type: ignore[arg-type]


class GroupRanks(Ranks):
    """Ranks that meet by collectives of a process group, the default one where none is said, in the
    thread that trains: what they say may be large.

    A collective cannot be left: `leave` reaches nobody, and an error of one rank has to be part of
    what it says. Only what goes wrong with an answer of rank 0 is raised on all.
    """

    def __init__(
        self,
        world: World,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.rank = world.rank
        self.world_size = world.size
        self.failure = "nothing was done"
        self._group = group
        # A caller may know more than `wire`: not every job says which device is the current one.
        self._wire = wire(group) if device is None else device

    def share(self, answer: Callable[[], Any]) -> Any:
        problem: Exception | None = None
        verdict = b""
        if self.rank == 0:
            try:
                verdict = _DONE + dumps(answer())
            except Exception as error:  # noqa: BLE001 — raised below, once the others know
                problem, verdict = error, _FAILED + Failure.of(0, error).said()
        verdict = self._tell(verdict)
        if problem is not None:
            raise problem
        if verdict.startswith(_FAILED):
            raise Failure.heard(verdict[1:]).error(self.failure)
        return unpack(verdict[1:], "rank 0")

    def leave(self, problem: BaseException | str) -> Failure:
        return Failure.of(self.rank, problem)

    def _tell(self, data: bytes) -> bytes:
        size = torch.tensor(len(data), device=self._wire)
        dist.broadcast(size, group=self._group, group_src=0)
        return bytes_of_first(data if self.rank == 0 else None, int(size), self._group, self._wire)

    def _meet(self, data: bytes | None) -> list[bytes]:
        # A collective takes as much from every rank: what is short is filled up.
        mine = torch.tensor(len(data or b""), device=self._wire)
        sizes = [torch.zeros_like(mine) for _ in range(self.world_size)]
        dist.all_gather(sizes, mine, group=self._group)
        most = max(map(int, sizes))
        if data is None or not most:
            return []
        padded = torch.frombuffer(bytearray(data.ljust(most)), dtype=torch.uint8).to(self._wire)
        heard = [torch.empty_like(padded) for _ in sizes] if self.rank == 0 else None
        dist.gather(padded, heard, group=self._group, group_dst=0)
        pairs = zip(heard or (), sizes, strict=False)
        return [each[: int(size)].cpu().numpy().tobytes() for each, size in pairs]


def listed(ranks: Sequence[int], most: int = 8) -> str:
    """Some ranks as an error names them: the first, and a mark where there are more."""
    return ", ".join(map(str, ranks[:most])) + (", …" if len(ranks) > most else "")


# By process group, then by the sizes of the mesh and the axes: what was made once serves all loads,
# as torch's names of groups that come and go are not the same on all ranks.
_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Axes, Axes], dist.ProcessGroup]]
_groups = WeakKeyDictionary()


def group_along(
    sizes: Axes, coords: Axes, axes: Axes
) -> tuple[list[int], dist.ProcessGroup | None]:
    """The ranks of a mesh that differ from the one at some coordinates along some axes only, and
    their process group; every rank asks for the same axes.
    """
    everyone = np.arange(math.prod(sizes)).reshape(sizes)
    index = tuple(slice(None) if axis in axes else at for axis, at in enumerate(coords))
    ranks: list[int] = everyone[index].reshape(-1).tolist()
    default = dist.group.WORLD
    if default is None or len(ranks) == everyone.size:
        return ranks, default
    known = _groups.setdefault(default, {})
    if (sizes, axes) not in known:
        last = np.moveaxis(everyone, axes, range(-len(axes), 0))
        lines: list[list[int]] = last.reshape(-1, len(ranks)).tolist()
        known[sizes, axes], _ = dist.new_subgroups_by_enumeration(lines)
    return ranks, known[sizes, axes]


def copying_threads(world: World) -> int:
    """How many threads of this rank may copy memory at a time: with more than there are cores for
    all ranks of the machine, copying only gets slower.
    """
    return copy_threads(ranks_here(world))


def reading_threads(world: World, can: Abilities, threads: int | None) -> int | None:
    """How many read, where nobody says it: as many as copy. Where they wait for answers, as many as
    the store likes, which None means.
    """
    if threads is None and not can.waits_for_answers:
        return copying_threads(world)
    return threads


def ranks_here(world: World) -> int:
    """How many ranks there are on this machine: all of them, where nobody says it."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")  # by torchrun
    return int(said) if said.isdecimal() and int(said) else world.size


def wire(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where the backend of a group, by default that of the job, wants the tensors of a collective
    to be.
    """
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator()
    return torch.device("cpu") if found is None else found


def bytes_of_first(
    data: bytes | None,
    size: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> bytes:
    """Rank 0's bytes on every rank of a group, by a collective, which carries more than a store
    does; all ranks know how many there are.
    """
    device = wire(group) if device is None else device
    if data is None:
        tensor = torch.empty(size, dtype=torch.uint8, device=device)
    else:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    dist.broadcast(tensor, group=group, group_src=0)
    return bytes(tensor.cpu().numpy()) if data is None else data


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the ranks of a job have to know of each other before a save or a load: told over the
    store, and only where stages or owners make them differ.
    """

    optimizers: Documents
    """On rank 0: one document for each optimizer, of the parameters of all ranks."""
    elsewhere: frozenset[str]
    """The tensors of this rank that an earlier stage has too, and saves."""
    names: frozenset[str]
    """On rank 0: the tensors of all stages."""
    values: Mapping[str, Any]
    """On rank 0: the extra state of all stages."""


def put_together(
    ranks: Ranks,
    topology: Topology,
    names: Iterable[str],
    optimizers: Documents,
    values: Mapping[str, Any] | None = None,
    fingerprint: Callable[[str], object] | None = None,
) -> Agreement:
    """Put together what stages and owners know; a collective only where there are such.

    Stages that share a name are one tensor, tied, of which the first stage's is saved. With
    `fingerprint` that is made sure: it tells what a tensor of this rank holds.
    """
    kinds = {axis.kind for axis in topology.strategy.mesh.axes if axis.size > 1}
    mine, values = frozenset(names), values or {}
    if not kinds & {"pp", "zero1"} or ranks.world_size == 1:
        return Agreement(_merged([optimizers]), frozenset(), mine, values)
    coords = topology.strategy.mesh.coords(topology.rank)
    own = 0 if topology.pipeline is None else coords[topology.pipeline]
    place = [coord for axis, coord in enumerate(coords) if axis != topology.pipeline]
    spoken = {"stage": own, "names": sorted(mine), "optimizers": optimizers, "values": values}
    if any(place):
        # The first rank of a stage speaks for it. The others add only the optimizer's values that
        # they own, which it does not have.
        own_values = [{**document, "groups": []} for document in optimizers]
        spoken = {"stage": 0, "names": [], "optimizers": own_values, "values": {}}
    heard = ranks.collect(spoken)
    stages: dict[str, int] = {}
    several: dict[str, int] = {}
    for document in sorted(heard, key=lambda d: d["stage"]):
        for name in document["names"]:
            if stages.setdefault(name, document["stage"]) != document["stage"]:
                several[name] = stages[name]
    shared = ranks.share(lambda: several)
    if shared and fingerprint is not None:
        contents = {name: fingerprint(name) for name in sorted(mine & shared.keys())}
        # The ranks of a stage hold different parts: those at one place of each stage are compared.
        if different := ranks.agree([place, contents], _first_different):
            raise InvalidNameError(
                "two pipeline stages have different tensors of this name",
                value=different,
                hint="stages keep the names of the whole model: an nn.ModuleDict of its layers "
                "does",
            )
    elsewhere = frozenset(name for name, stage in shared.items() if name in mine and stage != own)
    return Agreement(
        _merged([document["optimizers"] for document in heard]),
        elsewhere,
        frozenset(stages),
        {name: value for document in heard for name, value in document["values"].items()},
    )


def _first_different(heard: Sequence[tuple[list[int], Mapping[str, object]]]) -> str:
    """The first name under which ranks at one place of their stages hold different tensors."""
    known: dict[tuple[str, str], object] = {}
    return min(
        (
            name
            for place, contents in heard
            for name, content in contents.items()
            if known.setdefault((name, str(place)), content) != content
        ),
        default="",
    )


def _merged(said: Sequence[Documents]) -> Documents:
    """One document for each optimizer, of the parameters of all ranks."""
    found: Documents = []
    for documents in said:
        for number, document in enumerate(documents):
            if number == len(found):
                found.append({"kind": document["kind"], "groups": [], "values": {}})
            found[number]["values"] |= document["values"]
            known = found[number]["groups"]
            taken = {name for group in known for name in group["params"]}
            for at, group in enumerate(document["groups"]):
                fresh = [name for name in group["params"] if name not in taken]
                if not fresh and group["params"]:
                    continue
                # Stages have the groups of one optimizer in one order; others stay apart.
                same = known[at] if at < len(known) else None
                if same is not None and canonical(same["options"]) == canonical(group["options"]):
                    same["params"] += fresh
                else:
                    known.append({"params": fresh, "options": group["options"]})
    return found
