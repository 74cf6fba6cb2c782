"""Whether a server compares a body with the hash that its signature holds: only asking tells."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from ckptkit.errors import CkptkitError
from ckptkit.storage.location import Location
from ckptkit.storage.objects.client import Transient
from ckptkit.storage.objects.failures import answer_of, translated
from ckptkit.storage.objects.s3_options import client_options, new_session
from ckptkit.storage.objects.settings import Settings

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
