"""How a worker reaches the shards: over a socket, or in its own process."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

from ckptkit.errors import CkptkitError, PeerError
from ckptkit.format.leaves import dumps, unpack
from ckptkit.live.state.trees import put_tensors
from ckptkit.parallel.optimizers.asynchronous.clocks import Clocks
from ckptkit.parallel.optimizers.asynchronous.messages import (
    Kind,
    receive,
    send,
    tensors_in,
    with_gradients,
)
from ckptkit.parallel.optimizers.asynchronous.shard import Shard

_STATES = 16  # more tensors of its own size does no optimizer keep for a parameter
_SLACK = 2**24


class Access(Protocol):
    """What a worker asks of one server; `begin_push` does not wait for the answer."""

    def begin_push(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Send gradients."""

    def end_push(self) -> list[torch.Tensor]:
        """Wait until the worker may go on; the parameters then."""

    def pull(self) -> list[torch.Tensor]:
        """The parameters."""

    def state(self) -> dict[str, Any]:
        """What the optimizer keeps, and its options."""

    def steps(self) -> dict[int, int]:
        """By worker, how many steps it has done."""

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Change options of the optimizer."""

    def leave(self) -> None:
        """Say that no more gradients will come."""

    def close(self) -> None:
        """Ask nothing any more."""


class InProcess:
    """The shard of this process."""

    def __init__(self, shard: Shard, clocks: Clocks, worker: int) -> None:
        self._shard, self._clocks, self._worker = shard, clocks, worker
        self.pull, self.state, self.set_options = shard.pull, shard.state, shard.set_options

    def begin_push(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Step."""
        self._clocks.check()
        self._shard.push([None if g is None else g.detach().cpu() for g in gradients])

    def end_push(self) -> list[torch.Tensor]:
        """Wait until the worker may go on."""
        self._clocks.tick(self._worker)
        return self._shard.pull()

    def steps(self) -> dict[int, int]:
        """By worker, how many gradients have come."""
        return self._clocks.steps

    def leave(self) -> None:
        """Not to be waited for any more."""
        self._clocks.leave(self._worker)

    def close(self) -> None:
        """Nothing to close."""


class OverSocket:
    """The shard of another process."""

    def __init__(
        self, server: int, address: str, worker: int, like: Sequence[torch.Tensor], timeout: float
    ) -> None:
        self._server, self._worker, self._timeout = server, worker, timeout
        self._like = list(like)
        host, port, token = address.split("|")
        self._largest = _STATES * sum(t.nbytes for t in self._like) + _SLACK
        with self._talking():
            self._pipe = socket.create_connection((host, int(port)), timeout)
        # An answer may wait for other workers as long as they may take, and then says so.
        self._pipe.settimeout(2 * timeout)
        self._pipe.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._send(Kind.HELLO, [memoryview(bytes.fromhex(token))])

    def begin_push(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Send gradients."""
        self._send(Kind.PUSH, with_gradients(gradients))

    def end_push(self) -> list[torch.Tensor]:
        """Wait for the answer."""
        return tensors_in(self._answer(), self._like)

    def pull(self) -> list[torch.Tensor]:
        """Ask for the parameters."""
        self._send(Kind.PULL)
        return tensors_in(self._answer(), self._like)

    def state(self) -> dict[str, Any]:
        """Ask for what the optimizer keeps."""
        self._send(Kind.STATE)
        tree = unpack(bytes(self._answer()), "state")
        state: dict[str, Any] = put_tensors(tree, _no_array, "state")
        return state

    def steps(self) -> dict[int, int]:
        """Ask for the clocks."""
        self._send(Kind.STEPS)
        steps: dict[int, int] = unpack(bytes(self._answer()), "steps")
        return steps

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Send the options."""
        self._send(Kind.OPTIONS, [memoryview(dumps(dict(options), "options"))])
        self._answer()

    def leave(self) -> None:
        """Say goodbye; whether anybody hears it matters to nobody."""
        with suppress(PeerError):
            self._send(Kind.LEAVE)
            self._answer()

    def close(self) -> None:
        """Close the connection."""
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

    def _talking(self) -> _Talking:
        return _Talking(self._server, self._timeout)


class _Talking:
    """Turns a lost connection into an error that says what that means."""

    def __init__(self, server: int, timeout: float) -> None:
        self._server, self._timeout = server, timeout

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (OSError, EOFError)) and not isinstance(error, CkptkitError):
            late = isinstance(error, TimeoutError)
            raise PeerError(
                f"does not answer within {self._timeout:g} s" if late else "is gone",
                where=f"server {self._server}",
                hint="it held parameters that nobody else has: go on from the last checkpoint",
            ) from error


def _no_array(name: str) -> torch.Tensor:
    raise PeerError("a server's state has no arrays", value=name)
