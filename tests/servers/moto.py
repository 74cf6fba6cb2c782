"""moto: S3 in memory, with correct multipart uploads, ranges and conditions. It checks neither
secrets nor checksums.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.servers.process import ServerProcess, answers, free_port
from tests.servers.s3_server import S3Server

# moto looks whether a name is taken, and then takes it: between the two comes another thread.
_ONE_PUT_AT_A_TIME = """
import threading
from moto.s3.responses import S3Response
from moto.server import main
put, lock = S3Response.put_object, threading.Lock()
def put_alone(self):
    with lock:
        return put(self)
S3Response.put_object = put_alone
main()
"""


class Moto(S3Server):
    """Stops with the block."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self.endpoint = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-c", _ONE_PUT_AT_A_TIME, "-H", "127.0.0.1", "-p", str(port)]
        self.process = ServerProcess(command, folder / "moto.log")
        self.process.wait_until(lambda: answers(f"{self.endpoint}/moto-api/"))

    def stop(self) -> None:
        """End the server, and free what it keeps."""
        self.client.close()
        self.process.stop()
