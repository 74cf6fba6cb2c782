"""A step as a plain Zarr v3 directory, for tools that know nothing of packs."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path

from ckptkit.checkpoint.checkpoint import Checkpoint
from ckptkit.checkpoint.pace import at_once
from ckptkit.checkpoint.streaming import STREAM_MEMORY
from ckptkit.checkpoint.threads import Progress, share_out
from ckptkit.checkpoint.zarr_view import ZarrView, presented_grid
from ckptkit.errors import AlreadyExistsError, UsageError
from ckptkit.model.quantity import parse_size
from ckptkit.storage import Location
from ckptkit.storage.folders import sync_folder
from ckptkit.storage.refusals import refusals

_WRITING = 4
# More than there are cores: the file system then writes its journal once for several files.
_SYNCING = 8


def unpack(
    checkpoint: Checkpoint,
    folder: str | os.PathLike[str],
    *,
    memory: int | str = STREAM_MEMORY,
    progress: Progress | None = None,
) -> int:
    """Write a step as one file for each key into a new folder; returns the number of files.

    Every chunk is checked on the way. The folder appears when it is complete and durable, and
    nothing is left when it fails. At most `memory` bytes of chunks are held at once, and one
    chunk at least.
    """
    limit = parse_size(memory)
    if Location.parse(folder).scheme != "file":
        raise UsageError(
            "only a local folder can hold a plain Zarr directory",
            value=str(folder),
            hint="unpack into a folder, and copy that; `Checkpoint.zarr` reads without unpacking",
        )
    target = Path(os.path.abspath(folder))  # noqa: PTH100 — resolve() would follow a link
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise AlreadyExistsError(
            "there is something already", where=str(target), hint="name a folder that is not there"
        )
    partial = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")
    made = [parent for parent in target.parents if not parent.exists()]
    written = partial
    try:
        with refusals(str(target)):
            partial.mkdir(parents=True)
            count = _write(ZarrView(checkpoint), partial, _threads(checkpoint, limit), progress)
            _sync_below(partial)
            written = partial.replace(target)
            for path in (target, *made):
                sync_folder(path.parent)
    except BaseException:
        _remove(written, made)
        raise
    return count


def _remove(written: Path, made: list[Path]) -> None:
    shutil.rmtree(written, ignore_errors=True)
    for parent in made:
        with suppress(OSError):
            parent.rmdir()


def _threads(checkpoint: Checkpoint, memory: int) -> int:
    """As many as have room for a chunk and its copy."""
    largest = max(
        (
            presented_grid(array).chunk_elements * array.dtype.itemsize
            for array in checkpoint.arrays.values()
        ),
        default=1,
    )
    can = checkpoint.store.abilities
    most = _WRITING if can.is_file_system else max(_WRITING, at_once(can))
    return max(1, min(most, memory // (3 * max(1, largest))))


def _write(view: ZarrView, root: Path, threads: int, progress: Progress | None) -> int:
    counts: list[int] = []

    def write(keys: Sequence[str]) -> None:
        for key in keys:
            size = _write_key(view, root, key)
            if progress:
                progress(size)
        counts.append(len(keys))

    share_out(_batches(view.keys()), write, threads)
    return sum(counts)


def _batches(keys: Iterable[str]) -> Iterator[list[str]]:
    """A few at a time, since threads that ask for each would mostly wait for one another."""
    left = iter(keys)
    while batch := list(islice(left, 16)):
        yield batch


def _sync_below(root: Path) -> None:
    """Make a folder and all in it durable."""
    paths = chain([root], root.rglob("*"))
    share_out(paths, _sync, _SYNCING)


def _sync(path: Path) -> None:
    if path.is_dir():
        sync_folder(path)
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _write_key(view: ZarrView, root: Path, key: str) -> int:
    data = view.read_key(key) or b""
    path = root.joinpath(*key.split("/"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return len(data)
