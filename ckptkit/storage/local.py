"""Objects as files below a folder: read by exact ranges, written past the page cache."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from ckptkit.errors import NotFoundError, UsageError
from ckptkit.storage.base.address import (
    Address,
    Location,
    checked_key,
    deletable_key,
    folder_of,
    is_leftover,
    is_temporary,
    new_temporary,
)
from ckptkit.storage.base.buffers import AlignedBuffer, address_of, copy_bytes, default_pool
from ckptkit.storage.base.disk import (
    BLOCK,
    DirectFile,
    LocalSource,
    entered,
    free_bytes,
    open_regular,
    refusals,
    sync_folder,
)
from ckptkit.storage.base.store import (
    Abilities,
    Entries,
    Names,
    Parts,
    Stored,
    as_bytes,
    checked_size,
)

T = TypeVar("T")

_TRIES = 16
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_TOO_MANY_OPEN = (errno.EMFILE, errno.ENFILE)
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_BOUNCE = 4 << 20
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class LocalStore:
    """A store in a folder of this machine or of a mounted network file system.

    Reads follow symbolic links where a key passes through one; `list` does not enter them. Nothing
    is written or deleted through one below the folder, whatever takes the place of what meanwhile.
    """

    abilities = Abilities(part_size=8 << 20)

    def __init__(self, location: str | os.PathLike[str] | Location) -> None:
        self.location = Location.parse(location)
        if self.location.scheme != "file":
            raise UsageError("not a local path", where=str(self.location), hint="use open_store")
        self.address = Address(self.location)
        self._root = Path(self.location.path)

    def children(self, prefix: str = "") -> Names:
        folder = self._root / folder_of(prefix)
        with refusals(str(folder)):
            return sorted(e.name for e in _entries(folder) if _is_listed(e.name))

    def links(self, prefix: str = "") -> dict[str, str]:
        folder = self._root / folder_of(prefix)
        with refusals(str(folder)):
            found = (e for e in _entries(folder) if _is_listed(e.name) and e.is_symlink())
            return dict(sorted((e.name, str(Path(e.path).readlink())) for e in found))

    def list(self, prefix: str = "", *, deep: bool = True) -> Entries:
        return self._files(prefix, _is_listed, deep=deep)

    def size(self, key: str) -> int:
        path = self._path(key)
        with _asked_for(path):
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise IsADirectoryError
            return status.st_size

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        with self.open(key) as source:
            return source.read(start, length)

    def read_whole(self, key: str, most: int) -> bytes:
        with self.open(key) as source:
            return source.read(0, checked_size(str(self._path(key)), source.size, most))

    def open(self, key: str, size: int | None = None) -> LocalSource:  # noqa: ARG002 — is asked
        """Open a file for reading; it stays readable when its name is deleted or replaced."""
        path = self._path(key)
        with _asked_for(path):
            return LocalSource(path)

    def create(
        self,
        key: str,
        extents: Sequence[int],
        *,
        memory: int | None = None,  # noqa: ARG002
        again: bool = False,
    ) -> LocalSink:
        return LocalSink(self._root, self._path(key), extents, again=again)

    def put(
        self, key: str, data: bytes | bytearray | memoryview, *, exclusive: bool = False
    ) -> None:
        """Store a small file whole, by way of a temporary name."""
        path = self._path(key)
        made: list[Path] = []
        put = partial(_put, self._root, path, as_bytes(str(path), data), made, exclusive=exclusive)
        with refusals(str(path)):
            try:
                # A deletion that empties the folder removes it, with our temporary name in it.
                _where_folders_vanish(put)
            except BaseException:
                _remove_made(path.parent, self._root, made)
                raise
            sync_folder(path.parent)

    def sync(self, keys: Iterable[str]) -> None:
        """Make files durable, then their names and the way to them."""
        folders: dict[Path, None] = {}
        for key in keys:
            path = self._path(key)
            with _asked_for(path), open_regular(path) as file:
                os.fsync(file.fileno())
            folders[path.parent] = None
        for folder in folders:
            with refusals(str(folder)):
                sync_folder(folder)
                _sync_above(folder, self._root, [])

    def learn(self, prefix: str = "") -> None:
        """Nothing: a file system's abilities are known."""

    def room(self) -> int | None:
        with refusals(str(self._root)):
            return free_bytes(next(filter(Path.is_dir, (self._root, *self._root.parents))))

    def leftovers(self, prefix: str = "", *, deep: bool = True) -> Entries:
        """Temporary files, which a `put` that was killed leaves."""
        return self._files(prefix, is_leftover, deep=deep)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete files or links in this order, also across a crash, then folders left empty."""
        paths = (self._root / deletable_key(key) for key in keys)
        for folder, group in groupby(paths, key=attrgetter("parent")):
            with refusals(str(folder)):
                found = False
                # All of them before the first is gone: a wrong key among them is refused in time.
                names = [path.name for path in group]
                with suppress(*_ABSENT), entered(self._root, folder) as descriptor:
                    for name in names:
                        with suppress(*_ABSENT):
                            os.unlink(name, dir_fd=descriptor)
                            found = True
                if found:
                    _sync_nearest(folder)
                _remove_empty(folder, self._root)

    def _path(self, key: str) -> Path:
        return self._root / checked_key(key)

    def _files(self, prefix: str, wanted: Callable[[str], bool], *, deep: bool = True) -> Entries:
        prefix = folder_of(prefix)
        folder = self._root / prefix
        with refusals(str(folder)):
            return sorted(_walked(folder, prefix, wanted, deep=deep), key=attrgetter("key"))


def _put(root: Path, path: Path, data: memoryview, made: list[Path], *, exclusive: bool) -> None:
    with entered(root, path.parent, made) as folder:
        temporary = new_temporary()
        try:
            descriptor = os.open(temporary, _NEW, 0o666, dir_fd=folder)
            try:
                done = 0
                while done < data.nbytes:
                    done += os.pwrite(descriptor, data[done:], done)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            _sync_above(path.parent, root, made)
            if exclusive:
                publish_once(temporary, path.name, folder)
            else:
                os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)


def publish_once(temporary: str, name: str, folder: int | None = None) -> None:
    """Give a whole, durable file its name, unless that is taken: a hard link cannot replace."""
    try:
        os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        # NFS repeats a lost request, and then finds its own link.
        if os.stat(temporary, dir_fd=folder, follow_symlinks=False).st_nlink < 2:
            raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # Without links: claim the name with an empty file, then fill it. A crash between the two
        # leaves it empty, so callers take nothing that is empty for what was to be put.
        os.close(os.open(name, _NEW, 0o666, dir_fd=folder))
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


def _is_listed(name: str) -> bool:
    return not is_temporary(name)


def _entries(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        yield from entries


def _walked(
    folder: Path | str, prefix: str, wanted: Callable[[str], bool], *, deep: bool
) -> Iterator[Stored]:
    for entry in _entries(folder):
        key = f"{prefix}/{entry.name}" if prefix else entry.name
        # A link to a folder above would never end.
        if entry.is_dir(follow_symlinks=False):
            if deep and _is_listed(entry.name):
                yield from _walked(entry.path, key, wanted, deep=deep)
        elif wanted(entry.name):
            # A link may lead to nothing, to itself, or where nobody may look.
            with suppress(OSError if entry.is_symlink() else FileNotFoundError):
                status = entry.stat()
                if stat.S_ISREG(status.st_mode):
                    yield Stored(key, status.st_size, status.st_mtime)


@contextmanager
def _asked_for(path: Path) -> Iterator[None]:
    """Translate every OSError inside; what is no regular file is not there."""
    with refusals(str(path)):
        try:
            yield
        except _ABSENT as error:
            raise NotFoundError(
                "no such file", where=str(path), hint="check the path and the name"
            ) from error


def _sync_nearest(folder: Path) -> None:
    """Make the entries of a folder durable, or its absence where it is gone."""
    try:
        sync_folder(folder)
    except FileNotFoundError:
        _sync_nearest(folder.parent)


def _sync_above(folder: Path, root: Path, made: list[Path]) -> None:
    """Make the way to `folder` durable: the folders above it, up to the one that holds the root.

    Not only those that we made something in: another writer that made a folder which we use may
    die before it makes that durable.
    """
    chain = folder.parents[: len(folder.relative_to(root).parts)]
    changed = [path.parent for path in made]
    for path in dict.fromkeys([*chain, *changed, root.parent]):
        try:
            sync_folder(path)
        except PermissionError:
            # A folder that may be passed but not read, and that we did not change.
            if path in changed:
                raise


def _remove_empty(folder: Path, root: Path, *, bare: bool = False) -> None:
    """Remove `folder` and what becomes empty above it, below the root.

    Names the store made for its own use do not count: a `put` that still needs one starts over,
    and a sink keeps its own locked. With `bare` only folders go that have nothing at all in them.
    """
    while root in folder.parents:
        try:
            with entered(root, folder.parent) as parent:
                if not bare and not _cleared(folder.name, parent):
                    return
                os.rmdir(folder.name, dir_fd=parent)
        except FileNotFoundError:
            pass
        except OSError:
            # The objects are gone, which is all that was promised.
            return
        folder = folder.parent


def _remove_made(folder: Path, root: Path, made: list[Path]) -> None:
    """Remove `folder` and those above it that are empty, and of the root's what was made."""
    # Whoever made a folder could not remove it while our file was in it.
    _remove_empty(folder, root, bare=True)
    for each in reversed(made):
        if root not in each.parents:
            with suppress(OSError):
                each.rmdir()


