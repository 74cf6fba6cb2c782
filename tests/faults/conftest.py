"""A proxy that breaks things, in front of moto."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.scene import ENGINES, Scene
from tests.servers.moto import Moto
from tests.servers.proxy import Proxy
from tests.servers.s3_server import Bucket


@pytest.fixture(autouse=True)
def _quick_way_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is slow here: what takes long is broken."""
    monkeypatch.setattr("ckptkit.storage.base.address.LEAST_RATE", 1e9)


@pytest.fixture
def proxy(moto: Moto) -> Iterator[Proxy]:
    with Proxy(moto.endpoint) as running:
        yield running


@pytest.fixture(params=ENGINES)
def scene(bucket: Bucket, proxy: Proxy, request: pytest.FixtureRequest) -> Scene:
    """With step 1 committed."""
    made = Scene(bucket, proxy, request.param)
    made.begin()
    return made
