"""An export that was killed goes on where it was, and gives what it would have given."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.checkpoint.export import export as engine
from ckptkit.checkpoint.export import files
from ckptkit.checkpoint.export.files import write_file
from ckptkit.errors import AlreadyExistsError, CkptkitError, StorageError
from ckptkit.storage import Store, open_store
from ckptkit.storage.base.address import new_temporary
from tests.checkpoint.saving import Tensor, random_values, save
from tests.cli.programs import document
from tests.servers.moto import Moto
from tests.servers.s3_server import Bucket
from tests.storage.failing import FailingStore
from tests.storage.forwarding import T

HOW: Any = {"to_format": "hf", "max_file_size": 5000}
FILES = [f"model-{n:05d}-of-00006.safetensors" for n in range(1, 7)]

_KILLED = """
import os, signal, sys
import ckptkit
from ckptkit.checkpoint.export.files import FinishedFiles
was = FinishedFiles.add
left = [int(sys.argv[3])]
def add(self, *noted):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    was(self, *noted)
FinishedFiles.add = add
ckptkit.export(sys.argv[1], sys.argv[2], to_format="hf", max_file_size=5000)
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A step that makes six files."""
    tensors = {f"model/{n}.w": Tensor(random_values((32, 32), seed=n)) for n in range(6)}
    save(tmp_path / "run", tensors)
    return tmp_path / "run"


def killed(run: Path, out: Path, after: int) -> Path:
    """What an export leaves that is killed when it has finished so many files and one more, which
    it has not noted.
    """
    command = [sys.executable, "-c", _KILLED, str(run), str(out), str(after)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not out.exists()
    (left,) = out.parent.glob(f".{out.name}.partial-*")
    return left


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def whole(run: Path, tmp_path: Path) -> dict[str, bytes]:
    """What an export gives that nobody interrupts."""
    ckptkit.export(run, tmp_path / "whole", **HOW)
    return contents(tmp_path / "whole")


def test_files_that_were_complete_are_kept(
    run: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    left = killed(run, tmp_path / "out", after=2)
    kept = [(left / name).stat().st_mtime_ns for name in FILES[:3]]
    found = document("export", run, tmp_path / "out", "--to-format", "hf", "--max-file-size", 5000)
    assert found["finished_files"] == FILES[:2]
    assert sorted(found["files"]) == sorted(whole)
    now = [(tmp_path / "out" / name).stat().st_mtime_ns for name in FILES[:3]]
    assert now[:2] == kept[:2]
    assert now[2] != kept[2]  # nobody has noted that it was finished
    assert contents(tmp_path / "out") == whole
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("damage", ["changed", "cut", "gone", "note", "link", "more"])
def test_what_is_not_as_it_was_written_is_written_again(
    damage: str, run: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    left = killed(run, tmp_path / "out", after=3)
    file = left / FILES[1]
    data = file.read_bytes()
    (note,) = left.glob(".ckptkit-export-*")
    if damage == "changed":
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "cut":
        file.write_bytes(data[:-1])
    elif damage == "note":
        note.write_bytes(b"")
    elif damage == "more":
        (left / new_temporary()).write_bytes(b"half")
    else:
        file.unlink()
        if damage == "link":
            (tmp_path / "elsewhere").write_bytes(data)
            file.symlink_to(tmp_path / "elsewhere")
    done = ckptkit.export(run, tmp_path / "out", **HOW)
    kept = {"note": [], "more": FILES[:3]}.get(damage, [FILES[0], FILES[2]])
    assert list(done.finished) == kept
    assert contents(tmp_path / "out") == whole
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


def test_one_that_was_killed_as_it_began_or_ended_is_begun_anew(
    run: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """Its note was not there yet, or not any more: nothing of it is kept, nor in the way."""
    left = killed(run, tmp_path / "out", after=2)
    for note in left.glob(".ckptkit-export-*"):
        note.rename(left / new_temporary())
    (left / "model.safetensors.index.json").write_bytes(b"{}")
    assert ckptkit.export(run, tmp_path / "out", **HOW).finished == ()
    assert contents(tmp_path / "out") == whole
    assert not list(tmp_path.glob(".*"))


def test_another_export_does_not_go_on_with_it(run: Path, tmp_path: Path) -> None:
    """Of other types, of another step, of another format: their files would be mixed."""
    for changed in (
        {"selection": ckptkit.Selection(cast=(("*", "bf16"),))},
        {"max_file_size": 9000},
        {"to_format": "dcp"},
    ):
        killed(run, tmp_path / "out", after=2)
        how: Any = {**HOW, **changed}
        done = ckptkit.export(run, tmp_path / "out", **how)
        assert done.finished == ()
        assert not list(tmp_path.glob(".*"))
        ckptkit.export(run, tmp_path / "again", **how)
        assert contents(tmp_path / "out") == contents(tmp_path / "again")
        for name in ("out", "again"):
            for path in (tmp_path / name).iterdir():
                path.unlink()
            (tmp_path / name).rmdir()


def test_without_locks_nobody_goes_on_with_what_may_be_written_now(
    run: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = killed(run, tmp_path / "out", after=2)
    monkeypatch.setattr(files, "_is_locked", lambda *_: False)
    assert ckptkit.export(run, tmp_path / "out", **HOW).finished == ()
    assert contents(tmp_path / "out") == whole
    assert left.is_dir()


def interrupted(after: int) -> Any:
    """A `write_file` after so many of which somebody presses Ctrl-C."""
    left = [after]

    def write(*args: Any) -> tuple[int, int]:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return write_file(*args)

    return write


def test_ctrl_c_leaves_what_is_complete(
    run: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "write_file", interrupted(after=2))
    with pytest.raises(KeyboardInterrupt):
        ckptkit.export(run, tmp_path / "out", **HOW)
    monkeypatch.undo()
    assert list(ckptkit.export(run, tmp_path / "out", **HOW).finished) == FILES[:2]
    assert contents(tmp_path / "out") == whole


def test_in_a_bucket_nothing_is_left_of_one_that_was_killed_as_it_began(
    moto: Moto, bucket: Bucket, run: Path
) -> None:
    store = ckptkit.open_store(f"{bucket.url}/out", bucket.options)
    moto.client.put_object(Bucket=bucket.name, Key=f"out/{new_temporary()}", Body=b"")
    assert store.leftovers("")
    options: Any = {"storage_options": bucket.options, "source_options": {}}
    assert ckptkit.export(run, f"{bucket.url}/out", **HOW, **options).finished == ()
    assert store.leftovers("") == []


def test_in_a_bucket_it_goes_on_too(
    bucket: Bucket, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"storage_options": bucket.options, "source_options": {}}
    for number, to_format in enumerate(("hf", "dcp")):
        out, how = f"{bucket.url}/out-{number}", {**HOW, "to_format": to_format}
        monkeypatch.setattr(engine, "write_file", interrupted(after=2))
        with pytest.raises(KeyboardInterrupt):
            ckptkit.export(run, out, **how, **options)
        monkeypatch.undo()
        with pytest.raises(AlreadyExistsError):  # another one
            ckptkit.export(run, out, **{**how, "max_file_size": 9000}, **options)
        done = ckptkit.export(run, out, **how, **options)
        assert len(done.finished) == 2
        keys = {entry.key for entry in ckptkit.open_store(out, bucket.options).list()}
        assert keys == set(done.files)
        assert ckptkit.diff(run, out, include=("model/*",), **options).same


class DownFrom(FailingStore):
    """Each operation from the one that is to fail on fails: the network is down."""

    def attempt(self, operation: str, action: Callable[[], T]) -> T:
        if self.operations + 1 >= self._fail_at:
            raise StorageError("the network is down", where=str(self.location))
        return super().attempt(operation, action)


@pytest.mark.parametrize("kind", [FailingStore, DownFrom])
@pytest.mark.parametrize("to_format", ["hf", "dcp"])
def test_what_fails_leaves_nothing_or_what_the_same_call_goes_on_with(
    kind: type[FailingStore],
    to_format: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At whichever operation of a bucket: and it never looks whole before it is."""
    how: Any = {"to_format": to_format, "max_file_size": 13_000, "workers": 1}
    ckptkit.export(run, tmp_path / to_format, **how)
    wanted = contents(tmp_path / to_format)
    place = f"memory://export-{kind.__name__}-{to_format}"
    counting = FailingStore(open_store(place), fail_at=1 << 30)
    monkeypatch.setattr(engine, "open_store", lambda *_: counting)
    ckptkit.export(run, place, **how)
    monkeypatch.undo()
    for number in range(1, counting.operations + 1):
        url = f"memory://export-{kind.__name__}-{to_format}-{number}"
        store = open_store(url)

        def failing(*_: Any, store: Store = store, number: int = number) -> Store:
            return kind(store, fail_at=number)

        monkeypatch.setattr(engine, "open_store", failing)
        with suppress(StorageError):
            ckptkit.export(run, url, **how)
        monkeypatch.undo()
        there = {entry.key: store.read_whole(entry.key, 1 << 20) for entry in store.list("")}
        if there != wanted:
            with suppress(CkptkitError):  # but where all is there, but an index or the last step
                assert ckptkit.diff(run, store, include=("model/*",)).same
            assert not there or any(key.startswith(".ckptkit-export-") for key in there)
            ckptkit.export(run, url, **how)
            there = {entry.key: store.read_whole(entry.key, 1 << 20) for entry in store.list("")}
        assert there == wanted, number
