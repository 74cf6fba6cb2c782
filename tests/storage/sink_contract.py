"""What every sink promises: a part of the contract of stores."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptkit.errors import AlreadyExistsError, StorageError, UsageError
from ckptkit.storage import Store


def keys(store: Store, prefix: str = "") -> list[str]:
    return [entry.key for entry in store.list(prefix)]


def write_object(store: Store, key: str, parts: list[bytes]) -> None:
    sink = store.create(key, [len(part) for part in parts])
    for number, part in enumerate(parts):
        sink.write(number, memoryview(part))
    sink.finish()


class SinkContract:
    """Put the sinks of `store` to the test."""

    def test_a_sink_joins_its_parts_in_whatever_order_they_come(self, store: Store) -> None:
        rng = random.Random(1)
        parts = [rng.randbytes(rng.choice([0, 1, 100, 4096, 10_000])) for _ in range(40)]
        sink = store.create("data/x/pack", [len(part) for part in parts])
        for number in rng.sample(range(40), 40):
            sink.write(number, memoryview(parts[number]))
        sink.finish()
        assert store.read("data/x/pack") == b"".join(parts)
        assert keys(store) == ["data/x/pack"]

    def test_a_sink_takes_parts_from_many_threads(self, store: Store) -> None:
        rng = random.Random(2)
        parts = [rng.randbytes(rng.randrange(1, 30_000)) for _ in range(100)]
        sink = store.create("pack", [len(part) for part in parts])
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda n: sink.write(n, memoryview(parts[n])), range(100)))
        sink.finish()
        assert store.read("pack") == b"".join(parts)

    def test_a_sink_lends_memory_to_fill(self, store: Store) -> None:
        rng = random.Random(4)
        parts = [rng.randbytes(rng.choice([0, 1, 4096, 30_000])) for _ in range(60)]
        sink = store.create("pack", [len(part) for part in parts])

        def fill(number: int) -> None:
            if number % 3 == 0:
                sink.write(number, memoryview(parts[number]))
                return
            with sink.filling(number) as memory:
                assert memory.nbytes == len(parts[number])
                memory[:] = parts[number]

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(fill, rng.sample(range(60), 60)))
        sink.finish()
        assert store.read("pack") == b"".join(parts)

    def test_of_what_could_not_be_filled_nothing_is_left(self, store: Store) -> None:
        sink = store.create("a", [3, 3])
        sink.write(1, memoryview(b"def"))
        with pytest.raises(RuntimeError, match="unreadable"), sink.filling(0):
            raise RuntimeError("unreadable")
        with pytest.raises((UsageError, StorageError)):
            sink.finish()
        sink.abort()
        assert store.list() == []
        assert store.leftovers() == []

    def test_a_sink_refuses_to_fill_wrong_parts(self, store: Store) -> None:
        sink = store.create("a", [3, 3])
        sink.write(0, memoryview(b"abc"))
        for number in (0, 2, -1):
            with pytest.raises(UsageError), sink.filling(number) as memory:
                memory[:] = b"xyz"
        with sink.filling(1) as memory:
            memory[:] = b"def"
        sink.finish()
        with pytest.raises(UsageError), sink.filling(1) as memory:
            memory[:] = b"xyz"
        assert store.read("a") == b"abcdef"

    def test_a_sink_does_not_keep_the_buffer(self, store: Store) -> None:
        sink = store.create("a", [5, 5])
        buffer = bytearray(b"first")
        sink.write(0, memoryview(buffer))
        buffer[:] = b"xxxxx"
        sink.write(1, memoryview(b"after"))
        sink.finish()
        assert store.read("a") == b"firstafter"

    @pytest.mark.parametrize("extents", [[], [0], [0, 0]])
    def test_an_object_may_be_empty(self, store: Store, extents: list[int]) -> None:
        store.create("a", extents).finish()
        assert store.read("a") == b""

    def test_before_finish_an_object_is_invisible_or_incomplete(self, store: Store) -> None:
        sink = store.create("a", [3, 3])
        sink.write(1, memoryview(b"def"))
        if keys(store):
            assert store.read("a") != b"abcdef"
        sink.write(0, memoryview(b"abc"))
        sink.finish()
        assert store.read("a") == b"abcdef"

    def test_abort_leaves_nothing_and_may_be_repeated(self, store: Store) -> None:
        sink = store.create("deep/down/a", [3, 3])
        sink.write(0, memoryview(b"abc"))
        sink.abort()
        sink.abort()
        assert store.list() == []
        assert store.children() == []
        write_object(store, "deep/down/a", [b"again"])
        assert store.read("deep/down/a") == b"again"

    def test_abort_spares_what_others_wrote_nearby(self, store: Store) -> None:
        sink = store.create("data/a", [3])
        store.put("data/b", b"mine")
        sink.abort()
        assert keys(store) == ["data/b"]

    def test_abort_spares_what_others_write_under_the_same_name(self, store: Store) -> None:
        mine, other = (store.create("data/a", [], again=True) for _ in range(2))
        other.abort()
        mine.finish()
        assert keys(store) == ["data/a"]

    def test_abort_after_finish_changes_nothing(self, store: Store) -> None:
        sink = store.create("a", [3])
        sink.write(0, memoryview(b"abc"))
        sink.finish()
        sink.abort()
        assert store.read("a") == b"abc"

    def test_create_never_touches_what_is_there(self, store: Store) -> None:
        store.put("a", b"precious")
        with pytest.raises(AlreadyExistsError):
            store.create("a", [3])
        sink = store.create("b", [3])
        if store.abilities.claims_names:
            with pytest.raises(AlreadyExistsError):
                store.create("b", [3])
        sink.write(0, memoryview(b"abc"))
        sink.finish()
        assert store.read("a") == b"precious"
        assert store.read("b") == b"abc"

    def test_writers_of_the_same_bytes_take_nothing_from_each_other(self, store: Store) -> None:
        write_object(store, "folder/a", [b"abc"])
        sinks = [store.create("folder/a", [3], again=True) for _ in range(3)]
        for sink in sinks:
            assert keys(store) == ["folder/a"]
            assert store.read("folder/a") == b"abc"
            sink.write(0, memoryview(b"abc"))
        sinks[0].finish()
        sinks[1].abort()
        sinks[2].finish()
        assert store.read("folder/a") == b"abc"
        assert keys(store) == ["folder/a"]
        assert store.leftovers() == []

    def test_what_is_written_again_is_invisible_until_it_is_whole(self, store: Store) -> None:
        sink = store.create("folder/a", [3], again=True)
        assert keys(store) == []
        sink.write(0, memoryview(b"abc"))
        sink.finish()
        assert store.read("folder/a") == b"abc"

    def test_a_sink_refuses_wrong_parts(self, store: Store) -> None:
        sink = store.create("a", [3, 3])
        sink.write(0, memoryview(b"abc"))
        strided = memoryview(b"a-b-c-")[::2]
        wrong = [(0, memoryview(b"abc")), (1, memoryview(b"ab")), (1, memoryview(b"abcd"))]
        for number, data in [*wrong, (2, memoryview(b"")), (-1, memoryview(b"abc")), (1, strided)]:
            with pytest.raises(UsageError) as caught:
                sink.write(number, data)
            assert caught.value.hint
        with pytest.raises(UsageError, match="1 of 2 parts"):
            sink.finish()
        sink.write(1, memoryview(b"def"))
        sink.finish()
        for late in (sink.finish, lambda: sink.write(1, memoryview(b"def"))):
            with pytest.raises(UsageError):
                late()
        assert store.read("a") == b"abcdef"

    def test_negative_extents_are_refused(self, store: Store) -> None:
        with pytest.raises(UsageError):
            store.create("a", [3, -1])
        assert store.children() == []
