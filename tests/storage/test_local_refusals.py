"""Local files: full disks, limits and permissions become errors that say where and what to do."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptkit.errors import (
    AccessError,
    CkptkitError,
    CorruptionError,
    InvalidNameError,
    NoSpaceError,
    NotFoundError,
    StorageError,
)
from ckptkit.storage import LocalStore
from ckptkit.storage.base.disk import refusal

MB = 1 << 20


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[LocalStore]:
    with mounted(tmp_path, "size=8m") as folder:
        yield LocalStore(folder / "root")


def names(folder: Path | str) -> list[str]:
    """Everything in a folder, temporary names too."""
    return sorted(path.name for path in Path(folder).iterdir())


def says_where_and_what_to_do(error: CkptkitError, path: Path) -> bool:
    return error.where == str(path) and bool(error.hint) and isinstance(error.__cause__, OSError)


def test_a_full_disk_shows_before_any_data_is_written(small: LocalStore) -> None:
    with pytest.raises(NoSpaceError) as caught:
        small.create("data/a", [9 * MB])
    path = Path(small.location.path)
    assert says_where_and_what_to_do(caught.value, path / "data/a")
    assert not path.exists()


def test_a_disk_that_fills_up_while_writing_fails_the_write(
    small: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptkit.storage.base.disk._libc_fallocate", lambda: None)
    monkeypatch.setattr("ckptkit.storage.base.disk.free_bytes", lambda _: 1 << 40)
    sink = small.create("data/a", [3 * MB] * 4)
    sink.write(0, memoryview(bytes(3 * MB)))
    sink.write(3, memoryview(bytes(3 * MB)))
    with pytest.raises(NoSpaceError):
        sink.write(1, memoryview(bytes(3 * MB)))
    sink.abort()
    sink = small.create("data/a", [7 * MB])
    sink.write(0, memoryview(bytes(7 * MB)))
    sink.finish()
    assert small.size("data/a") == 7 * MB


def test_a_put_onto_a_full_disk_keeps_the_old_and_leaves_nothing(small: LocalStore) -> None:
    small.put("a", b"old")
    for exclusive in (False, True):
        for key in ("b" if exclusive else "a", "new/folder/c"):
            with pytest.raises(NoSpaceError):
                small.put(key, bytes(9 * MB), exclusive=exclusive)
    assert small.read("a") == b"old"
    assert names(small.location.path) == ["a"]
    small.put("b", bytes(7 * MB))
    below = LocalStore(f"{small.location}/new/root")
    with pytest.raises(NoSpaceError):
        below.put("folder/d", bytes(2 * MB))
    assert names(small.location.path) == ["a", "b"]


def test_a_read_only_file_system_says_so(tmp_path: Path) -> None:
    with mounted(tmp_path, "size=1m,ro") as folder:
        store = LocalStore(folder)
        for call in (lambda: store.put("a", b"x"), lambda: store.create("b/c", [1])):
            with pytest.raises(AccessError) as caught:
                call()
            assert "read-only" in caught.value.hint
        assert store.list() == []


@pytest.mark.parametrize("reserves", [True, False])
def test_a_limit_on_file_sizes_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reserves: bool
) -> None:
    if not reserves:
        monkeypatch.setattr("ckptkit.storage.base.disk._libc_fallocate", lambda: None)
    store = LocalStore(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MB + 100, hard))
    try:
        with pytest.raises(StorageError) as caught:
            store.create("a", [2 * MB]).write(0, memoryview(bytes(2 * MB)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "ulimit" in caught.value.hint
    assert says_where_and_what_to_do(caught.value, tmp_path / "a")


@pytest.mark.parametrize("again", [False, True])
def test_a_file_that_is_given_up_goes_also_where_descriptors_ran_out(
    tmp_path: Path, again: bool
) -> None:
    store = LocalStore(tmp_path)
    given_up = store.create("step/data/a", [MB], again=again)
    replaced = store.create("step/data/b", [MB])
    store.put("step/data/b", b"another writer's")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.dup(0)
    os.close(first_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, hard))
    try:
        given_up.abort()
        replaced.abort()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert names(tmp_path / "step/data") == ["b"]
    assert store.read("step/data/b") == b"another writer's"


UNPRIVILEGED = """
import json, os, sys
from ckptkit.errors import CkptkitError
from ckptkit.storage import LocalStore

store = LocalStore(sys.argv[1])
if not os.geteuid():
    os.setuid(65534)
