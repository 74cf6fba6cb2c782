"""`rclone serve s3`: a folder as S3. It ignores every condition of a write without a word, which
makes it the adversary of whoever relies on one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from tests.servers.process import ServerProcess, answers, free_port, installed
from tests.servers.s3_server import Bucket, S3Server


class Rclone(S3Server):
    """Stops with the block."""

    def __init__(self, folder: Path) -> None:
        address = f"127.0.0.1:{free_port()}"
        self.endpoint = f"http://{address}"
        served = folder / "served"
        served.mkdir()
        keys = f"{self.access_key},{self.secret_key}"
        command: list[str | Path] = [
            installed("rclone"),
            "serve",
            "s3",
            "--addr",
            address,
            "--auth-key",
            keys,
        ]
        self.process = ServerProcess(
            [*command, "--config", folder / "none.conf", served], folder / "rclone.log"
        )
        self.process.wait_until(lambda: answers(self.endpoint))

    @property
    def options(self) -> dict[str, object]:
        """Storage options that reach the server; to ranges it answers with 200 in place of 206,
        which obstore refuses.
        """
        return {**super().options, "engine": "fsspec"}

    def uploads(self, bucket: Bucket) -> list[dict[str, Any]]:
        """The multipart uploads under way; where there never was one, rclone says NoSuchUpload."""
        try:
            return super().uploads(bucket)
        except ClientError:
            return []

    def stop(self) -> None:
        """End the server; what it served goes with the folder."""
        self.client.close()
        self.process.stop()
