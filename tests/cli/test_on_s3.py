"""Every command on a server that speaks S3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ckptkit.cli.show import show
from click.testing import Result

import ckptkit
from tests.checkpoint.saving import Tensor, random_values, save
from tests.cli.programs import ckpt, document
from tests.servers.moto import Moto
from tests.servers.proxy import Proxy
from tests.servers.s3_server import SECRET_KEY, Bucket

STATE = {"model/w": Tensor(random_values((64, 32)), {"fsdp": "shard(0)"})}


def how(bucket: Bucket, name: str = "--storage-option", **more: str) -> list[str]:
    """The options of a command that reach a bucket."""
    options = {**bucket.options, **more}
    return [word for key, value in options.items() for word in (name, f"{key}={value}")]


@pytest.fixture
def run(bucket: Bucket) -> str:
    """The URL of a run with two steps and a third that was never committed."""
    url = f"{bucket.url}/7b"
    store = ckptkit.open_store(url, bucket.options)
    for step in (1, 2):
        save(store, STATE, strategy="fsdp:2", step=step)
    store.put("step-0000000003/data/x/rank-00000.zip", b"x")
    return url


def test_steps_are_listed_shown_and_verified(run: str, bucket: Bucket) -> None:
    told = document("ls", run, *how(bucket))
    assert [(it["step"], it["committed"]) for it in told["steps"]] == [
        (1, True),
        (2, True),
        (3, False),
    ]
    assert told["run"] == run
    assert document("show", run, *how(bucket))["location"] == f"{run}/step-0000000002"
    assert document("verify", run, "--digest", *how(bucket))["ok"]
    assert document("rules", run, "--to", "fsdp:4", *how(bucket))["unknown"] == []
    assert ckpt("show", f"{run}/step-0000000003", *how(bucket)).exit_code == 4
    assert ckpt("ls", f"{bucket.url}/nothing", *how(bucket)).exit_code == 4


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_showing_takes_few_requests(run: str, bucket: Bucket, moto: Moto, engine: str) -> None:
    with Proxy(moto.endpoint) as proxy:
        options = how(bucket, endpoint=proxy.endpoint, engine=engine)
        assert ckpt("show", run, *options).exit_code == 0
        assert proxy.counts.total() <= 3
        proxy.forget()
        assert ckpt("show", f"{run}/step-0000000001", *options).exit_code == 0
        assert proxy.counts.total() == 1


def test_a_step_is_resharded_compared_and_unpacked(
    run: str, bucket: Bucket, tmp_path: Path
) -> None:
    other = f"{bucket.url}/other"
    plan = document("reshard", "--to", "fsdp:4", run, other, "--dry-run", *how(bucket))
    assert plan["destination"] == f"{other}/step-0000000002"
    assert document("reshard", "--to", "fsdp:4", run, other, *how(bucket))["committed"]
    assert document("diff", run, other, *how(bucket))["same"]
    local = tmp_path / "local"
    assert document("reshard", "--to", "fsdp:3", run, local, *how(bucket))["committed"]
    own = how(bucket, "--source-option")
    assert document("diff", run, local, *own)["same"]
    assert document("unpack", run, tmp_path / "plain", *how(bucket))["files"] > 2
    refused = ckpt("unpack", run, f"{bucket.url}/plain", *how(bucket))
    assert refused.exit_code == 2
    assert "only a local folder" in refused.stderr


def test_slices_are_committed_and_manifests_rebuilt(run: str, bucket: Bucket) -> None:
    other = f"{bucket.url}/other"
    for number in range(2):
        slices = ("--engine", f"slice:{number}/2")
        told = document("reshard", "--to", "fsdp:4", run, other, *slices, *how(bucket))
        assert not told["committed"]
    assert document("commit", other, *how(bucket))["packs"] == 4
    store = ckptkit.open_store(other, bucket.options)
    store.delete(["step-0000000002/manifest.msgpack"])
    assert ckpt("rebuild", other, *how(bucket)).exit_code == 2
    assert document("rebuild", f"{other}/step-0000000002", *how(bucket))["packs"] == 4


def test_what_a_run_does_not_need_is_pruned(run: str, bucket: Bucket, moto: Moto) -> None:
    moto.client.create_multipart_upload(Bucket=bucket.name, Key="7b/step-0000000004/data/y/a.zip")
    told = document("prune", run, "--grace", "0", "--keep-last", "1", *how(bucket))
    kinds = [(it["kind"], it["step"]) for it in told["removed"]]
    assert kinds == [("step", 1), ("orphan", 3), ("leftover", 4)]
    assert told["kept"] == [2]
    assert moto.uploads(bucket) == []
    assert document("prune", run, "--grace", "0", *how(bucket))["removed"] == []


def test_only_an_upload_that_was_cut_off_makes_a_place_to_prune(bucket: Bucket, moto: Moto) -> None:
    moto.client.create_multipart_upload(Bucket=bucket.name, Key="new/step-0000000004/data/y/a.zip")
    url = f"{bucket.url}/new"
    assert len(document("prune", url, "--grace", "0", *how(bucket))["removed"]) == 1
    assert ckpt("prune", url, "--grace", "0", *how(bucket)).exit_code == 4


def test_the_environment_says_what_options_leave_out(
    run: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", str(bucket.options["endpoint"]))
    monkeypatch.setenv("AWS_REGION", str(bucket.options["region"]))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", str(bucket.options["access_key"]))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", str(bucket.options["secret_key"]))
    assert document("show", run)["step"] == 2


def all_of(result: Result) -> str:
    return f"{result.stdout}{result.stderr}{result.exception!r}"


@pytest.mark.parametrize(
    "wrong",
    [
        ["--storage-option", f"secret_key:{SECRET_KEY}"],
        ["--storage-option", SECRET_KEY],
        ["--storage-option", f"secret-key={SECRET_KEY}"],
        ["--storage-option", f"secretkey={SECRET_KEY}"],
        ["--storage-option", f"={SECRET_KEY}"],
    ],
    ids=range(5),
)
@pytest.mark.parametrize("command", ["show", "ls", "verify", "prune"])
def test_a_wrong_option_is_refused_without_being_shown(command: str, wrong: list[str]) -> None:
    result = ckpt(command, "s3://bucket/run", *wrong)
    assert result.exit_code == 2, all_of(result)
    assert SECRET_KEY not in all_of(result)


def test_options_change_nothing_for_a_folder(tmp_path: Path) -> None:
    save(tmp_path / "run", STATE, strategy="fsdp:2")
    assert document("show", tmp_path / "run", "--storage-option", "region=x")["step"] == 1


def test_a_url_is_not_completed_as_a_folder() -> None:
    nothing: Any = None
    (step,) = [param for param in show.params if param.name == "step"]
    assert step.shell_complete(nothing, "s3://bucket/ru") == []
    assert [it.type for it in step.shell_complete(nothing, "runs/")] == ["dir"]


def test_the_program_prints_no_secret_when_a_bucket_is_wrong(bucket: Bucket) -> None:
    result = ckpt("show", f"{bucket.url}-other/run", *how(bucket), "--json")
    assert result.exit_code == 4
    assert SECRET_KEY not in all_of(result)
    assert "hint:" in result.stderr
