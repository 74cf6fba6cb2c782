"""What botocore and s3fs need to know to reach a server as the settings say."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Protocol
from ckptkit.errors import NotFoundError
from ckptkit.storage.location import Location
from ckptkit.storage.objects.errors import below
from ckptkit.storage.objects.server import Upload, Uploads
from ckptkit.storage.objects.errors import translated
from ckptkit.storage.options import Settings

import logging
import threading
from contextlib import suppress
from importlib.util import find_spec
from typing import Any
from ckptkit.errors import CkptkitError
from ckptkit.storage.location import Location
from ckptkit.storage.objects.server import Transient
from ckptkit.storage.objects.errors import answer_of, translated
from ckptkit.storage.options import Settings

import os
from importlib.util import find_spec
from pathlib import Path
from ckptkit.storage.options import Settings, checked_endpoint

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from ckptkit.errors import UsageError
from ckptkit.storage.objects.errors import no_credentials
from ckptkit.storage.options import Settings
if TYPE_CHECKING:
    from obstore.store import S3Credential

from typing import Any

from ckptkit.errors import UsageError
from ckptkit.storage.options import Settings


def new_session(settings: Settings, where: str) -> Any:
    """A session of botocore, which reads `~/.aws`."""
    import botocore.session  # noqa: PLC0415 — costs time, and may not be there
    from botocore.exceptions import ProfileNotFound  # noqa: PLC0415

    session = botocore.session.Session(profile=None if settings.access_key else settings.profile)
    try:
        session.get_scoped_config()
    except ProfileNotFound:
        raise UsageError(
            "there is no such profile",
            where=where,
            value=settings.profile,
            hint="`aws configure list-profiles` lists them; see AWS_PROFILE and ~/.aws",
        ) from None
    return session


def client_options(settings: Settings) -> dict[str, Any]:
    """The arguments of botocore's `create_client`."""
    from botocore import UNSIGNED  # noqa: PLC0415
    from botocore.config import Config  # noqa: PLC0415

    signed = {"signature_version": UNSIGNED} if settings.anonymous else {}
    return {
        "aws_access_key_id": settings.access_key,
        "aws_secret_access_key": settings.secret_key,
        "aws_session_token": settings.session_token,
        "endpoint_url": settings.endpoint,
        "region_name": settings.region,
        "use_ssl": not settings.is_plain,
        "config": Config(**config_options(settings), **signed),
    }


def config_options(settings: Settings) -> dict[str, Any]:
    """The arguments of botocore's `Config`: one attempt, for it is repeated elsewhere."""
    from botocore.config import Config  # noqa: PLC0415

    style = "path" if settings.endpoint else "auto"
    if settings.path_style is not None:
        style = "path" if settings.path_style else "virtual"
    found: dict[str, Any] = {
        "retries": {"total_max_attempts": 1},
        "connect_timeout": settings.connect_timeout,
        "read_timeout": settings.stall_seconds,
        "max_pool_connections": max(10, settings.concurrency),
        "s3": {"addressing_style": style},
    }
    # Servers other than Amazon's do not understand these checksums; ETags and CRCs are checked.
    for name in ("request_checksum_calculation", "response_checksum_validation"):
        if name in Config.OPTION_DEFAULTS:
            found[name] = "when_required"
    return found

