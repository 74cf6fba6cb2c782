"""The collectives of compressed gradients, and what they send."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class Wire:
    """One process group, and how many bytes this rank has sent over it.

    An all-reduce counts as the ring that gloo and NCCL make of it: each rank sends all but its own
    part twice.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.is_nccl = dist.get_backend(group) == "nccl"
        self.sent = 0
        self.uncompressed = 0

    def would_reduce(self, tensor: torch.Tensor) -> None:
        """Count what the gradients would have cost as they are."""
        self.uncompressed += self._ring(tensor.nbytes)

    def would_scatter(self, tensor: torch.Tensor) -> None:
        """The same of gradients of which each rank gets its part of the sum only."""
        self.uncompressed += tensor.nbytes * (self.size - 1) // self.size

    def reduces(self, nbytes: int) -> None:
        """Count an all-reduce that torch does itself."""
        self.sent += self._ring(nbytes)

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mean over all ranks of a flat tensor, in its dtype.

        Gloo's all-reduce adds up in an order that depends on where an element stands, so that a
        job which is resumed, and whose first step has other buckets, would differ in the last
        bit. Here it is the order of the ranks; as many bytes are sent.
        """
        if self.is_nccl:
            self.reduces(tensor.nbytes)
            dist.all_reduce(tensor.div_(self.size), group=self.group)
            return tensor
        dtype, width = tensor.dtype, tensor.element_size()
        exact = dtype if dtype == torch.float64 else torch.float32
        parts = tensor.tensor_split(self.size)
        pieces = [part.contiguous().view(torch.uint8) for part in parts]
        total = torch.zeros_like(parts[self.rank], dtype=exact)
        for piece in self.exchange(pieces, pieces[self.rank].numel()):
            total += piece.clone().view(dtype)
        mine = total.div_(self.size).to(dtype).view(torch.uint8)
        found = self.gather(mine, [width * part.numel() for part in parts])
        return torch.cat(found).view(dtype)

    def exchange(self, pieces: Sequence[torch.Tensor], size: int) -> list[torch.Tensor]:
        """Send each rank its piece; what all ranks have for this one, of `size` bytes each."""
        received = pieces[0].new_empty(size * self.size)
        dist.all_to_all_single(
            received,
            torch.cat(list(pieces)),
            output_split_sizes=[size] * self.size,
            input_split_sizes=[piece.numel() for piece in pieces],
            group=self.group,
        )
        self.sent += sum(p.nbytes for rank, p in enumerate(pieces) if rank != self.rank)
        return list(received.split(size)) if size else [received] * self.size

    def gather(self, mine: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """What each rank has, whose sizes are known everywhere."""
        largest = max(sizes)
        padded = mine.new_zeros(largest)
        padded[: mine.numel()] = mine
        received = mine.new_empty(largest * self.size)
        dist.all_gather_single(received, padded, group=self.group)
        self.sent += padded.nbytes * (self.size - 1)
        rows = received.view(self.size, largest)
        return [row[:size] for row, size in zip(rows, sizes, strict=True)]

    def _ring(self, nbytes: int) -> int:
        return 2 * nbytes * (self.size - 1) // self.size


def done(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A future that has its value."""
    devices: list[int | str | torch.device] | None = [tensor.device] if tensor.is_cuda else None
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    future.set_result(tensor)
    return future
