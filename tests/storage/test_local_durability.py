"""Local files: what is durable when, and what a crash leaves behind."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptkit.errors import AlreadyExistsError, StorageError
from ckptkit.storage import LocalStore


def names(folder: Path | str) -> list[str]:
    """Everything in a folder, temporary names too."""
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to the disk, in order; paths relative to tmp_path, temporary names as `tmp`."""
    events: list[str] = []

    def name(target: Any, folder: int | None) -> str:
        path = Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else target
        if folder is not None:
            path = Path(f"/proc/self/fd/{folder}").readlink() / path
        short = os.path.relpath(path, tmp_path)
        return re.sub(r"\.tmp-\w+", "tmp", short)

    def record(function: str) -> None:
        real = getattr(os, function)

        def recorded(*arguments: Any, **options: Any) -> Any:
            folders = (options.get(key) for key in ("dir_fd", "src_dir_fd", "dst_dir_fd"))
            folder = next((each for each in folders if each is not None), None)
            told = (name(argument, folder) for argument in arguments[:2])
            events.append(" ".join([function, *told]))
            return real(*arguments, **options)

        monkeypatch.setattr(os, function, recorded)

    for function in ("fsync", "fdatasync", "link", "replace", "unlink"):
        record(function)
    return events


def test_an_exclusive_put_makes_the_bytes_and_the_way_to_them_durable_before_the_name(
    tmp_path: Path, log: list[str]
) -> None:
    LocalStore(tmp_path / "run").put("step/manifest", b"x", exclusive=True)
    assert log == [
        "fsync run/step/tmp",
        "fsync run",
        "fsync .",
        "link run/step/tmp run/step/manifest",
        "unlink run/step/tmp",
        "fsync run/step",
    ]


def test_a_put_makes_the_bytes_durable_before_they_replace_others(
    tmp_path: Path, log: list[str]
) -> None:
    store = LocalStore(tmp_path)
    store.put("manifest", b"x")
    holder = f"fsync {os.path.relpath(tmp_path.parent, tmp_path)}"
    assert log == ["fsync tmp", holder, "replace tmp manifest", "unlink tmp", "fsync ."]


def test_finish_makes_the_file_then_its_name_then_the_way_to_it_durable(
    tmp_path: Path, log: list[str]
) -> None:
    sink = LocalStore(tmp_path / "runs/one").create("data/id/pack", [5])
    sink.write(0, memoryview(b"12345"))
    assert log == []
    sink.finish()
    assert log[0] == "fdatasync runs/one/data/id/pack"
    assert log[1:4] == ["fsync runs/one/data/id", "fsync runs/one/data", "fsync runs/one"]
    assert sorted(log[4:]) == ["fsync .", "fsync runs"]


def test_folders_that_another_writer_made_are_made_durable_too(
    tmp_path: Path, log: list[str]
) -> None:
    (tmp_path / "run/data/id").mkdir(parents=True)
    LocalStore(tmp_path / "run").create("data/id/pack", []).finish()
    assert {f"fsync {path}" for path in ("run/data/id", "run/data", "run", ".")} <= set(log)


def test_deletions_are_durable_folder_by_folder(tmp_path: Path, log: list[str]) -> None:
    store = LocalStore(tmp_path)
    for key in ("step/manifest", "step/data/a", "step/data/b", "other"):
        store.put(key, b"x")
    log.clear()
    store.delete(["step/manifest", "step/data/a", "step/data/b"])
    assert log == [
        "unlink step/manifest",
        "fsync step",
        "unlink step/data/a",
        "unlink step/data/b",
        "fsync step/data",
    ]
    assert store.children() == ["other"]


@pytest.mark.parametrize("function", ["fdatasync", "fsync", "ftruncate"])
def test_what_cannot_be_made_durable_is_not_finished_and_can_be_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = LocalStore(tmp_path)
    sink = store.create("data/a", [3])
    sink.write(0, memoryview(b"abc"))
    with monkeypatch.context() as patch:
        patch.setattr(os, function, broken)
        with pytest.raises(StorageError) as caught:
            sink.finish()
    assert caught.value.where == str(tmp_path / "data/a")
    assert "disk" in caught.value.hint
    sink.abort()
    assert store.children() == []


