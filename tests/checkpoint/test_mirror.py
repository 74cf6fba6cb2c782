"""A run in two places: what is copied when, what may go, and which step is loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest

import ckptkit
from ckptkit import Run, ThreadBarrier
from ckptkit.checkpoint.ranks import OneRank
from ckptkit.checkpoint.run.mirror import LOCAL, REMOTE, CopyOptions, Mirror
from ckptkit.checkpoint.run.run import Retention
from ckptkit.errors import (
    AlreadyExistsError,
    CkptkitError,
    StepExistsError,
    StorageError,
    UsageError,
)
from ckptkit.storage import MemoryStore, Sink, Store, Stored
from tests.checkpoint.saving import (
    Tensor,
    assert_holds,
    contents,
    flipped,
    random_values,
    save,
)
from tests.checkpoint.watching import RecordingStore
from tests.format.samples import plain, sealed
from tests.storage.failing import FailingStore

T = TypeVar("T")


class Remote(MemoryStore):
    """As an object store: what can be seen is complete."""

    abilities = replace(MemoryStore.abilities, claims_names=False)


class Unreachable(FailingStore):
    """Fails at everything, as long as it is cut off."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, fail_at=1)
        self.is_cut_off = True

    def attempt(self, operation: str, action: Callable[[], T]) -> T:
        """Do it, or fail."""
        if self.is_cut_off:
            raise StorageError(f"no way to {operation}")
        return action()


def state(seed: int) -> dict[str, Tensor]:
    return {"x": Tensor(random_values((5, 3), seed=seed))}


@dataclass
class Two:
    """The two places of a run."""

    local: Store = field(default_factory=MemoryStore)
    remote: Store = field(default_factory=Remote)

    def mirror(self, overwrite: bool = False, **retention: Any) -> Mirror:
        """What a job that begins now has."""
        options = CopyOptions(overwrite=overwrite)
        return Mirror(self.local, self.remote, Retention(**retention), options)

    def save(self, *steps: int, mirror: Mirror | None = None, seed: int = 0) -> None:
        """Save steps locally; with a mirror a round follows each."""
        for step in steps:
            save(self.local, state(step + seed), step=step, overwrite=True)
            if mirror is not None:
                mirror.copy_pending(OneRank(), up_to=step)

    @property
    def steps(self) -> tuple[list[int], list[int]]:
        """The committed steps of both places."""
        return Run(self.local).steps(), Run(self.remote).steps()


def test_a_new_job_copies_what_an_earlier_one_left() -> None:
    two = Two()
    two.save(1, 2, 3)
    two.mirror().copy_pending(OneRank())
    assert two.steps == ([1, 2, 3], [1, 2, 3])
    assert contents(two.local) == contents(two.remote)


def test_retention_is_for_both_places_and_waits_for_the_copy() -> None:
    two = Two()
    mirror = two.mirror(keep_last=2)
    two.save(1, 2, 3, 4, mirror=mirror)
    assert two.steps == ([3, 4], [3, 4])
    two.save(5, mirror=two.mirror(keep_last=2, keep_every=3))
    assert two.steps == ([3, 4, 5], [3, 4, 5])


def test_a_step_that_is_named_stays_in_both_places_or_where_all_stay() -> None:
    two = Two()
    two.save(1, 2, 3, 4, mirror=two.mirror(keep_last=1, keep=(frozenset({2}),)))
    assert two.steps == ([2, 4], [2, 4])
    few = Two()
    few.save(1, 2, 3, mirror=few.mirror(keep_last=1, local_keep_last=1, keep=(frozenset({2}),)))
    assert few.steps == ([3], [2, 3])


def test_few_steps_may_stay_here_where_all_stay_there() -> None:
    two = Two()
    two.save(1, 2, 3, 4, mirror=two.mirror(local_keep_last=1))
    assert two.steps == ([4], [1, 2, 3, 4])


def cut_off(two: Two) -> Unreachable:
    remote = two.remote = Unreachable(two.remote)
    return remote


