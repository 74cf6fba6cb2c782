"""A reshard that is cut off leaves no step, and the same call goes on where it was."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import pytest

import ckptkit
from ckptkit.checkpoint.reshard import engines
from ckptkit.errors import (
    CkptkitError,
    CorruptionError,
    NotFoundError,
    PeerError,
    StepExistsError,
    StorageError,
)
from ckptkit.storage import LocalStore, Location, MemoryStore
from tests.checkpoint.remote import RemoteStore
from tests.checkpoint.reshard.toy import assert_same_state, reshard, save_toy, saved
from tests.checkpoint.saving import Tensor, contents, files, memory_with, random_values, same, save
from tests.storage.counting import CountingStore
from tests.storage.failing import EXIT_CODE, FailingStore

STEP = "step-0000000007"


def operations() -> int:
    failing = FailingStore(MemoryStore(), fail_at=10**9)
    reshard(saved("fsdp:3"), failing, "tp:4", workers=1)
    return failing.operations


@pytest.mark.parametrize("after", [False, True])
def test_whatever_fails_leaves_no_step_and_the_next_run_finishes(
    tmp_path: Path, after: bool
) -> None:
    whole = failed = 0
    for fail_at in range(1, operations() + 1):
        destination = LocalStore(tmp_path / str(fail_at))
        failing = FailingStore(destination, fail_at=fail_at, after=after)
        try:
            reshard(saved("fsdp:3"), failing, "tp:4", workers=1)
        except StorageError:
            failed += 1
        if ckptkit.Run(destination).steps():
            # The commit itself, its answer lost or what comes after it failing, makes a whole step.
            whole += 1
            assert not ckptkit.verify(destination)
        reshard(saved("fsdp:3"), destination, "tp:4")
        with ckptkit.open(destination) as checkpoint:
            assert_same_state(checkpoint)
        assert not ckptkit.verify(destination)
    assert failed > 20
    assert whole < 5


_KILLED = """
import sys
from ckptkit.checkpoint.reshard import engines
from ckptkit.storage import LocalStore
from tests.storage.failing import FailingStore
from tests.checkpoint.reshard.toy import reshard
engines.QUIET_SECONDS = 0.0
source, destination = map(LocalStore, sys.argv[1:3])
for fail_at in map(int, sys.argv[3:]):
    import os
    child = os.fork()
    if not child:
        reshard(source, FailingStore(destination, fail_at=fail_at, how="exit"), "tp:4", workers=1)
        os._exit(0)
    print(fail_at, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_killed_at_any_point_it_leaves_no_step_and_the_next_run_finishes(tmp_path: Path) -> None:
    source, destination = tmp_path / "a", tmp_path / "b"
    save_toy(LocalStore(source), "fsdp:3")
    # One kill after the other over the same destination: each begins with what the others left.
    points = [str(point) for point in range(1, operations() - 4, 3)]
    command = [sys.executable, "-c", _KILLED, str(source), str(destination), *points]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    codes = {line.split()[1] for line in done.stdout.splitlines()}
    assert str(EXIT_CODE) in codes
    assert codes <= {str(EXIT_CODE), "0"}
    reshard(source, destination, "tp:4")
    with ckptkit.open(destination) as checkpoint:
        assert_same_state(checkpoint)
    assert not ckptkit.verify(destination)


def test_packs_that_are_whole_are_used_again_and_others_are_not() -> None:
    whole = MemoryStore()
    reshard(saved("fsdp:3"), whole, "tp:4")
    objects = contents(whole)
    del objects[f"{STEP}/manifest.msgpack"]
    packs = [key for key in objects if key.endswith(".zip")]
    damaged = bytearray(objects[packs[1]])
    damaged[len(damaged) // 3] ^= 1
    objects[packs[1]] = bytes(damaged)
    objects[packs[2]] = objects[packs[2]][:-40]
    del objects[packs[3]]
    counting = CountingStore(memory_with(objects))
    done = reshard(saved("fsdp:3"), counting, "tp:4")
    assert (done.packs, done.finished) == (4, (0,))
    assert counting.operations["create"] == 3
    assert contents(whole) == {e.key: counting.read(e.key) for e in counting.list()}


def test_another_strategy_is_another_step() -> None:
    destination = MemoryStore()
    reshard(saved("fsdp:8"), destination, "fsdp:4")
    for other in ("fsdp:2", "zero3:4", "ddp:4"):
        with pytest.raises(StepExistsError):
            reshard(saved("fsdp:8"), destination, other)
    reshard(saved("fsdp:8"), destination, "zero3:4", overwrite=True)
    with ckptkit.open(destination) as checkpoint:
        assert str(checkpoint.strategy) == "zero3:4"
    assert not ckptkit.verify(destination)


def test_a_pack_that_another_run_is_writing_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = tmp_path / "a", tmp_path / "b"
    save_toy(LocalStore(source), "fsdp:3")
    reshard(source, destination, "tp:4", engine="slice:0/4")
    (pack,) = destination.glob("step-*/data/*/rank-00000.zip")
    whole = pack.read_bytes()
    monkeypatch.setattr(engines, "QUIET_SECONDS", 0.5)
    done = threading.Event()

    def write() -> None:
        while not done.wait(0.1):
            pack.write_bytes(whole[:-5])

    pack.write_bytes(whole[:-5])
    writer = threading.Thread(target=write)
    writer.start()
    try:
        with pytest.raises(PeerError, match="another reshard of the same step is writing"):
            reshard(source, destination, "tp:4")
    finally:
        done.set()
        writer.join()
    assert pack.read_bytes() == whole[:-5]
    reshard(source, destination, "tp:4")
    with ckptkit.open(destination) as checkpoint:
        assert_same_state(checkpoint)


def test_a_done_reshard_is_not_done_again() -> None:
    destination = CountingStore(MemoryStore())
    reshard(saved("fsdp:3"), destination, "tp:4")
    destination.reset()
    done = reshard(saved("fsdp:3"), destination, "tp:4")
    assert (done.committed, done.finished) == (True, (0, 1, 2, 3))
    assert destination.bytes_written == 0


def test_a_damaged_chunk_of_the_source_is_named_and_nothing_is_committed(tmp_path: Path) -> None:
    source, destination = tmp_path / "a", tmp_path / "b"
    save_toy(LocalStore(source), "fsdp:3")
    with ckptkit.open(source) as checkpoint:
        manifest = checkpoint.manifest
        number = [a.name for a in manifest.arrays].index("optimizer/layers.1.up/exp_avg")
        row = int(manifest.starts[number])
        pack = manifest.packs[int(manifest.pack[row])].name
        offset = int(manifest.offset[row])
        path = source / STEP / "data" / manifest.save.save_id / pack
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)
    before = files(source)
    with pytest.raises(CorruptionError) as caught:
        reshard(source, destination, "tp:4")
    assert "optimizer/layers.1.up/exp_avg/c/0/0" in str(caught.value)
    assert pack in str(caught.value)
    with pytest.raises(NotFoundError):
        ckptkit.open(destination)
    assert files(source) == before


def test_slices_make_a_step_together(tmp_path: Path) -> None:
    source, destination = tmp_path / "a", tmp_path / "b"
    save_toy(LocalStore(source), "fsdp:3")
    for number in (2, 0):
        done = reshard(source, destination, "fsdp:8", engine=f"slice:{number}/3")
        assert not done.committed
    with pytest.raises(NotFoundError, match=r"missing are 3 of 8 packs, of the ranks 1, 4, 7"):
        ckptkit.commit_packs(destination)
    reshard(source, destination, "fsdp:8", engine="slice:1/3")
    (save_id,) = [path.name for path in destination.glob("step-*/data/*")]
    with pytest.raises(NotFoundError, match="no such save") as caught:
        ckptkit.commit_packs(destination, save_id="typo")
    assert caught.value.hint == f"there is {save_id}"
    assert ckptkit.commit_packs(destination).save.step == 7
    with ckptkit.open(destination) as checkpoint:
        assert_same_state(checkpoint)
    with pytest.raises(NotFoundError, match="every step is committed"):
        ckptkit.commit_packs(destination)


def test_a_slice_checks_of_large_chunks_those_that_it_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ckptkit.checkpoint.reshard.target._LARGEST_CHUNK", 1 << 20)
    whole, share = random_values((1280, 4096)), 5 << 20
    source, destination = RemoteStore(), MemoryStore()
    tensor = Tensor(whole, {"fsdp": "shard(0)"})
    save(source, {"model/w": tensor}, strategy="fsdp:4", chunk_bytes=1 << 30)
    (key,) = (e.key for e in source.list() if "rank-00002" in e.key)
    good = source.behind.read(key)
    source.behind.put(key, good[:share] + bytes([good[share] ^ 1]) + good[share + 1 :])
    for number in range(4):
        source.reset()
        with pytest.raises(CorruptionError) if number < 2 else nullcontext():
            ckptkit.reshard(source, destination, to="fsdp:8", engine=f"slice:{number}/4")
        # Two chunks to check them, and for each of its two ranks a half of one.
        assert source.bytes_read < 3.1 * share
    source.behind.put(key, good)
    with pytest.raises(NotFoundError, match="the first pack is missing"):
        ckptkit.commit_packs(destination)
    ckptkit.reshard(source, destination, to="fsdp:8", engine="slice:0/4")
    with pytest.raises(NotFoundError, match="of the ranks 1, 5"):
        ckptkit.commit_packs(destination)
    ckptkit.reshard(source, destination, to="fsdp:8", engine="slice:1/4")
    ckptkit.commit_packs(destination)
    with ckptkit.open(destination) as checkpoint:
        assert same(checkpoint["model/w"].read(), whole)


def test_what_slices_wrote_is_durable_before_it_is_committed(tmp_path: Path) -> None:
    synced: list[str] = []

    class Noting(LocalStore):
        def sync(self, keys: Iterable[str]) -> None:
            synced.extend(keys)
            super().sync(synced)
            assert not ckptkit.Run(self).steps()

    destination = Noting(Location.parse(tmp_path))
    for number in range(2):
        reshard(saved("fsdp:3"), destination, "fsdp:4", engine=f"slice:{number}/2")
    assert not synced
    manifest = ckptkit.commit_packs(destination)
    packs = [f"{STEP}/data/{manifest.save.save_id}/{pack.name}" for pack in manifest.packs]
    assert synced == packs
    assert len(packs) >= 4


def test_slices_replace_a_step_that_is_there(tmp_path: Path) -> None:
    source, destination = tmp_path / "a", tmp_path / "b"
    save_toy(LocalStore(source), "fsdp:3")
    reshard(source, destination, "ddp:2")
    for number in range(2):
        reshard(source, destination, "fsdp:4", engine=f"slice:{number}/2", overwrite=True)
    assert str(ckptkit.commit_packs(destination, overwrite=True).save.strategy) == "fsdp:4"
    with ckptkit.open(destination) as checkpoint:
        assert_same_state(checkpoint)


def test_processes_make_the_same_bytes_as_threads(tmp_path: Path) -> None:
    source = tmp_path / "a"
    save_toy(LocalStore(source), "fsdp:3")
    reshard(source, tmp_path / "b", "tp:4")
    reshard(source, tmp_path / "c", "tp:4", engine="processes", workers=2)
    assert files(tmp_path / "b") == files(tmp_path / "c")


def test_an_error_in_another_process_arrives_as_itself(tmp_path: Path) -> None:
    source = tmp_path / "a"
    save_toy(LocalStore(source), "fsdp:3")
    (pack,) = source.glob("step-*/data/*/rank-00001.zip")
    pack.write_bytes(pack.read_bytes()[:-1])
    with pytest.raises(CkptkitError, match="the pack has"):
        reshard(source, tmp_path / "c", "tp:4", engine="processes", workers=1)
