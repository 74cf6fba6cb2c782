"""The ranks of a job as one short list of calls, whatever carries the messages.

A call goes down in three steps: `_agree` tells all ranks what is wanted and refuses it on all of
them alike, the carrier moves flat bytes or numbers, and the result gets its dtype and shape back.

A `Communicator` moves tensors of any size by the training's own collectives, in the thread that
trains. `ckptkit.checkpoint.ranks.Ranks` says a few plain values over a store, a folder or memory,
without torch: so a save in the background can agree while the training communicates, and a rank
that fails can tell the others, which no collective can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ckptkit.checkpoint.ranks import DEFAULT_TIMEOUT
from ckptkit.errors import CkptkitError, LayoutError, PeerError, UsageError
from ckptkit.live.state.tensors import PLAIN, TensorForm, bytes_of
from ckptkit.parallel.ranks.messages import (
    Call,
    Carrier,
    TorchCarrier,
    carried_op,
    check_reduction,
    check_same,
    check_same_forms,
    combined,
    narrowed,
    packed,
    unpacked,
    widened,
)
from ckptkit.storage.base.store import Closing

Tensors = Sequence[torch.Tensor]
_Check = Callable[[Sequence[TensorForm]], None]
_HEADER = 512  # bytes; the form of a tensor of 64 dims, torch's most, fits


class Communicator(Closing):
    """The ranks of a group, and what they can do together.

    All ranks of the group make the same calls in the same order. What they send is a tensor, of any
    dtype and shape, also empty or not contiguous; or a plain value, as in a checkpoint: None, bool,
    int, float, str, bytes, numpy, datetime, and lists, tuples and dicts of these. Arguments are
    never changed, results are copies; tensors are on the device of the argument where there is one.
    Where ranks disagree (another call, other shapes or dtypes), all of them raise and can go on; a
    rank that is late or gone ends the communicator: every further call raises. The price is a small
    exchange before each collective, so this is for what happens now and then: training engines have
    faster ways.

    >>> with init() as comm:  # one rank, where no launcher says otherwise
    ...     print(comm.rank, comm.all_reduce(torch.ones(2), "mean"), comm.all_reduce(3))
    0 tensor([1., 1.]) 3
    """

    def __init__(self, carrier: Carrier) -> None:
        given: object = carrier
        if isinstance(given, (dist.ProcessGroup, DeviceMesh)):
            raise UsageError(
                "a communicator is not made of this directly",
                value=type(given).__name__,
                hint="Communicator.of(group), or Communicator.of(mesh, 'fsdp') for one of its axes",
            )
        self._carrier = carrier
        self._ended: CkptkitError | None = None
        self._closed = False
        self.rank = carrier.rank
        self.world_size = carrier.size
        self.backend = carrier.name
        """What carries the messages: gloo, nccl, mpi or memory."""
        self.device = carrier.device
        """Where the backend wants tensors to be, and where received ones are."""

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
        return cls(TorchCarrier(group, timeout=timeout))

    def barrier(self) -> None:
        """Return when all ranks are here."""
        self._agree("barrier")

    def broadcast(self, value: object = None, src: int = 0) -> Any:
        """What rank `src` passes, on every rank; what the others pass is ignored."""
        is_here = self.rank == src
        given = [value] if is_here else []
        calls, mine = self._agree("broadcast", given, f"src={src}", ranks=[src])
        (form,) = calls[src].forms
        if is_here:
            # The bytes may be the argument's own, and results are copies.
            data = bytes_of(mine[0].to(self.device)).clone()
        else:
            data = torch.empty(form.nbytes, dtype=torch.uint8, device=self.device)
        if form.nbytes:
            with self._carrying("broadcast") as carrier:
                carrier.broadcast(data, src)
        return unpacked(data, form, mine[0].device if is_here else self.device)

    @overload
    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor: ...

    @overload
    def all_reduce(self, tensor: float, op: str = "sum") -> float: ...

    def all_reduce(self, tensor: torch.Tensor | float, op: str = "sum") -> torch.Tensor | float:
        """The sum, mean, max or min of the tensors of all ranks, which are of one form, or of plain
        numbers: sums of whole numbers are exact, and all ranks get the same float to the last bit.
        """
        if isinstance(tensor, (bool, int, float)):
            kind = {bool: torch.bool, int: torch.int64}.get(type(tensor), torch.float64)
            fits = kind != torch.int64 or -(2**63) <= tensor < 2**63
            number = torch.tensor(tensor, dtype=kind) if fits else tensor
            # Gathered and not reduced: whole numbers would wrap, and floats depend on the backend.
            numbers = self._exchange(
                "all_reduce",
                [number],
                f"{op} of numbers",
                check=lambda forms: check_reduction(op, [f for f in forms if f.dtype == PLAIN]),
            )
            if op in ("max", "min"):  # Python's own take NaN or leave it, depending on the order
                best: float = combined(op, numbers).item()
                return best
            values: list[float] = [each.item() for each in numbers]
            total = sum(values)
            return total / len(values) if op == "mean" else total
        calls, (mine,) = self._agree(
            "all_reduce", [tensor], op, check=lambda forms: check_reduction(op, forms)
        )
        check_same_forms(calls)
        wide = widened(mine, op, self.device)
        if wide.numel():  # carriers never move nothing
            with self._carrying("all_reduce") as carrier:
                if op in ("max", "min") and wide.is_floating_point():
                    # Where one rank has NaN all need it: gloo takes or leaves it by the rank.
                    nan = wide.isnan().to(torch.uint8)
                    carrier.all_reduce(nan, "max")
                    wide[nan.bool()] = torch.nan
                carrier.all_reduce(wide, carried_op(op, mine.dtype))
        return narrowed(wide, op, self.world_size, mine)

    def reduce(self, tensor: torch.Tensor, dst: int = 0, op: str = "sum") -> torch.Tensor | None:
        """The reduction of the tensors of all ranks, on rank `dst`; elsewhere None."""
        found = self._exchange("reduce", [tensor], dst=dst, reduction=op)
        return found[0] if found else None

    def reduce_scatter(self, tensors: Tensors, op: str = "sum") -> torch.Tensor:
        """The reduction of what all ranks have for this one; they have one tensor for each."""
        found: torch.Tensor
        (found,) = self._exchange("reduce_scatter", tensors, is_cut=True, reduction=op)
        return found

    def all_gather(self, value: object) -> list[Any]:
        """What all ranks pass: tensors of one dtype and any shapes, or plain values."""
        return self._exchange("all_gather", [value])

    def gather(self, value: object, dst: int = 0) -> list[Any] | None:
        """What all ranks pass, as in `all_gather`, on rank `dst`; elsewhere None."""
        return self._exchange("gather", [value], dst=dst) or None

    def scatter(self, values: Sequence[object] | torch.Tensor | None = None, src: int = 0) -> Any:
        """What rank `src` has for this one, as the rows of a tensor; what the others pass is
        ignored.
        """
        given: Any = values if self.rank == src and values is not None else ()
        return self._exchange("scatter", given, src=src, is_cut=True)[0]

    def all_to_all(self, values: Sequence[object]) -> list[Any]:
        """What each rank has for this one; they have something for each, of any shape."""
        return self._exchange("all_to_all", values, is_cut=True)

    def send(self, value: object, dst: int, tag: int = 0) -> None:
        """Send something to a rank, which may have to be receiving before this returns."""
        self._check_rank(dst, "send", is_other=True)
        tensor, form = packed(value, "send")
        header = Call("send", f"tag={tag}", (form,)).encode()
        # Of a fixed length: who receives has to know how many bytes come, before any have.
        data = torch.frombuffer(bytearray(header.ljust(_HEADER, b"\0")), dtype=torch.uint8)
        with self._carrying("send") as carrier:
            carrier.send(data.to(self.device), dst, tag)
            if tensor.numel():
                carrier.send(bytes_of(tensor.to(self.device)), dst, tag)

    def recv(self, src: int, tag: int = 0) -> Any:
        """The next that a rank sends with this tag; nccl knows no tags, and there the next one of
        all has to have it.
        """
        self._check_rank(src, "recv", is_other=True)
        header = torch.empty(_HEADER, dtype=torch.uint8, device=self.device)
        with self._carrying("recv") as carrier:
            carrier.recv(header, src, tag)
            call = Call.decode(bytes(header.cpu().tolist()).rstrip(b"\0"))
            (form,) = call.forms
            data = torch.empty(form.nbytes, dtype=torch.uint8, device=self.device)
            if form.nbytes:
                carrier.recv(data, src, tag)
        # Refused only now: what is left on its way the next call would take for its own.
        if call.options != f"tag={tag}":
            raise PeerError(
                f"the next message of rank {src} has {call.options}",
                where="recv",
                value=f"tag={tag}",
                hint="nccl knows no tags: over it, receive messages in the order they are sent in",
            )
        return unpacked(data, form, self.device)

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator between some ranks, in the order they have here; None on the others."""
        chosen = tuple(sorted(ranks))
        self._agree("subgroup", options=f"{chosen}", ranks=chosen)
        with self._carrying("subgroup") as carrier:
            found = carrier.split(chosen)
        return None if found is None else Communicator(found)

    def close(self) -> None:
        """Let go of what this communicator has made; calls after this raise, but for this one."""
        if self._closed:
            return
        self._closed = True
        self._ended = UsageError("the communicator is closed", hint="make a new one: init() does")
        self._carrier.close()

    def __repr__(self) -> str:
        return f"<Communicator of {self.backend}: rank {self.rank} of {self.world_size}>"

    def _exchange(
        self,
        name: str,
        given: Sequence[object],
        options: str = "",
        *,
        is_cut: bool = False,
        src: int | None = None,
        dst: int | None = None,
        reduction: str = "",
        check: _Check | None = None,
    ) -> list[Any]:
        """What this rank gets of each rank, or the reduction of that; nothing unless it is `dst`.

        Each rank gives the same to all, or if `is_cut` something to each; only `src` gives
        anything, if there is one. All of these calls are one all-to-all, in which some ranks send
        nothing: unlike a gather or a scatter it takes pieces of any sizes.
        """
        me, size = self.rank, self.world_size
        is_giving = src in (None, me)
        roots = {"src": src, "dst": dst}
        told = [options or reduction, *(f"{n}={r}" for n, r in roots.items() if r is not None)]
        calls, mine = self._agree(
            name,
            given if is_giving else (),
            ", ".join(filter(None, told)),
            ranks=[rank for rank in roots.values() if rank is not None] or None,
            count=size if is_cut and is_giving else 0,
            check=(lambda forms: check_reduction(reduction, forms)) if reduction else check,
        )
        own = me if is_cut else 0
        forms = [call.forms[own] if call.forms else None for call in calls]
        parts = mine
        if reduction:
            check_same_forms(calls)
            parts = [widened(part, reduction, self.device) for part in mine]
            forms = [TensorForm.of(parts[own])] * size
        elif src is None:
            dtypes = [", ".join(sorted({form.dtype for form in call.forms})) for call in calls]
            check_same(dtypes, "the dtypes of the ranks differ", name)
        # What goes to each rank, and the form of what comes of each; None is nothing.
        to_each = [
            (parts[rank] if is_cut else parts[0]) if is_giving and dst in (None, rank) else None
            for rank in range(size)
        ]
        from_each = forms if dst in (None, me) else [None] * size
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        data = [nothing] * size
        if any(form.nbytes for call in calls for form in call.forms):  # else nobody has anything
            out = [nothing if each is None else bytes_of(each.to(self.device)) for each in to_each]
            sizes = [form.nbytes if form else 0 for form in from_each]
            with self._carrying(name) as carrier:
                data = carrier.all_to_all(out, sizes)
        device = mine[0].device if mine and not reduction else self.device
        found = [
            unpacked(each, form, device)
            for each, form in zip(data, from_each, strict=True)
            if form is not None
        ]
        if not reduction or not found:
            return found
        # Summed here and not by the backend, in the order of the ranks: the same whatever the
        # timing.
        total = combined(carried_op(reduction, mine[own].dtype), found)
        return [narrowed(total, reduction, size, mine[own])]

    # What all of them stand on.

    @contextmanager
    def _carrying(self, name: str) -> Iterator[Carrier]:
        """The carrier; what goes wrong with it ends the communicator, and says in which call."""
        if self._ended is not None:
            raise type(self._ended)(self._ended.what, where=name, hint=self._ended.hint)
        try:
            yield self._carrier
        except PeerError as error:
            error.where = name
            self._ended = PeerError(
                f"this communicator ended in an earlier call: {error.what}", hint=error.hint
            )
            raise

    def _agree(
        self,
        name: str,
        given: Sequence[object] = (),
        options: str = "",
        *,
        ranks: Sequence[int] | None = None,
        count: int = 0,
        check: _Check | None = None,
    ) -> tuple[list[Call], list[torch.Tensor]]:
        """Tell all ranks of a call; raise on all of them if one cannot make it, or makes another.

        A rank that finds its own call to be wrong must not raise at once: the others are on their
        way to this exchange, and would wait in it. So it tells them its problem first.
        """
        told: list[tuple[torch.Tensor, TensorForm]] = []
        problem: Exception | None = None
        try:
            told = [packed(value, f"{name}[{n}]") for n, value in enumerate(given)]
            for rank in ranks or ():
                self._check_rank(rank, name)
            if ranks is not None and len(set(ranks)) < max(1, len(ranks)):
                raise UsageError("a group is one or more different ranks", value=ranks)  # noqa: TRY301
            if count and len(told) != count:
                raise LayoutError(f"{len(told)} tensors are not one for each of the {count} ranks")  # noqa: TRY301
            if check is not None:
                check([form for _, form in told])
        except Exception as error:  # noqa: BLE001 — raised once the others know
            problem = error
        if problem is None:
            call = Call(name, options, tuple(form for _, form in told))
        elif isinstance(problem, CkptkitError):
            problem.where = problem.where or name
            call = Call(name, options, problem=f"{problem}")
        else:
            call = Call(name, options, problem=f"{type(problem).__name__}: {problem}")
        with self._carrying(name) as carrier:
            heard = carrier.exchange(call.encode())
        if problem is not None:
            raise problem
        calls = [Call.decode(data) for data in heard]
        for rank, call in enumerate(calls):
            if call.problem:
                what = f"rank {rank} cannot make this call: {call.problem}"
                raise PeerError(what, where=call.name)
        check_same([f"{c.name}({c.options})" for c in calls], "the ranks make different calls", "")
        return calls, [tensor for tensor, _ in told]

    def _check_rank(self, rank: int, where: str, *, is_other: bool = False) -> None:
        if not 0 <= rank < self.world_size:
            what = f"no such rank: there are 0 to {self.world_size - 1}"
            raise UsageError(what, where=where, value=rank)
        if is_other and rank == self.rank:
            raise UsageError("a rank has nothing to say to itself", where=where, value=rank)
