"""Ranks that fetch from each other over TCP: each answers from threads of its own."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import threading
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from ckptkit.activation.transport import Answer, LayerId, missing
from ckptkit.activation.wire import (
    Deadline,
    receive_document,
    receive_exactly,
    receive_tensor,
    send_document,
    send_tensor,
)
from ckptkit.errors import CkptkitError, NotFoundError, PeerError

_TOKEN = 32


class Server:
    """Answers whoever knows the token, each on a thread of its own."""

    def __init__(self, host: str, token: bytes, answer: Answer) -> None:
        self._token = token
        self._answer = answer
        self._listening = socket.create_server((host, 0))
        self.port: int = self._listening.getsockname()[1]
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._is_closed = False
        self._thread = threading.Thread(
            target=self._accept, name="ckptkit-activations", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End all threads."""
        with self._lock:
            self._is_closed = True
            threads = list(self._open.values())
            for sock in [self._listening, *self._open]:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
        for thread in (self._thread, *threads):
            thread.join(5.0)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
            with self._lock:
                if self._is_closed:
                    sock.close()
                    return
                self._open[sock] = thread
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, suppress(OSError, EOFError, PeerError, ValueError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            given = receive_exactly(sock, _TOKEN, Deadline.after(10.0))
            if hmac.compare_digest(bytes(given), self._token):
                sock.settimeout(None)
                while True:
                    self._reply(sock, receive_document(sock))
        with self._lock:
            self._open.pop(sock, None)

    def _reply(self, sock: socket.socket, asked: dict[str, Any]) -> None:
        try:
            tensor = self._answer(asked["layer"], float(asked["wait"]))
        except NotFoundError as error:
            send_document(sock, {"missing": error.hint})
        except CkptkitError as error:
            send_document(sock, {"failed": str(error)})
        else:
            send_tensor(sock, tensor)


class SocketTransport:
    """The ranks of a process group, which meet in its collectives and fetch over TCP."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float = 30.0) -> None:
        found = dist.group.WORLD if group is None else group
        assert found is not None  # noqa: S101 — the caller has looked
        self._group = found
        self._control = _control(found)
        self._timeout = timeout
        self._token = b""
        self._server: Server | None = None
        self._addresses: list[tuple[str, int]] = []
        self._peers: dict[int, _Peer] = {}
        self._lock = threading.Lock()

    @property
    def rank(self) -> int:
        """In the group."""
        return self._group.rank()

    @property
    def world_size(self) -> int:
        """Of the group."""
        return self._group.size()

    def serve(self, answer: Answer) -> None:
        """Begin to answer; all ranks do so together."""
        heard = self.gather((socket.gethostname(), secrets.token_hex(_TOKEN // 2)))
        self._token = heard[0][1].encode()
        hosts = {host for host, _ in heard}
        host = "127.0.0.1" if len(hosts) == 1 else _own_address()
        self._server = Server(host, self._token, answer)
        self._addresses = self.gather((host, self._server.port))

    def fetch(self, source: int, layer_id: LayerId, *, wait: float) -> torch.Tensor:
        """Ask a rank; the answer comes from a thread of its."""
        with self._lock:
            peer = self._peers.setdefault(source, _Peer(source))
        with peer.lock:
            return peer.ask(self._addresses[source], self._token, layer_id, wait, self._timeout)

    def gather(self, value: Any) -> list[Any]:
        """A collective of the group."""
        heard: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(heard, value, group=self._control)
        except RuntimeError as error:
            raise _lost(error) from error
        return heard

    def broadcast(self, source: int, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """A collective of the group, after one that says what comes."""
        said = None
        if tensor is not None:
            said = tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.requires_grad
        heard = self.gather(said)[source]
        if heard is None:
            return None
        shape, dtype, device, requires_grad = heard
        if self.rank == source and tensor is not None:
            buffer = tensor.detach().contiguous()
        else:
            buffer = torch.empty(shape, dtype=dtype, device=device)
        group = self._control if device == "cpu" else self._group
        if buffer.numel():
            try:
                # As bytes, which all backends take.
                flat = buffer.view(-1).view(torch.uint8)
                dist.broadcast(flat, group=group, group_src=source)
            except RuntimeError as error:
                raise _lost(error) from error
        return tensor if self.rank == source else buffer.requires_grad_(requires_grad)

    def close(self) -> None:
        """Stop answering, and leave the others."""
        for peer in self._peers.values():
            with peer.lock:
                peer.leave()
        if self._server is not None:
            self._server.close()


class _Peer:
    """The connection to a rank, made when it is first asked."""

    def __init__(self, rank: int) -> None:
        self.lock = threading.Lock()
        self._rank = rank
        self._sock: socket.socket | None = None

    def ask(
        self, address: tuple[str, int], token: bytes, layer_id: LayerId, wait: float, seconds: float
    ) -> torch.Tensor:
        deadline = Deadline.after(seconds + wait)
        try:
            sock = self._connected(address, token, deadline)
            deadline.limit(sock)
            send_document(sock, {"layer": layer_id, "wait": wait})
            said = receive_document(sock, deadline)
            if "shape" in said:
                return receive_tensor(sock, said, deadline)
        except TimeoutError:
            self.leave()
            raise PeerError(
                f"rank {self._rank} did not answer within {seconds + wait:g} s",
                where=f"activation {layer_id!r}",
                hint="it hangs, or its machine cannot be reached; timeout= says how long to wait",
            ) from None
        except (OSError, EOFError) as error:
            self.leave()
            raise PeerError(
                f"rank {self._rank} has gone: its process died, or its store is closed",
                where=f"activation {layer_id!r}",
            ) from error
        if "failed" in said:
            raise PeerError(
                f"rank {self._rank}: {said['failed']}", where=f"activation {layer_id!r}"
            )
        raise missing(self._rank, layer_id, str(said.get("missing")))

    def leave(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _connected(
        self, address: tuple[str, int], token: bytes, deadline: Deadline
    ) -> socket.socket:
        if self._sock is None:
            self._sock = socket.create_connection(address, deadline.left())
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sock.sendall(token)
        return self._sock


def _control(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group that passes host memory: the one that is given, where that does."""
    if "cpu" in str(group._device_types) or dist.get_backend(group) in ("gloo", "mpi"):
        return group
    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)  # noqa: S101 — this rank is one of them
    return made


def _own_address() -> str:
    """The address by which other machines reach this one: that on the way to the master's."""
    master = os.environ.get("MASTER_ADDR", "")
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if master:
            probe.connect((master, 1))  # sends nothing
            host: str = probe.getsockname()[0]
            if not host.startswith("127."):
                return host
    return socket.gethostbyname(socket.gethostname())


def _lost(error: RuntimeError) -> PeerError:
    return PeerError(f"another rank did not come, or is lost: {error}")
