"""Symbolic links in a run: they are read through, and nothing is written or deleted behind them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit import Run
from ckptkit.checkpoint.ranks import OneRank
from ckptkit.checkpoint.run.mirror import Mirror
from ckptkit.checkpoint.run.run import Retention, plan_prune, remove
from ckptkit.errors import CkptkitError, StorageError
from ckptkit.live import Checkpointer
from ckptkit.storage import LocalStore, MemoryStore
from tests.checkpoint.saving import assert_holds, files, inodes, save, small_state
from tests.cli.programs import ckpt, document

STEP = "step-0000000100"
OTHER, LINKED, REAL = small_state(1), small_state(2), small_state(3)
TEMPORARY = ".tmp-0123456789abcdef"


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What belongs to others, a run of steps 90, 100 and 110, and a run with a step 100."""
    root = tmp_path_factory.mktemp("links")
    for step, state in ((100, OTHER), (200, OTHER)):
        save(root / "outside/run", state, strategy="fsdp:2", step=step)
    (root / "outside/plain/folder").mkdir(parents=True)
    for name in ("notes", "folder/notes", TEMPORARY):
        (root / "outside/plain" / name).write_bytes(b"mine")
    (root / "outside/empty").mkdir()
    (root / "outside/nothing").write_bytes(b"")
    for step in (90, 100, 110):
        save(root / "run", LINKED if step == 100 else REAL, strategy="fsdp:2", step=step)
    save(root / "source", LINKED, strategy="fsdp:2", step=100)
    return root


@pytest.fixture
def place(made_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made_once, tmp_path / "place"))


def linked(at: Path, target: Path) -> None:
    """A link in the place of what is there, which is moved to the outside."""
    if target.name == "moved":
        at.rename(target)
    elif at.is_dir():
        shutil.rmtree(at)
    else:
        at.unlink(missing_ok=True)
    at.symlink_to(target)


def pack_folder(place: Path) -> Path:
    return next((place / "run" / STEP / "data").iterdir())


LINKS: dict[str, Callable[[Path, Path], None]] = {
    "a step of another run": lambda run, out: linked(run / STEP, out / "run" / STEP),
    "a step moved away": lambda run, out: linked(run / STEP, out / "moved"),
    "a step to plain files": lambda run, out: linked(run / STEP, out / "plain"),
    "a step to nothing": lambda run, out: linked(run / STEP, out / "nowhere"),
    "a step to an empty folder": lambda run, out: linked(run / STEP, out / "empty"),
    "data": lambda run, out: linked(run / STEP / "data", out / "moved"),
    "another run's data": lambda run, out: linked(run / STEP / "data", out / "run" / STEP / "data"),
    "data to plain files": lambda run, out: linked(run / STEP / "data", out / "plain"),
    "a save": lambda run, out: linked(pack_folder(run.parent), out / "moved"),
    "a save to nothing": lambda run, out: linked(pack_folder(run.parent), out / "nowhere"),
    "an orphan": lambda run, out: linked(run / STEP / "data/20200101T000000Z-abc", out / "plain"),
    "a pack": lambda run, out: linked(pack_folder(run.parent) / "rank-00000.zip", out / "moved"),
    "a folder of a save": lambda run, out: linked(pack_folder(run.parent) / "more", out / "plain"),
    "the manifest": lambda run, out: linked(run / STEP / "manifest.msgpack", out / "moved"),
    "an empty manifest": lambda run, out: linked(run / STEP / "manifest.msgpack", out / "nothing"),
    "a temporary": lambda run, out: linked(run / STEP / TEMPORARY, out / "plain/notes"),
    "a temporary folder": lambda run, out: linked(run / STEP / TEMPORARY, out / "plain"),
    "a temporary of the run": lambda run, out: linked(run / TEMPORARY, out / "plain/notes"),
    "the owner": lambda run, out: linked(run / "uploads-to.txt", out / "plain/notes"),
}


def checkpointed(run: Path, step: int, **options: object) -> None:
    with Checkpointer(run, overwrite=True, **options) as checkpointer:  # type: ignore[arg-type]
        checkpointer.save(step, state={"s": {"x": torch.ones(3)}})


