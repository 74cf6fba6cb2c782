"""How a rank answers others while it computes: over TCP, on a thread for each connection.

Meetings of ranks are for what all do together; here one asks another, at any time. They say plain
values, and tensors among them: a message is a short document, and then the bytes of the tensors.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import astuple
from ipaddress import ip_address
from itertools import accumulate
from typing import Any

import torch

from ckptkit.errors import CkptkitError, PeerError
from ckptkit.format.encoding import dumps, unpack
from ckptkit.live.state.tensors import TensorForm, bytes_of
from ckptkit.live.state.trees import put_tensors, take_tensors

_FOR_THE_TOKEN = 10.0  # seconds
_FOR_THE_LAST_ANSWERS = 5.0
_LENGTH = struct.Struct("!I")
_LARGEST_DOCUMENT = 2**24
_SMALL = 2**16
_ALIGNMENT = 16  # of the largest dtype


class Listener:
    """Serves whoever begins with the token, until it is closed.

    `serve` returns or raises when the other side is gone or talks nonsense: a stranger may send
    anything, and that ends this connection and nothing else.
    """

    def __init__(self, host: str, token: bytes, serve: Callable[[socket.socket], None]) -> None:
        self._token = token
        self._serve = serve
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family)
        self.port: int = self._listening.getsockname()[1]
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, name="ckptkit-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more; answers on their way are cut off."""
        with self._lock:
            self._is_closed = True
            threads = list(self._open.values())
            for sock in [self._listening, *self._open]:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
        for thread in (self._thread, *threads):
            thread.join(_FOR_THE_LAST_ANSWERS)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                return
            thread = threading.Thread(
                target=self._talk, args=(sock,), name="ckptkit-answers", daemon=True
            )
            with self._lock:
                if self._is_closed:
                    sock.close()
                    return
                self._open[sock] = thread
            thread.start()

    def _talk(self, sock: socket.socket) -> None:
        try:
            with sock, suppress(OSError, EOFError, CkptkitError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                deadline = time.monotonic() + _FOR_THE_TOKEN
                if hmac.compare_digest(receive(sock, len(self._token), deadline), self._token):
                    sock.settimeout(None)
                    self._serve(sock)
        finally:
            with self._lock:
                self._open.pop(sock, None)


def connect(host: str, port: int, token: bytes, timeout: float) -> socket.socket:
    """A connection to a listener, which has been told the token."""
    sock = socket.create_connection((host, port), timeout)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(token)
    except OSError:
        sock.close()
        raise
    return sock


def receive(sock: socket.socket, size: int, deadline: float | None = None) -> bytearray:
    """The next bytes; what `receive_into` says of time and end holds."""
    data = bytearray(size)
    receive_into(sock, memoryview(data), deadline)
    return data


def receive_into(sock: socket.socket, view: memoryview, deadline: float | None = None) -> None:
    """Fill memory; `EOFError` where the other side has ended. A deadline bounds the whole, without
    one the socket's own time-out bounds each piece.
    """
    while view:
        if deadline is not None:
            sock.settimeout(seconds_until(deadline))
        count = sock.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]


def seconds_until(deadline: float) -> float:
    """What is left of a time; `TimeoutError` where nothing is, as no socket says of 0 seconds."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def message(value: object) -> list[bytearray | memoryview]:
    """What is sent, one after another, to say a value. Its tensors are dense; large ones on the CPU
    are sent from where they lie, small ones together.
    """
    tree, tensors = take_tensors(value, "")
    said = dumps([tree, {path: astuple(TensorForm.of(tensor)) for path, tensor in tensors.items()}])
    last = bytearray(_LENGTH.pack(len(said)) + said)
    parts: list[bytearray | memoryview] = [last]
    for tensor in tensors.values():
        memory: Any = bytes_of(tensor if tensor.is_cpu else tensor.cpu()).numpy()
        if memory.nbytes < _SMALL:
            last += memory.data
        else:
            last = bytearray()
            parts += [memory.data, last]
        last += bytes(-memory.nbytes % _ALIGNMENT)
    return parts


def tell(sock: socket.socket, value: object) -> None:
    """Say a value to the other side."""
    for part in message(value):
        sock.sendall(part)


def hear(sock: socket.socket, most: int, deadline: float | None = None) -> Any:
    """What the other side tells, with at most so many bytes of tensors, which share one memory.
    What `receive_into` says of time and end holds.
    """
    (length,) = _LENGTH.unpack(receive(sock, _LENGTH.size, deadline))
    if length > _LARGEST_DOCUMENT:
        raise PeerError("not a message of this protocol", value=length)
    said = unpack(bytes(receive(sock, length, deadline)), "a message")
    if not (isinstance(said, list) and len(said) == 2 and isinstance(said[1], dict)):
        raise PeerError("not a message of this protocol", value=said)
    forms = {path: TensorForm.heard(form) for path, form in said[1].items()}
    sizes = [form.nbytes for form in forms.values()]
    if sum(sizes) > most:
        raise PeerError("a message with more tensors than there are", value=sum(sizes))
    ends = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
    memory = torch.empty(ends[-1], dtype=torch.uint8, device="cpu")
    receive_into(sock, memory.numpy().data, deadline)
    tensors = {
        path: memory[start : start + size].view(form.torch_dtype).view(form.shape)
        for (path, form), start, size in zip(forms.items(), ends, sizes, strict=False)
    }

    def tensor_of(path: str) -> torch.Tensor:
        if path not in tensors:
            raise PeerError("a message lacks a tensor", value=path)
        return tensors[path]

    return put_tensors(said[0], tensor_of, "a message")


def own_address(hosts: Iterable[str]) -> str:
    """The address of this machine at which the ranks on these hosts reach it."""
    others = sorted(set(hosts) - {socket.gethostname()})
    # The own name last, where there are others: it is mostly the name of a loopback address.
    own = [socket.gethostname()] if others else []
    for host in (os.environ.get("MASTER_ADDR", ""), *others, *own):
        found = _address_towards(host) if host else ""
        if found and not ip_address(found.partition("%")[0]).is_loopback:
            return found
    if others:
        raise PeerError(
            "this machine knows no address of its own that other machines reach",
            where=socket.gethostname(),
            value=", ".join(others),
            hint="set MASTER_ADDR to an address of rank 0 that is not a loopback one",
        )
    return "127.0.0.1"


def _address_towards(host: str) -> str:
    """The own address that messages to a host come from; empty where there is no way to it."""
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    return ""
