"""Amazon S3 and what speaks like it, Google Cloud Storage and Azure by way of obstore."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError as ObstoreAlreadyExists
from obstore.exceptions import BaseError, InvalidPathError
from obstore.store import AzureStore, GCSStore, S3Store

from ckptkit.errors import CkptkitError, InvalidNameError, NotFoundError, StorageError, UsageError
from ckptkit.storage.base.address import Location, Settings
from ckptkit.storage.base.store import Entries, Names, Stored, checked_size
from ckptkit.storage.objects.amazon import BotocoreBucket, s3_credentials
from ckptkit.storage.objects.errors import Answer, Transient, below, error_of, trouble
from ckptkit.storage.objects.server import FIRST_PAUSE, LONGEST_PAUSE, Known, Stat

if TYPE_CHECKING:
    from obstore.store import (
        AzureConfig,
        ClientConfig,
        GCSConfig,
        RetryConfig,
        S3Config,
        S3Credential,
    )

AnyStore: TypeAlias = S3Store | GCSStore | AzureStore

_DEBUG = "Debug source:"
_OBSTORE_STATUS = re.compile(r"status code: ([0-9]{3})")
# Names in these may look like signs.
_URLS = re.compile(r"""https?://\S+|path: "[^"]*\"""")
_GIVES_CREDENTIALS = re.compile(r"https?://(?:169\.254\.169\.254|metadata\.google\.internal)[:/]")
_GAVE_NONE = re.compile(r"External AWS credential provider: (\w+): (.*)")
# Without an answer only the text of obstore tells what happened.
_SIGNS = (
    ("Temporary failure in name resolution", "busy resolver"),
    ("dns error", "unknown host"),
    ("BadScheme", "unencrypted"),
    ("InvalidContentType", "no https"),
    ("certificate", "untrusted"),
    # To another region, it does not say which.
    ("redirect without LOCATION", "PermanentRedirect"),
    ("non-partial response", "no ranges"),
    ("Connection refused", "refused"),
    ("TimedOut", "slow"),
    ("Timeout", "slow"),
    *((it, "broken") for it in ("HttpError", "reqwest::Error", "hyper", "body", "Io(")),
    ("HTTP error", "broken"),
)
_LONGEST = 300

# The first one that tells an answer that stalls from one that is long.
_OLDEST = (0, 11)
_SMALL = 1 << 20


