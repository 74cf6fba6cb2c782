"""Google Cloud Storage, Azure and every other file system that fsspec knows."""

from __future__ import annotations

import os
from asyncio import wait_for
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar
from fsspec.asyn import sync
from ckptkit.errors import CkptkitError
from ckptkit.storage.location import Location
from ckptkit.storage.objects.errors import Answer, below, said
from ckptkit.storage.objects.server import Stat, Transient, Upload, Uploads
from ckptkit.storage.objects.errors import answer_of, translated
from ckptkit.storage.objects.server import Retrying
from ckptkit.storage.objects.amazon import config_options, new_session
from ckptkit.storage.options import Settings
from ckptkit.storage.objects.amazon import SignedBodies
from ckptkit.storage.objects.amazon import S3Uploads
from ckptkit.storage.objects.upload import pieces_of
from ckptkit.storage.store import checked_size
from ckptkit.storage.store import Entries, Entry, Names

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from ckptkit.errors import NotFoundError
from ckptkit.storage.location import BUCKETS, Location
from ckptkit.storage.objects.errors import absent, below
from ckptkit.storage.objects.server import Stat, Transient, Upload, Uploads
from ckptkit.storage.objects.errors import answer_of, translated
from ckptkit.storage.options import Settings
from ckptkit.storage.objects.upload import pieces_of
from ckptkit.storage.store import checked_size
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

T = TypeVar("T")

Parts: TypeAlias = list[dict[str, Any]]


