"""The stores on servers that join the contract."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ckptkit.errors import InvalidNameError
from ckptkit.storage import Store, open_store
from tests.servers.moto import Moto
from tests.servers.openstack import Swift
from tests.servers.s3_server import Bucket
from tests.storage.contract import StoreContract

_numbers = itertools.count()


@pytest.fixture(scope="module")
def shared(moto: Moto) -> Iterator[Bucket]:
    """One bucket for all tests, because a new session of s3fs takes a second."""
    made = moto.new_bucket()
    yield made
    moto.drop(made)


@pytest.fixture(scope="module")
def shared_swift(swift: Swift) -> Iterator[Bucket]:
    """One for all tests there too, because it takes long to make and to empty."""
    made = swift.new_bucket()
    yield made
    swift.drop(made)


class TestObstoreOnMoto(StoreContract):
    @pytest.fixture
    def store(self, shared: Bucket) -> Store:
        options = {**shared.options, "engine": "obstore"}
        return open_store(f"{shared.url}/some/folder-{next(_numbers)}", options)


@pytest.mark.long
class TestObstoreInAWholeBucket(StoreContract):
    @pytest.fixture
    def store(self, bucket: Bucket) -> Store:
        return open_store(bucket.url, {**bucket.options, "engine": "obstore"})


class TestS3fsOnMoto(StoreContract):
    @pytest.fixture
    def store(self, shared: Bucket) -> Store:
        options = {**shared.options, "engine": "fsspec"}
        return open_store(f"{shared.url}/some/folder-{next(_numbers)}", options)


class TestObstoreOnSwift(StoreContract):
    @pytest.fixture
    def store(self, shared_swift: Bucket) -> Store:
        options = {**shared_swift.options, "engine": "obstore"}
        return open_store(f"{shared_swift.url}/some/folder-{next(_numbers)}", options)


class TestGcsfsOnAnEmulator(StoreContract):
    @pytest.fixture
    def store(self, gcs_bucket: Bucket) -> Store:
        return open_store(f"{gcs_bucket.url}/some/folder", gcs_bucket.options)


class _Elsewhere(MemoryFileSystem):  # type: ignore[misc] # fsspec ships no types
    """A file system that ckptkit has never heard of."""

    protocol = "elsewhere"
    store: ClassVar[dict[str, object]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("elsewhere://").strip("/")

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """It has no folders of its own."""


class TestAnyFileSystemOfFsspec(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        fsspec.register_implementation("elsewhere", _Elsewhere, clobber=True)
        return open_store(f"elsewhere://host/folder-{next(_numbers)}")


def test_both_engines_give_objects_the_same_names(bucket: Bucket) -> None:
    stores = [
        open_store(bucket.url, {**bucket.options, "engine": e}) for e in ("obstore", "fsspec")
    ]
    for key in ("a b", "%2F", "ü/é", "x+y", "q?version=1", "#~", "a\\b"):
        for writer, reader in (stores, stores[::-1]):
            writer.put(key, key.encode())
            assert reader.read(key) == key.encode()
            assert [entry.key for entry in reader.list()] == [key]
            reader.delete([key])
            assert writer.list() == []


def test_s3fs_is_not_trusted_with_a_name_that_it_takes_for_a_version(bucket: Bucket) -> None:
    store = open_store(bucket.url, {**bucket.options, "engine": "fsspec"})
    with pytest.raises(InvalidNameError, match="no key of s3fs"):
        store.put("q?versionId=1", b"x")
