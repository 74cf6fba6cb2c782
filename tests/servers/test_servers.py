"""The servers do what tests rely on: conditions kept by moto, ignored by the adversaries."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from tests.servers.moto import Moto
from tests.servers.openstack import Swift
from tests.servers.process import ServerProcess, answers, free_port
from tests.servers.rclone import Rclone
from tests.servers.s3_server import Bucket, S3Server

ROOT = Path(__file__).resolve().parents[2]


def put_twice(server: S3Server, bucket: Bucket) -> bytes:
    """What is there after two exclusive creates of one key."""
    for body in (b"first", b"second"):
        with suppress(ClientError):
            server.client.put_object(Bucket=bucket.name, Key="a", Body=body, IfNoneMatch="*")
    return bytes(server.client.get_object(Bucket=bucket.name, Key="a")["Body"].read())


def test_moto_keeps_the_condition_of_a_write(moto: Moto, bucket: Bucket) -> None:
    assert put_twice(moto, bucket) == b"first"


def test_rclone_ignores_it(rclone: Rclone, rclone_bucket: Bucket) -> None:
    assert put_twice(rclone, rclone_bucket) == b"second"


def test_swift_keeps_it_for_those_who_come_one_after_the_other(
    swift: Swift, swift_bucket: Bucket
) -> None:
    assert put_twice(swift, swift_bucket) == b"first"


def test_buckets_are_fresh_and_told_apart(moto: Moto, bucket: Bucket) -> None:
    other = moto.new_bucket()
    assert other.url != bucket.url
    assert moto.keys(other) == []
    assert moto.uploads(other) == []
    moto.drop(other)


def test_repr_of_a_bucket_hides_the_secret(bucket: Bucket) -> None:
    assert str(bucket.options["secret_key"]) not in repr(bucket)


def test_google_s_storage_stores(gcs_bucket: Bucket) -> None:
    assert gcs_bucket.url.startswith("gs://")
    assert answers(str(gcs_bucket.options["endpoint"]))


PARENT = """
import sys
from pathlib import Path
from tests.servers.moto import Moto
server = Moto(Path(sys.argv[1]))
print(server.endpoint, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of that")
def test_a_server_ends_when_the_tests_are_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, tmp_path],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        endpoint = parent.stdout.readline().strip()
        assert answers(endpoint)
        parent.send_signal(signal.SIGKILL)
    limit = time.monotonic() + 10
    while answers(endpoint) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not answers(endpoint)


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    process = ServerProcess([sys.executable, "-c", "print('no such luck')"], tmp_path / "log")
    with pytest.raises(RuntimeError, match="no such luck"):
        process.wait_until(lambda: answers(f"http://127.0.0.1:{free_port()}"))
    process.stop()
