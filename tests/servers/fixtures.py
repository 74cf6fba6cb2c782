"""Servers for tests: each is started by the first test that asks for it, once per process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.servers.certificate import Certificate
from tests.servers.gcs import Gcs
from tests.servers.moto import Moto
from tests.servers.openstack import Swift
from tests.servers.rclone import Rclone
from tests.servers.rgw import Rgw, why_not
from tests.servers.s3_server import Bucket

# The emulator does not know what gcsfs asks for otherwise; gcsfs looks when it is imported.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moto]:
    """S3 as it should be."""
    with Moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """Of the loopback."""
    return Certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rclone]:
    """S3 that ignores every condition."""
    with Rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(scope="session")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gcs]:
    """Google's storage, ignoring preconditions."""
    with Gcs(tmp_path_factory.mktemp("gcs")) as server:
        yield server


@pytest.fixture(scope="session")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swift]:
    """S3 that refuses whoever comes later, but not who comes at the same time."""
    with Swift(tmp_path_factory.mktemp("swift")) as server:
        yield server


@pytest.fixture(scope="module")
def rgw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rgw]:
    """Ceph's S3, in tests that are marked so: it ends with them, as its daemons are never idle."""
    if reason := why_not():
        pytest.skip(f"the rgw suite did not run: {reason}")
    with Rgw(tmp_path_factory.mktemp("rgw")) as server:
        yield server


@pytest.fixture
def bucket(moto: Moto) -> Iterator[Bucket]:
    """A fresh bucket of moto."""
    made = moto.new_bucket()
    yield made
    moto.drop(made)


@pytest.fixture
def rclone_bucket(rclone: Rclone) -> Iterator[Bucket]:
    """A fresh bucket of rclone."""
    made = rclone.new_bucket()
    yield made
    rclone.drop(made)


@pytest.fixture
def swift_bucket(swift: Swift) -> Iterator[Bucket]:
    """A fresh bucket of Swift."""
    made = swift.new_bucket()
    yield made
    swift.drop(made)


@pytest.fixture
def gcs_bucket(gcs: Gcs) -> Iterator[Bucket]:
    """A fresh bucket of the emulator."""
    made = gcs.new_bucket()
    yield made
    gcs.drop(made)


@pytest.fixture
def rgw_bucket(rgw: Rgw) -> Iterator[Bucket]:
    """A fresh bucket of the gateway."""
    made = rgw.new_bucket()
    yield made
    rgw.drop(made)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line whether the suite that needs installing ran."""
    found = {
        outcome: [
            report
            for report in terminalreporter.stats.get(outcome, ())
            if "rgw" in getattr(report, "keywords", ())
        ]
        for outcome in ("passed", "failed", "error", "skipped")
    }
    ran = len(found["passed"]) + len(found["failed"])
    if ran or found["error"]:
        broken = len(found["failed"]) + len(found["error"])
        terminalreporter.write_line(f"rgw suite: ran {ran} tests, {broken} went wrong")
    elif found["skipped"]:
        terminalreporter.write_line(f"rgw suite: did not run: {why_not() or 'skipped'}")
