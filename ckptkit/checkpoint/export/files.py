"""Files for other programs: in a new place, where all of them appear whole or not at all, filled
some bytes of each at a time; and a step as a plain Zarr v3 directory, for tools that know nothing
of packs.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from isal import isal_zlib

from ckptkit.checkpoint.export.formats import Checked, NewFile
from ckptkit.checkpoint.places import crc_of, refuse_inside_step, stored_size
from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.read.stream import STREAM_MEMORY, bands
from ckptkit.checkpoint.reshard.copy import ChunkCopier
from ckptkit.checkpoint.reshard.translation import Chosen
from ckptkit.checkpoint.workers import Progress, at_once, share_out
from ckptkit.errors import AlreadyExistsError, CkptkitError, PeerError, StorageError, UsageError
from ckptkit.format import encoding
from ckptkit.format.arrays import presented_grid
from ckptkit.model import Box
from ckptkit.model.document import parse_size
from ckptkit.plan.read import batches
from ckptkit.storage import Location, Store, open_store
from ckptkit.storage.base.disk import entered, make_folders, refusals, sync_folder
from ckptkit.storage.local import publish_once

_WRITING = 4
# More than there are cores: the file system then writes its journal once for several files.
_SYNCING = 8
_KEYS = 16
# As much of a file is filled and written at a time.
_SEGMENT = 8 << 20

_NOTE = ".ckptkit-export-"
_MOST_NOTE = 64 << 20


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
    refuse_inside_step(open_store(place))
    infos = [array.info for array in checkpoint.arrays.values()]
    sizes = (presented_grid(info).chunk_elements * info.dtype.itemsize for info in infos)
    largest = max((1, *sizes))
    can = checkpoint.store.abilities
    most = max(_WRITING, at_once(can)) if can.waits_for_answers else _WRITING
    # As many as have room for a chunk three times: as it is read, padded, and written.
    threads = max(1, min(most, limit // (3 * largest)))
    view, counts = checkpoint.zarr_store(), list[int]()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

    def write(keys: Sequence[str]) -> None:
        for key in keys:
            data = view.read_key(key) or b""
            path = written.joinpath(*key.split("/"))
            with (
                entered(written.parent, path.parent, []) as inside,
                os.fdopen(os.open(path.name, flags, 0o666, dir_fd=inside), "wb") as file,
            ):
                file.write(data)
            if progress:
                progress(len(data))
            del data  # before the next one is read: there is room for one
        counts.append(len(keys))

    with appearing(Path(place.path)) as written:
        left = iter(view.keys())
        # A few at a time: threads that asked for each would mostly wait for one another.
        share_out(iter(lambda: list(islice(left, _KEYS)), []), write, threads)
        share_out(chain([written], written.rglob("*")), _sync, _SYNCING)
    return sum(counts)


def _sync(path: Path) -> None:
    # A link that took the place of what was written is refused, as it is where files are written.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
            written = target.with_name(f".{target.name}.partial-{name or os.urandom(4).hex()}")
            with _turn(target, written) as is_alone:
                if not is_alone:  # another may be writing there
                    name = ""
                    written = target.with_name(f".{target.name}.partial-{os.urandom(4).hex()}")
                try:
                    if written.is_symlink():
                        written.unlink()
                    written.mkdir(exist_ok=bool(name))
                    yield written
                    if only:
                        # Minutes later: it may be there now, and somebody else's.
                        publish_once(str(written / only), str(target))
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
    """What writing to this name has beside it until it ends."""
    ours = re.compile(rf"\.{re.escape(target.name)}\.partial(-[0-9a-f]{{8}})?")
    return [path for path in target.parent.iterdir() if ours.fullmatch(path.name)]


@contextmanager
def _turn(target: Path, kept: Path | None = None) -> Iterator[bool]:
    """Be the only one that writes to this name, and remove what those left that were killed, but
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
        "somebody else writes to this folder now",
        where=str(path),
        hint="wait until that is done, or name another folder",
    )