class S3fsClient:
    """One bucket.

    It calls the methods of S3 rather than those of a file system, which cache listings, take some
    keys for versions, ask more than once, and hide what the server said.
    """

    exclusive = True
    # aiohttp sends a PUT again by itself when a connection that it kept open ends without answer.
    repeats = True
    copies = True

    def __init__(self, top: Location, settings: Settings) -> None:
        self._top = top
        self._settings = settings
        self._uploads = S3Uploads(self)
        self._signed_bodies = SignedBodies(top, settings)
        self._made: dict[int, Any] = {}

    def get(self, key: str, start: int, length: int) -> bytes | memoryview:
        """A range in one request."""
        with self._answers(key):
            try:
                return self._body(key, Range=f"bytes={start}-{start + length - 1}")[0]
            except Exception as error:
                answer = answer_of(error)
                if answer is None or answer.status != 416:
                    raise
                return b""

    def get_whole(self, key: str, most: int) -> bytes:
        """Size and body in one request."""
        with self._answers(key):
            data, size = self._body(key, most=most)
        if len(data) != size:
            raise Transient(f"{len(data)} of {size} bytes came")
        return data

    def head(self, key: str) -> Stat:
        """One request."""
        found = self.call("head_object", key)
        return Stat(found["ContentLength"], found.get("ETag"))

    def put(self, key: str, data: memoryview, *, create: bool) -> str | None:
        """One request, however large."""
        condition: dict[str, Any] = {"IfNoneMatch": "*"} if create else {}
        put = self.call("put_object", key, in_flight=len(data), Body=bytes(data), **condition)
        etag: str | None = put.get("ETag")
        return etag

    def upload(
        self,
        key: str,
        blocks: Iterator[memoryview],
        piece_size: int,
        concurrency: int,
    ) -> str | None:
        """A multipart upload whose parts are sent again one by one."""
        identity = self._call_again("create_multipart_upload", key)["UploadId"]
        try:
            pieces = pieces_of(blocks, piece_size)
            parts = self._send(key, identity, pieces, concurrency, piece_size * concurrency)
            put = self._call_again(
                "complete_multipart_upload",
                key,
                UploadId=identity,
                MultipartUpload={"Parts": parts},
            )
        except BaseException:
            with suppress(CkptkitError, Transient):
                self.call("abort_multipart_upload", key, UploadId=identity)
            raise
        etag: str | None = put.get("ETag")
        return etag

    def list(self, folder: str) -> Entries:
        """As many requests as there are thousands of objects."""
        found = [it for page in self._pages(folder) for it in page.get("Contents", ())]
        return [Entry(it["Key"], it["Size"], it["LastModified"].timestamp()) for it in found]

    def children(self, folder: str) -> Names:
        """The same with a delimiter."""
        names: list[str] = []
        for page in self._pages(folder, Delimiter="/"):
            names += [it["Prefix"].rstrip("/") for it in page.get("CommonPrefixes", ())]
            names += [it["Key"] for it in page.get("Contents", ())]
        start = len(folder) + 1 if folder else 0
        return [name[start:] for name in names]

    def delete(self, keys: Sequence[str]) -> None:
        """One request for a thousand keys."""
        asked = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        done = self.call("delete_objects", keys[0], of_bucket=True, Delete=asked)
        for error in done.get("Errors", ()):
            if error.get("Code") != "NoSuchKey":
                answer = Answer(code=error.get("Code", ""), message=error.get("Message", ""))
                raise said(answer, below(self._top, error.get("Key", "")), self._settings.secrets)

    def compares_bodies(self, scratch: str) -> bool | None:
        """One request, and one more where nobody compares."""
        return self._signed_bodies.are_compared(scratch)

    def uploads(self, folder: str) -> Uploads:
        """A request for each thousand uploads, and one for each of them."""
        return self._uploads.under(folder)

    def abort(self, uploads: Iterable[Upload]) -> None:
        """Abort them one by one."""
        for upload in uploads:
            self._uploads.abort(upload)

    def call(
        self, method: str, key: str, *, of_bucket: bool = False, in_flight: int = 0, **asked: Any
    ) -> Any:
        """One request, while about so many bytes are sent."""
        named = {} if of_bucket else {"Key": key}
        limit = self._settings.stall_seconds + self._settings.extra_seconds(in_flight)
        with self._answers(key):
            return self._limited(
                lambda: self._fs._call_s3(  # noqa: SLF001 — the time-out must be in its loop
                    method, Bucket=self._top.path, **named, **asked
                ),
                limit,
            )

    def _limited(self, ask: Callable[[], Awaitable[T]], limit: float) -> T:
        """Ask in the loop of the file system, for so many seconds at most: aiohttp waits without
        end for a server to welcome a body.
        """

        async def ask_once() -> T:
            return await wait_for(ask(), limit)

        answer: T = sync(self._fs.loop, ask_once)
        return answer

    def _call_again(self, method: str, key: str, *, in_flight: int = 0, **asked: Any) -> Any:
        retry = Retrying(self._settings.deadline + self._settings.extra_seconds(in_flight))
        return retry(
            method,
            below(self._top, key),
            lambda _: self.call(method, key, in_flight=in_flight, **asked),
        )

    def _body(self, key: str, most: int | None = None, **asked: Any) -> tuple[bytes, int]:
        async def read() -> tuple[bytes, int]:
            got = await self._fs._call_s3(  # noqa: SLF001 — the body must be read in its loop
                "get_object", Bucket=self._top.path, Key=key, **asked
            )
            async with got["Body"] as body:
                size = got["ContentLength"]
                if most is not None:
                    checked_size(below(self._top, key), size, most)
                return await body.read(), size

        return self._limited(read, self._settings.answer_seconds)

    def _send(
        self,
        key: str,
        identity: str,
        pieces: Iterator[bytes],
        concurrency: int,
        in_flight: int,
    ) -> Parts:
        running: set[Future[dict[str, Any]]] = set()
        parts: list[dict[str, Any]] = []

        def send(number: int, data: bytes) -> dict[str, Any]:
            asked = {"UploadId": identity, "PartNumber": number, "Body": data}
            # One that failed is sent again while the others go on.
            sent = self._call_again("upload_part", key, in_flight=in_flight, **asked)
            return {"PartNumber": number, "ETag": sent["ETag"]}

        with ThreadPoolExecutor(concurrency, "upload") as threads:
            number = 0
            while (piece := next(pieces, None)) is not None:
                number += 1
                running.add(threads.submit(send, number, piece))
                # Let go of it before the next one is put together.
                del piece
                most = FIRST_COMPLETED if len(running) >= concurrency else None
                parts += _ended(running, most)
            parts += _ended(running, ALL_COMPLETED)
        return sorted(parts, key=itemgetter("PartNumber"))

    def _pages(self, folder: str, **asked: Any) -> Iterator[dict[str, Any]]:
        asked["Prefix"] = f"{folder}/" if folder else ""
        while True:
            page = self.call("list_objects_v2", folder, of_bucket=True, **asked)
            yield page
            if not page.get("IsTruncated"):
                return
            asked["ContinuationToken"] = page["NextContinuationToken"]

    def _answers(self, key: str) -> Any:
        return translated(below(self._top, key), self._settings.secrets)

    @property
    def _fs(self) -> Any:
        # Connections and the thread of the event loop stay behind in a fork.
        process = os.getpid()
        if process not in self._made:
            self._made = {process: self._new()}
        return self._made[process]

    def _new(self) -> Any:
        from s3fs import S3FileSystem  # noqa: PLC0415 — costs time

        settings = self._settings
        profile = None if settings.access_key else settings.profile
        if profile:
            new_session(settings, str(self._top))  # refuses one that there is not
        made = S3FileSystem(
            anon=settings.anonymous,
            key=settings.access_key,
            secret=settings.secret_key,
            token=settings.session_token,
            endpoint_url=settings.endpoint,
            use_ssl=not settings.is_plain,
            client_kwargs={"region_name": settings.region} if settings.region else {},
            config_kwargs=config_options(settings),
            # Its retries are switched off below, which another user of the same one may not want.
            skip_instance_cache=True,
            **({"profile": profile} if profile else {}),
        )
        made.retries = 1
        # Here, because it takes longer than a request may under load, and holds up the others.
        made.connect()
        return made


def _ended(running: set[Future[dict[str, Any]]], until: str | None) -> Parts:
    """The parts that were sent, after waiting for one or all; the error of one that was not."""
    done = wait(running, return_when=until).done if until else {it for it in running if it.done()}
    running -= done
    return [it.result() for it in done]
