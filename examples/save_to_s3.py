"""Save to S3, load from it, reshard within it: on a moto server that this program starts.

Run: python examples/save_to_s3.py   (it says what to install first; the boto3 there keeps pip from
one that no s3fs goes with yet)
The lines with ckptkit are the same for a real bucket: leave `storage_options` out, and set AWS_*.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np

import ckptkit

INSTALL = "pip install -e '.[s3]' 'moto[server]' 'boto3<1.43.118'"
RUN, RESHARDED = "s3://example/runs/7b", "s3://example/runs/7b-tp2"
RULES = {"rules": [{"match": "wq", "tp": "shard(1)"}, {"match": "*", "tp": "replicate"}]}


@contextmanager
def moto() -> Iterator[str]:
    """An S3 server in a process of its own, with an empty bucket."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    program = Path(sys.executable).with_name("moto_server")
    if not program.exists():
        raise SystemExit(f"there is no moto here: {INSTALL}")
    quiet = subprocess.DEVNULL
    server = subprocess.Popen([program, "-p", port], stdout=quiet, stderr=quiet)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(300):
            with suppress(OSError):
                urlopen(Request(f"{url}/example", method="PUT"), timeout=5).close()
                break
            if server.poll() is not None:
                raise ChildProcessError("moto_server has ended")
            time.sleep(0.1)
        else:
            raise TimeoutError("moto_server does not answer")
        yield url
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    """Save, load, reshard and compare."""
    wq = np.random.default_rng(0).standard_normal((1024, 1024), np.float32)
    with moto() as endpoint:
        options = {"endpoint": endpoint, "access_key": "any", "secret_key": "any"}
        with ckptkit.Writer(RUN, step=100, storage_options=options) as writer:
            writer.add("model/wq", wq, role="param")
            writer.add_object("tokens", 1_000_000)
        with ckptkit.open(RUN, storage_options=options) as step:
            assert (step["model/wq"][:, 256:512] == wq[:, 256:512]).all()
            print(f"step {step.step} of {RUN}: {step.objects['tokens']} tokens")
        ckptkit.reshard(RUN, RESHARDED, to="tp:2", rules=RULES, storage_options=options)
        assert ckptkit.verify(RESHARDED, storage_options=options) == []
        assert ckptkit.diff(RUN, RESHARDED, storage_options=options).same
        print(f"{RESHARDED} is the same state, for tp:2")


if __name__ == "__main__":
    main()