@contextmanager
def place_to_write(place: Store, name: str, *, is_file: bool) -> Iterator[Store]:
    """Where to write the files of an export of this name; AlreadyExistsError where something else
    is at the place.
    """
    location = place.location
    if location.scheme == "file":
        only = location.name if is_file else ""
        with appearing(Path(location.path), only, "" if is_file else name[:8]) as folder:
            written = open_store(folder)
            if not FinishedFiles(written, name).is_resumed:
                # Of one that was killed before its note was there, or after: nobody else's.
                for left in folder.iterdir():
                    left.unlink()
            yield written
        return
    store = place
    if is_file:
        store = open_store(replace(place.address, location=location.parent))
        is_there = stored_size(store, location.name) is not None
    else:
        is_there = bool(store.children("")) and not FinishedFiles(store, name).is_resumed
    if is_there:
        raise AlreadyExistsError(
            "there is something already",
            where=str(location),
            hint="name a place that is empty; the command of an export that was killed goes on",
        )
    yield store


@contextmanager
def removed_on_failure(store: Store) -> Iterator[list[str]]:
    """The block adds the keys of what it writes: they are removed where it fails. An interruption
    removes nothing, for the same call goes on from there.
    """
    keys: list[str] = []
    try:
        yield keys
    except Exception as error:
        notes = [key for key in keys if key.startswith(_NOTE)]
        try:
            # What makes a model of the files comes last, and goes first; the note goes last, so
            # that what cannot be removed is what the same call goes on with.
            store.delete([key for key in reversed(keys) if key not in notes])
            store.delete(notes)
        except StorageError as left:
            error.add_note(f"what was written could not be removed: {left}")
        raise


# Which files are there already: an export goes on where an earlier one was killed. What is finished
# is noted beside the files, under a name that tells what they are made of, until all is there.


class FinishedFiles:
    """The files that an export of this name has written whole; none are noted without a name."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self.note = f"{_NOTE}{name}" if name else ""
        self.is_resumed = bool(name) and self.note in store.children("")
        self._known: dict[str, tuple[int, int]] = {}

    def begin(self, keys: Iterable[str], progress: Progress | None) -> list[str]:
        """Those of these files that an earlier run has completed, with the very bytes that it
        wrote; what is left of others is removed. AlreadyExistsError where another one begins now.
        """
        if not self.note:
            return []
        if not self.is_resumed:
            self._store.put(self.note, encoding.dumps([]), exclusive=True)
            # Of one that was killed before: the place was empty but for what stores do not list.
            self._store.delete([entry.key for entry in self._store.leftovers("")])
            return []
        said: Any = []
        with suppress(CkptkitError):  # one that was killed may leave an empty note
            said = encoding.unpack(self._store.read_whole(self.note, _MOST_NOTE), self.note)
        noted = {key: (size, crc) for key, size, crc in said}
        self._store.delete([entry.key for entry in self._store.leftovers("")])
        there = {entry.key: entry.size for entry in self._store.list("")}
        links = self._store.links("")
        for key in keys:
            size, crc = noted.get(key, (-1, 0)) if key not in links else (-1, 0)
            is_whole = there.get(key) == size
            if is_whole:
                with self._store.open(key, size) as source:
                    is_whole = crc_of(source, 0, size) == crc
            if is_whole:
                self._known[key] = size, crc
                if progress:
                    progress(size)
            elif key in there:
                self._store.delete([key])
        return list(self._known)

    def add(self, key: str, size: int, crc: int) -> None:
        """One more is there, durable."""
        self._known[key] = size, crc
        if self.note:
            rows = [[key, size, crc] for key, (size, crc) in self._known.items()]
            self._store.put(self.note, encoding.dumps(rows))

    def forget(self) -> None:
        """All is there."""
        if self.note:
            self._store.delete([self.note])


# Each file is filled some bytes at a time, by a few threads.


@dataclass(frozen=True, slots=True)
class FileBand:
    """Elements of a tensor that come next in a file."""

    tensor: int
    start: int
    """How many bytes of the tensor come before them."""
    box: Box
    nbytes: int


class _Checksums:
    """The checksums of tensors of a file, of which threads fill some bytes at a time.

    A thread waits only for what comes before its own segment. That was begun before, by threads
    that say what they have filled before they wait themselves.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._left = list(sizes)
        self._parts: list[list[tuple[int, int, int]]] = [[] for _ in sizes]
        self._changed = threading.Condition()
        self._stopped = False

    def add(self, band: FileBand, crc: int) -> None:
        """Some bytes of a tensor are there."""
        with self._changed:
            self._parts[band.tensor].append((band.start, band.nbytes, crc))
            self._left[band.tensor] -= band.nbytes
            if not self._left[band.tensor]:
                self._changed.notify_all()

    def of(self, tensor: int) -> int:
        """The checksum of a tensor, once all of its bytes are there."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not self._left[tensor])
            if self._left[tensor]:
                raise PeerError("another thread could not fill its part of the file")
            parts = sorted(self._parts[tensor])
        return combined([crc for _, _, crc in parts], [nbytes for _, nbytes, _ in parts])

    def stop(self) -> None:
        """Nobody has to wait any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


