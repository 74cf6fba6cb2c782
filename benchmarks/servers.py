"""The object stores that this machine can run: those that the tests start."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.bucket import Bucket
from tests.servers.moto import Moto
from tests.servers.rgw import Rgw
from tests.servers.s3_server import S3Server

_NAME = "bench"
_RGW_BYTES = 10 << 30

Started = Callable[[], AbstractContextManager[Bucket]]


def running() -> dict[str, Started]:
    """How to start each, with an empty bucket."""
    servers: dict[str, Started] = {"moto": partial(_started, Moto)}
    if shutil.which("radosgw"):
        gateway = partial(Rgw, nbytes=_RGW_BYTES)
        servers["Ceph RGW"] = partial(_started, gateway)
        servers["Ceph RGW, https"] = partial(_started, gateway, encrypted=True)
    return servers


@contextmanager
def _started(server: Callable[[Path], S3Server], *, encrypted: bool = False) -> Iterator[Bucket]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, server(Path(folder)) as started:
        started.client.create_bucket(Bucket=_NAME)
        bucket = Bucket(_NAME, started.endpoint, started.access_key, started.secret_key)
        if encrypted and isinstance(started, Rgw):
            environment = started.certificate.environment
            bucket = replace(bucket, endpoint=started.tls_endpoint, environment=environment)
        yield bucket
