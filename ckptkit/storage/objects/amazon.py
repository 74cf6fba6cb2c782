"""Amazon's own, which botocore knows: profiles, credentials, uploads that were begun, and whether a
server compares what it is sent with what was signed. Both engines go by the same.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.errors import CkptkitError, NotFoundError, UsageError
from ckptkit.storage.base.address import Location, Settings, checked_endpoint
from ckptkit.storage.objects.errors import (
    Transient,
    UnsupportedError,
    answer_of,
    below,
    translated,
    trouble,
)

if TYPE_CHECKING:
    from obstore.store import S3Credential

# The environment says where to get them: object_store does so itself, and renews them.
_NATIVE = (
    *("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
)
# obstore asks for credentials again then, and botocore renews those that are about to expire.
_LOOK_AGAIN = timedelta(minutes=10)
_FILES = {
    "AWS_CONFIG_FILE": "~/.aws/config",
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
}
_ANNOUNCED, _SENT = b"announced", b"sent body"
_CRC64 = "rfyTcSX5wyU="  # of what is announced, as S3 writes it
_MISMATCH = {
    *("XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"),
    *("BadDigest", "InvalidDigest"),
}

_log = logging.getLogger("ckptkit.storage")


def new_session(settings: Settings, where: str) -> Any:
    """A session of botocore, which reads `~/.aws`."""
    import botocore.session  # noqa: PLC0415 — costs time, and may not be there
    from botocore.exceptions import ProfileNotFound  # noqa: PLC0415

    # Keys that are passed count more than a profile that is.
    session = botocore.session.Session(profile=None if settings.access_key else settings.profile)
    with translated(where, settings.secrets):
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


def config_options(settings: Settings, **of_s3: object) -> dict[str, Any]:
    """The arguments of botocore's `Config`: one attempt, for it is repeated elsewhere."""
    from botocore.config import Config  # noqa: PLC0415

    # Who has an endpoint of their own seldom has a name in the DNS for each bucket too.
    style = "path" if settings.endpoint else "auto"
    if settings.path_style is not None:
        style = "path" if settings.path_style else "virtual"
    found: dict[str, Any] = {
        "retries": {"total_max_attempts": 1},
        "connect_timeout": settings.connect_timeout,
        "read_timeout": settings.stall_seconds,
        "max_pool_connections": max(10, settings.concurrency),
        "s3": {"addressing_style": style, **of_s3},
    }
    # Servers other than Amazon's do not understand these checksums; ETags and CRCs are checked.
    for name in ("request_checksum_calculation", "response_checksum_validation"):
        if name in Config.OPTION_DEFAULTS:
            found[name] = "when_required"
    return found


def new_client(settings: Settings, where: str, **of_s3: object) -> Any:
    """A client of botocore, with what else it is told of S3."""
    from botocore import UNSIGNED  # noqa: PLC0415
    from botocore.config import Config  # noqa: PLC0415

    signed = {"signature_version": UNSIGNED} if settings.anonymous else {}
    return new_session(settings, where).create_client(
        "s3",
        aws_access_key_id=settings.access_key,
        aws_secret_access_key=settings.secret_key,
        aws_session_token=settings.session_token,
        endpoint_url=settings.endpoint,
        region_name=settings.region,
        use_ssl=not settings.is_plain,
        config=Config(**config_options(settings, **of_s3), **signed),
    )


def aws_files() -> list[Path]:
    """The files with profiles, and with their credentials."""
    return [
        Path(os.path.expanduser(os.environ.get(variable) or file))  # noqa: PTH111 — `~` may have no home
        for variable, file in _FILES.items()
    ]


def profile_endpoint(settings: Settings, where: str) -> str | None:
    """The endpoint of the profile: botocore would go there, and obstore does not look."""
    # Whether there is any to be found, before botocore is imported, which takes a while.
    may_name_one = False
    for file in aws_files():
        with suppress(OSError):
            may_name_one |= b"endpoint_url" in file.read_bytes()
    if find_spec("botocore") is None or not may_name_one:
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


def s3_credentials(
    settings: Settings, where: str
) -> tuple[Callable[[], S3Credential] | None, str | None]:
    """What gives obstore credentials (None: it finds them), and the region of the profile.

    AccessError where there are none: object_store would look for a server that gives them, for
    seconds, and again for each request.
    """
    if settings.anonymous:
        return None, None
    if settings.access_key and settings.secret_key:
        # By itself it would take a session token of the environment for one of these keys.
        passed: S3Credential = {
            "access_key_id": settings.access_key,
            "secret_access_key": settings.secret_key,
            "token": settings.session_token,
            "expires_at": None,
        }
        return lambda: passed, None
    if settings.profile is None and any(os.environ.get(name) for name in _NATIVE):
        return None, None
    if find_spec("botocore") is None:
        if settings.profile is None and not os.environ.get("AWS_PROFILE"):
            return None, None
        raise UsageError("a profile needs the package botocore", hint="pip install 'ckptkit[s3]'")
    session = new_session(settings, where)
    with translated(where, settings.secrets):
        credentials = session.get_credentials()
    if credentials is None:
        raise trouble("no credentials", where)

    def renewed() -> S3Credential:
        # botocore renews them before they expire.
        now = credentials.get_frozen_credentials()
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.now(UTC) + _LOOK_AGAIN,
        }

    region: str | None = session.get_config_variable("region")
    return renewed, region