def write_file(
    file: NewFile,
    arrays: Sequence[Chosen],
    copier: ChunkCopier,
    store: Store,
    progress: Progress | None,
) -> tuple[int, int]:
    """Write a file; its size, and its checksum."""
    contents = list(_contents(file, arrays, copier.budget.batch_bytes))
    # Small tensors are written together, large ones a band at a time.
    runs = batches([nbytes for _, nbytes in contents], _SEGMENT) or [(0, 0)]
    sizes = [sum(nbytes for _, nbytes in contents[first:last]) for first, last in runs]
    crcs = [0] * len(runs)
    checksums = None
    if any(isinstance(piece, Checked) for piece in file.pieces):
        checksums = _Checksums([array.info.nbytes for array in arrays])
    sink = store.create(file.key, sizes, memory=copier.budget.sink_bytes)

    def fill(number: int, memory: memoryview) -> None:
        bands: list[tuple[FileBand, memoryview]] = []
        boxes = []
        checked: list[tuple[Checked, memoryview]] = []
        end = 0
        for piece, nbytes in contents[slice(*runs[number])]:
            data = memory[end : end + nbytes]
            end += nbytes
            if isinstance(piece, bytes):
                data[:] = piece
            elif isinstance(piece, Checked):
                checked.append((piece, data))
            else:
                chosen = arrays[piece.tensor]
                values = np.frombuffer(data, chosen.info.dtype.bits).reshape(piece.box.shape)
                boxes.append((chosen, piece.box, values))
                bands.append((piece, data))
        copier.fill_boxes(boxes)
        if checksums is not None:
            # All of this segment before any wait: others may wait for it (see `_Checksums`).
            for band, data in bands:
                checksums.add(band, int(isal_zlib.crc32(data)))
            for piece, data in checked:
                data[:] = piece.make([*map(checksums.of, piece.tensors)])
        crcs[number] = int(isal_zlib.crc32(memory))

    def write(number: int) -> None:
        try:
            with sink.filling(number) as memory:
                fill(number, memory)
        except BaseException:
            if checksums is not None:
                checksums.stop()
            raise
        if progress:
            progress(sizes[number])

    try:
        share_out(range(len(runs)), write, copier.budget.workers)
        sink.finish()
    except BaseException:
        sink.abort()
        raise
    return sum(sizes), combined(crcs, sizes)


def combined(crcs: Sequence[int], sizes: Sequence[int]) -> int:
    """The checksum of bytes that have these, one after the other."""
    whole = 0
    for crc, nbytes in zip(crcs, sizes, strict=True):
        whole = int(isal_zlib.crc32_combine(whole, crc, nbytes))
    return whole


def _contents(
    file: NewFile, arrays: Sequence[Chosen], most: int
) -> Iterator[tuple[bytes | Checked | FileBand, int]]:
    """What comes next in a file, and how many bytes that is."""
    for piece in file.pieces:
        if isinstance(piece, Checked):
            yield piece, piece.nbytes
        elif isinstance(piece, bytes):
            for begin in range(0, len(piece), _SEGMENT):
                data = piece[begin : begin + _SEGMENT]
                yield data, len(data)
        else:
            chosen, start = arrays[piece], 0
            itemsize = chosen.info.dtype.itemsize
            widest = max(itemsize, chosen.source.dtype.itemsize)
            for box in bands([chosen.source.grid], _SEGMENT // widest, most // widest):
                band = FileBand(piece, start, box, box.size * itemsize)
                yield band, band.nbytes
                start += band.nbytes
