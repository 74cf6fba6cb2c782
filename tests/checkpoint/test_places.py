"""Places that are no checkpoint, not ours to read, or full: errors that say where and why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import ckptkit
from ckptkit import Run, Writer
from ckptkit.errors import (
    CkptkitError,
    FormatError,
    NoSpaceError,
    NotCommittedError,
    NotFoundError,
    PeerError,
    UsageError,
)
from ckptkit.storage import MemoryStore
from tests.checkpoint.saving import assert_holds, files, outcomes, save, small_state

ROOT = Path(__file__).resolve().parents[2]
STATE = small_state()


@pytest.mark.parametrize("left", ["data/", "data/raw/", "data"])
def test_a_run_may_lie_in_a_folder_of_a_project(tmp_path: Path, left: str) -> None:
    """Which may have a folder `data` of its own, or a file."""
    run = tmp_path / "run"
    save(run, STATE, strategy="fsdp:2", step=1)
    place = run / left
    place.touch() if left == "data" else place.mkdir(parents=True)
    with ckptkit.open(run) as checkpoint:
        assert checkpoint.step == 1
    ckptkit.reshard(run, run, to="fsdp:1", step=2)
    assert Run(run).steps() == [1, 2]
    foreign = tmp_path / "foreign"
    (foreign / left).parent.mkdir(parents=True, exist_ok=True)
    (foreign / left).touch() if left == "data" else (foreign / left).mkdir(parents=True)
    head = b'{"w":{"dtype":"F64","shape":[3],"data_offsets":[0,24]}}'
    written = len(head).to_bytes(8, "little") + head + bytes(24)
    (foreign / "model.safetensors").write_bytes(written)
    with ckptkit.open(foreign) as checkpoint:
        assert list(checkpoint) == ["model/w"]


def a_folder_that_is_not_there(root: Path) -> Path:
    return root / "nothing" / "here"


def an_empty_folder(root: Path) -> Path:
    return root


def a_file(root: Path) -> Path:
    (root / "file").write_bytes(b"PK")
    return root / "file"


def below_a_file(root: Path) -> Path:
    return a_file(root) / "step-0000000001"


def a_folder_of_other_things(root: Path) -> Path:
    (root / "notes.txt").write_text("hello")
    (root / "step-1").mkdir()
    return root


def a_run_of_begun_steps(root: Path) -> Path:
    (root / "step-0000000001/data/20200101T000000Z-0123456789ab").mkdir(parents=True)
    (root / "step-0000000001/data/20200101T000000Z-0123456789ab/rank-00000.zip").touch()
    return root


def a_begun_step(root: Path) -> Path:
    return a_run_of_begun_steps(root) / "step-0000000001"


MAKERS: list[Callable[[Path], Path]] = [
    a_folder_that_is_not_there,
    an_empty_folder,
    a_file,
    below_a_file,
    a_folder_of_other_things,
    a_run_of_begun_steps,
    a_begun_step,
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("look", [ckptkit.open, ckptkit.verify])
def test_a_place_without_a_checkpoint_is_told_from_a_damaged_one(
    tmp_path: Path, make: Callable[[Path], Path], look: Callable[[Path], object]
) -> None:
    place = make(tmp_path)
    with pytest.raises(NotFoundError) as caught:
        look(place)
    assert caught.value.where.startswith(str(place))
    assert caught.value.hint
    assert isinstance(caught.value, NotCommittedError) == (make is a_begun_step)


@pytest.mark.parametrize("make", MAKERS[:5])
def test_a_run_without_steps_has_none(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    run = Run(make(tmp_path))
    assert run.steps() == []
    assert run.latest() is None
    assert run.listing() == []
    assert run.prune(keep_last=1, grace=0) == []
    with pytest.raises(NotFoundError) as caught:
        run.open()
    assert caught.value.hint
    with pytest.raises(NotFoundError):
        run.open(3)
    with pytest.raises(NotFoundError):
        run.delete([3])


@pytest.mark.parametrize("place", ["", "a\0b", "nowhere://host/run", "memory://", 3, None])
def test_what_is_no_location_is_refused(place: object) -> None:
    with pytest.raises((UsageError, TypeError)):
        ckptkit.open(place)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", ["/dev/null", "/proc/self/mem"])
def test_odd_files_are_no_checkpoints(place: str) -> None:
    with pytest.raises(NotFoundError):
        ckptkit.open(place)


def test_a_file_in_the_way_of_a_run_is_said(tmp_path: Path) -> None:
    path = a_file(tmp_path)
    with pytest.raises(ckptkit.CkptkitError) as caught:
        save(path, STATE, strategy="fsdp:1")
    assert str(path) in str(caught.value)
    assert path.read_bytes() == b"PK"


def test_a_renamed_step_is_refused_by_both_names(tmp_path: Path) -> None:
    save(tmp_path, STATE, strategy="fsdp:2", step=1)
    save(tmp_path, STATE, strategy="fsdp:2", step=2)
    (tmp_path / "step-0000000002").rename(tmp_path / "step-0000000003")
    for place in (tmp_path, tmp_path / "step-0000000003"):
        with pytest.raises(FormatError, match="step 2, the folder of step 3") as caught:
            ckptkit.open(place)
        assert "step-0000000003" in caught.value.where
        assert caught.value.hint
        assert ckptkit.verify(place)
    with ckptkit.open(tmp_path / "step-0000000001") as checkpoint:
        assert_holds(checkpoint, STATE)
    (info,) = [info for info in Run(tmp_path).listing() if info.step == 3]
    assert info.problem
    before = files(tmp_path)
    Run(tmp_path).prune(grace=0)
    assert files(tmp_path) == before


def test_a_step_may_be_moved_under_a_name_that_is_no_step(tmp_path: Path) -> None:
    save(tmp_path / "run", STATE, strategy="fsdp:2")
    shutil.move(tmp_path / "run/step-0000000001", tmp_path / "best")
    with ckptkit.open(tmp_path / "best") as checkpoint:
        assert_holds(checkpoint, STATE)
    assert ckptkit.verify(tmp_path / "best") == []


DENIED = """
import os, sys
import ckptkit
from ckptkit import Run, Writer
import ckptkit.checkpoint.run.verify, ckptkit.format.zarr
import numpy as np
from ckptkit.errors import AccessError

