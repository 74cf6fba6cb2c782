"""Every call of the engine on a server that speaks S3."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptkit
from ckptkit import Run
from ckptkit.checkpoint.places import Place
from ckptkit.errors import CkptkitError, NotFoundError, StepExistsError
from ckptkit.storage import Store
from tests.checkpoint.reshard.toy import assert_same_state, reshard, save_toy
from tests.checkpoint.saving import Tensor, add, files, outcomes, random_values, same, save
from tests.servers.moto import Moto
from tests.servers.proxy import Proxy
from tests.servers.s3_server import SECRET_KEY, Bucket
from tests.storage.failing import FailingStore

STATE = {"model/w": Tensor(random_values((64, 32)), {"fsdp": "shard(0)"})}
ENGINES = ("obstore", "fsspec")


@pytest.fixture(params=ENGINES)
def options(bucket: Bucket, request: pytest.FixtureRequest) -> dict[str, object]:
    """Storage options of either engine."""
    return {**bucket.options, "engine": request.param}


def opened(bucket: Bucket, name: str, options: Any = None) -> Store:
    return ckptkit.open_store(f"{bucket.url}/{name}", options or bucket.options)


def test_a_step_goes_there_and_comes_back(bucket: Bucket, options: dict[str, object]) -> None:
    run = f"{bucket.url}/team/7b"
    save(run, STATE, strategy="fsdp:3", step=4, storage_options=options)
    with ckptkit.open(run, storage_options=options) as checkpoint:
        assert same(checkpoint.read("model/w"), STATE["model/w"].whole)
        array: Any = checkpoint.zarr["model/w"]
        assert same(np.asarray(array[...]), STATE["model/w"].whole)
        assert checkpoint.location == f"{run}/step-0000000004"
    assert Run(run, storage_options=options).steps() == [4]
    assert ckptkit.verify(run, storage_options=options) == []
    with pytest.raises(StepExistsError):
        save(run, STATE, strategy="fsdp:2", step=4, storage_options=options)
    assert ckptkit.verify(run, storage_options=options) == []
    save(run, STATE, strategy="fsdp:2", step=4, overwrite=True, storage_options=options)
    assert ckptkit.verify(run, storage_options=options) == []
    assert len(opened(bucket, "team/7b").list()) == 3


def place(where: str, bucket: Bucket, tmp_path: Path, name: str) -> Place:
    return f"{bucket.url}/{name}" if where == "s3" else tmp_path / name


@pytest.mark.parametrize(
    ("source", "destination", "engine"),
    [
        pytest.param("s3", "s3", "threads", marks=pytest.mark.long),
        ("s3", "local", "threads"),
        ("local", "s3", "threads"),
        ("s3", "s3", "processes"),
    ],
)
def test_a_reshard_between_any_two_places(
    bucket: Bucket, tmp_path: Path, source: str, destination: str, engine: str
) -> None:
    src = place(source, bucket, tmp_path, "a")
    dst = place(destination, bucket, tmp_path, "b")
    save_toy(ckptkit.open_store(src, bucket.options), "fsdp:3")  # type: ignore[arg-type]
    options: dict[str, Any] = {"engine": engine, "workers": 2, "storage_options": bucket.options}
    done = reshard(src, dst, "tp:4", **options)
    assert done.committed
    with ckptkit.open(dst, storage_options=bucket.options) as checkpoint:
        assert_same_state(checkpoint)
    assert ckptkit.verify(dst, storage_options=bucket.options) == []
    assert ckptkit.diff(src, dst, storage_options=bucket.options).same
    assert reshard(src, dst, "tp:4", **options).finished == (0, 1, 2, 3)


def test_each_side_may_need_options_of_its_own(bucket: Bucket, moto: Moto) -> None:
    save_toy(opened(bucket, "a"), "fsdp:3")
    with Proxy(moto.endpoint) as other:
        through = bucket.through(other.endpoint)
        reshard(
            f"{bucket.url}/a",
            f"{bucket.url}/b",
            "tp:2",
            source_options=through,
            storage_options=bucket.options,
        )
        assert other.counts["PUT"] == other.counts["POST"] == 0
        assert other.counts["GET"] > 3
        found = ckptkit.diff(
            f"{bucket.url}/a",
            f"{bucket.url}/b",
            source_options=bucket.options,
            storage_options=through,
        )
        assert found.same


def test_slices_and_lost_manifests(bucket: Bucket) -> None:
    source, destination = opened(bucket, "a"), opened(bucket, "b")
    save_toy(source, "fsdp:3")
    for number in range(2):
        reshard(source, destination, "fsdp:4", engine=f"slice:{number}/2")
    with pytest.raises(NotFoundError):
        ckptkit.open(destination)
    run, how = f"{bucket.url}/b", bucket.options
    assert ckptkit.commit_packs(run, storage_options=how).save.step == 7
    destination.delete(["step-0000000007/manifest.msgpack"])
    step = f"{run}/step-0000000007"
    assert ckptkit.rebuild(step, storage_options=how).save.step == 7
    with ckptkit.open(run, storage_options=how) as checkpoint:
        assert_same_state(checkpoint)
    explained = ckptkit.explain_rules(run, to="fsdp:2", storage_options=how)
    assert len(explained) > 10


def test_a_step_is_unpacked_from_afar(bucket: Bucket, tmp_path: Path) -> None:
    save(opened(bucket, "a"), STATE, strategy="fsdp:3")
    with ckptkit.open(f"{bucket.url}/a", storage_options=bucket.options) as checkpoint:
        ckptkit.unpack(checkpoint, tmp_path / "far")
        with pytest.raises(CkptkitError, match="only a local folder"):
            ckptkit.unpack(checkpoint, f"{bucket.url}/plain")
    save(tmp_path / "run", STATE, strategy="fsdp:3")
    with ckptkit.open(tmp_path / "run") as checkpoint:
        ckptkit.unpack(checkpoint, tmp_path / "near")
    assert files(tmp_path / "far") == files(tmp_path / "near")


@pytest.mark.parametrize("after", [False, True])
def test_whatever_operation_fails_the_step_is_whole_or_not_there(
    bucket: Bucket, after: bool
) -> None:
    run = opened(bucket, "a")
    save(run, STATE, strategy="fsdp:2")
    for number in range(1 + after, 25, 2):
        failing = FailingStore(run, fail_at=number, after=after)
        outcomes(failing, add_all, strategy="fsdp:2", step=2)
        steps = Run(run).steps()
        assert all(ckptkit.verify(opened(bucket, f"a/step-{step:010d}")) == [] for step in steps)
        if steps == [1, 2]:
            Run(run).delete([2])
        Run(run).prune(grace=0)
        assert len(run.list()) == 3


def add_all(writer: ckptkit.Writer) -> None:
    for name, tensor in STATE.items():
        add(writer, name, tensor)


def test_uploads_that_were_cut_off_are_pruned(bucket: Bucket, moto: Moto) -> None:
    run = opened(bucket, "a")
    save(run, STATE, strategy="fsdp:2")
    key = "a/step-0000000009/data/x/rank-00000.zip"
    moto.client.create_multipart_upload(Bucket=bucket.name, Key=key)
    # moto says of every upload that it was begun in 2010.
    assert [(it.kind, it.step) for it in Run(run).plan_prune(grace=0)] == [("leftover", 9)]
    assert len(moto.uploads(bucket)) == 1
    Run(run).prune(grace=0)
    assert moto.uploads(bucket) == []
    assert Run(run).steps() == [1]


def test_two_jobs_save_one_step_and_the_loser_removes_its_own_data(bucket: Bucket) -> None:
    class Slow(FailingStore):
        """Another job commits just before this one does."""

        def put(
            self, key: str, data: bytes | bytearray | memoryview, *, exclusive: bool = False
        ) -> None:
            save(opened(bucket, "a"), STATE, strategy="fsdp:2")
            super().put(key, data, exclusive=exclusive)

    errors = outcomes(Slow(opened(bucket, "a"), fail_at=1 << 60), add_all, strategy="fsdp:3")
    assert isinstance(errors[0], StepExistsError)
    assert ckptkit.verify(opened(bucket, "a")) == []
    with ckptkit.open(opened(bucket, "a")) as checkpoint:
        assert str(checkpoint.strategy) == "fsdp:2"
    assert len(opened(bucket, "a").list()) == 3


def test_a_run_is_shown_with_few_requests(bucket: Bucket, moto: Moto) -> None:
    for step in range(5):
        save(opened(bucket, "a"), STATE, strategy="fsdp:2", step=step)
    with Proxy(moto.endpoint) as proxy:
        options = bucket.through(proxy.endpoint)
        ckptkit.open(f"{bucket.url}/a", storage_options=options).close()
        assert proxy.counts.total() <= 3
        proxy.forget()
        ckptkit.open(f"{bucket.url}/a/step-0000000003", storage_options=options).close()
        assert proxy.counts.total() == 1


def test_the_secret_is_nowhere(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "ckptkit")
    run = f"{bucket.url}/a"
    save(run, STATE, strategy="fsdp:2", storage_options=bucket.options)
    said = []
    with ckptkit.open(run, storage_options=bucket.options) as checkpoint:
        said += [repr(checkpoint), repr(checkpoint.store), str(checkpoint.store.address)]
        said += [repr(checkpoint.store.address), repr(checkpoint.zarr)]
    for wrong in (f"{bucket.url}-other/a", f"{bucket.url}/b"):
        with pytest.raises(CkptkitError) as caught:
            ckptkit.open(wrong, storage_options=bucket.options)
        said += [str(caught.value), repr(caught.value)]
    assert SECRET_KEY not in "".join([*said, caplog.text])
    store = opened(bucket, "a")
    assert not [it for it in store.list() if SECRET_KEY.encode() in store.read(it.key)]
