"""Unpacking: a plain Zarr directory that appears when it is complete, or not at all."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import ckptkit
from ckptkit import Writer
from ckptkit.errors import AlreadyExistsError, CkptkitError, CorruptionError, StorageError
from ckptkit.storage import MemoryStore
from tests.checkpoint.saving import (
    Tensor,
    files,
    flipped,
    inodes,
    random_values,
    same,
    save,
    save_by,
)

MB = 1 << 20
STATE = {
    "model/even": Tensor(random_values((8, 6), "float32", 1), {"fsdp": "shard(0)"}),
    "model/odd": Tensor(random_values((7, 5), "bfloat16", 2), {"fsdp": "shard(0, blocks=[3,4])"}),
    "model/a%2Fb": Tensor(random_values((5,), "float8_e5m2", 3), {"fsdp": "shard(0)"}),
    "scalar": Tensor(random_values((), "complex64", 4)),
    "empty": Tensor(random_values((0, 3), "int8")),
}


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    store = MemoryStore()
    save(store, STATE, strategy="fsdp:2", chunk_bytes=16)
    return store


def assert_nothing_left(tmp_path: Path, before: dict[str, bytes]) -> None:
    assert files(tmp_path) == before


def test_what_is_unpacked_is_plain_zarr(store: MemoryStore, tmp_path: Path) -> None:
    sizes: list[int] = []
    with ckptkit.open(store) as checkpoint:
        count = ckptkit.unpack(checkpoint, tmp_path / "plain", progress=sizes.append)
    written = files(tmp_path / "plain")
    assert count == len(written)
    assert sum(sizes) == sum(map(len, written.values()))
    group: Any = zarr.open_group(tmp_path / "plain", mode="r")
    found = {name for name, node in group.members(None) if isinstance(node, zarr.Array)}
    assert found == set(STATE)
    for name, tensor in STATE.items():
        assert same(np.asarray(group[name][...]), tensor.whole)


def test_tied_tensors_are_unpacked_under_each_name(tmp_path: Path) -> None:
    def fill(writer: Writer) -> None:
        writer.add("embed", np.arange(3))
        writer.add_alias("head", "embed")

    store = MemoryStore()
    save_by(store, fill)
    with ckptkit.open(store) as checkpoint:
        ckptkit.unpack(checkpoint, tmp_path / "plain")
    group: Any = zarr.open_group(tmp_path / "plain", mode="r")
    assert group["head"][...].tolist() == group["embed"][...].tolist() == [0, 1, 2]


@pytest.mark.parametrize("target", ["plain", "plain/", "deep/er/plain", "empty", "."])
def test_a_folder_that_is_new_or_empty_will_do(
    store: MemoryStore, tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    if target == ".":
        monkeypatch.chdir(tmp_path / "empty")
        place = "."
    else:
        place = f"{tmp_path}/{target}"
    with ckptkit.open(store) as checkpoint:
        ckptkit.unpack(checkpoint, place)
    group: Any = zarr.open_group(tmp_path / ("empty" if target == "." else target), mode="r")
    assert same(group["scalar"][...], STATE["scalar"].whole)


def test_what_is_there_is_never_replaced(store: MemoryStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/notes").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = files(tmp_path)
    with ckptkit.open(store) as checkpoint:
        for name in ("file", "folder"):
            with pytest.raises(AlreadyExistsError) as caught:
                ckptkit.unpack(checkpoint, tmp_path / name)
            assert caught.value.where == str(tmp_path / name)
            assert caught.value.hint
        for name in ("link", "file/below"):
            with pytest.raises(CkptkitError):
                ckptkit.unpack(checkpoint, tmp_path / name)
    assert_nothing_left(tmp_path, before)
    assert (tmp_path / "link").is_symlink()


HELD_UP = """
import sys, time
import ckptkit

def held_up(_):
    print("half-way", flush=True)
    time.sleep(600)

with ckptkit.open(sys.argv[1]) as checkpoint:
    ckptkit.unpack(checkpoint, sys.argv[2], memory=1, progress=held_up)
"""


@contextmanager
def held_up(run: Path, target: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that unpacks, half-way; killed at the end, if it was not before."""
    command = [sys.executable, "-c", HELD_UP, str(run), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "half-way\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("target", ["plain", "deep/plain"])
def test_what_a_killed_call_left_is_removed_by_the_next_and_what_is_in_use_is_not(
    store: MemoryStore, tmp_path: Path, target: str
) -> None:
    run, plain = tmp_path / "run", tmp_path / target
    save(run, STATE, strategy="fsdp:2", chunk_bytes=16)
    others = [plain.with_name(name) for name in (".plain.partial-mine", ".other.partial-01234567")]
    with held_up(run, plain) as process, ckptkit.open(store) as checkpoint:
        for path in others:
            path.mkdir()
        before = files(plain.parent)
        with pytest.raises(AlreadyExistsError, match="somebody else writes") as caught:
            ckptkit.unpack(checkpoint, plain)
        assert caught.value.hint
        assert files(plain.parent) == before
        process.kill()
        process.wait()
        assert len(list(plain.parent.glob(".plain.partial-????????"))) == 1
        ckptkit.unpack(checkpoint, plain)
    left = {path.name for path in plain.parent.iterdir()} - {"run"}
    assert left == {"plain", *(path.name for path in others)}
    group: Any = zarr.open_group(plain, mode="r")
    assert same(group["scalar"][...], STATE["scalar"].whole)


def test_what_was_left_goes_even_where_the_folder_is_there_by_now(
    store: MemoryStore, tmp_path: Path
) -> None:
    run, plain, moved = (tmp_path / name for name in ("run", "plain", "moved"))
    save(run, STATE, strategy="fsdp:2", chunk_bytes=16)
    with held_up(run, plain):
        pass
    with ckptkit.open(store) as checkpoint:
        ckptkit.unpack(checkpoint, moved)
        moved.rename(plain)
        with pytest.raises(AlreadyExistsError, match="there is something already"):
            ckptkit.unpack(checkpoint, plain)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "plain"}


