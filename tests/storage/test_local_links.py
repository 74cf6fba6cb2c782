"""Local files: nothing is written or deleted through a symbolic link, not even in a race."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ckptkit.errors import CkptkitError, StorageError
from ckptkit.storage import LocalStore
from tests.checkpoint.saving import files, inodes


def created(store: LocalStore, key: str, *, again: bool = False) -> None:
    sink = store.create(key, [3], again=again)
    sink.write(0, memoryview(b"new"))
    sink.finish()


def created_again(store: LocalStore, key: str) -> None:
    created(store, key, again=True)


CHANGES: dict[str, Callable[[LocalStore, str], None]] = {
    "put": lambda store, key: store.put(key, b"new"),
    "put exclusively": lambda store, key: store.put(key, b"new", exclusive=True),
    "create": created,
    "create again": created_again,
    "create and abort": lambda store, key: store.create(key, [3]).abort(),
    "delete": lambda store, key: store.delete([key]),
}
KEYS = ("step/data/id/pack", "step/data/id/new", "step/data/id/deeper/new")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with one file, and a folder outside that looks the same."""
    for top in ("run", "outside"):
        (tmp_path / top / "step/data/id").mkdir(parents=True)
        (tmp_path / top / "step/data/id/pack").write_bytes(b"old")
        (tmp_path / top / "step/data/id/.tmp-0123456789abcdef").write_bytes(b"old")
        (tmp_path / top / "step/data/id/deeper").mkdir()
    return tmp_path


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("link", ["step", "step/data", "step/data/id", "to nothing"])
def test_a_link_on_the_way_to_a_key_is_refused_by_name(
    root: Path, link: str, change: str, key: str
) -> None:
    target = root / "nowhere" if link == "to nothing" else root / "outside" / link
    at = root / "run" / ("step" if link == "to nothing" else link)
    shutil.rmtree(at)
    at.symlink_to(target)
    before = inodes(root / "outside"), files(root / "run")
    with pytest.raises(StorageError, match="a symbolic link: nothing is written") as caught:
        CHANGES[change](LocalStore(root / "run"), key)
    assert caught.value.where == str(at)
    assert "remove the link" in caught.value.hint
    assert (inodes(root / "outside"), files(root / "run")) == before
    assert not (root / "nowhere").exists()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("target", ["outside/step/data/id/pack", "outside/step", "nowhere"])
def test_a_link_that_has_the_name_itself_is_replaced_or_refused_or_deleted(
    root: Path, target: str, change: str
) -> None:
    (root / "run/step/link").symlink_to(root / target)
    before = inodes(root / "outside")
    with suppress(CkptkitError):
        CHANGES[change](LocalStore(root / "run"), "step/link")
    assert inodes(root / "outside") == before
    assert not (root / "nowhere").exists()
    stays = change not in ("put", "create again", "delete")
    assert (root / "run/step/link").is_symlink() == stays


def test_links_are_told_with_what_they_lead_to(root: Path) -> None:
    store = LocalStore(root / "run")
    assert store.links() == store.links("nothing/there") == {}
    (root / "run/b").symlink_to("../outside")
    (root / "run/a").symlink_to("nowhere")
    (root / "run/.tmp-link").symlink_to("nowhere")
    assert store.links() == {"a": "nowhere", "b": "../outside"}


@contextmanager
def swapping(folder: Path, target: Path) -> Iterator[None]:
    """Meanwhile the folder is a link to another one, and itself, and so on."""
    over, aside = threading.Event(), folder.with_name("aside")

    def swap() -> None:
        while not over.is_set():
            # The changes may remove what is empty.
            with suppress(OSError):
                folder.rename(aside)
            with suppress(OSError):
                folder.symlink_to(target)
            with suppress(OSError):
                if folder.is_symlink():
                    folder.unlink()
            with suppress(OSError):
                aside.rename(folder)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("change", CHANGES)
def test_a_link_that_comes_and_goes_meanwhile_leads_nowhere(root: Path, change: str) -> None:
    store = LocalStore(root / "run")
    (root / "run/step/data/id/stays").touch()
    before = inodes(root / "outside")
    with swapping(root / "run/step", root / "outside/step"):
        for _ in range(40):
            with suppress(CkptkitError):
                CHANGES[change](store, KEYS[0])
            with suppress(CkptkitError):
                CHANGES[change](store, KEYS[2])
    assert inodes(root / "outside") == before


def test_leftovers_of_the_top_folder_alone(root: Path) -> None:
    store = LocalStore(root / "run")
    (root / "run/.tmp-0123456789abcdef").write_bytes(b"left")
    assert [entry.key for entry in store.leftovers(deep=False)] == [".tmp-0123456789abcdef"]
    assert len(store.leftovers()) == 2