calls = {
    "read": lambda: store.read("secret"),
    "list": lambda: store.list("locked"),
    "children": lambda: store.children("locked"),
    "size": lambda: store.size("locked/a"),
    "put": lambda: store.put("new", b"x"),
    "put exclusive": lambda: store.put("new", b"x", exclusive=True),
    "create": lambda: store.create("deep/down/new", [1]),
    "delete": lambda: store.delete(["open"]),
    "room": LocalStore(f"{sys.argv[1]}/locked/new").room,
}
said = {}
for name, call in calls.items():
    try:
        call()
    except CkptkitError as error:
        said[name] = [type(error).__name__, error.where, error.hint]
print(json.dumps(said))
"""


def test_what_is_not_permitted_is_an_access_error() -> None:
    # Not in tmp_path: only its owner may enter that.
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "locked").mkdir()
        (root / "locked/a").touch()
        (root / "secret").touch(0o000)
        (root / "open").touch()
        (root / "locked").chmod(0o000)
        root.chmod(0o555)
        try:
            command = [sys.executable, "-c", UNPRIVILEGED, name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        finally:
            root.chmod(0o755)
            (root / "locked").chmod(0o755)
        said = json.loads(done.stdout)
        assert {kind for kind, _, _ in said.values()} == {"AccessError"}
        assert len(said) == 9
        assert all(where.startswith(name) and hint for _, where, hint in said.values())
        assert names(root) == ["locked", "open", "secret"]


def test_the_root_being_a_file_is_an_error_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = LocalStore(tmp_path / "file")
    for call in (lambda: store.put("a", b"x"), lambda: store.create("a", [1])):
        with pytest.raises(StorageError) as caught:
            call()
        assert "a file where a folder is needed" in caught.value.hint
    assert (store.list(), store.children()) == ([], [])


def test_a_name_too_long_is_an_invalid_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidNameError):
        LocalStore(tmp_path).put("x" * 300, b"x")
    with pytest.raises(InvalidNameError):
        LocalStore(tmp_path).put("\udcff", b"x")
    with pytest.raises(InvalidNameError):
        LocalStore(tmp_path / ("x" * 300)).room()


def test_a_file_cut_while_it_is_read_is_corrupt(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", bytes(10_000))
    with store.open("a") as source:
        os.truncate(tmp_path / "a", 5000)
        with pytest.raises(CorruptionError, match="ends at byte 5000"):
            source.read_into(0, memoryview(bytearray(10_000)))


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, preadv, pread = os.urandom(10_000), os.preadv, os.pread
    store = LocalStore(tmp_path)
    store.put("a", data)
    monkeypatch.setattr(os, "preadv", lambda fd, to, at: preadv(fd, [to[0][:777]], at))
    monkeypatch.setattr(os, "pread", lambda fd, count, at: pread(fd, min(count, 777), at))
    assert store.read("a", 5) == data[5:]


def test_links_to_folders_are_readable_but_not_listed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root")
    store.put("real/a", b"x")
    (tmp_path / "root/loop").symlink_to(tmp_path / "root")
    (tmp_path / "root/file").symlink_to(tmp_path / "root/real/a")
    (tmp_path / "root/dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "root/endless").symlink_to("endless")
    (tmp_path / "root/through").symlink_to("real/a/b")
    assert [entry.key for entry in store.list()] == ["file", "real/a"]
    assert store.read("loop/real/a") == store.read("file") == b"x"
    with pytest.raises(NotFoundError):
        store.read("dangling")


def test_only_files_are_objects(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    store = LocalStore(tmp_path)
    assert store.list() == []
    with pytest.raises(NotFoundError):
        store.size("fifo")
    with pytest.raises(NotFoundError):
        store.open("fifo")
    with pytest.raises(NotFoundError):
        store.sync(["fifo"])


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.EACCES, AccessError),
        (errno.EROFS, AccessError),
        (errno.ENOSPC, NoSpaceError),
        (errno.EDQUOT, NoSpaceError),
        (errno.ENOENT, NotFoundError),
        (errno.EIO, StorageError),
        (errno.ESTALE, StorageError),
        (errno.EBUSY, StorageError),
    ],
)
def test_every_refusal_has_a_kind_and_a_hint(code: int, kind: type[CkptkitError]) -> None:
    error = refusal(OSError(code, os.strerror(code)), "/some/path")
    assert type(error) is kind
    assert error.where == "/some/path"
    assert error.hint
