"""How a worker asks the server of some parameters: in its own process, or over a socket with a few
fixed numbers and then bytes, which a thread for each worker answers.
"""

from __future__ import annotations

import hmac
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any, TypeAlias

import torch

from ckptkit.checkpoint.ranks import in_one_line
from ckptkit.errors import CkptkitError, PeerError
from ckptkit.format.leaves import dumps, unpack
from ckptkit.live.state.trees import put_tensors, tensors_inline
from ckptkit.parallel.optimizers.shard import Clocks, ParameterShard

TOKEN_BYTES = 16

_HEAD = struct.Struct("<BIQ")  # what, from whom, how many bytes follow
_STATES = 16  # more tensors of its own size does no optimizer keep for a parameter
_SLACK_OF_QUESTIONS, _SLACK_OF_ANSWERS = 2**20, 2**24


class InProcess:
    """Asks the server of this process; `begin_push` does not wait for the answer."""

    def __init__(self, shard: ParameterShard, clocks: Clocks, worker: int) -> None:
        self._shard, self._clocks, self._worker = shard, clocks, worker
        self.pull, self.state, self.set_options = shard.pull, shard.state, shard.set_options

    def begin_push(self, gradients: Sequence[torch.Tensor | None]) -> None:
        self._clocks.check()
        self._shard.push([None if g is None else g.detach().cpu() for g in gradients])

    def end_push(self) -> list[torch.Tensor]:
        """Wait until the worker may go on; the parameters then."""
        self._clocks.tick(self._worker)
        return self._shard.pull()

    def steps(self) -> dict[int, int]:
        return self._clocks.steps

    def leave(self) -> None:
        """Say that no more gradients will come."""
        self._clocks.leave(self._worker)

    def close(self) -> None: ...


class OverSocket:
    """The same of a server in another process."""

    def __init__(
        self, server: int, address: str, worker: int, like: Sequence[torch.Tensor], timeout: float
    ) -> None:
        self._server, self._worker, self._timeout = server, worker, timeout
        self._like = list(like)
        host, port, token = address.split("|")
        self._largest = _STATES * sum(t.nbytes for t in self._like) + _SLACK_OF_ANSWERS
        with self._talking():
            self._pipe = socket.create_connection((host, int(port)), timeout)
        # An answer may wait for other workers as long as they may take, and then says so.
        self._pipe.settimeout(2 * timeout)
        self._pipe.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._send(Kind.HELLO, [memoryview(bytes.fromhex(token))])

    def begin_push(self, gradients: Sequence[torch.Tensor | None]) -> None:
        self._send(Kind.PUSH, with_gradients(gradients))

    def end_push(self) -> list[torch.Tensor]:
        return tensors_in(self._answer(), self._like)

    def pull(self) -> list[torch.Tensor]:
        self._send(Kind.PULL)
        return tensors_in(self._answer(), self._like)

    def state(self) -> dict[str, Any]:
        self._send(Kind.STATE)

        def refused(name: str) -> torch.Tensor:
            raise PeerError("a server's state has no arrays", value=name)

        tree = unpack(bytes(self._answer()), "state")
        found: dict[str, Any] = put_tensors(tree, refused, "state")
        return found

    def steps(self) -> dict[int, int]:
        self._send(Kind.STEPS)
        steps: dict[int, int] = unpack(bytes(self._answer()), "steps")
        return steps

    def set_options(self, options: Mapping[str, Any]) -> None:
        self._send(Kind.OPTIONS, [memoryview(dumps(dict(options), "options"))])
        self._answer()

    def leave(self) -> None:
        with suppress(PeerError):  # whether anybody hears it matters to nobody
            self._send(Kind.LEAVE)
            self._answer()

    def close(self) -> None:
        self._pipe.close()

    def _send(self, kind: Kind, parts: Sequence[memoryview] = ()) -> None:
        with self._talking():
            send(self._pipe, kind, self._worker, parts)

    def _answer(self) -> bytearray:
        with self._talking():
            kind, _, data = receive(self._pipe, self._largest)
        if kind != Kind.DONE:
            raise PeerError(data.decode(errors="replace"), where=f"server {self._server}")
        return data

    @contextmanager
    def _talking(self) -> Iterator[None]:
        """Say of a lost connection what that means."""
        try:
            yield
        except CkptkitError:
            raise
        except (OSError, EOFError) as error:
            late = isinstance(error, TimeoutError)
            raise PeerError(
                f"does not answer within {self._timeout:g} s" if late else "is gone",
                where=f"server {self._server}",
                hint="it held parameters that nobody else has: go on from the last checkpoint",
            ) from error


Access: TypeAlias = InProcess | OverSocket