def _cleared(name: str, parent: int) -> bool:
    """Whether a folder had only the store's own names, which go; an OSError where one is locked."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(name, flags, dir_fd=parent)
    try:
        names = os.listdir(descriptor)  # noqa: PTH208 — of what is open, not of a path
        if not all(map(is_leftover, names)):
            return False
        for each in names:
            file = os.open(each, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=descriptor)
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            finally:
                os.close(file)
            os.unlink(each, dir_fd=descriptor)
        return True
    finally:
        os.close(descriptor)


def _where_folders_vanish(make: Callable[[], T]) -> T:
    """What `make` returns, which makes a file and the folders above it: asked again where one of
    these is gone, because another writer that ends removes what it finds empty.
    """
    for _ in range(_TRIES - 1):
        with suppress(FileNotFoundError):
            return make()
    return make()


class LocalSink:
    """A new file of the store; visible under its name, incomplete until `finish`.

    Under its name, because a crash then leaves something that is listed and can be deleted. With
    `again` it has a name of its own until then, and replaces what is there.
    """

    def __init__(
        self, root: Path, path: Path, extents: Sequence[int], *, again: bool = False
    ) -> None:
        self._root = root
        self._name = path
        self._path = path.with_name(new_temporary()) if again else path
        self._where = str(path)
        self._parts = Parts(self._where, extents)
        self._made: list[Path] = []
        self._finished = False
        # Blocks that several parts share, each with the number of bytes that it still lacks:
        # collected piece by piece, written as one.
        self._edges: dict[int, tuple[AlignedBuffer, int]] = {}
        self._edging = threading.Lock()

        def create() -> DirectFile:
            with entered(self._root, self._path.parent, self._made) as folder:
                return DirectFile(self._path.name, folder, lock=again)

        try:
            with refusals(self._where):
                self._file = _where_folders_vanish(create)
        except BaseException:
            _remove_made(path.parent, root, self._made)
            raise
        # Once for all parts: when the file gives up direct writes, later, blocks that were begun
        # still have to be completed.
        self._in_blocks = self._file.direct
        try:
            with refusals(self._where):
                self._file.reserve(self._parts.total)
        except BaseException:
            self.abort()
            raise

    def write(self, part: int, data: memoryview) -> None:
        """Write one part, with the blocks at its borders that it completes: from the buffer itself
        where its address suits its offset.
        """
        view = as_bytes(self._where, data)
        with refusals(self._where), self._parts.claiming(part, view.nbytes) as offset:
            if not (self._in_blocks and view.nbytes):
                self._file.write([view] if view.nbytes else [], offset)
                return
            # Whole blocks, with those at the borders that the part completes: these go out in one
            # call with the part's own, so that they cost no request of their own.
            end = offset + view.nbytes
            first, last = -(-offset // BLOCK) * BLOCK, end // BLOCK * BLOCK
            head = self._edge(offset, view[: min(first, end) - offset])
            tail = self._edge(last, view[last - offset :]) if last >= first else None
            middle = view[first - offset : last - offset] if last > first else view[:0]
            try:
                if middle.nbytes and self._file.direct and address_of(middle) % BLOCK:
                    # By way of memory at a suitable address.
                    with default_pool().take(min(_BOUNCE, middle.nbytes)) as bounce:
                        for begin in range(0, middle.nbytes, _BOUNCE):
                            piece = middle[begin : begin + _BOUNCE]
                            copy_bytes(piece, bounce[: piece.nbytes])
                            self._file.write([bounce[: piece.nbytes]], first + begin)
                    if head is not None:
                        self._file.write([head.view], first - BLOCK)
                    if tail is not None:
                        self._file.write([tail.view], last)
                    return
                run = [head.view] if head is not None else []
                run += [middle] if middle.nbytes else []
                run += [tail.view] if tail is not None else []
                self._file.write(run, first if head is None else first - BLOCK)
            finally:
                for block in (head, tail):
                    if block is not None:
                        block.give_back()

    @contextmanager
    def filling(self, part: int) -> Iterator[memoryview]:
        with self._parts.loan(part) as memory:
            yield memory
            self.write(part, memory)

    def finish(self) -> None:
        """Make the file durable, then its name and the way to it."""
        self._parts.complete()
        with refusals(self._where):
            self._file.seal(self._parts.total)
            is_named = False
            with suppress(FileNotFoundError), entered(self._root, self._path.parent) as folder:
                if self._file.is_at(self._path.name, folder):
                    if self._path != self._name:
                        names = self._path.name, self._name.name
                        os.replace(*names, src_dir_fd=folder, dst_dir_fd=folder)
                    is_named = True
            if not is_named:
                raise NotFoundError(
                    "the file was deleted or replaced while it was written",
                    where=self._where,
                    hint="two writers share a name, or something cleans up too early",
                )
            sync_folder(self._path.parent)
            _sync_above(self._path.parent, self._root, self._made)
            self._file.close()
        self._finished = True

    def abort(self) -> None:
        """Remove the file, and the folders that are empty then."""
        self._parts.close()
        if self._finished:
            return
        self._finished = True
        for block, _ in self._edges.values():
            block.give_back()
        self._edges.clear()
        with suppress(OSError):
            try:
                with entered(self._root, self._path.parent) as folder:
                    # Not what another writer put in its place.
                    if self._file.is_at(self._path.name, folder):
                        os.unlink(self._path.name, dir_fd=folder)
            except OSError as error:
                # No descriptor is left for the folder: by its path, then.
                if error.errno in _TOO_MANY_OPEN and self._file.is_at(self._path):
                    self._path.unlink()
        with suppress(OSError):
            self._file.close()
        _remove_made(self._path.parent, self._root, self._made)

    def _edge(self, offset: int, piece: memoryview) -> AlignedBuffer | None:
        """Take a piece that lies inside one block; returns the block when that completes it."""
        if not piece.nbytes:
            return None
        begin = offset // BLOCK * BLOCK
        with self._edging:
            if begin in self._edges:
                block, lacking = self._edges.pop(begin)
            else:
                block, lacking = default_pool().take(BLOCK), min(BLOCK, self._parts.total - begin)
                # What lies behind the end of the file reaches the disk too, until the file is cut.
                block.view[lacking:] = bytes(BLOCK - lacking)
            block.view[offset - begin : offset - begin + piece.nbytes] = piece
            lacking -= piece.nbytes
            if lacking:
                self._edges[begin] = block, lacking
                return None
            return block
