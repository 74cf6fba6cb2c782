"""The stores and decorators that join the contract."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptkit.storage import LocalStore, Location, MemoryStore, Store
from tests.storage.contract import StoreContract
from tests.storage.counting import CountingStore
from tests.storage.failing import FailingStore


class TestLocalStoreOnDisk(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "not/there/yet")


class TestLocalStoreInSharedMemory(StoreContract):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        if not Path("/dev/shm").is_dir():
            pytest.skip("this system has no /dev/shm")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            yield LocalStore(folder)


class TestLocalStoreWithoutDirectWrites(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        monkeypatch.setattr("ckptkit.storage.base.disk.O_DIRECT", 0)
        return LocalStore(tmp_path)


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()


class TestMemoryStoreInAFolder(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        private = MemoryStore()
        private.put("beside/me", b"x")
        private.put("folder-not", b"x")
        return MemoryStore(private.location / "folder")


class TestCountingStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return CountingStore(LocalStore(tmp_path))


class TestFailingStoreThatNeverFails(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return FailingStore(LocalStore(tmp_path), fail_at=10**9)


class TestCountingAFailingStoreInMemory(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return CountingStore(FailingStore(MemoryStore(), fail_at=10**9, after=True))


def test_stores_of_one_memory_name_show_the_same_objects() -> None:
    first = MemoryStore(Location.parse("memory://test-stores-shared"))
    first.put("run/step/a", b"x")
    second = MemoryStore(Location.parse("memory://test-stores-shared/run"))
    assert [entry.key for entry in second.list()] == ["step/a"]
    second.delete(["step/a"])
    assert first.list() == []


def test_private_memory_stores_are_apart() -> None:
    first, second = MemoryStore(), MemoryStore()
    first.put("a", b"x")
    assert second.list() == []
    assert MemoryStore(first.location).read("a") == b"x"
