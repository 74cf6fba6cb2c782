"""Stores on moto for the tests of what goes wrong on the way."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.servers.proxy import Proxy
from tests.servers.s3_server import Bucket


@pytest.fixture(autouse=True)
def _quick_way_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is slow here: what takes long is broken, and is asked again at once."""
    monkeypatch.setattr("ckptkit.storage.base.address.LEAST_RATE", 1e9)
    # The tests of what needs no engine run without one, too.
    for module in ("server", "obstore") if find_spec("obstore") else ("server",):
        monkeypatch.setattr(f"ckptkit.storage.objects.{module}.FIRST_PAUSE", 0.01)


@pytest.fixture
def proxy(bucket: Bucket) -> Iterator[Proxy]:
    """Stands before the server of `bucket`."""
    with Proxy(str(bucket.options["endpoint"])) as between:
        yield between


@pytest.fixture(params=["obstore", "fsspec"])
def engine(request: pytest.FixtureRequest) -> str:
    """Both engines, one after the other, where they are installed."""
    pytest.importorskip("s3fs" if request.param == "fsspec" else request.param)
    return str(request.param)