# The environment says where to get them: object_store does so itself, and renews them.
_NATIVE = (
    *("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
)
_LOOK_AGAIN = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Found:
    """What gives credentials (None: the engine finds them), and the region of the profile."""

    provider: Callable[[], S3Credential] | None = None
    region: str | None = None


def s3_credentials(settings: Settings, where: str) -> Found:
    """AccessError where there are none: object_store would look for a server that gives them,
    for seconds, and again for each request.
    """
    if settings.anonymous:
        return Found()
    if settings.access_key and settings.secret_key:
        return Found(_Static(settings.access_key, settings.secret_key, settings.session_token))
    if settings.profile is None and any(os.environ.get(name) for name in _NATIVE):
        return Found()
    if find_spec("botocore") is None:
        if settings.profile is None and not os.environ.get("AWS_PROFILE"):
            return Found()
        raise UsageError("a profile needs the package botocore", hint="pip install 'ckptkit[s3]'")
    session = new_session(settings, where)
    credentials = session.get_credentials()
    if credentials is None:
        raise no_credentials(where)
    region: str | None = session.get_config_variable("region")
    return Found(_Provider(credentials), region)


@dataclass(frozen=True, slots=True, repr=False)
class _Static:
    """Gives obstore what was passed and nothing else: by itself it would take a session token of
    the environment for one of these keys.
    """

    access_key: str
    secret_key: str
    token: str | None

    def __call__(self) -> S3Credential:
        return {
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
            "token": self.token,
            "expires_at": None,
        }


class _Provider:
    """Gives obstore the credentials of botocore, which renews them before they expire."""

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials

    def __call__(self) -> S3Credential:
        now = self._credentials.get_frozen_credentials()
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.now(UTC) + _LOOK_AGAIN,
        }

_FILES = {
    "AWS_CONFIG_FILE": "~/.aws/config",
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
}


def aws_files() -> list[Path]:
    """The files with profiles, and with their credentials."""
    return [
        Path(os.path.expanduser(os.environ.get(variable) or file))  # noqa: PTH111 — `~` may have no home
        for variable, file in _FILES.items()
    ]


def profile_endpoint(settings: Settings, where: str) -> str | None:
    """The endpoint of the profile: botocore would go there, and obstore does not look."""
    if find_spec("botocore") is None or not any(map(_may_name_one, aws_files())):
        return None
    session = new_session(settings, where)
    if session.get_config_variable("ignore_configured_endpoint_urls"):
        return None
    profile = session.get_scoped_config()
    services = session.full_config.get("services", {}).get(profile.get("services"), {})
    of_s3 = services.get("s3")
    found = of_s3.get("endpoint_url") if isinstance(of_s3, dict) else None
    endpoint = found or profile.get("endpoint_url")
    return checked_endpoint(endpoint) if endpoint else None


def _may_name_one(file: Path) -> bool:
    """Without botocore, which takes a while."""
    try:
        return b"endpoint_url" in file.read_bytes()
    except OSError:
        return False

_SIGNED, _SENT = b"signed", b"sent  "
_MISMATCH = {"XAmzContentSHA256Mismatch", "BadDigest", "InvalidDigest"}

_log = logging.getLogger("ckptkit.storage")


class SignedBodies:
    """What is known of the server of one bucket."""

    def __init__(self, top: Location, settings: Settings) -> None:
        self._top = top
        self._settings = settings
        self._asking = threading.Lock()
        self.compared: bool | None = None
        """Whether the server compares them; None where nobody has found out."""

    def are_compared(self, scratch: str) -> bool | None:
        """The same, found out by way of a scratch key if need be."""
        with self._asking:
            if self.compared is None:
                self.compared = _compares(self._top, self._settings, scratch)
            return self.compared


def _compares(top: Location, settings: Settings, scratch: str) -> bool | None:
    """Send another body than was signed."""
    if settings.anonymous or find_spec("botocore") is None:
        return None
    where = f"{top}/{scratch}"
    try:
        with translated(where, settings.secrets):
            return _refuses(_new_client(settings, where), top.path, scratch)
    except (CkptkitError, Transient) as error:
        _log.debug("%s: whether bodies are compared cannot be found out: %s", top, error)
        return None


def _new_client(settings: Settings, where: str) -> Any:
    client = new_session(settings, where).create_client("s3", **client_options(settings))
    client.meta.events.register("before-send.s3.PutObject", _exchange_body)
    return client


def _exchange_body(request: Any, **_: object) -> None:
    request.body = _SENT


