"""Filling tensors from the arrays of a step: each rank for itself, or what several ranks need alike
by one of them, which gives it to the others.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from queue import SimpleQueue
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist

from ckptkit.checkpoint.ranks import Ranks
from ckptkit.checkpoint.read.checkpoint import Array, Checkpoint, NamedBox, ReadMany
from ckptkit.checkpoint.read.reader import Staged, Wanted, plan_read
from ckptkit.checkpoint.workers import share_out
from ckptkit.live.comparison import Filling, LoadOptions
from ckptkit.live.state.parts import LiveTensor, boxes_here
from ckptkit.live.state.ranks import Axes, current_world, group_along, reading_threads, wire
from ckptkit.live.state.tensors import (
    as_bits,
    bits_of,
    devices_of,
    dtype_of,
    host_memory,
    synchronize,
    torch_dtype,
)
from ckptkit.live.state.topology import Topology
from ckptkit.model import Box, Replicate
from ckptkit.plan.read import Pieces, batches, readable_pieces, readers_of

log = logging.getLogger("ckptkit.live")

_TURN_BYTES = 32 << 20
_TURNS_HELD = 4  # in memory: one is given while others are read, which begin and end slowly
_PIECE_BYTES = 8 << 20  # small enough to spread evenly over readers
_ALIGNMENT = 64
_MOST_ALONG = 1.3  # times what is needed: past the page cache a device is so much faster

# What torch copies is read by few large requests: threads wait for each other between two.
_RUN_BYTES = 16 << 20
_STAGING_BYTES = 128 << 20
# One thread for so many bytes of the mean piece: most of the work on small ones is Python's, which
# does not become faster by more threads.
_BYTES_PER_THREAD = 64 << 10
# So much goes to a device by itself as fast as together with others.
_LARGE = 256 << 10
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


def fill(
    checkpoint: Checkpoint,
    topology: Topology,
    fillings: Sequence[Filling],
    options: LoadOptions,
    *,
    alone: bool,
) -> None:
    """Fill tensors: those in host memory directly, the others through memory of a bounded size.

    A step has raw elements, which numpy can put in place only where the tensor has these too: what
    lies on a device, is of another dtype, or is a conjugate view, torch has to copy.
    """
    known: dict[Any, list[tuple[Box, tuple[Any, ...]]]] = {}  # layers are alike
    by_numpy: list[NamedBox] = []
    by_torch: list[tuple[Array, Box, torch.Tensor]] = []
    for held, array in fillings:
        local = held.local
        kind = held.shape, local.shape, id(held.placements), held.own
        if kind not in known:
            known[kind] = boxes_here(topology, held)
        if _has_raw_elements(held.name, local, array):
            bits = bits_of(held.name, local)
            by_numpy += [(array.name, box, bits[inside]) for box, inside in known[kind]]
        else:
            by_torch += [(array, box, local[inside]) for box, inside in known[kind]]
    _reader(checkpoint, options, alone=alone)(by_numpy)
    _fill_by_torch(checkpoint, by_torch, options, alone=alone)


def fill_boxes(
    checkpoint: Checkpoint,
    wanted: Iterable[tuple[str, Box, torch.Tensor]],
    *,
    verify: bool,
    threads: int | None,
) -> None:
    """Fill tensors with boxes of the arrays of some names, as `fill` does."""
    threads = reading_threads(current_world(), checkpoint.store.abilities, threads)
    options = LoadOptions(verify=verify, threads=threads)
    by_numpy: list[NamedBox] = []
    by_torch: list[tuple[Array, Box, torch.Tensor]] = []
    for name, box, target in wanted:
        array = checkpoint[name]
        if _has_raw_elements(name, target, array):
            by_numpy.append((name, box, as_bits(name, target)))
        else:
            by_torch.append((array, box, target))
    _reader(checkpoint, options, alone=False)(by_numpy)
    _fill_by_torch(checkpoint, by_torch, options, alone=False)


def _has_raw_elements(name: str, tensor: torch.Tensor, array: Array) -> bool:
    """Whether numpy may put the elements of an array into the memory of a tensor."""
    is_alike = tensor.is_cpu and array.dtype == dtype_of(name, tensor)
    return is_alike and not tensor.is_conj() and not tensor.is_neg()


def _reader(checkpoint: Checkpoint, options: LoadOptions, *, alone: bool) -> ReadMany:
    return partial(
        checkpoint.read_many,
        verify=options.verify,
        threads=options.threads,
        progress=options.progress,
        alone=alone,
    )


def _fill_by_torch(
    checkpoint: Checkpoint,
    wanted: Sequence[tuple[Array, Box, torch.Tensor]],
    options: LoadOptions,
    *,
    alone: bool,
) -> None:
    """Read into staging memory, and let torch copy from there: to devices, to other dtypes (that is
    how `cast=True` converts), to conjugate views.
    """
    if not wanted:
        return
    pace = checkpoint.packs.pace
    if not pace.by_request:
        pace = replace(pace, request_bytes=_RUN_BYTES)
    plan = plan_read(
        checkpoint.packs,
        [Wanted(checkpoint.number(array.name), box) for array, box, _ in wanted],
        replace(pace, requests=options.threads or pace.requests),
        verify=options.verify,
        progress=options.progress,
        alone=alone,
        staged=True,
    )
    threads = min(plan.pace.requests, max(1, _STAGING_BYTES // plan.longest))
    if not plan.pace.by_request:
        mean = int((plan.stop - plan.start).sum()) // max(1, len(plan.start))
        threads = min(threads, max(1, mean // _BYTES_PER_THREAD))
    devices = devices_of(target for _, _, target in wanted)
    # Others are read into while a device copies from as many.
    most = max(threads, min(2 * threads, _STAGING_BYTES // plan.longest)) if devices else threads
    staging = _Staging(plan.longest, min(len(plan.runs), most), devices)
    # Torch lets go of the interpreter in each call. Where a device does the copying, threads that
    # call at the same time wait for each other longer than they work.
    lock: AbstractContextManager[object] = Lock() if devices else nullcontext()
    # What a thread may write to is the caller's mode: tensors made in it are for it alone.
    is_inference = torch.is_inference_mode_enabled()

    def copy_run(run: tuple[int, int]) -> None:
        with torch.inference_mode(is_inference), torch.no_grad(), staging.lent() as memory:
            staged: Iterable[Staged] = plan.stage(run, memory.numpy().data)
            if devices:
                staged = list(staged)  # read before the lock is taken
            with lock:
                _copy(memory, staged, wanted)

    try:
        share_out(plan.runs, copy_run, threads)
    finally:
        # Before the memory goes; and whatever stream uses the tensors next.
        synchronize(devices)


def _copy(
    memory: torch.Tensor,
    staged: Iterable[Staged],
    wanted: Sequence[tuple[Array, Box, torch.Tensor]],
) -> None:
    """Copy elements from staging memory to where they are wanted, as the dtype that is there."""
    together: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for number, inside, elements in staged:
        array, _, target = wanted[number]
        there: tuple[Any, ...] = (*inside, ...)
        target, values = target[there], torch.from_numpy(elements)
        is_aligned = values.data_ptr() % values.itemsize == 0
        if not is_aligned:  # in a foreign file
            values = torch.from_numpy(elements.copy())
        values = values.view(torch_dtype(array.dtype))
        if is_aligned and _is_sent_along(values, target):
            together.setdefault(target.device, []).append((target, values))
        else:
            target.copy_(values, non_blocking=target.is_cuda)
    for device, pairs in together.items():
        _send(device, memory, pairs)


def _is_sent_along(values: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether values go to a device together with others, which then copies them to their targets:
    small ones, and those that torch would reorder or convert on the host first.
    """
    if target.is_cpu:
        return False
    if values.dtype != target.dtype:
        # Conversions of other types overflow in one way on the host, and in another on a device.
        return {values.dtype, target.dtype} <= _FLOATS
    is_alike = values.is_contiguous() and target.is_contiguous()
    return values.nbytes < _LARGE or not is_alike or target.is_conj() or target.is_neg()