class ObstoreClient:
    """One bucket; its connections are made when they are first needed."""

    exclusive = True
    repeats = False
    copies = False
    _threads_of: ClassVar[int | None] = None
    """The process that used obstore first: its threads run there."""

    def __init__(self, top: Location, settings: Settings) -> None:
        version = obstore.__version__
        if tuple(map(int, re.findall(r"[0-9]+", version)[:2])) < _OLDEST:
            raise UsageError(
                "this obstore is too old",
                value=version,
                hint=f"pip install 'obstore>={_OLDEST[0]}.{_OLDEST[1]}', or pass engine=fsspec",
            )
        self._top = top
        self._settings = settings
        self._stores: dict[tuple[int, bool, bool | None], AnyStore] = {}
        self._building = threading.Lock()
        self.known = Known()
        self.botocore = (
            BotocoreBucket(top, settings, sends_crc=True) if top.scheme == "s3" else None
        )

    def get(self, key: str, start: int, length: int) -> bytes | memoryview:
        with self._answers(key):
            try:
                return memoryview(obstore.get_range(self._store(), key, start=start, length=length))
            except BaseError as error:
                if obstore_answer(error).status != 416:
                    raise
                return b""

    def get_whole(self, key: str, most: int) -> bytes:
        with self._answers(key):
            result = obstore.get(self._store(), key)
            size = checked_size(below(self._top, key), result.meta["size"], most)
            data = bytes(result.bytes())
        if len(data) != size:
            raise Transient(f"{len(data)} of {size} bytes came")
        return data

    def head(self, key: str) -> Stat:
        with self._answers(key):
            found = obstore.head(self._store(), key)
        return Stat(found["size"], found["e_tag"])

    def put(self, key: str, data: memoryview, *, exclusive: bool) -> str | None:
        mode: Literal["create", "overwrite"] = "create" if exclusive else "overwrite"
        with self._answers(key):
            # Copied, because obstore keeps what it is given, also beyond a time-out.
            store = self._store(in_flight=data.nbytes)
            put = obstore.put(store, key, bytes(data), mode=mode, use_multipart=False)
        return put["e_tag"]

    def upload(
        self,
        key: str,
        blocks: Iterator[memoryview],
        piece_size: int,
        concurrency: int,
    ) -> str | None:
        """Stream a multipart upload, whose parts obstore cuts, and sends again, by itself."""
        with self._answers(key):
            store = self._store(in_flight=piece_size * concurrency, retries=True)
            put = obstore.put(
                store, key, blocks, chunk_size=piece_size, max_concurrency=concurrency
            )
        return put["e_tag"]

    def list(self, folder: str, *, deep: bool) -> Entries:
        with self._answers(folder):
            if deep:
                found = obstore.list(self._store(), folder or None).collect()
            else:
                found = obstore.list_with_delimiter(self._store(), folder or None)["objects"]
        return [Stored(it["path"], it["size"], it["last_modified"].timestamp()) for it in found]

    def children(self, folder: str) -> Names:
        with self._answers(folder):
            found = obstore.list_with_delimiter(self._store(), folder or None)
        return [*found["common_prefixes"], *(it["path"] for it in found["objects"])]

    def delete(self, keys: Sequence[str]) -> None:
        """One request for a thousand keys on S3."""
        try:
            with self._answers(keys[0]):
                obstore.delete(self._store(), list(keys))
        except NotFoundError:
            # Google and Azure give up at a missing one.
            for key in keys if len(keys) > 1 else ():
                self.delete([key])

    def _store(self, *, in_flight: int = 0, retries: bool = False) -> AnyStore:
        """The store for requests that send about so many bytes at a time, or none.

        There are several, because obstore has time-outs and retries by store. A single request is
        repeated by `ObjectServer`, which has to look at each answer; a piece of an upload only
        obstore itself can repeat.
        """
        if ObstoreClient._threads_of is None:
            ObstoreClient._threads_of = os.getpid()
        elif ObstoreClient._threads_of != os.getpid():
            # Without its threads, which no fork takes along, obstore waits without end.
            raise StorageError(
                "obstore cannot be used in a process that was forked after it had been used",
                where=str(self._top),
                hint="start processes with spawn or forkserver, or pass the option engine=fsspec",
            )
        # Rounded up, so that bodies of all lengths share a few stores; the small ones are sent in
        # the time of an answer.
        in_flight = 1 << in_flight.bit_length() if in_flight > _SMALL else 0
        # What has been found out may change how bodies are signed.
        compares = self.known.compares_bodies
        kind = in_flight, retries, compares
        with self._building:
            if kind not in self._stores:
                self._stores[kind] = _built(
                    self._top,
                    self._settings,
                    in_flight=in_flight,
                    retries=retries,
                    compares=compares,
                )
            return self._stores[kind]

    @contextmanager
    def _answers(self, key: str) -> Iterator[None]:
        # From None: their texts hold whole documents of the server, and dumps of its request.
        where = below(self._top, key)
        try:
            yield
        except ObstoreAlreadyExists as error:
            if obstore_answer(error).code == "ConditionalRequestConflict":
                raise Transient("two creators at once") from None
            raise trouble("taken", where) from None
        except (InvalidPathError, ValueError) as error:
            if not isinstance(error, InvalidPathError) and "Could not parse path" not in str(error):
                raise
            raise InvalidNameError("no key of this server", where=ascii(where)) from None
        except (BaseError, FileNotFoundError) as error:
            raise obstore_translation(error, where, self._settings.secrets) from None


def obstore_answer(error: Exception) -> Answer:
    """What the server said, as far as the text of an error of obstore tells."""
    text = str(error)
    body = text.partition(_DEBUG)[0]
    status = _OBSTORE_STATUS.search(text)
    code = re.search(r"<Code>([^<]*)</Code>", body)
    message = re.search(r"<Message>([^<]*)</Message>", body)
    return Answer(
        int(status[1]) if status else 0, code[1] if code else "", message[1] if message else ""
    )


