"""What launchers say in the environment, as tables."""

from __future__ import annotations

import pytest

from ckptkit.errors import UsageError
from ckptkit.parallel.ranks import RankPlace, place_from

MEETING = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", **MEETING}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "10",
    "SLURM_LOCALID": "2",
    "SLURM_STEP_NODELIST": "gpu[003-004,9],login1",
    "SLURM_JOB_ID": "1234567",
}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        pytest.param({}, RankPlace("nothing"), id="no launcher is a job of one rank"),
        pytest.param(
            TORCHRUN, RankPlace("torchrun", 5, 8, 1, "node0", 29500), id="torchrun says it all"
        ),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "1"}, RankPlace("torchrun"), id="one rank meets nobody"
        ),
        pytest.param(OPEN_MPI, RankPlace("Open MPI", 2, 4, 0), id="Open MPI says no address"),
        pytest.param(
            OPEN_MPI | MEETING,
            RankPlace("Open MPI", 2, 4, 0, "node0", 29500),
            id="unless it is set",
        ),
        pytest.param(PMI, RankPlace("MPI (PMI)", 3, 4, 1), id="MPICH speaks PMI"),
        pytest.param(
            {"PMI_RANK": "3", "PMI_SIZE": "4"},
            RankPlace("MPI (PMI)", 3, 4, 3),
            id="or just that",
        ),
        pytest.param(
            SLURM,
            RankPlace("Slurm", 6, 10, 2, "gpu003", 24567),
            id="Slurm says it in its own way",
        ),
        pytest.param(
            SLURM | MEETING, RankPlace("Slurm", 6, 10, 2, "node0", 29500), id="or as it is told"
        ),
        pytest.param(
            {k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"},
            RankPlace("nothing"),
            id="a batch script is no rank",
        ),
        pytest.param(
            SLURM | {"PMI_RANK": "6", "PMI_SIZE": "10"},
            RankPlace("MPI (PMI)", 6, 10, 6, "gpu003", 24567),
            id="srun speaks PMI as well, and knows where to meet",
        ),
        pytest.param(
            TORCHRUN | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            RankPlace("torchrun", 5, 8, 1, "node0", 29500),
            id="mpirun may start a torchrun on each machine",
        ),
        pytest.param(
            TORCHRUN | SLURM,
            RankPlace("torchrun", 5, 8, 1, "node0", 29500),
            id="so may srun, whose variables say nothing then",
        ),
    ],
)
def test_a_launcher_is_understood(environment: dict[str, str], place: RankPlace) -> None:
    assert place_from(environment) == place


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("node[7,9]", "node7"),
        ("n[001-128]-ib,m3", "n001-ib"),
        ("gpu-a[10-12]", "gpu-a10"),
    ],
)
def test_the_first_host_of_a_list_is_found(nodes: str, first: str) -> None:
    assert place_from(SLURM | {"SLURM_STEP_NODELIST": nodes}).address == first


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"RANK": "1"}, "RANK is set, but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but RANK is not"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "but OMPI_COMM_WORLD_RANK is not"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "but MASTER_PORT is not set"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "but MASTER_ADDR is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2", **MEETING}, "rank 2 is none of the 2"),
        ({"RANK": "one", "WORLD_SIZE": "2", **MEETING}, "RANK: is no number"),
        ({"RANK": "-1", "WORLD_SIZE": "2", **MEETING}, "RANK: is no number"),
        (
            {**TORCHRUN, "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "8"},
            "torchrun says that this is rank 5 of 8, Open MPI that it is rank 2 of 8",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", **MEETING, **OPEN_MPI},
            "torchrun says that this is rank 1 of 2, Open MPI that it is rank 2 of 4",
        ),
    ],
)
def test_half_of_a_launcher_or_two_of_them_are_refused(
    environment: dict[str, str], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        place_from(environment)
