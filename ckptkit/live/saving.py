"""Saving the state of a live job: look, agree, stage where asked to, write, commit."""

from __future__ import annotations

import logging
import math
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ckptkit.checkpoint.ranks import DEFAULT_TIMEOUT, OneRank, Ranks, in_one_line, leaving
from ckptkit.checkpoint.threads import Progress
from ckptkit.checkpoint.writer import Writer
from ckptkit.errors import GivenUpError, PeerError, UsageError
from ckptkit.format.leaves import canonical
from ckptkit.format.names import inner_name, join, matches
from ckptkit.live.agree import agree, fingerprint_of_keys, keys_of_some
from ckptkit.live.arena import Arena
from ckptkit.live.ranks import StoreRanks, World, copying_threads
from ckptkit.live.saying import readable
from ckptkit.live.snapshot import Snapshot, take_snapshot
from ckptkit.live.state.parts import HandCuts, LiveTensor
from ckptkit.live.state.tensors import as_bits, checksum, dtype_of
from ckptkit.live.state.trees import own_apart, without_tensors
from ckptkit.live.wrappers.training import TrainingState
from ckptkit.plan.chunks import DEFAULT_CHUNK_BYTES
from ckptkit.storage import Store

log = logging.getLogger("ckptkit.live")


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How to save; none of it changes what a load gives back."""

    overwrite: bool = False
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    differing: Sequence[str] = ()
    threads: int | None = None
    timeout: float = DEFAULT_TIMEOUT
    progress: Progress | None = None


class PreparedSave:
    """One save of one rank: made in the training's thread, written in any."""

    def __init__(  # noqa: PLR0913 — everything that a save is about
        self,
        store: Store,
        step: int,
        world: World,
        barrier: StoreRanks | OneRank,
        sources: TrainingState,
        *,
        extra: Mapping[str, object] | None,
        mesh: DeviceMesh | None,
        rules: HandCuts,
        options: SaveOptions,
        arena: Arena,
        stage: bool = False,
    ) -> None:
        self._started = time.perf_counter()
        self._world = world
        self._store = store
        self.step = step
        self._barrier = barrier
        self._options = options
        self._is_cancelled = False
        try:
            snapshot = take_snapshot(
                world, sources, extra=extra, mesh=mesh, rules=rules, barrier=barrier
            )
            self._nbytes = _whole_bytes(snapshot)
            tensors = [held.moved(snapshot.topology) for held in snapshot.tensors]
            on_devices = any(held.local.device.type != "cpu" for held in tensors)
            tensors = arena.hold(tensors) if on_devices else tensors
            self._writer = self._filled(snapshot, tensors)
            if stage and not on_devices:
                self._writer.stage(arena.pool, threads=copying_threads(world))
        except BaseException as error:
            self._barrier.leave(in_one_line(error))
            raise

    def cancel(self) -> None:
        """From another thread: write nothing more and do not commit, if it is not too late."""
        self._is_cancelled = True
        self._barrier.cancel("the save was cancelled")

    def commit(self) -> None:
        """Write, and make the step exist."""
        with leaving(self._barrier):
            self._writer.commit()
        if self._world.rank == 0:
            seconds = time.perf_counter() - self._started
            log.info(
                "saved step %d to %s: %s in %.2f s, %.2f GB/s",
                self.step,
                self._store.location,
                readable(self._nbytes),
                seconds,
                self._nbytes / seconds / 1e9,
            )

    def _progress(self, nbytes: int) -> None:
        if self._is_cancelled:
            raise GivenUpError("the save was cancelled", where=f"step {self.step}")
        if self._options.progress is not None:
            self._options.progress(nbytes)

    def _filled(self, snapshot: Snapshot, tensors: Sequence[LiveTensor]) -> Writer:
        topology, options = snapshot.topology, self._options
        names = [held.name for held in snapshot.tensors] + [tied.name for tied in snapshot.tied]
        # Extra state is, as buffers are, that of the first rank which has the module.
        objects = {name: item for name, item in snapshot.objects.items() if name != "model"}
        values = without_tensors(snapshot.values, "model")
        parameters = {held.name: held for held in tensors if held.role == "param"}
        agreement = agree(
            self._barrier,
            topology,
            names,
            snapshot.optimizers,
            values,
            lambda name: _fingerprint(parameters.get(name)),
        )
        replicas = _checksums(snapshot, values, options.differing)
        details, keys, compares = self._told_by_rank_0(snapshot, has_replicas=bool(replicas))
        if compares:
            _check_replicas(self._barrier, replicas)
        if keys and self._world.size > 1:
            some = keys_of_some(self._barrier, snapshot.open_trees, keys)
            objects, tensors = own_apart(snapshot.topology, objects, tensors, some)
        threads: dict[str, Any] = {} if options.threads is None else {"threads": options.threads}
        writer = Writer(
            self._store,
            step=self.step,
            strategy=topology.strategy,
            rank=self._world.rank,
            barrier=self._barrier,
            details=details,
            overwrite=options.overwrite,
            chunk_bytes=options.chunk_bytes,
            progress=self._progress,
            **threads,
        )
        for held in tensors:
            if held.name not in agreement.elsewhere:
                _add(writer, held, snapshot)
        for tied in snapshot.tied:
            if tied.name not in agreement.elsewhere:
                writer.add_alias(tied.name, tied.of)
        for key, value in objects.items():
            writer.add_object(key, value)
        if self._world.rank == 0 and agreement.values:
            writer.add_object("model", dict(agreement.values))
        if self._world.rank == 0 and agreement.optimizers:
            writer.add_object("optimizer", agreement.optimizers)
        return writer

    def _told_by_rank_0(
        self, snapshot: Snapshot, *, has_replicas: bool
    ) -> tuple[dict[str, Any], bytes, bool]:
        """The details of the step, which stages may tell differently, what tells the keys of
        nested dictionaries, which ranks may have of their own, and whether replicas are compared.

        Where they are not, nobody waits here for a rank that is late or lost.
        """
        trees = snapshot.open_trees
        keys = fingerprint_of_keys(trees) if trees else b""
        # The first stage may have none of the buffers of the others.
        compares = has_replicas or bool(trees) or snapshot.topology.pipeline is not None
        step, details, keys, compares = self._barrier.share(
            lambda: [self.step, snapshot.details, keys, compares and self._world.size > 1]
        )
        if step != self.step:
            raise UsageError(
                f"rank 0 saves step {step}, rank {self._world.rank} another one", value=self.step
            )
        return details, keys, compares


