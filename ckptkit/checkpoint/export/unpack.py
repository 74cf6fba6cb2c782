"""A step as a plain Zarr v3 directory, for tools that know nothing of packs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path

from ckptkit.checkpoint.export.place import appearing
from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.read.stream import STREAM_MEMORY
from ckptkit.checkpoint.read.zarr_view import ZarrView, presented_grid
from ckptkit.checkpoint.workers import Progress, at_once, share_out
from ckptkit.errors import UsageError
from ckptkit.model.document import parse_size
from ckptkit.storage import Location
from ckptkit.storage.base.disk import entered

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