def obstore_translation(
    error: Exception, where: str, secrets: Iterable[str]
) -> CkptkitError | Transient:
    """What to raise instead of an error of obstore."""
    answer = obstore_answer(error)
    if answer.status:
        return error_of(answer, where, secrets)
    if isinstance(error, FileNotFoundError):
        return trouble("absent", where)
    if _GIVES_CREDENTIALS.search(str(error)):
        return trouble("no credentials", where)
    text = _URLS.sub("", str(error))
    for sign, kind in _SIGNS:
        if sign in text:
            return trouble(kind, where)
    if told := _GAVE_NONE.search(text):
        return error_of(Answer(code=told[1], message=told[2]), where, secrets)
    return StorageError(
        f"the request failed ({text.partition(_DEBUG)[0][:_LONGEST]})",
        where=where,
        hint="check the endpoint and the storage options",
    )


def _built(
    top: Location, settings: Settings, *, in_flight: int, retries: bool, compares: bool | None
) -> AnyStore:
    """The store of one bucket, for requests that send about `in_flight` bytes at a time (0 for
    those that read); with `retries` it repeats what fails, by itself and in silence.
    """
    extra = settings.extra_seconds(in_flight)
    client: ClientConfig = {
        "allow_http": settings.is_plain,
        "connect_timeout": timedelta(seconds=settings.connect_timeout),
    }
    if in_flight:
        # While one is sent nothing comes.
        client["timeout"] = timedelta(seconds=settings.stall_seconds + extra)
    else:
        client["read_timeout"] = timedelta(seconds=settings.stall_seconds)
        client["timeout"] = timedelta(seconds=settings.answer_seconds)
    retry: RetryConfig = {
        # As many as there is time for: the deadline ends them.
        "max_retries": 1000 if retries else 0,
        "retry_timeout": timedelta(seconds=settings.deadline + extra),
        "backoff": {
            "init_backoff": timedelta(seconds=FIRST_PAUSE),
            "max_backoff": timedelta(seconds=LONGEST_PAUSE),
            "base": 2,
        },
    }
    if top.scheme == "s3":
        config, credentials = _of_amazon(top, settings, compares=compares)
        return S3Store(
            top.path,
            config=config,
            client_options=client,
            retry_config=retry,
            credential_provider=credentials,
        )
    if top.scheme == "gs":
        google: GCSConfig = {"skip_signature": settings.anonymous}
        if settings.endpoint:
            google["base_url"] = settings.endpoint
        return GCSStore(top.path, config=google, client_options=client, retry_config=retry)
    # Here a key is the name of the account and its key, and a session token is a SAS.
    azure: AzureConfig = {"skip_signature": settings.anonymous}
    if settings.endpoint:
        azure["endpoint"] = settings.endpoint
    if settings.access_key:
        azure["account_name"] = settings.access_key
    if settings.secret_key:
        azure["account_key"] = settings.secret_key
    if settings.session_token:
        azure["sas_key"] = settings.session_token
    try:
        return AzureStore(top.path, config=azure, client_options=client, retry_config=retry)
    except Exception as error:
        raise UsageError(
            "the Azure account is not named, or its key is no key",
            where=str(top),
            hint="set AZURE_STORAGE_ACCOUNT_NAME and its key, or access_key and secret_key",
        ) from error


def _of_amazon(
    top: Location, settings: Settings, *, compares: bool | None
) -> tuple[S3Config, Callable[[], S3Credential] | None]:
    """How S3 is addressed and its requests are signed, and what gives the credentials."""
    credentials, region = s3_credentials(settings, str(top))
    # A bucket with a dot in its name is no single label of a host: the certificate would not fit.
    virtual = settings.path_style is False or (
        settings.path_style is None and settings.endpoint is None and "." not in top.path
    )
    config: S3Config = {
        "region": settings.region or region or "us-east-1",
        "virtual_hosted_style_request": virtual,
        # Signed at most over plain http, where the server may compare it: that costs a hash.
        "unsigned_payload": compares is False or not settings.is_plain,
        "skip_signature": settings.anonymous,
    }
    if compares and not settings.is_plain:
        # https protects a body up to where it ends, which may be before the server.
        config["checksum_algorithm"] = "crc64nvme"
    if settings.endpoint:
        parts = urlsplit(settings.endpoint)
        host = f"{top.path}.{parts.netloc}" if virtual else parts.netloc
        config["endpoint"] = parts._replace(netloc=host).geturl()
    return config, credentials
