"""How the ranks of a communicator make sure that they do the same, and then do it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ckptkit.errors import CkptkitError, PeerError, UsageError
from ckptkit.parallel.communication.calls import Call, Form, check_same_call
from ckptkit.parallel.communication.transport import Transport
from ckptkit.parallel.communication.values import as_bytes, checked, from_bytes

_HEADER = 512  # bytes; the form of a tensor of 64 dims, torch's most, fits


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks told each other before a collective."""

    calls: list[Call]
    mine: list[torch.Tensor]

    @property
    def is_empty(self) -> bool:
        """Whether no rank has any bytes to send."""
        return not any(form.nbytes for call in self.calls for form in call.forms)


class Talk:
    """What a communicator has going on over its transport."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._ended: CkptkitError | None = None

    @contextmanager
    def going_on(self, name: str) -> Iterator[Transport]:
        """The transport; what goes wrong with it ends the communicator, and says in which call."""
        if self._ended is not None:
            raise type(self._ended)(self._ended.what, where=name, hint=self._ended.hint)
        try:
            yield self.transport
        except PeerError as error:
            error.where = name
            self._ended = PeerError(
                f"this communicator ended in an earlier call: {error.what}", hint=error.hint
            )
            raise

    def end(self) -> None:
        """Close it: every further call raises."""
        closed = UsageError("the communicator is closed", hint="make a new one: init() does")
        self._ended = closed

    def agree(
        self,
        name: str,
        given: Sequence[object] = (),
        *,
        options: str = "",
        check: Callable[[list[torch.Tensor]], None] = lambda _: None,
    ) -> Agreed:
        """Tell all ranks of a call and its tensors; raise on all of them if one cannot make it."""
        mine: list[torch.Tensor] = []
        problem: Exception | None = None
        try:
            mine = [checked(value, f"{name}[{n}]") for n, value in enumerate(given)]
            check(mine)
        except CkptkitError as error:
            error.where = error.where or name
            problem = error
        forms = tuple(map(Form.of, mine))
        call = Call(
            name, options, () if problem else forms, "" if problem is None else str(problem)
        )
        with self.going_on(name) as transport:
            heard = transport.exchange(call.encode())
        if problem is not None:
            raise problem
        calls = [Call.decode(data) for data in heard]
        check_same_call(calls)
        return Agreed(calls, mine)

    def move(
        self, agreed: Agreed, parts: Sequence[torch.Tensor | None], forms: Sequence[Form | None]
    ) -> list[torch.Tensor]:
        """Give each rank its part and get from each one of the given form; None is nothing."""
        name, device = agreed.calls[0].name, self.transport.device
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        out = [nothing if part is None else as_bytes(part, device) for part in parts]
        sizes = [0 if form is None else form.nbytes for form in forms]
        found = [nothing] * len(sizes)
        if not agreed.is_empty:
            with self.going_on(name) as transport:
                found = transport.all_to_all(out, sizes)
        return [
            from_bytes(data, form.torch_dtype, form.shape)
            for data, form in zip(found, forms, strict=True)
            if form is not None
        ]

    def send(self, name: str, tensor: torch.Tensor, dst: int, tag: int) -> None:
        """Send a tensor, and before it what it is."""
        header = Call(name, f"tag={tag}", (Form.of(tensor),)).encode()
        device = self.transport.device
        data = torch.zeros(_HEADER, dtype=torch.uint8)
        data[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        with self.going_on(name) as transport:
            transport.send(data.to(device), dst, tag)
            if tensor.numel():
                transport.send(as_bytes(tensor, device), dst, tag)

    def recv(self, name: str, src: int, tag: int) -> tuple[str, torch.Tensor]:
        """The next tensor of a rank, and the call that sent it."""
        device = self.transport.device
        header = torch.empty(_HEADER, dtype=torch.uint8, device=device)
        with self.going_on(name) as transport:
            transport.recv(header, src, tag)
            call = Call.decode(bytes(header.cpu().tolist()).rstrip(b"\0"))
            (form,) = call.forms
            data = torch.empty(form.nbytes, dtype=torch.uint8, device=device)
            if form.nbytes:
                transport.recv(data, src, tag)
        if call.options != f"tag={tag}":
            raise PeerError(
                f"the next message of rank {src} has {call.options}",
                where=name,
                value=f"tag={tag}",
                hint="nccl knows no tags: over it, receive messages in the order they are sent in",
            )
        return call.name, from_bytes(data, form.torch_dtype, form.shape)
