"""Every file system that fsspec knows: S3, Google and Azure without obstore, and all others."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fsspec.core import url_to_fs

from ckptkit.errors import CkptkitError, InvalidNameError, NotFoundError
from ckptkit.storage.base.address import BUCKETS, Location, Settings
from ckptkit.storage.base.store import Entries, Names, Stored, checked_size
from ckptkit.storage.objects.amazon import BotocoreBucket, config_options, new_session
from ckptkit.storage.objects.errors import (
    Answer,
    Transient,
    answer_of,
    below,
    error_of,
    translated,
    trouble,
)
from ckptkit.storage.objects.server import Known, Stat, retried
from ckptkit.storage.objects.upload import pieces_of

# Google takes chunks of whole multiples of this.
_CHUNK = 256 << 10
_BEGINNING = 8 << 20
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


class FsspecClient:
    """One bucket or folder; what is written becomes visible whole if the file system can do that.

    Of file systems with folders, those that were emptied stay.
    """

    # Some of these repeat by themselves, and do not tell.
    repeats = True
    # A file has a buffer of its own.
    copies = True

    def __init__(self, top: Location, settings: Settings) -> None:
        self._top = top
        self._settings = settings
        self._is_cloud = top.scheme in BUCKETS
        # Elsewhere the mode does not reach the server, or is not one step.
        self.exclusive = top.scheme in ("s3", "gs")
        self.botocore = BotocoreBucket(top, settings) if top.scheme == "s3" else None
        self.known = Known()
        self._made: dict[int, tuple[Any, str]] = {}

    def get(self, key: str, start: int, length: int) -> bytes:
        limit = self._limit(self._settings.answer_seconds)
        with self._answers(key):
            try:
                data: bytes = self._fs.cat_file(
                    self._path(key), start=start, end=start + length, **limit
                )
            except Exception as error:
                answer = answer_of(error)
                # Beyond the end, or an empty object.
                if answer is None or answer.status != 416:
                    raise
                return b""
        return data

    def get_whole(self, key: str, most: int) -> bytes:
        """The beginning, with which most end, and the rest where it is not too large."""
        begun = min(most + 1, _BEGINNING)
        data = self.get(key, 0, begun)
        if len(data) < begun:
            return data
        size = checked_size(below(self._top, key), self.head(key).size, most)
        if size > begun:  # of an empty range some servers send all
            data += self.get(key, begun, size - begun)
        if len(data) != size:
            raise Transient(f"{len(data)} of {size} bytes came")
        return data

    def head(self, key: str) -> Stat:
        with self._answers(key):
            found = self._fs.info(self._path(key))
        # To a file system a folder is something that is there; to a store it is no object.
        if found["type"] == "directory":
            raise trouble("absent", below(self._top, key))
        etag = found.get("ETag") or found.get("etag")
        return Stat(found["size"], etag if isinstance(etag, str) else None)

    def put(self, key: str, data: memoryview, *, exclusive: bool) -> str | None:
        """Whole, where the file system does that."""
        mode = {"mode": "create"} if exclusive else {}
        limit = self._limit(self._settings.stall_seconds, data.nbytes)
        with self._answers(key):
            self._make_folder(key)
            put = self._fs.pipe_file(self._path(key), bytes(data), **mode, **limit)
        return put.get("ETag") if isinstance(put, Mapping) else None

    def upload(
        self,
        key: str,
        blocks: Iterator[memoryview],
        piece_size: int,
        concurrency: int,  # noqa: ARG002 — a file is written from its beginning to its end
    ) -> str | None:
        """A file that is written piece by piece."""
        with self._answers(key):
            self._make_folder(key)
            # Outside of clouds a file would show while it is written: it is held back until
            # `commit`, where the file system can do that.
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
                # Errors are not ours to raise: the one that led here is.
                with suppress(Exception):
                    file.discard()
                # A file that is closed later, by the garbage collector, would be completed.
                with suppress(Exception):
                    file.closed = True
                raise
        return None

    def list(self, folder: str, *, deep: bool) -> Entries:
        if deep:
            found = self._listed(folder, "find", detail=True)
        else:
            below = self._listed(folder, "ls", detail=True)
            found = {info["name"]: info for info in below if info["type"] != "directory"}
        start = f"{self._path(folder)}/"
        return [
            Stored(name[len(self._root) + 1 :], int(info["size"] or 0), _modified(info))
            for name, info in found.items()
            if name.startswith(start)
        ]

    def children(self, folder: str) -> Names:
        names = self._listed(folder, "ls", detail=False)
        start = f"{self._path(folder)}/"
        return [name[len(self._root) + 1 :] for name in names if name.startswith(start)]

    def _listed(self, folder: str, method: str, **how: bool) -> Any:
        with self._answers(folder):
            # Other processes write there too, and a listing decides which steps there are.
            self._fs.invalidate_cache()
            try:
                return getattr(self._fs, method)(self._path(folder), **how)
            except (FileNotFoundError, NotADirectoryError) as error:
                # An empty folder is no error, a bucket that is not there is one.
                answer = answer_of(error)
                if answer is not None and answer.code == "NoSuchBucket":
                    raise
                return {}

    def delete(self, keys: Sequence[str]) -> None:
        """One by one, many at a time."""

        def delete(key: str) -> None:
            with suppress(NotFoundError, IsADirectoryError), self._answers(key):
                self._fs.rm_file(self._path(key))

        with ThreadPoolExecutor(min(len(keys), self._settings.concurrency)) as threads:
            list(threads.map(delete, keys))

    def _limit(self, seconds: float, nbytes: int = 0) -> dict[str, float]:  # noqa: ARG002
        """How a call is told the seconds that it may take while so many bytes are sent."""
        return {}

    def _make_folder(self, key: str) -> None:
        # In a cloud this would make a bucket.
        if not self._is_cloud:
            self._fs.makedirs(self._path(key).rpartition("/")[0], exist_ok=True)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _answers(self, key: str) -> Any:
        return translated(below(self._top, key), self._settings.secrets)

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
        options = self._options()
        found, root = url_to_fs(str(self._top), use_listings_cache=False, **options)
        return found, root.rstrip("/")

    def _options(self) -> dict[str, Any]:
        settings = self._settings
        if self._top.scheme == "gs":
            return {
                # The project is asked for only to make buckets.
                "project": "",
                "token": "anon" if settings.anonymous else None,
                "endpoint_url": settings.endpoint,
                # In all: what aiohttp itself finds stalled gcsfs asks for six times, in silence.
                "requests_timeout": settings.answer_seconds,
            }
        if self._top.scheme == "az":
            return {
                "account_name": settings.access_key,
                "account_key": settings.secret_key,
                "sas_token": settings.session_token,
                "anon": settings.anonymous,
            }
        return dict(settings.others)


class S3fsClient(FsspecClient):
    """S3 by way of s3fs, asked by the names of S3's own requests where those of a file system ask
    more than once, hide what the server said, or send one piece at a time.
    """

    # Of `repeats`: aiohttp sends a PUT again by itself when a connection that it kept open ends
    # without answer.

    def head(self, key: str) -> Stat:
        found = self._call("head_object", key)
        return Stat(found["ContentLength"], found.get("ETag"))

    def put(self, key: str, data: memoryview, *, exclusive: bool) -> str | None:
        """One request, however large: s3fs would make parts of it, which not every server that
        honours the condition honours it for.
        """
        condition = {"IfNoneMatch": "*"} if exclusive else {}
        put = self._call("put_object", key, in_flight=data.nbytes, Body=bytes(data), **condition)
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
        in_flight = piece_size * concurrency
        identity = self._call_again("create_multipart_upload", key)["UploadId"]

        def send(number: int, data: bytes) -> dict[str, Any]:
            asked = {"UploadId": identity, "PartNumber": number, "Body": data}
            # One that failed is sent again while the others go on.
            sent = self._call_again("upload_part", key, in_flight=in_flight, **asked)
            return {"PartNumber": number, "ETag": sent["ETag"]}

        try:
            running: set[Future[dict[str, Any]]] = set()
            parts: list[dict[str, Any]] = []
            pieces = pieces_of(blocks, piece_size)
            with ThreadPoolExecutor(concurrency, "upload") as threads:
                number = 0
                while (piece := next(pieces, None)) is not None:
                    number += 1
                    running.add(threads.submit(send, number, piece))
                    # Let go of it before the next one is put together.
                    del piece
                    if len(running) >= concurrency:
                        wait(running, return_when=FIRST_COMPLETED)
                    # The error of a part ends the upload as soon as it is known.
                    done = {it for it in running if it.done()}
                    running -= done
                    parts += [it.result() for it in done]
                wait(running, return_when=ALL_COMPLETED)
                parts += [it.result() for it in running]
            parts.sort(key=lambda part: part["PartNumber"])
            put = self._call_again(
                "complete_multipart_upload",
                key,
                UploadId=identity,
                MultipartUpload={"Parts": parts},
            )
        except BaseException:
            with suppress(CkptkitError, Transient):
                self._call("abort_multipart_upload", key, UploadId=identity)
            raise
        etag: str | None = put.get("ETag")
        return etag

    def list(self, folder: str, *, deep: bool) -> Entries:
        pages = self._pages(folder, **({} if deep else {"Delimiter": "/"}))
        found = [it for page in pages for it in page.get("Contents", ())]
        return [Stored(it["Key"], it["Size"], it["LastModified"].timestamp()) for it in found]

    def children(self, folder: str) -> Names:
        names: list[str] = []
        for page in self._pages(folder, Delimiter="/"):
            names += [it["Prefix"] for it in page.get("CommonPrefixes", ())]
            names += [it["Key"] for it in page.get("Contents", ())]
        return names

    def _pages(self, folder: str, **asked: Any) -> Iterator[dict[str, Any]]:
        """As many requests as there are thousands of names; each has to end in time."""
        asked["Prefix"] = f"{folder}/" if folder else ""
        while True:
            page = self._call("list_objects_v2", "", **asked)
            yield page
            if not page.get("IsTruncated"):
                return
            if "NextContinuationToken" not in page:
                raise trouble("endless", below(self._top, folder))
            asked["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, keys: Sequence[str]) -> None:
        """One request for a thousand keys."""
        asked = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        done = self._call("delete_objects", "", Delete=asked)
        for error in done.get("Errors", ()):
            if error.get("Code") != "NoSuchKey":
                answer = Answer(code=error.get("Code", ""), message=error.get("Message", ""))
                raise error_of(
                    answer, below(self._top, error.get("Key", "")), self._settings.secrets
                )

    def _call(self, method: str, key: str, *, in_flight: int = 0, **asked: Any) -> Any:
        """One request of S3, about a key or the bucket, while about so many bytes are sent."""
        named = {"Key": key} if key else {}
        limit = self._limit(self._settings.stall_seconds, in_flight)
        with self._answers(key):
            self._path(key)  # refuses what could be written here, and never be read
            return self._fs.call_s3(method, Bucket=self._root, **named, **asked, **limit)

    def _call_again(self, method: str, key: str, *, in_flight: int = 0, **asked: Any) -> Any:
        deadline = self._settings.deadline + self._settings.extra_seconds(in_flight)
        call = partial(self._call, method, key, in_flight=in_flight, **asked)
        return retried(deadline, method, below(self._top, key), call)

    def _limit(self, seconds: float, nbytes: int = 0) -> dict[str, float]:
        # Waited for in the loop: aiohttp waits without end for a server to welcome a body.
        return {"timeout": seconds + self._settings.extra_seconds(nbytes)}

    def _path(self, key: str) -> str:
        # s3fs would take the rest of the name for a version, and another object for this one.
        if "?versionId=" in key:
            where = below(self._top, key)
            raise InvalidNameError("no key of s3fs", where=where, hint="name no version")
        return super()._path(key)

    def _new(self) -> tuple[Any, str]:
        found, root = super()._new()
        found.retries = 1
        # Here, because it takes longer than a request may under load, and holds up the others.
        found.connect()
        return found, root

    def _options(self) -> dict[str, Any]:
        settings = self._settings
        profile = None if settings.access_key else settings.profile
        if profile:
            new_session(settings, str(self._top))  # refuses one that there is not
        return {
            "anon": settings.anonymous,
            "key": settings.access_key,
            "secret": settings.secret_key,
            "token": settings.session_token,
            "endpoint_url": settings.endpoint,
            "use_ssl": not settings.is_plain,
            "client_kwargs": {"region_name": settings.region} if settings.region else {},
            "config_kwargs": config_options(settings),
            # Its retries are switched off, which another user of the same one may not want.
            "skip_instance_cache": True,
            **({"profile": profile} if profile else {}),
        }


def _modified(info: Mapping[str, Any]) -> float:
    found = next((info[name] for name in _TIMES if info.get(name)), None)
    if isinstance(found, str):
        with suppress(ValueError):
            found = datetime.fromisoformat(found)
    if isinstance(found, datetime):
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    # What has no time must never seem old enough to be cleaned up.
    return float(found) if isinstance(found, int | float) else time.time()
