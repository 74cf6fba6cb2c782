"""A proxy of ours between a client and a server: it counts, and it breaks what a test wants
broken. The server sees the Host that the client sent, for that is signed.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import threading
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, Self
from urllib.parse import urlsplit

from tests.servers.faults import (
    Answer,
    Delay,
    Fault,
    FlipDownload,
    FlipUpload,
    Hold,
    LoseAnswer,
    Match,
    Plan,
    ResetDownload,
    ResetUpload,
    Rule,
    SlowDownload,
    Stall,
    StallDownload,
    Strip,
    Truncate,
    everything,
)
from tests.servers.http_wire import Head, body_of, read_head

_LIMIT = 256 << 10
_CLOSE_HARD = struct.pack("ii", 1, 0)  # SO_LINGER of no time at all: a reset in place of a goodbye
_MOST_HELD = 60.0
_NO_BODY = (204, 304)


class _CutError(Exception):
    """The connection is to end here: with a reset, or with a goodbye as if all were said."""

    def __init__(self, *, hard: bool = True) -> None:
        super().__init__()
        self.hard = hard


class Proxy:
    """Stops with the block; `endpoint` is where clients go, over https where it is given how: that
    ends here, and nothing protects what is passed on.
    """

    def __init__(self, endpoint: str, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self._port = port
        self._tls = tls
        self.counts: Counter[str] = Counter()
        self.bytes_up = 0
        self.bytes_down = 0
        self.requests: list[Head] = []
        self._plan = Plan()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        parts = urlsplit(endpoint)
        self._server = (str(parts.hostname), int(parts.port or 80))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._listener = self._do(
            asyncio.start_server(self._accept, "127.0.0.1", self._port, limit=_LIMIT, ssl=self._tls)
        )
        scheme = "https" if self._tls else "http"
        self.endpoint = f"{scheme}://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def inject(
        self,
        fault: Fault,
        match: Match = everything,
        *,
        skip: int = 0,
        times: int | None = 1,
        every: int = 1,
    ) -> None:
        """Break requests that match: after the first `skip` the next `times` (None: all), of those
        every `every`-th.
        """
        self._plan.add(Rule(fault, match, skip, times, every))

    def forgive(self) -> None:
        """Break nothing more."""
        self._plan.clear()

    def forget(self) -> None:
        """Begin to count anew."""
        self.counts.clear()
        self.requests.clear()
        self.bytes_up = self.bytes_down = 0

    @property
    def met(self) -> list[tuple[Fault, Head]]:
        """The faults that happened, and to which requests."""
        return self._plan.met

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _end(self) -> None:
        # What was accepted a moment ago becomes a task: asyncio loses it where nobody listens now.
        await _rounds()
        self._listener.close()
        await _rounds()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for writer in self._writers:
            _reset(writer)  # those whose task was cancelled before it began
        await self._listener.wait_closed()
        await self._loop.shutdown_asyncgens()
        await _rounds()  # transports close one round later

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        task = self._loop.create_task(self._serve(reader, writer))
        self._tasks.add(task)  # the loop itself keeps none alive
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except _CutError as cut:
            if cut.hard:
                _reset(writer)
        except (OSError, asyncio.IncompleteReadError):
            _reset(writer)
        except asyncio.CancelledError:
            # Before Python 3.12 asyncio has a callback that a cancelled connection makes fail.
            _reset(writer)
        finally:
            await _closed(writer)
            self._writers.discard(writer)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Pass on one request and its answer; whether the connection goes on."""
        head = await read_head(reader)
        if head is None:
            return False
        self.counts[head.kind] += 1
        self.requests.append(head)
        fault = self._plan.fault_of(head)
        match fault:
            case Answer():
                return await self._answer(fault, head, reader, writer)
            case Stall():
                await _gone(reader)
                raise _CutError
            case Delay():
                await asyncio.sleep(fault.seconds)
            case Hold():
                fault.come.set()
                await asyncio.to_thread(fault.go.wait, _MOST_HELD)
            case Strip():
                head = head.without(fault.headers)
        there, server = await asyncio.open_connection(*self._server, limit=_LIMIT)
        try:
            await self._pass_request(fault, head, reader, writer, server)
            return await self._pass_answer(fault, head, there, writer)
        finally:
            await _closed(server)

    async def _answer(
        self,
        fault: Answer,
        head: Head,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        await _welcome(head, writer)
        async for piece in body_of(reader, head, answer=False):
            self.bytes_up += len(piece)
        body = b"" if head.method == "HEAD" else fault.body
        headers = (("Content-Type", "application/xml"), ("Content-Length", str(len(body))))
        writer.write(Head(f"HTTP/1.1 {fault.status} Broken", headers).encode() + body)
        await writer.drain()
        return True

    async def _pass_request(
        self,
        fault: Fault | None,
        head: Head,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server: asyncio.StreamWriter,
    ) -> None:
        await _welcome(head, writer)
        server.write(head.without(["expect"]).having("Connection", "close").encode())
        if isinstance(fault, ResetUpload) and not fault.after:
            _reset(server)
            raise _CutError
        sent = 0
        async for piece in body_of(reader, head, answer=False):
            self.bytes_up += len(piece)
            if isinstance(fault, ResetUpload) and sent + len(piece) > fault.after:
                server.write(piece[: fault.after - sent])
                _reset(server)
                raise _CutError
            flip = fault.at if isinstance(fault, FlipUpload) else -1
            server.write(_flipped(piece, flip - sent))
            await server.drain()
            sent += len(piece)
        await server.drain()

    async def _pass_answer(
        self,
        fault: Fault | None,
        head: Head,
        there: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        answer = await read_head(there)
        if answer is None or isinstance(fault, LoseAnswer):
            raise _CutError(hard=False)
        empty = head.method == "HEAD" or answer.status in _NO_BODY
        keep = empty or answer.length is not None
        answer = answer.having("Connection", "keep-alive" if keep else "close")
        if isinstance(fault, Truncate) and fault.honest and answer.length is not None and not empty:
            answer = answer.having("Content-Length", str(min(fault.after, answer.length)))
        writer.write(answer.encode())
        if not empty:
            async for piece in _broken(fault, body_of(there, answer, answer=True)):
                self.bytes_down += len(piece)
                writer.write(piece)
                await writer.drain()
        await writer.drain()
        return keep


async def _broken(fault: Fault | None, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The body of an answer as far as the fault lets it through."""
    sent = 0
    async for piece in body:
        if isinstance(fault, (ResetDownload, Truncate)) and sent + len(piece) > fault.after:
            yield piece[: fault.after - sent]
            if isinstance(fault, Truncate) and fault.honest:
                return
            raise _CutError(hard=isinstance(fault, ResetDownload))
        if isinstance(fault, StallDownload) and sent + len(piece) > fault.after:
            yield piece[: fault.after - sent]
            await asyncio.sleep(_MOST_HELD)
            raise _CutError
        if isinstance(fault, SlowDownload):
            for begin in range(0, len(piece), fault.piece):
                await asyncio.sleep(fault.seconds)
                yield piece[begin : begin + fault.piece]
            continue
        yield _flipped(piece, fault.at - sent if isinstance(fault, FlipDownload) else -1)
        sent += len(piece)


async def _welcome(head: Head, writer: asyncio.StreamWriter) -> None:
    """Some clients ask before they send a body; a server that is asked twice answers twice."""
    if head.get("expect"):
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await writer.drain()


async def _rounds() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def _gone(reader: asyncio.StreamReader) -> None:
    """Wait until the client gives up."""
    while await reader.read(_LIMIT):
        pass


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    try:
        await writer.wait_closed()
    except OSError:
        return
    except asyncio.CancelledError:
        # What is still to be sent would keep it open.
        _reset(writer)
        raise


def _reset(writer: asyncio.StreamWriter) -> None:
    # Of a connection that is gone already TLS has none.
    connection = writer.get_extra_info("socket")
    with suppress(OSError, AttributeError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CLOSE_HARD)
    writer.transport.abort()


def _flipped(piece: bytes, at: int) -> bytes:
    """A piece with one bit flipped, where the place lies in it."""
    if not 0 <= at < len(piece):
        return piece
    return piece[:at] + bytes([piece[at] ^ 0x10]) + piece[at + 1 :]