def test_no_step_goes_before_it_has_been_copied_or_newer_ones_have() -> None:
    two = Two()
    mirror = two.mirror(keep_last=1)
    two.save(1, mirror=mirror)
    remote = cut_off(two)
    mirror = two.mirror(keep_last=1)
    for step in (2, 3, 4):
        with pytest.raises(StorageError, match="no way to"):
            two.save(step, mirror=mirror)
    assert Run(two.local).steps() == [1, 2, 3, 4]
    remote.is_cut_off = False
    two.save(5, mirror=mirror)
    assert two.steps == ([5], [5])


def test_a_local_step_that_cannot_be_copied_stays_while_others_are_copied_and_go() -> None:
    two = Two()
    two.save(1, 2)
    two.local = flipped(two.local, state(2)["x"].whole.tobytes()[:16])
    mirror = two.mirror(local_keep_last=1)
    two.save(3, 4, 5, mirror=mirror)
    assert two.steps == ([2, 5], [1, 3, 4, 5])
    Run(two.local).delete([2])
    two.save(6, mirror=mirror)
    assert two.steps == ([6], [1, 3, 4, 5, 6])


def test_retention_goes_on_there_while_a_step_cannot_be_copied() -> None:
    two = Two()
    two.save(1, 2, mirror=two.mirror())
    two.save(3)
    two.local = flipped(two.local, state(3)["x"].whole.tobytes()[:16])
    mirror = two.mirror(keep_last=1, keep_every=3)
    two.save(4, 5, mirror=mirror)
    assert two.steps == ([3, 5], [5])


def test_packs_that_arrived_long_before_copying_failed_are_not_sent_again() -> None:
    created: list[str] = []

    class Slow(Remote):
        def create(self, key: str, *arguments: Any, **options: Any) -> Any:
            created.append(key.rpartition("/")[2])
            if created == ["rank-00000.zip", "rank-00001.zip"]:
                raise StorageError("the network is gone")
            return super().create(key, *arguments, **options)

        def list(self, prefix: str = "", *, deep: bool = True) -> list[Stored]:
            return [replace(each, modified=0.0) for each in super().list(prefix, deep=deep)]

    two = Two(remote=Slow())
    cut = {"x": Tensor(random_values((8, 4)), {"fsdp": "shard(0)"})}
    save(two.local, cut, strategy="fsdp:2", step=1)
    mirror = two.mirror(keep_last=1)
    with pytest.raises(StorageError, match="the network is gone"):
        mirror.copy_pending(OneRank(), up_to=1)
    mirror.copy_pending(OneRank(), up_to=1)
    assert two.steps == ([1], [1])
    assert [created.count(f"rank-0000{rank}.zip") for rank in (0, 1)] == [1, 2]


def test_damage_is_said_once_and_newer_steps_do_not_wait_behind_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    two = Two()
    two.save(1, 2, 3)
    two.local = flipped(two.local, state(2)["x"].whole.tobytes()[:16])
    two.local.put("step-0000000001/manifest.msgpack", b"not a manifest")
    mirror = two.mirror()
    mirror.copy_pending(OneRank())
    assert two.steps == ([1, 2, 3], [3])
    two.save(4, mirror=mirror)
    assert two.steps == ([1, 2, 3, 4], [3, 4])
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 2
    first, second = (record.getMessage() for record in caplog.records)
    assert "step-0000000001 cannot be copied" in first
    assert "`ckpt rebuild STEP`" in first
    assert "step-0000000002 cannot be copied" in second
    assert "`ckpt verify`" in second
    two.save(2, mirror=mirror)
    assert two.steps == ([1, 2, 3, 4], [2, 3, 4])


def test_a_step_that_goes_while_it_is_copied_is_not_called_damaged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    two = Two()
    mirror = two.mirror()
    two.save(1, 2)

    class Overtaking(RecordingStore):
        def create(self, key: str, extents: Sequence[int], **options: Any) -> Sink:
            if "step-0000000001" in key:
                two.save(1, seed=7)
            return super().create(key, extents, **options)

    mirror.remote = Overtaking(two.remote)
    mirror.copy_pending(OneRank())
    assert two.steps == ([1, 2], [2])
    mirror.remote = two.remote
    mirror.copy_pending(OneRank())
    with Run(two.remote).open(1) as step:
        assert_holds(step, state(8))
    assert caplog.records == []


