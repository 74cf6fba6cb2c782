"""Copying a committed step to another store: whole or not at all, and never twice."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import ckptkit
from ckptkit import Run, ThreadBarrier, Writer
from ckptkit.checkpoint.places import StepFolder
from ckptkit.checkpoint.ranks import OneRank
from ckptkit.checkpoint.read.packs import PackBytes, read_record
from ckptkit.checkpoint.run.mirror import (
    CopyOptions,
    UnsoundStepError,
    copy_step,
)
from ckptkit.errors import CkptkitError, CorruptionError, PeerError, StepExistsError, StorageError
from ckptkit.format.array_table import ArrayTables
from ckptkit.format.manifest import Manifest
from ckptkit.storage import LocalStore, MemoryStore, Sink, Store
from tests.checkpoint.saving import (
    Tensor,
    assert_holds,
    contents,
    flipped,
    memory_with,
    random_values,
    save,
    save_by,
    small_state,
)
from tests.checkpoint.watching import RecordingStore
from tests.storage.counting import CountingStore
from tests.storage.failing import FailingStore

T = TypeVar("T")

MANIFEST = "step-0000000001/manifest.msgpack"
STATE, OTHER = small_state(1), small_state(2)


class Remote(MemoryStore):
    """As an object store: what can be seen is complete."""

    abilities = replace(MemoryStore.abilities, claims_names=False)


@pytest.fixture
def local() -> MemoryStore:
    """A run whose step 1 is committed."""
    store = MemoryStore()
    save(store, STATE, strategy="fsdp:2")
    return store


def copied_to(source: Store, folder: Path) -> None:
    copy_step(source, LocalStore(folder), 1, OneRank())


class Overtaken(FailingStore):
    """Another copier comes and ends before the first pack is begun; then one operation fails."""

    def __init__(self, store: Store, fail_at: int, overtake: Callable[[], None]) -> None:
        super().__init__(store, fail_at=fail_at)
        self._overtake = overtake
        self.is_overtaken = False

    def attempt(self, operation: str, action: Callable[[], T]) -> T:
        if operation == "create" and not self.is_overtaken:
            self.is_overtaken = True
            self._overtake()
        return super().attempt(operation, action)


def copied_by(
    ranks: Sequence[tuple[Store, Store]], step: int = 1, options: CopyOptions | None = None
) -> list[int | BaseException]:
    """What copying gave on each rank, or raised; a rank is the stores that it sees."""
    found: list[int | BaseException] = [0] * len(ranks)

    def run(barrier: ThreadBarrier) -> None:
        try:
            copied = copy_step(*ranks[barrier.rank], step, barrier, options)
            found[barrier.rank] = copied.nbytes
        except BaseException as error:  # noqa: BLE001 — every way to fail is an outcome
            found[barrier.rank] = error

    barriers = ThreadBarrier.group(len(ranks), 20.0)
    threads = [threading.Thread(target=run, args=(barrier,)) for barrier in barriers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_copy_is_the_same_byte_for_byte_and_its_manifest_comes_last(
    local: MemoryStore, ranks: int
) -> None:
    remote = RecordingStore(MemoryStore())
    sent = copied_by([(local, remote)] * ranks)
    assert sum(n for n in sent if isinstance(n, int)) == sum(
        entry.size for entry in local.list() if entry.key.endswith(".zip")
    )
    assert contents(remote) == contents(local)
    assert "finish" not in remote.log[remote.log.index("put step-0000000001/manifest.msgpack") :]
    with ckptkit.open(remote) as step:
        assert_holds(step, STATE)


def test_a_step_that_is_there_is_not_sent_again(local: MemoryStore) -> None:
    remote = CountingStore(Remote())
    copied_by([(local, remote)] * 2)
    remote.reset()
    assert copied_by([(local, remote)] * 2) == [0, 0]
    assert remote.requests == 1  # the manifest


def test_a_copy_that_was_cut_off_anywhere_goes_on_where_it_ended(local: MemoryStore) -> None:
    """One operation after another fails, before or after it was done."""
    packs = {entry.key: entry.size for entry in local.list() if entry.key.endswith(".zip")}
    for after in (False, True):
        for number in range(1, 100):
            remote = Remote()
            failing = FailingStore(remote, fail_at=number, after=after)
            try:
                copy_step(local, failing, 1, OneRank())
            except StorageError:
                pass
            else:
                if failing.operations < number:
                    break
            committed = Run(remote).steps()
            assert committed in ([], [1])
            left = contents(remote)
            remote = Remote()  # what another process sees
            for key, data in left.items():
                remote.put(key, data)
            arrived = left.keys() & packs.keys()
            sent = copy_step(local, remote, 1, OneRank()).nbytes
            assert sent == sum(size for key, size in packs.items() if key not in arrived)
            assert contents(remote) == contents(local)
        else:
            pytest.fail("copying never came to an end")


def test_what_a_file_system_shows_may_be_incomplete_and_is_sent_again(local: MemoryStore) -> None:
    remote = MemoryStore()
    for entry in local.list():
        if entry.key.endswith(".zip"):
            remote.put(entry.key, bytes(entry.size))
    copy_step(local, remote, 1, OneRank())
    assert contents(remote) == contents(local)


def test_a_second_copier_never_takes_away_what_the_first_has_committed(
    local: MemoryStore, tmp_path: Path
) -> None:
    """It began before the first commits, and dies after any of its operations."""
    for number in range(1, 100):
        target = tmp_path / str(number)
        slow = Overtaken(LocalStore(target), number, partial(copied_to, local, target))
        with suppress(StorageError):
            copy_step(local, slow, 1, OneRank())
        if slow.is_overtaken:
            assert contents(LocalStore(target)) == contents(local)
            assert ckptkit.verify(target) == []
        if slow.operations < number:
            break
    else:
        pytest.fail("copying never came to an end")


@pytest.mark.parametrize("failing", [0, 1])
def test_where_one_rank_fails_all_raise_and_nothing_is_committed(
    local: MemoryStore, failing: int
) -> None:
    remote = Remote()
    broken = FailingStore(remote, fail_at=3 + failing)
    found = copied_by([(local, broken if rank == failing else remote) for rank in range(2)])
    assert isinstance(found[failing], StorageError)
    assert isinstance(found[1 - failing], PeerError)
    assert Run(remote).steps() == []
    copied_by([(local, remote)] * 2)
    assert contents(remote) == contents(local)


def test_damage_is_not_passed_on() -> None:
    local, values = MemoryStore(), random_values((64, 64))
    save(local, {"x": Tensor(values)})
    damaged = flipped(local, values.tobytes()[:64])
    remote = Remote()
    with pytest.raises(CorruptionError, match="the step was not copied"):
        copy_step(damaged, remote, 1, OneRank())
    assert contents(remote) == {}


def sampled(size: int) -> list[int]:
    """Some places of a pack, and all of its end."""
    return [*range(0, size - 40, 61), *range(size - 40, size)]


@pytest.mark.parametrize("pack", ["rank-00000.zip", "rank-00001.zip", "groups.zip"])
def test_no_byte_of_a_pack_may_differ_from_what_was_written(pack: str) -> None:
    """Headers, documents, records and directories are no chunks: `verify` looks at them too."""

    def fill(writer: Writer) -> None:
        placed = {"pp": f"stage({writer.rank})"}
        writer.add(f"stage{writer.rank}/w", np.arange(3), placements=placed)

    store = MemoryStore()
    save_by(store, fill, strategy="pp:2")
    whole = contents(store)
    (key,) = [key for key in whole if key.endswith(pack)]
    for place in sampled(len(whole[key])):
        damaged = bytearray(whole[key])
        damaged[place] ^= 1
        remote = Remote()
        with pytest.raises(CorruptionError, match="the step was not copied"):
            copy_step(memory_with({**whole, key: bytes(damaged)}), remote, 1, OneRank())
        assert Run(remote).steps() == []


def test_a_manifest_that_does_not_fit_its_packs_is_not_passed_on(local: MemoryStore) -> None:
    manifest = Run(local).open(1).manifest
    crc32 = manifest.crc32.copy()
    crc32[0] ^= 1
    local.put(MANIFEST, replace(manifest, crc32=crc32).to_bytes())
    assert ckptkit.verify(local) != []
    with pytest.raises(CorruptionError, match="the manifest says other things than the packs do"):
        copy_step(local, Remote(), 1, OneRank())


def test_damage_is_told_to_all_ranks_which_go_on_with_other_steps() -> None:
    local, remote = MemoryStore(), Remote()
    values = [random_values((64,), seed=step) for step in (1, 2)]
    for step, each in enumerate(values, 1):
        save(local, {"x": Tensor(each, {"fsdp": "shard(0)"})}, strategy="fsdp:2", step=step)
    damaged = flipped(local, values[0][32:].tobytes()[:16])
    said: list[str] = []

    def run(barrier: ThreadBarrier) -> None:
        try:
            copy_step(damaged, remote, 1, barrier)
        except UnsoundStepError as error:
            said.append(str(error))
        copy_step(damaged, remote, 2, barrier)

    barriers = ThreadBarrier.group(2, 20.0)
    threads = [threading.Thread(target=run, args=(barrier,)) for barrier in barriers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 2
    assert all("rank-00001.zip at byte" in each for each in said)
    assert Run(remote).steps() == [2]


def test_another_save_of_the_step_is_replaced_only_where_asked_for(local: MemoryStore) -> None:
    remote = Remote()
    save(remote, OTHER, strategy="fsdp:2")
    before = contents(remote)
    found = copied_by([(local, remote)] * 2)
    assert isinstance(found[0], StepExistsError)
    assert isinstance(found[1], PeerError)
    assert contents(remote) == before
    copied_by([(local, remote)] * 2, options=CopyOptions(overwrite=True))
    assert contents(remote) == contents(local)


def test_a_save_that_wins_the_step_meanwhile_is_left_alone(local: MemoryStore) -> None:
    remote = Remote()

    class Raced(RecordingStore):
        def put(
            self, key: str, data: bytes | bytearray | memoryview, *, exclusive: bool = False
        ) -> None:
            save(remote, OTHER, strategy="fsdp:2")
            super().put(key, data, exclusive=exclusive)

    with pytest.raises(StepExistsError):
        copy_step(local, Raced(remote), 1, OneRank())
    with ckptkit.open(remote) as step:
        assert_holds(step, OTHER)
    assert len(remote.list()) == 3


def test_ranks_that_see_different_saves_are_told(local: MemoryStore) -> None:
    other, remote = MemoryStore(), Remote()
    save(other, OTHER, strategy="fsdp:2")
    found = copied_by([(local, remote), (other, remote)])
    assert all(isinstance(each, CkptkitError) for each in found)
    assert "another save of this step" in str(found[1])


def test_progress_adds_up_and_can_stop_a_copy(local: MemoryStore) -> None:
    done: list[int] = []
    copy_step(local, Remote(), 1, OneRank(), CopyOptions(progress=done.append))
    assert sum(done) == sum(e.size for e in local.list() if e.key.endswith(".zip"))

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    remote = Remote()
    with pytest.raises(KeyboardInterrupt):
        copy_step(local, remote, 1, OneRank(), CopyOptions(progress=stop))
    assert contents(remote) == {}


@pytest.mark.parametrize("nbytes", [1, 100, 1000, 1 << 20])
def test_windows_cover_a_pack_and_hold_whole_entries(local: MemoryStore, nbytes: int) -> None:
    for entry in [entry for entry in local.list() if entry.key.endswith(".zip")]:
        folder, _, name = entry.key.rpartition("/")
        step, _, save_id = folder.split("/")
        of_step, tables = StepFolder(local, step), ArrayTables()
        read_record(of_step, save_id, 0, tables)
        found = read_record(of_step, save_id, int(name[:-4].partition("-")[2]), tables)
        windows = list(PackBytes.of_rank(found, name).windows(nbytes))
        assert [window.start for window in windows[1:]] == [w.start + w.size for w in windows[:-1]]
        assert windows[-1].start + windows[-1].size == entry.size
        for window in [w for w in windows if w.entries]:
            last, _ = window.entries[-1]
            assert last.offset + last.length == window.start + window.size
        assert all(w.size <= nbytes or len(w.entries) == 1 for w in windows)


def manifests() -> int:
    return sum(type(found) is Manifest for found in gc.get_objects())


def test_one_manifest_is_in_memory_while_packs_are_sent(
    local: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, before, meanwhile = MemoryStore(), manifests(), list[int]()
    create = target.create

    def counted(*args: Any, **options: Any) -> Sink:
        meanwhile.append(manifests())
        return create(*args, **options)

    monkeypatch.setattr(target, "create", counted)
    copy_step(local, target, 1, OneRank())
    assert max(meanwhile[:-1]) == before + 1  # the last is the manifest
