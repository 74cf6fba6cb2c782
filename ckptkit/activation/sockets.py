"""Ranks that fetch from each other over TCP: each answers from threads of its own."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from ckptkit.activation.collectives import Collectives
from ckptkit.activation.store import LayerId
from ckptkit.activation.transport import Answer, missing
from ckptkit.activation.wire import (
    Deadline,
    bytes_of,
    described,
    receive_document,
    receive_exactly,
    receive_tensor,
    send_document,
    send_tensor,
)
from ckptkit.errors import NotFoundError, PeerError

_TOKEN = 32
_MOST_IDLE = 4  # connections to a rank that wait for the next fetch


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
        try:
            with sock, suppress(OSError, EOFError, PeerError, ValueError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                given = receive_exactly(sock, _TOKEN, Deadline.after(10.0))
                if hmac.compare_digest(bytes(given), self._token):
                    sock.settimeout(None)
                    while True:
                        self._reply(sock, receive_document(sock))
        finally:
            with self._lock:
                self._open.pop(sock, None)

    def _reply(self, sock: socket.socket, asked: dict[str, Any]) -> None:
        try:
            tensor = self._answer(asked["layer"], float(asked["wait"]))
            said, flat = described(tensor), bytes_of(tensor.detach().cpu())
        except NotFoundError as error:
            send_document(sock, {"missing": error.hint})
        except Exception as error:  # noqa: BLE001 — told to the rank that asked
            send_document(sock, {"failed": f"{type(error).__name__}: {error}"})
        else:
            send_tensor(sock, said, flat)


class SocketTransport:
    """The ranks of a process group, which meet in its collectives and fetch over TCP."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float = 30.0) -> None:
        found = dist.group.WORLD if group is None else group
        assert found is not None  # noqa: S101 — the caller has looked
        self._group = found
        self._collectives = Collectives(found, timeout)
        self._timeout = timeout
        self._server: Server | None = None
        self._peers: list[_Peer] = []

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
        token = heard[0][1].encode()
        hosts = {host for host, _ in heard}
        host = "127.0.0.1" if len(hosts) == 1 else _own_address()
        self._server = Server(host, token, answer)
        addresses = self.gather((host, self._server.port))
        self._peers = [
            _Peer(rank, address, token, self._timeout) for rank, address in enumerate(addresses)
        ]

    def fetch(self, source: int, layer_id: LayerId, *, wait: float) -> torch.Tensor:
        """Ask a rank; the answer comes from a thread of its."""
        return self._peers[source].ask(layer_id, wait)

    def gather(self, value: Any) -> list[Any]:
        """A collective of the group."""
        return self._collectives.gather(value)

    def broadcast(self, source: int, tensor: torch.Tensor) -> None:
        """A collective of the group, as bytes, which all backends take."""
        flat = bytes_of(tensor)
        if not flat.numel():
            return
        if flat.device.type == "cpu" or dist.get_backend(self._group) == "gloo":
            self._collectives.broadcast(flat, source)
            return
        try:
            # Between devices. The time-out is the group's, but all ranks have come by now.
            dist.broadcast(flat, group=self._group, group_src=source)
        except RuntimeError as error:
            raise PeerError(f"another rank is lost: {error}") from error

    def close(self) -> None:
        """Stop answering, and leave the others."""
        for peer in self._peers:
            peer.leave()
        if self._server is not None:
            self._server.close()
            self._server = None  # it knows the store, which knows this


class _Peer:
    """The connections to a rank: as many as threads ask it at once."""

    def __init__(self, rank: int, address: tuple[str, int], token: bytes, timeout: float) -> None:
        self.address = address
        self._rank = rank
        self._token = token
        self._timeout = timeout
        self._idle: list[socket.socket] = []
        self._has_left = False
        self._lock = threading.Lock()

    def ask(self, layer_id: LayerId, wait: float) -> torch.Tensor:
        """What the rank keeps."""
        seconds = self._timeout + wait
        deadline = Deadline.after(seconds)
        try:
            with self._connection(deadline) as sock:
                deadline.limit(sock)
                send_document(sock, {"layer": layer_id, "wait": wait})
                said = receive_document(sock, deadline)
                if "shape" in said:
                    return receive_tensor(sock, said, deadline)
        except TimeoutError:
            raise PeerError(
                f"rank {self._rank} did not answer within {seconds:g} s",
                where=f"activation {layer_id!r}",
                hint="it hangs, or its machine cannot be reached; timeout= says how long to wait",
            ) from None
        except (OSError, EOFError) as error:
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
        """Close the connections, those in use at their end."""
        with self._lock:
            self._has_left = True
            for sock in self._idle:
                sock.close()
            self._idle.clear()

    @contextmanager
    def _connection(self, deadline: Deadline) -> Iterator[socket.socket]:
        sock = self._taken() or self._connected(deadline)
        try:
            yield sock
        except BaseException:
            sock.close()  # what comes on it yet answers nobody
            raise
        self._give_back(sock)

    def _taken(self) -> socket.socket | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _connected(self, deadline: Deadline) -> socket.socket:
        sock = socket.create_connection(self.address, deadline.left())
        with suppress(OSError):  # what asks on it sees it too
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(self._token)
        return sock

    def _give_back(self, sock: socket.socket) -> None:
        with self._lock:
            if self._has_left or len(self._idle) >= _MOST_IDLE:
                sock.close()
            else:
                self._idle.append(sock)


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
