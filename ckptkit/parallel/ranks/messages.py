"""Messages between ranks: calls that ranks compare, tensors and plain values as bytes, and what
carries them: a process group of torch.distributed (over gloo, nccl, mpi or any other backend), or
the memory that ranks share which are threads.

Carriers move flat, dense tensors on their `device` between the ranks of one group. A communicator
has made sure that all ranks make the same call with fitting sizes, and never moves nothing, so
neither checks that. What the other ranks do not do within `timeout` seconds is a PeerError, and so
is their end; never a hang.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ckptkit.checkpoint.ranks import DEFAULT_TIMEOUT
from ckptkit.errors import PeerError, UnsupportedTypeError, UsageError
from ckptkit.format import encoding
from ckptkit.live.state.ranks import all_gather_single
from ckptkit.live.state.tensors import PLAIN, TensorForm, bytes_of

OPS = ("sum", "mean", "max", "min")
# By what a carrier is asked for.
_COMBINED: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
_LOWEST = torch.iinfo(torch.int64).min  # its bits are those of the sign


def check_reduction(op: str, forms: Sequence[TensorForm]) -> None:
    """Raise where values of these forms cannot be put together so."""
    if op not in OPS:
        raise UsageError("no such reduction", value=op, hint=f"there are {', '.join(OPS)}")
    for form in forms:
        if form.dtype == PLAIN:
            hint = "what is reduced are tensors, and numbers of 64 bits by all_reduce"
            raise UnsupportedTypeError("is no tensor", hint=hint)
        dtype = form.torch_dtype
        wide_dtype(dtype)
        if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
            hint = "use sum, or convert them first"
            raise UnsupportedTypeError("the mean of integers is none", value=form.dtype, hint=hint)
        if op in ("max", "min") and dtype.is_complex:
            raise UnsupportedTypeError("complex numbers have no order", value=form.dtype)


def widened(tensor: torch.Tensor, op: str, device: torch.device) -> torch.Tensor:
    """A flat copy in a dtype that everything can reduce: uint8, int32, int64, float32 or float64.

    What is narrower than float32 is added up as float32 and rounded once, so that backends do not
    differ; sums of integers wrap around as those of torch do.
    """
    flat, dtype = bytes_of(tensor.to(device)).view(tensor.dtype), tensor.dtype
    if dtype.is_complex:
        flat = torch.view_as_real(flat).reshape(-1)
    if dtype == torch.uint64:
        # Nothing adds up or compares these. Their bits add up as those of int64 do, and with the
        # highest one turned over they are in the order of int64.
        bits = flat.view(torch.int64)
        return bits ^ _LOWEST if op in ("max", "min") else bits.clone()
    return flat.to(wide_dtype(dtype), copy=True)


def combined(op: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum, max or min of `widened` tensors, in the place of the first, and in their order: a
    sum of floats depends on it.
    """
    total, *others = tensors
    for other in others:
        _COMBINED[op](total, other, out=total)
    return total