def test_a_step_that_is_saved_anew_while_it_is_copied_is_copied_again() -> None:
    two = Two()
    mirror = two.mirror(overwrite=True)
    two.save(1)

    class Overwritten(RecordingStore):
        def put(
            self, key: str, data: bytes | bytearray | memoryview, *, exclusive: bool = False
        ) -> None:
            super().put(key, data, exclusive=exclusive)
            two.save(1, seed=7)

    mirror.remote = Overwritten(two.remote)
    mirror.copy_pending(OneRank())
    with ckptkit.open(two.remote) as step:
        assert_holds(step, state(1))
    mirror.remote = two.remote
    mirror.copy_pending(OneRank())
    assert contents(two.local) == contents(two.remote)
    with ckptkit.open(two.remote) as step:
        assert_holds(step, state(8))


def test_what_the_run_no_longer_keeps_is_not_copied() -> None:
    two = Two()
    two.save(1, 2, 3)
    two.mirror(keep_last=1).copy_pending(OneRank())
    assert two.steps == ([1, 2, 3], [3])


def test_steps_above_are_of_a_future_that_was_given_up_and_are_left_alone() -> None:
    two = Two()
    mirror = two.mirror(keep_last=1)
    two.save(8, 9, mirror=two.mirror())
    two.save(1, 2, mirror=mirror)
    assert two.steps == ([2, 8, 9], [2, 8, 9])


def test_a_step_that_was_deleted_there_is_not_copied_again() -> None:
    two = Two()
    mirror = two.mirror()
    two.save(1, 2, mirror=mirror)
    Run(two.remote).delete([1])
    two.save(3, mirror=mirror)
    assert two.steps == ([1, 2, 3], [2, 3])


def test_a_step_saved_anew_replaces_its_copy_only_where_asked_for() -> None:
    two = Two()
    two.save(1, mirror=two.mirror())
    two.save(1, seed=7)
    with pytest.raises(StepExistsError, match="another save of this step"):
        two.mirror().copy_pending(OneRank())
    with ckptkit.open(two.remote) as step:
        assert_holds(step, state(1))
    two.mirror(overwrite=True).copy_pending(OneRank())
    with ckptkit.open(two.remote) as step:
        assert_holds(step, state(8))


@pytest.mark.parametrize("newer", [True, False], ids=["of a newer version", "empty"])
def test_nothing_is_sent_where_a_manifest_is_in_the_way(newer: bool) -> None:
    two = Two()
    save(two.remote, state(2), step=1)
    data = two.remote.read("step-0000000001/manifest.msgpack")
    data = sealed(plain(data) | {"version": 2}) if newer else b""
    two.remote.put("step-0000000001/manifest.msgpack", data)
    before = contents(two.remote)
    two.save(1)
    with pytest.raises(AlreadyExistsError, match="is committed already" if newer else "is empty"):
        two.mirror().copy_pending(OneRank())
    assert contents(two.remote) == before


def test_overwriting_never_brings_back_an_older_save_over_a_later_one() -> None:
    two = Two()
    save(two.local, state(1), step=1)
    save(two.remote, state(2), step=1)
    save(two.local, state(3), step=2)
    mirror = two.mirror(overwrite=True)
    mirror.copy_pending(OneRank())
    for step, seed in ((1, 2), (2, 3)):
        with Run(two.remote).open(step) as found:
            assert_holds(found, state(seed))
    assert mirror.candidates(1, fallback=False) == [(1, REMOTE)]


def test_a_job_that_dies_anywhere_in_a_round_leaves_all_it_had_and_the_next_one_finishes() -> None:
    for number in range(1, 200):
        two = Two()
        two.save(1, mirror=two.mirror())
        two.save(2)
        whole = two.remote
        failing = two.remote = FailingStore(whole, fail_at=number)
        mirror = two.mirror(keep_last=1)
        try:
            mirror.copy_pending(OneRank(), up_to=2)
        except StorageError:
            pass
        else:
            assert number > 5
            break
        assert 2 in Run(two.local).steps()
        assert Run(whole).steps() == [2] or 1 in {*two.steps[0], *Run(whole).steps()}
        assert failing.operations >= number
        two.remote = Remote()
        for key, data in contents(whole).items():
            two.remote.put(key, data)
        two.mirror(keep_last=1).copy_pending(OneRank(), up_to=2)
        assert two.steps == ([2], [2])
        assert ckptkit.verify(two.remote) == []
    else:
        pytest.fail("a round never came to an end")


