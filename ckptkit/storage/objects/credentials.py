"""Credentials for S3, found at once or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ckptkit.errors import UsageError
from ckptkit.storage.objects.answers import no_credentials
from ckptkit.storage.objects.s3_options import new_session
from ckptkit.storage.objects.settings import Settings

if TYPE_CHECKING:
    from obstore.store import S3Credential

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
