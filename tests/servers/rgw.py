"""Ceph's RADOS Gateway: real S3 with real signatures and checksums, where its packages are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.servers.certificate import Certificate
from tests.servers.process import ServerProcess, free_port
from tests.servers.s3_server import S3Server

_SCRIPT = Path(__file__).with_name("rgw.sh")
_PROGRAMS = ("bash", "setpriv", "ceph", "ceph-mon", "ceph-mgr", "ceph-osd", "radosgw")


def why_not() -> str:
    """Why there can be no gateway here; empty where there can be one."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        packages = "ceph-mon ceph-mgr ceph-osd radosgw ceph-common"
        return f"no {', '.join(missing)}: install Debian's {packages}"
    return "" if os.geteuid() == 0 else "Ceph's daemons start as root only"


class Rgw(S3Server):
    """Takes some fifteen seconds to start, and stops with the block. It serves https, too."""

    def __init__(self, folder: Path, nbytes: int = 2 << 30) -> None:
        port, tls_port = free_port(), free_port()
        self.endpoint = f"http://127.0.0.1:{port}"
        self.tls_endpoint = f"https://127.0.0.1:{tls_port}"
        self.certificate = Certificate(folder)
        ports = map(str, (free_port(), port, tls_port))
        words: list[str | Path] = [
            *ports,
            self.certificate.server,
            self.access_key,
            self.secret_key,
            str(nbytes),
        ]
        bash = shutil.which("bash") or "bash"
        self.process = ServerProcess([bash, _SCRIPT, folder, *words], folder / "rgw.log")
        self.process.wait_until((folder / "state").exists, 240)

    def stop(self) -> None:
        """End all daemons, and free what they keep."""
        self.client.close()
        self.process.stop(grace=15)
