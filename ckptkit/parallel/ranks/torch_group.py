"""A process group of torch.distributed as a carrier: gloo, nccl, mpi, or any other backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ckptkit.errors import PeerError, UsageError
from ckptkit.parallel.ranks.carrier import DEFAULT_TIMEOUT, Carrier

_SHORT = 248  # bytes of a message that need no second exchange
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class TorchCarrier:
    """Carries messages over a process group, the default one if None; its owner destroys it."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.timeout = timeout
        self.name, self.device = _backend_of(group)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.close = on_close
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)  # torch numbers those of the whole job

    def exchange(self, data: bytes) -> list[bytes]:
        """One all-gather of short messages, and a second one if a message is longer."""
        shorts = self._all_gather(len(data).to_bytes(8, "little") + data[:_SHORT], 8 + _SHORT)
        sizes = [int.from_bytes(short[:8], "little") for short in shorts]
        if max(sizes) <= _SHORT:
            return [short[8 : 8 + size] for short, size in zip(shorts, sizes, strict=True)]
        wholes = self._all_gather(data, max(sizes))
        return [whole[:size] for whole, size in zip(wholes, sizes, strict=True)]

    def all_reduce(self, tensor: torch.Tensor, op: str) -> None:
        self._wait(lambda: dist.all_reduce(tensor, _OPS[op], self._group, async_op=True))

    def broadcast(self, data: torch.Tensor, src: int) -> None:
        root = self._ranks[src]
        self._wait(lambda: dist.broadcast(data, root, self._group, async_op=True))

    def all_to_all(self, parts: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
        """One exchange of one buffer, cut as the ranks need it."""
        out = torch.cat(parts)
        found = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        cuts = [part.numel() for part in parts]
        self._wait(
            lambda: dist.all_to_all_single(found, out, sizes, cuts, self._group, async_op=True)
        )
        # Cut at any byte, but the dtypes of what they hold want to be aligned.
        return [part.clone() for part in found.split(sizes)]

    def send(self, data: torch.Tensor, dst: int, tag: int) -> None:
        self._wait(lambda: dist.isend(data, self._ranks[dst], self._group, tag))

    def recv(self, data: torch.Tensor, src: int, tag: int) -> None:
        self._wait(lambda: dist.irecv(data, self._ranks[src], self._group, tag))

    def split(self, ranks: tuple[int, ...]) -> Carrier | None:
        """A new process group, destroyed when the communicator of it is closed."""
        chosen = [self._ranks[rank] for rank in ranks]
        wait = timedelta(seconds=self.timeout)
        with _failures(self.timeout), _named_by_us(self._group):
            group: Any = dist.new_group(chosen, timeout=wait, use_local_synchronization=True)
        if self.rank not in ranks:
            return None
        return TorchCarrier(
            group, timeout=self.timeout, on_close=lambda: dist.destroy_process_group(group)
        )

    def _all_gather(self, data: bytes, size: int) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        mine = mine.to(self.device)
        found = torch.empty(size * self.size, dtype=torch.uint8, device=self.device)
        self._wait(lambda: dist.all_gather_single(found, mine, self._group, async_op=True))
        whole = found.cpu().numpy().tobytes()
        return [whole[at : at + size] for at in range(0, len(whole), size)]

    def _wait(self, start: Callable[[], dist.Work | None]) -> None:
        with _failures(self.timeout):
            work = start()
            if work is not None:
                work.wait(timedelta(seconds=self.timeout))


@contextmanager
def _failures(timeout: float) -> Iterator[None]:
    """What goes wrong between ranks is a PeerError that says so."""
    try:
        yield
    except PeerError:
        raise
    except RuntimeError as error:
        text = str(error)
        late = "time" in text.lower() and "out" in text.lower()
        told = f"not all ranks came within {timeout:g} s" if late else "a rank is gone"
        raise PeerError(
            f"{told}: {text.splitlines()[0][:300] if text else type(error).__name__}",
            hint="look at the logs of the other ranks: one of them failed, hangs or is slow",
        ) from error


# By process group, how many were made out of it: all of its ranks make them in one order.
_made: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


@contextmanager
def _named_by_us(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Groups made meanwhile have a name of ours, by which their ranks find each other.

    Torch makes up a name from how many groups a rank is in, which differs between ranks as soon as
    they have been in different groups: they would wait for each other for ever.
    """
    known: Any = group or dist.group.WORLD
    _made[known] = _made.get(known, 0) + 1
    name = f"{known.group_name}/ckptkit-{_made[known]}"
    torchs = dist.distributed_c10d
    before = torchs._process_group_name
    torchs._process_group_name = lambda *_, **__: name  # type: ignore[assignment]
    try:
        yield
    finally:
        torchs._process_group_name = before


def _backend_of(group: dist.ProcessGroup | None) -> tuple[str, torch.device]:
    """The backend to talk over, the CPU's where there is one, and the device it is for."""
    told = dist.get_backend_config(group)
    backends = dict(item.split(":", 1) for item in told.split(",") if ":" in item)
    for kind in ("cpu", *backends):
        if kind in backends:
            name = backends[kind].removeprefix("ckptkit_")
            if kind == "cpu":
                return name, torch.device(kind)
            return name, torch.device(kind, torch.accelerator.current_device_index())
    raise UsageError("a process group without a backend", value=told)