@pytest.mark.parametrize(
    ("here", "there", "found"),
    [
        ([], [], []),
        ([1, 2], [], [(2, LOCAL), (1, LOCAL)]),
        ([], [1, 2], [(2, REMOTE), (1, REMOTE)]),
        ([1, 2], [1, 2, 3], [(3, REMOTE), (2, LOCAL), (2, REMOTE), (1, LOCAL), (1, REMOTE)]),
        ([2, 3], [1, 2], [(3, LOCAL), (2, LOCAL), (2, REMOTE), (1, REMOTE)]),
    ],
)
def test_the_newest_step_of_either_place_comes_first(
    here: Sequence[int], there: Sequence[int], found: list[tuple[int, str]]
) -> None:
    two = Two()
    for number in {*here, *there}:
        two.save(number)
    two.mirror().copy_pending(OneRank())
    Run(two.local).delete(set(there) - set(here))
    Run(two.remote).delete(set(here) - set(there))
    assert two.mirror().candidates(None, fallback=True) == found
    assert two.mirror().candidates(None, fallback=False) == [
        each for each in found if each[0] == found[0][0]
    ]


def test_of_two_saves_of_a_step_the_later_comes_first() -> None:
    two = Two()
    two.save(1, mirror=two.mirror())
    two.save(1, seed=7)
    assert two.mirror().candidates(1, fallback=True) == [(1, LOCAL), (1, REMOTE)]
    two.mirror(overwrite=True).copy_pending(OneRank())
    save(two.remote, state(3), overwrite=True)
    assert two.mirror().candidates(1, fallback=False) == [(1, REMOTE)]


def test_without_a_fallback_a_step_is_loaded_from_any_place_that_has_this_save_of_it() -> None:
    two = Two()
    two.save(1, 2, mirror=two.mirror())
    for _ in range(2):
        assert two.mirror().candidates(None, fallback=False) == [(2, LOCAL), (2, REMOTE)]
        assert two.mirror().candidates(1, fallback=False) == [(1, LOCAL), (1, REMOTE)]
        two.local.put("step-0000000002/manifest.msgpack", b"not a manifest")


def test_where_the_newest_step_is_unknown_only_a_fallback_goes_on() -> None:
    two = Two()
    two.save(1, mirror=two.mirror())
    cut_off(two)
    with pytest.raises(StorageError, match="fallback=True loads the newest step that is local"):
        two.mirror().candidates(None, fallback=False)
    assert two.mirror().candidates(None, fallback=True) == [(1, LOCAL)]
    two.local = MemoryStore()
    with pytest.raises(StorageError, match="no way to"):
        two.mirror().candidates(None, fallback=True)


def looked(stores: Sequence[Store], remote: Store) -> list[str]:
    """What each rank says of the local store that it sees."""
    found = [""] * len(stores)

    def look(barrier: ThreadBarrier) -> None:
        try:
            Mirror(stores[barrier.rank], remote, Retention()).look(barrier)
        except CkptkitError as error:
            barrier.leave(str(error))
            found[barrier.rank] = str(error)

    barriers = ThreadBarrier.group(len(stores), 20.0)
    threads = [threading.Thread(target=look, args=(barrier,)) for barrier in barriers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_folder_that_not_all_ranks_see_is_refused_before_anything_is_saved() -> None:
    local, other, remote = MemoryStore(), MemoryStore(), Remote()
    assert looked([local, local], remote) == ["", ""]
    first, second = looked([local, other], remote)
    assert "rank 1 does not see what rank 0 writes here" in first
    assert "`local` is one folder that all ranks see" in second
    assert [entry.key for entry in local.list()] == ["uploads-to.txt"]


@pytest.mark.parametrize("killed", [False, True])
def test_a_folder_serves_one_run_only(killed: bool) -> None:
    local, remote = MemoryStore(), Remote()
    if killed:  # as `put` leaves it where a file system has no hard links
        local.put("uploads-to.txt", b"")
    for _ in range(2):
        assert looked([local], remote) == [""]
    (problem,) = looked([local], Remote())
    assert f"the folder holds steps of the run {remote.location}" in problem
    with pytest.raises(UsageError, match="the local folder is the run itself"):
        Mirror(local, local, Retention())
