"""Objects of a server behind the same contract as files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from itertools import islice
from operator import attrgetter
from pathlib import Path

from ckptkit.errors import UsageError
from ckptkit.storage.base.address import (
    BUCKETS,
    TEMPORARY,
    Address,
    Location,
    Options,
    Settings,
    deletable_key,
    is_leftover,
    is_temporary,
    read_settings,
)
from ckptkit.storage.base.buffers import copy_bytes, default_pool
from ckptkit.storage.base.store import (
    Abilities,
    BufferSink,
    Entries,
    KeyedStore,
    LendsNothing,
    Names,
    Parts,
    Sink,
    Stored,
    as_bytes,
    checked_range,
)
from ckptkit.storage.objects.amazon import Upload, aws_files, profile_endpoint
from ckptkit.storage.objects.server import Client, ObjectServer
from ckptkit.storage.objects.upload import ObjectSink

# The module that reaches them if obstore is not there, and the extra that brings both.
_FILE_SYSTEMS = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs"), "az": ("adlfs", "azure")}
_PREFIXES = ("AWS_", "GOOGLE_", "AZURE_", "GCSFS_")
# As many as S3 deletes with one request.
_BATCH = 1000
# A larger request might take longer than an answer may take, and then at every attempt.
_MOST_AT_ONCE = 64 << 20


def open_objects(location: Location, options: Options) -> ObjectStore:
    """The store of a location on a server; nothing is asked until the first call on it."""
    settings = read_settings(location.scheme, options)
    if location.scheme == "s3" and settings.endpoint is None:
        settings = replace(settings, endpoint=profile_endpoint(settings, str(location)))
    top, _ = _split(location)
    # What only one file system understands need not be hashable; fsspec keeps those itself.
    if settings.others:
        client = _new_client(top, settings)
    else:
        client = _shared_client(top, settings, _environment())
    return ObjectStore(client, Address(location, dict(options)), settings)


def _split(location: Location) -> tuple[Location, str]:
    """Where the keys of a client begin, and the folder below it: buckets are reached whole."""
    if location.scheme not in BUCKETS:
        return location, ""
    bucket, _, folder = location.path.partition("/")
    return Location(location.scheme, bucket), folder


@lru_cache(maxsize=16)
def _shared_client(top: Location, settings: Settings, environment: object) -> Client:  # noqa: ARG001 — part of the key
    """The client of all stores that are reached alike: they share its connections."""
    return _new_client(top, settings)


def _environment() -> object:
    """What else a client depends on: the variables and files that it may have read, and the
    process, as no connection outlives a fork.
    """
    found = {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}
    google = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    changed = {}
    for file in (*aws_files(), *([Path(google)] if google else ())):
        with suppress(OSError):
            changed[file] = file.stat().st_mtime_ns
    return os.getpid(), tuple(sorted(found.items())), tuple(changed.items())


def _new_client(top: Location, settings: Settings) -> Client:
    engine = "fsspec"
    if top.scheme in BUCKETS:
        file_system, extra = _FILE_SYSTEMS[top.scheme]
        needed = {"obstore": "obstore", "fsspec": file_system}
        found = [name for name, module in needed.items() if find_spec(module)]
        engine = settings.engine or next(iter(found), "obstore")
        if engine not in found:
            raise UsageError(
                f"{top.scheme}:// needs the package {needed[engine]}",
                hint=f"pip install 'ckptkit[{extra}]'",
            )
    elif settings.engine == "obstore":
        raise UsageError(
            f"the engine obstore does not know {top.scheme}://",
            hint="leave the option engine out",
        )
    if engine == "obstore":
        from ckptkit.storage.objects.obstore import ObstoreClient  # noqa: PLC0415 — may be missing

        return ObstoreClient(top, settings)
    from ckptkit.storage.objects.fsspec import FsspecClient, S3fsClient  # noqa: PLC0415 — slow

    return S3fsClient(top, settings) if top.scheme == "s3" else FsspecClient(top, settings)


class ObjectStore(KeyedStore):
    """A store in a folder of a bucket, or of another file system of fsspec.

    There are no folders: a name may be an object and have others below it.
    """

    def __init__(self, client: Client, address: Address, settings: Settings) -> None:
        top, folder = _split(address.location)
        super().__init__(address, folder)
        self._server = ObjectServer(client, top, settings, self.location)
        self._abilities = Abilities(
            part_size=settings.part_size,
            claims_names=False,
            open_survives_delete=False,
            has_folders=False,
            clock_of_its_own=True,
            waits_for_answers=True,
            request_bytes=settings.request_bytes,
            gap_bytes=settings.gap_bytes,
            concurrency=settings.concurrency,
        )
        self._unsafe = replace(self._abilities, exclusive_create=False)

    @property
    def abilities(self) -> Abilities:
        """Few large requests, many at a time; whether creators are told apart is known once
        somebody has asked (`learn`) or created something.
        """
        return self._unsafe if self._server.known.refuses_to_replace is False else self._abilities

    def children(self, prefix: str = "") -> Names:
        found = self._server.children(self._below(prefix))
        return sorted({name for name in found if name and not is_temporary(name)})

    def list(self, prefix: str = "", *, deep: bool = True) -> Entries:
        found = self._entries(prefix, deep=deep)
        return [entry for entry in found if not _has_temporary(entry.key)]

    def size(self, key: str) -> int:
        return self._server.head(self._path(key)).size

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Exactly these bytes of an object; one request more where `length` is left out."""
        path = self._path(key)
        if start < 0 or not length or length < 0:
            length = checked_range(self._where(key), self._server.head(path).size, start, length)
        return bytes(self._server.read(path, start, length)) if length else b""

    def read_whole(self, key: str, most: int) -> bytes:
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
        path, where = self._path(key), self._where(key)
        parts = Parts(where, extents)
        if parts.total <= self._abilities.part_size:
            if not again:
                self._server.refuse_taken(path)
            # One request needs no upload: put together in memory, and sent when it is finished.
            buffer = default_pool().take(parts.total)

            def put_whole() -> None:
                self._server.put(path, buffer.view)
                buffer.give_back()

            return BufferSink(parts, buffer.view, put_whole, buffer.give_back)
        return ObjectSink(self._server, path, parts, memory, again=again)

    def put(
        self, key: str, data: bytes | bytearray | memoryview, *, exclusive: bool = False
    ) -> None:
        path = self._path(key)
        view = as_bytes(self._where(key), data)
        if exclusive:
            self._server.put_exclusive(path, view)
        else:
            self._server.put(path, view)

    def sync(self, keys: Iterable[str]) -> None:
        """Only makes sure that they are there: what a server has accepted is durable."""
        for key in keys:
            self._server.head(self._path(key))

    def learn(self, prefix: str = "") -> None:
        """Some twenty small requests, once: whether creators are told apart."""
        self._server.learn(f"{self._below(prefix)}/x".lstrip("/"))

    def leftovers(self, prefix: str = "", *, deep: bool = True) -> Entries:  # noqa: ARG002
        """Multipart uploads that were begun, where the server can be asked for them (S3, with
        botocore installed), and objects of the store's own.
        """
        begun = [
            Stored(self._leftover_key(it), it.size, it.modified)
            for it in self._server.uploads(self._below(prefix))
        ]
        own = [entry for entry in self._entries(prefix) if _is_own(entry.key)]
        return sorted([*begun, *own], key=attrgetter("key"))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects or leftovers, the first before any other, the others many at a time."""
        # The first by itself, as a manifest is: one request deletes its keys in any order, and a
        # step that is half deleted must not be found.
        left, most = iter(keys), 1
        while batch := list(islice(left, most)):
            most = _BATCH
            checked = [deletable_key(key) for key in batch]
            # A leftover may be an upload, which is aborted, or an object, which is deleted.
            own = {key for key in checked if _is_own(key)}
            for folder in {key.rpartition("/")[0] for key in own}:
                begun = self._server.uploads(self._below(folder))
                self._server.abort(it for it in begun if self._leftover_key(it) in own)
            self._server.delete([self._folder + key for key in checked])

    def _leftover_key(self, upload: Upload) -> str:
        """A key that `delete` knows again; several uploads of one name differ."""
        name = f"{upload.identity}\0{upload.key}".encode(errors="surrogateescape")
        folder, slash, _ = upload.key.removeprefix(self._folder).rpartition("/")
        return f"{folder}{slash}{TEMPORARY}{hashlib.sha256(name).hexdigest()[:16]}"

    def _entries(self, prefix: str, *, deep: bool = True) -> Entries:
        found = self._server.list(self._below(prefix), deep=deep)
        top = len(self._folder)
        entries = [replace(entry, key=entry.key[top:]) for entry in found]
        # Other programs may have left names here that no key can have, such as those of folders.
        plain = (it for it in entries if not {"", ".", ".."} & set(it.key.split("/")))
        return sorted(plain, key=attrgetter("key"))


def _has_temporary(key: str) -> bool:
    return any(is_temporary(part) for part in key.split("/"))


def _is_own(key: str) -> bool:
    folder, _, name = key.rpartition("/")
    return is_leftover(name) and not _has_temporary(folder)


class ObjectSource(LendsNothing):
    """An object, open for reading; nothing is kept open on the server."""

    def __init__(self, server: ObjectServer, path: str, size: int) -> None:
        self._server = server
        self._path = path
        self._where = server.where(path)
        self.size = size

    def read_into(self, offset: int, *buffers: memoryview) -> None:
        views = [as_bytes(self._where, buffer) for buffer in buffers]
        total = checked_range(self._where, self.size, offset, sum(view.nbytes for view in views))
        if 0 < total <= _MOST_AT_ONCE:
            data = self._server.read(self._path, offset, total)
            for view in filter(len, views):
                copy_bytes(data[: view.nbytes], view)
                data = data[view.nbytes :]
            return
        for view in views:
            for done in range(0, view.nbytes, _MOST_AT_ONCE):
                stretch = view[done : done + _MOST_AT_ONCE]
                copy_bytes(self._server.read(self._path, offset + done, stretch.nbytes), stretch)
            offset += view.nbytes

    def fetch(self, offset: int, length: int) -> memoryview:
        """These bytes, as they came; copied only where one request cannot bring them."""
        checked_range(self._where, self.size, offset, length)
        if 0 < length <= _MOST_AT_ONCE:
            return self._server.read(self._path, offset, length)
        buffer = memoryview(bytearray(length))
        self.read_into(offset, buffer)
        return buffer

    def close(self) -> None:
        """There is nothing to free."""
