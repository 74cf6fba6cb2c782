"""torch.distributed over mpi4py: a backend of its own, since torch's wheels have none."""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from mpi4py.run import set_abort_status
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from ckptkit.errors import PeerError, UnsupportedTypeError, UsageError
from ckptkit.live.state.tensors import bytes_of
from ckptkit.parallel.ranks.messages import narrowed, widened

NAME = "ckptkit_mpi"
"""Not "mpi": torch keeps that name for an MPI that it was compiled with."""
LIMIT = 2**30
"""The most bytes or numbers of one call: the counts of most MPIs end at 2**31."""

Tensors = list[torch.Tensor]
_CPU = torch.device("cpu")
_TAGS = 32768  # every MPI has so many
_SPINS = 200  # short messages arrive within these; then others may have the core
_LONGEST_PAUSE = 0.001
# The dtypes of `widened` numbers, and of bytes.
_TYPES = {
    torch.uint8: MPI.UINT8_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
}
_OPS = {
    dist.ReduceOp.SUM: ("sum", MPI.SUM),
    dist.ReduceOp.AVG: ("mean", MPI.SUM),
    dist.ReduceOp.PRODUCT: ("product", MPI.PROD),
    dist.ReduceOp.MAX: ("max", MPI.MAX),
    dist.ReduceOp.MIN: ("min", MPI.MIN),
    dist.ReduceOp.BAND: ("and", MPI.BAND),
    dist.ReduceOp.BOR: ("or", MPI.BOR),
    dist.ReduceOp.BXOR: ("xor", MPI.BXOR),
}
_OF_BOOLEANS = {dist.ReduceOp.SUM: dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT: dist.ReduceOp.MIN}
# What is not over, though nobody waits for it: a test of that, and the memory which MPI reads or
# writes until then. Nothing can be called off, and MPI keeps no memory alive.
_abandoned: dict[int, tuple[Callable[[], bool], tuple[Any, ...]]] = {}
_numbers = count()
# Torch calls the methods of a group in one of the ways that its own type allows.
_ProcessGroup: Any = dist.ProcessGroup


