"""Google Cloud Storage, Azure and every other file system that fsspec knows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from ckptkit.errors import NotFoundError
from ckptkit.storage.location import BUCKETS, Location
from ckptkit.storage.objects.answers import absent, below
from ckptkit.storage.objects.client import Stat, Transient, Upload, Uploads
from ckptkit.storage.objects.failures import answer_of, translated
from ckptkit.storage.objects.settings import Settings
from ckptkit.storage.objects.window import pieces_of
from ckptkit.storage.ranges import checked_size
from ckptkit.storage.store import Entries, Entry, Names

# Google takes chunks of whole multiples of this.
_CHUNK = 256 << 10
_BEGINNING = 8 << 20
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


class FsspecClient:
    """One bucket or folder; what is written becomes visible whole if the file system can do that.

    Of file systems with folders, those that were emptied stay.
    """

    def __init__(self, top: Location, settings: Settings) -> None:
        self._top = top
        self._settings = settings
        self._is_cloud = top.scheme in BUCKETS
        self._made: dict[int, tuple[Any, str]] = {}

    @property
    def exclusive(self) -> bool:
        """Google can be asked; elsewhere the mode does not reach the server, or is not one step."""
        return self._top.scheme == "gs"

    @property
    def repeats(self) -> bool:
        """Some of these repeat by themselves, and do not tell."""
        return True

    @property
    def copies(self) -> bool:
        """A file has a buffer of its own."""
        return True

    def get(self, key: str, start: int, length: int) -> bytes | memoryview:
        """A range."""
        with self._answers(key):
            return self._range(key, start, start + length)

    def get_whole(self, key: str, most: int) -> bytes:
        """The beginning, with which most end, and the rest where it is not too large."""
        begun = min(most + 1, _BEGINNING)
        with self._answers(key):
            data = self._range(key, 0, begun)
            if len(data) < begun:
                return data
            size = self._fs.info(self._path(key))["size"]
            data += self._range(key, begun, checked_size(self._where(key), size, most))
        if len(data) != size:
            raise Transient(f"{len(data)} of {size} bytes came")
        return data

    def head(self, key: str) -> Stat:
        """One question."""
        with self._answers(key):
            found = self._fs.info(self._path(key))
        if found["type"] == "directory":
            raise absent(self._where(key))
        etag = found.get("ETag") or found.get("etag")
        return Stat(found["size"], etag if isinstance(etag, str) else None)

    def put(self, key: str, data: memoryview, *, create: bool) -> str | None:
        """Whole, where the file system does that."""
        mode = {"mode": "create"} if create else {}
        with self._answers(key):
            self._make_folder(key)
            self._fs.pipe_file(self._path(key), bytes(data), **mode)
        return None

    def upload(
        self,
        key: str,
        blocks: Iterator[memoryview],
        piece_size: int,
        concurrency: int,  # noqa: ARG002 — a file is written from its beginning to its end
    ) -> None:
        """A file that is written piece by piece."""
        with self._answers(key):
            self._make_folder(key)
            options = {} if self._is_cloud else {"autocommit": False}
            block = -(-piece_size // _CHUNK) * _CHUNK
            file = self._fs.open(self._path(key), "wb", block_size=block, **options)
            try:
                pieces = pieces_of(blocks, piece_size)
                while (piece := next(pieces, None)) is not None:
                    file.write(piece)
                    # Let go of it before the next one is put together.
                    del piece
                file.close()
                if not self._is_cloud and hasattr(file, "commit"):
                    file.commit()
            except BaseException:
                _discard(file)
                raise

    def list(self, folder: str) -> Entries:
        """Everything below."""
        with self._answers(folder):
            self._fs.invalidate_cache()
            try:
                found: Mapping[str, Any] = self._fs.find(self._path(folder), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        start = f"{self._path(folder)}/"
        return [
            Entry(name[len(self._root) + 1 :], int(info["size"] or 0), _modified(info))
            for name, info in found.items()
            if name.startswith(start)
        ]

    def children(self, folder: str) -> Names:
        """One level."""
        with self._answers(folder):
            self._fs.invalidate_cache()
            try:
                names = self._fs.ls(self._path(folder), detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        start = f"{self._path(folder)}/"
        return [name[len(start) :].rstrip("/") for name in names if name.startswith(start)]

    def delete(self, keys: Sequence[str]) -> None:
        """One by one, many at a time."""
        with ThreadPoolExecutor(min(len(keys), self._settings.concurrency)) as threads:
            list(threads.map(self._delete, keys))

    def compares_bodies(self, scratch: str) -> None:
        """There is no telling."""

    def uploads(self, folder: str) -> Uploads:  # noqa: ARG002
        """None: there is no asking."""
        return []

    def abort(self, uploads: Iterable[Upload]) -> None:
        """There are none."""

    def _range(self, key: str, start: int, end: int) -> bytes:
        try:
            data: bytes = self._fs.cat_file(self._path(key), start=start, end=end)
        except Exception as error:
            answer = answer_of(error)
            # Beyond the end, or an empty object.
            if answer is None or answer.status != 416:
                raise
            return b""
        return data

    def _delete(self, key: str) -> None:
        with suppress(NotFoundError, IsADirectoryError), self._answers(key):
            self._fs.rm_file(self._path(key))

    def _make_folder(self, key: str) -> None:
        # In a cloud this would make a bucket.
        if not self._is_cloud:
            self._fs.makedirs(self._path(key).rpartition("/")[0], exist_ok=True)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _where(self, key: str) -> str:
        return below(self._top, key)

    def _answers(self, key: str) -> Any:
        return translated(self._where(key), self._settings.secrets)

    @property
    def _fs(self) -> Any:
        return self._opened[0]

    @property
    def _root(self) -> str:
        return self._opened[1]

    @property
    def _opened(self) -> tuple[Any, str]:
        # Connections and the thread of an event loop stay behind in a fork.
        process = os.getpid()
        if process not in self._made:
            self._made = {process: self._new()}
        return self._made[process]

    def _new(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs  # noqa: PLC0415 — costs time

        options = _options(self._top.scheme, self._settings)
        found, root = url_to_fs(str(self._top), use_listings_cache=False, **options)
        return found, root.rstrip("/")


def _options(scheme: str, settings: Settings) -> dict[str, Any]:
    if scheme == "gs":
        return {
            # The project is asked for only to make buckets.
            "project": "",
            "token": "anon" if settings.anonymous else None,
            "endpoint_url": settings.endpoint,
            # In all: what aiohttp itself finds stalled gcsfs asks for six times, in silence.
            "requests_timeout": settings.answer_seconds,
        }
    if scheme == "az":
        return {
            "account_name": settings.access_key,
            "account_key": settings.secret_key,
            "sas_token": settings.session_token,
            "anon": settings.anonymous,
        }
    return dict(settings.others)


def _discard(file: Any) -> None:
    # Errors are not ours to raise: the one that led here is.
    with suppress(Exception):
        file.discard()
    # A file that is closed later, by the garbage collector, would be completed after all.
    with suppress(Exception):
        file.closed = True


def _modified(info: Mapping[str, Any]) -> float:
    found = next((info[name] for name in _TIMES if info.get(name)), None)
    if isinstance(found, str):
        with suppress(ValueError):
            found = datetime.fromisoformat(found)
    if isinstance(found, datetime):
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    # What has no time must never seem old enough to be cleaned up.
    return float(found) if isinstance(found, int | float) else time.time()