class ShardServer:
    """Answers workers until it is closed."""

    def __init__(self, shard: ParameterShard, clocks: Clocks, host: str, token: bytes) -> None:
        self.shard, self.clocks = shard, clocks
        self._token = token
        self._like = shard.pull()
        self._largest = sum(p.nbytes for p in self._like) + len(self._like) + _SLACK_OF_QUESTIONS
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family)
        self._pipes: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self.port: int = self._listening.getsockname()[1]
        self._start(self._accept)

    def close(self) -> None:
        """Answer nobody any more."""
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for pipe in list(self._pipes):
            with suppress(OSError):
                pipe.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _start(self, work: Any, *args: Any) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True, name="ckptkit-server")
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                pipe, _ = self._listening.accept()
                self._pipes.add(pipe)
                self._start(self._serve, pipe)

    def _serve(self, pipe: socket.socket) -> None:
        worker = None
        try:
            with pipe:
                pipe.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                kind, said, token = receive(pipe, TOKEN_BYTES)
                if kind != Kind.HELLO or not hmac.compare_digest(bytes(token), self._token):
                    return
                worker = said
                while self._answer(pipe, worker):
                    pass
                worker = None
        except (OSError, EOFError, CkptkitError):
            pass  # the other side is gone, or talks nonsense: both mean that the worker is lost
        finally:
            self._pipes.discard(pipe)
            if worker is not None:
                self.clocks.lose(worker)

    def _answer(self, pipe: socket.socket, worker: int) -> bool:
        """Answer one question; whether there will be more."""
        kind, _, data = receive(pipe, self._largest)
        try:
            if kind == Kind.PUSH:
                self.shard.push(gradients_in(data, self._like))
                self.clocks.tick(worker)
            elif kind == Kind.OPTIONS:
                options = unpack(bytes(data), "options")
                self.shard.set_options(options if isinstance(options, dict) else {})
            elif kind == Kind.LEAVE:
                self.clocks.leave(worker)
        except Exception as error:  # noqa: BLE001 — told to the worker, who raises it
            send(pipe, Kind.FAILED, worker, [memoryview(in_one_line(error).encode())])
            return True
        answer: list[memoryview] = []
        if kind in (Kind.PUSH, Kind.PULL):
            answer = [bytes_of(value) for value in self.shard.pull()]
        elif kind == Kind.STATE:
            answer = [memoryview(dumps(tensors_inline(self.shard.state()), "state"))]
        elif kind == Kind.STEPS:
            answer = [memoryview(dumps(self.clocks.steps, "steps"))]
        send(pipe, Kind.DONE, worker, answer)
        return kind != Kind.LEAVE


class Kind(IntEnum):
    """What a message is."""

    HELLO = 0
    PUSH = 1
    PULL = 2
    STATE = 3
    OPTIONS = 4
    LEAVE = 5
    DONE = 6
    FAILED = 7
    STEPS = 8


def send(pipe: socket.socket, kind: Kind, worker: int, parts: Sequence[memoryview] = ()) -> None:
    """Send a message whose bytes lie in several places."""
    pipe.sendall(_HEAD.pack(kind, worker, sum(part.nbytes for part in parts)))
    for part in parts:
        pipe.sendall(part)


def receive(pipe: socket.socket, largest: int) -> tuple[Kind, int, bytearray]:
    """The next message, of a bounded size; EOFError when the other side is gone."""
    kind, worker, length = _HEAD.unpack(_exactly(pipe, _HEAD.size))
    if kind > max(Kind) or length > largest:
        raise PeerError("not a message of a worker or a server", value=(kind, length))
    return Kind(kind), worker, _exactly(pipe, length)


def _exactly(pipe: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = pipe.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return data


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor in host memory."""
    raw = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(raw)  # type: ignore[arg-type] # an array has the buffer protocol


def with_gradients(gradients: Sequence[torch.Tensor | None]) -> list[memoryview]:
    """Which parameters have a gradient, a byte for each, and the gradients."""
    which = bytes(gradient is not None for gradient in gradients)
    found = [gradient.detach().cpu().contiguous() for gradient in gradients if gradient is not None]
    return [memoryview(which), *(bytes_of(gradient) for gradient in found)]


def gradients_in(data: bytearray, like: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of a message, for parameters alike."""
    which = data[: len(like)]
    present = [parameter for has, parameter in zip(which, like, strict=True) if has]
    found = iter(tensors_in(data, present, len(like)))
    return [next(found) if has else None for has in which]


def tensors_in(data: bytearray, like: Sequence[torch.Tensor], at: int = 0) -> list[torch.Tensor]:
    """The tensors of a message, like some that there are."""
    found = []
    for each in like:
        if at + each.nbytes > len(data):
            raise PeerError("a message is too short for its tensors", value=len(data))
        if each.numel():
            raw = torch.frombuffer(data, dtype=torch.uint8, count=each.nbytes, offset=at)
            # Numbers begin where they may, and a tensor of them may not begin anywhere.
            found.append(raw.clone().view(each.dtype).view(each.shape))
        else:
            found.append(torch.empty(each.shape, dtype=each.dtype))
        at += each.nbytes
    if at != len(data):
        raise PeerError("a message is too long for its tensors", value=len(data))
    return found
