"""Amazon S3 and what speaks like it, Google Cloud Storage and Azure by way of obstore."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit
from obstore.store import AzureStore, GCSStore, S3Store
from ckptkit.errors import UsageError
from ckptkit.storage.location import Location
from ckptkit.storage.objects.amazon import s3_credentials
from ckptkit.storage.objects.server import FIRST_PAUSE, LONGEST_PAUSE
from ckptkit.storage.options import Settings
if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, RetryConfig, S3Config

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import obstore
from obstore.exceptions import AlreadyExistsError as ObstoreAlreadyExists
from obstore.exceptions import BaseError, InvalidPathError

from ckptkit.errors import (
    CkptkitError,
    InvalidNameError,
    NotFoundError,
    StorageError,
    UsageError,
)
from ckptkit.storage.location import Location
from ckptkit.storage.objects import errors as answers
from ckptkit.storage.objects.errors import taken
from ckptkit.storage.objects.server import Stat, Transient, Upload, Uploads
from ckptkit.storage.options import Settings
from ckptkit.storage.objects.amazon import SignedBodies
from ckptkit.storage.objects.amazon import begun_uploads
from ckptkit.storage.store import checked_size
from ckptkit.storage.store import Entries, Entry, Names

_STATUS = re.compile(r"status code: ([0-9]{3})")
_DEBUG = "Debug source:"
# Names in these may look like signs.
_URLS = re.compile(r"""https?://\S+|path: "[^"]*\"""")
_GIVES_CREDENTIALS = re.compile(r"https?://(?:169\.254\.169\.254|metadata\.google\.internal)[:/]")
_LONGEST = 300
# The first one that tells an answer that stalls from one that is long.
_OLDEST = (0, 11)
_SMALL = 1 << 20
# Without an answer only the text tells what happened.
_SIGNS: tuple[tuple[str, Callable[[str], CkptkitError | Transient]], ...] = (
    ("Temporary failure in name resolution", answers.unresolved_host),
    ("dns error", answers.unknown_host),
    ("BadScheme", answers.unencrypted),
    ("InvalidContentType", answers.no_https),
    ("certificate", answers.untrusted),
    ("redirect without LOCATION", answers.wrong_region),
    ("non-partial response", answers.no_ranges),
    ("Connection refused", answers.refused_connection),
    ("TimedOut", lambda _: Transient("no answer in time")),
    ("Timeout", lambda _: Transient("no answer in time")),
)
_NO_PATH = "Could not parse path"
_BROKEN = ("HttpError", "reqwest::Error", "hyper", "body", "Io(", "HTTP error")


class _Threads:
    """Those of obstore, which run in the process that used it first."""

    process: int | None = None


