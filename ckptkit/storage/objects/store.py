"""Objects of a server behind the same contract as files."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from ckptkit.errors import UsageError
from ckptkit.storage.location import BUCKETS, Location
from ckptkit.storage.objects.server import Client
from ckptkit.storage.objects.amazon import aws_files, profile_endpoint
from ckptkit.storage.options import Settings, read_settings
from ckptkit.storage.options import Address, Options

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter

from ckptkit.errors import NotFoundError
from ckptkit.storage.store import Closing
from ckptkit.storage.location import TEMPORARY, checked_key, deletable_key, folder_of, is_leftover, is_temporary
from ckptkit.storage.location import BUCKETS, Location
from ckptkit.storage.objects.errors import taken
from ckptkit.storage.objects.server import Client, Upload
from ckptkit.storage.objects.server import ExclusiveCreate
from ckptkit.storage.objects.server import Server
from ckptkit.storage.options import Settings
from ckptkit.storage.objects.upload import ObjectSink
from ckptkit.storage.objects.upload import WholeSink
from ckptkit.storage.options import Address
from ckptkit.storage.sink import Parts
from ckptkit.storage.store import as_bytes, checked_range
from ckptkit.storage.store import Abilities, Entries, Entry, Names, Sink

# As many as S3 deletes with one request.
_BATCH = 1000


class ObjectStore:
    """A store in a folder of a bucket, or of another file system of fsspec.

    There are no folders: a name may be an object and have others below it.
    """

    def __init__(self, client: Client, address: Address, settings: Settings) -> None:
        self.address = address
        self.location: Location = address.location
        top, folder = split(self.location)
        self._folder = f"{folder}/" if folder else ""
        self._server = Server(client, top, settings)
        self._exclusive = ExclusiveCreate(self._server, self._folder)
        self._abilities = Abilities(
            exclusive_create=True,
            alignment=1,
            part_size=settings.part_size,
            modified_times=True,
            is_file_system=False,
            request_bytes=settings.request_bytes,
            gap_bytes=settings.gap_bytes,
            concurrency=settings.concurrency,
        )
        self._unsafe = replace(self._abilities, exclusive_create=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.location)!r})"

    @property
    def abilities(self) -> Abilities:
        """Few large requests, many at a time; whether creators are told apart is known once
        somebody has asked (`learn`) or created something.
        """
        return self._abilities if self._exclusive.is_safe else self._unsafe

    def children(self, prefix: str = "") -> Names:
        """The names directly below `prefix`, sorted."""
        found = self._server.children(self._below(prefix))
        return sorted({name for name in found if name and not is_temporary(name)})

    def links(self, prefix: str = "") -> dict[str, str]:
        """None: there is no such thing."""
        folder_of(prefix)
        return {}

    def list(self, prefix: str = "") -> Entries:
        """Every object below `prefix`, sorted by key."""
        found = self._entries(prefix)
        return [entry for entry in found if not _has_temporary(entry.key)]

    def size(self, key: str) -> int:
        """The number of bytes of an object."""
        return self._server.head(self._path(key)).size

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Exactly these bytes of an object; one request more where `length` is left out."""
        path = self._path(key)
        if start < 0 or not length or length < 0:
            length = checked_range(self._where(key), self._server.head(path).size, start, length)
        return bytes(self._server.read(path, start, length)) if length else b""

    def read_whole(self, key: str, most: int) -> bytes:
        """A small object, in one request."""
        return self._server.read_whole(self._path(key), most)

    def open(self, key: str, size: int | None = None) -> ObjectSource:
        """Open an object for reading, without a request where the size is known."""
        path = self._path(key)
        if size is None:
            size = self._server.head(path).size
        return ObjectSource(self._server, path, size)

    def create(
        self, key: str, extents: Sequence[int], *, memory: int | None = None, again: bool = False
    ) -> Sink:
        """Begin a new object, invisible until it is finished."""
        path = self._path(key)
        parts = Parts(self._where(key), extents)
        if not again:
            self._refuse_taken(path)
        if parts.total <= self._abilities.part_size:
            return WholeSink(self._server, path, parts)
        return ObjectSink(self._server, path, parts, memory)

    def put(
        self, key: str, data: bytes | bytearray | memoryview, *, exclusive: bool = False
    ) -> None:
        """Store a small object whole."""
        path = self._path(key)
        view = as_bytes(self._where(key), data)
        if exclusive:
            self._exclusive.create(path, view)
        else:
            self._server.put(path, view)

    def sync(self, keys: Iterable[str]) -> None:
        """Only makes sure that they are there: what a server has accepted is durable."""
        for key in keys:
            self._server.head(self._path(key))

    def learn(self, prefix: str = "") -> None:
        """Some twenty small requests, once: whether creators are told apart."""
        self._exclusive.learn(f"{self._below(prefix)}/x".lstrip("/"))

    def room(self) -> int | None:
        """No telling."""
        return None

    def leftovers(self, prefix: str = "", *, deep: bool = True) -> Entries:  # noqa: ARG002
        """Multipart uploads that were begun, where the server can be asked for them (S3, with
        botocore installed), and objects of the store's own; sorted by key.
        """
        begun = [
            Entry(self._leftover_key(it), it.size, it.modified)
            for it in self._server.uploads(self._below(prefix))
        ]
        own = [entry for entry in self._entries(prefix) if _is_own(entry.key)]
        return sorted([*begun, *own], key=attrgetter("key"))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects or leftovers, the first before any other, the others many at a time."""
        left = iter(keys)
        for batch in _batches(left):
            checked = [deletable_key(key) for key in batch]
            self._abort({key for key in checked if _is_own(key)})
            self._server.delete([self._folder + key for key in checked])

    def _abort(self, keys: set[str]) -> None:
        folders = {key.rpartition("/")[0] for key in keys}
        begun = [it for folder in folders for it in self._server.uploads(self._below(folder))]
        self._server.abort(it for it in begun if self._leftover_key(it) in keys)

    def _leftover_key(self, upload: Upload) -> str:
        """A key that `delete` knows again; several uploads of one name differ."""
        name = f"{upload.identity}\0{upload.key}".encode(errors="surrogateescape")
        folder, slash, _ = upload.key.removeprefix(self._folder).rpartition("/")
        return f"{folder}{slash}{TEMPORARY}{hashlib.sha256(name).hexdigest()[:16]}"

    def _entries(self, prefix: str) -> Entries:
        found = self._server.list(self._below(prefix))
        top = len(self._folder)
        entries = [replace(entry, key=entry.key[top:]) for entry in found]
        return sorted((it for it in entries if _is_plain(it.key)), key=attrgetter("key"))

    def _refuse_taken(self, path: str) -> None:
        try:
            self._server.head(path)
        except NotFoundError:
            return
        raise taken(self._server.where(path))

    def _path(self, key: str) -> str:
        return self._folder + checked_key(key)

    def _where(self, key: str) -> str:
        return f"{self.location}/{key}"

    def _below(self, prefix: str) -> str:
        folder = folder_of(prefix)
        return (self._folder + folder).rstrip("/")


class ObjectSource(Closing):
    """An object, open for reading; nothing is kept open on the server."""

    def __init__(self, server: Server, path: str, size: int) -> None:
        self._server = server
        self._path = path
        self.size = size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the whole buffer from `offset`."""
        where = self._server.where(self._path)
        view = as_bytes(where, buffer)
        checked_range(where, self.size, offset, view.nbytes)
        self._server.read_into(self._path, offset, view)

    def fetch(self, offset: int, length: int) -> memoryview:
        """These bytes, as they came."""
        checked_range(self._server.where(self._path), self.size, offset, length)
        return self._server.fetch(self._path, offset, length) if length else memoryview(b"")

    def close(self) -> None:
        """There is nothing to free."""


