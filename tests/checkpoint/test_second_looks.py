"""What was true when it was planned, opened or half-written is looked at again before it counts."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptkit
from ckptkit import FileBarrier, Run, Sum, ThreadBarrier, Writer
from ckptkit.checkpoint.run.run import remove
from ckptkit.errors import FormatError, PeerError, StorageError, UsageError
from ckptkit.storage import LocalStore, MemoryStore
from tests.checkpoint.saving import outcomes


def save(place: MemoryStore | Path, step: int, value: float, *, overwrite: bool = False) -> None:
    with Writer(place, step=step, overwrite=overwrite) as writer:
        writer.add("model/w", np.full(5, value))


def test_a_step_saved_anew_after_planning_is_not_pruned() -> None:
    store = MemoryStore()
    for step in (1, 2):
        save(store, step, step)
    plan = Run(store).plan_prune(keep_last=1)
    save(store, 1, 7.0, overwrite=True)
    remove(store, plan)
    assert Run(store).steps() == [1, 2]
    assert Run(store).open(1)["model/w"][0] == 7.0


def test_a_pickled_checkpoint_never_reads_another_save(tmp_path: Path) -> None:
    save(tmp_path, 1, 2.0)
    with ckptkit.open(tmp_path) as checkpoint:
        travelled = pickle.loads(pickle.dumps(checkpoint))
        assert travelled["model/w"][0] == 2.0
        frozen = pickle.dumps(checkpoint)
    travelled.close()
    save(tmp_path, 1, 7.0, overwrite=True)
    with pytest.raises(FormatError, match="saved anew"):
        pickle.loads(frozen)


def test_a_manifest_that_is_there_but_not_durable_is_put_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = LocalStore.put
    calls = []

    def refused_after(self: LocalStore, key: str, data: bytes, *, exclusive: bool = False) -> None:
        calls.append(exclusive)
        put(self, key, data, exclusive=exclusive)
        if len(calls) == 1:
            raise StorageError("the folder could not be synced", where=key)

    monkeypatch.setattr(LocalStore, "put", refused_after)
    save(tmp_path, 1, 2.0)
    assert calls == [True, False]
    assert ckptkit.verify(tmp_path) == []


def test_half_written_group_documents_are_written_again_by_rebuild(tmp_path: Path) -> None:
    def fill(writer: Writer) -> None:
        group = ("model", "optimizer")[writer.rank]
        writer.add(
            f"{group}/w{writer.rank}",
            np.zeros(4),
            placements={"pp": f"stage({writer.rank})"},
            shape=(4,),
        )

    assert outcomes(tmp_path, fill, strategy="pp:2", step=1) == [None, None]
    (groups,) = tmp_path.glob("step-*/data/*/groups.zip")
    groups.write_bytes(bytes(groups.stat().st_size))
    (manifest,) = tmp_path.glob("step-*/manifest.msgpack")
    manifest.unlink()
    ckptkit.rebuild(manifest.parent)
    assert ckptkit.verify(tmp_path) == []


def test_a_folder_in_which_ranks_met_before_is_refused(tmp_path: Path) -> None:
    barrier = FileBarrier(tmp_path / "meet", 0, 1)
    barrier.share(lambda: "hello")
    with pytest.raises(UsageError, match="before"):
        FileBarrier(tmp_path / "meet", 0, 1)


def test_sums_of_different_shapes_are_refused_before_they_count() -> None:
    def fill(writer: Writer) -> None:
        writer.add_object("n", Sum(np.zeros(1 + writer.rank)))

    store = MemoryStore()
    errors = outcomes(store, fill, strategy="fsdp:2", step=1)
    assert all(isinstance(error, PeerError) for error in errors)
    assert Run(store).steps() == []


def test_rank_0_does_not_wait_for_others_once_the_step_exists() -> None:
    class Interrupted(ThreadBarrier):
        def share(self, answer: Callable[[], Any]) -> Any:
            if self._round > 1:
                raise KeyboardInterrupt
            return super().share(answer)

    store = MemoryStore()
    barriers = ThreadBarrier.group(2, timeout=5)
    barriers[1].__class__ = Interrupted
    outcome: dict[int, BaseException | None] = {}

    def run(barrier: ThreadBarrier) -> None:
        try:
            with Writer(store, step=1, strategy="fsdp:2", rank=barrier.rank, barrier=barrier) as w:
                w.add("model/w", np.zeros(8))
            outcome[barrier.rank] = None
        except BaseException as error:  # noqa: BLE001 — every way to fail is an outcome
            outcome[barrier.rank] = error

    ranks = [threading.Thread(target=run, args=(barrier,)) for barrier in barriers]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert outcome[0] is None
    assert isinstance(outcome[1], KeyboardInterrupt)
    assert ckptkit.verify(store) == []
