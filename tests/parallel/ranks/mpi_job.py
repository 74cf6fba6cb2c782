"""What `mpirun` runs: all that is to be seen of the mpi backend; each rank leaves a document."""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckptkit.errors import PeerError, UsageError
from ckptkit.live import load, save
from ckptkit.parallel import as_distributed
from ckptkit.parallel.ranks import init
from ckptkit.parallel.ranks.communicator import Communicator
from tests.parallel.ranks.contract import CONTRACT
from tests.parallel.ranks.training import all_trainings, model

IN_PIECES = (
    "messages_arrive_in_their_order_by_sender_and_tag",
    "objects_travel_as_copies",
    "half_types_are_added_up_without_rounding_in_between",
    "a_tensor_that_is_not_contiguous_or_needs_a_gradient_is_taken_as_it_reads",
)


def main(folder: str, more: str = "") -> None:
    """Run it all, or more trainings; leave what was found in the folder."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    comm = init("mpi", timeout=60)
    found: dict[str, Any] = all_trainings(more=True) if more else everything(comm, folder)
    comm.close()
    found["left"] = not dist.is_initialized()
    Path(folder, f"{comm.rank}.json").write_text(json.dumps(found))
    from mpi4py import MPI  # noqa: PLC0415 - starts MPI

    MPI.Finalize()  # what is forked does nothing more at its end


def everything(comm: Communicator, folder: str) -> dict[str, Any]:
    """What a session of tests asks about."""
    found: dict[str, Any] = {"backend": comm.backend, "torch": dist.get_backend()}
    for name, check in CONTRACT.items():
        found[name] = problem_of(lambda check=check: check(comm))  # type: ignore[misc]
    found["trainings"] = all_trainings()
    found["checkpoint"] = problem_of(lambda: save_and_load(f"{folder}/run"))
    found["whole"] = problem_of(whole_parameters)
    found["pieces"] = problem_of(lambda: in_pieces(comm))
    found["pipeline"] = problem_of(cross)
    found["anyone"] = problem_of(lambda: from_anyone(comm))
    found["forgotten"] = problem_of(forgotten)
    found["late"] = problem_of(lambda: late(comm))
    return found


def problem_of(check: Callable[[], object]) -> str:
    """The traceback of a check; empty if it holds."""
    try:
        check()
    except Exception:  # noqa: BLE001 - told to the test
        return traceback.format_exc()
    return ""


def save_and_load(run: str) -> None:
    """A checkpoint of a job over MPI, whose store the ranks found by MPI."""
    net = torch.nn.Linear(3, 2)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    save(run, step=1, model=net)
    with torch.no_grad():
        net.weight.zero_()
    load(run, model=net)
    rank_0 = dist.get_rank() == 0
    assert not rank_0 or torch.equal(net.weight, before["weight"])


def whole_parameters() -> None:
    """What is cut over all ranks comes together on rank 0, trained or not."""
    dist_model = as_distributed(model(), "fsdp", optimizer=torch.optim.AdamW)
    before = model().state_dict()
    full = dist_model.full_state_dict()
    assert (full is None) == (dist.get_rank() > 0)
    assert full is None or all(torch.equal(full[name], before[name]) for name in before)
    inputs = torch.randn(4, 6)
    for _ in range(3):
        dist_model.step(lambda found, _: found.square().mean(), (inputs, inputs))
    trained = dist_model.full_state_dict()
    assert trained is None or not torch.equal(trained["0.weight"], before["0.weight"])


def in_pieces(comm: Communicator) -> None:
    """What moves or adds up, as if MPI could count to 60 only."""
    from ckptkit.parallel.ranks import mpi_group  # noqa: PLC0415 - starts MPI

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mpi_group, "LIMIT", 60)
        for name in IN_PIECES:
            CONTRACT[name](comm)
        mine = torch.arange(50) + comm.rank
        sums = [comm.world_size * n + sum(range(comm.world_size)) for n in range(50)]
        assert comm.all_reduce(mine).tolist() == sums
        assert comm.all_to_all([mine] * comm.world_size)[0].tolist() == list(range(50))
        found = torch.zeros(4 * comm.world_size, dtype=torch.int64)
        dist.all_gather_into_tensor(found, torch.arange(4) + comm.rank)
        assert found.tolist() == [n + r for r in range(comm.world_size) for n in range(4)]
        mine = torch.zeros(9, dtype=torch.float64)
        whole = torch.arange(9.0 * comm.world_size, dtype=torch.float64)
        dist.reduce_scatter_tensor(mine, whole)
        assert torch.equal(mine, whole.chunk(comm.world_size)[comm.rank] * comm.world_size)


def cross() -> None:
    """Every rank sends to the next one before it receives, more than MPI keeps in between."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, found = torch.full((300_000,), float(rank)), torch.zeros(300_000)
    ops = [
        dist.P2POp(dist.isend, mine, (rank + 1) % size),
        dist.P2POp(dist.irecv, found, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert torch.equal(found, torch.full_like(found, float((rank - 1) % size)))


def from_anyone(comm: Communicator) -> None:
    """Rank 0 receives from whoever sends, and learns who it was; too much is refused, not lost."""
    large = torch.full((1 << 20,), float(comm.rank))
    small = torch.tensor([comm.rank])
    for mine in (small, large):
        sources = []
        for _ in range(comm.world_size - 1 if comm.rank == 0 else 0):
            if mine is large:
                with pytest.raises(UsageError, match="sent 4194304 bytes, and there is room for 8"):
                    dist.recv(small)
            sources.append(dist.recv(mine))
            assert bool((mine == sources[-1]).all())
        assert sorted(sources) == list(range(1, comm.world_size) if comm.rank == 0 else ())
        if comm.rank:
            dist.send(mine, 0)
        # What a rank sends next must not come before what others send now.
        comm.barrier()


def forgotten() -> None:
    """Nobody keeps what was sent, nor waits for it: it arrives as it was."""
    rank, size = dist.get_rank(), dist.get_world_size()
    to, by, length = (rank + 1) % size, (rank - 1) % size, 3 << 20
    for number in range(3):
        dist.isend(torch.full((length,), float(rank + number)), to, tag=number)
        gc.collect()
        others = [torch.full((length,), -1.0) for _ in range(4)]
        got = torch.empty(length)
        dist.recv(got, by, tag=number)
        assert bool((got == by + number).all()), (number, got[:4], len(others))


def late(comm: Communicator) -> None:
    """The last rank does not come to a collective of a group, which ends in time."""
    comm._carrier.timeout = 0.3
    group = comm.subgroup(range(comm.world_size))
    assert group is not None
    if comm.rank == comm.world_size - 1:
        time.sleep(0.8)
        return
    with pytest.raises(PeerError, match="barrier: not all ranks came within"):
        group.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
