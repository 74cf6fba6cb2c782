"""OpenStack Swift, whose S3 interface answers 412 to who comes later, but does not tell racing
creators apart: each looks whether there is an object, and each then puts its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.servers.process import ServerProcess, free_port
from tests.servers.s3_server import S3Server

_DAEMONS = Path(__file__).with_name("swift_daemons.py")


class Swift(S3Server):
    """Stops with the block. The folder has to be on a file system with extended attributes."""

    access_key = "test:tester"

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self.endpoint = f"http://127.0.0.1:{port}"
        # -P: what lies beside the program is no package.
        program: list[str | Path] = [sys.executable, "-P", "-W", "ignore", _DAEMONS, folder]
        command = [*program, str(port), *self.access_key.split(":"), self.secret_key]
        self.process = ServerProcess(command, folder / "swift.log")
        self.process.wait_until((folder / "state").exists)

    def stop(self) -> None:
        """End the servers; what they stored goes with the folder."""
        self.client.close()
        self.process.stop()
