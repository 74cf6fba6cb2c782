"""Bytes and numbers over MPI, in pieces that its 32-bit counts can hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from ckptkit.errors import UsageError
from ckptkit.parallel.communication.mpi.reductions import buffer
from ckptkit.parallel.communication.mpi.requests import finish

LIMIT = 2**30
"""The most bytes or numbers of one call: the counts of most MPIs end at 2**31."""


def as_bytes(tensor: torch.Tensor, *, fresh: bool = False) -> torch.Tensor:
    """The elements of a tensor on the CPU, row by row: the same memory where it is dense, unless
    that has no room to be written to.
    """
    if tensor.device.type != "cpu":
        raise UsageError(
            "the mpi backend carries tensors of the CPU",
            value=str(tensor.device),
            hint="use .cpu()",
        )
    tensor = tensor.detach()
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        dense = tensor
    elif fresh:
        dense = torch.empty(tensor.shape, dtype=tensor.dtype)
    else:
        dense = tensor.resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8)


def landing(data: torch.Tensor, into: torch.Tensor) -> None:
    """Put bytes into a tensor, unless they are its own."""
    if into.numel() and data.data_ptr() != into.data_ptr():
        with torch.no_grad():
            into.copy_(_cast(data, into.dtype).reshape(into.shape))


def _cast(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (data if data.data_ptr() % dtype.itemsize == 0 else data.clone()).view(dtype)


class Mover:
    """What MPI does for a group, each time within the time that torch allows."""

    def __init__(self, comm: MPI.Intracomm, timeout: float) -> None:
        self.timeout = timeout
        self._comm = comm

    def barrier(self, opts: Any) -> None:
        """Meet."""
        finish(self._comm.Ibarrier(), self._seconds(opts), "barrier")

    def broadcast(self, data: torch.Tensor, root: int, opts: Any) -> None:
        """Fill bytes with the root's."""
        for piece in _pieces(data):
            request = self._comm.Ibcast(buffer(piece), root)
            finish(request, self._seconds(opts), "broadcast", piece)

    def reduce(self, tensor: torch.Tensor, op: MPI.Op, root: int | None, opts: Any) -> None:
        """Reduce numbers in place, on all ranks or one."""
        for piece in _pieces(tensor):
            if root is None:
                request = self._comm.Iallreduce(MPI.IN_PLACE, buffer(piece), op)
            elif root == self._comm.rank:
                request = self._comm.Ireduce(MPI.IN_PLACE, buffer(piece), op, root)
            else:
                request = self._comm.Ireduce(buffer(piece), None, op, root)
            finish(request, self._seconds(opts), "reduce", piece)

    def reduce_scatter(self, tensor: torch.Tensor, op: MPI.Op, opts: Any) -> torch.Tensor:
        """Reduce numbers; this rank's equal share of them."""
        rows = tensor.reshape(self._comm.size, -1)
        found = torch.empty(rows.shape[1], dtype=tensor.dtype)
        for at in _steps(found.numel(), self._comm.size):
            piece, part = rows[:, at].contiguous(), found[at]
            request = self._comm.Ireduce_scatter_block(buffer(piece), buffer(part), op)
            finish(request, self._seconds(opts), "reduce_scatter", piece, part)
        return found

    def all_gather(self, data: torch.Tensor, found: torch.Tensor, opts: Any) -> None:
        """Fill bytes with those of all ranks, which have as many."""
        rows = found.reshape(self._comm.size, -1)
        for at in _steps(data.numel(), self._comm.size):
            piece = data[at]
            whole = rows if piece.numel() == data.numel() else torch.empty_like(rows[:, at])
            request = self._comm.Iallgather(buffer(piece), buffer(whole.reshape(-1)))
            finish(request, self._seconds(opts), "all_gather", piece, whole)
            if whole is not rows:
                rows[:, at] = whole

    def all_to_all(
        self, parts: list[torch.Tensor], sizes: list[int], opts: Any
    ) -> list[torch.Tensor]:
        """Give bytes to each rank, and get `sizes[rank]` bytes of each."""
        found = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        largest = np.array([max(part.numel() for part in parts)], dtype=np.int64)
        request = self._comm.Iallreduce(MPI.IN_PLACE, largest, MPI.MAX)
        finish(request, self._seconds(opts), "all_to_all", largest)
        for at in _steps(int(largest[0]), self._comm.size):
            out = [part[at] for part in parts]
            into = [part[at] for part in found]
            sent, got = torch.cat(out), torch.empty(sum(map(len, into)), dtype=torch.uint8)
            request = self._comm.Ialltoallv(
                [sent.numpy(), [len(part) for part in out], MPI.BYTE],
                [got.numpy(), [len(part) for part in into], MPI.BYTE],
            )
            finish(request, self._seconds(opts), "all_to_all", sent, got)
            for part, piece in zip(into, got.split([len(part) for part in into]), strict=True):
                part.copy_(piece)
        return found

    def sending(self, data: torch.Tensor, dst: int, tag: int) -> list[Any]:
        """The requests of a message to a rank."""
        return [self._comm.Isend(buffer(piece), dst, tag) for piece in _pieces(data, least=1)]

    def receiving(self, data: torch.Tensor, src: int, tag: int) -> list[Any]:
        """The requests of a message from a rank."""
        return [self._comm.Irecv(buffer(piece), src, tag) for piece in _pieces(data, least=1)]

    def next_source(self, tag: int) -> int:
        """Who sends first."""
        status = MPI.Status()
        probe = _Probe(self._comm, tag, status)
        finish(probe, self.timeout, "recv")
        return int(status.Get_source())

    def _seconds(self, opts: Any) -> float:
        given = getattr(opts, "timeout", None)
        seconds = given.total_seconds() if given is not None else 0.0
        return seconds if seconds > 0 else self.timeout


class _Probe:
    """Something to finish: that a message is there."""

    def __init__(self, comm: MPI.Intracomm, tag: int, status: MPI.Status) -> None:
        self._comm = comm
        self._tag = tag
        self._status = status

    def Test(self) -> bool:  # noqa: N802 - as MPI calls it
        """Whether there is one."""
        return bool(self._comm.Iprobe(MPI.ANY_SOURCE, self._tag, self._status))


def _pieces(data: torch.Tensor, least: int = 0) -> Iterator[torch.Tensor]:
    count = max(least, -(-data.numel() // LIMIT))
    return (data[n * LIMIT : (n + 1) * LIMIT] for n in range(count))


def _steps(size: int, ranks: int) -> Iterator[slice]:
    """Slices of a rank's share, such that those of all ranks together stay below the limit."""
    step = max(1, LIMIT // ranks)
    return (slice(at, at + step) for at in range(0, size, step))