def _fingerprint(held: LiveTensor | None) -> list[object] | None:
    """What a parameter holds here; buffers of the same name may differ from stage to stage."""
    if held is None:
        return None
    content = checksum(held.name, held.local)
    return [str(dtype_of(held.name, held.local)), list(held.shape), content]


def _checksums(
    snapshot: Snapshot, values: Mapping[str, Any], differing: Sequence[str]
) -> list[list[Any]]:
    """Of what nothing keeps the same on several ranks, of which the first one's is saved, and which
    nobody said may differ: the name, that rank and the checksum. These are tensors, extra state,
    and what an optimizer says in its groups and of its parameters.

    Parameters of mere copies of a model are not compared: ranks need not meet for them, and one
    that is lost keeps nobody waiting. Along an axis that cuts they are: who forgot a rule for one
    that was cut by hand would lose what the other ranks have.
    """
    topology = snapshot.topology
    pipeline, mesh = topology.pipeline, topology.strategy.mesh
    # Of each stage of a pipeline the first rank: stages have groups of their own.
    here = enumerate(mesh.coords(topology.rank))
    first = mesh.rank(tuple(at if axis == pipeline else 0 for axis, at in here))
    plain = {join("model", name): value for name, value in values.items()}
    groups = [group for document in snapshot.optimizers for group in document["groups"]]
    for number, group in enumerate(groups):
        for key, value in group["options"].items():
            plain[join("optimizer", "param_groups", str(number), key)] = value
    for document in snapshot.optimizers:
        for parameter, said in document["values"].items():
            plain |= {join("optimizer", parameter, key): value for key, value in said.items()}
    said_plainly = [
        [name, first, zlib.crc32(canonical(value, name))]
        for name, value in plain.items()
        if not matches(differing, name, name.partition("/")[2])
    ]
    return said_plainly + [
        [held.name, held.first_replica(topology), checksum(held.name, held.local)]
        for held in snapshot.tensors
        if not held.is_sure(topology)
        and (held.role in ("buffer", "other") or held.is_whole_where_others_are_cut(topology))
        and not matches(differing, held.name, inner_name(held.name, held.role))
    ]


def _check_replicas(ranks: Ranks, mine: list[list[Any]]) -> None:
    """Refuse a save where such checksums differ between ranks."""

    def conclude(heard: list[Any]) -> list[Any]:
        kept: dict[tuple[str, int], int] = {}
        others: dict[str, list[int]] = {}
        for rank, said in enumerate(heard):
            for name, first, crc in said:
                if kept.setdefault((name, first), crc) != crc:
                    others.setdefault(name, []).append(rank)
        return [len(others), *next(iter(others.items()), ("", []))]

    count, name, those = ranks.agree(mine, conclude)
    if count:
        more = f", and so are {count - 1} more" if count > 1 else ""
        shown = ", ".join(map(str, those[:8])) + (", …" if len(those) > 8 else "")
        raise PeerError(
            f"the values of rank {shown} are not those of the first rank that holds the same, "
            f"which alone would be saved{more}",
            where=name,
            hint="if it is cut by hand, say how in rules={…}; in state={…} PerRank(…) keeps each "
            f"rank's; differing=[\"{name}\"] (names or patterns) saves the first rank's knowingly",
        )


def _add(writer: Writer, held: LiveTensor, snapshot: Snapshot) -> None:
    placements = held.saved_placements(snapshot.topology)
    dtype = dtype_of(held.name, held.local)
    part = snapshot.topology.part(held.name, held.shape, placements)
    data = None if part.is_empty else as_bits(held.name, held.local)
    writer.add(
        held.name,
        data,
        shape=held.shape,
        dtype=dtype,
        placements=placements,
        role=held.role,
        of=held.of,
    )


def _whole_bytes(snapshot: Snapshot) -> int:
    """The bytes of all tensors of the job; stages are taken to be alike."""
    tensors = snapshot.tensors
    here = sum(math.prod(held.shape) * held.local.element_size() for held in tensors)
    pipeline = snapshot.topology.pipeline
    return here * (1 if pipeline is None else snapshot.topology.strategy.mesh.sizes[pipeline])
