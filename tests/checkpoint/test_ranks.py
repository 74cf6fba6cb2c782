"""Ranks that meet: all of them do, or all learn why not, whatever carries what they say."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from ckptkit import FileBarrier, Ranks, ThreadBarrier
from ckptkit.checkpoint.ranks import OneRank, failing_together
from ckptkit.errors import CkptkitError, PeerError, StorageError, UnsupportedTypeError, UsageError
from ckptkit.live.state.ranks import StoreRanks, World

Make = Callable[[int, float], Sequence[Ranks]]


@pytest.fixture(params=["threads", "files", "store"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes the barriers of some ranks."""
    if request.param == "threads":
        return ThreadBarrier.group
    if request.param == "store":
        store = HashStore()
        return lambda ranks, timeout: [
            StoreRanks(World(rank, ranks, store), "save", timeout) for rank in range(ranks)
        ]
    return lambda ranks, timeout: [FileBarrier(tmp_path, r, ranks, timeout) for r in range(ranks)]


def at_once(
    barriers: Sequence[Ranks], action: Callable[[Ranks], object]
) -> tuple[list[object], list[Exception | None]]:
    """What an action returns or raises on each rank, all at the same time."""
    results: list[object] = [None] * len(barriers)
    errors: list[Exception | None] = [None] * len(barriers)

    def run(number: int) -> None:
        try:
            results[number] = action(barriers[number])
        except CkptkitError as error:
            errors[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(barriers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, errors


def wait_or_leave(barrier: Ranks) -> None:
    """As a writer does: the others hear from rank 0 alone that it is over."""
    try:
        barrier.wait()
    except PeerError as error:
        barrier.leave(error.what)
        raise


def test_what_rank_0_shares_reaches_all_in_order(make: Make) -> None:
    def talk(barrier: Ranks) -> list[str]:
        heard: list[str] = []
        for _ in range(20):
            heard.append(barrier.share(lambda: f"{len(heard)} of {barrier.rank}"))
            barrier.wait()
        return heard

    results, errors = at_once(make(4, 20), talk)
    assert errors == [None] * 4
    assert results == [[f"{number} of 0" for number in range(20)]] * 4


SAID = [None, True, -(2**70), 1.5, "a b\nc", b"\0+-", (1, [2]), {"x": {3: ()}}]


def test_what_all_say_reaches_rank_0_as_it_was_said(make: Make) -> None:
    def talk(barrier: Ranks) -> object:
        heard = barrier.collect([barrier.rank, SAID])
        barrier.wait()
        return heard, barrier.agree(barrier.rank, sum), barrier.share(lambda: SAID)

    results, errors = at_once(make(3, 20), talk)
    assert errors == [None] * 3
    heard = [[rank, SAID] for rank in range(3)]
    assert results == [(heard, 3, SAID), ([], 3, SAID), ([], 3, SAID)]


def test_what_is_no_plain_value_is_refused(make: Make) -> None:
    (alone,) = make(1, 20)
    with pytest.raises(UnsupportedTypeError):
        alone.share(lambda: {1, 2})
    with pytest.raises(UnsupportedTypeError):
        alone.collect(object())


def test_nobody_passes_before_all_are_there(make: Make) -> None:
    arrived = []

    def meet(barrier: Ranks) -> int:
        arrived.append(barrier.rank)
        barrier.wait()
        return len(arrived)

    assert at_once(make(3, 20), meet)[0] == [3, 3, 3]


@pytest.mark.parametrize("leaving", [0, 1, 2])
def test_a_rank_that_leaves_says_why_to_all(make: Make, leaving: int) -> None:
    def meet(barrier: Ranks) -> None:
        if barrier.rank == leaving:
            barrier.leave("the disk is full")
        else:
            wait_or_leave(barrier)

    errors = at_once(make(3, 20), meet)[1]
    assert errors[leaving] is None
    assert all("the disk is full" in str(e) for rank, e in enumerate(errors) if rank != leaving)


def test_a_rank_that_left_in_an_earlier_round_is_not_waited_for(make: Make) -> None:
    def meet(barrier: Ranks) -> None:
        barrier.wait()
        if barrier.rank == 1:
            barrier.leave("gone")
            return
        barrier.share(lambda: "anything")
        wait_or_leave(barrier)

    errors = at_once(make(3, 20), meet)[1]
    assert "gone" in str(errors[0])
    assert "gone" in str(errors[2])


@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_of_one_rank_is_told_whole_to_all(make: Make, failing: int) -> None:
    def work(barrier: Ranks) -> None:
        with failing_together(barrier):
            if barrier.rank == failing:
                raise StorageError("no room", where="s3://a/b", value=7, hint="free some")
            barrier.wait()

    for rank, error in enumerate(at_once(make(3, 20), work)[1]):
        assert isinstance(error, StorageError)
        assert (error.where, error.value, error.hint) == ("s3://a/b", "7", "free some")
        because = f"there is no new step, because of rank {failing}: StorageError: no room"
        assert error.what == ("no room" if rank == failing else because)


def test_what_is_no_unicode_is_told_too(make: Make) -> None:
    def work(barrier: Ranks) -> None:
        with failing_together(barrier):
            if barrier.rank == 1:
                raise StorageError("no room", where=os.fsdecode(b"/caf\xe9"))
            barrier.wait()

    first, second = at_once(make(2, 20), work)[1]
    assert isinstance(first, StorageError)
    assert first.where == r"/caf\udce9"
    assert str(second) == os.fsdecode(b"/caf\xe9: no room")


def test_who_has_left_says_nothing_that_others_take_for_an_answer(make: Make) -> None:
    ranks = make(2, 0.1)
    ranks[0].leave("the disk is full")
    for call in (ranks[0].wait, lambda: ranks[0].share(str), lambda: ranks[0].collect(1)):
        with pytest.raises(PeerError, match="the disk is full"):
            call()
    with pytest.raises(PeerError, match="the disk is full"):
        ranks[1].share(str)


def test_a_rank_that_does_not_come_is_an_error_with_a_hint(make: Make) -> None:
    errors = at_once(make(3, 0.1)[:2], lambda barrier: barrier.wait())[1]
    for error in errors:
        assert isinstance(error, PeerError)
        assert "0.1 s" in str(error)
        assert "look at the log of the rank that is missing" in str(error)


def test_files_do_not_pile_up(tmp_path: Path) -> None:
    def meet(barrier: Ranks) -> None:
        for _ in range(30):
            barrier.wait()

    at_once([FileBarrier(tmp_path, rank, 3, 20) for rank in range(3)], meet)
    assert len(list(tmp_path.iterdir())) < 3 * 4


@pytest.mark.parametrize(("rank", "ranks"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_that_does_not_exist_is_refused(tmp_path: Path, rank: int, ranks: int) -> None:
    with pytest.raises(UsageError):
        FileBarrier(tmp_path, rank, ranks)


def test_a_folder_that_cannot_be_made_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CkptkitError, match="file"):
        FileBarrier(tmp_path / "file", 0, 2)


def test_one_rank_waits_for_nobody() -> None:
    barrier = OneRank()
    barrier.wait()
    assert str(barrier.leave("whatever")) == "rank 0: whatever"
    assert barrier.share(lambda: "a") == "a"
    assert (barrier.rank, barrier.world_size) == (0, 1)