def _send(
    device: torch.device, memory: torch.Tensor, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Copy the memory from the first to the last of some values to a device at once, and there each
    of them to its target.
    """
    start, places = memory.data_ptr(), list[tuple[int, int]]()
    for _, values in pairs:
        steps = zip(values.shape, values.stride(), strict=True)
        extent = 1 + sum((count - 1) * step for count, step in steps)
        places.append((values.data_ptr() - start, extent * values.itemsize))
    low = min(at for at, _ in places) // _ALIGNMENT * _ALIGNMENT
    high = max(at + size for at, size in places)
    there = memory[low:high].to(device, non_blocking=device.type == "cuda")
    for (target, values), (at, size) in zip(pairs, places, strict=True):
        flat = there[at - low : at - low + size].view(values.dtype)
        target.copy_(flat.as_strided(values.shape, values.stride()))


class _Staging:
    """Host memory that is lent to one reader at a time, and to none while a device copies it."""

    def __init__(self, size: int, count: int, devices: set[torch.device]) -> None:
        # Of other devices `_copy` waits for each copy.
        self._devices = [device for device in devices if device.type == "cuda"]
        self._free = SimpleQueue[tuple[torch.Tensor, list[torch.cuda.Event]]]()
        for _ in range(count):
            self._free.put((host_memory(size, devices), []))

    @contextmanager
    def lent(self) -> Iterator[torch.Tensor]:
        """Some of it: until the block ends, and all that it has begun to copy is copied."""
        memory, copied = self._free.get()
        for event in copied:
            event.synchronize()
        try:
            yield memory
        finally:
            streams = map(torch.cuda.current_stream, self._devices)
            self._free.put((memory, [stream.record_event() for stream in streams]))


def _repeating(topology: Topology, held: LiveTensor) -> Axes:
    """The axes along which ranks hold the same of a tensor."""
    return tuple(
        number
        for number, axis in enumerate(topology.strategy.mesh.axes)
        if axis.size > 1 and isinstance(held.placements.get(axis.name, Replicate()), Replicate)
    )


def by_sharing(
    topology: Topology, fillings: Sequence[Filling], here: int, *, parts: bool
) -> tuple[list[Filling], list[Filling]]:
    """What to fill, in two: what no other of the `here` ranks of this machine reads, and what
    others read too. Where much more is read than the rank needs, such as whole rows for a half of
    each, others need the rest. Whole chunks are read, or only `parts` of them.
    """
    # Their numbers follow each other, so ranks that are further apart are on other machines.
    sizes = topology.strategy.mesh.sizes
    alone: list[Filling] = []
    shared: list[Filling] = []
    known: dict[tuple[int, int, int], bool] = {}  # layers are alike
    for held, array in fillings:
        kind = id(held.placements), id(held.own), id(array.info.kind)
        if kind not in known:
            axes = _repeating(topology, held)
            pieces = [Pieces(array.grid, box) for box in held.part(topology).boxes]
            read = sum(each.reach(parts=parts) for each in pieces)
            is_mine = here == 1 or read <= _MOST_ALONG * held.local.numel()
            known[kind] = is_mine and all(math.prod(sizes[axis + 1 :]) >= here for axis in axes)
        (alone if known[kind] else shared).append((held, array))
    return alone, shared


def fill_once(
    checkpoint: Checkpoint,
    topology: Topology,
    fillings: Sequence[Filling],
    ranks: Ranks,
    options: LoadOptions,
) -> list[Filling]:
    """Fill what several ranks need alike, and return what is this rank's alone. A collective call
    of the default process group.

    Ranks that differ only along axes which repeat a tensor need the same boxes of it. Each such
    group cuts what it needs into pieces, and every rank of it computes alike who reads which.
    """
    mesh = topology.strategy.mesh
    by_axes: dict[Axes, list[Filling]] = {}
    for held, array in fillings:
        by_axes.setdefault(_repeating(topology, held), []).append((held, array))
    own = by_axes.pop((), [])
    plans = {axes: _shares(checkpoint, topology, each) for axes, each in by_axes.items()}
    agreed = _agreed(ranks, topology, plans)
    errors: list[Exception] = []
    by_turns: _FillByTurns | None = None
    for axes in agreed:
        # Made by all ranks, also by those that need nothing along these axes.
        members, group = group_along(mesh.sizes, mesh.coords(topology.rank), axes)
        by_turns = None  # before the next one is made: the memory of one is what was promised
        if axes in plans:
            by_turns = _FillByTurns(members, topology.rank, group, plans[axes])
        # A rank without the memory would not come to a broadcast that others wait in.
        ranks.wait()
        if by_turns is not None:
            errors += by_turns.run(checkpoint, options)
    for axes in plans.keys() - set(agreed):
        own += by_axes[axes]
    if errors:
        raise errors[0]
    return own


@dataclass(frozen=True, slots=True, eq=False)
class _SharedBox:
    """A box that a group of ranks needs, and where it goes on this one."""

    array: Array
    box: Box
    target: torch.Tensor
    order: tuple[int, int]
    """The pack and the offset of its first chunk."""
    nbytes: int
    """As the step has them."""

    @property
    def padded(self) -> int:
        """The bytes that it takes in a turn."""
        return -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT


def _shares(
    checkpoint: Checkpoint, topology: Topology, fillings: Sequence[Filling]
) -> list[_SharedBox]:
    """What a group of ranks needs of some tensors, in the order in which it lies in the packs."""
    manifest, found = checkpoint.manifest, []
    for held, array in fillings:
        grid, start = array.grid, checkpoint.first_row(array.name)
        itemsize = array.dtype.itemsize
        for box, inside in boxes_here(topology, held):
            memory = held.local[inside]
            for piece in readable_pieces(grid, box, itemsize, _PIECE_BYTES):
                row = start + grid.flat(tuple(span[0] for span in grid.span(piece)))
                order = int(manifest.pack[row]), int(manifest.offset[row])
                there: tuple[Any, ...] = (*piece.within(box), ...)
                nbytes = piece.size * itemsize
                found.append(_SharedBox(array, piece, memory[there], order, nbytes))
    return sorted(found, key=lambda share: (share.order, share.array.name, share.box.offset))


def _agreed(ranks: Ranks, topology: Topology, plans: dict[Axes, list[_SharedBox]]) -> list[Axes]:
    """The axes along which all ranks of every group have come to the same plan.

    Where they have not, as when one passes other objects, all of them read for themselves.
    """
    mesh = topology.strategy.mesh

    def same_for_all(heard: list[list[tuple[Axes, str]]]) -> list[Axes]:
        known: dict[tuple[Axes, Axes], list[str]] = {}
        for rank, said in enumerate(heard):
            for axes, digest in said:
                rest = tuple(at for axis, at in enumerate(mesh.coords(rank)) if axis not in axes)
                known.setdefault((axes, rest), []).append(digest)
        wrong = {
            axes
            for (axes, _), digests in known.items()
            if len(set(digests)) > 1 or len(digests) != math.prod(mesh.sizes[axis] for axis in axes)
        }
        if wrong:
            log.warning(
                "ranks that repeat each other want different tensors: each reads for itself"
            )
        return sorted({axes for axes, _ in known} - wrong)

    mine = []
    for axes, plan in sorted(plans.items()):
        digest = hashlib.sha256()
        for share in plan:
            digest.update(repr((share.array.name, share.box, share.array.dtype)).encode())
        mine.append((axes, digest.hexdigest()))
    agreed: list[Axes] = ranks.agree(mine, same_for_all)
    return agreed


class _FillByTurns:
    """Fills tensors by turns, through memory of a bounded size: in each turn every rank of a group
    reads a batch, and then gives it to all.

    A rank whose reading fails takes part in all broadcasts nevertheless, and raises at the end:
    nobody waits for it.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        group: dist.ProcessGroup | None,
        plan: Sequence[_SharedBox],
    ) -> None:
        self._ranks = ranks
        self._group = group
        self._me = ranks.index(rank)
        readers = readers_of([share.nbytes for share in plan], len(ranks))
        # By place in the group, what each rank reads in each turn, with where it begins there.
        self._turns: list[list[list[tuple[int, _SharedBox]]]] = []
        largest = 0
        for place in range(len(ranks)):
            own = [share for share, reader in zip(plan, readers, strict=True) if reader == place]
            starts = list(accumulate((share.padded for share in own), initial=0))
            runs = batches([b - a for a, b in pairwise(starts)], _TURN_BYTES)
            largest = max([largest, *(starts[last] - starts[first] for first, last in runs)])
            self._turns.append(
                [[(starts[n] - starts[i], own[n]) for n in range(i, j)] for i, j in runs]
            )
        device = wire()
        self._devices = devices_of([torch.empty(0, device=device), *(each.target for each in plan)])
        self._own = [
            host_memory(largest, self._devices) for _ in self._turns[self._me][:_TURNS_HELD]
        ]
        # What others give arrives here, and on a device also what this rank gives leaves from here.
        if device.type == "cpu":
            self._wired = host_memory(largest, self._devices)
        else:
            self._wired = torch.empty(largest, dtype=torch.uint8, device=device)

    def run(self, checkpoint: Checkpoint, options: LoadOptions) -> list[Exception]:
        """Fill all; what went wrong on this rank is returned when the others have theirs."""
        errors: list[Exception] = []
        mine, read = self._turns[self._me], _reader(checkpoint, options, alone=True)

        def read_turn(turn: int) -> None:
            if errors:
                return
            memory, wanted = self._own[turn % _TURNS_HELD], []
            for start, share in mine[turn]:
                raw = memory[start : start + share.nbytes].numpy()
                bits = raw.view(share.array.dtype.bits)
                wanted.append((share.array.name, share.box, bits.reshape(share.box.shape)))
            try:
                read(wanted)
            except Exception as error:  # noqa: BLE001 — as the class says
                errors.append(error)

        ahead = _TURNS_HELD - 1
        with ThreadPoolExecutor(ahead, thread_name_prefix="ckptkit") as readers:
            reading = [readers.submit(read_turn, turn) for turn in range(len(mine))[:ahead]]
            for turn in range(max(map(len, self._turns), default=0)):
                if turn < len(mine):
                    reading[turn].result()
                if turn + ahead < len(mine):  # into the memory of the turn before
                    reading.append(readers.submit(read_turn, turn + ahead))
                for place, turns in enumerate(self._turns):
                    if turn < len(turns):
                        self._give(place, turn, errors)
        return errors

    @torch.no_grad()
    def _give(self, place: int, turn: int, errors: list[Exception]) -> None:
        """One rank's batch of a turn, from it to all."""
        batch, memory = self._turns[place][turn], self._wired
        start, last = batch[-1]
        size = start + last.padded
        if place == self._me and memory.device.type == "cpu":
            memory = self._own[turn % _TURNS_HELD]
        elif place == self._me:
            memory[:size].copy_(self._own[turn % _TURNS_HELD][:size])
        dist.broadcast(memory[:size], src=self._ranks[place], group=self._group)
        try:
            for start, share in batch:
                values = memory[start : start + share.nbytes].view(torch_dtype(share.array.dtype))
                share.target.copy_(values.view(share.box.shape), non_blocking=True)
        except Exception as error:  # noqa: BLE001 — as the class says
            errors.append(error)
        # Before the memory is used again; and whatever stream uses the tensors next.
        synchronize(self._devices)
