"""The service of one shard: a thread for each worker, which answers what it asks."""

from __future__ import annotations

import hmac
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ckptkit.checkpoint.ranks import in_one_line
from ckptkit.errors import CkptkitError
from ckptkit.format.leaves import dumps, unpack
from ckptkit.live.state.trees import without_tensors
from ckptkit.parallel.optimizers.asynchronous.clocks import Clocks
from ckptkit.parallel.optimizers.asynchronous.messages import (
    TOKEN_BYTES,
    Kind,
    bytes_of,
    gradients_in,
    receive,
    send,
)
from ckptkit.parallel.optimizers.asynchronous.shard import Shard

_SLACK = 2**20


class Server:
    """Answers workers until it is closed."""

    def __init__(self, shard: Shard, clocks: Clocks, host: str, token: bytes) -> None:
        self.shard, self.clocks = shard, clocks
        self._token = token
        self._like = shard.pull()
        self._largest = sum(p.nbytes for p in self._like) + len(self._like) + _SLACK
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family)
        self._pipes: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._listening.getsockname()[1]
        return port

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
                self.shard.set_options(_options(data))
            elif kind == Kind.LEAVE:
                self.clocks.leave(worker)
        except Exception as error:  # noqa: BLE001 — told to the worker, who raises it
            send(pipe, Kind.FAILED, worker, [memoryview(in_one_line(error).encode())])
            return True
        answer: list[memoryview] = []
        if kind in (Kind.PUSH, Kind.PULL):
            answer = [bytes_of(value) for value in self.shard.pull()]
        elif kind == Kind.STATE:
            answer = [memoryview(dumps(without_tensors(self.shard.state()), "state"))]
        elif kind == Kind.STEPS:
            answer = [memoryview(dumps(self.clocks.steps, "steps"))]
        send(pipe, Kind.DONE, worker, answer)
        return kind != Kind.LEAVE


def _options(data: bytearray) -> Mapping[str, Any]:
    found = unpack(bytes(data), "options")
    return found if isinstance(found, dict) else {}
