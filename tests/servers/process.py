"""A server as a process of its own, which ends with the tests whatever becomes of them."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

# Linux sends the signal when the parent is gone, also where that was killed; exec keeps it so.
_DIE_WITH_PARENT = """
import ctypes, os, sys
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl:
    prctl(1, 9)
os.execv(sys.argv[1], sys.argv[1:])
"""
_DIRECTLY = build_opener(ProxyHandler({}))


class ServerProcess:
    """Runs a command until `stop`, and keeps what it says for whoever has to find out why."""

    def __init__(
        self, command: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _DIE_WITH_PARENT, *map(str, command)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
            )

    def wait_until(self, ready: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait until the server is ready; an error with its last words where that never comes."""
        limit = time.monotonic() + seconds
        while not ready():
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended by itself:\n{self.last_words()}")
            if time.monotonic() > limit:
                self.stop()
                raise TimeoutError(f"no server after {seconds:.0f} s:\n{self.last_words()}")
            time.sleep(0.05)

    def stop(self, grace: float = 5.0) -> None:
        """Close its input, ask it to end, and where it does not, end it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.terminate()
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def last_words(self) -> str:
        """The end of what the server wrote."""
        return self.log.read_text(errors="replace")[-4000:]


def installed(program: str) -> Path:
    """A program that came with the packages of this environment."""
    return Path(sys.executable).with_name(program)


def free_port() -> int:
    """A port that nobody listens on, below those that systems give to whoever asks for any: one of
    them might be another connection's by the time that a server takes it.
    """
    while True:
        port = 10_000 + secrets.randbelow(22_000)  # a test may have set the seed of `random`
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def until_listening(port: int) -> None:
    """Return when somebody listens there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(port)


def answers(url: str) -> bool:
    """Whether something speaks HTTP there, whatever it says."""
    try:
        _DIRECTLY.open(url, timeout=5).close()
    except HTTPError as error:
        error.close()
    except (URLError, OSError):
        return False
    return True