if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
run = sys.argv[1]
with ckptkit.open(f"{run}/step-0000000001") as checkpoint:
    checkpoint.read("model/w")

def write():
    with Writer(run, step=3) as writer:
        writer.add("w", np.zeros(3))

def read_pack():
    with ckptkit.open(f"{run}/step-0000000004") as checkpoint:
        checkpoint.read("model/w")

actions = {
    "step-0000000002": lambda: ckptkit.open(f"{run}/step-0000000002"),
    "step-0000000004": read_pack,
    "step-0000000003": write,
    "step-0000000001": lambda: Run(run).delete([1]),
}
for named, action in actions.items():
    try:
        action()
    except AccessError as error:
        assert named in error.where, (named, error.where)
        assert error.hint
    else:
        raise SystemExit(f"{named}: nothing was raised")
(finding, *rest) = ckptkit.verify(f"{run}/step-0000000004")
assert finding.kind == "unreadable", finding
with ckptkit.open(f"{run}/step-0000000001") as checkpoint:
    checkpoint.read("model/w")
assert ckptkit.verify(f"{run}/step-0000000001") == []
"""


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder that other users reach, which those of pytest are not."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        path.chmod(0o755)
        yield path


def test_what_is_not_permitted_is_said_with_the_path(open_to_all: Path) -> None:
    run = open_to_all / "run"
    for step in (1, 2, 4):
        save(run, STATE, strategy="fsdp:2", step=step)
    manifest = run / "step-0000000002/manifest.msgpack"
    packs = list(run.glob("step-0000000004/data/*/*.zip"))
    locked = [manifest, *packs]
    for path in locked:
        path.chmod(0)
    for folder in [run, *(path for path in run.rglob("*") if path.is_dir())]:
        folder.chmod(0o555)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        subprocess.run(
            [sys.executable, "-c", DENIED, str(run)], check=True, env=environment, cwd="/"
        )
    finally:
        for path in [run, *run.rglob("*")]:
            path.chmod(0o755)
    assert Run(run).steps() == [1, 2, 4]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        yield tmp_path / "run"
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_full_disk_leaves_the_steps_before_as_they_were(
    small_disk: Path, ranks: int, overwrite: bool
) -> None:
    save(small_disk, STATE, strategy="fsdp:2")
    before = files(small_disk)

    def fill(writer: Writer) -> None:
        mine = np.zeros(12 << 20, "u1") if writer.rank == ranks - 1 else np.zeros(1 << 20, "u1")
        for rank in range(ranks):
            placed = {"zero1": f"owner({rank})"}
            data = mine if rank == writer.rank else None
            size = (12 << 20) if rank == ranks - 1 else (1 << 20)
            writer.add(f"w{rank}", data, shape=(size,), dtype="uint8", placements=placed)

    step = 1 if overwrite else 2
    strategy = f"zero1:{ranks}"
    errors = outcomes(small_disk, fill, strategy=strategy, step=step, overwrite=overwrite)
    assert isinstance(errors[-1], NoSpaceError)
    assert "rank-" in errors[-1].where
    assert errors[-1].hint
    assert all(isinstance(error, CkptkitError) for error in errors[:-1]), errors
    if ranks > 1:
        assert isinstance(errors[0], PeerError)
        assert "NoSpaceError" in str(errors[0])
    with ckptkit.open(small_disk) as checkpoint:
        assert_holds(checkpoint, STATE)
    assert ckptkit.verify(small_disk) == []
    Run(small_disk).prune(grace=0)
    assert files(small_disk) == before


def test_stores_in_memory_are_places_too() -> None:
    store = MemoryStore()
    with pytest.raises(NotFoundError):
        ckptkit.open(store)
    save(store, STATE, strategy="fsdp:2")
    with ckptkit.open(store) as checkpoint:
        assert str(store.location) in checkpoint.location
