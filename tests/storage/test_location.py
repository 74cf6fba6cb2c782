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
        ("memory://me:secret@name/x", "memory", "name/x", "memory://name/x"),
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
        "~no-such-user-here/x",
        Path("memory://name/x"),
        Path("s3://bucket/x"),
    ],
)
def test_what_is_no_location_is_refused_with_a_hint(text: str | Path) -> None:
    with pytest.raises(UsageError) as caught:
        Location.parse(text)
    assert caught.value.hint or not str(text) or "\0" in str(text) or "%00" in str(text)


def test_an_unknown_url_names_what_is_accepted_and_shows_no_secret() -> None:
    with pytest.raises(UsageError) as caught:
        Location.parse("s3://key:secret@bucket/run?token=secret")
    assert "memory://" in caught.value.hint
    assert "s3://" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(("scheme", "path"), [("ftp", "/x"), ("file", "x"), ("file", "")])
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
