"""The contract over MPI, and that torch's engines train over it as they do over gloo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.live.pool import Pool
from tests.parallel.optimizers import warm
from tests.parallel.ranks.contract import CONTRACT
from tests.parallel.ranks.training import MORE, TRAININGS, Numbers, all_trainings

pytest.importorskip("mpi4py", reason="ckptkit[mpi] is not installed")

RANKS = 4
ROOT = Path(__file__).parents[3]
MPIRUN = shutil.which(
    "mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
)


def mpirun(
    *arguments: str, ranks: int = RANKS, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments on each rank, from wherever the tests are."""
    assert MPIRUN is not None
    command = (MPIRUN, "--allow-run-as-root", "--oversubscribe")
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.run(
        [*command, "-n", str(ranks), sys.executable, *arguments],
        env={**environment, "PYTHONPATH": str(ROOT), **(variables or {})},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def found_by_ranks(folder: Path, *more: str) -> list[dict[str, Any]]:
    # Ranks are forked from a process that has imported torch, which is most of what they would do.
    with warm.warm("tests.parallel.ranks.mpi_job", folder, {}) as place:
        done = mpirun("-S", warm.__file__, str(folder), *more, variables=place)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture(scope="session")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of one job found."""
    return found_by_ranks(tmp_path_factory.mktemp("mpi"))


@pytest.fixture(scope="module")
def over_gloo(gloo: Pool) -> list[dict[str, Numbers]]:
    """What the trainings come to there."""
    return gloo.run(RANKS, all_trainings)


@pytest.mark.parametrize("check", CONTRACT)
def test_mpi_keeps_the_contract(told: list[dict[str, Any]], check: str) -> None:
    assert [rank[check] for rank in told] == [""] * RANKS


@pytest.mark.parametrize("name", TRAININGS)
def test_torchs_engines_train_over_mpi_as_over_gloo(
    told: list[dict[str, Any]], over_gloo: list[dict[str, Numbers]], name: str
) -> None:
    for mine, expected in zip(told, over_gloo, strict=True):
        assert len(expected[name]) > 10
        assert mine["trainings"][name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6)


@pytest.mark.long
def test_every_strategy_trains_over_mpi_as_over_gloo(gloo: Pool, tmp_path: Path) -> None:
    over_gloo = gloo.run(RANKS, partial(all_trainings, more=True))
    for mine, expected in zip(found_by_ranks(tmp_path, "more"), over_gloo, strict=True):
        for name in MORE:
            assert mine[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("checkpoint", id="a checkpoint is saved and loaded"),
        pytest.param("whole", id="the whole parameters of a model cut by fsdp are one call"),
        pytest.param("pieces", id="what is too large for one call goes in pieces"),
        pytest.param("pipeline", id="large messages cross each other"),
        pytest.param("anyone", id="a rank receives from whoever sends"),
        pytest.param("forgotten", id="what nobody waits for arrives as it was sent"),
        pytest.param("late", id="a late rank is a clear error"),
    ],
)
def test_over_mpi(told: list[dict[str, Any]], what: str) -> None:
    assert [rank[what] for rank in told] == [""] * RANKS


def test_the_backend_is_ours_and_leaves_nothing(told: list[dict[str, Any]]) -> None:
    found = [(rank["backend"], rank["torch"], rank["left"]) for rank in told]
    assert found == [("mpi", "ckptkit_mpi", True)] * RANKS


def test_gloo_finds_its_ranks_by_mpi_and_an_exception_over_mpi_ends_all_of_them() -> None:
    code = (
        "from ckptkit.parallel import init\n"
        "with init('gloo', timeout=60) as c: print(c.backend, c.all_gather(c.rank))\n"
        "c = init('mpi', timeout=60)\n"
        "if c.rank == 1: raise ValueError('no luck')\n"
        "c.barrier()"
    )
    done = mpirun("-u", "-c", code, ranks=2)
    assert done.stdout.splitlines()[:2] == ["gloo [0, 1]"] * 2, done.stderr
    assert done.returncode != 0
    assert "ValueError: no luck" in done.stderr