class ObstoreClient:
    """One bucket; its connections are made when they are first needed."""

    exclusive = True
    repeats = False
    copies = False

    def __init__(self, top: Location, settings: Settings) -> None:
        _refuse_old(obstore.__version__)
        self._top = top
        self._settings = settings
        self._stores: dict[tuple[int, bool], AnyStore] = {}
        self._building = threading.Lock()
        self._signed_bodies = SignedBodies(top, settings)
        self._uploads = begun_uploads(top, settings)

    def get(self, key: str, start: int, length: int) -> bytes | memoryview:
        """A range in one request."""
        with self._answers(key):
            try:
                return memoryview(obstore.get_range(self._store(), key, start=start, length=length))
            except BaseError as error:
                if _answer(error).status != 416:
                    raise
                return b""

    def get_whole(self, key: str, most: int) -> bytes:
        """Size and body in one request."""
        with self._answers(key):
            result = obstore.get(self._store(), key)
            size = checked_size(self._where(key), result.meta["size"], most)
            data = bytes(result.bytes())
        if len(data) != size:
            raise Transient(f"{len(data)} of {size} bytes came")
        return data

    def head(self, key: str) -> Stat:
        """One request."""
        with self._answers(key):
            found = obstore.head(self._store(), key)
        return Stat(found["size"], found["e_tag"])

    def put(self, key: str, data: memoryview, *, create: bool) -> str | None:
        """One request, however large."""
        mode: Literal["create", "overwrite"] = "create" if create else "overwrite"
        with self._answers(key):
            # Copied, because obstore keeps what it is given, also beyond a time-out.
            store = self._store(in_flight=data.nbytes)
            put = obstore.put(store, key, bytes(data), mode=mode, use_multipart=False)
        return put["e_tag"]

    def upload(
        self, key: str, blocks: Iterator[memoryview], piece_size: int, concurrency: int
    ) -> str | None:
        """Stream a multipart upload, whose parts obstore cuts, and sends again, by itself."""
        with self._answers(key):
            put = obstore.put(
                self._store(in_flight=piece_size * concurrency, retries=True),
                key,
                blocks,
                chunk_size=piece_size,
                max_concurrency=concurrency,
            )
        return put["e_tag"]

    def list(self, folder: str) -> Entries:
        """As many requests as there are thousands of objects."""
        with self._answers(folder):
            found = obstore.list(self._store(), folder or None).collect()
        return [Entry(it["path"], it["size"], it["last_modified"].timestamp()) for it in found]

    def children(self, folder: str) -> Names:
        """The same with a delimiter."""
        with self._answers(folder):
            found = obstore.list_with_delimiter(self._store(), folder or None)
        paths = [*found["common_prefixes"], *(it["path"] for it in found["objects"])]
        start = len(folder) + 1 if folder else 0
        return [path[start:] for path in paths]

    def delete(self, keys: Sequence[str]) -> None:
        """One request for a thousand keys on S3."""
        try:
            with self._answers(keys[0]):
                obstore.delete(self._store(), list(keys))
        except NotFoundError:
            # Google and Azure give up at a missing one.
            for key in keys if len(keys) > 1 else ():
                self.delete([key])

    def compares_bodies(self, scratch: str) -> bool | None:
        """One request, and one more where nobody compares: then parts need no signature."""
        if self._top.scheme == "s3":
            return self._signed_bodies.are_compared(scratch)
        return None

    def uploads(self, folder: str) -> Uploads:
        """S3 alone can be asked, and through botocore alone."""
        return self._uploads.under(folder)

    def abort(self, uploads: Iterable[Upload]) -> None:
        """Abort them one by one."""
        for upload in uploads:
            self._uploads.abort(upload)

    def _store(self, *, in_flight: int = 0, retries: bool = False) -> AnyStore:
        self._refuse_if_forked()
        # Several, because a time-out is that of a store, and a retry of a single request is ours
        # and that of a part cannot be.
        in_flight = 1 << in_flight.bit_length() if in_flight > _SMALL else 0
        with self._building:
            if (in_flight, retries) not in self._stores:
                signs = not retries or self._signed_bodies.compared is not False
                self._stores[in_flight, retries] = built(
                    self._top,
                    self._settings,
                    in_flight=in_flight,
                    retries=retries,
                    signs_bodies=signs,
                )
            return self._stores[in_flight, retries]

    def _refuse_if_forked(self) -> None:
        """Without its threads, which no fork takes along, obstore waits without end."""
        if _Threads.process is None:
            _Threads.process = os.getpid()
        elif _Threads.process != os.getpid():
            raise StorageError(
                "obstore cannot be used in a process that was forked after it had been used",
                where=str(self._top),
                hint="start processes with spawn or forkserver, or pass the option engine=fsspec",
            )

    def _where(self, key: str) -> str:
        return answers.below(self._top, key)

    @contextmanager
    def _answers(self, key: str) -> Iterator[None]:
        # From None: their texts hold whole documents of the server, and dumps of its request.
        where = self._where(key)
        try:
            yield
        except ObstoreAlreadyExists as error:
            again = _answer(error).code == "ConditionalRequestConflict"
            raise (Transient("two creators at once") if again else taken(where)) from None
        except (InvalidPathError, ValueError) as error:
            if not isinstance(error, InvalidPathError) and _NO_PATH not in str(error):
                raise
            raise InvalidNameError("no key of this server", where=ascii(where)) from None
        except (BaseError, FileNotFoundError) as error:
            raise _translated(error, where, self._settings.secrets) from None


def _refuse_old(version: str) -> None:
    if tuple(map(int, re.findall(r"[0-9]+", version)[:2])) < _OLDEST:
        raise UsageError(
            "this obstore is too old",
            value=version,
            hint=f"pip install 'obstore>={_OLDEST[0]}.{_OLDEST[1]}', or pass engine=fsspec",
        )


def _answer(error: Exception) -> answers.Answer:
    text = str(error)
    status = _STATUS.search(text)
    return answers.xml_answer(int(status[1]) if status else 0, text.partition(_DEBUG)[0])


