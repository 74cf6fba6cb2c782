"""gcp-storage-emulator: Google's JSON API in memory, as far as gcsfs needs it. It ignores
preconditions.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from contextlib import AbstractContextManager
from http.client import HTTPConnection
from pathlib import Path
from typing import Self
from urllib.parse import quote

from tests.servers.process import ServerProcess, answers, free_port
from tests.servers.s3_server import Bucket

_NUMBERS = itertools.count(1)

# gcsfs ends a body by "\n" and its boundary. Where the last byte of the body is "\r", the emulator
# takes the two for the end of a line, and drops both.
_WHOLE_BODIES = r"""
from gcp_storage_emulator import server
decode, end = server._decode_raw_data, b"\n--==0==--"
def decode_whole(*arguments):
    data = decode(*arguments)
    return data[:-len(end)] + b"\r" + end if data and data.endswith(b"\r" + end) else data
server._decode_raw_data = decode_whole
from gcp_storage_emulator.__main__ import main
main()
"""


class Gcs(AbstractContextManager["Gcs"]):
    """Stops with the block."""

    def __init__(self, folder: Path) -> None:
        self._port = free_port()
        self.endpoint = f"http://127.0.0.1:{self._port}"
        command: list[str | Path] = [
            sys.executable,
            "-c",
            _WHOLE_BODIES,
            "start",
            "--in-memory",
            "--quiet",
        ]
        where = ["--host", "127.0.0.1", "--port", str(self._port)]
        self.process = ServerProcess([*command, *where], folder / "gcs.log")
        self.process.wait_until(lambda: answers(self.endpoint))

    @property
    def options(self) -> dict[str, object]:
        """Storage options that reach the server; obstore's client fails on it (no ETags)."""
        return {"endpoint": self.endpoint, "anonymous": True, "engine": "fsspec"}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stop()

    def new_bucket(self) -> Bucket:
        """Make a bucket that nobody else has."""
        name = f"test-{os.getpid()}-{next(_NUMBERS)}"
        self._ask("POST", "/storage/v1/b?project=test", {"name": name})
        return Bucket(name, "gs", self.options)

    def drop(self, bucket: Bucket) -> None:
        """Delete all that is in a bucket: the server keeps it in memory."""
        found = self._ask("GET", f"/storage/v1/b/{bucket.name}/o")
        for item in found.get("items", ()):
            self._ask("DELETE", f"/storage/v1/b/{bucket.name}/o/{quote(item['name'], safe='')}")

    def _ask(
        self, method: str, path: str, body: dict[str, str] | None = None
    ) -> dict[str, list[dict[str, str]]]:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, json.dumps(body) if body else None, headers)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {text[:500]!r}")
        return dict(json.loads(text)) if text else {}
