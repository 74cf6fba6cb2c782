"""The decorators: what is counted, and what fails when."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptkit.errors import NotFoundError, StorageError, UsageError
from ckptkit.storage import LocalStore, MemoryStore, Store
from tests.storage.counting import CountingStore
from tests.storage.failing import FailingStore


def do_everything(store: Store) -> None:
    """Twelve operations, each kind once."""
    store.put("a", b"12345")
    sink = store.create("b", [3])
    sink.write(0, memoryview(b"abc"))
    sink.finish()
    store.children()
    store.list()
    store.size("a")
    store.read("a", 1)
    with store.open("b") as source:
        source.read_into(1, memoryview(bytearray(2)))
    store.leftovers()
    store.delete(["a"])


KINDS = ["put", "create", "write", "finish", "children", "list"]
KINDS += ["size", "read", "open", "read_into", "leftovers", "delete"]


def test_operations_and_bytes_are_counted() -> None:
    store = CountingStore(MemoryStore())
    do_everything(store)
    assert store.operations == dict.fromkeys(KINDS, 1)
    assert (store.requests, store.bytes_written, store.bytes_read) == (12, 8, 6)
    store.reset()
    assert (store.requests, store.bytes_written, store.bytes_read) == (0, 0, 0)


def test_what_failed_is_not_counted() -> None:
    store = CountingStore(MemoryStore())
    with pytest.raises(NotFoundError):
        store.read("a")
    assert store.requests == 0


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("fail_at", range(1, 13))
def test_every_operation_can_be_made_to_fail_before_or_after(fail_at: int, after: bool) -> None:
    counting = CountingStore(MemoryStore())
    store = FailingStore(counting, fail_at=fail_at, after=after)
    with pytest.raises(StorageError) as caught:
        do_everything(store)
    assert caught.value.what.endswith(KINDS[fail_at - 1])
    assert counting.requests == fail_at - (not after)
    assert store.operations == fail_at


def test_only_the_chosen_operation_fails() -> None:
    store = FailingStore(MemoryStore(), fail_at=2)
    store.put("a", b"x")
    with pytest.raises(StorageError):
        store.put("a", b"y")
    store.put("b", b"z")
    assert (store.read("a"), store.read("b")) == (b"x", b"z")


@pytest.mark.parametrize(("after", "left"), [(False, b""), (True, b"abc")])
def test_a_part_that_is_filled_fails_before_or_after_it_is_written(
    after: bool, left: bytes, tmp_path: Path
) -> None:
    store = FailingStore(LocalStore(tmp_path), fail_at=2, after=after)
    sink = store.create("a", [3])
    with pytest.raises(StorageError, match="operation 2, write"), sink.filling(0) as memory:
        memory[:] = b"abc"
    assert LocalStore(tmp_path).read("a").rstrip(b"\0") == left


def test_a_deletion_can_fail_half_way() -> None:
    inner = MemoryStore()
    for key in ("a", "b", "c"):
        inner.put(key, b"x")
    with pytest.raises(StorageError):
        FailingStore(inner, fail_at=2).delete(["a", "b", "c"])
    assert inner.children() == ["b", "c"]


EXIT = """
import sys
from ckptkit.storage import LocalStore
from tests.storage.failing import FailingStore
store = FailingStore(LocalStore(sys.argv[1]), fail_at=2, how="exit", after=sys.argv[2] == "after")
store.put("a", b"x")
store.put("b", b"x")
"""


@pytest.mark.parametrize(("when", "left"), [("before", ["a"]), ("after", ["a", "b"])])
def test_the_process_can_be_made_to_end_on_the_spot(
    tmp_path: Path, when: str, left: list[str]
) -> None:
    command = [sys.executable, "-c", EXIT, str(tmp_path), when]
    assert subprocess.run(command, check=False).returncode == 17
    assert LocalStore(tmp_path).children() == left


@pytest.mark.parametrize(
    "make",
    [
        lambda: FailingStore(MemoryStore(), fail_at=0),
        lambda: FailingStore(MemoryStore(), fail_at=1, how="explode"),  # type: ignore[arg-type]
    ],
)
def test_failures_that_make_no_sense_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(UsageError):
        make()
