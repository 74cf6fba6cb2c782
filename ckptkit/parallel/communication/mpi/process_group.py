"""A torch.distributed process group whose collectives are MPI's."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from ckptkit.errors import UsageError
from ckptkit.parallel.communication.mpi.moving import Mover, as_bytes, landing
from ckptkit.parallel.communication.mpi.reductions import Reduction
from ckptkit.parallel.communication.mpi.requests import Message, done

NAME = "ckptkit_mpi"
"""Not "mpi": torch keeps that name for an MPI that it was compiled with."""

Tensors = list[torch.Tensor]
# Torch calls these methods in one of the ways that its own type allows.
_ProcessGroup: Any = dist.ProcessGroup


class MpiProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """Every collective is over when its call returns, which is the order that MPI wants anyway;
    messages are on their way until they are waited for.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: timedelta, name: str) -> None:
        super().__init__(comm.rank, comm.size)
        self._name = name
        self._mover = Mover(comm, timeout.total_seconds())
        self._size = comm.size
        self._rank = comm.rank

    def getBackendName(self) -> str:  # noqa: N802 - as torch calls it
        """The name it is registered under."""
        return NAME

    @property
    def group_name(self) -> str:
        """What torch calls this group, also while it takes it down."""
        return self._name

    @property
    def pg_name(self) -> str:
        """The same."""
        return self._name

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce in place."""
        for tensor in tensors:
            self._reduce(tensor, opts)
        return done(tensors)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce several in place."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        """Reduce on the root; the others keep what they have."""
        for tensor in tensors:
            self._reduce(tensor, opts, only=opts.rootRank)
        return done(tensors)

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        """Fill with what the root has."""
        for tensor in tensors:
            data = as_bytes(tensor)
            self._mover.broadcast(data, opts.rootRank, opts)
            landing(data, tensor)
        return done(tensors)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """One tensor of each rank; they may differ in size."""
        for found, mine in zip(outputs, inputs, strict=True):
            sizes = [tensor.nbytes for tensor in found]
            self._spread([mine] * self._size, found, sizes, opts)
        return done([tensor for found in outputs for tensor in found])

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """Several tensors of each rank: `outputs` is by rank."""
        return self.allgather([list(row) for row in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """One tensor of all ranks, one after another."""
        data = as_bytes(output, fresh=True)
        self._mover.all_gather(as_bytes(mine), data, opts)
        landing(data, output)
        return done([output])

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """Several of them."""
        for output, mine in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, mine, opts)
        return done(outputs)

    def reduce_scatter(
        self, outputs: Tensors, inputs: list[Tensors], opts: Any = None
    ) -> dist.Work:
        """Reduce a list, of which each rank gets its tensor; they may differ in size."""
        for output, row in zip(outputs, inputs, strict=True):
            for rank, tensor in enumerate(row):
                into = output if rank == self._rank else None
                self._reduce(tensor, opts, only=rank, into=into)
        return done(outputs)

    def reduce_scatter_single(
        self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """Reduce one tensor, of which each rank gets an equal piece."""
        reduction = Reduction.of(_op_of(opts), mine.dtype)
        found = self._mover.reduce_scatter(reduction.carried(mine), reduction.op, opts)
        reduction.landed(found, self._size, output)
        return done([output])

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """Several of them."""
        for output, mine in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, mine, opts)
        return done(outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        mine: torch.Tensor,
        output_cuts: Sequence[int],
        input_cuts: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """Exchange pieces of one tensor, cut along its first dim: evenly if no cuts are given."""
        parts = self._cut(mine, input_cuts)
        found = self._cut(output, output_cuts)
        self._spread(parts, found, [tensor.nbytes for tensor in found], opts)
        return done([output])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Exchange tensors."""
        self._spread(inputs, outputs, [tensor.nbytes for tensor in outputs], opts)
        return done(outputs)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        """One tensor of each rank, on the root."""
        is_here = self._rank == opts.rootRank
        found = outputs[0] if is_here else [inputs[0].new_empty(0)] * self._size
        nothing = inputs[0].new_empty(0)
        parts = [inputs[0] if rank == opts.rootRank else nothing for rank in range(self._size)]
        self._spread(parts, found, [tensor.nbytes for tensor in found], opts)
        return done(found if is_here else [])

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        """One tensor for each rank, from the root."""
        nothing = outputs[0].new_empty(0)
        parts = inputs[0] if self._rank == opts.rootRank else [nothing] * self._size
        found = [outputs[0] if rank == opts.rootRank else nothing for rank in range(self._size)]
        self._spread(parts, found, [tensor.nbytes for tensor in found], opts)
        return done(outputs)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Meet."""
        self._mover.barrier(opts)
        return done([])

    def send(self, tensors: Tensors, dst: int, tag: int) -> dist.Work:
        """Send to a rank."""
        (tensor,) = tensors
        data = as_bytes(tensor)
        return Message(self._mover.sending(data, dst, tag), data, self._mover.timeout, None)

    def recv(self, tensors: Tensors, src: int, tag: int) -> dist.Work:
        """Receive from a rank."""
        (tensor,) = tensors
        data = as_bytes(tensor, fresh=True)
        receiving = self._mover.receiving(data, src, tag)
        return Message(receiving, data, self._mover.timeout, tensor)

    def recv_anysource(self, tensors: Tensors, tag: int) -> dist.Work:
        """Receive from whoever sends first."""
        source = self._mover.next_source(tag)
        work = self.recv(tensors, source, tag)
        assert isinstance(work, Message)  # noqa: S101 - it is ours
        work.source = source
        return work

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
        reduction = Reduction.of(_op_of(opts), tensor.dtype)
        carried = reduction.carried(tensor)
        self._mover.reduce(carried, reduction.op, only, opts)
        if only is None or only == self._rank:
            reduction.landed(carried, self._size, tensor if into is None else into)

    def _spread(
        self,
        parts: Sequence[torch.Tensor],
        found: Sequence[torch.Tensor],
        sizes: list[int],
        opts: Any,
    ) -> None:
        out = [as_bytes(part) for part in parts]
        for data, tensor in zip(self._mover.all_to_all(out, sizes, opts), found, strict=True):
            landing(data, tensor)

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


def _op_of(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp
