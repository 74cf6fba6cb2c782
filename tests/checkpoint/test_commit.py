"""Commit: a step exists whole or not at all, whoever fails, races or does not come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

import ckptkit
from ckptkit import Run, ThreadBarrier, Writer
from ckptkit.checkpoint.places import StepFolder, step_name
from ckptkit.checkpoint.write.damage import mark_replaceable, stamp
from ckptkit.errors import (
    CkptkitError,
    CorruptionError,
    FormatError,
    PeerError,
    StepExistsError,
    StorageError,
    UsageError,
    VersionError,
)
from ckptkit.storage import LocalStore, MemoryStore, Store
from tests.checkpoint.saving import (
    State,
    add,
    assert_holds,
    contents,
    files,
    outcomes,
    save,
    save_by,
    small_state,
)
from tests.checkpoint.watching import MeetingStore, RecordingStore, operations_of
from tests.storage.failing import FailingStore

T = TypeVar("T")
STATE, OTHER = small_state(1), small_state(2)


def nothing_but(store: Store, before: dict[str, bytes]) -> bool:
    return contents(store) == before


@pytest.fixture
def store() -> MemoryStore:
    """A run whose step 1 is committed."""
    store = MemoryStore()
    save(store, STATE, strategy="fsdp:2")
    return store


def test_a_step_is_its_packs_and_a_manifest_that_was_written_last() -> None:
    store = RecordingStore(MemoryStore())
    save(store, STATE, strategy="fsdp:2")
    manifest = store.log.index("put step-0000000001/manifest.msgpack")
    assert store.log.count("finish") == 2
    assert "finish" not in store.log[manifest:]
    names = [entry.key.rpartition("/")[2] for entry in store.list()]
    assert names == ["rank-00000.zip", "rank-00001.zip", "manifest.msgpack"]


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("error", [RuntimeError("out of luck"), KeyboardInterrupt()], ids=repr)
def test_a_rank_that_fails_before_it_writes_fails_all(
    store: MemoryStore, failing: int, error: BaseException
) -> None:
    before = contents(store)

    def fill(writer: Writer) -> None:
        for name, tensor in STATE.items():
            add(writer, name, tensor)
        if writer.rank == failing:
            _raise(error)

    errors = outcomes(store, fill, strategy="fsdp:3", step=2)
    assert errors[failing] is error
    others = [e for rank, e in enumerate(errors) if rank != failing]
    assert all(isinstance(e, PeerError) for e in others)
    assert all(f"rank {failing}" in str(e) and type(error).__name__ in str(e) for e in others)
    assert nothing_but(store, before)


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("error", [RuntimeError("out of luck"), KeyboardInterrupt()], ids=repr)
def test_a_rank_that_fails_while_it_writes_fails_all(
    store: MemoryStore, failing: int, error: BaseException
) -> None:
    before = contents(store)
    writing = threading.local()

    def progress(count: int) -> None:
        if getattr(writing, "rank", None) == failing:
            _raise(error)

    def fill(writer: Writer) -> None:
        writing.rank = writer.rank
        for name, tensor in STATE.items():
            add(writer, name, tensor)

    errors = outcomes(store, fill, strategy="fsdp:3", step=2, threads=1, progress=progress)
    assert errors[failing] is error
    assert all(isinstance(e, PeerError) for r, e in enumerate(errors) if r != failing)
    assert Run(store).steps() == [1]
    Run(store).prune(grace=0)
    assert nothing_but(store, before)


def test_a_rank_that_still_writes_when_another_fails_is_told_of_that_failure(
    tmp_path: Path,
) -> None:
    thread = threading.local()
    begun, cleaned_up = threading.Event(), threading.Event()

    class Slow(FailingStore):
        """Rank 2 fails once rank 1 has begun, which ends only when rank 0 has cleaned up."""

        def attempt(self, operation: str, action: Callable[[], T]) -> T:
            if operation == "finish" and thread.rank == 1:
                begun.set()
                cleaned_up.wait(1)
            if operation == "create" and thread.rank == 2:
                begun.wait(5)
                raise RuntimeError("out of luck")
            result = super().attempt(operation, action)
            if operation == "delete":
                cleaned_up.set()
            return result

    def fill(writer: Writer) -> None:
        thread.rank = writer.rank
        for name, tensor in STATE.items():
            add(writer, name, tensor)

    store = Slow(LocalStore(tmp_path), fail_at=1 << 60)
    errors = outcomes(store, fill, strategy="fsdp:3", threads=1)
    for error in errors[:2]:
        assert isinstance(error, PeerError)
        assert "out of luck" in str(error)
    Run(tmp_path).prune(grace=0)
    assert files(tmp_path) == {}


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_rank_that_never_comes_is_waited_for_no_longer_than_agreed(
    store: MemoryStore, missing: int
) -> None:
    before = contents(store)

    def fill(writer: Writer) -> None:
        for name, tensor in STATE.items():
            add(writer, name, tensor)

    errors = outcomes(store, fill, strategy="fsdp:3", step=2, absent=[missing], timeout=0.2)
    came = [error for rank, error in enumerate(errors) if rank != missing]
    assert all(isinstance(error, PeerError) for error in came)
    assert any("0.2 s" in str(error) for error in came)
    Run(store).prune(grace=0)
    assert nothing_but(store, before)


def test_a_writer_can_give_up(store: MemoryStore) -> None:
    before = contents(store)

    def fill(writer: Writer) -> None:
        add(writer, "model/w", STATE["model/w"])
        if writer.rank == 0:
            writer.abort("changed my mind")

    errors = outcomes(store, fill, strategy="fsdp:2", step=2)
    assert errors[0] is None
    assert "changed my mind" in str(errors[1])
    assert nothing_but(store, before)


def test_a_writer_serves_one_step() -> None:
    store = MemoryStore()
    writer = Writer(store, step=1)
    writer.add("w", np.zeros(3))
    writer.commit()
    actions: list[Callable[[], None]] = [
        writer.commit,
        lambda: writer.add("v", np.zeros(3)),
        lambda: writer.add_alias("v", "w"),
        lambda: writer.add_object("v", 1),
    ]
    for action in actions:
        with pytest.raises(UsageError):
            action()
    writer.abort()
    assert ckptkit.verify(store) == []


def test_many_ranks_need_a_barrier_that_fits() -> None:
    with pytest.raises(UsageError):
        Writer(MemoryStore(), step=1, strategy="fsdp:2")
    with pytest.raises(UsageError):
        Writer(MemoryStore(), step=1, strategy="fsdp:2", rank=2)
    first, _ = ThreadBarrier.group(2)
    with pytest.raises(UsageError):
        Writer(MemoryStore(), step=1, strategy="fsdp:2", rank=1, barrier=first)
    with pytest.raises(UsageError):
        Writer(MemoryStore(), step=1, strategy="fsdp:3", rank=0, barrier=first)


@pytest.mark.parametrize("kind", [LocalStore, MemoryStore])
def test_what_is_interrupted_when_its_pack_is_just_complete_leaves_nothing(
    kind: type[Store], tmp_path: Path
) -> None:
    store = LocalStore(tmp_path) if kind is LocalStore else MemoryStore()

    def interrupt(nbytes: int) -> None:
        assert nbytes
        # By now the pack has its name: it has one segment.
        assert len(store.list()) == 1
        raise KeyboardInterrupt

    writer = Writer(store, step=1, progress=interrupt)
    writer.add("model/w", np.arange(4))
    with pytest.raises(KeyboardInterrupt):
        writer.commit()
    assert not store.list()
    assert Run(store).steps() == []


def test_a_step_without_anything_in_it_is_a_step() -> None:
    store = MemoryStore()
    save_by(store, lambda writer: None, strategy="fsdp:2")
    assert ckptkit.verify(store) == []
    with ckptkit.open(store) as checkpoint:
        assert dict(checkpoint.arrays) == {}
        assert list(checkpoint.zarr.members()) == []


def test_a_committed_step_is_not_saved_again(store: MemoryStore) -> None:
    before = contents(store)
    with pytest.raises(StepExistsError) as caught:
        save(store, OTHER, strategy="fsdp:2")
    assert caught.value.where.endswith("step-0000000001")
    assert "overwrite" in caught.value.hint
    assert nothing_but(store, before)


def test_overwriting_leaves_the_new_step_alone(store: MemoryStore) -> None:
    old = set(contents(store))
    save(store, OTHER, strategy="fsdp:3", overwrite=True)
    assert set(contents(store)) & old == {"step-0000000001/manifest.msgpack"}
    assert ckptkit.verify(store) == []
    with ckptkit.open(store) as checkpoint:
        assert_holds(checkpoint, OTHER)
    assert len(contents(store)) == 4


def test_overwriting_what_is_not_there_saves_it() -> None:
    store = MemoryStore()
    save(store, STATE, strategy="fsdp:2", overwrite=True)
    assert ckptkit.verify(store) == []


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["memory", "local"])
def test_of_savers_that_race_for_a_step_exactly_one_wins(
    kind: str, overwrite: bool, tmp_path: Path
) -> None:
    inner: Store = MemoryStore() if kind == "memory" else LocalStore(tmp_path)
    store = MeetingStore(inner, "put", 3)
    states = [small_state(seed) for seed in range(3)]
    errors: list[BaseException | None] = [None] * 3

    def run(number: int) -> None:
        try:
            save(store, states[number], strategy="fsdp:2", overwrite=overwrite)
        except StepExistsError as error:
            errors[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ckptkit.verify(inner) == []
    with ckptkit.open(inner) as checkpoint:
        held = checkpoint.read("model/w").tobytes()
    (winner,) = [n for n in range(3) if states[n]["model/w"].whole.tobytes() == held]
    assert errors[winner] is None
    if not overwrite:
        assert errors.count(None) == 1
        assert len(contents(inner)) == 3


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_lost_answer_to_the_manifest_is_no_failure(overwrite: bool) -> None:
    def begin() -> MemoryStore:
        store = MemoryStore()
        if overwrite:
            save(store, STATE, strategy="fsdp:1")
        return store

    def action(store: Store) -> None:
        save(store, OTHER, strategy="fsdp:1", overwrite=overwrite)

    number = operations_of(begin(), action).index("put") + 1
    store = begin()
    action(FailingStore(store, fail_at=number, after=True))
    assert ckptkit.verify(store) == []
    with ckptkit.open(store) as checkpoint:
        assert_holds(checkpoint, OTHER)
    assert len(contents(store)) == 2


def test_a_refusal_that_cannot_be_told_from_success_deletes_nothing() -> None:
    # The first request succeeded and its answer was lost; the repeated one finds the manifest,
    # and what is read back to see whose it is arrives damaged.
    class Unlucky(FailingStore):
        def put(
            self, key: str, data: bytes | bytearray | memoryview, *, exclusive: bool = False
        ) -> None:
            super().put(key, data, exclusive=exclusive)
            super().put(key, data, exclusive=exclusive)

        def read_whole(self, key: str, most: int) -> bytes:
            data = super().read_whole(key, most)
            return data[:-1] + bytes([data[-1] ^ 1]) if key.endswith("manifest.msgpack") else data

    store = MemoryStore()
    with pytest.raises(CkptkitError):
        save(Unlucky(store, fail_at=1 << 60), STATE, strategy="fsdp:1")
    assert ckptkit.verify(store) == []


def test_a_manifest_that_was_not_written_is_a_failure(store: MemoryStore) -> None:
    def action(store: Store) -> None:
        save(store, OTHER, strategy="fsdp:1", step=2)

    number = operations_of(MemoryStore(), action).index("put") + 1
    with pytest.raises(StorageError, match="put"):
        action(FailingStore(store, fail_at=number))
    assert Run(store).steps() == [1]


def test_a_problem_of_freeing_old_data_does_not_undo_the_commit(store: MemoryStore) -> None:
    def action(store: Store) -> None:
        save(store, OTHER, strategy="fsdp:2", overwrite=True)

    copy = MemoryStore()
    save(copy, STATE, strategy="fsdp:2")
    number = operations_of(copy, action).index("delete") + 1
    action(FailingStore(store, fail_at=number))
    assert ckptkit.verify(store) == []
    with ckptkit.open(store) as checkpoint:
        assert_holds(checkpoint, OTHER)
    assert [removal.kind for removal in Run(store).prune(grace=0)] == ["orphan"]
    assert len(contents(store)) == 3


def assert_is(place: Store | Path, state: State) -> None:
    with ckptkit.open(place) as checkpoint:
        assert_holds(checkpoint, state)


def flip(store: MemoryStore, key: str, at: int = -200) -> None:
    data = bytearray(store.read(key, 0))
    data[at] ^= 1
    store.delete([key])
    store.put(key, bytes(data))


def test_a_damaged_step_that_was_gone_past_makes_way_once(store: MemoryStore) -> None:
    step, other = StepFolder(store, step_name(1)), StepFolder(store, step_name(0))
    mark_replaceable([(step, stamp(step), CorruptionError("a bit"))], other)
    save(store, OTHER, strategy="fsdp:2")
    assert_is(store, OTHER)
    with pytest.raises(StepExistsError):
        save(store, STATE, strategy="fsdp:2")


def test_a_manifest_that_cannot_be_read_makes_way(store: MemoryStore) -> None:
    step, other = StepFolder(store, step_name(1)), StepFolder(store, step_name(0))
    flip(store, step.key("manifest.msgpack"))
    mark_replaceable([(step, stamp(step), FormatError("cut short"))], other)
    save(store, OTHER, strategy="fsdp:2")
    assert_is(store, OTHER)


@pytest.mark.parametrize(
    "problem", [VersionError("newer"), FormatError("renamed"), PeerError("late")], ids=str
)
def test_a_step_whose_bytes_are_sound_never_makes_way(
    store: MemoryStore, problem: Exception
) -> None:
    step = StepFolder(store, step_name(1))
    mark_replaceable([(step, stamp(step), problem)], StepFolder(store, step_name(0)))
    before = contents(store)
    with pytest.raises(StepExistsError):
        save(store, OTHER, strategy="fsdp:2")
    assert nothing_but(store, before)


def test_what_another_job_saved_since_or_a_later_load_found_sound_stays(store: MemoryStore) -> None:
    step, other = StepFolder(store, step_name(1)), StepFolder(store, step_name(0))
    mark_replaceable([(step, stamp(step), CorruptionError("a bit"))], other)
    # By another process, which knows nothing of it.
    save(store, OTHER, strategy="fsdp:2", overwrite=True)
    with pytest.raises(StepExistsError):
        save(store, STATE, strategy="fsdp:2")
    mark_replaceable([(step, stamp(step), CorruptionError("a bit of the network's"))], other)
    mark_replaceable([], step)
    with pytest.raises(StepExistsError):
        save(store, STATE, strategy="fsdp:2")
    assert_is(store, OTHER)


def test_a_run_is_the_same_whatever_link_leads_to_it(tmp_path: Path) -> None:
    run, link = tmp_path / "run", tmp_path / "latest"
    save(LocalStore(run), STATE, strategy="fsdp:2")
    link.symlink_to(run)
    folders = [StepFolder(LocalStore(link), step_name(number)) for number in (1, 0)]
    mark_replaceable([(folders[0], stamp(folders[0]), CorruptionError("a bit"))], folders[1])
    save(LocalStore(run), OTHER, strategy="fsdp:2")
    assert_is(run, OTHER)


def test_a_committed_step_is_one_whatever_becomes_of_where_ranks_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = ThreadBarrier.share

    def full(self: ThreadBarrier, value: Callable[[], T]) -> T:
        found: T = share(self, value)
        if found == "committed":
            raise OSError(28, "No space left on device")
        return found

    monkeypatch.setattr(ThreadBarrier, "share", full)
    save(tmp_path, STATE, strategy="fsdp:2")
    assert_is(tmp_path, STATE)


def test_a_manifest_that_is_refused_leaves_no_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptkit.checkpoint.write.commit.MAX_DOCUMENT_BYTES", 100)
    with pytest.raises(FormatError, match="would have more than"):
        save(tmp_path, STATE, strategy="fsdp:2")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