def test_nothing_is_written_or_removed_behind_links(store: MemoryStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "notes").write_text("mine")
    (tmp_path / ".plain.partial").symlink_to(outside / "notes")
    (tmp_path / ".plain.partial-01234567").symlink_to(outside)
    (tmp_path / "whole").symlink_to(outside / "folder")
    before = inodes(outside)
    with ckptkit.open(store) as checkpoint:
        for name in ("plain", "whole"):
            with pytest.raises(CkptkitError):
                ckptkit.unpack(checkpoint, tmp_path / name)
        (tmp_path / ".plain.partial").unlink()
        ckptkit.unpack(checkpoint, tmp_path / "plain")
    assert inodes(outside) == before


def exchange(one: Path, other: Path) -> None:
    """Each gets the name of the other in one moment: no thread finds neither of them."""
    now, both = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(now, os.fsencode(one), now, os.fsencode(other), both):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def test_a_folder_that_becomes_a_link_while_it_is_filled_leads_nowhere(
    store: MemoryStore, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    turns = threading.Lock()

    def swap(_: int) -> None:
        with turns:
            for folder in (
                *tmp_path.glob(".plain.partial-*/model"),
                *tmp_path.glob(".plain.partial-*"),
            ):
                if not folder.is_symlink():
                    aside = tmp_path / f"aside-{folder.name}"
                    aside.symlink_to(outside)
                    exchange(aside, folder)

    before = inodes(outside)
    with ckptkit.open(store) as checkpoint, pytest.raises(StorageError, match="a symbolic link"):
        ckptkit.unpack(checkpoint, tmp_path / "plain", progress=swap)
    assert inodes(outside) == before


@pytest.mark.parametrize("target", ["plain", "deep/er/plain"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no")], ids=repr)
@pytest.mark.parametrize("at", [1, 5])
def test_an_interruption_leaves_nothing(
    store: MemoryStore, tmp_path: Path, error: BaseException, at: int, target: str
) -> None:
    before = files(tmp_path)
    calls: list[int] = []
    lock = threading.Lock()

    def progress(count: int) -> None:
        with lock:
            calls.append(count)
            if len(calls) == at:
                raise error

    with ckptkit.open(store) as checkpoint, pytest.raises(type(error)):
        ckptkit.unpack(checkpoint, tmp_path / target, progress=progress)
    assert_nothing_left(tmp_path, before)


def test_a_damaged_chunk_leaves_nothing(store: MemoryStore, tmp_path: Path) -> None:
    damaged = flipped(store, STATE["scalar"].whole.tobytes())
    with ckptkit.open(damaged) as checkpoint, pytest.raises(CorruptionError):
        ckptkit.unpack(checkpoint, tmp_path / "plain")
    assert_nothing_left(tmp_path, {})


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """What is made durable or renamed, in order; paths relative to tmp_path."""
    events: list[tuple[str, Path]] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        events.append(("fsync", Path(os.path.relpath(path, tmp_path))))
        fsync(descriptor)

    def replaced(source: Path, target: Path) -> None:
        events.append(("replace", Path(os.path.relpath(target, tmp_path))))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    return events


def test_all_of_it_is_durable_before_it_appears_and_the_way_to_it_after(
    store: MemoryStore, tmp_path: Path, log: list[tuple[str, Path]]
) -> None:
    with ckptkit.open(store) as checkpoint:
        ckptkit.unpack(checkpoint, tmp_path / "deep/er/plain")
    plain = tmp_path / "deep/er/plain"
    appears = log.index(("replace", Path("deep/er/plain")))
    before = sorted(path.parts[3:] for _, path in log[:appears])
    assert before == sorted(p.relative_to(plain).parts for p in (plain, *plain.rglob("*")))
    assert log[appears + 1 :] == [("fsync", Path(p)) for p in ("deep/er", "deep", ".")]


@pytest.mark.parametrize("last", [False, True])
def test_what_cannot_be_made_durable_leaves_nothing(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    def broken(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path == tmp_path if last else path.name == "zarr.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)
    with ckptkit.open(store) as checkpoint, pytest.raises(StorageError) as caught:
        ckptkit.unpack(checkpoint, tmp_path / "plain")
    assert caught.value.where == str(tmp_path / "plain")
    assert "disk" in caught.value.hint
    assert_nothing_left(tmp_path, {})


def test_memory_is_bounded_by_what_is_allowed(tmp_path: Path) -> None:
    store = MemoryStore()
    save(store, {"w": Tensor(np.zeros((64, MB), np.uint8))}, chunk_bytes=4 * MB)
    with ckptkit.open(store) as checkpoint:
        checkpoint.read("w", verify=True)  # buffers that are kept are there from now on
        tracemalloc.start()
        try:
            ckptkit.unpack(checkpoint, tmp_path / "plain", memory="16MiB")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 10 * MB  # one thread: a chunk and its copy, and none that was written
