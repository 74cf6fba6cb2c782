"""What every store promises; a store joins by a subclass with a `store` fixture."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptkit.errors import (
    AlreadyExistsError,
    CkptkitError,
    CorruptionError,
    InvalidNameError,
    NotFoundError,
    StorageError,
    UsageError,
)
from ckptkit.storage import Store, Stored
from tests.storage.sink_contract import SinkContract, keys, write_object

BAD_KEYS = ["", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a\0b", ".tmp-x", "a/.tmp-/b"]


class StoreContract(SinkContract):
    """Put `store` to the test; needs a fixture of that name that gives an empty one."""

    def test_it_is_a_store_that_says_where_it_is_and_what_it_can(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert str(store.location)
        assert store.abilities.part_size >= 1

    def test_what_was_put_is_read_back(self, store: Store) -> None:
        for data in (b"abc", b"", bytearray(b"def"), memoryview(b"ghi")):
            store.put("a", data)
            assert store.read("a") == bytes(data)
            assert store.size("a") == len(data)

    def test_what_it_made_itself_is_no_link(self, store: Store) -> None:
        store.put("folder/a", b"x")
        assert store.links() == store.links("folder") == store.links("nothing") == {}

    def test_ranges_are_exact(self, store: Store) -> None:
        store.put("a", b"0123456789")
        assert store.read("a", 3) == b"3456789"
        assert store.read("a", 3, 4) == b"3456"
        assert store.read("a", 10) == store.read("a", 10, 0) == store.read("a", 4, 0) == b""

    @pytest.mark.parametrize("wrong", [(0, 11), (11, None), (11, 0), (5, 6), (0, 1 << 60)])
    def test_a_range_beyond_the_end_is_corruption(
        self, store: Store, wrong: tuple[int, int | None]
    ) -> None:
        store.put("some/key", b"0123456789")
        with pytest.raises(CorruptionError) as caught:
            store.read("some/key", *wrong)
        assert "key" in caught.value.where
        assert caught.value.hint

    @pytest.mark.parametrize("wrong", [(-1, None), (0, -1), (-5, 5)])
    def test_a_negative_range_is_misuse(self, store: Store, wrong: tuple[int, int | None]) -> None:
        store.put("a", b"0123456789")
        with pytest.raises(UsageError):
            store.read("a", *wrong)

    def test_what_is_not_there_is_not_found(self, store: Store) -> None:
        store.put("folder/a", b"x")
        reads: list[Callable[[str], object]] = [store.size, store.read, store.open]
        for read in reads:
            for key in ("b", "folder", "folder/b", "folder/a/b", "no/folder"):
                with pytest.raises(NotFoundError) as caught:
                    read(key)
                assert key in caught.value.where
                assert caught.value.hint

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_bad_keys_are_refused_everywhere(self, store: Store, key: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: store.size(key),
            lambda: store.read(key),
            lambda: store.open(key),
            lambda: store.create(key, [1]),
            lambda: store.put(key, b"x"),
            lambda: store.put(key, b"x", exclusive=True),
            lambda: store.delete([key]),
        ]
        for call in calls:
            with pytest.raises(InvalidNameError):
                call()
        assert store.list() == []

    @pytest.mark.parametrize("prefix", ["/", "..", "a/..", "a//", "//a"])
    def test_bad_prefixes_are_refused(self, store: Store, prefix: str) -> None:
        with pytest.raises(InvalidNameError):
            store.list(prefix)
        with pytest.raises(InvalidNameError):
            store.children(prefix)
        with pytest.raises(InvalidNameError):
            store.leftovers(prefix)

    @pytest.mark.parametrize("key", ["c/0/1", "layers.0.wq", "a b", "ü/é", "%2F", "-x", "x.tmp-y"])
    def test_ordinary_names_of_all_kinds_work(self, store: Store, key: str) -> None:
        store.put(key, b"x", exclusive=True)
        write_object(store, f"other/{key}", [b"y"])
        assert sorted([key, f"other/{key}"]) == keys(store)
        assert store.read(f"other/{key}") == b"y"

    def test_listings_read_prefixes_as_folders(self, store: Store) -> None:
        for key in ("step-1/a", "step-10/b", "step-1/data/c", "top", "step-1.x"):
            store.put(key, key.encode())
        assert store.children() == ["step-1", "step-1.x", "step-10", "top"]
        assert store.children("step-1") == store.children("step-1/") == ["a", "data"]
        assert store.children("top") == store.children("nothing/here") == []
        assert keys(store) == ["step-1.x", "step-1/a", "step-1/data/c", "step-10/b", "top"]
        assert keys(store, "step-1") == keys(store, "step-1/") == ["step-1/a", "step-1/data/c"]
        assert keys(store, "top") == keys(store, "step") == keys(store, "nothing/here") == []
        for prefix, there in (("", ["step-1.x", "top"]), ("step-1", ["step-1/a"]), ("top", [])):
            found = store.list(prefix, deep=False)
            assert [entry.key for entry in found] == there
            assert found == [entry for entry in store.list(prefix) if entry.key in there]

    def test_entries_know_size_and_time(self, store: Store) -> None:
        before = time.time()
        store.put("a/b", b"12345")
        (entry,) = store.list()
        assert entry == Stored("a/b", 5, entry.modified)
        assert before - 5 < entry.modified < time.time() + 5

    def test_put_replaces(self, store: Store) -> None:
        store.put("a", b"a long first value")
        store.put("a", b"short")
        assert store.read("a") == b"short"

    def test_an_exclusive_put_never_replaces(self, store: Store) -> None:
        store.put("a/b", b"first", exclusive=True)
        with pytest.raises(AlreadyExistsError) as caught:
            store.put("a/b", b"second", exclusive=True)
        assert "a/b" in caught.value.where
        assert caught.value.hint
        assert store.read("a/b") == b"first"

    def test_of_racing_exclusive_creators_one_wins(self, store: Store) -> None:
        store.put("first", b"x", exclusive=True)
        if not store.abilities.exclusive_create:
            pytest.skip("this store cannot tell racing creators apart, and says so")
        for attempt in range(5):
            start = threading.Barrier(16)

            def race(number: int, key: str, start: threading.Barrier = start) -> int | None:
                start.wait()
                try:
                    store.put(key, bytes([number]) * 1000, exclusive=True)
                except AlreadyExistsError:
                    return None
                return number

            key = f"runs/{attempt}/manifest"
            with ThreadPoolExecutor(16) as threads:
                winners = [n for n in threads.map(race, range(16), [key] * 16) if n is not None]
            assert len(winners) == 1
            assert store.read(key) == bytes(winners) * 1000
            assert store.children(f"runs/{attempt}") == ["manifest"]

    def test_a_source_fills_buffers_from_any_thread(self, store: Store) -> None:
        data = random.Random(3).randbytes(200_000)
        store.put("a", data)

        def check(number: int) -> bool:
            offset, buffer = number * 1999, bytearray(997)
            source.read_into(offset, memoryview(buffer))
            return bytes(buffer) == source.fetch(offset, 997) == data[offset : offset + 997]

        with store.open("a") as source, ThreadPoolExecutor(8) as threads:
            assert source.size == len(data)
            assert all(threads.map(check, range(100)))

    def test_a_source_fills_several_buffers_one_after_another(self, store: Store) -> None:
        data = random.Random(5).randbytes(200_000)
        store.put("a", data)
        sizes = [0, 3, 70_000, 0, *([1] * 2000), 100_000, 0]  # more than one call of the system
        buffers = [bytearray(size) for size in sizes]
        with store.open("a") as source:
            source.read_into(7, *[memoryview(buffer) for buffer in buffers])
            assert b"".join(buffers) == data[7 : 7 + sum(sizes)]
            with pytest.raises(CorruptionError):
                source.read_into(200_000 - 5, memoryview(bytearray(4)), memoryview(bytearray(2)))

    def test_a_source_refuses_ranges_that_are_not_there(self, store: Store) -> None:
        store.put("a", b"0123456789")
        with store.open("a") as source:
            for offset, length in ((8, 3), (11, 0), (1 << 62, 1)):
                with pytest.raises(CorruptionError):
                    source.read_into(offset, memoryview(bytearray(length)))
                with pytest.raises(CorruptionError):
                    source.fetch(offset, length)
            with pytest.raises(UsageError):
                source.read_into(-1, memoryview(bytearray(1)))
            with pytest.raises(UsageError):
                source.fetch(-1, 1)
            source.read_into(10, memoryview(bytearray()))
            assert bytes(source.fetch(10, 0)) == b""
        source.close()

    def test_a_source_outlives_its_name(self, store: Store) -> None:
        if not store.abilities.open_survives_delete:
            pytest.skip("every read asks for the name again")
        store.put("a", b"old")
        with store.open("a") as source:
            store.put("a", b"new")
            store.delete(["a"])
            buffer = bytearray(3)
            source.read_into(0, memoryview(buffer))
            assert buffer == b"old"

    def test_delete_forgives_what_is_missing_and_removes_empty_folders(self, store: Store) -> None:
        for key in ("a/b/c", "a/b/d", "a/e", "f"):
            store.put(key, b"x")
        store.delete(["a/b/c", "nothing", "no/thing", "f/g", "a/b"])
        assert keys(store) == ["a/b/d", "a/e", "f"]
        store.delete(iter(["a/b/d"]))
        assert store.children("a") == ["e"]
        store.delete(["a/e", "f"])
        assert store.children() == []
        store.put("a/b/c", b"again")
        assert keys(store) == ["a/b/c"]

    def test_sync_takes_what_others_wrote_and_misses_what_is_not_there(self, store: Store) -> None:
        store.put("a/x", b"1")
        store.put("y", b"2")
        store.sync(["a/x", "y"])
        assert store.read("a/x") == b"1"
        with pytest.raises(NotFoundError):
            store.sync(["a/none"])

    def test_room_is_a_number_of_bytes_or_unknown(self, store: Store) -> None:
        room = store.room()
        assert room is None or room >= 0

    def test_what_ended_leaves_nothing_over(self, store: Store) -> None:
        store.put("a/b", b"x")
        store.put("a/c", b"x", exclusive=True)
        write_object(store, "a/d", [b"x"])
        with pytest.raises(AlreadyExistsError):
            store.put("a/c", b"y", exclusive=True)
        store.create("a/e", [1]).abort()
        assert store.leftovers() == store.leftovers("a") == store.leftovers("nothing/here") == []

    def test_only_delete_takes_the_keys_of_leftovers(self, store: Store) -> None:
        store.put("a/b", b"x")
        for key in (".tmp-0123456789abcdef", "a/.tmp-0123456789abcdef"):
            store.delete([key])
            with pytest.raises(InvalidNameError):
                store.read(key)
            with pytest.raises(InvalidNameError):
                store.put(key, b"x")
        with pytest.raises(InvalidNameError):
            store.delete(["../.tmp-0123456789abcdef"])
        assert keys(store) == ["a/b"]

    def test_a_name_is_an_object_or_a_folder(self, store: Store) -> None:
        if not store.abilities.has_folders:
            pytest.skip("there are no folders")
        store.put("object", b"x")
        store.put("folder/object", b"x")
        calls: list[Callable[[], object]] = [
            lambda: store.put("object/below", b"y"),
            lambda: store.put("object/below", b"y", exclusive=True),
            lambda: store.create("object/below", [1]),
            lambda: store.put("folder", b"y"),
            lambda: store.put("folder", b"y", exclusive=True),
            lambda: store.create("folder", [1]),
        ]
        for call in calls:
            with pytest.raises((StorageError, AlreadyExistsError)) as caught:
                call()
            assert isinstance(caught.value, CkptkitError)
        assert keys(store) == ["folder/object", "object"]
