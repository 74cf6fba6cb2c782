"""A fault and the requests that meet it, as tables of tests name them."""

from __future__ import annotations

from dataclasses import dataclass

from tests.servers.faults import Fault, Match, everything, kind
from tests.servers.proxy import Proxy

PACK = kind("PUT", path=".zip")
MANIFEST = kind("PUT", path="manifest.msgpack")
PART = kind("PUT", query="partNumber")
BEGIN = kind("POST", query="uploads")
COMPLETE = kind("POST", query="uploadId")
LIST = kind("LIST")
READ = kind("GET", path=".zip")
READ_MANIFEST = kind("GET", path="manifest.msgpack")


@dataclass(frozen=True)
class Trouble:
    """A fault, and which of the requests that match meet it."""

    fault: Fault
    match: Match = everything
    times: int | None = 1
    every: int = 1
    skip: int = 0

    def make(self, proxy: Proxy) -> None:
        """From now on."""
        proxy.inject(self.fault, self.match, times=self.times, every=self.every, skip=self.skip)
