"""The contract over gloo, and what only processes can do to each other."""

from __future__ import annotations

import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ckptkit.errors import PeerError, UsageError
from ckptkit.parallel.ranks import current_communicator, init
from ckptkit.parallel.ranks.communicator import Communicator
from ckptkit.parallel.ranks.messages import TorchCarrier
from tests.live.pool import Died, Pool
from tests.parallel.ranks.contract import CONTRACT


def keep(checks: list[str]) -> None:
    comm = Communicator(TorchCarrier(timeout=30))
    for check in checks:
        CONTRACT[check](comm)


def keep_in_a_subgroup() -> None:
    group = Communicator(TorchCarrier(timeout=30)).subgroup([1, 2])
    if group is not None:
        for check in CONTRACT.values():
            check(group)
        group.close()


@pytest.mark.parametrize("check", CONTRACT)
@pytest.mark.parametrize("ranks", [2, 4])
def test_gloo_keeps_the_contract(gloo: Pool, ranks: int, check: str) -> None:
    gloo.run(ranks, keep, [check])


def test_one_rank_keeps_the_contract(gloo: Pool) -> None:
    gloo.run(1, keep, list(CONTRACT))


def test_a_subgroup_keeps_the_contract(gloo: Pool) -> None:
    gloo.run(3, keep_in_a_subgroup)


def split_where_a_device_is_bound() -> list[int]:
    whole: Any = dist.group.WORLD
    bound = whole.bound_device_id = torch.device("cuda", 0)
    refused = mock.patch("torch.distributed.distributed_c10d._get_split_source")
    try:
        with refused as split_from:
            group = Communicator(TorchCarrier(timeout=30)).subgroup([0, 2])
        assert not split_from.called
        assert whole.bound_device_id == bound
    finally:
        whole.bound_device_id = None
    return [] if group is None else group.all_gather(dist.get_rank())


def test_no_rank_outside_of_a_subgroup_is_waited_for(gloo: Pool) -> None:
    """As NCCL does where torch splits the communicator of all; that is tested without a GPU."""
    assert gloo.run(3, split_where_a_device_is_bound) == [[0, 2], [], [0, 2]]


def over_groups() -> tuple[list[int], list[int], list[int], str]:
    """Who is in the communicator of all, of a group, and of each axis of a mesh."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    group = dist.new_group([0, 2])
    pair = Communicator.of(group).all_gather(rank) if rank in (0, 2) else []
    with Communicator.of(mesh, "fsdp") as along:
        line = along.all_gather(rank)
    said = ""
    bad: Any
    for made, bad in ((Communicator, dist.group.WORLD), (Communicator.of, "fsdp")):
        with pytest.raises(UsageError) as caught:
            made(bad)
        said += caught.value.what
    return Communicator.of().all_gather(rank), pair, line, said


def test_a_communicator_is_made_of_a_group_or_of_an_axis_of_a_mesh(gloo: Pool) -> None:
    for rank, (whole, pair, line, said) in enumerate(gloo.run(4, over_groups)):
        assert whole == [0, 1, 2, 3]
        assert pair == ([0, 2] if rank in (0, 2) else [])
        assert line == [rank % 2, rank % 2 + 2]
        assert "not made of this directly" in said
        assert "neither a process group nor a device mesh" in said


def wait_in_vain() -> str:
    comm = Communicator(TorchCarrier(timeout=0.5))
    if comm.rank == 1:
        time.sleep(1.5)
        return "late"
    with pytest.raises(PeerError, match=r"barrier: not all ranks came within 0\.5 s"):
        comm.barrier()
    with pytest.raises(PeerError, match="ended in an earlier call: not all ranks came"):
        comm.barrier()
    return "waited"


def test_a_late_rank_is_a_clear_error_and_ends_the_communicator(gloo: Pool) -> None:
    assert gloo.run(2, wait_in_vain) == ["waited", "late"]


def lose_rank_1() -> str:
    comm = Communicator(TorchCarrier(timeout=20))
    comm.barrier()
    if comm.rank == 1:
        os._exit(3)
    with pytest.raises(PeerError, match="a rank is gone") as caught:
        comm.all_gather(torch.zeros(3))
    return f"{caught.value}"


def test_a_lost_rank_is_a_clear_error(gloo: Pool) -> None:
    told = [str(result) for result in gloo.run(2, lose_rank_1, may_die=[1])]
    assert told[1] == str(Died(3))
    assert "look at the logs of the other ranks" in told[0]


def join_what_is_there() -> bool:
    comm = init()
    with pytest.raises(UsageError, match="this rank communicates by gloo already"):
        init("mpi")
    same = init() is comm and init("gloo") is comm and current_communicator() is comm
    comm.close()
    with pytest.raises(UsageError, match="no communicator yet"):
        current_communicator()
    # What others made is not taken down.
    again = init()
    comm_of_all = again.all_gather(dist.is_initialized())
    again.close()
    return same and all(comm_of_all)


def test_init_joins_the_group_that_is_there_and_leaves_it_there(gloo: Pool) -> None:
    assert gloo.run(2, join_what_is_there) == [True, True]
