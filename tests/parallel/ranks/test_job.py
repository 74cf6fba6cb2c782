"""Joining a job, from nothing and from a launcher."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from ckptkit.errors import PeerError, UsageError
from ckptkit.parallel import ranks
from ckptkit.parallel.ranks import RankPlace, current_communicator, init
from tests.live.pool import Pool
from tests.parallel.ranks.contract import CONTRACT
from tests.servers.process import free_port

LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "OMPI_COMM", "PMI_", "SLURM_", "CKPTKIT_BACKEND")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in os.environ:
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    ranks._of_process.clear()


def test_without_a_launcher_it_is_a_job_of_one_rank_that_engines_can_use() -> None:
    comm = init()
    assert (comm.rank, comm.world_size, comm.backend) == (0, 1, "gloo")
    assert comm is init() is init("gloo") is current_communicator()
    for check in CONTRACT.values():
        check(comm)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    net(torch.ones(1, 2)).sum().backward()
    comm.close()
    assert not dist.is_initialized()
    again = init()
    assert again is not comm
    again.barrier()


def test_closing_again_leaves_a_newer_job_as_it_is() -> None:
    old = init()
    group = old.subgroup([0])
    old.close()
    assert group is not None
    group.close()  # gone with the job's own
    group.close()
    new = init()
    old.close()
    new.barrier()
    assert current_communicator() is new


def test_a_communicator_goes_with_a_group_that_is_destroyed_by_hand() -> None:
    old = init()
    dist.destroy_process_group()
    with pytest.raises(UsageError, match="no communicator yet"):
        current_communicator()
    new = init()
    assert new is not old
    old.close()
    new.barrier()


@pytest.mark.parametrize(
    ("backend", "problem"),
    [
        ("tcp", r"no such backend \(got 'tcp'\)\nhint: there are auto, gloo, nccl, mpi"),
        ("memory", "ranks in memory are threads"),
        pytest.param(
            "nccl",
            "nccl needs a GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_a_backend_that_cannot_be_is_refused(backend: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        init(backend)


def test_the_launcher_says_what_auto_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTKIT_BACKEND", "tcp")
    with pytest.raises(UsageError, match="no such backend"):
        init()
    assert init("gloo").backend == "gloo"


def test_mpi_is_refused_where_mpi_started_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="torchrun has started this process, and MPI knows noth"):
        init("mpi")


def test_nccl_takes_the_device_of_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    joined: list[tuple[object, ...]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(
        dist, "init_process_group", lambda name, **given: joined.append((name, given["device_id"]))
    )
    assert ranks._chosen("auto") == "nccl"
    ranks._join("nccl", RankPlace("torchrun", 5, 8, 1, "node0", 1), 5.0)
    assert chosen == [torch.device("cuda", 1)]
    assert joined == [("nccl", torch.device("cuda", 1))]
    with pytest.raises(UsageError, match="rank 2 of this machine has no GPU of its own"):
        ranks._join("nccl", RankPlace("torchrun", 2, 8, 2, "node0", 1), 5.0)


def test_ranks_that_never_come_are_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    place = RankPlace("Slurm", 0, 2, 0, "127.0.0.1", free_port())
    with pytest.raises(PeerError, match=r"the 2 ranks did not all meet within 1 s"):
        ranks._join("gloo", place, 1.0)


def join_a_job(environment: dict[str, str]) -> list[tuple[int, str]]:
    os.environ.update(environment)
    with init(timeout=60) as comm:
        return comm.all_gather((comm.rank, comm.backend))


def test_ranks_of_slurm_meet_at_its_first_host(gloo: Pool) -> None:
    slurm = {
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_JOB_ID": "7",
        "MASTER_PORT": str(free_port()),
    }
    with gloo.context.Pool(2) as pool:
        told = pool.starmap(join_a_job, [(slurm | {"SLURM_PROCID": f"{n}"},) for n in range(2)], 1)
    assert told == [[(0, "gloo"), (1, "gloo")]] * 2