DEEDS: dict[str, Callable[[Path], object]] = {
    "prune": lambda run: Run(run).prune(keep_last=1, grace=0),
    "delete": lambda run: Run(run).delete([100]),
    "retention": lambda run: checkpointed(run, 300, keep_last=1),
    "overwrite": lambda run: checkpointed(run, 100),
    "write": lambda run: save(run, LINKED, strategy="fsdp:2", step=100, overwrite=True),
    "rebuild": lambda run: ckptkit.rebuild(run / STEP),
    "commit": lambda run: ckptkit.commit_packs(run, step=100, overwrite=True),
    "reshard": lambda run: ckptkit.reshard(run.parent / "source", run, to="tp:1", overwrite=True),
    "mirror into it": lambda run: checkpointed(run, 100, local=run.parent / "near"),
    "mirror from it": lambda run: checkpointed(
        run.parent / "far", 300, local=run, keep_last=1, local_keep_last=1
    ),
    "unpack": lambda run: ckptkit.unpack(ckptkit.open(run.parent / "source"), run / STEP),
}


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("link", LINKS)
def test_nothing_outside_ever_changes(place: Path, link: str, deed: str) -> None:
    run, outside = place / "run", place / "outside"
    LINKS[link](run, outside)
    before = inodes(outside)
    with suppress(CkptkitError):
        DEEDS[deed](run)
    assert inodes(outside) == before
    # Nor does the newest step that is no link go where a link might count instead.
    kept = 300 if (run / "step-0000000300").exists() else 110
    with ckptkit.open(run / f"step-{kept:010d}") as checkpoint:
        assert checkpoint.step == kept
    if deed == "prune":
        assert [info.step for info in Run(run).listing() if info.committed and not info.link] in (
            [110],
            [100, 110],
        )


WRITING = ("overwrite", "write", "reshard", "mirror into it")


@pytest.mark.parametrize("deed", WRITING)
@pytest.mark.parametrize(
    "link", [name for name in LINKS if name.startswith("a step") or "data" in name]
)
def test_a_writer_below_a_link_is_refused_before_it_writes_anything(
    place: Path, link: str, deed: str
) -> None:
    LINKS[link](place / "run", place / "outside")
    before = files(place / "run")
    with pytest.raises(CkptkitError) as caught:
        DEEDS[deed](place / "run")
    told = str(caught.value)
    assert "a symbolic link: nothing is written or deleted through one" in told
    assert STEP in told
    assert files(place / "run") == before


def test_a_dry_run_of_a_reshard_is_refused_as_the_reshard_is(place: Path) -> None:
    for link in ("a step to nothing", "data"):
        shutil.rmtree(place / "run", ignore_errors=True)
        shutil.copytree(place / "source", place / "run")
        LINKS[link](place / "run", place / "outside")
        with pytest.raises(StorageError, match="a symbolic link"):
            ckptkit.plan_reshard(place / "source", place / "run", to="tp:1", overwrite=True)


@pytest.mark.parametrize("below", [STEP, f"{STEP}/data"])
def test_rebuild_does_not_write_behind_a_link(place: Path, below: str) -> None:
    run, outside = place / "run", place / "outside"
    (run / STEP / "manifest.msgpack").unlink()
    linked(run / below, outside / "moved")
    before = inodes(outside)
    if below == STEP:
        with pytest.raises(StorageError, match="a symbolic link") as caught:
            ckptkit.rebuild(run / STEP)
        assert caught.value.where == str(run / STEP)
    else:
        ckptkit.rebuild(run / STEP)  # only the manifest is written, and that is the run's own
        assert Run(run).steps() == [90, 100, 110]
    assert inodes(outside) == before