def _refuses(client: Any, bucket: str, key: str) -> bool:
    try:
        client.put_object(Bucket=bucket, Key=key, Body=_SIGNED)
    except Exception as error:
        answer = answer_of(error)
        if answer is None or answer.code not in _MISMATCH:
            raise
        return True
    with suppress(Exception):
        client.delete_object(Bucket=bucket, Key=key)
    return False

_log = logging.getLogger("ckptkit.storage")


class S3Calls(Protocol):
    """Whatever asks a server that speaks S3."""

    def call(self, method: str, key: str, **asked: Any) -> Any:
        """One request about a key of one bucket; errors are translated."""


class S3Uploads:
    """The uploads of one bucket."""

    def __init__(self, calls: S3Calls) -> None:
        self._calls = calls

    def under(self, folder: str) -> Uploads:
        """Those below `folder/`, with the bytes that were uploaded already."""
        found = []
        for it in self._pages(folder):
            key, identity = it["Key"], it["UploadId"]
            parts = self._parts(key, identity)
            # One that goes on for hours is not left over while parts of it still arrive.
            times = [it["Initiated"], *(part["LastModified"] for part in parts)]
            size = sum(part["Size"] for part in parts)
            found.append(Upload(key, identity, max(times).timestamp(), size))
        return found

    def abort(self, upload: Upload) -> None:
        """Abort one; missing is fine."""
        with suppress(NotFoundError):
            self._calls.call("abort_multipart_upload", upload.key, UploadId=upload.identity)

    def _pages(self, folder: str) -> Iterator[dict[str, Any]]:
        asked = {"Prefix": f"{folder}/" if folder else ""}
        while True:
            page = self._calls.call("list_multipart_uploads", folder, of_bucket=True, **asked)
            yield from page.get("Uploads", ())
            if not page.get("IsTruncated"):
                return
            asked["KeyMarker"] = page["NextKeyMarker"]
            asked["UploadIdMarker"] = page["NextUploadIdMarker"]

    def _parts(self, key: str, identity: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        asked: dict[str, Any] = {"UploadId": identity}
        with suppress(NotFoundError):
            while True:
                page = self._calls.call("list_parts", key, **asked)
                found += page.get("Parts", ())
                if not page.get("IsTruncated"):
                    break
                asked["PartNumberMarker"] = page["NextPartNumberMarker"]
        return found


class NoUploads:
    """None: Google and Azure forget what was begun after a week, and do not list it."""

    def under(self, _folder: str) -> Uploads:
        """None."""
        return []

    def abort(self, upload: Upload) -> None:
        """There is none."""


class UnseenUploads(NoUploads):
    """S3 without botocore; says once that nobody looks."""

    _said = False

    def under(self, folder: str) -> Uploads:
        """None."""
        if not self._said:
            self._said = True
            _log.warning(
                "multipart uploads that were cut off cannot be seen without the package botocore "
                "(pip install 'ckptkit[s3]')"
            )
        return super().under(folder)


class _Botocore:
    """Asks through botocore, which obstore does not need otherwise."""

    def __init__(self, top: Location, settings: Settings) -> None:
        self._top = top
        self._settings = settings

    def call(self, method: str, key: str, *, of_bucket: bool = False, **asked: Any) -> Any:
        with translated(below(self._top, key), self._settings.secrets):
            named = {} if of_bucket else {"Key": key}
            return getattr(self._client, method)(Bucket=self._top.path, **named, **asked)

    @cached_property
    def _client(self) -> Any:
        session = new_session(self._settings, str(self._top))
        return session.create_client("s3", **client_options(self._settings))


def begun_uploads(top: Location, settings: Settings) -> S3Uploads | NoUploads:
    """What knows of the uploads of a bucket that obstore reaches."""
    if top.scheme != "s3":
        return NoUploads()
    return S3Uploads(_Botocore(top, settings)) if find_spec("botocore") else UnseenUploads()
