"""The ranks of a job as one short list of calls, whatever carries the messages."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ckptkit.errors import PeerError, UsageError
from ckptkit.parallel.communication.calls import Form, check_same_dtypes, check_same_forms
from ckptkit.parallel.communication.talk import Talk
from ckptkit.parallel.communication.torch_group import TorchTransport
from ckptkit.parallel.communication.transport import DEFAULT_TIMEOUT, Transport
from ckptkit.parallel.communication.values import (
    as_bytes,
    carried_op,
    check_count,
    check_rank,
    check_reduction,
    checked,
    combine,
    from_bytes,
    narrowed,
    widened,
)

Tensors = Sequence[torch.Tensor]


class Communicator:
    """The ranks of a group, and what they can do together.

    All ranks of the group make the same calls in the same order. Tensors may be of any dtype and
    shape, also empty or not contiguous; arguments are never changed, results are new tensors, on
    the device of the argument where there is one. Where ranks disagree (another call, other
    shapes or dtypes), all of them raise and can go on; a rank that is late or gone ends the
    communicator: every further call raises. The price is a small exchange before each
    collective, so this is for what happens now and then: training engines have faster ways.

    >>> with init() as comm:  # one rank, where no launcher says otherwise
    ...     print(comm.rank, comm.all_reduce(torch.ones(2), "mean"), comm.all_reduce(3))
    0 tensor([1., 1.]) 3
    """

    def __init__(self, transport: Transport) -> None:
        given: object = transport
        if isinstance(given, (dist.ProcessGroup, DeviceMesh)):
            raise UsageError(
                "a communicator is not made of this directly",
                value=type(given).__name__,
                hint="Communicator.of(group), or Communicator.of(mesh, 'fsdp') for one of its axes",
            )
        self._transport = transport
        self._talk = Talk(transport)

    @classmethod
    def of(
        cls,
        ranks: dist.ProcessGroup | DeviceMesh | None = None,
        axis: str | int | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> Communicator:
        """The ranks of a process group (None: all), or those along an axis of a device mesh, which
        may be left out where the mesh has just one. Closing it leaves the group as it is.
        """
        if not dist.is_initialized():
            raise UsageError(
                "there is no process group yet", hint="call ckptkit.parallel.init() first"
            )
        group = ranks.get_group(axis) if isinstance(ranks, DeviceMesh) else ranks
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise UsageError(
                "neither a process group nor a device mesh that this rank is in", value=group
            )
        return cls(TorchTransport(group, timeout=timeout))

    @property
    def rank(self) -> int:
        """The number of this rank in the group."""
        return self._transport.rank

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        return self._transport.size

    @property
    def backend(self) -> str:
        """What carries the messages: gloo, nccl, mpi or memory."""
        return self._transport.name

    @property
    def device(self) -> torch.device:
        """Where the backend wants tensors to be, and where received ones are."""
        return self._transport.device

    def barrier(self) -> None:
        """Return when all ranks are here."""
        self._talk.agree("barrier")

    def broadcast(self, tensor: torch.Tensor | None = None, src: int = 0) -> torch.Tensor:
        """The tensor of rank `src`, on every rank; what the others pass is ignored."""
        return self._broadcast("broadcast", tensor, src)

    @overload
    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor: ...

    @overload
    def all_reduce(self, tensor: float, op: str = "sum") -> float: ...

    def all_reduce(self, tensor: torch.Tensor | float, op: str = "sum") -> torch.Tensor | float:
        """The sum, mean, max or min of the tensors of all ranks, which are of one form, or of plain
        numbers: sums of whole numbers are exact, and all ranks get the same float to the last bit.
        """
        if isinstance(tensor, (bool, int, float)):
            return self._reduced_number(tensor, op)
        agreed = self._talk.agree(
            "all_reduce", [tensor], options=op, check=lambda mine: check_reduction(op, mine)
        )
        check_same_forms(agreed.calls)
        (mine,) = agreed.mine
        wide = widened(mine, op, self.device)
        if wide.numel():
            with self._talk.going_on("all_reduce") as transport:
                transport.all_reduce(wide, carried_op(op, mine.dtype))
        return narrowed(wide, op, self.world_size, mine)

    def reduce(self, tensor: torch.Tensor, dst: int = 0, op: str = "sum") -> torch.Tensor | None:
        """The reduction of the tensors of all ranks, on rank `dst`; elsewhere None."""

        def check(mine: list[torch.Tensor]) -> None:
            check_rank(dst, self.world_size)
            check_reduction(op, mine)

        agreed = self._talk.agree("reduce", [tensor], options=f"{op}, dst={dst}", check=check)
        check_same_forms(agreed.calls)
        (mine,) = agreed.mine
        wide, is_here = widened(mine, op, self.device), self.rank == dst
        parts = [wide if rank == dst else None for rank in range(self.world_size)]
        forms = [Form.of(wide) if is_here else None] * self.world_size
        found = self._talk.move(agreed, parts, forms)
        return self._combined(found, op, mine) if is_here else None

    def reduce_scatter(self, tensors: Tensors, op: str = "sum") -> torch.Tensor:
        """The reduction of what all ranks have for this one; they have one tensor for each."""

        def check(mine: list[torch.Tensor]) -> None:
            check_count(mine, self.world_size)
            check_reduction(op, mine)

        agreed = self._talk.agree("reduce_scatter", tensors, options=op, check=check)
        check_same_forms(agreed.calls)
        like = agreed.mine[self.rank]
        wide = [widened(tensor, op, self.device) for tensor in agreed.mine]
        form = Form.of(wide[self.rank])
        found = self._talk.move(agreed, wide, [form] * self.world_size)
        return self._combined(found, op, like)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, of one dtype and any shapes."""
        return self._all_gather("all_gather", tensor)

    def gather(self, tensor: torch.Tensor, dst: int = 0) -> list[torch.Tensor] | None:
        """The tensors of all ranks, of one dtype and any shapes, on rank `dst`; elsewhere None."""
        return self._gather("gather", tensor, dst)

    def scatter(self, tensors: Tensors | None = None, src: int = 0) -> torch.Tensor:
        """The tensor that rank `src` has for this one; what the others pass is ignored."""
        return self._scatter("scatter", tensors, src)

    def all_to_all(self, tensors: Tensors) -> list[torch.Tensor]:
        """What each rank has for this one; they have one tensor for each, of any shape."""
        agreed = self._talk.agree(
            "all_to_all", tensors, check=lambda mine: check_count(mine, self.world_size)
        )
        check_same_dtypes(agreed.calls)
        forms = [call.forms[self.rank] for call in agreed.calls]
        found = self._talk.move(agreed, agreed.mine, forms)
        return [part.to(agreed.mine[0].device) for part in found]

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        """Send a tensor to a rank, which may have to be receiving before this returns."""
        self._check_other(dst, "send")
        self._talk.send("send", checked(tensor, "send"), dst, tag)

    def recv(self, src: int, tag: int = 0) -> torch.Tensor:
        """The next tensor that a rank sends with this tag; nccl knows no tags, and there the next
        one of all has to have it.
        """
        return self._recv("send", src, tag)

    def broadcast_object(self, value: object = None, src: int = 0) -> Any:
        """The value of rank `src`, on every rank, as a copy; values are pickled."""
        return _loaded(
            self._broadcast("broadcast_object", _dumped(value if self.rank == src else None), src)
        )

    def all_gather_object(self, value: object) -> list[Any]:
        """The values of all ranks."""
        return [_loaded(data) for data in self._all_gather("all_gather_object", _dumped(value))]

    def gather_object(self, value: object, dst: int = 0) -> list[Any] | None:
        """The values of all ranks on rank `dst`; elsewhere None."""
        found = self._gather("gather_object", _dumped(value), dst)
        return None if found is None else [_loaded(data) for data in found]

    def scatter_object(self, values: Sequence[object] | None = None, src: int = 0) -> Any:
        """The value that rank `src` has for this one; what the others pass is ignored."""
        parts = [_dumped(value) for value in values or ()] if self.rank == src else None
        return _loaded(self._scatter("scatter_object", parts, src))

    def send_object(self, value: object, dst: int, tag: int = 0) -> None:
        """Send a value to a rank, which may have to be receiving before this returns."""
        self._check_other(dst, "send_object")
        self._talk.send("send_object", _dumped(value), dst, tag)

    def recv_object(self, src: int, tag: int = 0) -> Any:
        """The next value that a rank sends with this tag."""
        return _loaded(self._recv("send_object", src, tag))

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator between some ranks, in the order they have here; None on the others."""
        chosen = tuple(sorted(ranks))
        self._talk.agree("subgroup", options=f"{chosen}", check=lambda _: self._check_group(chosen))
        with self._talk.going_on("subgroup") as transport:
            found = transport.split(chosen)
        return None if found is None else Communicator(found)

    def close(self) -> None:
        """Let go of what this communicator has made; calls after this raise."""
        self._talk.end()
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Communicator of {self.backend}: rank {self.rank} of {self.world_size}>"

    def _broadcast(self, name: str, value: object, src: int) -> torch.Tensor:
        given = [value] if self.rank == src else []
        agreed = self._talk.agree(name, given, options=f"src={src}", check=self._is_rank(src))
        (form,) = agreed.calls[src].forms
        if self.rank == src:
            data = as_bytes(agreed.mine[0], self.device).clone()
        else:
            data = torch.empty(form.nbytes, dtype=torch.uint8, device=self.device)
        if form.nbytes:
            with self._talk.going_on(name) as transport:
                transport.broadcast(data, src)
        found = from_bytes(data, form.torch_dtype, form.shape)
        return found.to(agreed.mine[0].device) if agreed.mine else found

    def _combined(self, found: list[torch.Tensor], op: str, like: torch.Tensor) -> torch.Tensor:
        total, *others = found
        for other in others:  # in the order of the ranks: the same sum whatever the timing
            combine(total, other, carried_op(op, like.dtype))
        return narrowed(total, op, self.world_size, like)

    def _reduced_number(self, number: float, op: str) -> float:
        kind = {bool: torch.bool, int: torch.int64}.get(type(number), torch.float64)
        fits = kind != torch.int64 or -(2**63) <= number < 2**63
        given = torch.tensor(number, dtype=kind) if fits else number
        # Gathered and not reduced: whole numbers would wrap, and floats depend on the backend.
        found = self._all_gather("all_reduce", given, f"{op} of numbers", self._is_reduction(op))
        values = [each.item() for each in found]
        if op in ("max", "min"):
            return max(values) if op == "max" else min(values)
        return sum(values) / len(values) if op == "mean" else sum(values)

    def _is_reduction(self, op: str) -> Callable[[list[torch.Tensor]], None]:
        return lambda _: check_reduction(op, ())

    def _all_gather(
        self,
        name: str,
        tensor: object,
        options: str = "",
        check: Callable[[list[torch.Tensor]], None] = lambda _: None,
    ) -> list[torch.Tensor]:
        agreed = self._talk.agree(name, [tensor], options=options, check=check)
        check_same_dtypes(agreed.calls)
        forms = [call.forms[0] for call in agreed.calls]
        found = self._talk.move(agreed, agreed.mine * self.world_size, forms)
        return [part.to(agreed.mine[0].device) for part in found]

    def _gather(self, name: str, tensor: object, dst: int) -> list[torch.Tensor] | None:
        agreed = self._talk.agree(name, [tensor], options=f"dst={dst}", check=self._is_rank(dst))
        check_same_dtypes(agreed.calls)
        ranks, is_here = range(self.world_size), self.rank == dst
        parts = [agreed.mine[0] if rank == dst else None for rank in ranks]
        forms = [call.forms[0] if is_here else None for call in agreed.calls]
        found = self._talk.move(agreed, parts, forms)
        return [part.to(agreed.mine[0].device) for part in found] if is_here else None

    def _scatter(self, name: str, tensors: Sequence[object] | None, src: int) -> torch.Tensor:
        is_here = self.rank == src

        def check(mine: list[torch.Tensor]) -> None:
            self._is_rank(src)(mine)
            if is_here:
                check_count(mine, self.world_size)

        given = (tensors or ()) if is_here else ()
        agreed = self._talk.agree(name, given, options=f"src={src}", check=check)
        ranks, form = range(self.world_size), agreed.calls[src].forms[self.rank]
        parts = agreed.mine if is_here else [None] * self.world_size
        forms = [form if rank == src else None for rank in ranks]
        (found,) = self._talk.move(agreed, parts, forms)
        return found.to(agreed.mine[0].device) if is_here else found

    def _recv(self, name: str, src: int, tag: int) -> torch.Tensor:
        self._check_other(src, name.replace("send", "recv"))
        sent, found = self._talk.recv(name.replace("send", "recv"), src, tag)
        if sent != name:
            raise PeerError(
                f"rank {src} called {sent}: receive that with {sent.replace('send', 'recv')}",
                where=name.replace("send", "recv"),
            )
        return found

    def _is_rank(self, number: int) -> Callable[[list[torch.Tensor]], None]:
        return lambda _: check_rank(number, self.world_size)

    def _check_other(self, number: int, where: str) -> None:
        check_rank(number, self.world_size, where)
        if number == self.rank:
            raise UsageError("a rank has nothing to say to itself", where=where, value=number)

    def _check_group(self, ranks: tuple[int, ...]) -> None:
        for rank in ranks:
            check_rank(rank, self.world_size)
        if not ranks or len(set(ranks)) < len(ranks):
            raise UsageError("a group is one or more different ranks", value=ranks)


def _dumped(value: object) -> torch.Tensor:
    data = bytearray(pickle.dumps(value))
    return torch.frombuffer(data, dtype=torch.uint8)


def _loaded(data: torch.Tensor) -> Any:
    # The ranks of a job run one program: whoever could forge a message could run code already.
    return pickle.loads(data.cpu().numpy().tobytes())  # noqa: S301