def test_a_linked_step_is_read_shown_and_left_alone(place: Path) -> None:
    run, target = place / "run", place / "outside/run/step-0000000200"
    (run / "step-0000000200").symlink_to(target)
    before = inodes(place / "outside")
    with ckptkit.open(run) as checkpoint:
        assert_holds(checkpoint, OTHER)
    assert ckptkit.verify(run / "step-0000000200") == []
    shown = {step["step"]: step["link"] for step in document("ls", run)["steps"]}
    assert shown == {90: None, 100: None, 110: None, 200: str(target)}
    *_, listed, _total = ckpt("ls", run).stdout.splitlines()
    assert listed.endswith(f"committed, a link to {target}")
    told = document("prune", run, "--keep-last", "1", "--grace", "0")
    assert [gone["step"] for gone in told["removed"]] == [90, 100]
    assert told["kept"] == [110]
    assert told["links"] == [{"step": 200, "target": str(target)}]
    lines = ckpt("prune", run, "--keep-last", "1").stdout.splitlines()
    assert lines == [
        "freed 0 B; kept: 1 step",
        f"left alone, as a symbolic link: step 200 -> {target}",
    ]
    assert Run(run).steps() == [110, 200]
    Run(run).delete([200])
    assert Run(run).steps() == [110]
    assert inodes(place / "outside") == before


@pytest.mark.parametrize("link", ["data", "a save", "an orphan", "a pack", "the manifest"])
def test_of_a_link_in_a_step_that_goes_only_the_name_goes(place: Path, link: str) -> None:
    run, outside = place / "run", place / "outside"
    LINKS[link](run, outside)
    before = inodes(outside)
    removals = Run(run).prune(keep_last=1, grace=0)
    assert [(removal.kind, removal.step) for removal in removals] == [("step", 90), ("step", 100)]
    assert sorted(path.name for path in run.iterdir()) == ["step-0000000110"]
    assert inodes(outside) == before


@pytest.mark.parametrize("swapped", [STEP, f"{STEP}/data", "save"])
def test_a_folder_that_becomes_a_link_after_the_plan_is_not_deleted_through(
    place: Path, swapped: str
) -> None:
    run, outside = place / "run", place / "outside"
    removals = plan_prune(LocalStore(run), Retention(keep_last=1), grace=0)
    folder = pack_folder(place) if swapped == "save" else run / swapped
    linked(folder, outside / "moved")
    before = inodes(outside)
    with pytest.raises(StorageError, match="a symbolic link") as caught:
        remove(LocalStore(run), removals)
    assert caught.value.where == str(folder)
    assert inodes(outside) == before


def test_the_run_itself_may_be_a_link_or_lie_below_one(place: Path) -> None:
    (place / "latest").symlink_to("run")
    (place / "shelf").symlink_to(place)
    for run in (place / "latest", place / "shelf/latest"):
        save(run, REAL, strategy="fsdp:2", step=120)
        ckptkit.reshard(place / "source", run, to="tp:1", overwrite=True)
        (run / STEP / "manifest.msgpack").unlink()
        ckptkit.rebuild(run / STEP)
        assert Run(run).steps()[-3:] == [100, 110, 120]
        Run(run).prune(keep_last=2, grace=0)
        assert Run(run).steps() == Run(place / "run").steps() == [110, 120]
        Run(run).delete([120])
    (place / "step").symlink_to(place / "run/step-0000000110")
    (place / "step/manifest.msgpack").unlink()
    ckptkit.rebuild(place / "step")
    assert Run(place / "run").steps() == [110]


def test_a_folder_behind_fsspecs_name_for_local_files_is_one(place: Path) -> None:
    linked(place / "run" / STEP, place / "outside/moved")
    before = inodes(place / "outside")
    store = ckptkit.open_store(f"local://{place}/run")
    assert isinstance(store, LocalStore)
    with pytest.raises(StorageError, match="a symbolic link"):
        store.delete([f"{STEP}/manifest.msgpack"])
    assert inodes(place / "outside") == before


def test_a_linked_step_nearby_is_not_copied_and_does_not_count_as_copied(place: Path) -> None:
    class Refusing(MemoryStore):
        def create(self, *arguments: Any, **options: Any) -> Any:
            if "step-0000000110" in arguments[0]:
                raise StorageError("not this one")
            return super().create(*arguments, **options)

    run, remote = place / "run", Refusing()
    (run / "step-0000000200").symlink_to(place / "outside/run/step-0000000200")
    mirror = Mirror(LocalStore(run), remote, Retention(keep_last=1))
    for _ in range(2):
        with pytest.raises(StorageError, match="not this one"):
            mirror.copy_pending(OneRank(), 200)
    # Step 110, which is kept, has not arrived: those before it stay.
    assert Run(run).steps() == [90, 100, 110, 200]
    assert Run(remote).steps() == []
