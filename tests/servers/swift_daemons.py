"""OpenStack Swift with its S3 interface, in one folder and on the loopback only:
    python -P swift_daemons.py FOLDER PORT ACCOUNT USER SECRET_KEY
Runs until its standard input is closed. Each server is a process of its own, as in earnest: what
one does between looking whether a name is taken and taking it, others do too.
"""

from __future__ import annotations

import ctypes
import getpass
import os
import signal
import socket
import sys
import time
from pathlib import Path

from swift.common.ring import RingBuilder
from swift.common.utils import set_swift_dir
from swift.common.wsgi import run_wsgi

SERVER = """
[DEFAULT]
swift_dir = {folder}
devices = {folder}
mount_check = false
bind_ip = 127.0.0.1
bind_port = {port}
user = {user}
workers = 0
log_level = ERROR
[pipeline:main]
pipeline = {pipeline}
[app:{kind}-server]
use = egg:swift#{kind}
account_autocreate = true
"""
FILTERS = "catch_errors listing_formats bulk s3api tempauth slo"
TEMPAUTH = """
[filter:tempauth]
use = egg:swift#tempauth
user_{account}_{name} = {secret} .admin
"""


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def serve(folder: Path, kind: str, port: int, *, filters: str = "", more: str = "") -> None:
    """Start one server in a process that ends with this one, and wait until it listens."""
    config = folder / f"{kind}.conf"
    named = {"folder": folder, "port": port, "user": getpass.getuser(), "kind": kind}
    config.write_text(SERVER.format(pipeline=f"{filters} {kind}-server", **named) + more)
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        os._exit(run_wsgi(str(config), f"{kind}-server"))
    limit = time.monotonic() + 30
    while time.monotonic() < limit:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.05)
        else:
            return
    sys.exit(f"the {kind} server does not listen")


def main(folder: Path, port: int, account: str, name: str, secret: str) -> None:
    """One disk, one replica, one server of each kind."""
    (folder / "swift.conf").write_text("[swift-hash]\nswift_hash_path_suffix = tests\n")
    (folder / "disk").mkdir()
    set_swift_dir(str(folder))
    for kind in ("account", "container", "object"):
        builder = RingBuilder(part_power=2, replicas=1, min_part_hours=0)
        disk = {"region": 1, "zone": 1, "device": "disk", "weight": 1.0}
        listens = free_port()
        builder.add_dev({**disk, "ip": "127.0.0.1", "port": listens})
        builder.rebalance()
        builder.get_ring().save(str(folder / f"{kind}.ring.gz"))
        serve(folder, kind, listens)
    parts = [f"[filter:{it}]\nuse = egg:swift#{it}\n" for it in FILTERS.split() if it != "tempauth"]
    more = TEMPAUTH.format(account=account, name=name, secret=secret) + "".join(parts)
    serve(folder, "proxy", port, filters=FILTERS, more=more)
    (folder / "state").write_text("ready\n")
    sys.stdin.read()


if __name__ == "__main__":
    os.environ["EVENTLET_HUB"] = "poll"
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6])
