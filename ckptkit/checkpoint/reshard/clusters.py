"""Dask and Ray as executors, where they are installed."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from importlib import import_module
from threading import Thread
from typing import Any

from ckptkit.errors import PeerError, UsageError


@contextmanager
def dask_executor(address: str) -> Iterator[Executor]:
    """The workers of a Dask scheduler."""
    try:
        distributed: Any = import_module("distributed")
    except ImportError as error:
        raise _missing("dask", "distributed") from error
    host, _, port = address.rpartition(":")
    try:
        # The client itself would go on in the background, and complain at the end.
        socket.create_connection((host, int(port)), timeout=5).close()
        client = distributed.Client(f"tcp://{address}", timeout="5s", set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise PeerError(
            "no Dask scheduler answers", where=f"dask://{address}", hint="is `dask scheduler` up?"
        ) from error
    with client:
        # A pack may be written once only: where a worker is lost the caller hears of it.
        yield client.get_executor(pure=False, retries=0)


@contextmanager
def ray_executor(address: str) -> Iterator[Executor]:
    """The workers of a Ray cluster; without an address one on this machine."""
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise _missing("ray", "ray") from error
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(address=address or None, logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise PeerError("no Ray cluster answers", where=address, hint=str(error)) from error
    executor = _RayExecutor(ray)
    try:
        yield executor
    finally:
        executor.shutdown()
        if started:
            ray.shutdown()


class _RayExecutor(Executor):
    """Tasks as Ray has them, futures as everybody has them."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._watchers: list[Thread] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function somewhere, once."""
        future: Future[Any] = Future()
        reference = self._ray.remote(max_retries=0)(fn).remote(*args, **kwargs)
        future.set_running_or_notify_cancel()
        watcher = Thread(target=self._watch, args=(reference, future), daemon=True)
        watcher.start()
        self._watchers.append(watcher)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - as Executor has it
        """Wait for what runs."""
        if wait:
            for watcher in self._watchers:
                watcher.join()

    def _watch(self, reference: Any, future: Future[Any]) -> None:
        try:
            future.set_result(self._ray.get(reference))
        except self._ray.exceptions.RayTaskError as error:
            future.set_exception(error.cause if isinstance(error.cause, Exception) else error)
        except BaseException as error:  # noqa: BLE001 - the future carries it
            future.set_exception(error)


def _missing(engine: str, package: str) -> UsageError:
    return UsageError(
        f"the engine {engine} needs a package that is not installed",
        value=package,
        hint=f"pip install 'ckptkit[{engine}]'",
    )
