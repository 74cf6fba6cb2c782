"""Waiting for answers of obstore in one thread of the process, whoever asked for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class _Loop:
    """Runs in a thread that ends with the process."""

    _of_process: asyncio.AbstractEventLoop | None = None
    _starting = threading.Lock()

    @classmethod
    def running(cls) -> asyncio.AbstractEventLoop:
        with cls._starting:
            if cls._of_process is None:
                loop = asyncio.new_event_loop()
                threading.Thread(
                    target=loop.run_forever, name="ckptkit answers", daemon=True
                ).start()
                cls._of_process = loop
            return cls._of_process


def waited_for(ask: Callable[[], Awaitable[T]]) -> T:
    """What a question is answered with; it is given up when the one who waits is interrupted.

    A thread that asks obstore without `async` is woken for every block that arrives.
    """

    async def answer() -> T:
        return await ask()

    future = asyncio.run_coroutine_threadsafe(answer(), _Loop.running())
    try:
        return future.result()
    finally:
        future.cancel()
