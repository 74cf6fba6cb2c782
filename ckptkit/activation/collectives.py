"""The collectives of ranks that may not hang, whatever the time-out of their process group."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, Work

from ckptkit.errors import PeerError


class Collectives:
    """Gloo among the ranks of a process group, with a time-out of its own."""

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        from torch._C._distributed_c10d import ProcessGroupGloo  # noqa: PLC0415 — not in all builds

        self._size = group.size()
        self._timeout = timeout
        with self._in_time():
            # Not `new_group`: its names count the groups of a rank, which not all have as many of.
            store = _store_of(group)
            turn = store.add(f"turns of rank {group.rank()}", 1)
            self._gloo: Any = ProcessGroupGloo(
                PrefixStore(str(turn), store), group.rank(), self._size, timedelta(seconds=timeout)
            )

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(size) for size in self._gathered(torch.tensor([data.numel()]))]
        padded = data.new_zeros(max(sizes))
        padded[: data.numel()] = data
        heard = self._gathered(padded)
        return [
            pickle.loads(each[:size].numpy().tobytes())  # noqa: S301 — from a rank of this job
            for each, size in zip(heard, sizes, strict=True)
        ]

    def broadcast(self, flat: torch.Tensor, source: int) -> None:
        """Fill a tensor with that of another rank."""
        options = BroadcastOptions()
        options.rootRank = source
        self._wait(self._gloo.broadcast([flat], options))

    def _gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        heard = [torch.empty_like(tensor) for _ in range(self._size)]
        self._wait(self._gloo.allgather([heard], [tensor]))
        return heard

    def _wait(self, work: Work) -> None:
        with self._in_time():
            work.wait()

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerError(
                f"another rank did not come within {self._timeout:g} s, or is lost: {error}",
                hint="the ranks cannot meet again in this store: close it, and make another",
            ) from error


def _store_of(group: dist.ProcessGroup) -> PrefixStore:
    """Where only the ranks of this group leave word; groups apart may have one name."""
    first = dist.get_process_group_ranks(group)[0]
    store = dist.distributed_c10d._get_default_store()
    return PrefixStore(f"ckptkit/activations/{group.group_name}/{first}", store)
