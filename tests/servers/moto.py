"""moto: S3 in memory, with correct multipart uploads, ranges and conditions. It checks neither
secrets nor checksums.
"""

from __future__ import annotations

from pathlib import Path

from tests.servers.process import ServerProcess, answers, free_port, installed
from tests.servers.s3_server import S3Server


class Moto(S3Server):
    """Stops with the block."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self.endpoint = f"http://127.0.0.1:{port}"
        command: list[str | Path] = [installed("moto_server"), "-H", "127.0.0.1", "-p", str(port)]
        self.process = ServerProcess(command, folder / "moto.log")
        self.process.wait_until(lambda: answers(f"{self.endpoint}/moto-api/"))

    def stop(self) -> None:
        """End the server, and free what it keeps."""
        self.client.close()
        self.process.stop()
