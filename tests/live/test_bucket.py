"""Live saves and loads in a bucket, and from a local folder into one, on a real server."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import ckptkit
from ckptkit.checkpoint.run import mirror
from ckptkit.errors import NotFoundError
from ckptkit.live import Checkpointer, load, load_state, save
from ckptkit.storage import open_store
from tests.live.gathering import Arrays, gathered, same, scramble
from tests.live.pool import Died, Pool
from tests.live.strategies import LAYOUTS, build
from tests.servers.s3_server import Bucket


def save_by_all(layout: str, local: str, url: str, options: Mapping[str, object]) -> Arrays:
    job = build(layout)
    job.train(range(2))
    with Checkpointer(
        url,
        local=local,
        asynchronous=True,
        keep_last=1,
        differing=["*seen"],
        storage_options=options,
        timeout=60,
    ) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, model=job.model, optimizer=job.optimizer)
    return gathered(job)


def restore_by_all(
    layout: str, local: str | None, url: str, options: Mapping[str, object]
) -> Arrays:
    job = build(layout, seed=5)
    job.train([7])
    scramble(job, forget=True)
    with Checkpointer(url, local=local, storage_options=options, timeout=60) as checkpointer:
        restored = checkpointer.restore(model=job.model, optimizer=job.optimizer, read_once=True)
    assert restored
    assert restored.step == 2
    assert restored.report.is_exact
    return gathered(job)


def whole(ranks: Sequence[Arrays]) -> Arrays:
    found: dict[str, Any] = {}
    for rank in ranks:
        found = dict(rank) | found
    return found


@pytest.mark.parametrize(("saving", "loading"), [("fsdp2:2", "ddp:3"), ("ddp:2", "fsdp2:2")])
def test_a_job_saves_locally_and_another_restores_from_the_bucket(
    gloo: Pool, tmp_path: Path, bucket: Bucket, saving: str, loading: str
) -> None:
    url, options = f"{bucket.url}/runs/7b", dict(bucket.options)
    arguments = str(tmp_path / "nvme"), url, options
    saved = whole(gloo.run(LAYOUTS[saving].ranks, save_by_all, saving, *arguments))
    for place, given in ((tmp_path / "nvme", None), (url, options)):
        with ckptkit.Run(place, storage_options=given).open() as step:
            assert step.step == 2
            assert [name for name in saved if not same(step.read(name), saved[name])] == []
        assert ckptkit.verify(place, storage_options=given) == []
        assert ckptkit.Run(place, storage_options=given).steps() == [2]
    for local in (str(tmp_path / "nvme"), str(tmp_path / "another"), None):
        found = gloo.run(LAYOUTS[loading].ranks, restore_by_all, loading, local, url, options)
        assert [n for n in saved if not same(whole(found)[n], saved[n])] == []


def die_while_copying(layout: str, local: str, url: str, options: Mapping[str, object]) -> None:
    """Every rank is killed when its pack has arrived, before there is a manifest."""
    copy_pack = mirror._Copying._copy

    def and_die(copying: Any, pack: int) -> int:
        copy_pack(copying, pack)
        os._exit(9)

    with patch.object(mirror._Copying, "_copy", and_die):
        save_by_all(layout, local, url, options)


def test_a_job_killed_between_the_two_commits_loses_nothing(
    gloo: Pool, tmp_path: Path, bucket: Bucket
) -> None:
    local, url, options = tmp_path / "nvme", f"{bucket.url}/run", dict(bucket.options)
    arguments = "fsdp2:2", str(local), url, options
    assert gloo.run(2, die_while_copying, *arguments, may_die=[0, 1]) == [Died(9)] * 2
    there = ckptkit.Run(url, storage_options=options)
    newest = ckptkit.Run(local).latest()
    begun = {entry.key for entry in open_store(url, options).list()}
    assert (newest is not None, there.steps()) == (True, [])
    assert begun
    with Checkpointer(url, local=local, storage_options=options) as checkpointer:
        restored = checkpointer.restore(partial=True)
        assert restored
        assert restored.step == newest
    assert there.steps() == ckptkit.Run(local).steps()
    assert begun < {entry.key for entry in open_store(url, options).list()}
    assert ckptkit.verify(url, storage_options=options) == []


def save_and_load(layout: str, url: str, options: Mapping[str, object]) -> list[str]:
    """Without a local folder; the names of what came back otherwise."""
    job = build(layout)
    job.train(range(2))
    save(
        url,
        step=1,
        model=job.model,
        optimizer=job.optimizer,
        differing=["*seen"],
        storage_options=options,
    )
    before = gathered(job)
    wrong = []
    for read_once in (False, True):
        scramble(job, forget=False)
        load(
            url,
            model=job.model,
            optimizer=job.optimizer,
            storage_options=options,
            read_once=read_once,
        )
        after = gathered(job)
        # Of buffers, which ranks may disagree about, the first rank's are saved.
        names = [name for name in before if not name.endswith("seen")]
        wrong += [name for name in names if not same(after[name], before[name])]
    return wrong


@pytest.mark.parametrize("layout", ["plain", "ddp:2", "fsdp2:3"])
def test_a_bucket_is_a_place_like_any_other(gloo: Pool, bucket: Bucket, layout: str) -> None:
    options = dict(bucket.options)
    found = gloo.run(LAYOUTS[layout].ranks, save_and_load, layout, bucket.url, options)
    assert found == [[]] * LAYOUTS[layout].ranks
    tensors = load_state(bucket.url, storage_options=options)
    with ckptkit.open(bucket.url, storage_options=options) as step:
        assert sorted(tensors) == sorted(step.arrays)
        assert all(same(tensors[n].numpy(), step.read(n)) for n in tensors)


def test_a_bucket_that_is_not_there_is_named(bucket: Bucket) -> None:
    checkpointer = Checkpointer("s3://no-such-bucket-here/run", storage_options=bucket.options)
    with pytest.raises(NotFoundError, match="no-such-bucket-here"), checkpointer:
        checkpointer.save(1, extra={"x": 1})