def _translated(error: Exception, where: str, secrets: Iterable[str]) -> CkptkitError | Transient:
    answer = _answer(error)
    if answer.status:
        return answers.said(answer, where, secrets)
    if isinstance(error, FileNotFoundError):
        return answers.absent(where)
    if _GIVES_CREDENTIALS.search(str(error)):
        return answers.no_credentials(where)
    text = _URLS.sub("", str(error))
    for sign, what in _SIGNS:
        if sign in text:
            return what(where)
    if any(sign in text for sign in _BROKEN):
        return Transient("the connection broke")
    return StorageError(
        f"the request failed ({text.partition(_DEBUG)[0][:_LONGEST]})",
        where=where,
        hint="check the endpoint and the storage options",
    )

AnyStore: TypeAlias = S3Store | GCSStore | AzureStore


def built(
    top: Location, settings: Settings, *, in_flight: int, retries: bool, signs_bodies: bool
) -> AnyStore:
    """The store of one bucket, for requests that send about so many bytes at a time, or none and
    are answered with many; with `retries` it repeats what fails, by itself and in silence.

    Bodies are signed at most over plain http: that costs a hash, and https protects them anyway.
    """
    extra = settings.extra_seconds(in_flight)
    client = _client_options(settings)
    if in_flight:
        # While one is sent nothing comes.
        client["timeout"] = timedelta(seconds=settings.stall_seconds + extra)
    else:
        client["read_timeout"] = timedelta(seconds=settings.stall_seconds)
        client["timeout"] = timedelta(seconds=settings.answer_seconds)
    retry = _retry_config(settings, extra, retries=retries)
    if top.scheme == "s3":
        signs = signs_bodies and settings.is_plain
        return _s3(top.path, settings, client, retry, signs_bodies=signs)
    make = _gs if top.scheme == "gs" else _az
    return make(top.path, settings, client, retry)


def _s3(
    bucket: str,
    settings: Settings,
    client: ClientConfig,
    retry: RetryConfig,
    *,
    signs_bodies: bool,
) -> S3Store:
    found = s3_credentials(settings, f"s3://{bucket}")
    virtual = settings.path_style is False or (
        settings.path_style is None and settings.endpoint is None and "." not in bucket
    )
    config: S3Config = {
        "region": settings.region or found.region or "us-east-1",
        "virtual_hosted_style_request": virtual,
        "unsigned_payload": not signs_bodies,
        "skip_signature": settings.anonymous,
    }
    if settings.endpoint:
        config["endpoint"] = _with_bucket(settings.endpoint, bucket if virtual else "")
    return S3Store(
        bucket,
        config=config,
        client_options=client,
        retry_config=retry,
        credential_provider=found.provider,
    )


def _gs(bucket: str, settings: Settings, client: ClientConfig, retry: RetryConfig) -> GCSStore:
    config: GCSConfig = {"skip_signature": settings.anonymous}
    if settings.endpoint:
        config["base_url"] = settings.endpoint
    return GCSStore(bucket, config=config, client_options=client, retry_config=retry)


def _az(container: str, settings: Settings, client: ClientConfig, retry: RetryConfig) -> AzureStore:
    """Here a key is the name of the account and its key, and a session token is a SAS."""
    config: AzureConfig = {"skip_signature": settings.anonymous}
    if settings.endpoint:
        config["endpoint"] = settings.endpoint
    if settings.access_key:
        config["account_name"] = settings.access_key
    if settings.secret_key:
        config["account_key"] = settings.secret_key
    if settings.session_token:
        config["sas_key"] = settings.session_token
    try:
        return AzureStore(container, config=config, client_options=client, retry_config=retry)
    except Exception as error:
        raise UsageError(
            "the Azure account is not named, or its key is no key",
            where=f"az://{container}",
            hint="set AZURE_STORAGE_ACCOUNT_NAME and its key, or access_key and secret_key",
        ) from error


def _client_options(settings: Settings) -> ClientConfig:
    return {
        "allow_http": settings.is_plain,
        "connect_timeout": timedelta(seconds=settings.connect_timeout),
    }


def _retry_config(settings: Settings, extra: float, *, retries: bool) -> RetryConfig:
    return {
        "max_retries": 1000 if retries else 0,
        "retry_timeout": timedelta(seconds=settings.deadline + extra),
        "backoff": {
            "init_backoff": timedelta(seconds=FIRST_PAUSE),
            "max_backoff": timedelta(seconds=LONGEST_PAUSE),
            "base": 2,
        },
    }


def _with_bucket(endpoint: str, bucket: str) -> str:
    if not bucket:
        return endpoint
    parts = urlsplit(endpoint)
    return parts._replace(netloc=f"{bucket}.{parts.netloc}").geturl()
