"""Ranks that are threads."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from ckptkit.errors import PeerError, UsageError
from ckptkit.parallel.ranks import current_communicator, init, run_in_memory
from ckptkit.parallel.ranks.communicator import Communicator
from ckptkit.parallel.ranks.messages import MemoryCarrier
from tests.parallel.ranks.contract import CONTRACT


@pytest.mark.parametrize("check", CONTRACT)
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_memory_keeps_the_contract(world_size: int, check: str) -> None:
    run_in_memory(CONTRACT[check], world_size=world_size, timeout=20)


def test_results_come_back_by_rank() -> None:
    assert run_in_memory(lambda comm, add: comm.rank + add, 10, world_size=3) == [10, 11, 12]


def test_the_error_of_a_rank_comes_out_and_ends_the_others_at_once() -> None:
    seen: dict[int, str] = {}

    def fail(comm: Communicator) -> None:
        if comm.rank == 2:
            raise ValueError("no luck")
        try:
            comm.barrier()
        except PeerError as error:
            seen[comm.rank] = str(error)
            raise

    with pytest.raises(ValueError, match="no luck") as caught:
        run_in_memory(fail, world_size=4)
    assert caught.value.__notes__ == ["on rank 2 of 4"]
    assert seen == dict.fromkeys((0, 1, 3), "barrier: rank 2 failed: ValueError: no luck")


def test_ranks_that_wait_for_each_other_in_vain_are_told_so() -> None:
    def deadlock(comm: Communicator) -> None:
        comm.recv((comm.rank + 1) % 3)

    with pytest.raises(PeerError, match="no rank can go on: rank 0 sent nothing with tag 0; rank"):
        run_in_memory(deadlock, world_size=3)


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    with pytest.raises(PeerError, match="no rank can go on: rank 1 did not come"):
        run_in_memory(lambda comm: comm.barrier() if comm.rank == 0 else None, world_size=2)


def test_a_late_rank_is_named_and_the_communicator_ends() -> None:
    free = threading.Event()

    def late(comm: Communicator) -> str:
        if comm.rank == 1:
            free.wait(10)
            return "late"
        with pytest.raises(PeerError, match=r"barrier: rank 1 did not come within 0\.1 s"):
            comm.barrier()
        with pytest.raises(PeerError, match="ended in an earlier call: rank 1 did not come"):
            comm.all_gather(1)
        free.set()
        return "alone"

    transport_timeout = 0.1

    def quick(comm: Communicator) -> str:
        comm._carrier.timeout = transport_timeout
        return late(comm)

    assert run_in_memory(quick, world_size=2) == ["alone", "late"]


def test_the_whole_is_bounded_in_time() -> None:
    with pytest.raises(PeerError, match=r"rank 1 still ran after 0\.1 s"):
        run_in_memory(lambda comm: time.sleep(0.5 * comm.rank), world_size=2, timeout=0.1)


def test_every_thread_has_its_own_current_communicator() -> None:
    def mine(comm: Communicator) -> bool:
        return current_communicator() is comm and init() is comm and init("memory") is comm

    assert run_in_memory(mine, world_size=3) == [True] * 3
    with pytest.raises(UsageError, match="no communicator yet"):
        current_communicator()


def test_a_sum_is_the_same_every_time() -> None:
    def add(comm: Communicator) -> float:
        number = torch.tensor([1e16, 1.0, -1e16, 3.0][comm.rank], dtype=torch.float64)
        return float(comm.all_reduce(number))

    assert {tuple(run_in_memory(add, world_size=4)) for _ in range(20)} == {(3.0,) * 4}


class Untagged(MemoryCarrier):
    """Knows no tags, as nccl."""

    def send(self, data: torch.Tensor, dst: int, tag: int) -> None:
        """Send with none."""
        super().send(data, dst, 0)

    def recv(self, data: torch.Tensor, src: int, tag: int) -> None:
        """Receive whatever comes next."""
        super().recv(data, src, 0)


def test_a_message_of_another_tag_is_never_taken_for_one_of_this() -> None:
    def talk(comm: Communicator) -> None:
        found = comm._carrier
        assert isinstance(found, MemoryCarrier)
        untagged = Communicator(Untagged(found.hub, comm.rank, 2, timeout=10))
        if comm.rank == 0:
            for tag in (3, 7):
                untagged.send(torch.tensor(tag), 1, tag)
        else:
            with pytest.raises(PeerError, match=r"rank 0 has tag=3 .*\n.*nccl knows no tags"):
                untagged.recv(0, tag=7)
            assert int(untagged.recv(0, tag=7)) == 7

    run_in_memory(talk, world_size=2)


def test_a_closed_communicator_says_so() -> None:
    def close(comm: Communicator) -> None:
        with comm:
            comm.barrier()
        with pytest.raises(UsageError, match="barrier: the communicator is closed"):
            comm.barrier()

    run_in_memory(close, world_size=2)


def test_a_job_has_a_rank() -> None:
    with pytest.raises(UsageError, match="one rank or more"):
        run_in_memory(print, world_size=0)
