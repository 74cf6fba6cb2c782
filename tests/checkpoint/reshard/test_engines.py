"""The same bytes, whoever copies them: real schedulers, with workers in other processes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

import ckptkit
from ckptkit.errors import CorruptionError, PeerError, UsageError
from ckptkit.storage import LocalStore, MemoryStore
from tests.checkpoint.reshard.toy import assert_same_state, reshard, save_toy
from tests.checkpoint.saving import files


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on disk, which all processes see."""
    folder = tmp_path_factory.mktemp("source")
    save_toy(LocalStore(folder), "fsdp:3")
    return folder


@pytest.fixture(scope="module")
def by_threads(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What threads make of it."""
    folder = tmp_path_factory.mktemp("threads")
    reshard(source, folder, "tp:4")
    return files(folder)


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is ended with the block."""
    with subprocess.Popen(
        [sys.executable, "-m", *arguments], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def dask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A scheduler and a worker of its own process."""
    folder = tmp_path_factory.mktemp("dask")
    scheduler = ["distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"]
    quiet = ["--no-dashboard", "--scheduler-file", str(folder / "scheduler.json")]
    worker = ["distributed.cli.dask_worker", "--scheduler-file", str(folder / "scheduler.json")]
    own = ["--nthreads", "2", "--no-dashboard", "--local-directory", str(folder)]
    with started(*scheduler, *quiet) as first:
        address = ""
        assert first.stderr
        while not address:
            line = first.stderr.readline()
            assert line, "the scheduler ended"
            if "Scheduler at:" in line:
                address = line.split("tcp://")[1].strip()
        with started(*worker, *own):
            time.sleep(0.1)
            yield f"dask://{address}"


def test_dask_makes_the_same_bytes(
    dask: str, source: Path, by_threads: dict[str, bytes], tmp_path: Path
) -> None:
    done = reshard(source, tmp_path, "tp:4", engine=dask)
    assert done.committed
    assert files(tmp_path) == by_threads


def test_an_error_of_a_dask_worker_arrives_as_itself(dask: str, tmp_path: Path) -> None:
    damaged = tmp_path / "source"
    save_toy(LocalStore(damaged), "fsdp:3")
    (pack,) = damaged.glob("step-*/data/*/rank-00001.zip")
    pack.write_bytes(pack.read_bytes()[:-1])
    with pytest.raises(CorruptionError, match="the pack has"):
        reshard(damaged, tmp_path / "result", "tp:4", engine=dask)
    assert ckptkit.Run(tmp_path / "result").steps() == []


def test_a_scheduler_that_does_not_answer_is_said(source: Path, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="no Dask scheduler answers"):
        reshard(source, tmp_path, "tp:4", engine="dask://127.0.0.1:1")


def test_ray_makes_the_same_bytes(
    source: Path, by_threads: dict[str, bytes], tmp_path: Path
) -> None:
    # In a process of its own: what ray starts and warns of is not this test's.
    code = (
        "import sys, warnings; warnings.simplefilter('ignore')\n"
        "from tests.checkpoint.reshard.toy import reshard\n"
        "print(reshard(sys.argv[1], sys.argv[2], 'tp:4', engine='ray', workers=2).committed)"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "result")]
    done = subprocess.run(command, capture_output=True, check=True, text=True, timeout=240)
    assert done.stdout.strip().endswith("True")
    assert files(tmp_path / "result") == by_threads


def test_any_executor_will_do(source: Path, by_threads: dict[str, bytes], tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as executor:
        reshard(source, tmp_path, "tp:4", engine=executor)
    assert files(tmp_path) == by_threads


def test_a_worker_that_knew_the_source_elsewhere_looks_again(source: Path, tmp_path: Path) -> None:
    first, moved = tmp_path / "first", tmp_path / "moved"
    shutil.copytree(source, first)
    with ThreadPoolExecutor(1) as executor:
        reshard(first, tmp_path / "a", "tp:4", engine=executor)
        first.rename(moved)
        reshard(moved, tmp_path / "b", "tp:4", engine=executor)
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_a_worker_that_dies_is_said_and_the_next_run_goes_on(source: Path, tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from ckptkit.checkpoint.reshard import engines\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from tests.checkpoint.reshard.toy import reshard\n"
        "copy = engines.copy_pack\n"
        "def dying(task):\n"
        "    return os._exit(9) if task.rank == 2 else copy(task)\n"
        "engines.copy_pack = dying\n"
        "from multiprocessing import get_context\n"
        "with ProcessPoolExecutor(1, mp_context=get_context('fork')) as pool:\n"
        "    try:\n"
        "        reshard(sys.argv[1], sys.argv[2], 'tp:4', engine=pool)\n"
        "    except Exception as error:\n"
        "        print(type(error).__name__, error)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(source), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, check=True, text=True, timeout=300)
    assert done.stdout.startswith("PeerError a worker was lost")
    assert ckptkit.Run(tmp_path).steps() == []
    assert reshard(source, tmp_path, "tp:4").finished
    with ckptkit.open(tmp_path) as checkpoint:
        assert_same_state(checkpoint)


def test_what_is_in_memory_no_other_worker_sees(source: Path) -> None:
    store = MemoryStore()
    with pytest.raises(UsageError, match="no other worker sees"):
        reshard(source, store, "tp:4", engine="processes")
    with pytest.raises(UsageError, match="no other worker sees"):
        ckptkit.plan_reshard(source, store, to="tp:4", engine="processes")
    assert not store.list()