def split(location: Location) -> tuple[Location, str]:
    """Where the keys of a client begin, and the folder below it: buckets are reached whole."""
    if location.scheme not in BUCKETS:
        return location, ""
    bucket, _, folder = location.path.partition("/")
    return Location(location.scheme, bucket), folder


def _batches(keys: Iterator[str]) -> Iterator[list[str]]:
    """The first key alone, then as many as one request deletes."""
    batch: list[str] = []
    most = 1
    for key in keys:
        batch.append(key)
        if len(batch) == most:
            yield batch
            batch, most = [], _BATCH
    if batch:
        yield batch


def _is_plain(key: str) -> bool:
    # Other programs may have left names here that no key can have, such as those of folders.
    return all(part not in ("", ".", "..") for part in key.split("/"))


def _has_temporary(key: str) -> bool:
    return any(is_temporary(part) for part in key.split("/"))


def _is_own(key: str) -> bool:
    folder, _, name = key.rpartition("/")
    return is_leftover(name) and not _has_temporary(folder)

_EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure"}
_PREFIXES = ("AWS_", "GOOGLE_", "AZURE_", "GCSFS_")
_FILE_SYSTEMS = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}


def open_objects(location: Location, options: Options) -> ObjectStore:
    """The store of a location on a server; nothing is asked until the first call on it."""
    settings = read_settings(location.scheme, options)
    top = split(location)[0]
    if location.scheme == "s3" and settings.endpoint is None:
        settings = replace(settings, endpoint=profile_endpoint(settings, str(location)))
    # What only one file system understands need not be hashable; fsspec keeps those itself.
    client = _client(top, settings) if settings.others else _kept(top, settings, _surroundings())
    return ObjectStore(client, Address(location, dict(options)), settings)


@lru_cache(maxsize=16)
def _kept(top: Location, settings: Settings, _surroundings: object) -> Client:
    """One client for all stores that are reached alike: they share its connections."""
    return _client(top, settings)


def _surroundings() -> object:
    """What a client may have read besides its settings; no connection outlives a fork."""
    found = {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}
    files = [*aws_files(), Path(os.environ.get("GOOGLE_APPLICATION_CREDENTIALS", ""))]
    return os.getpid(), tuple(sorted(found.items())), tuple(map(_changed, files))


def _changed(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _client(top: Location, settings: Settings) -> Client:
    if _engine(top.scheme, settings) == "obstore":
        from ckptkit.storage.objects.obstore import ObstoreClient  # noqa: PLC0415

        return ObstoreClient(top, settings)
    if top.scheme == "s3":
        from ckptkit.storage.objects.fsspec import S3fsClient

        return S3fsClient(top, settings)
    from ckptkit.storage.objects.fsspec import FsspecClient  # noqa: PLC0415

    return FsspecClient(top, settings)


def _engine(scheme: str, settings: Settings) -> str:
    if scheme not in BUCKETS:
        if settings.engine == "obstore":
            raise UsageError(
                f"the engine obstore does not know {scheme}://",
                hint="leave the option engine out",
            )
        return "fsspec"
    needed = {"obstore": "obstore", "fsspec": _FILE_SYSTEMS[scheme]}
    found = [engine for engine, module in needed.items() if find_spec(module)]
    wanted = settings.engine or next(iter(found), "obstore")
    if wanted not in found:
        raise UsageError(
            f"{scheme}:// needs the package {needed[wanted]}",
            hint=f"pip install 'ckptkit[{_EXTRAS[scheme]}]'",
        )
    return wanted
