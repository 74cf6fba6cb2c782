"""Locations: what is accepted, what they look like, and that no secret shows."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from ckptkit.errors import UsageError
from ckptkit.storage import LocalStore, Location, MemoryStore, open_store


@pytest.mark.parametrize(
    ("text", "scheme", "path", "shown"),
    [
        ("/a/b", "file", "/a/b", "/a/b"),
        ("/a//b/../c/", "file", "/a/c", "/a/c"),
        ("//a/b", "file", "/a/b", "/a/b"),
        ("/", "file", "/", "/"),
        ("file:///a/b%20c", "file", "/a/b c", "/a/b c"),
        ("FILE://localhost/a", "file", "/a", "/a"),
        ("/odd/a:b@c%20d", "file", "/odd/a:b@c%20d", "/odd/a:b@c%20d"),
        ("memory://name", "memory", "name", "memory://name"),
        ("memory://name/x/y/", "memory", "name/x/y", "memory://name/x/y"),
        ("s3://bucket", "s3", "bucket", "s3://bucket"),
        ("s3://bucket/run/a b%20~/", "s3", "bucket/run/a b%20~", "s3://bucket/run/a b%20~"),
        ("S3A://bucket/x", "s3", "bucket/x", "s3://bucket/x"),
        ("gcs://bucket/x", "gs", "bucket/x", "gs://bucket/x"),
        ("abfs://container/x", "az", "container/x", "az://container/x"),
        ("sftp://me@host/x", "sftp", "me@host/x", "sftp://me@host/x"),
    ],
)
def test_paths_and_urls_are_parsed(text: str, scheme: str, path: str, shown: str) -> None:
    location = Location.parse(text)
    assert (location.scheme, location.path) == (scheme, path)
    assert str(location) == shown
    assert Location.parse(location) is location
    assert Location.parse(str(location)) == location
    assert pickle.loads(pickle.dumps(location)) == location
    assert "secret" not in repr(location)


def test_relative_paths_and_home_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert Location.parse("runs/a").path == str(tmp_path / "runs/a")
    assert Location.parse(Path("./runs")).path == str(tmp_path / "runs")
    assert Location.parse("~/runs").path == "/home/someone/runs"


def test_a_relative_path_in_a_folder_that_is_gone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UsageError, match="the current folder is gone") as caught:
        Location.parse("runs")
    assert caught.value.hint
    assert Location.parse(tmp_path).path == str(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a\0b",
        "file:///a%00b",
        "file://host/a",
        "memory://",
        "memory://a//b",
        "memory://a/../b",
        "http://x/y",
        "nonsense://x/y",
        "s3://",
        "s3:///x",
        "s3://bucket//x",
        "gs://bucket/../x",
        "simplecache::s3://bucket/x",
        "~no-such-user-here/x",
        Path("memory://name/x"),
        Path("s3://bucket/x"),
    ],
)
def test_what_is_no_location_is_refused_with_a_hint(text: str | Path) -> None:
    with pytest.raises(UsageError) as caught:
        Location.parse(text)
    assert caught.value.hint or not str(text) or "\0" in str(text) or "%00" in str(text)


def test_an_unknown_url_names_what_is_accepted() -> None:
    with pytest.raises(UsageError) as caught:
        Location.parse("nonsense://x")
    assert "s3://" in caught.value.hint
    with pytest.raises(UsageError) as caught:
        Location.parse("http://127.0.0.1:9000/bucket")
    assert "endpoint" in caught.value.hint


@pytest.mark.parametrize(
    "text",
    ["s3://key:secret@bucket/x", "memory://me:secret@name", "sftp://me:secret@host/x", "s3://k@b"],
)
def test_credentials_in_a_url_are_refused_without_being_shown(text: str) -> None:
    with pytest.raises(UsageError, match="credentials") as caught:
        Location.parse(text)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "path"), [("nonsense", "/x"), ("s3", "a//b"), ("file", "x"), ("file", "")]
)
def test_a_location_made_by_hand_is_checked_too(scheme: str, path: str) -> None:
    with pytest.raises(UsageError):
        Location(scheme, path)


def test_locations_have_names_below_and_parents_above() -> None:
    run = Location.parse("/runs/seven")
    assert str(run / "step-1" / "data/x") == "/runs/seven/step-1/data/x"
    assert ((run / "step-1").name, (run / "step-1").parent) == ("step-1", run)
    assert run.parent.parent == run.parent.parent.parent == Location.parse("/")
    assert str(Location.parse("/") / "a") == "/a"
    name = Location.parse("memory://name")
    assert str(name / "x") == "memory://name/x"
    assert (name / "x").parent == name == name.parent
    bucket = Location.parse("s3://bucket/run").parent
    assert str(bucket) == "s3://bucket"
    assert bucket.parent == bucket
    assert str(bucket / "step/manifest") == "s3://bucket/step/manifest"


@pytest.mark.parametrize("name", ["", "..", ".", "a/../b", "/a", "a/", "a//b", "a\0b"])
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        Location.parse("/a") / name


def test_the_factory_opens_the_store_behind_a_location(tmp_path: Path) -> None:
    local = open_store(tmp_path)
    assert isinstance(local, LocalStore)
    local.put("run/a", b"x")
    assert open_store(local.location / "run").read("a") == b"x"
    assert isinstance(open_store("memory://test-factory/run"), MemoryStore)
    assert open_store(tmp_path / "none").list() == []
    assert not (tmp_path / "none").exists()


def test_a_store_refuses_a_location_that_is_not_its_own() -> None:
    with pytest.raises(UsageError):
        LocalStore("memory://name")
    with pytest.raises(UsageError):
        MemoryStore(Location.parse("/tmp"))


@pytest.mark.parametrize(
    "text",
    [
        *("s3://two words/run", "s3://what?/run", "gs://hash#tag", "s3://bücket"),
        *("s3://bucket/a\tb", "s3://bucket/a\nb", "az://container/\x7f", "s3://bucket/\udcff"),
    ],
)
def test_what_no_engine_can_ask_for_is_refused_at_once(text: str) -> None:
    with pytest.raises(UsageError, match=r"no bucket can|control characters") as caught:
        Location.parse(text)
    assert str(caught.value).replace("\n", "").isprintable()