def join(timeout: float) -> None:
    """Make the default process group of the MPI job that this process is a rank of."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu"])
        shown = sys.excepthook

        def end_all_ranks(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            shown(kind, error, trace)
            set_abort_status(1)

        # MPI's orderly end waits for all ranks: a rank with an exception must not begin it.
        sys.excepthook = end_all_ranks
    world = MPI.COMM_WORLD
    dist.init_process_group(
        NAME,
        store=shared_store(timeout),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout),
    )


def shared_store(timeout: float) -> Store:
    """A store on rank 0, which tells the others by MPI where it listens."""
    world = MPI.COMM_WORLD
    if world.size == 1:
        return HashStore()
    names = world.allgather(MPI.Get_processor_name())
    # Names of hosts can take long to look up, where nobody knows them.
    host = "127.0.0.1" if len(set(names)) == 1 else names[0]
    wait = timedelta(seconds=timeout)
    store = None
    if world.rank == 0:
        # It cannot wait for the others, who are told only below where it is.
        store = TCPStore(host, 0, is_master=True, timeout=wait, wait_for_workers=False)
    port = world.bcast(None if store is None else store.port, 0)
    return store or TCPStore(host, port, is_master=False, timeout=wait)


def _make(given: Any, options: Any) -> MpiProcessGroup:  # noqa: ARG001 - as torch calls it
    ranks = list(given.global_ranks_in_group) or list(range(given.group_size))
    group = MPI.COMM_WORLD.Get_group().Incl(ranks)
    name = str(given.group_id)
    # Only its members call this; the tag keeps groups apart that are made at one time.
    comm = MPI.COMM_WORLD.Create_group(group, zlib.crc32(name.encode()) % _TAGS)
    return MpiProcessGroup(comm, given.timeout, name)


class MpiProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """Every collective is over when its call returns, which is the order that MPI wants anyway;
    messages are on their way until they are waited for.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: timedelta, name: str) -> None:
        super().__init__(comm.rank, comm.size)
        self._comm = comm
        self._size, self._rank = comm.size, comm.rank
        self._timeout = timeout.total_seconds()
        self._name = name

    def getBackendName(self) -> str:  # noqa: N802 - as torch calls it
        return NAME

    @property
    def group_name(self) -> str:
        """What torch calls this group, also while it takes it down."""
        return self._name

    pg_name = group_name

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        for tensor in tensors:
            self._reduce(tensor, opts)
        return MpiWork(tensors)

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        for tensor in tensors:
            self._reduce(tensor, opts, only=opts.rootRank)
        return MpiWork(tensors)

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        for tensor in tensors:
            data = _bytes_of(tensor)
            for piece in data.split(LIMIT):
                request = self._comm.Ibcast(_buffer(piece), opts.rootRank)
                self._finish(request, opts, "broadcast", piece)
            _land(data, tensor)
        return MpiWork(tensors)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """One tensor of each rank; they may differ in size."""
        for found, mine in zip(outputs, inputs, strict=True):
            self._all_to_all([mine] * self._size, found, opts)
        return MpiWork([tensor for found in outputs for tensor in found])

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """Several tensors of each rank: `outputs` is by rank."""
        return self.allgather([list(row) for row in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """One tensor of all ranks, one after another."""
        return self.all_gather_single_coalesced([output], [mine], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        for output, mine in zip(outputs, inputs, strict=True):
            data, found = _bytes_of(mine), _bytes_of(output)
            rows = found.reshape(self._size, data.numel())
            for at in self._steps(data.numel()):
                piece = data[at]
                # What goes in one piece goes straight to its place.
                whole = rows if piece.numel() == data.numel() else torch.empty_like(rows[:, at])
                request = self._comm.Iallgather(_buffer(piece), _buffer(whole.reshape(-1)))
                self._finish(request, opts, "all_gather", piece, whole)
                if whole is not rows:
                    rows[:, at] = whole
            _land(found, output)
        return MpiWork(outputs)

    def reduce_scatter(
        self, outputs: Tensors, inputs: list[Tensors], opts: Any = None
    ) -> dist.Work:
        """Reduce a list, of which each rank gets its tensor; they may differ in size."""
        for output, row in zip(outputs, inputs, strict=True):
            for rank, tensor in enumerate(row):
                self._reduce(tensor, opts, only=rank, into=output)
        return MpiWork(outputs)

    def reduce_scatter_single(
        self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """Reduce one tensor, of which each rank gets an equal piece."""
        return self.reduce_scatter_single_coalesced([output], [mine], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        for output, mine in zip(outputs, inputs, strict=True):
            name, op = _reduction(opts, mine.dtype)
            wide = widened(mine.detach(), name, _CPU)
            rows = wide.reshape(self._size, wide.numel() // self._size)
            found = torch.empty(rows.shape[1], dtype=rows.dtype, device="cpu")
            for at in self._steps(found.numel()):
                piece, part = rows[:, at].contiguous(), found[at]
                request = self._comm.Ireduce_scatter_block(_buffer(piece), _buffer(part), op)
                self._finish(request, opts, "reduce_scatter", piece, part)
            _copy(narrowed(found, name, self._size, output), output)
        return MpiWork(outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        mine: torch.Tensor,
        output_cuts: Sequence[int],
        input_cuts: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """Exchange pieces of one tensor, cut along its first dim: evenly if no cuts are given."""
        self._all_to_all(self._cut(mine, input_cuts), self._cut(output, output_cuts), opts)
        return MpiWork([output])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        self._all_to_all(inputs, outputs, opts)
        return MpiWork(outputs)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        """One tensor of each rank, on the root."""
        nothing = inputs[0].new_empty(0)
        found = outputs[0] if self._rank == opts.rootRank else [nothing] * self._size
        parts = [inputs[0] if rank == opts.rootRank else nothing for rank in range(self._size)]
        self._all_to_all(parts, found, opts)
        return MpiWork(found if self._rank == opts.rootRank else [])

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        """One tensor for each rank, from the root."""
        nothing = outputs[0].new_empty(0)
        parts = inputs[0] if self._rank == opts.rootRank else [nothing] * self._size
        found = [outputs[0] if rank == opts.rootRank else nothing for rank in range(self._size)]
        self._all_to_all(parts, found, opts)
        return MpiWork(outputs)

    def barrier(self, opts: Any = None) -> dist.Work:
        self._finish(self._comm.Ibarrier(), opts, "barrier")
        return MpiWork([])

    def send(self, tensors: Tensors, dst: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        pieces = _bytes_of(tensor).split(LIMIT)  # of nothing one piece, which is empty
        requests = [(self._comm.Isend(_buffer(piece), dst, tag), piece) for piece in pieces]
        return MpiWork(tensors, requests, self._timeout)

    def recv(self, tensors: Tensors, src: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        data = _bytes_of(tensor)
        pieces = data.split(LIMIT)
        requests = [(self._comm.Irecv(_buffer(piece), src, tag), piece) for piece in pieces]
        land = partial(_land, data, tensor)
        return MpiWork(tensors, requests, self._timeout, source=src, land=land)

    def recv_anysource(self, tensors: Tensors, tag: int) -> dist.Work:
        """Receive from whoever sends first; what has no room stays to be received."""
        status = MPI.Status()
        probe = partial(self._comm.Iprobe, MPI.ANY_SOURCE, tag, status)
        _wait_for(probe, self._timeout, "recv")
        source, nbytes = int(status.Get_source()), min(tensors[0].nbytes, LIMIT)
        if status.Get_count(MPI.BYTE) > nbytes:
            # Open MPI 5 would write on behind the tensor.
            raise UsageError(
                f"rank {source} of the group sent {status.Get_count(MPI.BYTE)} bytes, and there is "
                f"room for {nbytes}",
                where="recv",
                hint="messages of several kinds need a tag each, or a barrier between them",
            )
        return self.recv(tensors, source, tag)

    allreduce_coalesced = allreduce
    # The names that torch had for these before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _reduce(
        self,
        tensor: torch.Tensor,
        opts: Any,
        *,
        only: int | None = None,
        into: torch.Tensor | None = None,
    ) -> None:
        """Reduce in place, or on one rank only and into another tensor."""
        name, op = _reduction(opts, tensor.dtype)
        wide = widened(tensor.detach(), name, _CPU)
        for piece in wide.split(LIMIT):
            if only is None:
                request = self._comm.Iallreduce(MPI.IN_PLACE, _buffer(piece), op)
            elif only == self._rank:
                request = self._comm.Ireduce(MPI.IN_PLACE, _buffer(piece), op, only)
            else:
                request = self._comm.Ireduce(_buffer(piece), None, op, only)
            self._finish(request, opts, "reduce", piece)
        if only in (None, self._rank):
            into = tensor if into is None else into
            _copy(narrowed(wide, name, self._size, into), into)

    def _all_to_all(self, parts: Sequence[torch.Tensor], found: Tensors, opts: Any) -> None:
        """Give bytes to each rank, and get as many of each as there is room for."""
        out, into = [_bytes_of(part) for part in parts], [_bytes_of(part) for part in found]
        largest = np.array([max(part.numel() for part in out)], dtype=np.int64)
        request = self._comm.Iallreduce(MPI.IN_PLACE, largest, MPI.MAX)
        self._finish(request, opts, "all_to_all", largest)
        for at in self._steps(int(largest[0])):
            sent, sizes = torch.cat([part[at] for part in out]), [len(part[at]) for part in into]
            got = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
            request = self._comm.Ialltoallv(
                [sent.numpy(), [len(part[at]) for part in out], MPI.BYTE],
                [got.numpy(), sizes, MPI.BYTE],
            )
            self._finish(request, opts, "all_to_all", sent, got)
            for part, piece in zip(into, got.split(sizes), strict=True):
                part[at].copy_(piece)
        for data, tensor in zip(into, found, strict=True):
            _land(data, tensor)

    def _cut(self, tensor: torch.Tensor, cuts: Sequence[int]) -> list[torch.Tensor]:
        if cuts:
            return list(tensor.split(list(cuts)))
        if tensor.shape[0] % self._size:
            raise UsageError(
                f"{tensor.shape[0]} rows are not an equal number for {self._size} ranks",
                where="all_to_all_single",
                hint="say how many rows each rank gets",
            )
        return list(tensor.chunk(self._size)) if tensor.shape[0] else [tensor] * self._size

    def _steps(self, size: int) -> Iterator[slice]:
        """Slices of a rank's share, such that those of all ranks together stay below the limit."""
        step = max(1, LIMIT // self._size)
        return (slice(at, at + step) for at in range(0, size, step))

    def _finish(self, request: Any, opts: Any, what: str, *kept: Any) -> None:
        given = getattr(opts, "timeout", None)
        seconds = given.total_seconds() if given is not None else 0.0
        _wait_for(request.Test, seconds if seconds > 0 else self._timeout, what, request, *kept)


class MpiWork(dist.Work):
    """What torch waits for: a collective that is over already, or a message on its way, whose other
    side may be waiting for one too.
    """

    def __init__(
        self,
        tensors: Tensors,
        requests: Sequence[tuple[Any, torch.Tensor]] = (),
        seconds: float = 0.0,
        *,
        source: int = -1,
        land: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._tensors = tensors
        self._requests = requests
        self._seconds = seconds
        self._source = source
        self._land = land

    def __del__(self) -> None:
        # Nobody waits for it any more, but MPI goes on with its memory.
        for request, piece in self._requests:
            _abandon(request.Test, piece)

    def is_completed(self) -> bool:
        return all(request.Test() for request, _ in self._requests)

    is_success = is_completed

    def exception(self) -> None:
        """Nothing goes wrong without raising."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        given = 0.0 if timeout is None else timeout.total_seconds()
        for request, piece in self._requests:
            _wait_for(request.Test, given if given > 0 else self._seconds, "message", piece)
        if self._requests:
            self._requests = ()
            self._land()
        return True

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Tensors:
        self.wait()
        return self._tensors

    def get_future(self) -> torch.futures.Future[Tensors]:
        """A future that is there already; no thread could complete it later."""
        future: torch.futures.Future[Tensors] = torch.futures.Future()
        future.set_result(self.result())
        return future

    def _source_rank(self) -> int:
        return self._source


def _wait_for(test: Callable[[], bool], seconds: float, what: str, *kept: Any) -> None:
    """Wait for an operation that the other ranks have to take part in."""
    deadline = time.monotonic() + seconds
    turns = 0
    while not test():
        turns += 1
        if time.monotonic() > deadline:
            if kept:
                _abandon(test, *kept)
            raise PeerError(
                f"not all ranks came within {seconds:g} s",
                where=what,
                hint="look at the logs of the other ranks: one of them failed, hangs or is slow",
            )
        time.sleep(0 if turns < _SPINS else min(_LONGEST_PAUSE, 0.00001 * (turns - _SPINS)))


def _abandon(test: Callable[[], bool], *kept: Any) -> None:
    """Keep memory until MPI is done with it; of what it is done with meanwhile, let go."""
    _abandoned[next(_numbers)] = test, kept
    if MPI.Is_finalized():
        return
    # A copy, since to test lets others come here: other threads, and the collector of garbage.
    for number, (is_over, _) in list(_abandoned.items()):
        with suppress(MPI.Exception):
            if not is_over():
                continue
        _abandoned.pop(number, None)  # one that failed is over too


def _reduction(opts: Any, dtype: torch.dtype) -> tuple[str, MPI.Op]:
    """What torch asks for, as `widened` knows it and as MPI does."""
    op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    kind = getattr(op, "op", op)
    if dtype == torch.bool:
        kind = _OF_BOOLEANS.get(kind, kind)
    if kind not in _OPS:
        raise UnsupportedTypeError("MPI has no such reduction", value=str(op))
    name, mpi_op = _OPS[kind]
    if dtype.is_complex and name not in ("sum", "mean"):
        raise UnsupportedTypeError("complex numbers can only be added up", value=str(op))
    if dtype == torch.uint64 and name == "mean":
        raise UnsupportedTypeError("MPI cannot reduce values of this dtype", value=str(dtype))
    return name, mpi_op


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor; its own memory where that is dense."""
    if tensor.device.type != "cpu":
        raise UsageError(
            "the mpi backend carries tensors of the CPU",
            value=str(tensor.device),
            hint="use .cpu()",
        )
    return bytes_of(tensor)


def _land(data: torch.Tensor, into: torch.Tensor) -> None:
    """Put bytes into a tensor, unless they are its own."""
    if into.numel() and data.data_ptr() != into.data_ptr():
        _copy(data.view(into.dtype).reshape(into.shape), into)


def _copy(found: torch.Tensor, into: torch.Tensor) -> None:
    with torch.no_grad():  # pipelines receive into leaves that require gradients
        into.copy_(found)


def _buffer(tensor: torch.Tensor) -> Any:
    # No count: for some collectives mpi4py takes it as that of each rank, and checks no bounds.
    return [tensor.numpy(), _TYPES[tensor.dtype]]