def narrowed(wide: torch.Tensor, op: str, size: int, like: torch.Tensor) -> torch.Tensor:
    """What the reduction of `widened` tensors of `size` ranks comes to."""
    if op == "mean":
        wide = wide / size
    dtype = like.dtype
    if dtype.is_complex:
        found = torch.view_as_complex(wide.reshape(-1, 2)).to(dtype)
    elif dtype == torch.uint64:
        found = (wide ^ _LOWEST if op in ("max", "min") else wide).view(torch.uint64)
    else:
        found = wide.to(dtype)
    return found.reshape(like.shape).to(like.device)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What values of a dtype are reduced as."""
    if dtype.is_complex or dtype.is_floating_point:
        return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
    if dtype == torch.bool:
        return torch.uint8
    if dtype in (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32):
        return torch.int32
    if dtype in (torch.int64, torch.uint32, torch.uint64):
        return torch.int64
    raise UnsupportedTypeError("values of this dtype cannot be reduced", value=str(dtype))


def carried_op(op: str, dtype: torch.dtype) -> str:
    """The reduction that a carrier is asked for: booleans are added up as torch does, by or."""
    if dtype == torch.bool and op == "sum":
        return "max"
    return "sum" if op == "mean" else op


@dataclass(frozen=True, slots=True)
class Call:
    """A call of one rank: its name and options must be those of all ranks."""

    name: str
    options: str = ""
    forms: tuple[TensorForm, ...] = ()
    problem: str = ""
    """Why this rank cannot make the call; the others are waiting to hear of it."""

    def encode(self) -> bytes:
        """The bytes for the other ranks: JSON, which runs no code."""
        forms = list(map(astuple, self.forms))
        return json.dumps([self.name, self.options, forms, self.problem]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Call:
        """The call that `encode` has written."""
        name, options, forms, problem = json.loads(data)
        return cls(name, options, tuple(map(TensorForm.heard, forms)), problem)


def check_same_forms(calls: Sequence[Call]) -> None:
    """Raise, on all ranks alike, unless their tensors have the same dtypes and shapes."""
    told: Callable[[TensorForm], str]
    for told, what in ((lambda form: form.dtype, "dtypes"), (str, "shapes")):
        of_ranks = [", ".join(map(told, call.forms)) for call in calls]
        check_same(of_ranks, f"the {what} of the ranks differ", calls[0].name)


def check_same(told: Sequence[str], what: str, where: str) -> None:
    """Raise what it means, on all ranks alike, unless they all tell the same."""
    if len(set(told)) > 1:
        ranks: dict[str, list[str]] = {}
        for rank, text in enumerate(told):
            ranks.setdefault(text, []).append(str(rank))
        shown = "; ".join(f"rank {', '.join(who[:8])}: {text}" for text, who in ranks.items())
        raise PeerError(f"{what}: {shown}", where=where)


def packed(value: object, where: str) -> tuple[torch.Tensor, TensorForm]:
    """What travels of a value, and its form: of a tensor that lies here as a whole itself, of a
    plain value the bytes; never a pickle, which runs what it is made of.
    """
    if isinstance(value, DTensor):
        raise UnsupportedTypeError(
            "a DTensor is spread over ranks already",
            where=where,
            hint="pass what this rank holds of it: .to_local()",
        )
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise UnsupportedTypeError(
                "only dense tensors can be sent", where=where, value=str(value.layout)
            )
        if value.is_meta:
            raise UsageError("a tensor on the meta device has no values to send", where=where)
        return value.detach(), TensorForm.of(value)
    try:
        data = encoding.dumps(value, where)
    except UnsupportedTypeError as error:
        error.what = f"besides tensors only plain values travel between ranks: {error.what}"
        raise
    return torch.frombuffer(bytearray(data), dtype=torch.uint8), TensorForm(PLAIN, (len(data),))


def unpacked(data: torch.Tensor, form: TensorForm, device: torch.device) -> Any:
    """The value that was packed; a tensor on a device."""
    if form.dtype == PLAIN:
        return encoding.unpack(data.cpu().numpy().tobytes(), "a message of another rank")
    return data.view(form.torch_dtype).reshape(form.shape).to(device)


# What carries them.

T = TypeVar("T")

_EXCHANGE = "exchange"  # in the place of a tag
_SHORT = 248  # bytes of a message that need no second exchange
# By process group, how many were made out of it: all of its ranks make them in one order.
_made: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
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
        # The backend to talk over: the CPU's where there is one, else that of a device.
        told = dist.get_backend_config(group)
        backends = dict(item.split(":", 1) for item in told.split(",") if ":" in item)
        kind = "cpu" if "cpu" in backends else next(iter(backends), None)
        if kind is None:
            raise UsageError("a process group without a backend", value=told)
        self.name = backends[kind].removeprefix("ckptkit_")
        self.device = torch.device(kind)
        if kind != "cpu":
            self.device = torch.device(kind, torch.accelerator.current_device_index())
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.close = on_close
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)  # torch numbers those of the whole job

    def exchange(self, data: bytes) -> list[bytes]:
        """What every rank passes, of any length, in their order: by one all-gather, and a second
        one if a message is not short.
        """
        shorts = self._all_gather(len(data).to_bytes(8, "little") + data[:_SHORT], 8 + _SHORT)
        sizes = [int.from_bytes(short[:8], "little") for short in shorts]
        if max(sizes) <= _SHORT:
            return [short[8 : 8 + size] for short, size in zip(shorts, sizes, strict=True)]
        wholes = self._all_gather(data, max(sizes))
        return [whole[:size] for whole, size in zip(wholes, sizes, strict=True)]

    def all_reduce(self, tensor: torch.Tensor, op: str) -> None:
        """Put the sum, max or min of all ranks in place of what `widened` made."""
        self._wait(lambda: dist.all_reduce(tensor, _OPS[op], self._group, async_op=True))

    def broadcast(self, data: torch.Tensor, src: int) -> None:
        """Put the bytes of rank `src` in place of those of the other ranks."""
        root = self._ranks[src]
        self._wait(lambda: dist.broadcast(data, root, self._group, async_op=True))

    def all_to_all(self, parts: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
        """Give each rank its part, as bytes; get `sizes[rank]` bytes of each rank."""
        out = torch.cat(parts)
        found = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        cuts = [part.numel() for part in parts]
        self._wait(
            lambda: dist.all_to_all_single(found, out, sizes, cuts, self._group, async_op=True)
        )
        # Cut at any byte, but the dtypes of what they hold want to be aligned.
        return [part.clone() for part in found.split(sizes)]

    def send(self, data: torch.Tensor, dst: int, tag: int) -> None:
        """Send bytes; return when they may change, which may be when they were received."""
        self._wait(lambda: dist.isend(data, self._ranks[dst], self._group, tag))

    def recv(self, data: torch.Tensor, src: int, tag: int) -> None:
        """Fill with the next bytes that `src` sends with this tag; or of all, without tags."""
        self._wait(lambda: dist.irecv(data, self._ranks[src], self._group, tag))

    def split(self, ranks: tuple[int, ...]) -> TorchCarrier | None:
        """A carrier between some ranks, ascending; None on the others. All ranks call it, and
        closing the communicator of it destroys its process group.
        """
        # Torch makes up a group's name, by which its ranks find each other, from how many groups a
        # rank is in. That differs between ranks as soon as they have been in different groups, and
        # they would wait for each other for ever: so it is a name of ours while the group is made.
        whole: Any = self._group or dist.group.WORLD
        _made[whole] = _made.get(whole, 0) + 1
        name = f"{whole.group_name}/ckptkit-{_made[whole]}"
        chosen = [self._ranks[rank] for rank in ranks]
        wait = timedelta(seconds=self.timeout)
        torchs = dist.distributed_c10d
        job: Any = dist.group.WORLD
        before, device = torchs._process_group_name, job.bound_device_id
        torchs._process_group_name = lambda *_, **__: name  # type: ignore[assignment]
        # With a bound device torch splits NCCL's communicator of the job, to which all of its ranks
        # have to come. Without one the group makes a communicator of its own when it is first used.
        job.bound_device_id = None
        try:
            with _failures(self.timeout):
                group: Any = dist.new_group(chosen, timeout=wait, use_local_synchronization=True)
        finally:
            torchs._process_group_name, job.bound_device_id = before, device
        if self.rank not in ranks:
            return None

        def close() -> None:
            with suppress(ValueError):  # it has gone with the default one
                dist.destroy_process_group(group)

        return TorchCarrier(group, timeout=self.timeout, on_close=close)

    def _all_gather(self, data: bytes, size: int) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        mine = mine.to(self.device)
        found = torch.empty(size * self.size, dtype=torch.uint8, device=self.device)
        self._wait(lambda: all_gather_single(found, mine, self._group, async_op=True))
        whole = found.cpu().numpy().tobytes()
        return [whole[at : at + size] for at in range(0, len(whole), size)]

    def _wait(self, start: Callable[[], dist.Work | None]) -> None:
        with _failures(self.timeout):
            work = start()
            if work is not None:
                # A call that blocks would wait as long as its group was told to when it was made.
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


class Hub:
    """Where the threads of one job leave messages for each other; the first failure ends the job.

    Messages are found by a name, the same on all ranks: that of the group, and who sends what to
    whom.
    """

    def __init__(self, ranks: int) -> None:
        self._changed = threading.Condition()
        self._failure: PeerError | None = None
        self._running = ranks
        self._messages: defaultdict[object, deque[Any]] = defaultdict(deque)
        # By thread: where it waits for messages, and what it says if none come.
        self._waiting: dict[int, tuple[list[deque[Any]], Callable[[], str]]] = {}

    def put(self, names: Iterable[object], value: object) -> None:
        """Leave a message under each of these names; never waits."""
        with self._changed:
            for name in names:
                self._messages[name].append(value)
            self._changed.notify_all()

    def take(
        self, names: Iterable[object], timeout: float, why: Callable[[list[int]], str]
    ) -> list[Any]:
        """The oldest message under each name, once all have one; `why` says which have none."""
        deadline = time.monotonic() + timeout
        me = threading.get_ident()
        with self._changed:
            left = [self._messages[name] for name in names]

            def missing() -> str:
                return why([number for number, messages in enumerate(left) if not messages])

            try:
                while not all(left):
                    self._waiting[me] = (left, missing)
                    self._look_for_a_deadlock()
                    if self._failure is not None:
                        raise PeerError(self._failure.what)
                    seconds = deadline - time.monotonic()
                    if seconds <= 0:
                        raise PeerError(f"{missing()} within {timeout:g} s")
                    self._changed.wait(seconds)
            finally:
                self._waiting.pop(me, None)
            return [messages.popleft() for messages in left]

    def fail(self, problem: str) -> None:
        """Wake all ranks with a problem, unless there was one before."""
        with self._changed:
            self._failure = self._failure or PeerError(problem)
            self._changed.notify_all()

    def has_ended(self, error: BaseException) -> bool:
        """Whether an error only says that there was a failure elsewhere."""
        failure = self._failure
        return failure is not None and isinstance(error, PeerError) and error.what == failure.what

    def end(self) -> None:
        """One rank has come to its end: nobody can wait for it any more."""
        with self._changed:
            self._running -= 1
            self._look_for_a_deadlock()

    def _look_for_a_deadlock(self) -> None:
        # One that has its messages has been woken, and has only not run yet.
        waiting = list(self._waiting.values())
        if len(waiting) < self._running or not waiting or any(all(left) for left, _ in waiting):
            return
        self.fail(f"no rank can go on: {'; '.join(sorted({missing() for _, missing in waiting}))}")


@dataclass(eq=False)
class MemoryCarrier:
    """Carries messages between threads, as copies: no rank sees what another one changes later."""

    name: ClassVar[str] = "memory"
    device: ClassVar[torch.device] = torch.device("cpu")

    hub: Hub
    rank: int
    size: int
    timeout: float = field(kw_only=True)
    group: tuple[object, ...] = ()
    splits: int = 0

    def exchange(self, value: T) -> list[T]:
        """What every rank passes: bytes, as any carrier, or what the other calls move."""
        me, everyone = self.rank, range(self.size)
        self.hub.put([(self.group, me, dst, _EXCHANGE) for dst in everyone], value)
        return self.hub.take(
            [(self.group, src, me, _EXCHANGE) for src in everyone],
            self.timeout,
            lambda late: f"rank {', '.join(map(str, late[:8]))} did not come",
        )

    def all_reduce(self, tensor: torch.Tensor, op: str) -> None:
        """Every rank adds up by itself, in the order of the ranks."""
        # A copy: this rank puts the sum into its own tensor while others still add it up.
        first, *others = self.exchange(tensor.clone())
        # And another one, as all ranks add up the same tensors.
        tensor.copy_(combined(op, [first.clone(), *others]))

    def broadcast(self, data: torch.Tensor, src: int) -> None:
        # What the others pass nobody looks at.
        data.copy_(self.exchange(data.clone() if self.rank == src else data)[src])

    def all_to_all(self, parts: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:  # noqa: ARG002 - they come along
        told = self.exchange([part.clone() for part in parts])
        return [row[self.rank] for row in told]

    def send(self, data: torch.Tensor, dst: int, tag: int) -> None:
        """Leave a copy; never waits."""
        self.hub.put([(self.group, self.rank, dst, tag)], data.clone())

    def recv(self, data: torch.Tensor, src: int, tag: int) -> None:
        why = f"rank {src} sent nothing with tag {tag}"
        name = (self.group, src, self.rank, tag)
        (found,) = self.hub.take([name], self.timeout, lambda _: why)
        data.copy_(found)

    def split(self, ranks: tuple[int, ...]) -> MemoryCarrier | None:
        """A group of the same hub, named after who is in it and which one it is."""
        self.splits += 1
        if self.rank not in ranks:
            return None
        group = (*self.group, self.splits, ranks)
        return MemoryCarrier(
            self.hub, ranks.index(self.rank), len(ranks), timeout=self.timeout, group=group
        )

    def close(self) -> None:
        """Nothing: the hub goes with its last rank."""


Carrier: TypeAlias = TorchCarrier | MemoryCarrier
