"""Amazon S3 and what speaks like it by way of s3fs: its session and its event loop."""

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
from ckptkit.storage.objects.answers import Answer, below, said
from ckptkit.storage.objects.client import Stat, Transient, Upload, Uploads
from ckptkit.storage.objects.failures import answer_of, translated
from ckptkit.storage.objects.retrying import Retrying
from ckptkit.storage.objects.s3_options import config_options, new_session
from ckptkit.storage.objects.settings import Settings
from ckptkit.storage.objects.signed_bodies import SignedBodies
from ckptkit.storage.objects.uploads import S3Uploads
from ckptkit.storage.objects.window import pieces_of
from ckptkit.storage.ranges import checked_size
from ckptkit.storage.store import Entries, Entry, Names

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