@dataclass(frozen=True, slots=True)
class Upload:
    """A multipart upload that was begun and neither completed nor aborted."""

    key: str
    identity: str
    modified: float
    """Unix seconds: when it was begun, or its newest part arrived."""
    size: int


class BotocoreBucket:
    """An S3 bucket as botocore reaches it, for what neither engine asks: obstore cannot, and s3fs
    has no public way to.
    """

    def __init__(self, top: Location, settings: Settings, *, sends_crc: bool = False) -> None:
        self._top = top
        self._settings = settings
        self._sends_crc = sends_crc
        self._making = threading.Lock()
        self._clients: dict[int, Any] = {}
        self._has_warned = False

    def uploads(self, folder: str) -> list[Upload]:
        """The uploads below `folder/` that were begun, with the bytes that were uploaded already.

        Without botocore nobody sees any, which is said once.
        """
        if find_spec("botocore") is None:
            if not self._has_warned:
                _log.warning(
                    "multipart uploads that were cut off cannot be seen without the package "
                    "botocore (pip install 'ckptkit[s3]')"
                )
            self._has_warned = True
            return []
        found = []
        for it in self._pages("list_multipart_uploads", folder, "Uploads"):
            key, identity = it["Key"], it["UploadId"]
            parts: list[dict[str, Any]] = []
            with suppress(NotFoundError):
                parts += self._pages("list_parts", key, "Parts", Key=key, UploadId=identity)
            # One that goes on for hours is not left over while parts of it still arrive.
            times = [it["Initiated"], *(part["LastModified"] for part in parts)]
            size = sum(part["Size"] for part in parts)
            found.append(Upload(key, identity, max(times).timestamp(), size))
        return found

    def abort(self, upload: Upload) -> None:
        """Abort one; missing is fine."""
        with suppress(NotFoundError):
            self._ask(
                "abort_multipart_upload", upload.key, Key=upload.key, UploadId=upload.identity
            )

    def compares_bodies(self, scratch: str) -> bool | None:
        """Whether the server refuses a body other than the one that its head announces: by a
        signature over plain http, otherwise by a CRC-64. None where there is no telling: only
        sending another one tells, to a name that nobody uses.
        """
        settings, where = self._settings, below(self._top, scratch)
        by_crc = not settings.is_plain
        if settings.anonymous or (by_crc and not self._sends_crc) or find_spec("botocore") is None:
            return None
        asked = {"Bucket": self._top.path, "Key": scratch, "Body": _ANNOUNCED}

        # The head is made of the one body, and then the other is sent: a server that takes it looks
        # at nothing.
        def announce(request: Any, **_: object) -> None:
            request.headers["x-amz-checksum-crc64nvme"] = _CRC64

        def exchange_body(request: Any, **_: object) -> None:
            request.body = _SENT

        try:
            with translated(where, settings.secrets):
                client = new_client(settings, where, payload_signing_enabled=not by_crc)
                events = client.meta.events
                if by_crc:
                    events.register("before-sign.s3.PutObject", announce)
                events.register("before-send.s3.PutObject", exchange_body)
                try:
                    client.put_object(**asked)
                    compares = False
                except Exception as error:
                    answer = answer_of(error)
                    if answer is None or answer.code not in _MISMATCH:
                        raise
                    compares = True
                # Who refuses the right one too does not know what is announced.
                if compares and by_crc:
                    events.unregister("before-send.s3.PutObject", exchange_body)
                    client.put_object(**asked)
                with suppress(Exception):
                    client.delete_object(Bucket=self._top.path, Key=scratch)
                return compares
        except UnsupportedError:
            return False
        except (CkptkitError, Transient) as error:
            # The next large upload asks again.
            _log.debug("%s: whether bodies are compared cannot be found out: %s", where, error)
            return None

    def _pages(self, method: str, at: str, field: str, **asked: Any) -> Iterator[dict[str, Any]]:
        if "Key" not in asked:
            asked["Prefix"] = f"{at}/" if at else ""
        while True:
            page = self._ask(method, at, **asked)
            yield from page.get(field, ())
            if not page.get("IsTruncated"):
                return
            markers = ("KeyMarker", "UploadIdMarker", "PartNumberMarker")
            following = {it: page[f"Next{it}"] for it in markers if f"Next{it}" in page}
            if not following:
                raise trouble("endless", below(self._top, at))
            asked |= following

    def _ask(self, method: str, at: str, **asked: Any) -> Any:
        where = below(self._top, at)
        with translated(where, self._settings.secrets):
            # Connections are not shared with a fork.
            process = os.getpid()
            with self._making:
                if process not in self._clients:
                    self._clients = {process: new_client(self._settings, where)}
                client = self._clients[process]
            return getattr(client, method)(Bucket=self._top.path, **asked)
