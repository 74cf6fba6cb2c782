"""A step as a plain Zarr v3 directory, for tools that know nothing of packs."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path

from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.read.stream import STREAM_MEMORY
from ckptkit.checkpoint.read.zarr_view import ZarrView, presented_grid
from ckptkit.checkpoint.workers import Progress, at_once, share_out
from ckptkit.errors import AlreadyExistsError, UsageError
from ckptkit.model.document import parse_size
from ckptkit.storage import Location
from ckptkit.storage.base.disk import entered, make_folders, refusals, sync_folder

_WRITING = 4
# More than there are cores: the file system then writes its journal once for several files.
_SYNCING = 8
_KEYS = 16


def unpack(
    checkpoint: Checkpoint,
    folder: str | os.PathLike[str],
    *,
    memory: int | str = STREAM_MEMORY,
    progress: Progress | None = None,
) -> int:
    """Write a step as one file for each key into a new folder; returns the number of files.

    Every chunk is checked on the way. The folder appears when it is complete and durable, and
    nothing is left when it fails; what a call that was killed left is removed by the next one to
    the same folder. At most `memory` bytes of chunks are held at once, and one
    chunk at least.
    """
    limit = parse_size(memory)
    place = Location.parse(folder)
    if place.scheme != "file":
        raise UsageError(
            "only a local folder can hold a plain Zarr directory",
            value=str(folder),
            hint="unpack into a folder, and copy that; `Checkpoint.zarr` reads without unpacking",
        )
    with appearing(Path(place.path)) as written:
        count = _write(checkpoint.zarr_store(), written, _threads(checkpoint, limit), progress)
        share_out(chain([written], written.rglob("*")), _sync, _SYNCING)
    return count


@contextmanager
def appearing(target: Path, only: str = "", name: str = "") -> Iterator[Path]:
    """A folder to write into, which gets the name of the target when the block ends; nothing is
    left when it fails, and what a process left that was killed the next one removes. What is
    written has to be durable at the end of the block.

    With `only` the target is that file of it. With a `name`, 8 hexadecimal digits, it is the folder
    that a process left with the same name, if one was killed, or interrupted.
    """
    if target.is_symlink() or (
        target.exists() and (only or not target.is_dir() or any(target.iterdir()))
    ):
        if _unfinished(target):
            with suppress(OSError), _turn(target):
                pass  # which removes what is nobody's
        raise AlreadyExistsError(
            "there is something already", where=str(target), hint="name a folder that is not there"
        )
    made = [parent for parent in target.parents if not parent.exists()]
    try:
        with refusals(str(target)):
            make_folders(target.parent)
            written = target.with_name(f".{target.name}.partial-{name or secrets.token_hex(4)}")
            with _turn(target, written) as is_alone:
                if not is_alone:  # another may be writing there
                    name = ""
                    written = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")
                try:
                    if written.is_symlink():
                        written.unlink()
                    written.mkdir(exist_ok=bool(name))
                    yield written
                    if only:
                        (written / only).rename(target)
                        shutil.rmtree(written)
                    else:
                        written = written.replace(target)
                    for path in (target, *made):
                        sync_folder(path.parent)
                except BaseException as error:
                    if isinstance(error, Exception) or not name:
                        shutil.rmtree(written, ignore_errors=True)
                    raise
    except BaseException:
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        raise


def _unfinished(target: Path) -> list[Path]:
    """What unpacking to this name has beside it until it ends."""
    ours = re.compile(rf"\.{re.escape(target.name)}\.partial(-[0-9a-f]{{8}})?")
    return [path for path in target.parent.iterdir() if ours.fullmatch(path.name)]


@contextmanager
def _turn(target: Path, kept: Path | None = None) -> Iterator[bool]:
    """Be the only one that unpacks to this name, and remove what those left that were killed, but
    what is to be kept. False where nobody can tell whether it is the only one.

    The system unlocks what a process has locked however that ends, so a lock tells the living from
    the dead, on other machines too. Where there are no locks, nothing is removed.
    """
    path = target.with_name(f".{target.name}.partial")
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        is_alone = _is_locked(descriptor, path)
        if is_alone:
            for left in set(_unfinished(target)) - {path, kept}:
                shutil.rmtree(left, ignore_errors=True)
        try:
            yield is_alone
        finally:
            with suppress(OSError):
                path.unlink()
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int, path: Path) -> bool:
    """Whether the file is locked now, by us alone; False on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Who had it before removes it, and what has no name keeps nobody out.
        if os.path.samestat(os.fstat(descriptor), path.lstat()):
            return True
    except (BlockingIOError, PermissionError, FileNotFoundError):
        pass
    except OSError:
        return False
    raise AlreadyExistsError(
        "somebody else unpacks to this folder now",
        where=str(path),
        hint="wait until that is done, or name another folder",
    )


def _threads(checkpoint: Checkpoint, memory: int) -> int:
    """As many as have room for a chunk three times: as it is read, padded, and written."""
    largest = max(
        (
            presented_grid(array.info).chunk_elements * array.dtype.itemsize
            for array in checkpoint.arrays.values()
        ),
        default=1,
    )
    can = checkpoint.store.abilities
    most = max(_WRITING, at_once(can)) if can.waits_for_answers else _WRITING
    return max(1, min(most, memory // (3 * max(1, largest))))


def _write(view: ZarrView, root: Path, threads: int, progress: Progress | None) -> int:
    """Write the value of each key as a file; returns their number."""
    counts: list[int] = []
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

    def write(keys: Sequence[str]) -> None:
        for key in keys:
            data = view.read_key(key) or b""
            path = root.joinpath(*key.split("/"))
            with (
                entered(root.parent, path.parent, []) as folder,
                os.fdopen(os.open(path.name, flags, 0o666, dir_fd=folder), "wb") as file,
            ):
                file.write(data)
            if progress:
                progress(len(data))
            del data  # before the next one is read: `_threads` reckons with one
        counts.append(len(keys))

    left = iter(view.keys())
    # A few at a time: threads that asked for each would mostly wait for one another.
    share_out(iter(lambda: list(islice(left, _KEYS)), []), write, threads)
    return sum(counts)


def _sync(path: Path) -> None:
    # A link that took the place of what was written is refused, as it is where files are written.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