CRASHES = """
import errno, os, sys
from pathlib import Path
from ckptkit.storage import LocalStore

folder, exclusive = Path(sys.argv[1]), sys.argv[2] != "replacing"
data = b"new" * 10_000
cut_off = [None] if exclusive else [b"old"]
if sys.argv[2] == "without links":
    cut_off = [None, b""]
    def no_link(*_, **__):
        raise OSError(errno.EPERM, "no links")
    os.link = no_link

def crash_at(step, after):
    calls = 0
    def patch(name):
        real = getattr(os, name)
        def counted(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls == step and not after:
                os._exit(17)
            try:
                return real(*arguments, **options)
            finally:
                if calls == step:
                    os._exit(17)
        setattr(os, name, counted)
    for name in ("open", "pwrite", "fsync", "link", "replace", "unlink", "close", "mkdir"):
        patch(name)

def crashed(store, step, after):
    child = os.fork()
    if not child:
        crash_at(step, after)
        store.put("step/manifest", data, exclusive=exclusive)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17

some_left = False
for after in (False, True):
    step = 1
    while True:
        store = LocalStore(folder / f"{after}-{step}")
        if not exclusive:
            store.put("step/manifest", b"old")
        went_on = crashed(store, step, after)
        listed = [entry.key for entry in store.list()]
        found = store.read("step/manifest") if listed else None
        assert listed in ([], ["step/manifest"]), listed
        assert found == data or (went_on and found in cut_off), found
        left = [entry.key for entry in store.leftovers()]
        store.delete(left)
        assert not list(folder.glob(f"{after}-{step}/**/.tmp-*")), "a leftover is not found"
        assert found == (store.read("step/manifest") if listed else None)
        some_left |= bool(left)
        if not went_on:
            break
        store.delete(["step/manifest"])
        assert not list(folder.glob(f"{after}-{step}/*")), "rubbish blocks the folder"
        step += 1
    assert step > 10
assert some_left
"""


@pytest.mark.parametrize("kind", ["exclusive", "without links", "replacing"])
def test_a_crash_anywhere_in_put_leaves_the_old_or_the_new_and_no_listed_rubbish(
    tmp_path: Path, kind: str
) -> None:
    command = [sys.executable, "-c", CRASHES, str(tmp_path), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


RACE = """
import sys, time
from pathlib import Path
from ckptkit.errors import AlreadyExistsError
from ckptkit.storage import LocalStore

store, go, number = LocalStore(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
while not go.exists():
    time.sleep(0.0005)
for attempt in range(20):
    try:
        store.put(f"{attempt}/manifest", bytes([number]) * 5000, exclusive=True)
        print(attempt)
    except AlreadyExistsError:
        pass
"""


def test_of_racing_processes_exactly_one_creates(tmp_path: Path) -> None:
    go, root = tmp_path / "go", tmp_path / "root"
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(root), str(go), str(number)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(5)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    go.touch()
    won = {number: racer.communicate(timeout=300)[0].split() for number, racer in enumerate(racers)}
    store = LocalStore(root)
    assert sorted(int(n) for wins in won.values() for n in wins) == list(range(20))
    for number, wins in won.items():
        for attempt in wins:
            assert store.read(f"{attempt}/manifest") == bytes([number]) * 5000
            assert names(root / attempt) == ["manifest"]


def test_temporary_names_are_never_listed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("step/a", b"x")
    (tmp_path / "step/.tmp-0123").write_bytes(b"left by a crash")
    (tmp_path / ".tmp-folder").mkdir()
    assert store.children() == ["step"]
    assert store.children("step") == ["a"]
    assert [entry.key for entry in store.list()] == ["step/a"]


def test_only_files_named_as_the_store_names_them_are_left_over(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("step/a", b"x")
    (tmp_path / "step/.tmp-0123456789abcdef").write_bytes(b"left")
    (tmp_path / ".tmp-fedcba9876543210").write_bytes(b"")
    for name in (".tmp-0123", ".tmp-0123456789ABCDEF", ".tmp-0123456789abcdef0", ".tmp-mine"):
        (tmp_path / "step" / name).write_bytes(b"somebody else's")
    (tmp_path / "step/.tmp-0123456789abcde0").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    left = store.leftovers()
    assert [(e.key, e.size) for e in left] == [
        (".tmp-fedcba9876543210", 0),
        ("step/.tmp-0123456789abcdef", 4),
    ]
    assert store.leftovers("step") == left[1:]
    before = names(tmp_path / "step")
    store.delete(entry.key for entry in left)
    assert store.leftovers() == []
    assert names(tmp_path / "step") == [n for n in before if n != ".tmp-0123456789abcdef"]


def test_a_folder_with_a_file_named_almost_as_the_store_does_stays(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("step/a", b"x")
    for name in (".tmp-mine", ".tmp-0123456789abcdef"):
        (tmp_path / "step" / name).write_bytes(b"left")
    store.delete(["step/a"])
    assert (tmp_path / "step/.tmp-mine").read_bytes() == b"left"


def replaced_link(
    monkeypatch: pytest.MonkeyPatch, link: Callable[[Callable[..., None], Any, Any], None]
) -> None:
    real = os.link
    monkeypatch.setattr(os, "link", lambda *names, **within: link(partial(real, **within), *names))


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_links_an_exclusive_put_still_never_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def no_link(real: object, source: object, target: object) -> None:
        raise OSError(code, os.strerror(code))

    replaced_link(monkeypatch, no_link)
    store = LocalStore(tmp_path)
    store.put("a", b"first", exclusive=True)
    with pytest.raises(AlreadyExistsError):
        store.put("a", b"second", exclusive=True)
    assert store.read("a") == b"first"
    assert names(tmp_path) == ["a"]


def test_a_link_that_nfs_made_twice_counts_as_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link_then_refuse(real: Callable[..., None], source: object, target: object) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    replaced_link(monkeypatch, link_then_refuse)
    store = LocalStore(tmp_path)
    store.put("a", b"mine", exclusive=True)
    assert store.read("a") == b"mine"
